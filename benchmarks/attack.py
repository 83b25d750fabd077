"""Attack the program from outside, and count its responses.

    .venv/bin/python benchmarks/attack.py [--kind data] [--named TEXT] [--cases 60] [--seed 0] [--jobs 2]
    .venv/bin/python benchmarks/attack.py scores --seeds 100 [--first 0] [--seed S]     evaluate.py: oracle.py
    .venv/bin/python benchmarks/attack.py sources --seeds 100 [--first 0] [--seed S]    datasets/: oracle.py

Bad input has to end in one line and exit code 2, and what can be understood in the right values; no byte of
a run's folder may change where nothing was to be written. "other" is an answer of several lines, or with
another exit code. Cases are made from the types and ranges of config.py, variants of an archive, damaged
files, and the lists of attack.toml; --cases: so many, drawn. What a run meets while it trains: lives.py.
Commands are forks of a process that has imported torch. Ends with 1 when anything is not as it should be.
"""

import atexit
import dataclasses
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import tomli_w
import xarray as xr
from numcodecs import LZ4, Blosc, Zlib, Zstd

from benchmarks import oracle
from benchmarks.results_file import ROOT, parse, record
from checkpoints.files import crc32_of, read_manifest, write_manifest
from command_line import answer_early
from config import SECTIONS
from jobs.durable_files import read_records
from tests.sample_archives import weatherbench
from tests.test_identity import NAMES, waves
from training.config_checks import check

VERDICTS = ("one line", "right", "traceback", "hang", "silently wrong", "other")
LINE, RIGHT, TRACEBACK, HUNG, SILENT, OTHER = VERDICTS
BAD = (SILENT, TRACEBACK, HUNG, OTHER)
VERBS = {name: name for name in ("train", "forecast", "evaluate", "plan")}
VERBS |= {"checks": "planning.start_checks"}
LISTS = tomllib.loads((ROOT / "benchmarks/attack.toml").read_text())
RUN_TRAIN, U, V = str(ROOT / "run_train.sh"), *NAMES
MOST_BYTES = 8 * 2**30  # of memory a case may ask for: one that asks for more meets a MemoryError
LEAVE_SECONDS, TAIL = 3.0, 600  # for processes of a case to end after it; characters shown of its output
# A line of a run's log, or a progress bar: no answer, and nothing against one.
LOGGED = re.compile(r"\d\d:\d\d:\d\d  |.*\d+%\||\d+step \[|rank +\d+: ")
Answer = tuple[str, str]  # a verdict, and why


class Ended(NamedTuple):
    code: int | None  # None: it did not end
    stdout: str
    stderr: str
    left: bool  # processes were left behind


Right = Callable[[Ended], Answer]


