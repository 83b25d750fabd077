"""Train recipes and score them on unseen dates: one command per question.

    .venv/bin/python benchmarks/skill.py COMMAND [--seeds 3] [--jobs 2] [--more "OPTIONS OF train.py"]

ablations        choices of skill.toml, at the FLOPs of the first
recipe           the same for a ViT, one change at a time and all that helped
lora             adapters against training from nothing, and against all weights, on other dates
rollout_training a stage of rollouts against one step trained for as many passes, on winds
ten_days         the same on simulated weather to 240 h, with an ensemble
windows          attention in windows against attention to all tokens, at equal steps and in equal time
float8_loss      the loss of the last steps with float8 and with bf16
readme           writes the scores of the demo in outputs/demo into README.md, and its maps into docs/

--task names one task of a command. Every training is a process of train.py. With --jobs,
which starts several at a time, set OMP_NUM_THREADS=1.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import xarray as xr

from benchmarks.results_file import ROOT, parse, record
from datasets.variables import units
from tests.odd_data import rewrite
from tests.started_jobs import records

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
QUIET = ["--profiling.enable_profiling=false", "--metrics.loggers=[]"]
QUIET += ["--validation.plots=false", "--metrics.log_freq=1"]
WINDOW = 20  # steps that "end loss" is a mean of
Options = argparse.Namespace
Row = dict[str, Any]


def train(options: Options, config: str, seed: int, *changes: str, folder: str = "") -> list[Row]:
    """Return metrics.jsonl of one run; a folder keeps what the run writes."""
    with tempfile.TemporaryDirectory() as temporary:
        target = folder or f"{temporary}/run"
        words = [] if folder else ["--checkpoint.enable=false", "--checkpoint.keep_best="]
        start("train.py", config, target, *words, f"--training.seed={seed}", *changes, *options.more)
        return records(Path(target))


def start(script: str, config: str, folder: str, *words: str) -> None:
    """Run a program with a configuration by its name, which reads shared data or not."""
    (path,) = [*ROOT.glob(f"train_configs/{config}.toml"), *ROOT.glob(f"tests/configs/{config}.toml")]
    named = [f"--job.config_file={path}", f"--job.dump_folder={folder}"]
    command = [sys.executable, script, *named, *QUIET, *words]
    how: Any = {"cwd": ROOT, "env": {**os.environ, "NGPU": "1"}, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **how)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def leads(hours: Iterable[int]) -> str:
    return f"--validation.lead_hours={list(hours)}"


def rmse(validation: Row, hours: int = 6, baseline: str = "") -> dict[str, float]:
    """Return RMSE by variable at a lead time of the model or a baseline; 6 h is every run's first lead."""
    prefix = f"val/rmse_{baseline}/" if baseline else "val/rmse/"
    scores = {k.removeprefix(prefix): value for k, value in validation.items() if k.startswith(prefix)}
    suffix = "" if hours == 6 else f"@{hours}h"
    return {name: scores[name + suffix] for name in scores if "@" not in name}


def mean_ratio(scores: dict[str, float], others: dict[str, float], variables: Iterable[str] = ()) -> float:
    return statistics.mean(scores[name] / others[name] for name in (variables or scores))


def grouped(rows: Any, by: list[str], columns: list[str]) -> Any:
    """Group rows as those of a data frame, and print the mean, least and largest of each group."""
    groups = pd.DataFrame(rows).groupby(by, sort=False, dropna=False)[columns]
    print(groups.agg(["mean", "min", "max"]).to_string(float_format="%.4g"))
    return groups


