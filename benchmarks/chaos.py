"""Kill what runs at random moments, start it again, and compare the end with what was not disturbed.

    .venv/bin/python benchmarks/chaos.py --trials 100 [--seed 0]
    .venv/bin/python benchmarks/chaos.py convert [--trials 20] [--seed 0] [--folder DIR]
    .venv/bin/python benchmarks/chaos.py rehearse [train_configs/vit1b.toml ...]

The first: every trial is one SIGKILL of the launcher of a training and all its ranks, at any time or aimed
at a save (while it is copied, written, renamed, while an old one is deleted) or at loading. Runs alternate:
one keeps its layout between restarts, and has to end with the same bits; the next takes a random layout of
1 to 4 ranks each time, and has to end within 1e-5. A trial is right when the newest checkpoint can be
trusted and is at most the interval and the save in flight behind. With half of the kills something else
goes wrong: a disk that is full for a while, a second start in the folder, a truncated file, links and
strangers among the checkpoints.

convert: datasets.convert, begun, begun with two workers, and appended to a store of the first half; killed
and run again, a digest of all values is that of a conversion that was not killed.

rehearse: each configuration for a cluster from start to end on a store of its true grid, variables, levels
and chunks, with a small model: description, plan, statistics and training on 4 gloo ranks, the death of all
at once, the resume on 2, validation at all lead times, a forecast of 40 steps, scores with plots, the
trace. Minutes of each, and the most that its processes had of the host's memory and of /dev/shm, and read
and wrote. 2 cores, 24 GB, 10 GB of disk. No command needs a GPU; each ends with 1 when anything is wrong.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.loader import write_tiled
from benchmarks.results_file import parser_of, record
from checkpoints.files import DELETING, INCOMPLETE, MANIFEST, check_files, complete_steps, step_folder
from command_line import text_table
from config import Config
from datasets.archive import open_archive
from tests.started_jobs import Job, last_step, losses, records, write_config
from training.config_checks import load_checked

ROOT = Path(__file__).parent.parent


# -- training


STEPS, INTERVAL = 80, 4
AIMS = ("any time", "copying", "writing", "renaming", "deleting", "loading")
TROUBLES = ("full disk", "second start", "truncated file", "link and stranger")
BEGUN = " M parameters, "  # in the log of a run that has its folder to itself
DISK_BYTES = 2**29  # of a run's own disk: some checkpoints of it
TOLERANCE = 1e-5
LAYOUTS: dict[str, tuple[int, str]] = {
    "1 rank": (1, ""),
    "fsdp 2": (2, ""),
    "tp 2": (2, "--parallelism.tensor_parallel_degree 2"),
    "pp 2": (2, "--parallelism.pipeline_parallel_degree 2"),
    "zero-1 2": (2, "--parallelism.data_parallel zero1 --parallelism.data_parallel_replicate_degree 2"),
    "ulysses 2": (2, "--parallelism.context_parallel_degree 2"),
    "fsdp 4": (4, ""),
    "fsdp 2 x tp 2": (4, "--parallelism.tensor_parallel_degree 2"),
}
FIXED = ("1 rank", "fsdp 2")
OPTIONS = (
    f"--training.steps {STEPS} --checkpoint.interval {INTERVAL} --checkpoint.keep_latest_k 2 --model.dim 256 "
    "--model.num_layers 4 --training.local_batch_size 2 --training.global_batch_size 8 --optimizer.eps 1e-4 "
    "--optimizer.lr 1e-4"
).split()


@dataclass
class Tally:
    """What the trials have shown."""

    killed_while: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    harmed: list[bool] = field(default_factory=list)  # lost by a full disk or a truncated file
    runs: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    excused: tuple[Path, int] | None = None  # a run whose newest checkpoint may lie further back
    truncated: set[Path] = field(default_factory=set)  # checkpoints that a trial has cut a file of


def start(config: Path, folder: Path, layout: str) -> Job:
    ranks, options = LAYOUTS[layout]
    return Job(config, folder, *OPTIONS, *options.split(), NGPU=str(ranks))


def state_of(checkpoints: Path, aim: str) -> bool:
    """Whether the folder shows the moment that a kill is aimed at."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []
    if aim == "deleting":
        return any(name.endswith(DELETING) for name in names)
    unfinished = [name for name in names if name.endswith(INCOMPLETE)]
    if aim == "renaming":
        return any((checkpoints / name / MANIFEST).exists() for name in unfinished)
    return bool(unfinished)