@dataclass
class Case:
    """words: a command of VERBS and its arguments, or another program and its arguments."""

    kind: str
    name: str
    words: list[str]
    right: Right
    environment: dict[str, str] = field(default_factory=dict)
    limit: float = 60.0
    prepare: Callable[[], object] = lambda: None
    keeps: Path | None = None  # a run's folder of which no byte may change


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, of the lines of metrics.jsonl that a case has not damaged."""
    records = read_records(folder / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def refused(*words: str, code: int = 2) -> Right:
    """Expect one line with all the words, nothing else that is no log, and this exit code."""

    def judge(ended: Ended) -> Answer:
        if ended.code == 0:
            return SILENT, "accepted"
        if ended.code != code:
            return OTHER, f"exit code {ended.code}, not {code}"
        lines = [each for each in ended.stderr.splitlines() if each.strip() and not LOGGED.match(each)]
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


def environment(more: dict[str, str]) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("NGPU", "NNODES", "WORLD_SIZE")}
    clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return clean | {"ROSSBY_PYTHON": sys.executable} | more


def become(words: list[str], variables: dict[str, str], outputs: tuple[str, str]) -> None:
    """Turn this process, a fork, into the command, as `python train.py ...` is."""
    gc.freeze()  # or every process collects, and so copies, what all of them share
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    for descriptor, path in enumerate((os.devnull, *outputs)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [f"{words[0]}.py", *words[1:]]
    module = import_module(VERBS[words[0]])
    try:
        answer_early(module.__doc__, check if words[0] != "plan" else None, getattr(module, "OPTIONS", None))
        module.main(words[1:]) if words[0] == "checks" else module.main()
    finally:
        atexit._run_exitfuncs()


class Running:
    def __init__(self, case: Case, scratch: Path) -> None:
        case.prepare()
        self.case, self.before = case, contents(case.keeps)
        self.outputs = str(scratch / f"{id(case)}.out"), str(scratch / f"{id(case)}.err")
        self.end, variables = time.monotonic() + case.limit, environment(case.environment)
        self.program: subprocess.Popen | None = None
        if case.words[0] in VERBS:
            how = {"target": become, "args": (case.words, variables, self.outputs)}
            self.fork = multiprocessing.get_context("forkserver").Process(**how)
            self.fork.start()
            self.pid = self.fork.pid or 0
            return
        with open(self.outputs[0], "w") as out, open(self.outputs[1], "w") as err:
            own: Any = {"env": variables, "stdin": subprocess.DEVNULL, "start_new_session": True}
            self.program = subprocess.Popen(case.words, cwd=ROOT, stdout=out, stderr=err, **own)
        self.pid = self.program.pid

    def code(self) -> int | None:
        return self.program.poll() if self.program else self.fork.exitcode

    def finish(self) -> tuple[Answer, Ended]:
        """Return the verdict; processes that are left after some seconds are counted and killed."""
        code, deadline, left = self.code(), time.monotonic() + LEAVE_SECONDS, True
        while left:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                left = False
            if code is None or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for pid in [*descendants(self.pid), self.pid] if left else []:  # ranks have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.program.wait() if self.program else self.fork.join()
        stdout, stderr = (Path(path).read_text(errors="replace") for path in self.outputs)
        ended = Ended(code, stdout, stderr, left and code is not None)
        answer, after = self.judge(ended), contents(self.case.keeps)
        changed = sorted(k for k in self.before | after if self.before.get(k) != after.get(k))
        return ((SILENT, f"changed {', '.join(changed)}") if changed else answer), ended

    def judge(self, ended: Ended) -> Answer:
        if ended.code is None:
            return HUNG, f"still there after {self.case.limit:g} s"
        if "Traceback (most recent" in ended.stderr + ended.stdout:
            return TRACEBACK, "traceback"
        if ended.left:
            return HUNG, "processes were left"
        answer = self.case.right(ended)
        if answer[0] in BAD and (ended.code < 0 or "terminate called" in ended.stderr):
            return TRACEBACK, f"ended by signal {-ended.code}"
        return answer


def descendants(pid: int) -> list[int]:
    """Return the processes below this one, whichever thread started them and session they are of."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found + [each for child in found for each in descendants(child)]


def contents(folder: Path | None, but: tuple[str, ...] = ("\0",)) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder else []
    found = {str(path.relative_to(folder)): path for path in files}  # type: ignore[arg-type]
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(but)}


def attack(cases: list[Case], scratch: Path, jobs: int) -> list[tuple[Case, Answer, Ended]]:
    waiting, running, results = cases[::-1], [], []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Running(waiting.pop(), scratch))
        for each in [r for r in running if r.code() is not None or time.monotonic() > r.end]:
            running.remove(each)
            results.append((each.case, *each.finish()))
        time.sleep(0.005)
    return results


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

    def longer(self, folder: Path | str, *more: str) -> list[str]:
        return self.options(folder, "--training.steps", str(MORE), *more)

    def fresh(self, name: str) -> Path:
        return self.scratch / "cases" / re.sub(r"[/ ]", "-", name)[:100]

    def copying(self, target: Path, change: Callable[[Path], object] = id) -> Callable[[], None]:
        def prepare() -> None:
            shutil.copytree(self.run, target)
            change(target)

        return prepare

    def goes_on(self, folder: Path) -> str:
        found = losses(folder)
        wrong = [step for step in range(STEPS + 1, MORE + 1) if found.get(step) != self.losses[step]]
        return f"loss of step {wrong[0]} is {found.get(wrong[0])}" if wrong else ""

    def resumed(self, kind: str, name: str, change: Any, log: str = "", also: Any = str) -> Case:
        """Return a case that ends with the losses of the undisturbed run; also(): what else is wrong."""
        folder = self.fresh(f"resumed {name}")
        right, prepare = runs(lambda: also() or self.goes_on(folder), log=log), self.copying(folder, change)
        return Case(kind, f"resume: {name}", ["train", *self.longer(folder)], right, prepare=prepare)


