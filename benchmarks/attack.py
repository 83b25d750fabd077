"""Attack the program from outside, and count its responses.

    .venv/bin/python benchmarks/attack.py [--kind data] [--named TEXT] [--cases 60] [--seed 0] [--jobs 2]
    .venv/bin/python benchmarks/attack.py scores --seeds 100 [--first 0] [--seed S]     evaluate.py
    .venv/bin/python benchmarks/attack.py sources --seeds 100 [--first 0] [--seed S]    datasets/

Bad input has to end in one line and exit code 2; no byte of a run's folder may change where nothing was to be
written. "other" is an answer of several lines, or with another exit code. Cases are made from the types and
ranges of config.py, variants of an archive, damaged files, and the lists of attack.toml; --cases: so many,
drawn. What a run meets while it trains: chaos.py.

sources, scores: random, valid, unusual inputs (odd_inputs.py). What datasets/ reads, converts, and converts
after it was killed, is compared with what was written; what evaluate.py writes with float64 code from the
definitions (score_definitions.py). Refusals are printed: one of what is neither ambiguous nor
unsupported is a defect, too.

Commands are forks of a process that has imported torch. Ends with 1 when anything is not as it should be.
"""

import atexit
import dataclasses
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import tomli_w
import xarray as xr
from numcodecs import LZ4, Blosc, Zlib, Zstd

from benchmarks.odd_inputs import HOUR, VARIABLES, Fields, base, generate_scores, generate_source
from benchmarks.odd_inputs import Case as Evaluation
from benchmarks.results_file import ROOT, parse, record
from benchmarks.score_definitions import expected
from checkpoints.files import crc32_of, read_manifest, write_manifest
from command_line import answer_early
from config import SECTIONS
from errors import DataError, one_line_errors
from jobs.durable_files import read_records
from tests.sample_archives import weatherbench
from tests.test_config import CASES
from tests.test_identity import NAMES, waves
from training.config_checks import check

LINE, RIGHT, TRACEBACK, HUNG = "one line", "right", "traceback", "hang"  # verdicts
SILENT, OTHER = "silently wrong", "other"
BAD = (SILENT, TRACEBACK, HUNG, OTHER)
VERBS = {name: name for name in ("train", "forecast", "evaluate", "plan")}
VERBS |= {"checks": "planning.start_checks"}
LISTS = tomllib.loads((ROOT / "benchmarks/attack.toml").read_text())
RUN_TRAIN, U, V = str(ROOT / "run_train.sh"), *NAMES
LIMIT = 60.0  # seconds of a command
MOST_BYTES = 8 * 2**30  # of memory a case may ask for: one that asks for more meets a MemoryError
LEAVE_SECONDS, TAIL = 3.0, 600  # for processes of a case to end after it; characters shown of its output
# A line of a run's log, a conversion that begins, or a progress bar: no answer, and nothing against one.
LOGGED = re.compile(r"\d\d:\d\d:\d\d  |rossby: .*: converting \d+ dates|.*\d+%\||\d+step \[|rank +\d+: ")
Answer = tuple[str, str]  # a verdict, and why


# -- commands in processes of their own


class Ended(NamedTuple):
    code: int | None  # None: it did not end
    stdout: str
    stderr: str
    left: bool  # processes were left behind


def environment(more: dict[str, str]) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("NGPU", "NNODES", "WORLD_SIZE")}
    clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return clean | {"ROSSBY_PYTHON": sys.executable} | more


