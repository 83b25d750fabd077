"""Each configuration for a cluster from start to end, on a store of its true size, with a small model.

    .venv/bin/python benchmarks/rehearsal.py [train_configs/vit1b.toml ...]

The store has the configuration's grid, variables, levels and chunks (simulated fields; eight dates are
written and linked to by the others), and the run its layout, folded to 4 gloo ranks; only depth, width,
batch and steps are small. Preflight of the data, plan, statistics and training on 4 ranks, a save, the death
of all processes at once, the resume on 2 ranks, validation at all lead hours, a forecast of 40 steps, its
scores with their plots, the trace read. For each stage: minutes, the most that its processes held of the
host's memory and of /dev/shm, bytes read and written (all that they asked for, from the page cache too).
Ends with 1 when a stage failed. Needs no GPU, 2 cores, 24 GB, 10 GB of disk and some minutes a configuration.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benchmarks.results_file import record
from benchmarks.tiled_store import write_tiled_analyses
from checkpoints.files import complete_steps
from config import Config
from tests.started_jobs import last_step, records
from training.config_checks import load_checked

ROOT = Path(__file__).parent.parent
CONFIGS = [f"train_configs/{name}.toml" for name in ("vit1b", "vit1b_4096", "unet")]
RANKS, RESUMED_ON = 4, 2
STEPS, SAVED_EVERY, KILLED_AFTER = 6, 2, 3
FORECAST_STEPS = 40
TRAIN_DATES = 44  # persistence is fitted to pairs of them, too, as far apart as the longest lead
# On a CPU the fastest kernel at 8,192 tokens keeps them squared: 6 GB a rank, which no kernel of a GPU does.
VIT = "--model.dim 64 --model.num_layers 2 --model.num_heads 1 --model.mlp_dim 128"
# All ranks share a sample, as unet.toml says for its memory: four whole ones of 65 fields need 26 GB here.
SMALL = {"vit": [*VIT.split(), "--model.attention_backend", "sdpa"], "unet": ["--model.width", "4"]}


@dataclass
class Stage:
    """What one command took."""

    name: str
    seconds: float = 0.0
    host: float = 0.0  # GB: the most that its processes held of their own at once
    shm: float = 0.0  # GB of /dev/shm
    read: float = 0.0  # GB
    written: float = 0.0  # GB
    code: int | None = None
    said: str = ""

    def line(self) -> str:
        sizes = f"{self.host:>8.2f}{self.shm:>8.2f}{self.read:>9.2f}{self.written:>9.2f}"
        return f"  {self.name:<34}{self.seconds / 60:>7.2f}{sizes}  {'' if self.code == 0 else self.code}"


@dataclass
class Watch:
    """What a process and all that it starts hold, read and write, seen every half second."""

    root: int
    shm_before: float = field(default_factory=lambda: shm_bytes())
    host: float = 0.0
    shm: float = 0.0
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)  # process -> bytes read, written

    def look(self) -> None:
        processes = [self.root, *descendants(self.root)]
        self.host = max(self.host, sum(own_memory(pid) for pid in processes))
        self.shm = max(self.shm, shm_bytes() - self.shm_before)
        self.moved |= {pid: found for pid in processes if (found := bytes_moved(pid))}

    def totals(self) -> tuple[float, float]:
        return sum(r for r, _ in self.moved.values()) / 1e9, sum(w for _, w in self.moved.values()) / 1e9


def shm_bytes() -> float:
    state = os.statvfs("/dev/shm")
    return (state.f_blocks - state.f_bfree) * state.f_frsize / 1e9


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue  # it has ended meanwhile
    return found + [each for child in found for each in descendants(child)]


def numbers_of(pid: int, file: str) -> dict[str, int]:
    """What a file of /proc says, line by line; nothing when the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    return {name: int(words[0]) for name, text in pairs if (words := text.split()) and words[0].isdecimal()}


def own_memory(pid: int) -> float:
    """GB that nobody else maps."""
    return numbers_of(pid, "status").get("RssAnon", 0) * 1024 / 1e9