def build(scratch: Path) -> Stage:
    data, config, on = Path(weatherbench(scratch, waves())), scratch / "tiny.toml", scratch / "on"
    LISTS["run"]["data"]["path"] = str(data)
    config.write_text(tomli_w.dumps(LISTS["run"]))
    waves().to_netcdf(scratch / "waves.nc", engine="h5netcdf")
    stage = Stage(scratch, data, config, scratch / "run", {})
    first = [Case("", verb, [verb, *stage.options(stage.run)], runs(), limit=300) for verb in [*VERBS][:3]]
    longer = Case("", "on", ["train", *stage.longer(on)], runs(), limit=300, prepare=stage.copying(on))
    for case in [*first, longer]:
        ((_, answer, ended),) = attack([case], scratch, 1)
        assert answer[0] == RIGHT, ended.stderr
    stage.losses = losses(on)
    assert set(stage.losses) == set(range(1, MORE + 1)), stage.losses
    return stage


LONG, TEXTS = "[" + ",".join(["1"] * 20_000) + "]", ["x" * 300, "a\0b", "a\ud800b", "a\nb", "\x1b[31m"]


def bad_values(kind: Any) -> list[str]:
    """Return values that a key of this type and range cannot mean."""
    kind, bounds = (kind.__origin__, kind.__metadata__[0]) if hasattr(kind, "__metadata__") else (kind, None)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        numbers = bad_values(inner) if getattr(inner, "__origin__", inner) in (int, float) else []
        lists = [f"[{value}]" for value in numbers if value and "[" not in value]
        lists += [] if numbers else [f'["{"x" * 300}"]', '["a\\u0000b"]', '["a\\nb"]']
        return ["[[1]]", '[["a"]]', LONG, "[", "{}", "[{a = 1}]", "1", *lists]
    if kind in (int, float):
        values = ["", "one", "nan", "[1]", "-1" + "0" * 30, "1.5" if kind is int else "1e300"]
        values += ["inf"] if not (bounds and bounds.infinite) else []
        ends: Any = (bounds.low - 1, bounds.low, bounds.high, bounds.high + 1) if bounds else ()
        beyond = [kind(e) for e in ends if math.isfinite(e) and bounds and not bounds.admits(kind(e))]
        return values + [str(end) for end in beyond]
    if get_origin(kind) is Literal:
        return ["", "x" * 300, "a\0b", "a\nb", "[]", *(f"{choice}x" for choice in get_args(kind) if choice)]
    return ["yes", "1", "", "[true]"] if kind is bool else TEXTS


def keys(stage: Stage, rng: random.Random) -> Iterator[Case]:
    """Give each key some of its bad values, the commands in turn; then misspelt keys, options and files."""

    def draw(values: Any, number: int) -> list:
        return rng.sample([*values], min(number, len(values)))

    number, paths = itertools.count(), {"job.config_file": stage.config, "job.dump_folder": stage.run}
    texts = {name: (text, "") for name, text in LISTS["files"].items()}
    texts |= {f"5000 x {c}": (f"[data]\nlevels = {c * 5000}", "") for c in "[9"}
    for section, cls in SECTIONS.items():
        fields = {f"{section}.{each.name}": each.type for each in dataclasses.fields(cls)}
        values = [(key, value, key) for key, kind in fields.items() for value in draw(bad_values(kind), 4)]
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
    yield from own_options(stage)