def run_forked(function: Callable, arguments: tuple, variables: dict[str, str], limit: float) -> Ended:
    """Run a function in a fork of a process that has imported torch. Processes that are left some seconds
    after its end are counted and killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"{folder}/{name}" for name in ("stdout", "stderr")]
        about = (function, arguments, environment(variables), outputs)
        process = multiprocessing.get_context("forkserver").Process(target=enter, args=about)
        process.start()
        process.join(limit)
        code, pid, left = process.exitcode, process.pid or 0, True
        deadline = time.monotonic() + LEAVE_SECONDS * (code is not None)
        while left and time.monotonic() < deadline:
            try:
                os.killpg(pid, 0)
                time.sleep(0.02)
            except ProcessLookupError:
                left = False
        for child in [*descendants(pid), pid] if left else []:  # ranks have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        process.join()
        stdout, stderr = (Path(path).read_text(errors="replace") for path in outputs)
        return Ended(code, stdout, stderr, left and code is not None)


def enter(function: Callable, arguments: tuple, variables: dict[str, str], outputs: list[str]) -> None:
    """Run in a fork, with variables, outputs and a session of its own; what is returned is the exit code."""
    gc.freeze()  # or every process collects, and so copies, what all of them share
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    for descriptor, path in enumerate((os.devnull, *outputs)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    try:
        sys.exit(function(*arguments))
    finally:
        atexit._run_exitfuncs()


def run_words(*words: str) -> None:
    """Run a command of VERBS as `python train.py ...` does, or become another program."""
    if words[0] not in VERBS:
        os.execvp(words[0], words)
    sys.argv = [f"{words[0]}.py", *words[1:]]
    module = import_module(VERBS[words[0]])
    answer_early(module.__doc__, check if words[0] != "plan" else None, getattr(module, "OPTIONS", None))
    module.main(words[1:]) if words[0] == "checks" else module.main()


def descendants(pid: int) -> list[int]:
    """Return the processes below this one, whichever thread started them and session they are of."""
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, task.read_text().split())
    return children + [pid for child in children for pid in descendants(child)]


def contents(folder: Path | None, but: tuple[str, ...] = ("\0",)) -> dict[str, bytes]:
    """Return the bytes of the files in a folder but those whose names begin with these words."""
    paths = [path for path in folder.rglob("*") if path.is_file()] if folder else []
    files = {str(path.relative_to(folder)): path for path in paths}  # type: ignore[arg-type]
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(but)}


# -- bad input


Right = Callable[[Ended], Answer]


@dataclass
class Case:
    """words: a command of VERBS and its arguments, or another program and its arguments."""

    kind: str
    name: str
    words: list[str]
    right: Right
    environment: dict[str, str] = field(default_factory=dict)
    limit: float = LIMIT
    prepare: Callable[[], object] = lambda: None
    keeps: Path | None = None  # a run's folder of which no byte may change
    call: tuple[Callable, tuple] | None = None  # in the place of words: a function and its arguments


def refused(*words: str, code: int = 2) -> Right:
    """Expect one line with all the words, nothing else that is no log, and this exit code."""

    def judge(ended: Ended) -> Answer:
        if ended.code == 0:
            return SILENT, "accepted"
        if ended.code != code:
            return OTHER, f"exit code {ended.code}, not {code}"
        lines = [line for line in ended.stderr.splitlines() if line.strip() and not LOGGED.match(line)]
        answers = [line for line in lines if line.startswith("rossby: ")]
        if len(lines) != 1 or answers != lines:
            return OTHER, f"{len(lines)} lines, {len(answers)} of them an answer"
        missing = [word for word in words if word not in lines[0]]
        return (OTHER, f"does not say {missing[0]!r}") if missing else (LINE, "")

    return judge


def runs(check: Callable[[], str] = lambda: "", log: str = "") -> Right:
    """Expect exit code 0. check: what is wrong with what was written; log: pattern of a line."""

    def judge(ended: Ended) -> Answer:
        if ended.code:
            return OTHER, f"exit code {ended.code}, not 0"
        if log and not re.search(log, ended.stderr):
            return SILENT, f"nothing says {log!r}"
        wrong = check()
        return (SILENT, wrong) if wrong else (LINE if log else RIGHT, "")

    return judge


def either(*rights: Right) -> Right:
    """Expect any of these; where none fits, the answer is the first one's."""

    def judge(ended: Ended) -> Answer:
        answers = [right(ended) for right in rights]
        good = [answer for answer in answers if answer[0] not in BAD]
        silent = [answer for answer in answers if answer[0] == SILENT]
        return (good or silent or answers)[0]

    return judge


def run_case(case: Case) -> tuple[Case, Answer, Ended]:
    case.prepare()
    before, (function, arguments) = contents(case.keeps), case.call or (run_words, tuple(case.words))
    ended = run_forked(function, arguments, case.environment, case.limit)
    # The verdict: an end, then its words, then the files.
    if ended.code is None:
        answer = HUNG, f"still there after {case.limit:g} s"
    elif "Traceback (most recent" in ended.stderr + ended.stdout:
        answer = TRACEBACK, "traceback"
    elif ended.left:
        answer = HUNG, "processes were left"
    else:
        answer = case.right(ended)
        if answer[0] in BAD and (ended.code < 0 or "terminate called" in ended.stderr):
            answer = TRACEBACK, f"ended by signal {-ended.code}"
    after = contents(case.keeps)
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    return case, (SILENT, f"changed {', '.join(changed)}") if changed else answer, ended


STEPS, MORE = 8, 12  # of the run that is there, and of the one that goes on


@dataclass
class Stage:
    """Paths below one scratch folder; `losses` are of the run that goes on undisturbed to MORE steps."""

    scratch: Path
    data: Path
    config: Path
    run: Path
    losses: dict[int, float]

    def options(self, folder: Path | str, *more: str) -> list[str]:
        return ["--job.config_file", str(self.config), "--job.dump_folder", str(folder), *more]

    def longer(self, folder: Path | str) -> list[str]:
        return self.options(folder, "--training.steps", str(MORE))

    def fresh(self, name: str) -> Path:
        return self.scratch / "cases" / re.sub(r"[/ ]", "-", name)[:100]

    def copying(self, target: Path, change: Callable[[Path], object] = id) -> Callable[[], None]:
        def prepare() -> None:
            shutil.copytree(self.run, target)
            change(target)

        return prepare

    def resumed(self, name: str, change: Any, log: str = "", also: Callable[[], str] = str) -> Case:
        """Return a case that ends with the losses of the undisturbed run; also(): what else is wrong."""
        folder = self.fresh(f"resumed {name}")

        def wrong() -> str:
            ours = losses(folder)
            steps = [n for n in range(STEPS + 1, MORE + 1) if ours.get(n) != self.losses[n]]
            return also() or (f"loss of step {steps[0]} is {ours.get(steps[0])}" if steps else "")

        words, prepare = ["train", *self.longer(folder)], self.copying(folder, change)
        return Case("files", f"resume: {name}", words, runs(wrong, log=log), prepare=prepare)


