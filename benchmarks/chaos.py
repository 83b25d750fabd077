"""Kill programs at random times, start them again, and compare the results with undisturbed ones.

    .venv/bin/python benchmarks/chaos.py cycles --seeds 40 [--first 0] [--seed 7] [--folder DIR]

Random lives of a training. A life is a function of its seed: traits that stay (averages, spikes,
adapters), 3 to 8 starts, each of which meets with one event (kills, signals, full disks, second starts), and
between them what a user changes or damages. Every exit code, message and file has to be as
docs/reliability.md says, and the end that of a run of the same traits which nothing disturbed: the same bits
on one layout, within 1e-5 on changing ones. --seed: that life alone, start by start.

A conversion is killed by `attack.py sources`. chaos.toml has traits, layouts and options.
"""

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import torch
import xarray as xr

from benchmarks.attack import contents, descendants
from benchmarks.results_file import ROOT, parse, record
from checkpoints.files import (
    DAMAGED,
    DELETING,
    INCOMPLETE,
    check_files,
    complete_steps,
    read_best,
    read_tensors,
    step_folder,
    stored_tensors,
)
from tests.parity import EPS
from tests.sample_archives import training_store
from tests.started_jobs import Job, last_step, losses, records, small_dataset, small_wave, started_by
from tests.started_jobs import write_config as write_run

LIVES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["lives"]
TRAITS, LAYOUTS = LIVES["traits"], LIVES["layouts"]
STEPS, INTERVAL, LIMIT = 60, 5, 90.0  # of the longest run; steps between saves; seconds of a start
WIND, DATES, LOG = "10m_u_component_of_wind", 80, r"/metrics\.jsonl$"
SIGTERM, SIGUSR1, SIGINT, SIGHUP, SIGKILL = (int(getattr(signal, name)) for name in LIVES["signals"])
# What no line of a run may be, whatever it meets with.
UNWANTED = re.compile(
    r"Traceback|terminate called|Exception ignored|^\w*(Error|Warning)\b|frame #|leaked|^\[rank\d+\]:(?!W)",
    re.MULTILINE,
)
# Imported by every process of a run: calls that are slow, a disk that is full or does not answer, for paths
# that match; slow validations.
INJECTED = """
import builtins, errno, importlib.util, io, json, os, re, sys, time
PLAN = json.loads(os.environ.get("ROSSBY_INJECTED", "{}"))
synced, opened = os.fsync, io.open
def meet(path, slow="slow", fails="full", code=errno.ENOSPC):
    for pattern, seconds in PLAN.get(slow, ()):
        time.sleep(seconds if re.search(pattern, path) else 0)
    for number in range(PLAN.get("times", 0) if re.search(PLAN.get(fails, "^$"), path) else 0):
        try:
            os.close(os.open(f"{PLAN['marks']}-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        raise OSError(code, os.strerror(code), path)
def fsync(file):
    meet(os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
    synced(file)
def open(path, mode="r", *more, **options):
    if isinstance(path, (str, os.PathLike)):
        reads = () if mode[0] in "wax" else ("slow reads", "stale", errno.ESTALE)
        meet(os.fspath(path), *reads)
    return opened(path, mode, *more, **options)
def skip(module):
    module.MOST_SKIPPED = PLAN["skipped"]
def damp(module):
    module.EPS = PLAN["eps"]
def delay(module):
    plain = module.date_statistics
    def date_statistics(*arguments):
        opened(f"{PLAN['marks']}-validation", "a").close()
        time.sleep(PLAN["validation"])
        return plain(*arguments)
    module.date_statistics = date_statistics
CHANGES = {"training.bad_steps": ("skipped", skip), "verification.validation": ("validation", delay)}
CHANGES["training.optimizers.build"] = "eps", damp
class Finder:
    def find_spec(self, name, path=None, target=None):
        key, change = CHANGES.pop(name, ("", None))
        if key in PLAN:
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: execute(module) or change(module)
            return spec
if PLAN:
    os.fsync, io.open, builtins.open = fsync, open, open
    sys.meta_path.insert(0, Finder())
"""