def own_options(stage: Stage) -> Iterator[Case]:
    os.mkfifo(stage.scratch / "fifo")
    (stage.scratch / "empty").mkdir()
    paths = {"{config}": stage.config, "{data}": stage.data, "{scratch}": stage.scratch}
    for verb, listed in LISTS["options"].items():
        for number, text in enumerate(listed):
            for name, path in paths.items():
                text = text.replace(name, str(path))
            words = text.split(" ")
            given = [each for each in ("--job.config_file", "--job.dump_folder") if each in text]
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
    write("zarr2", lambda _: zeros, large)
    for ranks, text, word in [*listed, *LISTS["combinations"]["huge"]]:
        huge = [ranks, text, word] in LISTS["combinations"]["huge"]
        words = re.sub(r"(^| )p\.", r"\1parallelism.", text).split()
        words = [f"--{each}" if re.match(r"[a-z_0-9]+\.", each) else each for each in words]
        verb, folder = "checks" if huge or ranks > 1 else "train", stage.fresh(text) if huge else stage.run
        options = stage.options(folder, *(["--data.path", str(large)] if huge else []), *words)
        about: Any = {"environment": {"NGPU": str(ranks)}, "keeps": None if huge else stage.run}
        yield Case("combinations", f"{ranks} ranks {text}", [verb, *options], refused(word), **about)


CODECS = {"blosc": Blosc(), "zlib": Zlib(), "zstd": Zstd(checksum=True), "lz4": LZ4(), "raw": None, "own": ""}
FORMATS = ("zarr2", "zarr3", "netcdf4", "netcdf3")
DIMS, DATES = ("time", "latitude", "longitude"), [str(each)[:19] for each in waves().time.values]
Change = Callable[[xr.Dataset], xr.Dataset]
# Name, what writes the data to a path, the right answer: a word of it, or "same": the losses of plain fields.
Odd = tuple[str, Callable[[Path], object], Right | str]


def write(format: str, change: Change, path: Path, **own: Any) -> None:
    """Write the changed waves, a chunk a date, or as `own`, the encoding of fields, has it."""
    ds = change(waves())
    if format.startswith("netcdf"):
        encoding = {name: own for name in ds.data_vars if own}
        ds.to_netcdf(path, engine="scipy" if format == "netcdf3" else "h5netcdf", encoding=encoding)
        return
    encoding = {n: {"chunks": (1, *ds[n].shape[1:])} | own for n in ds.data_vars if ds[n].ndim > 2}
    version: Any = 2 if format == "zarr2" else 3
    ds.to_zarr(path, zarr_format=version, encoding=encoding, consolidated=version == 2)


def data(stage: Stage, rng: random.Random) -> Iterator[Case]:
    short = ["--training.steps", "3", "--checkpoint.enable=false", "--checkpoint.keep_best="]
    first: dict[int, float] = {}  # losses that all ways to write the same fields have to give

    def wrong(run: Path, tolerance: float) -> str:
        ours = losses(run)
        first.update({} if first else ours)
        close = ours.keys() == first.keys() and all(abs(ours[n] / first[n] - 1) < tolerance for n in first)
        return "" if close else f"losses {ours}, not {first}"

    generated = (each(rng) for each in (fields, times_and_places, stores))
    for name, make, right in itertools.chain(*generated):
        text, _, more = name.partition(" | ")
        folder = stage.fresh(f"data {name}")
        options = stage.options(folder / "run", *short, "--data.path", str(folder / "data"), *more.split())

        def prepare(folder: Path = folder, make: Callable[[Path], object] = make) -> None:
            folder.mkdir(parents=True)
            make(folder / "data")

        if right == "same":
            right = runs(partial(wrong, folder / "run", 2e-2 if "packed" in name else 1e-4))
        right = refused(right) if isinstance(right, str) else right
        yield Case("data", text, ["train", *options], right, prepare=prepare)


