"""Train recipes and score them on unseen dates: one command per question.

    .venv/bin/python benchmarks/skill.py COMMAND [--seeds 3] [--jobs 2] [--more "OPTIONS OF train.py"]

ablations        choices of ablations.toml, at the FLOPs of the first
recipe           a ViT, one change at a time and all that helped, at equal FLOPs
lora             adapters against training from nothing, and against all weights, on other dates
rollout_training a stage of rollouts against one step trained for as many passes, on winds
ten_days         the same on simulated weather to 240 h, with an ensemble
windows          attention in windows against attention to all tokens, at equal steps and in equal time
float8_loss      loss curves next to bf16's, seed by seed; fails if a mean is outside the spread of bf16's
readme           writes the scores of the demo in outputs/demo into README.md, and its maps into docs/

--task names one of the two of the first two commands. Every training is a process of train.py. With --jobs,
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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import xarray as xr

from benchmarks.results_file import ROOT, parse, record, require
from datasets.variables import units
from tests.odd_data import rewrite
from tests.started_jobs import records

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
QUIET = ["--profiling.enable_profiling=false", "--metrics.loggers=[]"]
QUIET += ["--validation.plots=false", "--metrics.log_freq=1"]
WINDS = ("10m_u_component_of_wind", "10m_v_component_of_wind")
WINDOW_LEADS, WINDOW = (6, 24, 72), 20  # hours; steps that a loss of float8_loss is a mean of
Options = argparse.Namespace
Row = dict[str, Any]


def train(options: Options, config: str, seed: int, *changes: str, folder: str = "") -> list[Row]:
    """Return metrics.jsonl of one run, and in its last record the log; a folder keeps what the run writes."""
    with tempfile.TemporaryDirectory() as temporary:
        target = folder or f"{temporary}/run"
        words = [] if folder else ["--checkpoint.enable=false", "--checkpoint.keep_best="]
        log = start("train.py", config, target, *words, f"--training.seed={seed}", *changes, *options.more)
        rows = records(Path(target))
    rows[-1]["log"] = log
    return rows


def start(script: str, config: str, folder: str, *words: str) -> str:
    """Run a program with a configuration by its name, which reads shared data or not, and return its log."""
    (path,) = [*ROOT.glob(f"train_configs/{config}.toml"), *ROOT.glob(f"tests/configs/{config}.toml")]
    named = [f"--job.config_file={path}", f"--job.dump_folder={folder}"]
    command = [sys.executable, script, *named, *QUIET, *words]
    how: Any = {"cwd": ROOT, "env": {**os.environ, "NGPU": "1"}, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **how)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout + done.stderr


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


def run_task(options: Options, task: Row, changes: list[str], seed: int) -> Row:
    """Return RMSE over a baseline's by lead, the mean over variables, and the costs of the run.

    Those are of its steps, without the start, validation and reading from a disk.
    """
    rows = train(options, task["config"], seed, leads(task["lead_hours"]), *changes)
    steps = [row for row in rows if "step_seconds" in row]
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    result = {
        "minutes": sum(row["step_seconds"] for row in steps) * threads / 60,
        "tflop": sum(row["tflops"] * row["step_seconds"] for row in steps),
        "steps": len(steps),
    }
    for hours in task["lead_hours"]:
        scores = rmse(rows[-1], hours), rmse(rows[-1], hours, task["baseline"])
        result[f"{hours} h"] = mean_ratio(*scores, task["variables"])
    return result


def ablations(options: Options) -> int:
    """Choices of ablations.toml; an option that is given twice counts as given last."""
    listed, tasks = tomllib.loads((ROOT / "benchmarks/ablations.toml").read_text()), {}
    for name, task in LISTS["compared"].items():
        choices, before = chosen(listed["choice"], task=name), listed["before"].get(name, [])
        words = {row["choice"]: [*before, *row["options"]] for row in choices}
        passes = {row["choice"]: row.get("passes", 1) for row in choices}
        tasks[name] = task | {"choices": words, "passes": passes, "steps": choices[0]["steps"]}
    return at_equal_flops(options, tasks)


def recipe(options: Options) -> int:
    """Train a ViT with one change at a time, then with all changes that helped."""
    tasks = LISTS["recipe"]
    for task in tasks.values():
        task["choices"] = {name: [*task["before"], *words] for name, words in task["changes"].items()}
    return at_equal_flops(options, tasks)


def at_equal_flops(options: Options, tasks: dict[str, Row]) -> int:
    """A step of each choice counts its FLOPs; it is trained for as many steps as the first has FLOPs, times
    its `passes`.
    """
    rows, tasks = [], {name: tasks[name] for name in [options.task] if name} or tasks
    for name, task in tasks.items():
        tflop, choices = {}, task["choices"]
        for choice, words in choices.items():
            one = ["--training.steps=1", "--validation.enable=false"]
            (only,) = train(options, task["config"], 0, *words, *one)
            tflop[choice] = only["tflops"] * only["step_seconds"]
        first = next(iter(tflop.values()))
        for seed in range(options.seeds):
            for choice, words in choices.items():
                passes = task.get("passes", {}).get(choice, 1)
                steps = round(passes * task["steps"] * first / tflop[choice])
                row = run_task(options, task, [*words, f"--training.steps={steps}"], seed)
                rows.append({"task": name, "choice": choice, "seed": seed, **row})
                record(options.command, rows[-1:])  # an hour's work is not lost with its last minute
                print(rows[-1], flush=True)
    columns = dict.fromkeys(f"{hours} h" for task in tasks.values() for hours in task["lead_hours"])
    means = grouped(rows, ["task", "choice"], ["steps", *columns]).mean()
    print("\nover the first choice's:\n")
    print((means / means.groupby("task").transform("first")).to_string(float_format="%.3f"))
    return 0


AS_LONG, GAIN, LOSS = "one step, as long", 0.90, 1.02  # asked: of the RMSE at the last lead and at the first
DAYS = {"rollout_training": (6, 24, 72, 120), "ten_days": (6, 24, 72, 120, 240)}
PERIOD = ("--forecast.interval_hours=48", '--forecast.period=["2009-01-01","2009-03-31"]')


def run_stages(options: Options, score: Callable[..., Row], *words: str) -> list[Row]:
    """Train the runs of skill.toml once a seed; those of another configuration than the first load it.

    score: of the records of a run, its configuration, folder and options.
    """
    runs: dict[str, list[str]] = LISTS[options.command]  # name -> configuration, options
    first = next(iter(runs.values()))[0]

    def of_seed(seed: int) -> list[Row]:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, (config, *changes)) in enumerate(runs.items()):
                target, load = f"{folder}/{number}", [f"--checkpoint.initial_load_path={folder}/0"]
                more = [*words, *changes]
                lines = train(options, config, seed, *(load if config != first else []), *more, folder=target)
                trained = sum(line.get("step_seconds", 0.0) for line in lines)
                row = {"run": name, "config": config, "seed": seed, "trained": trained}
                row["steps"] = max(line["step"] for line in lines)
                rows.append(row | score(lines, config, target, [*more, *options.more]))
                record(options.command, rows[-1:])  # an hour's work is not lost with its last minute
                print(name, seed, f"{trained:.0f} s", flush=True)
        return rows

    with ThreadPoolExecutor(options.jobs) as jobs:
        return sum(jobs.map(of_seed, range(options.seeds)), [])


def lora(options: Options) -> int:
    """Scores are over damped persistence in the week of all runs but the base."""

    def score(lines: list[Row], *_: object) -> Row:
        logged = re.search(r"LoRA: ([\d,]+) of ([\d,]+) parameters", lines[-1]["log"])
        some, every = (int(number.replace(",", "")) for number in logged.groups()) if logged else (1, 1)
        damped = rmse(lines[-1], baseline="damped_persistence")
        return {"part": some / every, "damped": damped} | rmse(lines[-1])

    rows = run_stages(options, score, leads([6]))
    for row in rows:
        (adapters,) = chosen(rows, run="adapters", seed=row["seed"])
        row["score"] = mean_ratio(row, adapters["damped"], WINDS)
    means = grouped(rows, ["run"], ["score", *WINDS, "part", "trained", "steps"]).mean()
    ours, nothing = (means.loc[name] for name in ("adapters", "from nothing"))
    better, no_longer = ours["score"] < nothing["score"], ours["trained"] <= nothing["trained"]
    few = ours["part"] <= 0.02
    print(f"\nbetter: {better}; at no more time: {no_longer}; at most 2 % train: {few}")
    return 0 if better and no_longer and few else 1


def rollout_training(options: Options) -> int:
    lead_hours = DAYS["rollout_training"]

    def score(lines: list[Row], *_: object) -> Row:
        return {"scores": {key: value for key, value in lines[-1].items() if key.startswith("val/rmse")}}

    rows, ratios = run_stages(options, score, leads(lead_hours)), []
    for row in rows:
        (other,) = chosen(rows, run=AS_LONG, seed=row["seed"])
        for hours in lead_hours:
            ratio = mean_ratio(rmse(row["scores"], hours), rmse(other["scores"], hours))
            ratios.append({"run": row["run"], "lead": hours, "steps": row["steps"], "ratio": ratio})
    means = grouped(ratios, ["run", "lead"], ["steps", "ratio"]).mean().ratio
    first, last = (means["then rollouts", hours] for hours in (lead_hours[0], lead_hours[-1]))
    missed = last > GAIN or first > LOSS
    verdict = "missed" if missed else "met"
    print(f"asked: at most {GAIN} at {lead_hours[-1]} h, {LOSS} at {lead_hours[0]} h: {verdict}")
    return int(missed)


def ten_days(options: Options) -> int:
    def score(_: list[Row], config: str, folder: str, words: list[str]) -> Row:
        """Return by lead the scores of all variables and levels; of energy the ends by variable."""
        start("forecast.py", config, folder, *words, *PERIOD, "--forecast.num_steps=40")
        start("evaluate.py", config, folder, *words, "--baselines=persistence,climatology")
        opened = partial(xr.open_dataset, engine="h5netcdf", decode_timedelta=True)
        with opened(f"{folder}/evaluation/scores.nc") as ds:
            table = ds.load().drop_vars("wind_vector", errors="ignore")
        row: Row = {}
        for name in ("mae", "crps", "spread_skill", "rmse"):
            metric = "unbiased_spread_skill_ratio" if name == "spread_skill" else name
            row[name] = []
            for hours in DAYS["ten_days"] if metric in table.metric.values else ():
                at = table.sel(lead_time=np.timedelta64(hours, "h"), metric=metric)
                own = at.isel(forecast=0) / (at.sel(forecast="climatology") if name == "rmse" else 1)
                values = np.concatenate([np.ravel(own[variable].values) for variable in own.data_vars])
                row[name].append(values[np.isfinite(values)].tolist())
        # Energy over the truth's by wave, in middle latitudes at the last lead. The simulation damps short
        # waves to nothing: those of less than 1 % of the strongest do not count.
        with opened(f"{folder}/evaluation/spectra_model.nc") as ds:
            spectra = ds.load().isel(zonal_wavenumber=slice(1, None), lead_time=-1)
        inside = (abs(spectra.latitude) > 30) & (abs(spectra.latitude) < 60)
        means = spectra.sel(latitude=inside).mean("latitude")
        model, truth = (means.sel(source=name) for name in ("forecast", "truth"))
        ratios = (model / truth).where(truth >= 0.01 * truth.max("zonal_wavenumber"))
        ends = [[float(array.min()), float(array.max())] for array in ratios.data_vars.values()]
        return row | {"energy": [pair for pair in ends if np.isfinite(pair).all()]}

    rows, lines = run_stages(options, score, leads([6]), "--validation.members=0"), []
    for row in rows:
        (first,) = chosen(rows, run="one step", seed=row["seed"])
        (long,) = chosen(rows, run=AS_LONG, seed=row["seed"])
        for n, hours in enumerate(DAYS["ten_days"]):
            figures = {"RMSE / climatology": row["rmse"][n]}
            figures["RMSE / the first"] = np.divide(row["rmse"][n], first["rmse"][n])
            figures["RMSE / as long"] = np.divide(row["rmse"][n], long["rmse"][n])
            probable = row["crps"] or row["mae"]
            figures["CRPS / MAE of the first"] = np.divide(probable[n], first["mae"][n])
            figures |= {"spread / skill": row["spread_skill"][n]} if row["spread_skill"] else {}
            figures |= {"energy": np.ravel(row["energy"])} if hours == DAYS["ten_days"][-1] else {}
            for name, values in figures.items():
                lines += [{"run": row["run"], "lead": hours, "score": name, "value": v} for v in values]
    grouped(lines, ["score", "run", "lead"], ["value"])
    return 0


def windows(options: Options) -> int:
    """RMSE of each choice of windows over that with all tokens, trained for as many steps and for as long."""
    columns, rows = [f"{hours} h" for hours in WINDOW_LEADS], []

    def measure(task: Row, seed: int, window: str, steps: int) -> tuple[float, int, list[dict[str, float]]]:
        changes = [*task["options"], leads(WINDOW_LEADS), f"--model.attention_windows={window}"]
        changes += [f"--training.steps={steps}"] if steps else []
        lines = train(options, task["config"], seed, *changes)
        seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
        return statistics.median(seconds), len(seconds), [rmse(lines[-1], hours) for hours in WINDOW_LEADS]

    for seed in range(options.seeds):
        for name, task in LISTS["windows"].items():
            if options.task not in ("", name):
                continue
            all_seconds, steps, as_many = measure(task, seed, "[]", options.steps)
            common = {"task": name, "seed": seed, "steps": steps}
            made: list[Row] = [{"windows": "all tokens", "compared": "", "step seconds": all_seconds}]
            for choice, window in task["choices"].items():
                seconds, _, errors = measure(task, seed, window, options.steps)
                _, _, as_long = measure(task, seed, "[]", round(steps * seconds / all_seconds))
                for compared, others in (("equal steps", as_many), ("equal time", as_long)):
                    ratios = map(mean_ratio, errors, others)
                    row = {"windows": choice, "compared": compared, "step seconds": seconds}
                    made.append(row | dict(zip(columns, ratios, strict=True)))
                print(name, seed, made[-2:], flush=True)
            rows += [common | row for row in made]
            record("windows", rows[-len(made) :])
    means = grouped(rows, ["task", "windows", "compared"], ["step seconds", *columns]).mean().reset_index()
    best = means.groupby(["task", "windows"])["6 h"].max().groupby("task").min()
    print(f"\nthe best choice at 6 h, at equal steps and in equal time: {best.to_dict()} x")
    return int((best > 1.01).any())


def float8_loss(options: Options) -> int:
    """Losses are means of the last steps up to a third, two thirds and the whole run."""
    rows, steps = [], options.steps or 150
    require(options.seeds, 2, "seeds, whose spread is the limit")
    half = ["--training.mixed_precision_param=bfloat16", "--training.local_batch_size=8"]
    for seed in range(options.seeds):
        for kind, words in LISTS["float8_loss"].items():
            more = [f"--training.steps={steps}", "--validation.enable=false", *half, *words]
            curve = [line["loss"] for line in train(options, "demo", seed, *more) if "loss" in line]
            ends = {"1/3": len(curve) // 3, "2/3": 2 * len(curve) // 3, "end": len(curve)}
            losses = {name: statistics.mean(curve[max(end - WINDOW, 0) : end]) for name, end in ends.items()}
            rows.append({"kind": kind, "seed": seed, "steps": steps} | losses)
    record("float8_loss", rows, ("torchao",))
    groups = grouped(rows, ["kind"], ["1/3", "2/3", "end"])
    means, width = groups.mean(), groups.max().loc["bf16"] - groups.min().loc["bf16"]
    farthest = float(((means - means.loc["bf16"]).abs() / width).to_numpy().max())
    print(f"farthest mean: {farthest:.2f} of bf16's spread")
    return int(not farthest <= 1)


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


COMMANDS = (ablations, recipe, lora, rollout_training, ten_days, windows, float8_loss, readme)


if __name__ == "__main__":
    rewrite()  # the land-sea mask that gfs_winds.toml reads
    commands = {command.__name__: command for command in COMMANDS}
    options = parse(__doc__, commands, seeds=3, jobs=1, more="", task="", steps=0)
    options.more = options.more.split()
    sys.exit(commands[options.command](options))
