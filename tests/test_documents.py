"""Commands of documents: options exist, and they run or say what they need; toys of CONTRIBUTING.md."""

import dataclasses
import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

import evaluate
import forecast
import plan
from command_line import load_config, split_options
from config import SECTIONS
from tests.started_jobs import ROOT, records, run_program
from tests.test_house import tracked_files

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *(ROOT / "docs").glob("*.md"),
]
PYTHON = ".venv/bin/python"
STARTS = ("./run_train.sh", "./run_tests.sh", ".venv/bin/", "benchmarks/", "sbatch", "srun", "python ")
OPTIONS = {"forecast.py": forecast.OPTIONS, "evaluate.py": evaluate.OPTIONS, "plan.py": plan.OPTIONS}
OPTIONS["scripts/sweep.py"] = dict(trials=20, folder="outputs/sweep")
DEMO = "train_configs/demo.toml"
BEGUN = (
    "era5_try.toml",
    "era5_baseline.toml",
    "mine.toml",
    "task.sh",
    "F",
)  # that the reader of a page writes
NOT_OURS = ("ruff", "pyright", "tensorboard", "srun")  # whose options are theirs


@dataclass(frozen=True)
class Command:
    page: str
    text: str  # without its comment
    comment: str
    output: tuple[str, ...] = ()  # that the page shows below it
    inline: bool = False  # in a sentence or a table, which says the rest

    @property
    def words(self) -> list[str]:
        """Without variables before it, what a reader is to fill in ("..."), and the shell's own signs."""
        text = re.sub(r"^((\w+=\S*|until) )+|\$ft|; do .*| &$", "", self.text)
        return [word for word in shlex.split(text) if word != "..."]


def commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page)]