def losses(folder: Path) -> dict[int, float]:
    """Return step -> loss, of the lines of metrics.jsonl that a case has not damaged."""
    records = read_records(folder / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def build(scratch: Path) -> Stage:
    data, config, on = Path(weatherbench(scratch, waves())), scratch / "tiny.toml", scratch / "on"
    LISTS["run"]["data"]["path"] = str(data)
    config.write_text(tomli_w.dumps(LISTS["run"]))
    waves().to_netcdf(scratch / "waves.nc", engine="h5netcdf")
    stage = Stage(scratch, data, config, scratch / "run", {})
    first = [Case("", verb, [verb, *stage.options(stage.run)], runs(), limit=300) for verb in [*VERBS][:3]]
    longer = Case("", "on", ["train", *stage.longer(on)], runs(), limit=300, prepare=stage.copying(on))
    for case in [*first, longer]:
        _, answer, ended = run_case(case)
        assert answer[0] == RIGHT, ended.stderr
    stage.losses = losses(on)
    assert set(stage.losses) == set(range(1, MORE + 1)), stage.losses
    return stage


def keys(stage: Stage, rng: random.Random) -> Iterator[Case]:
    """Give each key some of its bad values, the commands in turn; then misspelt keys, files and options."""

    def draw(values: Any, number: int) -> list:
        return rng.sample([*values], min(number, len(values)))

    number, paths = itertools.count(), {"job.config_file": stage.config, "job.dump_folder": stage.run}
    texts = {name: (text, "") for name, text in LISTS["files"].items()}
    texts |= {f"5000 x {c}": (f"[data]\nlevels = {c * 5000}", "") for c in "[9"}
    for section, cls in SECTIONS.items():
        fields = [f"{section}.{key.name}" for key in dataclasses.fields(cls)]
        wrong = [draw([value for name, value in CASES if name == key], 4) for key in fields]
        values = [(key, value, key) for key, chosen in zip(fields, wrong, strict=True) for value in chosen]
        for key, value, named in [*values, *((key + "q", "1", key) for key in draw(fields, 2))]:
            verb = ("train", "forecast", "evaluate", "plan")[next(number) % 4]
            options = [f"--{name}={path}" for name, path in paths.items() if name != key]
            options += ["--cluster", "a100x8"] if verb == "plan" else []
            right = refused(named.partition(".")[2])
            words = [verb, *options, f"--{key}={value}"]
            yield Case("keys", f"{verb} {key} = {value[:40]!r}", words, right, keeps=stage.run)
        name = draw(fields, 1)[0].partition(".")[2]
        texts[f"a table for {section}.{name}"] = (f"[{section}]\n{name} = {{a = 1}}", name)
    for name, (text, word) in texts.items():
        path = stage.scratch / f"{name.replace(' ', '-')}.toml"
        path.write_text(text)
        words = ["train", "--job.config_file", str(path), "--job.dump_folder", str(stage.run)]
        yield Case("keys", f"a TOML file, {name}", words, refused(word), keeps=stage.run)
    # Options of the commands that are none, or have no value of one, and variables of run_train.sh.
    os.mkfifo(stage.scratch / "fifo")
    (stage.scratch / "empty").mkdir()
    paths = {"{config}": stage.config, "{data}": stage.data, "{scratch}": stage.scratch}
    for verb, listed in LISTS["options"].items():
        for number, text in enumerate(listed):
            for name, path in paths.items():
                text = text.replace(name, str(path))
            words = text.split(" ")
            given = [name for name in ("--job.config_file", "--job.dump_folder") if name in text]
            pairs = zip(*[iter(stage.options(stage.run))] * 2, strict=True)
            options = [word for pair in pairs if pair[0] not in given for word in pair]
            # Every fifth is a process of its own, as the caller starts it.
            alone = number % 5 == 0 and "\0" not in text
            start = [sys.executable, f"{verb}.py"] if alone else [verb]
            right = refused("forecast" if "--forecast.path" in text else "")
            yield Case("keys", f"{verb} {text!r}", [*start, *options, *words], right, keeps=stage.run)
    for text in LISTS["environment"]["variables"]:
        variables = dict(word.split("=", 1) for word in text.split())
        name, words = [*variables][-1], [RUN_TRAIN, *stage.longer(stage.run)]
        right = refused("" if name in ("NGPU", "NNODES") else name)
        yield Case("keys", f"run_train.sh with {text}", words, right, variables, keeps=stage.run)


def combinations(stage: Stage, _: random.Random) -> Iterator[Case]:
    """Use the run's own folder, in which nothing may change; huge values use a larger grid."""
    large, listed = stage.scratch / "large.zarr", [*LISTS["combinations"]["refused"]]
    degrees = [f"{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline")]
    degrees += ["data_parallel_shard_degree", "data_parallel_replicate_degree"]
    for name, degree, ranks in itertools.product(degrees, (2, 3, 5), (2, 3, 4)):
        listed += [[ranks, f"p.{name} {degree}", "degree"]] if ranks % degree else []
    axes: Any = {"latitude": np.linspace(89.9, -89.9, 512), "longitude": np.arange(1024) * 360 / 1024}
    zeros = xr.zeros_like(waves().isel(time=slice(70)).reindex(axes, method="nearest"))
    write("zarr2", zeros, large)
    for ranks, text, word in [*listed, *LISTS["combinations"]["huge"]]:
        huge = [ranks, text, word] in LISTS["combinations"]["huge"]
        words = re.sub(r"(^| )p\.", r"\1parallelism.", text).split()
        words = [f"--{word}" if re.match(r"[a-z_0-9]+\.", word) else word for word in words]
        verb, folder = "checks" if huge or ranks > 1 else "train", stage.fresh(text) if huge else stage.run
        options = stage.options(folder, *(["--data.path", str(large)] if huge else []), *words)
        about: Any = {"environment": {"NGPU": str(ranks)}, "keeps": None if huge else stage.run}
        yield Case("combinations", f"{ranks} ranks {text}", [verb, *options], refused(word), **about)


