"""Rules of the repository that a program can check: structure, sizes, names, imports, configurations."""

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
VERBS = {"train", "plan", "forecast", "evaluate"}
LONGEST_FUNCTION = 150  # lines: a loop that reads from top to bottom
MOST_NAMES, MOST_IMPORTS = 50, 25  # of train(): local names, and modules of the project in train.py
ROOT_FILES = {f"{name}.py" for name in VERBS | {"command_line", "config", "errors"}}
ROOT_FILES |= {"run_train.sh", "run_tests.sh", "setup.sh", "pyproject.toml", ".gitignore", "LICENSE"}
ROOT_FILES |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"}
ROOT_FILES |= {"requirements.txt", "requirements-extras.txt"}
# Checkpoints hold tensors and plain data: who pickles says why here.
PICKLES = {
    "checkpoints/files.py",  # DCP's .metadata, through a list of what it may hold
    "parallelisms/peer_messages.py",  # what ranks send each other, through a list of what it may hold
    "tests/test_checkpoint.py",  # a crafted one
    "tests/test_peer_messages.py",  # crafted ones
    "tests/test_exact_resume.py",  # what torch's own tool makes of a checkpoint
    "benchmarks/attack.py",  # a crafted one
    "benchmarks/odd_inputs.py",  # cases, for the processes that check them
}
CONFIGURATIONS = sorted([*(ROOT / "train_configs").rglob("*.toml"), *(ROOT / "tests/configs").glob("*.toml")])
CONFIG_HEADER = ("Command:", "Hardware:", "Time:", "Memory:", "Score:")


@cache
def tracked_files() -> list[Path]:
    """What git tracks or is about to: everything it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return sorted({ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()})


@cache
def sources() -> dict[str, Path]:
    """Module name -> file of all Python of the project: "datasets.grid" -> datasets/grid.py."""
    modules = {}
    for path in tracked_files():
        if path.suffix == ".py":
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imported_names(tree: ast.AST) -> list[str]:
    """Every module that may be meant: `from a import b` gives a and a.b."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@cache
def import_graph() -> dict[str, set[str]]:
    """Module -> modules of the project that it imports, inside functions too."""
    modules = sources()
    return {
        module: {name for name in imported_names(parsed(path)) if name in modules} - {module}
        for module, path in modules.items()
    }


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set(), [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


# -- 1. who imports whom


def test_models_and_grid_know_nothing_of_ranks() -> None:
    """Nor does anything that they import."""
    modules, graph = sources(), import_graph()
    for module in [name for name in modules if name.startswith("models.")] + ["datasets.grid"]:
        for name in {module} | reachable(graph, module):
            imported = " ".join(imported_names(parsed(modules[name])))
            wrong = re.findall(r"\b(?<!\.)(?:parallelisms|training|torch\.distributed)\b", imported)
            assert not wrong, f"{module} imports {wrong} through {name}: a model never asks with whom it runs"


ORDER: str = "errors config command_line jobs models datasets parallelisms verification checkpoints training "
ORDER += "planning traces"


@pytest.mark.parametrize("folder", [*ORDER.split(), *sorted(VERBS), "scripts"])
def test_a_folder_imports_only_from_those_before_it(folder: str) -> None:
    """Entry points and scripts come last: nothing imports them, nor they each other."""
    names = [*ORDER.split(), folder]
    before = names[: names.index(folder) + 1]
    for module, path in sources().items():
        if module.partition(".")[0] == folder:
            tops = {name.partition(".")[0] for name in imported_names(parsed(path))}
            wrong = (tops & {name.partition(".")[0] for name in sources()}) - set(before)
            assert not wrong, f"{module} imports {sorted(wrong)}"


def test_no_import_cycles() -> None:
    graph = import_graph()
    cycles = [module for module in graph if module in reachable(graph, module)]
    assert not cycles, f"these modules import themselves through others: {cycles}"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in sources().values()} - {ROOT, ROOT / "scripts"}  # files to copy
    bare = [name_of(folder) for folder in folders if not (folder / "__init__.py").is_file()]
    assert not bare, f"without __init__.py: {bare}"


def test_no_root_name_hides_another_package() -> None:
    """`profiling` joins the standard library in Python 3.15; `pip install -e .` lists this project itself."""
    roots = {module.partition(".")[0] for module in sources()}
    others = {name for name, owners in packages_distributions().items() if set(owners) != {"rossby"}}
    taken = sys.stdlib_module_names | {"profiling"} | others
    assert not roots & taken, (
        f"these names are taken by the standard library or an installed package: {roots & taken}"
    )


# -- 2. sizes and names


def test_functions_can_be_read() -> None:
    """Nine tenths have 45 lines or fewer, and none is longer than a page or two."""
    lengths = {
        f"{name_of(path)}: {node.name}": (node.end_lineno or 0) - node.lineno
        for path in sources().values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef)
    }
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= 45
    assert not (long := [name for name, length in lengths.items() if length > LONGEST_FUNCTION]), long


def test_train_stays_readable() -> None:
    """Not by its lines, which can be packed: by what a reader has to keep in mind."""
    tree = parsed(ROOT / "train.py")
    train = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train")
    names = {n.id for n in ast.walk(train) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert len(names) <= MOST_NAMES, sorted(names)
    imports = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} & sources().keys()
    assert len(imports) <= MOST_IMPORTS, sorted(imports)
    loop = next(node for node in ast.walk(train) if isinstance(node, ast.While))
    assert (loop.end_lineno or 0) - loop.lineno < 45