def fields(rng: random.Random) -> Iterator[Odd]:
    """Yield fields with other values, units, dimensions, orders, types and packings."""

    def put(value: float, date: int, ds: xr.Dataset) -> xr.Dataset:
        ds[U][date, 2, :2] = value
        return ds

    def scaled(units: str, factor: float, ds: xr.Dataset) -> xr.Dataset:
        return ds.assign({name: (ds[name] * factor).assign_attrs(units=units) for name in NAMES})

    def assign(change: Callable[[xr.DataArray], xr.DataArray]) -> Change:
        return lambda ds: ds.assign({U: change(ds[U])})

    same, dates, own = (lambda ds: ds), np.arange(80), {}
    outside, both = runs(log=f"{U}: .*outside -120 to 120 m s-1"), either(refused(U), runs(log=U))
    found: dict[str, tuple[Change, Right | str]] = {
        "as they are": (same, "same"),
        "infinities": (partial(put, np.inf, 20), runs(log=f"{U}: 2 values infinite")),
        "a variable without any value": (assign(lambda x: x * np.nan), U),
        "a constant variable": (assign(lambda x: x * 0 + 3), both),
        "100 times the values": (assign(lambda x: x * 100), outside),
        "texts": (assign(lambda x: x.astype("U4")), U),
        "dates for numbers": (assign(lambda x: x.astype("i8").astype("M8[ns]").drop_attrs()), U),
        "whole numbers": (assign(lambda x: (x * 10).astype("i2")), runs()),
        "members": (lambda ds: ds.expand_dims(member=[0, 1], axis=1), "data.select"),
        "one member": (lambda ds: ds.expand_dims(member=[0], axis=1), "same"),
        "no longitudes": (lambda ds: ds.isel(longitude=0, drop=True), "longitude"),
        "no dates": (lambda ds: ds.isel(time=0, drop=True), ""),
        "gaps": (lambda ds: ds.isel(time=[i for i in dates if i % 7]), runs()),
        "another name": (lambda ds: ds.rename({U: "x"}), U),
        "times in no order": (lambda ds: ds.isel(time=np.random.default_rng(0).permutation(80)), "same"),
        "valid_time, lat": (lambda ds: ds.rename(time="valid_time", latitude="lat"), "same"),
    }
    for fill in (9.96921e36, 1e30, 1e20, -9999.0, -32767.0):
        date = rng.randrange(1, 45)
        right = refused("_FillValue", DATES[date])
        found[f"{fill:g} that nothing declares, date {date}"] = (partial(put, fill, date), right)
    for units, factor, right in LISTS["data"]["units"]:
        found[f"in {units}"] = (partial(scaled, units, factor), both if right == "warned" else right)
    for dim, indices, right in LISTS["data"]["select"]:
        found[f"{dim} {indices}"] = (lambda ds, i=indices, d=dim: ds.isel({d: i}), right)
    for dim, order in itertools.product(DIMS, itertools.permutations(DIMS)):
        found[f"{dim} reversed"] = (lambda ds, d=dim: ds.isel({d: slice(None, None, -1)}), "same")
        found[f"dimensions {', '.join(order)}"] = (lambda ds, order=order: ds.transpose(*order), "same")
    for kind in ("f8", ">f4", ">f8"):
        found[f"numbers as {kind}"] = (lambda ds, kind=kind: ds.astype(kind), "same")
    encodings: dict[str, dict[str, Any]] = {"a declared fill value": {"_FillValue": -9999.0}}
    for offset in (0.0, 5.0):
        packed = {"dtype": "i2", "scale_factor": 1e-3, "add_offset": offset, "_FillValue": -32767}
        encodings[f"packed, offset {offset}"] = packed
    found |= {name: (same, "same") for name in encodings}
    for format, (name, (change, right)) in itertools.product(FORMATS, found.items()):
        own = encodings.get(name, {})
        own |= {"chunks": None} if name.startswith("dimensions") and "zarr" in format else {}
        if not (format.startswith("netcdf") and name in ("texts", "numbers as >f4", "numbers as >f8")):
            yield f"{format}: {name}", partial(write, format, change, **own), right
    for format, chunk in itertools.product(FORMATS[:2], ((2, 6, 8), (80, 6, 8), (1, 3, 4), (7, 5, 3))):
        yield f"{format}: chunks of {chunk}", partial(write, format, same, chunks=chunk), "same"