CODECS = {"blosc": Blosc(), "zlib": Zlib(), "zstd": Zstd(checksum=True), "lz4": LZ4(), "raw": None, "own": ""}
FORMATS = ("zarr2", "zarr3", "netcdf4", "netcdf3")
WAYS = ("gone", "empty", "half", "all but one byte")
DATES = [str(date)[:19] for date in waves().time.values]


def write(format: str, ds: xr.Dataset, path: Path, **encoded: Any) -> None:
    """Write fields, a chunk a date. encoded: of Zarr's fields."""
    if format.startswith("netcdf"):
        ds.to_netcdf(path, engine="scipy" if format == "netcdf3" else "h5netcdf")
        return
    encoding = {n: {"chunks": (1, *ds[n].shape[1:])} | encoded for n in ds.data_vars if ds[n].ndim > 2}
    version: Any = 2 if format == "zarr2" else 3
    ds.to_zarr(path, zarr_format=version, encoding=encoding, consolidated=version == 2)


def data(stage: Stage, rng: random.Random) -> Iterator[Case]:
    """Train on archives that mean nothing, or are damaged: `sources` has those that can be understood."""
    short = ["--training.steps", "3", "--checkpoint.enable=false", "--checkpoint.keep_best="]
    both, ds, dates = either(refused(U), runs(log=U)), waves(), np.arange(80)

    def case(name: str, make: Callable[[Path], object], right: Right | str, options: str = "") -> Case:
        folder = stage.fresh(f"data {name}")

        def prepare() -> None:
            folder.mkdir(parents=True)
            make(folder / "data")

        path = ["--data.path", str(folder / "data")]
        words = ["train", *stage.options(folder / "run", *short, *path, *options.split())]
        judge = refused(right) if isinstance(right, str) else right
        return Case("data", name, words, judge, prepare=prepare)

    # Fields with values, units and dimensions that mean nothing; the right answer is a word of the line.
    infinite = ds.copy(deep=True)
    infinite[U][20, 2, :2] = np.inf
    outside = runs(log=f"{U}: .*outside -120 to 120 m s-1")
    archives: dict[str, tuple[xr.Dataset, Right | str]] = {
        "infinities": (infinite, runs(log=f"{U}: 2 values infinite")),
        "a variable without any value": (ds.assign({U: ds[U] * np.nan}), U),
        "a constant variable": (ds.assign({U: ds[U] * 0 + 3}), both),
        "100 times the values": (ds.assign({U: ds[U] * 100}), outside),
        "texts": (ds.assign({U: ds[U].astype("U4")}), U),
        "dates for numbers": (ds.assign({U: ds[U].astype("i8").astype("M8[ns]").drop_attrs()}), U),
        "members": (ds.expand_dims(member=[0, 1], axis=1), "data.select"),
        "no longitudes": (ds.isel(longitude=0, drop=True), "longitude"),
        "no dates": (ds.isel(time=0, drop=True), ""),
        "another name": (ds.rename({U: "x"}), U),
    }
    for fill in (9.96921e36, 1e30, 1e20, -9999.0, -32767.0):
        date, filled = rng.randrange(1, 45), ds.copy(deep=True)
        filled[U][date, 2, :2] = fill
        right = refused("_FillValue", DATES[date])
        archives[f"{fill:g} that nothing declares, date {date}"] = filled, right
    for units in LISTS["data"]["units"]:
        archives[f"in {units}"] = ds.assign({n: ds[n].assign_attrs(units=units) for n in NAMES}), both
    for dim, indices, right in LISTS["data"]["select"]:
        archives[f"{dim} {indices}"] = ds.isel({dim: indices}), right
    # Coordinates of another meaning, or of none.
    for dim, order, factor, right in LISTS["data"]["places"]:
        archives[f"{dim} {order} x {factor}"] = ds.assign_coords({dim: ds[dim].values[order] * factor}), right
    radians = ("latitude", np.deg2rad(ds.latitude.values), {"units": "radians"})
    archives["radians"] = ds.assign_coords(latitude=radians), "radians"
    for units, calendar, factor, offset, right in LISTS["data"]["times"]:
        attrs = {name: text for name, text in (("units", units), ("calendar", calendar)) if text}
        times = ds.assign_coords(time=("time", dates * 6.0 * factor + offset, attrs))
        archives[f"times {units} {calendar} x {factor:.3g} + {offset:g}"] = times, right
    for format, (name, (archive, right)) in itertools.product(FORMATS, archives.items()):
        if not (format.startswith("netcdf") and name == "texts"):
            yield case(f"{format}: {name}", partial(write, format, archive), right)
    options = '--data.variables=["u_component_of_wind","v_component_of_wind"] --data.levels=[500]'
    upper = ds.rename({U: "u_component_of_wind", V: "v_component_of_wind"})
    for format, (dim, units, numbers, right) in itertools.product(FORMATS, LISTS["data"]["levels"]):
        stacked = xr.concat([upper, upper * 0.5, upper * 0.25], dim).transpose("time", dim, ...)
        stacked = stacked.map(lambda x: x.assign_attrs(units="m s-1"))
        stacked = stacked.assign_coords({dim: (dim, np.asarray(numbers), {"units": units} if units else {})})
        yield case(f"{format}: {dim} {numbers} {units}", partial(write, format, stacked), right, options)

    # Files and chunks that are truncated, empty, damaged, missing or of another kind.
    def damaged(format: str, encoded: dict[str, Any], name: str, how: str, path: Path) -> None:
        write(format, ds, path, **encoded)
        damage(path / name, how, 0.0)
        for about in (".zmetadata", f"{U}/.zarray") if how == "gone" and name[-1:] == "0" and encoded else ():
            text = (path / about).read_text()  # as other programs write it: what is missing reads as zeros
            (path / about).write_text(text.replace('"fill_value": "NaN"', '"fill_value": 0.0'))

    metadata = [(format, name) for format, names in LISTS["data"]["metadata"].items() for name in names]
    for (format, name), how in itertools.product(metadata, (*WAYS, "nonsense", "a list")):
        # .zmetadata has what the other files of Zarr 2 say, and they have what it says.
        right = either(runs(), refused()) if format == "zarr2" else ""
        yield case(f"{format}: {name}, {how}", partial(damaged, format, {}, name, how), right)
    for format, codec, how in itertools.product(("zarr2", "zarr3"), CODECS, WAYS):
        encoded, date = {"compressors": CODECS[codec]} if codec != "own" else {}, rng.randrange(1, 45)
        if (format == "zarr3") == (codec == "own"):
            gone = f"no value of a variable, the first {DATES[date]}|{DATES[date]}, (is|are) not in the store"
            right = runs(log=gone) if how == "gone" else refused(U, DATES[date])
            name = f"{U}/{date}.0.0" if encoded else f"{U}/c/{date}/0/0"
            make = partial(damaged, format, encoded, name, how)
            yield case(f"{format} {codec}: chunk {date}, {how}", make, right)
    yield case("a text", lambda path: path.write_text("time,latitude\n"), "")
    yield case("a folder with a text", lambda p: (p.mkdir(), (p / "data.nc").write_text("time\n")), "")
    yield case("nothing", lambda path: None, "")
    yield case("a folder without data", lambda path: path.mkdir(), "")