def commands_of(page: Path) -> list[Command]:
    """Those of fenced blocks, a continued line as one, and those in single backquotes."""
    text, found = page.read_text(), []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language:
            continue  # Python, TOML: a sketch of what a user writes
        lines = re.sub(r" *\\\n *", " ", block).splitlines()
        for number, line in enumerate(lines):
            text_of, _, comment = line.removeprefix("$ ").partition(" #")
            if is_command(text_of):
                output = takewhile(lambda shown: not is_command(shown), lines[number + 1 :])
                found.append(Command(page.name, text_of.strip(), comment.strip(), tuple(output)))
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    quoted = [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", outside)]
    return found + [
        Command(page.name, each, "", inline=True) for each in quoted if " " in each and is_command(each)
    ]


def is_command(text: str) -> bool:
    return re.sub(r"^((\w+=\S*|until) )+", "", text).startswith(STARTS)


def check_options(words: list[str]) -> None:
    """ConfigError, SystemExit or an assertion: the program would refuse these words."""
    words = [DEMO if word in BEGUN else word for word in words]
    files = [word.removeprefix("./") for word in words if word.endswith((".py", ".sh", ".sbatch"))]
    assert all((ROOT / file).is_file() for file in files), files
    modules = [name for option, name in pairwise(words) if option == "-m"]
    assert all(importlib.util.find_spec(name) for name in modules if not files), modules
    if words[-2:-1] == ["install"]:
        assert words[-1] in (ROOT / "requirements-extras.txt").read_text(), words
    if not files:
        assert modules or Path(words[0]).name in NOT_OURS, words
        return
    script, rest = files[0], words[[word.endswith(files[0]) for word in words].index(True) + 1 :]
    if script.startswith("benchmarks/"):
        # Options of a benchmark stand in its source, or in that of the module that it starts.
        source = "".join(path.read_text() for path in ROOT.glob(f"{script.rpartition('.')[0]}.*"))
        for word in rest:
            named = (f'"{word}"', f'"{word[2:]}":', f"{word[2:]}=")  # of argparse, or of results_file.parse
            assert not word.startswith("--") or any(each in source for each in named), (script, word)
    elif script != "run_tests.sh" and "--help" not in rest:
        _, rest = split_options(rest, OPTIONS.get(script, {}))
        load_config([*(["--job.config_file"] * (script == "scripts/sweep.py")), *rest])


@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_options_of_every_command_exist(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown_refusal = any(line.startswith("rossby: ") for line in command.output)
    if not shown_refusal:
        check_options(command.words)


def is_planning(command: Command) -> bool:
    return command.words[:2] == [PYTHON, "plan.py"]


CHEAP = [command for command in commands() if "needs " not in command.comment and not command.inline]


def test_what_is_not_run_here_says_what_it_needs() -> None:
    """Commands without "needs": the plans, and what run_train.sh answers at once."""
    others = [command for command in CHEAP if not is_planning(command)]
    at_once = {"./run_train.sh --help", "./run_train.sh --training.stepz 3"}
    assert {command.text for command in others} == at_once, "say what it needs, or run it here"


PLANS = {command.text: command.output for command in CHEAP if is_planning(command)}


@pytest.mark.parametrize("text", sorted(PLANS))
def test_plans_of_the_documents(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What the pages show is printed. In this process, without the seconds that it takes to start."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "1")  # which plan.py sets
    monkeypatch.setattr(sys, "argv", shlex.split(text)[1:])
    try:
        plan.main()
    except SystemExit as ended:
        assert ended.code in (0, 1)  # 1: it does not fit
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 5
    assert [line for line in PLANS[text] if line not in printed] == []


@pytest.mark.parametrize(
    "command", [c for c in CHEAP if not is_planning(c)], ids=lambda command: command.text
)
def test_what_is_answered_at_once(command: Command) -> None:
    done = run_program(*shlex.split(command.text), NGPU="1")
    if command.output:
        assert done.stderr.splitlines() == list(command.output)
    else:
        assert done.returncode == 0 and "training.steps" in done.stdout


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), (page.name, link)


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.name)
def test_anyone_can_run_a_shipped_configuration(path: Path) -> None:
    """Simulated weather, a public URL, or regridded ERA5, in place of which the README names random data."""
    config = load_config(["--job.config_file", str(path)])
    readme = (ROOT / "README.md").read_text()
    (row,) = [line for line in readme.splitlines() if line.startswith("| `") and f"`{path.name}`" in line]
    assert config.data.path == "simulated" or "://" in config.data.path or "--data.path random" in row


def test_keys_beside_those_of_other_trainers_are_ours() -> None:
    """docs/coming_from.md, the middle column: `section.key`, and keys that follow one, of its section."""
    known = {section: {key.name for key in dataclasses.fields(cls)} for section, cls in SECTIONS.items()}
    found = 0
    for line in (ROOT / "docs/coming_from.md").read_text().splitlines():
        ours = line.split(" | ")[1] if line.startswith("| `") else ""
        section = ""
        for name in re.findall(r"`([a-z_.0-9]+)(?: = [^`]*)?`", ours):
            if name.endswith(".py") or (not section and "." not in name):
                continue  # a program, the value of a list
            section, key = name.split(".") if "." in name else (section, name)
            assert key in known[section] or key == "toa_incident_solar_radiation", line
            found += 1
    assert found > 80


def test_every_page_is_looked_at() -> None:
    pages = {path for path in tracked_files() if path.suffix == ".md" and ".github" not in path.parts}
    assert pages - {*PAGES} == {ROOT / "CHANGELOG.md"}
    assert len(commands()) > 40


# -- additions


Edits = dict[str, tuple[str, str]]  # file -> text, and what takes its place; "": a new file

LOSS: Edits = {
    "config.py": ('loss: Literal["mse",', 'loss: Literal["quartic", "mse",'),
    "training/losses/pointwise.py": (
        '    "mse": SQUARE,\n',
        '    "mse": SQUARE,\n    "quartic": Penalty(4, lambda e: e**4, lambda e: e.pow_(3).mul_(4)),\n',
    ),
}
OPTIMIZER: Edits = {
    "config.py": ('Literal["AdamW",', 'Literal["Sign", "AdamW",'),
    "training/optimizers/build.py": (
        '        case "LAMB":\n',
        '        case "Sign":\n            from training.optimizers.sign import Sign\n\n'
        '            return Sign(groups, {})\n        case "LAMB":\n',
    ),
    "training/optimizers/sign.py": (
        "",
        """
import torch

from training.optimizers.shards import local


class Sign(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                rate = group["lr"] * (1 - getattr(self, "found_inf", 0.0))
                local(p).sub_(local(p.grad).sign() * rate)
""",
    ),
}
LOGGER: Edits = {
    "config.py": ('tuple[Literal["tensorboard",', 'tuple[Literal["text", "tensorboard",'),
    "training/loggers/text_run.py": (
        "",
        """
class Logger:
    def __init__(self, config, resume_step, written):
        self.file = (config.dump_folder / "losses.txt").open("a")

    def log(self, record):
        self.file.write(f"{record['step']}\\n")

    def close(self):
        self.file.close()
""",
    ),
}
OPTION: Edits = {
    "config.py": (
        "    qk_norm: bool",
        '    doubled: bool = option(False, "ViT: twice the output.")\n    qk_norm: bool',
    ),
    "models/registry.py": ('VIT_KEYS += ("qk_norm",', 'VIT_KEYS += ("doubled", "qk_norm",'),
    "models/vit.py": (
        "        self.qkv = nn.Linear(dim",
        "        self.doubled = model.doubled\n        self.qkv = nn.Linear(dim",
    ),
}


def test_a_toy_of_each_runs(tmp_path: Path) -> None:
    for path in tracked_files():
        name = path.relative_to(ROOT)
        if name.parts[0] not in ("tests", "benchmarks", "docs", ".ci"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(path.read_bytes())
    for edits, most in ((LOSS, 2), (OPTIMIZER, 3), (LOGGER, 2), (OPTION, 3)):
        assert len(edits) <= most
        for name, (old, new) in edits.items():
            text = (tmp_path / name).read_text() if old else ""
            assert text.count(old) == 1 or not old, (name, old)
            (tmp_path / name).write_text(text.replace(old, new) if old else new)
    words = """
        --data.path random --data.variables ["2m_temperature"] --data.levels [] --data.static_variables []
        --data.forcings [] --data.grid_shape [8,16] --data.train_period ["2020-01-01","2020-01-20"]
        --data.validation_period [] --validation.enable false --job.dump_folder run --training.steps 3
        --model.patch_size [2,2] --model.dim 16 --model.num_heads 2 --model.num_layers 2 --model.doubled
        --training.loss quartic --optimizer.name Sign --metrics.loggers ["text"] --metrics.log_freq 1
    """.split()
    done = run_program(sys.executable, "train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert len(losses) == 3 and all(loss > 0 for loss in losses)
    assert (tmp_path / "run/losses.txt").read_text().split() == ["1", "2", "3"]
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 1  # of states that the optimizer lacks