def times_and_places(_: random.Random) -> Iterator[Odd]:
    """Yield archives with coordinates of another meaning, no meaning, or the same meaning in another form."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for dim, order, factor, right in LISTS["data"]["places"]:
        found[f"{dim} {order} x {factor}"] = ({dim: waves()[dim].values[order] * factor}, right)
    north, hours = np.deg2rad(waves().latitude.values), np.arange(80) * 6.0
    found["radians"] = ({"latitude": ("latitude", north, {"units": "radians"})}, "radians")
    for units, calendar, factor, offset, right in LISTS["data"]["times"]:
        attrs = {name: text for name, text in (("units", units), ("calendar", calendar)) if text}
        time_axis = ("time", hours * factor + offset, attrs)
        found[f"times {units} {calendar} x {factor:.3g} + {offset:g}"] = ({"time": time_axis}, right)
    for format, (name, (axes, right)) in itertools.product(FORMATS, found.items()):
        yield f"{format}: {name}", partial(write, format, lambda ds, a=axes: ds.assign_coords(a)), right

    def levelled(dim: str, attrs: dict[str, str], numbers: Any, ds: xr.Dataset) -> xr.Dataset:
        ds = ds.rename({U: "u_component_of_wind", V: "v_component_of_wind"})
        stacked = xr.concat([ds, ds * 0.5, ds * 0.25], dim).transpose("time", dim, ...)
        for name in stacked.data_vars:
            stacked[name].attrs["units"] = "m s-1"
        return stacked.assign_coords({dim: (dim, np.asarray(numbers), attrs)})

    options = '--data.variables=["u_component_of_wind","v_component_of_wind"] --data.levels=[500]'
    for format, (dim, units, numbers, right) in itertools.product(FORMATS, LISTS["data"]["levels"]):
        change = partial(levelled, dim, {"units": units} if units else {}, numbers)
        yield f"{format}: {dim} {numbers} {units} | {options}", partial(write, format, change), right


def damage(path: Path, how: str, seed: float) -> None:
    content, rng = path.read_bytes(), random.Random(seed)
    at = rng.randrange(len(content))
    flipped = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    found = {"empty": b"", "half": content[: len(content) // 2], "all but one byte": content[:-1]}
    found |= {"zeros": bytes(len(content)), "another's": rng.randbytes(len(content)), "one bit": flipped}
    found |= {"nonsense": b"{nonsense", "a list": b"[1, 2]"}
    path.unlink() if how == "gone" else path.write_bytes(found[how])


def stores(rng: random.Random) -> Iterator[Odd]:
    """Yield archives with files and chunks that are truncated, empty, damaged, missing or of another kind."""

    def damaged(format: str, own: dict[str, Any], name: str, how: str, path: Path) -> None:
        write(format, lambda ds: ds, path, **own)
        damage(path / name, how, 0.0)
        for each in (".zmetadata", f"{U}/.zarray") if how == "gone" and name[-1:] == "0" and own else ():
            text = (path / each).read_text()  # as other programs write it: what is missing reads as zeros
            (path / each).write_text(text.replace('"fill_value": "NaN"', '"fill_value": 0.0'))

    ways = ("gone", "empty", "half", "all but one byte")
    metadata = [(format, name) for format, names in LISTS["data"]["metadata"].items() for name in names]
    for (format, name), how in itertools.product(metadata, (*ways, "nonsense", "a list")):
        # .zmetadata has what the other files of Zarr 2 say, and they have what it says.
        right = either(runs(), refused()) if format == "zarr2" else ""
        yield f"{format}: {name}, {how}", partial(damaged, format, {}, name, how), right
    for format, codec, how in itertools.product(("zarr2", "zarr3"), CODECS, ways):
        own, date = {"compressors": CODECS[codec]} if codec != "own" else {}, rng.randrange(1, 45)
        if (format == "zarr3") == (codec == "own"):
            gone = f"no value of a variable, the first {DATES[date]}|{DATES[date]}, (is|are) not in the store"
            right = runs(log=gone) if how == "gone" else refused(U, DATES[date])
            name = f"{U}/{date}.0.0" if own else f"{U}/c/{date}/0/0"
            yield f"{format} {codec}: chunk {date}, {how}", partial(damaged, format, own, name, how), right
    yield "a text", lambda path: path.write_text("time,latitude\n"), ""
    yield "a folder with a text", lambda path: (path.mkdir(), (path / "data.nc").write_text("time\n")), ""
    yield "nothing", lambda path: None, ""
    yield "a folder without data", lambda path: path.mkdir(), ""


DAMAGES = ("empty", "half", "all but one byte", "zeros", "another's", "one bit")
NEWEST = f"checkpoints/step-{STEPS:08d}"


def files(stage: Stage, rng: random.Random) -> Iterator[Case]:
    def damaging(name: str, how: str) -> Callable[[Path], object]:
        return partial(lambda seed, folder: damage(next(folder.glob(name)), how, seed), rng.random())

    resumed, stored_files = LISTS["saved"]["resumed"], LISTS["saved"]["stored"]
    for name, how in itertools.product(resumed, DAMAGES):
        yield stage.resumed("files", f"{name}, {how}", damaging(name, how))
    for verb in stored_files:
        for name, how in itertools.product(stored_files[verb], DAMAGES):
            # Chunks have no checksums: other bits of a chunk are other values, which only the disk can know.
            if not (how in ("one bit", "zeros", "another's") and re.search(r"\.zarr/.*/[\d.]+$", name)):
                yield stored(stage, verb, f"{name}, {how}", damaging(name, how))
    for name in (*resumed, "checkpoints", "best"):

        def remove(folder: Path, name: str = name) -> None:
            path = next(folder.glob(name))
            shutil.rmtree(path) if path.is_dir() else path.unlink()

        yield stage.resumed("files", f"{name}, removed", remove)
    yield from forged(stage)


def stored(stage: Stage, verb: str, name: str, change: Callable[[Path], object]) -> Case:
    """Return a case that is refused naming the file, or ends as if nothing had happened."""
    folder = stage.fresh(f"{verb} {name}")

    def check() -> str:
        made = "forecast.zarr" if verb == "forecast" else "evaluation/scores.nc"
        opener = xr.open_zarr if verb == "forecast" else xr.open_dataset
        try:
            with opener(folder / made) as ours, opener(stage.run / made) as theirs:
                same = ours.drop_attrs().identical(theirs.drop_attrs())
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            return f"{made} cannot be read: {type(error).__name__}"
        return "" if same else f"another {made}"

    right, prepare = either(runs(check), refused(), refused(code=1)), stage.copying(folder, change)
    return Case("files", f"{verb}: {name}", [verb, *stage.options(folder)], right, prepare=prepare)


class Exploit(str):
    """A pickle that makes a folder of this name when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self),)