DAMAGES = ("empty", "half", "all but one byte", "zeros", "another's", "one bit")
NEWEST = f"checkpoints/step-{STEPS:08d}"


def damage(path: Path, how: str, seed: float) -> None:
    content, rng = path.read_bytes(), random.Random(seed)
    at = rng.randrange(len(content))
    flipped = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    damages = {"empty": b"", "half": content[: len(content) // 2], "all but one byte": content[:-1]}
    damages |= {"zeros": bytes(len(content)), "another's": rng.randbytes(len(content)), "one bit": flipped}
    damages |= {"nonsense": b"{nonsense", "a list": b"[1, 2]"}
    path.unlink() if how == "gone" else path.write_bytes(damages[how])


class Exploit(str):
    """A pickle that makes a folder of this name when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self),)


def files(stage: Stage, rng: random.Random) -> Iterator[Case]:
    """Damage, remove and forge files of a run, and let it go on."""

    def damaging(name: str, how: str) -> Callable[[Path], object]:
        return partial(lambda seed, folder: damage(next(folder.glob(name)), how, seed), rng.random())

    def remove(name: str, folder: Path) -> None:
        path = next(folder.glob(name))
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def compare(verb: str, folder: Path) -> str:
        made = "forecast.zarr" if verb == "forecast" else "evaluation/scores.nc"
        opener = xr.open_zarr if verb == "forecast" else xr.open_dataset
        try:
            with opener(folder / made) as ours, opener(stage.run / made) as theirs:
                same = ours.drop_attrs().identical(theirs.drop_attrs())
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            return f"{made} cannot be read: {type(error).__name__}"
        return "" if same else f"another {made}"

    resumed = LISTS["saved"]["resumed"]
    for name, how in itertools.product(resumed, DAMAGES):
        yield stage.resumed(f"{name}, {how}", damaging(name, how))
    for name in (*resumed, "checkpoints", "best"):
        yield stage.resumed(f"{name}, removed", partial(remove, name))
    stored = [(verb, name) for verb, names in LISTS["saved"]["stored"].items() for name in names]
    for (verb, name), how in itertools.product(stored, DAMAGES):
        # Chunks have no checksums: other bits of a chunk are other values, which only the disk can know.
        if not (how in ("one bit", "zeros", "another's") and re.search(r"\.zarr/.*/[\d.]+$", name)):
            # Refused with the file's name, or as if nothing had happened.
            folder = stage.fresh(f"{verb} {name}, {how}")
            right = either(runs(partial(compare, verb, folder)), refused(), refused(code=1))
            prepare, words = stage.copying(folder, damaging(name, how)), [verb, *stage.options(folder)]
            yield Case("files", f"{verb}: {name}, {how}", words, right, prepare=prepare)

    # Entries among the checkpoints that no run has made, and metadata that would run a command.
    proof = stage.scratch / "proof"

    def strangers(folder: Path) -> None:
        (folder / "checkpoints/step-00000099").symlink_to(stage.run / NEWEST)
        (folder / "checkpoints/step-00000009.incomplete").symlink_to(stage.data)
        (folder / "checkpoints/notes.txt").write_text("keep me")
        (folder / "checkpoints/step-backup").mkdir()

    def forge(folder: Path) -> None:
        (folder / NEWEST / ".metadata").write_bytes(pickle.dumps(Exploit(proof)))

    def vouched(folder: Path) -> None:
        forge(folder)
        about = read_manifest(folder / NEWEST)
        paths = {name: folder / NEWEST / name for name in about.pop("files")}
        write_manifest(folder / NEWEST, about, {n: (p.stat().st_size, crc32_of(p)) for n, p in paths.items()})

    def statistics(folder: Path) -> None:
        np.savez(folder / "statistics.npz", mean=np.array(Exploit(proof), object))

    entries = ("step-00000099/manifest.json", "step-00000009.incomplete/.zgroup", "notes.txt", "step-backup")
    kept = [stage.fresh("resumed strangers") / "checkpoints" / entry for entry in entries]
    left = "".join(f"(?=.*{entry.split('/')[0]}.*left alone)" for entry in entries)
    gone = lambda: "".join(f"{path} is gone" for path in kept if not path.exists())  # noqa: E731
    yield stage.resumed("strangers", strangers, f"(?s){left}", gone)
    ways = {"a pickle in statistics.npz": (statistics, "damaged")}
    ways["a malicious pickle"] = forge, "damaged|refused|not those"
    ways["a malicious pickle, vouched for"] = vouched, "posix.mkdir"
    for name, (change, log) in ways.items():
        executed = lambda: "a pickle was executed" if proof.exists() else ""  # noqa: E731
        yield stage.resumed(name, change, log, executed)


KINDS = {kind.__name__: kind for kind in (keys, combinations, data, files)}


def attack_commands(options: Namespace) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rossby-attack-", ignore_cleanup_errors=True) as text:
        stage, rng = build(Path(text)), random.Random(max(options.seed, 0))
        kinds = [options.kind] if options.kind else KINDS
        made = itertools.chain(*(KINDS[kind](stage, rng) for kind in kinds))
        cases = [case for case in made if options.named in case.name]
        cases = rng.sample(cases, min(options.cases, len(cases))) if options.cases else cases
        with ThreadPoolExecutor(options.jobs) as jobs:
            results = list(jobs.map(run_case, cases))
    wrong, counts = [], Counter(f"{case.kind}: {answer[0]}" for case, answer, _ in results)
    for case, (verdict, why), ended in results:
        if verdict in BAD:
            wrong.append(f"{verdict}: {case.kind}, {case.name}: {why}")
            shown = " ".join(repr(word)[1:-1][:120] for word in (*case.environment, *case.words))
            tail = (ended.stdout + ended.stderr)[-TAIL:].strip().splitlines()
            print("\n  | ".join([f"WRONG, {wrong[-1]}\n  {shown}", *tail]))
    row = {"cases": len(results), "seed": max(options.seed, 0), "counts": counts, "wrong": wrong}
    record("attack", [row | {"seconds": time.monotonic() - began, "kind": options.kind or "all"}])
    frame = pd.DataFrame([(case.kind, answer[0]) for case, answer, _ in results], columns=["kind", "verdict"])
    counted = pd.crosstab(frame.kind, frame.verdict, margins=True)
    print(f"\n{counted.to_string()}\n{time.monotonic() - began:.0f} s")
    return int(bool(wrong))


# -- valid, unusual input

ACTIVITY = ("forecast_activity", "truth_activity")
EXACT, ROUNDED = 1e-10, 1e-6  # relative: of float32 fields as they are, and of converted or regridded ones
POWER = {"mse": 2} | dict.fromkeys(("rmse", "rmse_sqrt_before_time_avg", "mae", "bias", "crps", "spread"), 1)
POWER |= dict.fromkeys(ACTIVITY, 1)


def judged(function: Callable, *arguments: Any) -> Answer:
    """Return the verdict on a function in a fork: an exit code of 3 is wrong, of 2 a refusal."""

    def outcome(ended: Ended) -> Answer:
        lines = ended.stdout.splitlines() + ended.stderr.splitlines()
        if ended.code == 2:
            return "refused", [line for line in lines if line.startswith("rossby:")][-1]
        if ended.code == 3:
            return "wrong", "; ".join(lines[:4])[:600]
        return (RIGHT, "") if ended.code == 0 else (TRACEBACK, "")

    _, (verdict, why), ended = run_case(Case("", "", [], outcome, call=(function, arguments)))
    return verdict, why + (ended.stdout + ended.stderr).strip()[-900:] * (verdict == TRACEBACK)


def report(wrong: list[str]) -> int:
    print("\n".join(wrong))
    return 3 * bool(wrong)


def read_back(folder: Path, target: str = "", dtype: str = "") -> int:
    """Compare a source, or the store it was converted to, with what was written."""
    path, fields = pickle.loads((folder / "case.pickle").read_bytes())
    with one_line_errors():
        return report(compare_archive(target or path, fields, dtype))
    return 0


def compare_archive(path: str, fields: Fields, dtype: str) -> list[str]:
    """Return what differs. dtype: of a store that was converted, with the error that it documents."""
    from datasets.archive import open_archive

    archive, wrong, times = open_archive(path), [], fields.axes["time"]
    if lost := {*map(base, fields.values)} & archive.unreadable.keys():
        raise DataError("; ".join(archive.unreadable[name] for name in lost))
    for what, ours, theirs in (
        ("variables", sorted(fields.values), sorted(set(archive.variables) - {"ozone_mass_mixing_ratio"})),
        ("static", sorted(fields.static), sorted(archive.static_variables)),
        ("dates", times.astype("M8[s]").tolist(), archive.times.tolist()),
        ("grid", (len(fields.latitude), len(fields.longitude)), archive.grid.shape),
    ):
        wrong += [f"{what}: {theirs}, not {ours}"] if ours != theirs else []
    if wrong:
        return wrong
    turn = np.abs((archive.grid.longitude[:, None] - fields.longitude + 180) % 360 - 180)
    columns = turn.argmin(axis=1)
    if max(turn.min(axis=1).max(), np.abs(archive.grid.latitude - fields.latitude).max()) > 1e-4:
        return [f"places: {archive.grid.latitude}, {archive.grid.longitude}"]
    for name, values in (fields.values | fields.static).items():
        ours, room = values[..., columns], 1e-7 * VARIABLES[base(name)]["size"][1]
        if name in fields.static:
            theirs = archive.read_static(name)
        else:
            theirs = np.stack([archive.read(i, [name])[0] for i in range(len(times))])
        if dtype == "float16" and name in fields.values:  # rounding about the offset
            attrs = xr.open_zarr(path, decode_cf=False, consolidated=False)[name.replace(":", "_")].attrs
            room = room + 2.0**-11 * np.abs(ours - attrs["add_offset"]) + 2.0**-25 * attrs["scale_factor"]
        off = np.nan_to_num(np.abs(ours - theirs) - ROUNDED * np.abs(ours) - room) > 0
        if (missing := np.isnan(ours) != np.isnan(theirs)).any():
            wrong.append(f"{name}: {missing.sum()} cells are missing in one, first {np.argwhere(missing)[0]}")
        elif off.any():
            at = tuple(np.argwhere(off)[0])
            first = f"first {theirs[at]:.9g}, not {ours[at]:.9g}"
            wrong.append(f"{name}: {off.sum()} of {off.size} values, {first}")
    return wrong


def convert(words: list[str], ended_by: int | None) -> int:
    """Convert; ended_by: number of the durable write before which the process is killed."""
    from datasets import convert as module
    from datasets import shards

    replacing, count = module.replacing, iter(range(10**6))

    @contextmanager
    def durable(path: Path) -> Iterator[Path]:
        if next(count) == ended_by:
            os.kill(os.getpid(), signal.SIGKILL)
        with replacing(path) as partial:
            yield partial

    module.replacing = shards.replacing = durable
    with one_line_errors():
        return module.main(words)
    return 0


def source(seed: int, folder: Path) -> Answer:
    """Return the verdict on one source, read, converted, and converted again after a kill."""
    for function, arguments in ((generate_source, (seed, folder)), (read_back, (folder,))):
        answer = judged(function, *arguments)
        if answer[0] != RIGHT:
            return answer
    path, _ = pickle.loads((folder / "case.pickle").read_bytes())
    target, dtype = str(folder / "store"), ("float16", "float32")[seed % 2]
    words, kill = [path, target, "--dtype", dtype], int(np.random.default_rng([seed, 2]).integers(4))
    for ended_by in (kill, None):
        answer = judged(convert, words, ended_by)
        if answer[0] != RIGHT and not (ended_by is not None and "signal 9" in answer[1]):
            return answer[0], f"convert: {answer[1]}"
    verdict, why = judged(read_back, folder, target, dtype)
    return verdict, f"converted to {dtype}: {why}" if why else ""


def evaluate_case(folder: Path) -> None:
    import evaluate

    evaluation = pickle.loads((folder / "case.pickle").read_bytes())
    evaluate.plot_evaluation = lambda *_: None  # seconds a case, and no numbers
    sys.argv = ["evaluate.py", *evaluation.words]
    evaluate.main()


def compare_scores(folder: Path) -> int:
    evaluation: Evaluation = pickle.loads((folder / "case.pickle").read_bytes())
    ours, regions, card, exact = expected(evaluation)
    with xr.open_dataset(folder / "run/evaluation/scores.nc", engine="h5netcdf") as ds:
        theirs, wrong = ds.load(), []
    if [*theirs.region.values] != regions:
        return report([f"regions: {[*theirs.region.values]}, not {regions}"])
    worst: dict[str, tuple[float, str]] = {}
    for (forecast, metric, variable, hours), values in ours.items():
        name, _, level = variable.partition(":")
        at: Any = {"forecast": forecast, "metric": metric, "lead_time": hours * HOUR.astype("m8[ns]")}
        try:
            score = theirs[name].sel(at | ({"level": int(level)} if level else {})).values
        except KeyError:
            score = np.full(len(regions), np.nan)
        score = np.nan_to_num(score) if metric == "num_dates" else score
        component = base(variable).replace("wind_vector", "u_component_of_wind").replace("10m_u", "u")
        mean, size = VARIABLES[component]["size"]
        power = POWER.get(metric, 0)
        activity = [ours.get((forecast, m, variable, hours), size) for m in ACTIVITY if "acc" in metric]
        least = reduce(np.fmin, activity, size)
        rounding = EXACT if exact else ROUNDED + 5e-7 * mean / least
        room = rounding * (np.abs(values) + size**power)  # float32 of large means, of anomalies for an ACC
        room = room * (100 * np.maximum(1, values) if "skill" in metric else 1)  # the skill may be nearly 0
        missing = np.isnan(values), np.isnan(score)
        off = np.where(missing[0] | missing[1], missing[0] != missing[1], np.abs(values - score) > room)
        if off.any():
            r = int(off.argmax())
            by = np.nan_to_num(abs(score[r] / values[r] - 1), nan=np.inf)
            where = f"{metric} of {forecast!r}, {variable} at {hours} h, {regions[r]}"
            text = f"{where}: {score[r]:.9g}, not {values[r]:.9g}"
            worst[metric] = max(worst.get(metric, (-1.0, "")), (by, text))
    wrong = [text for _, text in worst.values()]
    extra = sum(int(scores.sel(metric="rmse").notnull().sum()) for scores in theirs.values())
    mine = sum(np.isfinite(v).sum() for (_, metric, _, _), v in ours.items() if metric == "rmse")
    wrong += [f"{extra} RMSEs, not {mine}"] if extra != mine else []
    path = folder / "run/evaluation/scorecard.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    percent = {(row["variable"], row["lead_hours"]): row["percent"] for row in rows}
    if evaluation.against and percent.keys() != card.keys():
        wrong.append(f"scorecard: rows {sorted(percent.keys() ^ card.keys())} are in one of both")
    for key, value in percent.items():
        if abs(value - card.get(key, value)) > 2e-4 + (not exact) * 1e-4 * (100 + abs(value)):
            wrong.append(f"scorecard: {key}: {value}, not {card[key]:.4f}")
    return report(wrong)


def score(seed: int, folder: Path) -> Answer:
    """Return the verdict on one evaluation."""
    for function, arguments in ((generate_scores, (seed, folder)), (evaluate_case, (folder,))):
        answer = judged(function, *arguments)
        if answer[0] == "refused" and "truth has no analysis" in answer[1]:
            ours = expected(pickle.loads((folder / "case.pickle").read_bytes()))[0]
            some = any(values.any() for key, values in ours.items() if key[1] == "num_dates")
            return answer if some else (RIGHT, "")
        if answer[0] != RIGHT:
            return answer
    return judged(compare_scores, folder)


def compare_random(options: Namespace) -> int:
    kind, one = options.command, {"sources": source, "scores": score}[options.command]
    began, counts, wrong = time.monotonic(), Counter(), []
    seeds = [options.seed] if options.seed >= 0 else range(options.first, options.first + options.seeds)
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix=f"rossby-{kind}-{seed}-"))
        verdict, why = one(seed, folder)
        counts[verdict] += 1
        if verdict == RIGHT:
            shutil.rmtree(folder)
            continue
        print(f"seed {seed}: {verdict}: {why}; kept: {folder}", flush=True)
        wrong += [] if verdict == "refused" else [f"seed {seed}: {verdict}: {why}"]
    row = {"kind": kind, "cases": len(seeds), "first": min(seeds), "counts": counts, "wrong": wrong}
    record("attack", [row | {"seconds": time.monotonic() - began}])
    print(f"\n{pd.Series(counts, name=kind).to_string()}\n{time.monotonic() - began:.0f} s")
    return int(bool(wrong))


def main() -> int:
    commands = {"commands": attack_commands, "scores": compare_random, "sources": compare_random}
    of_cases = {"kind": "", "named": "", "cases": 0, "seed": -1, "jobs": 2}
    options = parse(__doc__, commands, **of_cases, seeds=100, first=0)
    os.environ |= environment({})  # before the server of forks starts, which takes them over
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts this may have it ignored
    multiprocessing.set_forkserver_preload([*VERBS.values(), "datasets.convert", "benchmarks.attack"])
    return commands[options.command](options)


if __name__ == "__main__":
    from benchmarks import attack as module  # by its name, which forks know it by

    sys.exit(module.main())
