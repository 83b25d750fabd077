"""From nothing to a fixed score on dates that were not seen: processor minutes and FLOPs of training.

    .venv/bin/python benchmarks/time_to_skill.py [--task winds] [--seeds 3] [--last 2]
    .venv/bin/python benchmarks/time_to_skill.py --task winds --options="--training.steps=200"

Every run of benchmarks/time_to_skill.toml is a shipped configuration with options of train.py, trained to its
last step once a seed, the runs of a task in turn. What counts is the mean over seeds of the RMSE after the
last step over a baseline's (TASKS), on all dates of the validation period; a run that does not reach the
task's score is shown and does not count. Processor minutes are those of training steps (`step_seconds` x
threads): neither the start nor the validation, and no data, which are in memory. `--options` tries a run that
is in no table; `--last`: the first run of a task, and so many of the last. Ends with 1 where the last run of
a task misses its score, or takes more than half of the processor minutes or the FLOPs of the first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record
from command_line import text_table

ROOT = Path(__file__).parent.parent
OFF = [
    "--profiling.enable_profiling=false",
    "--metrics.enable_tensorboard=false",
    "--validation.plots=false",
    "--checkpoint.enable=false",
    "--metrics.log_freq=1",
]


@dataclass(frozen=True)
class Task:
    config: str
    variables: tuple[str, ...]
    lead_hours: tuple[int, ...]  # the last is scored
    baseline: str
    target: float = 0.0  # RMSE over the baseline's at the last lead, the mean over variables


TASKS = {
    "simulated": Task("demo", ("geopotential:300",), (6, 72), "persistence", 0.70),
    "winds": Task(
        "gfs_winds", ("10m_u_component_of_wind", "10m_v_component_of_wind"), (6,), "damped_persistence", 0.75
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=[*TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--last", type=int, default=1)
    parser.add_argument("--options", action="append", help="of train.py, a run each; needs --task")
    options = parser.parse_args()
    runs = tomllib.loads((ROOT / "benchmarks/time_to_skill.toml").read_text())["run"]
    if options.options:
        tried = [{"task": options.task, "changed": text, "options": text.split()} for text in options.options]
        print(table([row for run in measured(tried, options.seeds) for row in run]))
        return 0
    rows = []
    for task in [options.task] if options.task else TASKS:
        first, *later = [run for run in runs if run["task"] == task]
        rows += measured([first, *later[-options.last :]], options.seeds)
    record("time_to_skill", [row for run in rows for row in run])
    print(table([row for run in rows for row in run]))
    return judge(rows)


def measured(runs: list[dict], seeds: int) -> list[list[dict]]:
    """A row a seed of each run; the runs in turn."""
    rows = [[] for _ in runs]
    for seed in range(seeds):
        for own, run in zip(rows, runs, strict=True):
            found = train(TASKS[run["task"]], run["options"], seed)
            own.append({**run, "seed": seed, "commit": commit(), **found})
            print({key: own[-1][key] for key in ("changed", "seed", "scores", "minutes")}, flush=True)
    return rows


def train(task: Task, changes: list[str], seed: int) -> dict:
    """One run: its score at each lead, and what it cost."""
    records = records_of(task, changes, seed)
    steps = [each for each in records if "step_seconds" in each]
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return {
        "scores": [score(records[-1], task, hours) for hours in task.lead_hours],
        "minutes": sum(each["step_seconds"] for each in steps) * threads / 60,
        "tflop": sum(each["tflops"] * each["step_seconds"] for each in steps),
        "steps": len(steps),
        "critical_batch": steps[-1]["critical_batch_size"],
    }


def records_of(task: Task, changes: list[str], seed: int) -> list[dict]:
    """metrics.jsonl of one run, a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--job.config_file=train_configs/{task.config}.toml", f"--training.seed={seed}"]
        options += [f"--validation.lead_hours={list(task.lead_hours)}", f"--job.dump_folder={folder}/run"]
        command = [sys.executable, "train.py", *OFF, *options, *changes]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        text = (Path(folder) / "run/metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def score(validation: dict, task: Task, hours: int) -> float:
    suffix = "" if hours == task.lead_hours[0] else f"@{hours}h"
    own, other = "val/rmse", f"val/rmse_{task.baseline}"
    ratios = [validation[f"{own}/{v}{suffix}"] / validation[f"{other}/{v}{suffix}"] for v in task.variables]
    return statistics.mean(ratios)


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def means(rows: list[dict]) -> dict[str, float]:
    found = {key: statistics.mean(row[key] for row in rows) for key in ("minutes", "tflop", "steps")}
    return {"score": statistics.mean(row["scores"][-1] for row in rows), **found}


def table(rows: list[dict]) -> str:
    """The leaderboard, a line a run, the mean over its seeds."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        runs.setdefault((row["task"], row.get("date", ""), row["changed"]), []).append(row)
    lines = []
    for (name, date, changed), own in runs.items():
        task, mean, scores = TASKS[name], means(own), [row["scores"][-1] for row in own]
        spread = f"{mean['score']:.3f} ({min(scores):.3f} to {max(scores):.3f})"
        reached = "yes" if mean["score"] <= task.target else f"no ({task.target})"
        figures = [round(mean["steps"]), spread, reached, mean["minutes"], mean["tflop"]]
        lines.append([name, date, *figures, f"  {changed}"])
    head = ["task", "date", "steps", "score", "reached", "minutes", "TFLOP", "  what changed"]
    return text_table("<11 <12 >6 >24 >11 >9.2f >8.1f <2", [head, *lines])


def judge(runs: list[list[dict]]) -> int:
    """The last run of each task beside its first."""
    missed = 0
    for name, task in TASKS.items():
        own = [means(run) for run in runs if run[0]["task"] == name]
        if len(own) < 2:
            continue
        first, last = own[0], own[-1]
        time, work = last["minutes"] / first["minutes"], last["tflop"] / first["tflop"]
        good = last["score"] <= task.target and max(time, work) <= 0.5
        missed += not good
        verdict = "met" if good else "missed"
        print(f"{name}: {time:.2f} x processor minutes, {work:.2f} x FLOPs of the first run: {verdict}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