def test_the_root_has_what_the_layout_lists() -> None:
    """A wheel was committed there, and a link to an environment."""
    files = {path.name for path in tracked_files() if path.parent == ROOT}
    assert files <= ROOT_FILES, files - ROOT_FILES


# Who calls backward, beside tests of single techniques: the step, and what measures kernels alone.
BACKWARD = {
    "parallelisms/parallelize.py",
    "planning/dry_run.py",
    "benchmarks/gpu.py",
    "benchmarks/step_time.py",
}


def test_there_is_one_training_step() -> None:
    """Whatever measures or tests a step calls train_step; its peers' steps are their own."""
    for path in sources().values():
        calls = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
        found = [n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "backward"]
        if found and not name_of(path).startswith("tests/test_"):
            assert name_of(path) in BACKWARD, f"{name_of(path)}:{found[0]}: call training.step.train_step"


# -- 7. and 8. installing and storing


def locked(file: str) -> dict[str, str]:
    """Name -> version of the lines of a lock, all of which are exact."""
    lines = [line.partition("  #")[0] for line in (ROOT / file).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line.strip() and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), f"{file}: write name==version"
    return {canonicalize_name(name): version for name, version in pairs}


def declared() -> dict[str, list[Requirement]]:
    """Extra -> its requirements; "" has the dependencies of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def test_the_locks_are_those_of_the_declared_requirements() -> None:
    lock = locked("requirements.txt")
    extras = lock | locked("requirements-extras.txt")
    direct = {canonicalize_name(requirement.name) for requirement in declared()[""]}
    assert len(direct) <= 20
    assert set(list(lock)[: len(direct)]) == direct, "they stand first in requirements.txt"
    for requirement in chain.from_iterable(declared().values()):
        if requirement.name not in ("rossby", "earth2studio"):  # the latter brings a hundred packages
            version = extras[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), (str(requirement), version)


def test_every_import_is_a_declared_requirement() -> None:
    """Pillow comes with matplotlib, crc32c with numcodecs."""
    names = {r.name.lower().replace("-", "_") for r in chain.from_iterable(declared().values())}
    names |= {"pil", "crc32c"}
    for name, path in sources().items():
        if name.split(".")[0] not in ("tests", "benchmarks"):
            roots = {found.split(".")[0] for found in imported_names(parsed(path))}
            foreign = {root for root in roots if root not in sys.stdlib_module_names and not is_ours(root)}
            assert {root.lower() for root in foreign} <= names, (name, foreign)


def is_ours(root: str) -> bool:
    return (ROOT / root).is_dir() or (ROOT / f"{root}.py").is_file()


def test_no_pickled_code() -> None:
    for path in sources().values():
        tree = parsed(path)
        pickles = {"pickle", "cloudpickle", "dill", "joblib"} & set(imported_names(tree))
        torch_io = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("load", "save")]
        pickles |= {ast.unparse(n) for n in torch_io if ast.unparse(n.value) == "torch"}
        assert not pickles or name_of(path) in PICKLES, f"{name_of(path)} uses {pickles}: store plain tensors"


# -- weights, configurations, places


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_train_configs_say_what_they_cost(path: Path) -> None:
    header = re.match(r"(?:#.*\n)*", path.read_text())
    missing = [word for word in CONFIG_HEADER if not header or word not in header[0]]
    assert not missing, f"{name_of(path)}: its opening comment lacks {missing}"


def test_no_file_names_a_place_on_this_machine() -> None:
    folders = "|".join(("work", "root", "home", "Users"))
    place = re.compile(rf"(?<![\w.:/\-])/({folders})/\w")  # preceded by more, it is a URL or a relative path
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        if match := place.search(text):
            line = text.count("\n", 0, match.start()) + 1
            pytest.fail(f"{name_of(path)}:{line} names {match[0]}...: nobody else has that folder")


def test_the_first_page_is_short_and_its_sizes_are_true() -> None:
    """README.md: a sample's way in at most 2,000 lines; what train.py imports, the library and its tests."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    files = sources()
    lines = {module: len(path.read_text().splitlines()) for module, path in files.items()}
    tour = re.findall(r"`([\w/]+)\.py`", text.partition("## The code")[2].partition("\nThese files")[0])
    assert len(tour) > 9 and sum(lines[name.replace("/", ".")] for name in tour) <= 2000
    imported = {name for name in reachable(import_graph(), "train") if name in lines} | {"train"}
    tests = {name for name in lines if name.startswith("tests.")}
    library = set(lines) - tests - {name for name in lines if name.startswith("benchmarks.")}
    counted = [len(imported), *(sum(lines[name] for name in names) for names in (imported, library, tests))]
    said = [
        int(number.replace(",", "")) for number in re.findall(r"\d+,?\d+", text.partition("2,000 lines; ")[2])
    ]
    assert said[:4] == pytest.approx(counted, rel=0.03)
    missing = [
        f for f in {path.parent.name for path in files.values() if path.parent != ROOT} if f"{f}/" not in text
    ]
    assert not missing, f"README.md names no {missing}"