def wait_for(aim: str, job: Job, rng: random.Random, start_seconds: float) -> None:
    """Until the moment to kill, or until the job has ended by itself."""
    if aim == "loading":
        end = time.monotonic() + rng.uniform(0.5, 1.1) * start_seconds
        while time.monotonic() < end and job.process.poll() is None:
            time.sleep(0.01)
        return
    began = last_step(job.folder)
    while job.process.poll() is None and (
        last_step(job.folder) == began or job.folder.joinpath("metrics.jsonl").stat().st_mtime < job.started
    ):
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 1.0))
    if aim == "copying":
        while job.process.poll() is None and last_step(job.folder) % INTERVAL:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.03))
    elif aim != "any time":
        while job.process.poll() is None and not state_of(job.folder / "checkpoints", aim):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.0, 0.02) if aim == "writing" else 0.0)


@contextmanager
def own_disk(folder: Path) -> Iterator[bool]:
    """A run's folder as a small disk in memory; False where this process may not mount one."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill_disk(job: Job, rng: random.Random) -> None:
    """Not a byte is left for some seconds, in which checkpoints and metrics are written."""
    ballast = job.folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)):
            pass
    time.sleep(rng.uniform(0.5, 4.0))
    ballast.unlink()


def start_again(job: Job, config: Path, tally: Tally) -> None:
    """Start again in the folder of a run, which waits or could end before: that start is refused."""
    job.signal_all(signal.SIGSTOP)
    second = start(config, job.folder, "1 rank")
    code = second.end(120)
    job.signal_all(signal.SIGCONT)
    if code != 2 or "another run writes there" not in second.output:
        tally.problems.append(f"a second start ended with {code}: {second.output[-300:]}")
    second.log.unlink()


def truncate_something(folder: Path, tally: Tally, rng: random.Random) -> None:
    """A file of the newest of several checkpoints, or one of the run's own."""
    steps = complete_steps(folder / "checkpoints")
    newest = list(step_folder(folder / "checkpoints", steps[-1]).iterdir()) if len(steps) > 1 else []
    files = [path for path in (folder / "statistics.npz", folder / "metrics.jsonl") if path.exists()]
    if not newest + files or list((folder / "checkpoints").glob("*.damaged")):
        return  # one damaged checkpoint a run: the second could be the last
    path = rng.choice(newest or files)
    tally.truncated.add(path.parent)
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, size // 2, max(size - 1, 0)]))


