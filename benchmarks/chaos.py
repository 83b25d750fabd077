"""Kill programs at random times, start them again, and compare the results with undisturbed ones.

    .venv/bin/python benchmarks/chaos.py cycles --seeds 40 [--first 0] [--seed 7] [--folder DIR]
    .venv/bin/python benchmarks/chaos.py interrupts [--trials 20] [--seed 0] [--folder DIR]
    .venv/bin/python benchmarks/chaos.py convert [--trials 20] [--seed 0] [--folder DIR]
    .venv/bin/python benchmarks/chaos.py rehearse [--configs train_configs/vit1b.toml ...]

cycles: random lives of a training (benchmarks/lives.py): kills, signals, full disks, damaged checkpoints,
other layouts and settings, second starts, between 3 and 8 starts each. Every exit code, message and file has
to be as docs/reliability.md says, and the end that of a run which nothing disturbed: the same bits on one
layout, within 1e-5 on changing ones. --seed: that life alone, start by start.

interrupts: Ctrl-C, a SIGINT to the process group, at random moments of the first ten seconds of a start, as
often on one rank as on two. Exit code 130 and one line, or 75 and one line once a step was taken.

convert: datasets.convert, with one worker and with two; killed and run again, a digest of all values is that
of a conversion that was not killed.

rehearse: each configuration for a cluster from start to end on a store of its true grid, variables, levels
and chunks, with a small model; seconds and host memory of each stage. 24 GB of memory, 10 GB of disk.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import xarray as xr
import zarr
from numcodecs import Blosc

from benchmarks.attack import descendants
from benchmarks.lives import cycles
from benchmarks.loader import DIMS, Shape, weather
from benchmarks.results_file import ROOT, clock, parse, record, table
from checkpoints.files import complete_steps
from datasets.archive import open_archive
from tests.started_jobs import Job, last_step, write_config
from training.config_checks import load_checked

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
REHEARSED = LISTS["rehearsal"]

DATES = 1600  # four shards of at most 512 dates
WAYS = {"one worker": (), "two workers": ("--workers", "2")}


INTERRUPTED_WITHIN = 10.0  # seconds


def interrupts(options: argparse.Namespace) -> int:
    """Stop runs by Ctrl-C while they start; return 1 if one says more or ends otherwise than documented."""
    draw, rows = random.Random(max(options.seed, 0)), []
    with tempfile.TemporaryDirectory(dir=options.folder or None) as text:
        folder = Path(text)
        config_file = write_config(folder)
        for ranks in (1, 2):
            for number in range(options.trials):
                after, run = draw.uniform(0, INTERRUPTED_WITHIN), folder / f"run-{ranks}-{number}"
                job = Job(config_file, run, NGPU=str(ranks))
                time.sleep(after)
                os.killpg(job.process.pid, signal.SIGINT)
                code, steps = job.end(60), last_step(run)
                log = re.compile(r"[\d:]{8}  |rank +\d+: ")
                lines = [line for line in job.output.splitlines() if not log.match(line)]
                right = code == (75 if steps else 130) and len(lines) == 1 and lines[0].startswith("rossby: ")
                rows.append({"ranks": ranks, "after_s": after, "code": code, "steps": steps, "right": right})
                if not right:
                    print(f"WRONG: {rows[-1]}\n{job.output}", flush=True)
    record("interrupts", rows)
    for ranks in (1, 2):
        of_ranks = [row for row in rows if row["ranks"] == ranks]
        codes = Counter(row["code"] for row in of_ranks if row["right"])
        print(f"{ranks} rank(s): {sum(codes.values())} of {len(of_ranks)} right, by exit code {dict(codes)}")
    return int(not all(row["right"] for row in rows))


def kill_conversions(options: argparse.Namespace) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    draw, rows, wanted, seconds = random.Random(max(options.seed, 0)), [], {}, {}
    with tempfile.TemporaryDirectory(dir=options.folder or None) as text:
        folder = Path(text)
        write_source(folder)
        for way in WAYS:
            target = fresh(folder)
            seconds[way] = clock(partial(convert, folder / "all.nc", target, WAYS[way]))
            wanted[way] = digest(folder / "target.zarr")
        for number in range(options.trials):
            way = [*WAYS][number % len(WAYS)]
            target, after = fresh(folder), draw.uniform(0.1, 1.0) * seconds[way]
            process = start_conversion(folder / "all.nc", target, WAYS[way])
            time.sleep(after)
            process.kill()
            done = len(list(target.glob("conversion/[0-9a-f]*.json")))
            left = "ended before" if process.wait() == 0 else f"{done} parts done"
            convert(folder / "all.nc", target, WAYS[way])
            row = {"way": way, "killed_after_s": after, "left": left}
            rows.append(row | {"same_values": digest(target) == wanted[way]})
    record("convert_killed", rows, ("zarr", "numcodecs", "dask"))
    print(table(rows, way="<14", killed_after_s=">15.2f", left=">16", same_values=">12"))
    same, one = sum(row["same_values"] for row in rows), wanted["one worker"] == wanted["two workers"]
    print(f"{same} of {len(rows)} ended with equal values; two workers as one: {'yes' if one else 'NO'}")
    return 0 if same == len(rows) and one else 1


def write_source(folder: Path) -> None:
    coords: dict[str, Any] = {"variable": ["t2m", "msl", "u10", "v10"]}
    coords["time"] = np.datetime64("2000-01-01", "ns") + np.arange(DATES) * np.timedelta64(6, "h")
    coords |= {"latitude": np.linspace(87.1875, -87.1875, 32), "longitude": np.arange(64) * 5.625}
    values = np.random.default_rng(0).normal(280, 9, (4, DATES, 32, 64)).astype("f4")
    ds = xr.DataArray(values, coords, [*coords]).to_dataset("variable")
    ds.to_netcdf(folder / "all.nc", engine="h5netcdf")


def start_conversion(source: Path, target: Path, options: tuple[str, ...]) -> subprocess.Popen:
    command = [sys.executable, "-m", "datasets.convert", str(source), str(target), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)


def convert(source: Path, target: Path, options: tuple[str, ...]) -> None:
    assert start_conversion(source, target, options).wait() == 0


def fresh(folder: Path) -> Path:
    target = folder / "target.zarr"
    shutil.rmtree(target, ignore_errors=True)
    return target


def digest(path: Path) -> str:
    archive, found = open_archive(str(path)), hashlib.sha256()
    found.update(archive.times.tobytes())
    for name in archive.variables:
        found.update(archive.read_block(0, len(archive.times), [name]).tobytes())
    return found.hexdigest()


RANKS, RESUMED_ON, KILLED_AFTER = 4, 2, 3
TRAIN_DATES = 44  # persistence is fitted to pairs of them, too, as far apart as the longest lead


@dataclass
class Stage:
    """Time of one command, and the host memory of its processes in GB."""

    stage: str
    seconds: float = 0.0
    host: float = 0.0
    code: int | str | None = 0


def private_bytes(pid: int) -> int:
    with suppress(OSError):
        return 1024 * sum(map(int, re.findall(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())))
    return 0


def run_stage(
    name: str, command: list[str], ranks: int = 0, dies_when: Callable[[], bool] | None = None
) -> Stage:
    """Run one stage. dies_when(): True when its processes should be killed, which then counts as success."""
    stage, log, started, killed = Stage(name), tempfile.TemporaryFile("w+"), time.monotonic(), False
    own = {"NGPU": str(ranks), "ROSSBY_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} if ranks else {}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
    while process.poll() is None:
        processes = [process.pid, *descendants(process.pid)]
        stage.host = max(stage.host, sum(map(private_bytes, processes)) / 1e9)
        if dies_when and dies_when():
            killed = True
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        time.sleep(0.2)
    stage.seconds, stage.code = time.monotonic() - started, 0 if killed else process.returncode
    if dies_when and not killed:
        stage.code = stage.code or "not killed"
    if stage.code:
        log.seek(0)
        print(f"{name}: {' '.join(command)}\n{log.read()[-3000:]}", file=sys.stderr)
    return stage


WRITTEN = 8  # dates of a large archive, which has links to them


def write_tiled(path: Path, variables: Iterable[str], levels: list[int], grid: Any, hours: list[int]) -> None:
    """Write analyses in WeatherBench2's layout at these hours after 2000-01-01, all levels in a chunk.

    721 rows have the poles, 1,024 have none; from north to south.
    """
    root, half = zarr.open_group(str(path), mode="w", zarr_format=2), 0 if grid[0] % 2 else 90 / grid[0]
    latitude, dates = np.linspace(90 - half, half - 90, grid[0]), len(hours)
    for number, name in enumerate(variables):
        # As in WeatherBench2: surface variables have their height in their names, or none.
        surface = name.startswith(("2m_", "10m_", "mean_sea", "total_", "surface_"))
        factors = np.ones(()) if surface else 1 + 0.01 * np.arange(len(levels))  # equal levels would compress
        dims, shape = ["time", *(() if surface else ("level",)), *DIMS[1:]], (*factors.shape, *grid)
        attributes: dict[str, Any] = {"_ARRAY_DIMENSIONS": dims}
        mean, deviation = LISTS["scales"].get(name, (3.0, 8.0))
        about: dict[str, Any] = {"shape": (dates, *shape), "chunks": (1, *shape), "dtype": "f4"}
        compressor = Blosc("lz4", clevel=5, shuffle=Blosc.SHUFFLE)
        root.create_array(name, compressors=[compressor], attributes=attributes, **about)
        array: Any = root[name]
        for date in range(min(WRITTEN, dates)):
            # South differs from north: a field that is upside down would be seen.
            field = 2 * np.linspace(0, 1, grid[0])[:, None]
            field = mean + deviation * (field + 0.3 * weather(Shape("", 1, grid, "f4", 1), date, number))
            array[date] = field * factors[..., None, None]
        rest = ".0" * (len(shape))
        for date in range(WRITTEN, dates):
            (path / name / f"{date}{rest}").symlink_to(path / name / f"{date % WRITTEN}{rest}")
    axes = {"time": np.array(hours), "level": np.array(levels), "latitude": latitude}
    for name, numbers in (axes | {"longitude": np.arange(grid[1]) * 360 / grid[1]}).items():
        units: Any = {"units": "hours since 2000-01-01"} if name == "time" else {}
        root.create_array(name, data=numbers, attributes={"_ARRAY_DIMENSIONS": [name], **units})


def rehearse_one(name: str, folder: Path) -> list[Stage]:
    config = load_checked(["--job.config_file", str(ROOT / name)])
    store, outputs, started, data = folder / "era5.zarr", folder / "run", time.monotonic(), config.data
    # Hours after 2000: dates to train on, a start, the truth at every lead of it.
    step, start = data.step_hours, data.step_hours * TRAIN_DATES
    hours = [*range(0, start, step), start, *(start + lead for lead in sorted(config.validation.lead_hours))]
    write_tiled(store, data.variables, list(data.levels), data.grid_shape, hours)
    date = lambda hour: str(np.datetime64("2000-01-01T00") + np.timedelta64(hour, "h"))  # noqa: E731
    periods = {
        "data.train": (0, start - step),
        "data.validation": (start, hours[-1]),
        "forecast.": (start, start),
    }
    keys = ["--job.config_file", name, "--job.dump_folder", str(outputs), "--data.path", str(store)]
    keys += [*REHEARSED["options"], *REHEARSED[config.model.name]]
    for name_of, ends in periods.items():
        keys.append(f"--{name_of}_period={json.dumps([*map(date, ends)])}".replace("._", "."))
    unet, python, train = config.model.name == "unet", [sys.executable], ["./run_train.sh", *keys]
    tile = lambda n: ["--parallelism.context_parallel_degree", str(n)] if unet else []  # noqa: E731
    # Closed forms are the ViT's; of a U-Net there is the dry run.
    dry = ["--dry_run", "--world_size", str(RANKS), *tile(RANKS)]
    plan = dry if unet else ["--cluster", f"cpu{RANKS}", "--json"]

    def saved_and_on() -> bool:
        return bool(complete_steps(outputs / "checkpoints")) and last_step(outputs) >= KILLED_AFTER

    begin, resume = f"statistics, training on {RANKS}, killed", f"resume on {RESUMED_ON}, validation"
    return [
        Stage("store written", time.monotonic() - started),
        run_stage("description of the data", [*python, "-m", "datasets.describe", str(store)]),
        run_stage("plan", [*python, "plan.py", *keys, *plan]),
        run_stage(begin, [*train, *tile(RANKS)], RANKS, saved_and_on),
        run_stage(resume, [*train, *tile(RESUMED_ON)], RESUMED_ON),
        run_stage("forecast", [*python, "forecast.py", *keys, "--validation.local_batch_size", "1"]),
        run_stage("evaluation with plots", [*python, "evaluate.py", *keys]),
        run_stage("trace read", [*python, "-m", "traces.inspect_trace", str(outputs)]),
    ]


def rehearse(options: argparse.Namespace) -> int:
    tables, failed = [], False
    for name in options.configs:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as text:
            stages = rehearse_one(name, Path(text))
        most = max(stage.host for stage in stages)
        stages.append(Stage("in all", sum(stage.seconds for stage in stages), most))
        rows = [{"config": name} | asdict(stage) for stage in stages]
        record("rehearsal", rows)
        tables.append(table(rows, config="<36", stage="<38", seconds=">9.0f", host=">7.2f", code=">12"))
        failed = failed or any(stage.code for stage in stages)
    print("\n\n".join(tables))
    return int(failed)


def main() -> int:
    # A shell ignores it for what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    commands = {"cycles": cycles, "interrupts": interrupts, "convert": kill_conversions, "rehearse": rehearse}
    lives = {"seeds": 40, "first": 0, "events": 8}
    configs = tuple(REHEARSED["configs"])
    options = parse(__doc__, commands, trials=20, seed=-1, folder="", configs=configs, **lives)
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
