"""Random lives of a training run: `chaos.py cycles`.

A life is a function of its seed: traits that stay (averages, spikes, adapters), some starts, each of which
meets with an event of EVENTS, and between them what a user changes or damages. It is compared with one run
of the same traits that nothing disturbed. chaos.toml has traits and layouts.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.attack import contents, descendants
from benchmarks.results_file import ROOT, record
from checkpoints.files import DELETING, INCOMPLETE, check_files, complete_steps, step_folder
from command_line import text_table
from tests.started_jobs import Job, last_step, losses, records, small_dataset, small_wave, started_by
from tests.started_jobs import write_config as write_run

LISTS = tomllib.loads((ROOT / "benchmarks/chaos.toml").read_text())["lives"]
TRAITS, LAYOUTS = LISTS["traits"], LISTS["layouts"]
STEPS, INTERVAL, LIMIT = 60, 5, 90.0  # of the longest run; steps between saves; seconds of a start
WIND, SCORE, DATES = "10m_u_component_of_wind", "val/rmse/10m_u_component_of_wind", 80
SLOW_LOG = [r"/metrics\.jsonl$", 0.03]  # seconds that each step takes longer
# What no line of a run may be, whatever it meets with.
UNWANTED = re.compile(
    r"Traceback|terminate called|Exception ignored|^\w*(?:Error|Warning)\b|frame #|leaked|^\[rank",
    re.MULTILINE,
)
# Imported by every process of a run: calls that are slow, and a disk that is full, for paths that match.
INJECTED = """
import builtins, errno, importlib.util, io, json, os, re, sys, time
PLAN = json.loads(os.environ.get("ROSSBY_INJECTED", "{}"))
synced, opened = os.fsync, io.open
def meet(path):
    for pattern, seconds in PLAN.get("slow", ()):
        time.sleep(seconds if re.search(pattern, path) else 0)
    for number in range(PLAN.get("times", 0) if re.search(PLAN.get("full", "^$"), path) else 0):
        try:
            os.close(os.open(f"{PLAN['marks']}-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
def fsync(file):
    meet(os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
    synced(file)
def open(path, mode="r", *more, **options):
    if mode[0] in "wax" and isinstance(path, (str, os.PathLike)):
        meet(os.fspath(path))
    return opened(path, mode, *more, **options)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "training.bad_steps" and "skipped" in PLAN:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: execute(module) or setattr(
                module, "MOST_SKIPPED", PLAN["skipped"])
            return spec
if PLAN:
    os.fsync, io.open, builtins.open = fsync, open, open
    sys.meta_path.insert(0, Finder())
"""


@dataclass
class Event:
    """act: done to the job once it is started. codes: with which it may end."""

    act: Callable[[Job], object] = id
    codes: tuple[int, ...] = (0,)
    options: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    text: str = ""
    ends_saved: bool = False  # nothing is lost


@dataclass
class Tally:
    folder: Path  # of references and lives
    verbose: bool = False
    starts: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    references: dict[tuple[str, str], Path] = field(default_factory=dict)

    def job(self, data: Path, run: Path, trait: str, layout: str, *options: str, **more: str) -> Job:
        """Start a run on the data of a folder. more: variables of its environment."""
        ranks, *own = LAYOUTS[layout]
        about = TRAITS[trait]
        if "base" in about:
            base = step_folder(self.reference(about["base"], "1 rank") / "checkpoints", STEPS)
            own = [*own, f"--checkpoint.initial_load_path={base}"]
        plan = json.loads(more.pop("plan", "{}")) | about.get("plan", {})
        more = {"NGPU": str(ranks), "PYTHONPATH": str(self.folder)} | more
        words = [*LISTS["options"], *about["options"], *own, *options]
        return Job(data / "tiny.toml", run, *words, ROSSBY_INJECTED=json.dumps(plan), **more)

    def reference(self, trait: str, layout: str) -> Path:
        """Return the folder of a run that nothing disturbs."""
        run = self.references.get((trait, layout), self.folder / f"{trait}, {layout}")
        if (trait, layout) not in self.references:
            self.references[trait, layout] = run
            if (
                not (run / "status.json").exists()
                or json.loads((run / "status.json").read_text())["exit_code"]
            ):
                shutil.rmtree(run, ignore_errors=True)
                job = self.job(self.folder, run, trait, layout, "--checkpoint.keep_latest_k=0")
                assert job.end(300) == 0, job.output
        return run


def write_data(folder: Path) -> None:
    """Write waves, with some dates that are spikes of the loss, and the module that is injected."""
    u = small_wave(DATES)
    u[[30, 31, 62]] += 60 * np.random.default_rng(0).normal(size=u[:3].shape)
    write_run(folder, small_dataset({WIND: u}), **LISTS["run"])
    (folder / "sitecustomize.py").write_text(INJECTED)


def reach(job: Job, step: int, *, text: str = "", folder: str = "") -> bool:
    """Wait until the run has logged a step, or a text, or has a folder; False if it has ended."""
    path, end = job.folder / "metrics.jsonl", time.monotonic() + LIMIT
    while job.process.poll() is None and time.monotonic() < end:
        begun = path.exists() and path.stat().st_mtime > job.started and last_step(job.folder) >= step
        if (not step or begun) and text in job.output and (not folder or (job.folder / folder).exists()):
            return True
        time.sleep(0.004)
    return False


def send(job: Job, number: int, target: int | str) -> None:
    """Send a signal to the launcher, to the group of a terminal, to all ranks or to one of them."""
    with suppress(ProcessLookupError):
        ranks = job.ranks() or {0: job.process.pid}
        if target == "group":
            os.killpg(job.process.pid, number)
        else:
            chosen = [*ranks.values()] if target == "all ranks" else [ranks.get(target, job.process.pid)]
            for pid in chosen if target != "launcher" else [job.process.pid]:
                os.kill(pid, number)


class Life:
    def __init__(self, seed: int, tally: Tally, most: int) -> None:
        self.seed, self.tally, self.rng, self.number = seed, tally, random.Random(seed), 0
        self.trait = self.rng.choice([*TRAITS])
        self.about = TRAITS[self.trait]
        self.layout = self.first_layout = self.rng.choice([*LAYOUTS])
        self.folder = tally.folder / f"life-{seed}"
        self.run, self.checkpoints = self.folder / "run", self.folder / "run/checkpoints"
        self.steps = STEPS if self.about.get("staged") else self.rng.choice((40, 50, STEPS))
        self.events = min(self.rng.randint(3, 8), most)
        keep = "0" if self.about.get("fragile") else self.rng.choice(("0", "2", "3"))
        self.changes: dict[str, str] = {"checkpoint.keep_latest_k": keep}
        self.exact = True  # the same layout so far
        self.whole = True  # compared with the reference
        self.full = False  # a disk was full
        self.problems: list[str] = []
        self.event, self.job = "", None

    # -- events

    def somewhere(self, least: int = 1) -> int:
        """Return a step in what is left, after going back by hand where nothing is."""
        done = complete_steps(self.checkpoints)
        if done and self.steps - done[-1] < 15:
            lower = [step for step in done if step <= self.steps - 15]
            kept = self.rng.choice(lower or [0])
            for step in done if lower else []:
                if step > kept:
                    shutil.rmtree(step_folder(self.checkpoints, step))
            if not lower:
                shutil.rmtree(self.run)
        newest = max(complete_steps(self.checkpoints), default=0)
        return min(newest + least + self.rng.randrange(2, 25), self.steps - 3)

    def target(self) -> int | str:
        return self.rng.choice(["launcher", "all ranks", "group", *range(LAYOUTS[self.layout][0])])

    def plain(self) -> Event:
        return Event()

    def killed(self) -> Event:
        step, late = self.somewhere() if self.rng.random() < 0.7 else 0, self.rng.uniform(0.5, 9.0)

        def act(job: Job) -> None:
            reach(job, step) if step else time.sleep(late)
            job.kill_all()

        return Event(
            act, (-9, 0), plan={"slow": [SLOW_LOG]}, text=f"at step {step}" if step else f"{late:.1f} s"
        )

    def signalled(self) -> Event:
        step, number, target = self.somewhere(), self.rng.choice(("TERM", "USR1", "INT")), self.target()

        def act(job: Job) -> None:
            if reach(job, step):
                send(job, signal.Signals[f"SIG{number}"], target)

        plan = {"slow": [SLOW_LOG]}
        return Event(act, (75, 0), plan=plan, text=f"{number} to {target}, step {step}", ends_saved=True)

    def hung_up(self) -> Event:
        step, target = self.somewhere(), self.rng.choice(("launcher", "all ranks"))

        def act(job: Job) -> None:
            if reach(job, step):
                send(job, signal.SIGHUP, target)

        return Event(act, (-1, 129, 1, 75, 0), plan={"slow": [SLOW_LOG]}, text=f"{target}, step {step}")

    def interrupted_twice(self) -> Event:
        step, pause = self.somewhere(), self.rng.choice((0.0, 0.02, 0.1, 0.4))
        target = self.rng.choice(("launcher", "group"))

        def act(job: Job) -> None:
            if reach(job, step):
                send(job, signal.SIGINT, target)
                time.sleep(pause)
                send(job, signal.SIGINT, target)

        return Event(act, (130, 75, 0), plan={"slow": [SLOW_LOG]}, text=f"{target}, step {step}, {pause} s")

    def signalled_early(self) -> Event:
        late, number = self.rng.uniform(0.2, 11.0), self.rng.choice(("TERM", "USR1", "INT"))
        self.somewhere()

        def act(job: Job) -> None:
            if not reach(job, 1) if late > 8 else time.sleep(late):
                return
            if job.process.poll() is None:
                send(job, signal.Signals[f"SIG{number}"], "launcher")

        codes = (75, 130, 143, 138, -15, -10, 0)
        return Event(
            act, codes, plan={"slow": [SLOW_LOG]}, text=f"{number} after {late:.1f} s", ends_saved=True
        )

    def signalled_in_last_save(self) -> Event:
        pattern, target = f"step-{self.steps:08d}{INCOMPLETE}", self.target()
        number, pause = self.rng.choice(("TERM", "USR1", "INT")), self.rng.uniform(0, 0.8)
        self.somewhere()

        def act(job: Job) -> None:
            if reach(job, 0, folder=f"checkpoints/{pattern}"):
                time.sleep(pause)
                send(job, signal.Signals[f"SIG{number}"], target)

        plan = {"slow": [[pattern, 0.4]]}
        return Event(
            act, (0, 75), plan=plan, text=f"{number} to {target} after {pause:.1f} s", ends_saved=True
        )

    def full_at_last_save(self) -> Event:
        self.somewhere()
        ranks, self.full = LAYOUTS[self.layout][0], True
        plan = {
            "full": rf"step-{self.steps:08d}{INCOMPLETE}/.*distcp",
            "times": ranks * self.rng.randint(1, 2),
        }
        number, target, pause = self.rng.choice(("", "TERM", "USR1")), self.target(), self.rng.uniform(0, 1)

        def act(job: Job) -> None:
            if number and reach(job, 0, text="is tried again in"):
                time.sleep(pause)
                send(job, signal.Signals[f"SIG{number}"], target)

        text = f"{number} to {target} after {pause:.1f} s" if number else ""
        return Event(act, (0, 75) if number else (0,), plan=plan, text=text, ends_saved=True)

    def short_of_time(self) -> Event:
        self.somewhere()
        left = 60 + (7 if LAYOUTS[self.layout][0] == 1 else 10) + self.rng.uniform(0, 1.5)
        started = {"ROSSBY_STARTED": str(int(time.time() - 3600 + left))}
        options, plan = ["--training.max_wall_time=1:00:00"], {"slow": [SLOW_LOG]}
        return Event(id, (75, 0), options, plan, started, ends_saved=True)

    def rank_killed(self) -> Event:
        step, restarts = self.somewhere(), self.rng.choice((0, 1))
        ranks = LAYOUTS[self.layout][0]
        restarts, rank = (restarts, self.rng.randrange(ranks)) if ranks > 1 else (1, 0)

        def act(job: Job) -> None:
            if reach(job, step):
                send(job, signal.SIGKILL, rank)

        more, text = {"MAX_RESTARTS": str(restarts)}, f"rank {rank}, step {step}, {restarts} restarts"
        return Event(act, (0,) if restarts else (1, 0), [], {"slow": [SLOW_LOG]}, more, text)

    def full_disk(self) -> Event:
        step, where = self.somewhere(), self.rng.choice(("checkpoint", "log", "status", "config"))
        self.full = True
        saved = f"step-{-(-step // INTERVAL) * INTERVAL:08d}{INCOMPLETE}/"
        names = {"checkpoint": rf"{saved}.*distcp", "log": r"/metrics\.jsonl$"}
        names |= {"status": r"\.status\.json", "config": rf"{saved}\.?config\.toml"}
        plan = {"full": names[where], "times": self.rng.randint(1, 8) if where == "log" else 1}
        return Event(plan=plan, text=f"{where}, step {step}")

    def second_start(self) -> Event:
        step, ranks = self.somewhere(), self.rng.choice(("same", "1 rank", "fsdp 2"))

        def act(job: Job) -> None:
            if not reach(job, step):
                return
            stopped = [job.process.pid, *descendants(job.process.pid)]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(0.2)
            before = contents(self.run, ("log-",))
            second = self.start(self.layout if ranks == "same" else ranks)
            code, after = self.end(second), contents(self.run, ("log-",))
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            lines = re.findall("^rossby: .*", second.output, re.MULTILINE)
            if code != 2 or len(lines) != 1 or "another run writes there" not in lines[0]:
                self.wrong(f"a second start ends with {code}: {second.output[-600:]}")
            if changed := [name for name in before | after if before.get(name) != after.get(name)]:
                self.wrong(f"a second start has changed {changed}")

        return Event(act, plan={"slow": [SLOW_LOG]}, text=f"{ranks}, step {step}")

    def read_meanwhile(self) -> Event:
        self.somewhere()
        other, what = self.folder / f"reader-{self.number}", self.rng.choice(("forecast", "fine-tuning"))

        def act(job: Job) -> None:
            newest = max(complete_steps(self.checkpoints), default=0)
            if not reach(job, newest + INTERVAL + 1) or not complete_steps(self.checkpoints):
                return
            options = ["--training.steps=3", f"--checkpoint.initial_load_path={self.run}"]
            words = [*LISTS["options"], *self.about["options"], *options]
            run, program = other, "train.py"
            if what == "forecast":
                run, program = self.run, "forecast.py"
                words = [*LISTS["options"], *self.about["options"], f"--forecast.path={other}/forecast.zarr"]
                words += ["--forecast.num_steps=2"]
            elif "base" in self.about:
                return
            more = {"PYTHONPATH": str(ROOT)}
            reader = Job(self.folder / "tiny.toml", run, *words, command=started_by(program), **more)
            code = self.end(reader)
            if code not in ((0, 1) if what == "forecast" else (0,)) or UNWANTED.search(reader.output):
                self.wrong(f"{what} while it writes ends with {code}: {reader.output[-1500:]}")

        return Event(act, plan={"slow": [[SLOW_LOG[0], 0.2]]}, text=what)

    # -- what is done between two starts

    def change(self) -> str:
        done = complete_steps(self.checkpoints)
        damage = [self.cut, self.lose_file, self.rename, self.go_back] if len(done) > 1 else []
        settings = [
            self.other_layout,
            self.other_batch,
            self.more_steps,
            self.other_validation,
            self.other_mode,
        ]
        chosen = self.rng.choice([None, *damage, *settings, self.append_dates])
        return chosen() if chosen else ""

    def newest(self) -> Path:
        return step_folder(self.checkpoints, complete_steps(self.checkpoints)[-1])

    def cut(self) -> str:
        files = sorted(path for path in self.newest().iterdir() if path.is_file())
        path = self.rng.choice(files)
        os.truncate(path, path.stat().st_size // 2)
        return f"{path.parent.name}/{path.name} cut"

    def lose_file(self) -> str:
        path = self.rng.choice(sorted(path for path in self.newest().iterdir() if path.is_file()))
        path.unlink()
        return f"{path.parent.name}/{path.name} removed"

    def rename(self) -> str:
        path, suffix = self.newest(), self.rng.choice((INCOMPLETE, ".damaged", DELETING))
        with suppress(OSError):
            path.rename(path.with_name(path.name + suffix))
        return f"{path.name} renamed to {suffix}"

    def go_back(self) -> str:
        done = complete_steps(self.checkpoints)
        kept = self.rng.choice(done[:-1])
        for step in done:
            if step > kept:
                shutil.rmtree(step_folder(self.checkpoints, step))
        return f"back to {kept} by hand"

    def other_layout(self) -> str:
        self.layout = self.rng.choice([*LAYOUTS])
        self.exact = self.exact and self.layout == self.first_layout
        return self.layout

    def other_batch(self) -> str:
        fits = [size for size in ("1", "2", "4") if int(size) * LAYOUTS[self.layout][0] <= 4]
        return self.set("training.local_batch_size", self.rng.choice(fits), exact=False)

    def more_steps(self) -> str:
        self.steps = min(self.steps + 10, STEPS)
        return f"{self.steps} steps"

    def other_validation(self) -> str:
        return self.set("validation.interval", self.rng.choice(("5", "7", "10", "20", "0")))

    def other_mode(self) -> str:
        return self.set("checkpoint.async_mode", self.rng.choice(LISTS["modes"]))

    def set(self, key: str, value: str, exact: bool = True) -> str:
        self.exact, self.changes[key] = self.exact and exact, value
        return f"{key} = {value}"

    def append_dates(self) -> str:
        path = self.folder / "wb.zarr"
        import xarray as xr

        number = xr.open_zarr(path).sizes["time"]
        whole = small_dataset({WIND: small_wave(number + 4)}).isel(time=slice(number, None))
        whole = whole.assign_coords(latitude=whole.latitude.astype("f4"))
        whole.to_zarr(path, append_dim="time")
        return "4 dates appended"

    # -- a start, and what has to be true after it

    def wrong(self, text: str) -> None:
        self.problems.append(f"seed {self.seed}, event {self.number} ({self.event}): {text}")
        print(f"WRONG: {self.problems[-1]}\n  {self.tally.folder}", flush=True)

    def start(self, layout: str, event: Event | None = None) -> Job:
        event, self.tally.starts = event or Event(), self.tally.starts + 1
        plan = json.dumps(event.plan | {"marks": str(self.folder / f"full-{self.number}")})
        options = [f"--{key}={value}" for key, value in self.changes.items()]
        options += [f"--training.steps={self.steps}", *event.options]
        return self.tally.job(
            self.folder, self.run, self.trait, layout, *options, plan=plan, **event.environment
        )

    def end(self, job: Job) -> int | None:
        """Return the exit code; None for one that hangs, which is killed."""
        while job.process.poll() is None and time.time() < job.started + LIMIT:
            time.sleep(0.02)
        if (code := job.process.poll()) is None:
            for pid in [*descendants(job.process.pid), job.process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.process.wait()
        return code

    def sound(self, step: int) -> bool:
        with suppress(ValueError):
            return check_files(step_folder(self.checkpoints, step)) is None
        return False

    def live(self, kind: str) -> None:
        """One start with an event."""
        self.number += 1
        changed = self.change() if self.number > 1 else ""
        event: Event = getattr(self, kind)()
        self.event = f"{kind}: {event.text}; {changed}; {self.trait}, {self.layout}, {self.steps} steps"
        self.tally.kinds[kind] += 1
        sound = [step for step in complete_steps(self.checkpoints) if self.sound(step)]
        status, began = self.run / "status.json", time.monotonic()
        self.job = job = self.start(self.layout, event)
        event.act(job)
        code = self.end(job)
        if self.tally.verbose:
            seconds = time.monotonic() - began
            print(
                f"  {self.number} {self.event}: {code}, {seconds:.0f} s, step {last_step(self.run)}",
                flush=True,
            )
        output, done = job.output, complete_steps(self.checkpoints)
        messages = re.findall("^rossby: .*", output, re.MULTILINE)
        if code not in event.codes:
            self.wrong(f"{'hangs' if code is None else f'ends with {code}'}: {output[-1500:]}")
        if found := UNWANTED.search(output):
            self.wrong(f"prints {found[0]!r}: ...{output[max(found.start() - 300, 0) : found.end() + 1200]}")
        if len(messages) > (2 if "MAX_RESTARTS" in event.environment else 1):
            self.wrong(f"{len(messages)} messages: {messages}")
        if (begin := re.search(r"; from step (\d+) to", output)) and int(begin[1]) != max(sound, default=0):
            self.wrong(f"begins from step {begin[1]}, not {max(sound, default=0)}")
        written = status.exists() and status.stat().st_mtime > job.started
        told = json.loads(status.read_text())["exit_code"] if status.exists() else "none"
        if (written and code in (0, 1, 75) or code == 0) and told != code and "status" not in event.text:
            self.wrong(f"ends with {code}, status.json has {told}")
        self.check_saved(output, event, code, done)
        self.check_records(code == 0)
        if code == 0 or "is complete" in " ".join(messages):
            places = [self.checkpoints, self.run / "best", self.run]
            files = [path.name for place in places if place.exists() for path in place.iterdir()]
            if left := [n for n in files if n.endswith((INCOMPLETE, DELETING)) or ".new" in n]:
                self.wrong(f"ends with {code} and leaves {left}")

    def check_saved(self, output: str, event: Event, code: int | None, done: list[int]) -> None:
        last, newest = last_step(self.run), max(done, default=0)
        if promise := re.search(r"the checkpoint of step (\d+) is complete|everything is saved", output):
            step = int(promise[1] or last)
            if step not in done or not self.sound(step):
                self.wrong(
                    f"says {promise[0]!r}, after step {last}; checkpoints: {done}; {os.listdir(self.run)}"
                )
        elif code == 75 and "nothing to save" not in output and newest != last and "from step" in output:
            self.wrong(f"75 with checkpoints {done} after step {last}: {output[-500:]}")
        if code == 0 and newest != self.steps:
            self.wrong(f"0 with checkpoints {done}: {output[-500:]}")
        if last - newest > 2 * INTERVAL + (INTERVAL if self.full else 0) and "from step" in output:
            self.wrong(f"{last - newest} steps are lost")
        if bad := [step for step in done if not self.sound(step)]:
            if "from step" in output:
                self.wrong(f"checkpoints {bad} are damaged")

    def check_records(self, ended: bool) -> None:
        expected, found = losses(self.tally.reference(self.trait, self.first_layout)), records(self.run)
        for key in ("loss", "val/loss"):
            steps = [record["step"] for record in found if key in record]
            if steps != sorted(set(steps)) or (key == "loss" and steps != [*range(1, len(steps) + 1)]):
                self.wrong(f"metrics.jsonl has {key} of steps {steps}")
        limit = 0.0 if self.exact else self.about.get("tolerance", 1e-5)
        pairs = [(step, loss, expected[step]) for step, loss in losses(self.run).items() if self.whole]
        off = [pair for pair in pairs if not abs(pair[1] - pair[2]) <= limit * abs(pair[2])]
        if off:
            self.whole = False
            self.wrong(f"step {off[0][0]} has loss {off[0][1]}, the reference {off[0][2]}; {len(off)} differ")
        if ended and len(losses(self.run)) != self.steps:
            self.wrong(f"metrics.jsonl has {len(losses(self.run))} of {self.steps} steps")
        if ended and (self.run / "best").exists() and not self.full:
            scores = {r["step"]: value for r in found for k, value in r.items() if k.startswith(SCORE)}
            best, kept = (
                json.loads((self.run / "best/best.json").read_text()),
                complete_steps(self.run / "best"),
            )
            least = min(scores, key=lambda step: scores[step])
            with suppress(ValueError):
                if kept == [least] and best["step"] == least:
                    return check_files(step_folder(self.run / "best", least))
            self.wrong(f"best/ has {kept}, best.json {best}; scores: {scores}")

    def compare(self) -> None:
        """Compare the final tensors with the reference's of that step."""
        reference = self.tally.reference(self.trait, self.first_layout)
        ours, theirs = (tensors(f / "checkpoints", self.steps, self.folder) for f in (self.run, reference))
        if ours.keys() != theirs.keys():
            return self.wrong(f"other tensors: {ours.keys() ^ theirs.keys()}")
        limit = 0.0 if self.exact else self.about.get("tolerance", 1e-5)
        error = {name: difference(ours[name], each) for name, each in theirs.items()}
        off = {n: e for n, e in error.items() if not e <= limit and (self.exact or n.startswith("model."))}
        if off:
            self.wrong(
                f"{len(off)} of {len(error)} final tensors differ: {dict(itertools.islice(off.items(), 3))}"
            )

    def run_all(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        shutil.copytree(self.tally.folder / "wb.zarr", self.folder / "wb.zarr")
        text = (self.tally.folder / "tiny.toml").read_text()
        (self.folder / "tiny.toml").write_text(text.replace(str(self.tally.folder), str(self.folder)))
        kinds = ["plain", "killed", "rank_killed"] if self.about.get("fragile") else [*EVENTS]
        for _ in range(self.events - 1):
            self.live(self.rng.choice(kinds))
        self.live("plain")
        if self.whole and max(complete_steps(self.checkpoints), default=0) == self.steps:
            self.compare()


EVENTS = (
    "plain killed signalled hung_up interrupted_twice signalled_early signalled_in_last_save full_at_last_save "
    "short_of_time rank_killed full_disk second_start read_meanwhile"
).split()


def tensors(checkpoints: Path, step: int, scratch: Path) -> dict[str, Tensor]:
    dcp_to_torch_save(str(step_folder(checkpoints, step)), scratch / "whole.pt")
    return torch.load(scratch / "whole.pt", weights_only=True)


def difference(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num()):
        return 0.0
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp(min=1e-3)).item()


def cycles(options: argparse.Namespace) -> int:
    folder = Path(options.folder or tempfile.mkdtemp(prefix="rossby-lives-"))
    folder.mkdir(parents=True, exist_ok=True)
    alone, began, wrong = options.seed >= 0, time.monotonic(), 0
    tally = Tally(folder, alone)
    if not (folder / "tiny.toml").exists():
        write_data(folder)
    seeds = [options.seed] if alone else range(options.first, options.first + options.seeds)
    for seed in seeds:
        life, started = Life(seed, tally, options.events), time.monotonic()
        try:
            life.run_all()
        except Exception as error:
            life.wrong(f"the life ends with {type(error).__name__}: {error}")
            if alone:
                raise
        tally.problems, wrong = tally.problems + life.problems, wrong + bool(life.problems)
        if not life.problems:
            shutil.rmtree(life.folder)
        about = f"{life.trait}, {life.events} starts, {len(life.problems)} wrong"
        print(f"life {seed}: {about}, {time.monotonic() - started:.0f} s", flush=True)
    row = {"lives": len(seeds), "first": seeds[0], "starts": tally.starts, "wrong": wrong}
    row |= {name: sum(text in each for each in tally.problems) for name, text in FOUND.items()}
    record(
        "chaos",
        [row | {"events": tally.kinds, "problems": tally.problems, "seconds": time.monotonic() - began}],
    )
    print(text_table("<40 >8", [*((n.replace("_", " "), str(c)) for n, c in {**tally.kinds, **row}.items())]))
    return int(bool(tally.problems))


FOUND = {"hangs": "): hangs", "tracebacks": "Traceback"}