def add_strangers(folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir() or (checkpoints / "step-00009999").is_symlink():
        return
    (checkpoints / "step-00009999").symlink_to(folder)
    (checkpoints / "step-00000001.incomplete").write_text("a file where a folder is expected")
    (checkpoints / "notes.txt").write_text("a stranger")


def interrupted(job: Job, before: float) -> str:
    """What the kill interrupted, from what it left behind."""
    checkpoints, step = job.folder / "checkpoints", last_step(job.folder)
    for what in ("renaming", "deleting", "writing"):
        if state_of(checkpoints, what):
            return what
    metrics = job.folder / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_mtime < before:
        return "loading or starting"
    done = complete_steps(checkpoints)
    return "copying" if step % INTERVAL == 0 and step not in done else "between saves"


def check_trial(folder: Path, tally: Tally, trial: int, full: bool = False) -> None:
    """After a kill: the newest checkpoint is whole and, unless the disk was full, not too far behind.

    One that was truncated may still be there, if nobody came as far as to read it.
    """
    step, every = last_step(folder), complete_steps(folder / "checkpoints")
    steps = [done for done in every if step_folder(folder / "checkpoints", done) not in tally.truncated]
    newest = steps[-1] if steps else 0
    # What a full disk or a truncated file has cost stays lost until the next save.
    full = full or steps != every or tally.excused == (folder, newest)
    tally.excused = (folder, newest) if full else tally.excused
    lost = step - newest
    tally.lost.append(max(lost, 0))
    tally.harmed.append(full)
    if lost > 2 * INTERVAL and not full:
        tally.problems.append(f"trial {trial}: {lost} steps lost")
    for done in steps:
        path = step_folder(folder / "checkpoints", done)
        try:
            check_files(path)
        except ValueError as error:
            tally.problems.append(f"trial {trial}: {error}")


def final_tensors(folder: Path, scratch: Path) -> dict[str, Tensor]:
    """Weights and moments after the last step, read by torch's own tool."""
    dcp_to_torch_save(str(step_folder(folder / "checkpoints", STEPS)), scratch / "whole.pt")
    whole = torch.load(scratch / "whole.pt", weights_only=True)
    return {name: tensor for name, tensor in whole.items() if name.startswith(("model.", "optimizer."))}


def compare(
    folder: Path, reference: tuple[dict[str, Tensor], dict[int, float]], scratch: Path
) -> tuple[bool, float]:
    """Whether all bits and losses are the same; the largest relative difference of a weight's norm."""
    tensors, (expected, expected_losses) = final_tensors(folder, scratch), reference
    same = tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name]) for name in expected
    )
    weights = [name for name in expected if name.startswith("model.")]
    errors = [
        ((tensors[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)).item()
        for name in weights
    ]
    return same and losses(folder) == expected_losses, max(errors)


def one_run(
    config: Path, folder: Path, fixed: str, tally: Tally, trials: int, rng: random.Random, full_disks: bool
) -> tuple[int, list[str]]:
    """Kill a run again and again until it has ended, or `trials` are used up; then let it end."""
    layouts: list[str] = []
    while True:
        layouts.append(fixed or rng.choice(list(LAYOUTS)))
        job, killed, trouble = start(config, folder, layouts[-1]), len(layouts) - 1, ""
        if killed < trials:
            wait_for(rng.choice(AIMS), job, rng, 8.0)
        elif job.end(900) == 0:
            return killed, layouts
        if job.process.poll() is None:
            trouble = rng.choice(TROUBLES) if rng.random() < 0.5 else ""
            if trouble == "full disk" and full_disks:
                fill_disk(job, rng)
            if trouble == "second start" and BEGUN in job.output:  # of two starts at once either may be first
                start_again(job, config, tally)
        if job.process.poll() is not None:
            if job.process.returncode != 0:
                problem = f"{trouble}: ended with {job.process.returncode}: {job.output[-500:]}"
                tally.problems.append(problem)
            return killed, layouts
        job.kill_all()
        tally.troubles[trouble or "none"] += 1
        tally.killed_while[interrupted(job, job.started)] += 1
        check_trial(folder, tally, len(tally.lost), trouble == "full disk")
        print(f"trial {len(tally.lost)}: {layouts[-1]}, step {last_step(folder)} {trouble}", flush=True)
        if trouble == "truncated file":
            truncate_something(folder, tally, rng)
        if trouble == "link and stranger":
            add_strangers(folder)


def kill_training(options: argparse.Namespace) -> int:
    rng, tally, began = random.Random(options.seed), Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        config, references = write_config(scratch), {}
        for name in FIXED:
            job = start(config, scratch / name.replace(" ", "-"), name)
            assert job.end(600) == 0, job.output
            references[name] = (final_tensors(job.folder, job.folder), losses(job.folder))
        left, number = options.trials, 0
        while left > 0 and not tally.problems:
            fixed = FIXED[number // 2 % 2] if number % 2 == 0 else ""
            folder = scratch / f"run-{number}"
            with own_disk(folder) as mounted:
                killed, layouts = one_run(config, folder, fixed, tally, left, rng, mounted)
                left, number = left - killed, number + 1
                if tally.problems:
                    break
                same, error = compare(folder, references[fixed or FIXED[0]], scratch)
            if (fixed and not same) or error > TOLERANCE:
                tally.problems.append(f"run {number}: same bits {same}, difference {error:.1e}")
            tally.runs.append({"layout": fixed or "changing", "kills": killed, "same": same, "error": error})
            print(f"run {number}, {fixed or layouts}: same bits {same}, difference {error:.1e}", flush=True)
    return report(tally, time.monotonic() - began)


def report(tally: Tally, seconds: float) -> int:
    row = {key: value for key, value in vars(tally).items() if key not in ("excused", "truncated")}
    record("chaos", [row | {"trials": len(tally.lost), "seconds": seconds}])
    saves = ("copying", "writing", "renaming", "deleting")
    fixed = [run["same"] for run in tally.runs if run["layout"] != "changing"]
    changing = [run["error"] for run in tally.runs if run["layout"] == "changing"]
    unharmed = [lost for lost, harmed in zip(tally.lost, tally.harmed, strict=True) if not harmed]
    lines: list[tuple] = [
        ("trials", len(tally.lost)),
        ("kills that hit a save", sum(tally.killed_while[what] for what in saves)),
        *((f"  while {what}", count) for what, count in sorted(tally.killed_while.items())),
        *((f"  together with: {what}", count) for what, count in sorted(tally.troubles.items())),
        (f"steps lost, most (never more than {INTERVAL} + {INTERVAL})", max(unharmed, default=0)),
        ("  where a disk was full or a file cut short", max(tally.lost, default=0)),
        ("steps lost, mean", f"{sum(tally.lost) / max(len(tally.lost), 1):.1f}"),
        ("runs on one layout that end in the same bits", f"{sum(fixed)} of {len(fixed)}"),
        (f"worst weights of {len(changing)} runs on changing layouts", f"{max(changing, default=0.0):.1e}"),
        ("seconds", round(seconds)),
    ]
    print("\n".join(["", text_table("<48 >8", lines), *(f"WRONG: {each}" for each in tally.problems)]))
    return int(bool(tally.problems))


# -- conversion


DATES, HALF = 1600, 800  # two to four shards of 512 dates
WAYS = {"begun": (), "two workers": ("--workers", "2"), "appended": ()}


def kill_conversions(options: argparse.Namespace) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    draw, rows, wanted, seconds = random.Random(options.seed), [], {}, {}
    with tempfile.TemporaryDirectory(dir=options.folder) as text:
        folder = Path(text)
        write_sources(folder)
        convert(folder / "half.nc", folder / "half.zarr", ())
        for way in WAYS:
            started = time.perf_counter()
            convert(folder / "all.nc", fresh(folder, way), WAYS[way])
            seconds[way] = time.perf_counter() - started
            wanted[way] = digest(folder / "target.zarr")
        for number in range(options.trials):
            way = [*WAYS][number % len(WAYS)]
            target, after = fresh(folder, way), draw.uniform(0.1, 1.0) * seconds[way]
            process = start_conversion(folder / "all.nc", target, WAYS[way])
            time.sleep(after)
            process.kill()
            left = "ended before" if process.wait() == 0 else parts_done(target)
            convert(folder / "all.nc", target, WAYS[way])
            row = {"way": way, "killed_after_s": after, "left": left}
            rows.append(row | {"same_values": digest(target) == wanted[way]})
    record("convert_killed", rows, ("zarr", "numcodecs", "dask"))
    lines = [
        (r["way"], r["killed_after_s"], f"  {r['left']}", "yes" if r["same_values"] else "NO") for r in rows
    ]
    print(text_table("<14 >12.2f <20 <6", [("way", "killed at s", "  left", "same"), *lines]))
    same, one = sum(row["same_values"] for row in rows), wanted["begun"] == wanted["two workers"]
    print(f"{same} of {len(rows)} ended with equal values; two workers as one: {'yes' if one else 'NO'}")
    return 0 if same == len(rows) and one else 1


def write_sources(folder: Path) -> None:
    """Write the first half of the dates, and all of them."""
    rng = np.random.default_rng(0)
    coords = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(DATES) * np.timedelta64(6, "h"),
        "latitude": np.linspace(87.1875, -87.1875, 32),
        "longitude": np.arange(64) * 5.625,
    }
    names = ("t2m", "msl", "u10", "v10")
    fields = {name: ([*coords], rng.normal(280, 9, (DATES, 32, 64)).astype("f4")) for name in names}
    ds = xr.Dataset(fields, coords)
    ds.to_netcdf(folder / "all.nc", engine="h5netcdf")
    ds.isel(time=slice(HALF)).to_netcdf(folder / "half.nc", engine="h5netcdf")


def start_conversion(source: Path, target: Path, options: tuple[str, ...]) -> subprocess.Popen:
    command = [sys.executable, "-m", "datasets.convert", str(source), str(target), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)


def convert(source: Path, target: Path, options: tuple[str, ...]) -> None:
    assert start_conversion(source, target, options).wait() == 0


def fresh(folder: Path, way: str) -> Path:
    target = folder / "target.zarr"
    shutil.rmtree(target, ignore_errors=True)
    if way == "appended":
        shutil.copytree(folder / "half.zarr", target)
    return target


def digest(path: Path) -> str:
    """Return a digest of the values and dates of a store."""
    archive, found = open_archive(str(path)), hashlib.sha256()
    found.update(archive.times.tobytes())
    for name in archive.variables:
        found.update(archive.read_block(0, len(archive.times), [name]).tobytes())
    return found.hexdigest()


def parts_done(target: Path) -> str:
    """Describe what a kill has left: how many parts are done, or that there is none yet, or no longer."""
    if (target / "conversion").exists():
        return f"{len(list((target / 'conversion').glob('[0-9a-f]*.json')))} parts done"
    return "complete" if (target / "zarr.json").exists() else "not begun"


# -- a rehearsal


CONFIGS = [f"train_configs/{name}.toml" for name in ("vit1b", "vit1b_4096", "unet")]
RANKS, RESUMED_ON = 4, 2
SMALL_STEPS, SAVED_EVERY, KILLED_AFTER = 6, 2, 3
FORECAST_STEPS = 40
TRAIN_DATES = 44  # persistence is fitted to pairs of them, too, as far apart as the longest lead
# On a CPU the fastest kernel at 8,192 tokens keeps them squared: 6 GB a rank, which no kernel of a GPU does.
VIT = "--model.dim 64 --model.num_layers 2 --model.num_heads 1 --model.mlp_dim 128"
# All ranks share a sample, as unet.toml says for its memory: four whole ones of 65 fields need 26 GB here.
SMALL = {"vit": [*VIT.split(), "--model.attention_backend", "sdpa"], "unet": ["--model.width", "4"]}


@dataclass
class Stage:
    """What one command took: GB of the host's memory, of /dev/shm, read and written."""

    name: str
    seconds: float = 0.0
    host: float = 0.0
    shm: float = 0.0
    read: float = 0.0
    written: float = 0.0
    code: int | str | None = 0
    output: str = ""


def shm_bytes() -> float:
    state = os.statvfs("/dev/shm")
    return (state.f_blocks - state.f_bfree) * state.f_frsize / 1e9


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found += [int(word) for word in task.read_text().split()]
    return found + [each for child in found for each in descendants(child)]


def numbers_of(pid: int, file: str) -> dict[str, int]:
    """Return the numbers in a file of /proc, line by line; nothing when the process has ended."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/{file}").read_text()
        return {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}
    return {}


def run_stage(
    name: str, command: list[str], ranks: int = 0, dies_when: Callable[[], bool] | None = None
) -> Stage:
    """Run one stage. dies_when(): True when its processes are to be killed, which then is its good end."""
    stage, log, shm_before = Stage(name), tempfile.TemporaryFile("w+"), shm_bytes()
    own = {"NGPU": str(ranks), "ROSSBY_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} if ranks else {}
    started, killed, moved = time.monotonic(), False, {}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
    while process.poll() is None:
        processes = [process.pid, *descendants(process.pid)]
        private = sum(numbers_of(pid, "status").get("RssAnon", 0) for pid in processes)
        stage.host = max(stage.host, private * 1024 / 1e9)
        stage.shm = max(stage.shm, shm_bytes() - shm_before)
        moved |= {pid: found for pid in processes if (found := numbers_of(pid, "io"))}
        if dies_when and dies_when():
            killed = True
            for pid in [process.pid, *descendants(process.pid)]:
                os.kill(pid, signal.SIGKILL)
            process.wait()
        time.sleep(0.2)
    stage.read, stage.written = (
        sum(each[key] for each in moved.values()) / 1e9 for key in ("rchar", "wchar")
    )
    stage.seconds, stage.code = time.monotonic() - started, 0 if killed else process.returncode
    log.seek(0)
    stage.output = log.read().strip()
    if stage.code or (dies_when and not killed):
        stage.code = stage.code or "not killed"
        print(f"{name}: {' '.join(command)}\n{stage.output[-3000:]}", file=sys.stderr)
    return stage


def hours_of(config: Config) -> list[int]:
    """Return hours of the store after 2000: dates to train on, a start, the truth at every lead of it."""
    start = config.data.step_hours * TRAIN_DATES
    leads = (start + lead for lead in sorted(config.validation.lead_hours))
    return [*range(0, start, config.data.step_hours), start, *leads]


def periods_of(config: Config) -> list[str]:
    """Return options: what is trained on, and one forecast of the longest lead that is validated."""
    hours, start = hours_of(config), config.data.step_hours * TRAIN_DATES
    ends = {"--data.train_period": (0, start - config.data.step_hours)}
    ends |= {"--data.validation_period": (start, hours[-1]), "--forecast.period": (start, start)}
    date = lambda hour: str(np.datetime64("2000-01-01T00") + np.timedelta64(hour, "h"))  # noqa: E731
    return [word for key, period in ends.items() for word in (key, json.dumps([*map(date, period)]))]


def rehearse_one(name: str, folder: Path, more: list[str]) -> list[Stage]:
    """Run all stages of one configuration, in order."""
    config = load_checked(["--job.config_file", str(ROOT / name), *more])
    store, outputs, started, data = folder / "era5.zarr", folder / "run", time.monotonic(), config.data
    grid = (data.grid_shape[0], data.grid_shape[1])
    write_tiled(store, data.variables, list(data.levels), grid, hours_of(config), "f4")
    written = sum(f.stat().st_size for f in store.rglob("*") if f.is_file() and not f.is_symlink()) / 1e9
    keys = f"""
        --job.config_file {name} --job.dump_folder {outputs} --data.path {store}
        --training.steps {SMALL_STEPS} --training.local_batch_size 1
        --training.global_batch_size {RANKS} --lr_scheduler.warmup_steps 2
        --checkpoint.interval {SAVED_EVERY} --metrics.log_freq 1 --profiling.enable_profiling true
        --profiling.profile_freq 3 --profiling.profile_steps 1 --validation.interval 0 --data.num_workers 1
    """.split()
    keys += [*periods_of(config), *SMALL[config.model.name], *more]
    unet, python, train = config.model.name == "unet", [sys.executable], ["./run_train.sh", *keys]
    tiles = {
        n: ["--parallelism.context_parallel_degree", str(n)] if unet else [] for n in (RANKS, RESUMED_ON)
    }
    forecast = ["--forecast.num_steps", str(FORECAST_STEPS), "--validation.local_batch_size", "1"]
    # Closed forms are the ViT's; of a U-Net there is the dry run.
    dry = ["--dry_run", "--world_size", str(RANKS), *tiles[RANKS]]
    plan = dry if unet else ["--cluster", f"cpu{RANKS}", "--json"]

    def saved_and_on() -> bool:
        """Return whether the newest save is complete, and steps were taken after it."""
        return bool(complete_steps(outputs / "checkpoints")) and last_step(outputs) >= KILLED_AFTER

    begin, resume = f"statistics, training on {RANKS}, killed", f"resume on {RESUMED_ON}, validation"
    return [
        Stage("store written", time.monotonic() - started, written=written),
        run_stage("description of the data", [*python, "-m", "datasets.describe", str(store)]),
        run_stage("plan", [*python, "plan.py", *keys, *plan]),
        run_stage(begin, [*train, *tiles[RANKS]], RANKS, saved_and_on),
        run_stage(resume, [*train, *tiles[RESUMED_ON]], RESUMED_ON),
        run_stage(f"forecast of {FORECAST_STEPS} steps", [*python, "forecast.py", *keys, *forecast]),
        run_stage("evaluation with plots", [*python, "evaluate.py", *keys]),
        run_stage("trace read", [*python, "-m", "traces.inspect_trace", str(outputs)]),
    ]


def rehearse(options: argparse.Namespace) -> int:
    tables, failed = [], False
    for name in options.configs or CONFIGS:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as text:
            stages = rehearse_one(name, Path(text), options.more)
            compared = compare_plan(stages, Path(text) / "run")
        total = Stage("in all", sum(stage.seconds for stage in stages))
        for key, join in (("host", max), ("shm", max), ("read", sum), ("written", sum)):
            setattr(total, key, join(getattr(stage, key) for stage in stages))
        lines = [
            (f"  {s.name}", s.seconds / 60, s.host, s.shm, s.read, s.written, f"  {s.code or ''}")
            for s in [*stages, total]
        ]
        head = (f"  {name}", "min", "host", "shm", "read", "written", "  (GB)")
        tables.append(text_table("<38 >7.2f >8.2f >8.2f >9.2f >9.2f <12", [head, *lines]) + f"\n  {compared}")
        failed = failed or any(stage.code for stage in stages)
        rows = [asdict(stage) for stage in stages]
        rows = [{k: v for k, v in row.items() if k not in ("name", "output")} for row in rows]
        names = [{"config": name, "stage": stage.name} for stage in stages]
        record("rehearsal", [first | row for first, row in zip(names, rows, strict=True)])
    print("\n\n".join(tables))
    return int(failed)


def compare_plan(stages: list[Stage], outputs: Path) -> str:
    """Return a line: plan.py's figures for the small run next to those of its 4 ranks."""
    plan, train = (next(s for s in stages if word in s.name) for word in ("plan", "killed"))
    if plan.code or not plan.output.startswith("{"):
        return "no plan in seconds: the dry run stands for it"
    found, steps = (
        json.loads(plan.output),
        [r["step_seconds"] for r in records(outputs) if "step_seconds" in r],
    )
    expected = f"{found['memory']['peak'] / 1e9:.2f} GB, {found['step_seconds']:.2f} s a step"
    seconds = statistics.median(steps) if steps else float("nan")
    here = f"{train.host / RANKS:.2f} GB of the host in training and {seconds:.2f} s"
    return f"plan.py for a rank of {RANKS}: {expected}; here {here}"


def main() -> int:
    parser = parser_of(__doc__)
    commands = {"train": kill_training, "convert": kill_conversions, "rehearse": rehearse}
    parser.add_argument("command", nargs="?", choices=commands, default="train")
    parser.add_argument("configs", nargs="*", help="rehearse; default: those for a cluster")
    parser.add_argument("--trials", type=int, default=0, help="default: 100, of convert 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="convert: where to write")
    parser.add_argument("--more", type=str.split, default=[], help="rehearse: options of train.py")
    options = parser.parse_args()
    options.trials = options.trials or {"convert": 20}.get(options.command, 100)
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