def bytes_moved(pid: int) -> tuple[int, int] | None:
    found = numbers_of(pid, "io")
    return (found["rchar"], found["wchar"]) if found else None


def run(name: str, command: list[str], environment: dict[str, str], dies_when: Any = None) -> Stage:
    """One stage. dies_when(): whether all its processes are to be killed now, which then is its good end."""
    stage, log = Stage(name), tempfile.TemporaryFile("w+")
    started, killed = time.monotonic(), False
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
    )
    watch = Watch(process.pid)
    while process.poll() is None:
        watch.look()
        if dies_when and dies_when():
            killed = True
            for pid in [process.pid, *descendants(process.pid)]:
                os.kill(pid, 9)
            process.wait()
        time.sleep(0.2)
    stage.seconds, stage.host, stage.shm = time.monotonic() - started, watch.host, max(watch.shm, 0.0)
    stage.read, stage.written = watch.totals()
    stage.code = 0 if killed else process.returncode
    log.seek(0)
    stage.said = log.read().strip()
    if stage.code or (dies_when and not killed):
        stage.code = stage.code or "not killed"  # type: ignore[assignment]
        print(f"{name}: {' '.join(command)}\n{stage.said[-3000:]}", file=sys.stderr)
    return stage


def hours_of(config: Config) -> list[int]:
    """Of the store, after 2000: the dates that are trained on, a start, and the truth at every lead of it."""
    step = config.data.step_hours
    start = step * TRAIN_DATES
    return [*range(0, start, step), start, *(start + lead for lead in sorted(config.validation.lead_hours))]


def periods_of(config: Config) -> list[str]:
    """Overrides: what is trained on, and one forecast of the longest lead that is validated."""
    hours, start = hours_of(config), config.data.step_hours * TRAIN_DATES
    ends = {
        "--data.train_period": (0, start - config.data.step_hours),
        "--data.validation_period": (start, hours[-1]),
        "--forecast.period": (start, start),
    }
    return [word for key, period in ends.items() for word in (key, json.dumps([*map(date, period)]))]


def date(hours: int) -> str:
    return str(np.datetime64("2000-01-01T00") + np.timedelta64(hours, "h"))


def write_store(config: Config, path: Path) -> Stage:
    started = time.monotonic()
    height, width = config.data.grid_shape
    # 721 rows have the poles, 1,024 have none; from north to south as in WeatherBench2.
    half = 0 if height % 2 else 90 / height
    latitude, longitude = np.linspace(90 - half, half - 90, height), np.arange(width) * 360 / width
    names, levels = list(config.data.variables), list(config.data.levels)
    write_tiled_analyses(path, names, levels, latitude, longitude, hours_of(config))
    stage = Stage("store written", time.monotonic() - started, code=0)
    stage.written = sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and not f.is_symlink()) / 1e9
    return stage