@dataclass
class Event:
    """Events of one start: allowed exit codes, injected faults, signals and changes."""

    codes: tuple[int, ...] = (0,)
    plan: dict[str, Any] = field(default_factory=dict)
    strike: dict[str, Any] = field(default_factory=dict)  # keywords of `strike`
    environment: dict[str, str] = field(default_factory=dict)
    act: Callable[[Job], object] | None = None


def start_job(
    scratch: Path, where: Path, trait: str, layout: str, plan: Any, *words: str, **more: str
) -> Job:
    """Start a run of a trait on a layout in where/run. scratch: of all references and lives."""
    (ranks, *degrees), about = LAYOUTS[layout], TRAITS[trait]
    degrees += base_options(scratch, trait)
    more = {"NGPU": str(ranks), "PYTHONPATH": str(scratch)} | more
    # As in tests/parity.py: Adam would blow up the rounding of gradients that are zero but for that.
    more["ROSSBY_INJECTED"] = json.dumps({"eps": EPS} | plan | about.get("plan", {}))
    options = (*LIVES["options"], *about["options"], *degrees, *words)
    return Job(where / "tiny.toml", where / "run", *options, **more)


def base_options(scratch: Path, trait: str) -> list[str]:
    """Return the option of the model that adapters adapt; none for other traits."""
    if not (base := TRAITS[trait].get("base")):
        return []
    folder = step_folder(reference(scratch, base, "1 rank") / "checkpoints", STEPS)
    return [f"--checkpoint.initial_load_path={folder}"]


def reference(scratch: Path, trait: str, layout: str) -> Path:
    """Return the folder of a run that nothing disturbs."""
    folder = scratch / f"{trait}, {layout}"
    if not (folder / "done").exists():
        copy_data(scratch, folder)
        job = start_job(scratch, folder, trait, layout, {}, "--checkpoint.keep_latest_k=0")
        assert job.end(300) == 0, job.output
        (folder / "done").touch()
    return folder / "run"


def convert(folder: Path) -> None:
    with redirect_stdout(io.StringIO()):
        training_store(str(folder / "wb.zarr"), folder / "store.zarr")


def copy_data(scratch: Path, folder: Path) -> None:
    """Make a new folder with data and configuration of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch / "wb.zarr", folder / "wb.zarr")
    convert(folder)
    text = (scratch / "tiny.toml").read_text()
    (folder / "tiny.toml").write_text(text.replace(str(scratch), str(folder)))


def wait_for(job: Job, step: int = 0, text: str = "", folder: str = "") -> bool:
    """Wait until the run has logged a step, or a text, or has a folder; False if it has ended."""
    path, end = job.folder / "metrics.jsonl", time.monotonic() + LIMIT
    while job.process.poll() is None and time.monotonic() < end:
        begun = path.exists() and path.stat().st_mtime > job.started and last_step(job.folder) >= step
        if (not step or begun) and text in job.output and (job.folder / folder).exists():
            return True
        time.sleep(0.004)
    return False


def strike(job: Job, number: int, target: Any, late: float = 0.0, again: float = -1, **when: Any) -> None:
    """Send a signal to the launcher, to a terminal's group, to all ranks, or to one; perhaps again."""
    if not wait_for(job, **when):
        return
    for seconds in (late, again) if again >= 0 else (late,):
        time.sleep(seconds)
        with suppress(OSError):
            ranks = job.ranks() or {0: job.process.pid}
            pids = {"launcher": [job.process.pid], "ranks": [*ranks.values()], "group": [-job.process.pid]}
            pids["all"] = [job.process.pid, *ranks.values()]
            for pid in pids.get(target) or [ranks.get(target, job.process.pid)]:
                os.kill(pid, number)