def chosen(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def train_runs(options: Options, name: str, task: Row, score: Callable[..., Row], *words: str) -> list[Row]:
    """Train the runs of a task of skill.toml once a seed; those of another configuration than the first begin
    with its weights. score: of the records of a run, its configuration, folder and options.

    With `equal`, a run is trained until it has cost what the first costs in `steps`, times its `passes`.
    """
    changes = {run: [task["config"], *task["before"], *more] for run, more in task.get("changes", {}).items()}
    runs: dict[str, list[str]] = task.get("runs") or changes  # name -> configuration, options
    first, costs, lengths = next(iter(runs.values()))[0], {}, {}
    keeps = score is not validated or any(config != first for config, *_ in runs.values())
    for run, (config, *more) in runs.items() if "equal" in task else ():
        one = [f"--training.steps={PROBE[task['equal']]}", "--validation.enable=false"]
        lines = train(options, config, 0, *more, *one)
        costs[run] = statistics.median(cost_of(line, task["equal"]) for line in lines)
        steps = task["steps"] * next(iter(costs.values())) / costs[run]
        lengths[run] = [f"--training.steps={round(task.get('passes', {}).get(run, 1) * steps)}"]

    def of_seed(seed: int) -> list[Row]:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for number, (run, (config, *more)) in enumerate(runs.items()):
                target, load = f"{folder}/{number}", [f"--checkpoint.initial_load_path={folder}/0"]
                more = [*words, *more, *lengths.get(run, [])]
                loaded = load if config != first else []
                lines = train(options, config, seed, *loaded, *more, folder=target if keeps else "")
                steps = [line for line in lines if "step_seconds" in line]
                row = {"task": name, "run": run, "seed": seed, "steps": max(line["step"] for line in lines)}
                # Without the start, validation and reading from a disk.
                row |= {kind: sum(cost_of(step, kind) for step in steps) for kind in PROBE}
                rows.append(row | score(lines, config, target, [*more, *options.more]))
                record(options.command, rows[-1:])  # an hour's work is not lost with its last minute
                print(rows[-1], flush=True)
        return rows

    with ThreadPoolExecutor(options.jobs) as jobs:
        return sum(jobs.map(of_seed, range(options.seeds)), [])


PROBE = {"tflop": 1, "seconds": 20}  # kinds of costs, and steps of which their median is known


def cost_of(step: Row, kind: str) -> float:
    return step["step_seconds"] * (step["tflops"] if kind == "tflop" else 1)


def validated(lines: list[Row], *_: object) -> Row:
    losses = [line["loss"] for line in lines if "loss" in line]
    scores = {key: value for key, value in lines[-1].items() if key.startswith("val/rmse")}
    return {"end loss": statistics.mean(losses[-WINDOW:]), "scores": scores}


def compare(options: Options) -> int:
    """RMSE over that of a baseline, of the run itself or of the task's reference."""
    table, tasks = [], LISTS[options.command]
    for name, task in tasks.items():
        if options.task not in ("", name):
            continue
        rows = train_runs(options, name, task, validated, leads(task["lead_hours"]))
        for row in rows:
            (other,) = chosen(rows, run=task.get("reference", row["run"]), seed=row["seed"])
            for hours in task["lead_hours"]:
                scores = rmse(row["scores"], hours), rmse(other["scores"], hours, task.get("baseline", ""))
                row[f"{hours} h"] = mean_ratio(*scores, task.get("variables", ()))
        table += rows
    columns = [key for row in table for key in row if key.endswith(" h")]
    means = grouped(table, ["task", "run"], ["steps", *PROBE, "end loss", *dict.fromkeys(columns)]).mean()
    print("\nover the first run's:\n")
    print((means / means.groupby("task").transform("first")).to_string(float_format="%.3f"))
    return 0


PERIOD = ("--forecast.interval_hours=48", '--forecast.period=["2009-01-01","2009-03-31"]')


def ten_days(options: Options) -> int:
    """RMSE of forecasts over that of climatology, and over that of two of the runs with the same seed."""
    ((name, task),) = LISTS["ten_days"].items()

    def score(_: list[Row], config: str, folder: str, words: list[str]) -> Row:
        """Return RMSE over climatology's by lead, of all variables and levels."""
        start("forecast.py", config, folder, *words, *PERIOD, "--forecast.num_steps=40")
        start("evaluate.py", config, folder, *words, "--baselines=climatology")
        path, ratios = f"{folder}/evaluation/scores.nc", []
        with xr.open_dataset(path, engine="h5netcdf", decode_timedelta=True) as ds:
            table = ds.load().drop_vars("wind_vector", errors="ignore").sel(metric="rmse")
        for hours in task["lead_hours"]:
            at = table.sel(lead_time=np.timedelta64(hours, "h"))
            ratio = at.isel(forecast=0) / at.sel(forecast="climatology")
            values = np.concatenate([np.ravel(field.values) for field in ratio.data_vars.values()])
            ratios.append(values[np.isfinite(values)].tolist())
        return {"rmse": ratios}

    rows, lines = train_runs(options, name, task, score, leads([6]), "--validation.members=0"), []
    for row in rows:
        for n, hours in enumerate(task["lead_hours"]):
            figures = {"climatology": row["rmse"][n]}
            for run in ("one step", "one step, as long"):
                (other,) = chosen(rows, run=run, seed=row["seed"])
                figures[run] = np.divide(row["rmse"][n], other["rmse"][n])
            for over, values in figures.items():
                lines += [{"run": row["run"], "lead": hours, "over": over, "RMSE": v} for v in values]
    grouped(lines, ["over", "run", "lead"], ["RMSE"])
    return 0


def readme(_: Options) -> int:
    """Write the demo's RMSE over the validation period into README.md, and its maps into docs/."""
    demo, page = ROOT / "outputs/demo", ROOT / "README.md"
    last = [row for row in records(demo) if "val/loss" in row][-1]
    columns = ("model", "persistence", "damped persistence", "training mean")
    table = f"| RMSE | lead | {' | '.join(columns)} | |\n{'|---' * 7}|\n"
    for variable in ("geopotential:300", "u_component_of_wind:850"):
        for hours in (6, 72):
            kinds = ("", *(name.replace(" ", "_") for name in columns[1:]))
            cells = " | ".join(f"{rmse(last, hours, kind)[variable]:.4g}" for kind in kinds)
            table += f"| {variable} | {hours} h | {cells} | {units(variable)} |\n"
    block = re.compile(r"(<!-- demo: .*? -->\n).*?(<!-- end -->)", re.DOTALL)
    text, number = block.subn(lambda match: match[1] + table + match[2], page.read_text())
    assert number == 1, "README.md: the marks <!-- demo: ... --> and <!-- end --> are gone"
    page.write_text(text)
    shutil.copy(demo / "plots/maps.png", ROOT / "docs/demo_maps.png")
    print(table, end="")
    return 0


COMPARED = ("ablations", "recipe", "lora", "rollout_training", "windows", "float8_loss")
COMMANDS = dict.fromkeys(COMPARED, compare) | {"ten_days": ten_days, "readme": readme}


if __name__ == "__main__":
    rewrite()  # the land-sea mask that gfs_winds.toml reads
    options = parse(__doc__, COMMANDS, seeds=3, jobs=1, more="", task="")
    options.more = options.more.split()
    sys.exit(COMMANDS[options.command](options))