def rehearse(name: str, folder: Path) -> list[Stage]:
    """All stages of one configuration, in order."""
    config = load_checked(["--job.config_file", str(ROOT / name)])
    store, outputs = folder / "era5.zarr", folder / "run"
    keys = [
        "--job.config_file",
        name,
        "--job.dump_folder",
        str(outputs),
        "--data.path",
        str(store),
        *periods_of(config),
    ]
    keys += [*SMALL[config.model.name], "--training.steps", str(STEPS), "--training.local_batch_size", "1"]
    keys += ["--training.global_batch_size", str(RANKS), "--lr_scheduler.warmup_steps", "2"]
    keys += ["--checkpoint.interval", str(SAVED_EVERY), "--metrics.log_freq", "1"]
    keys += ["--profiling.enable_profiling", "true", "--profiling.profile_freq", "3"]
    keys += ["--profiling.profile_steps", "1", "--validation.interval", "0"]
    keys += ["--data.num_workers", "1"]  # of the host's memory, too, a part
    python = [sys.executable]
    ranks = {"ROSSBY_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

    def saved_and_on() -> bool:
        """The newest save is complete, and steps were taken after it."""
        return bool(complete_steps(outputs / "checkpoints")) and last_step(outputs) >= KILLED_AFTER

    unet = config.model.name == "unet"
    tiles = {
        n: ["--parallelism.context_parallel_degree", str(n)] if unet else [] for n in (RANKS, RESUMED_ON)
    }
    train = ["./run_train.sh", *keys]
    forecast = ["--forecast.num_steps", str(FORECAST_STEPS), "--validation.local_batch_size", "1"]
    # Closed forms are the ViT's; of a U-Net there is the dry run.
    dry = ["--dry_run", "--world_size", str(RANKS), *tiles[RANKS]]
    plan = dry if unet else ["--cluster", f"cpu{RANKS}", "--json"]
    stages = [
        write_store(config, store),
        run("description of the data", [*python, "-m", "datasets.describe", str(store)], {}),
        run("plan", [*python, "plan.py", *keys, *plan], {}),
        run(
            f"statistics, training on {RANKS}, killed",
            [*train, *tiles[RANKS]],
            ranks | {"NGPU": str(RANKS)},
            saved_and_on,
        ),
        run(
            f"resume on {RESUMED_ON}, validation",
            [*train, *tiles[RESUMED_ON]],
            ranks | {"NGPU": str(RESUMED_ON)},
        ),
        run(f"forecast of {FORECAST_STEPS} steps", [*python, "forecast.py", *keys, *forecast], {}),
        run("evaluation with plots", [*python, "evaluate.py", *keys], {}),
        run("trace read", [*python, "-m", "traces.inspect_trace", str(outputs)], {}),
    ]
    return stages


@dataclass
class Figures:
    """Of a rank of the small run: what plan.py expects, and what train.py says."""

    step_seconds: float
    memory: float  # GB
    bytes_per_second: float  # that all ranks read, decoded


def planned(stage: Stage) -> Figures:
    plan = json.loads(stage.said)
    return Figures(plan["step_seconds"], plan["memory"]["peak"] / 1e9, plan["read_bytes_per_second"])


def table(name: str, stages: list[Stage]) -> str:
    head = f"  {name:<36}{'min':>7}{'host':>8}{'shm':>8}{'read':>9}{'written':>9}  (GB)"
    total = Stage("in all", sum(stage.seconds for stage in stages), code=0)
    total.host, total.shm = max(s.host for s in stages), max(s.shm for s in stages)
    total.read, total.written = sum(s.read for s in stages), sum(s.written for s in stages)
    return "\n".join([head, *(stage.line() for stage in [*stages, total])])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", default=CONFIGS)
    options = parser.parse_args()
    tables, failed = [], False
    for name in options.configs:
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as text:
            stages = rehearse(name, Path(text))
            tables.append(table(name, stages) + "\n" + compared(stages, Path(text) / "run"))
        failed = failed or any(stage.code for stage in stages)
        rows = [{k: v for k, v in vars(stage).items() if k != "said"} for stage in stages]
        record("rehearsal", [{"config": name, "stage": row.pop("name"), **row} for row in rows])
    print("\n\n".join(tables))
    return int(failed)


def compared(stages: list[Stage], outputs: Path) -> str:
    """A line: plan.py's figures for the small run beside those of its 4 ranks."""
    plan = next(stage for stage in stages if stage.name == "plan")
    train = next(stage for stage in stages if "killed" in stage.name)
    if plan.code or not plan.said.startswith("{"):
        return "  no plan in seconds: the dry run stands for it"
    expected, steps = planned(plan), [r["step_seconds"] for r in records(outputs) if "step_seconds" in r]
    seconds = statistics.median(steps) if steps else float("nan")
    return (
        f"  plan.py for a rank of {RANKS}: {expected.memory:.2f} GB, {expected.step_seconds:.2f} s a step; "
        f"here {train.host / RANKS:.2f} GB of the host in training and {seconds:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