class Life:
    def __init__(self, seed: int, scratch: Path, most: int, kinds: Counter[str]) -> None:
        self.seed, self.scratch, self.kinds, self.number = seed, scratch, kinds, 0
        self.rng, self.folder = random.Random(seed), scratch / f"life-{seed}"
        self.trait = self.rng.choice([*TRAITS])
        self.about = TRAITS[self.trait]
        self.layouts = self.about.get("layouts", [*LAYOUTS])
        self.layout = self.first_layout = self.rng.choice(self.layouts)
        self.run, self.checkpoints = self.folder / "run", self.folder / "run/checkpoints"
        self.steps = STEPS if self.about.get("staged") else self.rng.choice((40, 50, STEPS))
        self.events = min(self.rng.randint(3, 6), self.rng.randint(3, 8), most)
        self.options = {"checkpoint.keep_latest_k": self.rng.choice(self.about.get("keep", ["0", "2", "3"]))}
        self.exact, self.full, self.limit = True, False, 0.0  # the same layout so far; a disk was full
        self.problems: list[str] = []

    def expect(self, condition: object, text: str) -> None:
        if not condition:
            self.problems.append(f"seed {self.seed}, event {self.number}, {self.event}: {text}")
            print(f"WRONG: {self.problems[-1]}\n  {self.run}", flush=True)

    # -- events

    def go_back(self, step: int) -> None:
        for later in complete_steps(self.checkpoints):
            if later > step:
                shutil.rmtree(step_folder(self.checkpoints, later))

    def draw(self, kind: str) -> Event:
        rng, (ranks, *_), last = self.rng, LAYOUTS[self.layout], f"step-{self.steps:08d}{INCOMPLETE}"
        # A step in what is left, after going back by hand where nothing is.
        done, early = complete_steps(self.checkpoints), rng.randrange(INTERVAL, self.steps - 15)
        if done and self.steps - done[-1] < 15:
            if done[0] <= early:
                self.go_back(max(step for step in done if step <= early))
            else:
                shutil.rmtree(self.run)
        newest = max(complete_steps(self.checkpoints), default=0)
        step = min(newest + rng.randrange(3, 25), self.steps - 3)
        number, late = rng.choice((SIGTERM, SIGUSR1, SIGINT)), rng.uniform(0, 0.8)
        stop = {"number": number, "target": rng.choice(["launcher", "ranks", "group", *range(ranks)])}
        again, restarts = rng.choice((0, 0.02, 0.1, 0.4)), rng.choice((0, 1)) if ranks > 1 else 1
        save = f"step-{-(-step // INTERVAL) * INTERVAL:08d}{INCOMPLETE}/"
        files = [LOG, rf"{save}.*distcp", rf"{save}.*config\.toml", r"\.status\.json"]
        left = rng.uniform(67, 69) if ranks == 1 else rng.uniform(70, 73)  # seconds, of which 60 are a margin
        started = str(int(time.time() + left - 3600))
        slow, begun, kill = {"slow": [[LOG, 0.03]]}, {"step": step}, {"number": SIGKILL, "target": "all"}
        stopped, launcher = (75, 0), {"target": "launcher"}
        in_save = {"folder": f"checkpoints/{last}"}
        validates = {"folder": f"{self.folder}/full-{self.number}-validation"}
        read = r"step-\d+/(.*distcp|manifest\.json)$"
        retried = {"full": rf"{last}/.*distcp", "times": ranks * rng.randint(1, 2)}
        events = {
            "plain": Event(),
            "killed": Event((-9, 0), slow, kill | begun),
            "killed early": Event((-9, 0), slow, kill | {"late": 10 * late}),
            "signal": Event(stopped, slow, stop | begun),
            "hang-up": Event(stopped, slow, stop | begun | {"number": SIGHUP}),
            "Ctrl-C twice": Event((130, 75, 0), slow, {"number": SIGINT, "again": again} | begun | launcher),
            "signal early": Event((*stopped, 130), slow, stop | launcher | {"late": 11 * late}),
            "signal in last save": Event(stopped, {"slow": [[last, 0.4]]}, stop | in_save),
            "disk full at last save": Event(plan=retried),
            "signal in validation": Event(stopped, {"validation": 0.2}, stop | {"late": late} | validates),
            "stale reads": Event((0, 1), {"stale": read, "times": ranks * rng.randint(1, 3)}),
            "slow load": Event(plan={"slow reads": [["distcp$", 4.0]]}),
            "short of time": Event(stopped, slow, {}, {"ROSSBY_STARTED": started}),
            "rank killed": Event((0, 1 - restarts), slow, stop | begun | {"number": SIGKILL}),
            "disk full": Event(plan={"full": rng.choice(files), "times": rng.choice((1, 1, 8))}),
            "second start": Event(plan=slow, act=partial(self.start_second, step)),
            "reader": Event(plan={"slow": [[LOG, 0.2]]}, act=self.read_meanwhile),
        }
        event = events[kind]
        if kind == "disk full at last save" and rng.random() < 0.6:
            event.strike, event.codes = stop | {"text": "is tried again in", "late": late}, (75, 0)
        if kind == "rank killed":
            event.environment["MAX_RESTARTS"], event.strike["target"] = str(restarts), rng.randrange(ranks)
        self.full = self.full or "full" in event.plan
        return event

    def start_second(self, step: int, job: Job) -> None:
        if not wait_for(job, step):
            return
        stopped = [job.process.pid, *descendants(job.process.pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
        before, second = contents(self.run, ("log-",)), self.start(self.rng.choice(self.layouts), Event())
        code, after = second.end(LIMIT), contents(self.run, ("log-",))
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        lines = re.findall("^rossby: .*", second.output, re.MULTILINE)
        right = code == 1 and len(lines) == 1 and "another run writes there" in lines[0]
        self.expect(right, f"a second start ends with {code}: {second.output[-600:]}")
        self.expect(before == after, f"a second start changes {before.keys() ^ after.keys()} or their bytes")

    def read_meanwhile(self, job: Job) -> None:
        begun = wait_for(job, max(complete_steps(self.checkpoints), default=0) + INTERVAL + 1)
        if not begun or not complete_steps(self.checkpoints):  # the first save may take its time
            return
        other, run, program = self.folder / f"reader-{self.number}", self.run, "forecast.py"
        words = [f"--forecast.path={other}/forecast.zarr", "--forecast.num_steps=2"]
        words += base_options(self.scratch, self.trait)
        if self.rng.random() < 0.5 and "base" not in self.about:
            run, program = other, "train.py"
            words = ["--training.steps=3", f"--checkpoint.initial_load_path={self.run}"]
        how: Any = {"command": started_by(program), "PYTHONPATH": str(ROOT)}
        reader = Job(self.folder / "tiny.toml", run, *LIVES["options"], *self.about["options"], *words, **how)
        right = reader.end(LIMIT) in (0, program == "forecast.py") and not UNWANTED.search(reader.output)
        self.expect(right, f"{program} meanwhile: {reader.process.returncode}, {reader.output[-1500:]}")

    # -- what is done between two starts

    def change(self) -> str:
        """Change or damage something; return what."""
        done, rng = complete_steps(self.checkpoints), self.rng
        kind = rng.choice(LIVES["between"])
        if kind in ("cut", "remove", "rename", "back"):
            if len(done) < 2:
                return ""
            newest = step_folder(self.checkpoints, done[-1])
            path, suffix = rng.choice(sorted(newest.iterdir())), rng.choice((INCOMPLETE, DAMAGED, DELETING))
            if kind == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif kind == "remove":
                path.unlink()
            elif kind == "back":
                self.go_back(rng.choice(done[:-1]))
            elif not newest.with_name(newest.name + suffix).exists():
                newest.rename(newest.with_name(newest.name + suffix))
            return f"{kind} {newest.name} {path.name} {suffix}"
        if kind == "layout":
            self.layout = rng.choice(self.layouts)
        elif kind == "steps":
            self.steps = min(self.steps + 10, STEPS)
        elif kind == "dates":
            number = xr.open_zarr(self.folder / "wb.zarr").sizes["time"]
            ds = small_dataset({WIND: small_wave(number + 4)}).isel(time=slice(number, None))
            ds = ds.assign_coords(latitude=ds.latitude.astype("f4"))
            ds.to_zarr(self.folder / "wb.zarr", append_dim="time")
            convert(self.folder)
        elif kind:
            key = "training.local_batch_size" if kind == "batch" else rng.choice([*LIVES["changes"]])
            self.options[key] = rng.choice(LIVES["changes"].get(key, ["1", "2"]))
            kind = f"{key} = {self.options[key]}"
        self.exact = self.exact and "batch" not in kind and self.layout == self.first_layout
        self.limit = 0.0 if self.exact else self.about.get("tolerance", 1e-5)
        return kind

    # -- a start, and what has to be true after it

    def start(self, layout: str, event: Event) -> Job:
        self.kinds["starts"] += 1
        more = [f"--{key}={value}" for key, value in self.options.items()]
        more += [f"--training.steps={self.steps}"]
        plan = event.plan | {"marks": f"{self.folder}/full-{self.number}"}
        where = self.scratch, self.folder, self.trait, layout
        return start_job(*where, plan, *more, **event.environment)

    def sound(self) -> list[int]:
        """Return the steps of the checkpoints that have the bytes of their manifests."""
        sound = []
        for step in complete_steps(self.checkpoints):
            with suppress(ValueError):
                check_files(step_folder(self.checkpoints, step))
                sound.append(step)
        return sound

    def live(self, kind: str) -> None:
        """One start with an event."""
        self.number, self.event = self.number + 1, kind
        changed, event = self.change() if self.number > 1 else "", self.draw(kind)
        about = f"{event.strike or event.plan} {event.environment or ''}"
        self.event = f"{kind} {about}; changed: {changed}; {self.trait}, {self.layout}, {self.steps} steps"
        self.kinds[kind] += 1
        before, status = self.sound(), self.run / "status.json"
        unsound = len(complete_steps(self.checkpoints)) - len(before)
        unsound += len([*self.checkpoints.glob(f"*{DAMAGED}*")])
        job = self.start(self.layout, event)
        (event.act or partial(strike, **event.strike) if event.act or event.strike else id)(job)
        code, output, done = job.end(LIMIT), job.output, complete_steps(self.checkpoints)
        print(f"  {self.number} {self.event}: {code}, step {last_step(self.run)}", flush=True)
        self.expect(code in event.codes, f"ends with {code}: {output[-1500:]}")
        bad, messages = UNWANTED.search(output), re.findall("^rossby: .*", output, re.MULTILINE)
        self.expect(not bad, f"prints {output[max(bad.start() - 300, 0) : bad.end() + 1500] if bad else ''}")
        many = 1 + ("MAX_RESTARTS" in event.environment) + ("status" in event.plan.get("full", ""))
        self.expect(len(messages) <= many, f"{len(messages)} messages: {messages}")
        set_aside = len([*self.checkpoints.glob(f"*{DAMAGED}*")])
        self.expect(set_aside <= unsound, f"{set_aside} checkpoints are set aside, {unsound} are damaged")
        begun = re.search(r"; from step (\d+) to", output)
        right = not begun or int(begun[1]) == max(before, default=0)
        self.expect(right, f"begins from step {begun and begun[1]}, not from the last of {before}")
        written = status.exists() and status.stat().st_mtime > job.started and code in (0, 1, 75)
        recorded = json.loads(status.read_text())["exit_code"] if written else code
        right = (written or code) and recorded == code or "status" in event.plan.get("full", "")
        self.expect(right, f"ends with {code}, status.json has {recorded}")
        # What is promised to be saved is there, and no more is lost than two intervals.
        last, newest, sound = last_step(self.run), max(done, default=0), self.sound()
        if promise := re.search(r"the checkpoint of step (\d+) is complete|everything is saved", output):
            step = int(promise[1] or last)
            self.expect(step in sound, f"says {promise[0]!r} after step {last}; checkpoints: {done}")
        elif code == 75 and begun and "nothing to save" not in output:
            self.expect(newest == last, f"75 with checkpoints {done} after step {last}: {output[-500:]}")
        self.expect(code or newest == self.steps, f"0 with checkpoints {done}: {output[-500:]}")
        most = (3 if self.full else 2) * INTERVAL
        self.expect(not begun or last - newest <= most, f"{last - newest} steps are lost")
        self.expect(not begun or done == sound, f"of the checkpoints {done} only {sound} are sound")
        # Every step has one line, and the loss of the run that nothing disturbed. Until a run has gone back
        # it has losses that this one has no more.
        lines, own = records(self.run), losses(self.run)
        expected = losses(reference(self.scratch, self.trait, self.first_layout))
        for key in ("loss", "val/loss"):
            steps = [line["step"] for line in lines if key in line]
            right = sorted({*steps}) if key != "loss" else [*range(1, len(steps) + 1)]
            self.expect(steps == right, f"metrics.jsonl has {key} of steps {steps}")
        known = own if code == 0 or "keep" not in self.about else {}
        off = [s for s, loss in known.items() if not abs(loss - expected[s]) <= self.limit * abs(expected[s])]
        self.expect(not off, f"{len(off)} losses differ: {[(s, own[s], expected[s]) for s in off[:2]]}")
        self.expect(code or len(own) == self.steps, f"metrics.jsonl has {len(own)} steps")
        if code == 0 and (self.run / "best").exists() and not self.full:
            scores = {r["step"]: v for r in lines for k, v in r.items() if k.startswith(f"val/rmse/{WIND}")}
            least, best = min(scores, key=scores.__getitem__), read_best(self.run).get("step")
            self.expect(best == least and best in sound, f"best.json has step {best}; scores: {scores}")
        if code == 0 or "is complete" in " ".join(messages):
            files = [path.name for path in [*self.run.glob("*/*"), *self.run.iterdir()]]
            left = [name for name in files if name.endswith((INCOMPLETE, DELETING)) or ".new" in name]
            self.expect(not left, f"ends with {code} and leaves {left}")
        end, mark, left = time.monotonic() + 10, f'"{self.folder}/full'.encode(), [Path()]
        while left and time.monotonic() < end:
            left = []
            for path in Path("/proc").glob("[0-9]*/environ"):
                with suppress(OSError):
                    left += [path] * (mark in path.read_bytes())
        self.expect(not left, "processes are left 10 s after the end")

    def run_all(self) -> None:
        copy_data(self.scratch, self.folder)
        for _ in range(self.events - 1):
            self.live(self.rng.choice(self.about.get("events", LIVES["events"])))
        self.live("plain")
        if self.problems and self.steps not in self.sound():
            return
        # The final tensors, and the reference's of that step.
        tensors = []
        for run in (self.run, reference(self.scratch, self.trait, self.first_layout)):
            folder = step_folder(run / "checkpoints", self.steps)
            about = {n: e for n, e in stored_tensors(folder).items() if self.exact or n.startswith("model.")}
            tensors.append({n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in about.items()})
            read_tensors(folder, tensors[-1])
        off, same_names = [], tensors[0].keys() == tensors[1].keys()
        for name, other in tensors[1].items() if same_names else ():
            # The norm of the difference relative to the reference's; not-a-number counts as 0.
            a, b = tensors[0][name].double().nan_to_num(), other.double().nan_to_num()
            error = ((a - b).norm() / b.norm().clamp(min=1e-3)).item()
            off += [] if error <= self.limit else [name]
        text = f"of {len(tensors[1])} final tensors {len(off)} differ: {off[:3]}"
        self.expect(same_names and not off, text)


def cycles(options: argparse.Namespace) -> int:
    folder = Path(options.folder or tempfile.mkdtemp(prefix="rossby-lives-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tiny.toml").exists():
        # Waves, with some dates that are spikes of the loss, and the module that is injected.
        u = small_wave(DATES)
        u[[30, 31, 62]] += 60 * np.random.default_rng(0).normal(size=u[:3].shape)
        write_run(folder, small_dataset({WIND: u}), **LIVES["run"])
        (folder / "sitecustomize.py").write_text(INJECTED)
    seeds = [options.seed] if options.seed >= 0 else range(options.first, options.first + options.seeds)
    kinds, problems, began, wrong = Counter[str](), [], time.monotonic(), 0
    for seed in seeds:
        life, started = Life(seed, folder, options.events, kinds), time.monotonic()
        print(f"life {seed}: {life.trait}, {life.layout}, {life.events} starts", flush=True)
        try:
            life.run_all()
        except (AssertionError, OSError, ValueError, KeyError) as error:
            life.expect(False, f"the life ends with {type(error).__name__}: {error}")
        problems, wrong = problems + life.problems, wrong + bool(life.problems)
        if not life.problems:
            shutil.rmtree(life.folder)
        print(f"life {seed}: {len(life.problems)} wrong, {time.monotonic() - started:.0f} s", flush=True)
    row = {"lives": len(seeds), "first": seeds[0], **kinds, "wrong": wrong}
    row |= {"hangs": sum("still running after" in text for text in problems)}
    row |= {"tracebacks": sum("Traceback" in text for text in problems), "seconds": time.monotonic() - began}
    record("chaos", [row | {"problems": problems}])
    print(pd.Series(row).to_string(float_format="%.0f"))
    return int(bool(problems))


if __name__ == "__main__":
    # A shell ignores it for what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(cycles(parse(__doc__, ["cycles"], seeds=40, first=0, events=8, folder="", seed=-1)))