def forged(stage: Stage) -> Iterator[Case]:
    """Yield entries among the checkpoints that no run has made, and metadata that would run a command."""
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
    left = "".join(f"(?=.*{each.split('/')[0]}.*left alone)" for each in entries)
    ways = [("strangers", strangers, f"(?s){left}"), ("a pickle in statistics.npz", statistics, "damaged")]
    ways.append(("a malicious pickle", forge, "damaged|refused|not those"))
    for name, change, log in [*ways, ("a malicious pickle, vouched for", vouched, "posix.mkdir")]:
        kept = [stage.fresh(f"resumed {name}") / "checkpoints" / each for each in entries]

        def wrong(kept: list[Path] = kept if name == "strangers" else []) -> str:
            gone = "".join(f"{path} is gone" for path in kept if not path.exists())
            return "a pickle was executed" if proof.exists() else gone

        yield stage.resumed("files", name, change, log, wrong)


KINDS = {each.__name__: each for each in (keys, combinations, data, files)}


def main() -> int:
    commands: dict[str, Any] = {
        "commands": attack_commands,
        "scores": oracle.scores,
        "sources": oracle.sources,
    }
    of_cases = {"kind": "", "named": "", "cases": 0, "seed": -1, "jobs": 2}
    options = parse(__doc__, commands, **of_cases, seeds=100, first=0)
    return commands[options.command](options)


def attack_commands(options: Namespace) -> int:
    began = time.monotonic()
    os.environ |= environment({})  # before the server of forks starts, which takes them over
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts this may have it ignored
    multiprocessing.set_forkserver_preload([*VERBS.values(), "benchmarks.attack"])
    with tempfile.TemporaryDirectory(prefix="rossby-attack-", ignore_cleanup_errors=True) as text:
        stage, rng = build(Path(text)), random.Random(max(options.seed, 0))
        kinds = [options.kind] if options.kind else KINDS
        made = itertools.chain(*(KINDS[kind](stage, rng) for kind in kinds))
        cases = [case for case in made if options.named in case.name]
        cases = rng.sample(cases, min(options.cases, len(cases))) if options.cases else cases
        results = attack(cases, Path(text), options.jobs)
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


if __name__ == "__main__":
    from benchmarks import attack as module  # by its name, which forks know it by

    sys.exit(module.main())
