"""Train recipes and score them on unseen dates: one command per question.

    .venv/bin/python benchmarks/skill.py COMMAND [--seeds 3] [--jobs 2] [--more "OPTIONS OF train.py"]

time_to_skill    processor minutes and FLOPs until a fixed score, of the runs in time_to_skill.toml; fails if
                 the last run of a task misses its score, or takes more than half of what the first took
ablations        choices of ablations.toml, at the FLOPs of the first
recipe           a ViT, one change at a time and all that helped, at equal FLOPs
scaling          a power law of loss against FLOPs, from five [--widths 32 64]
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import xarray as xr

from benchmarks.results_file import ROOT, parse, record, require
from command_line import text_table
from datasets.variables import units
from tests.odd_data import rewrite
from tests.started_jobs import records
from training.config_checks import load_checked
from training.due import Rollouts

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
QUIET = ["--profiling.enable_profiling=false", "--metrics.loggers=[]"]
QUIET += ["--validation.plots=false", "--metrics.log_freq=1"]
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


def file_of(config: str) -> Path:
    """Return the file of a configuration's name, which reads shared data or not."""
    (path,) = [*ROOT.glob(f"train_configs/{config}.toml"), *ROOT.glob(f"tests/configs/{config}.toml")]
    return path


def start(script: str, config: str, folder: str, *words: str) -> str:
    named = [f"--job.config_file={file_of(config)}", f"--job.dump_folder={folder}"]
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
    found = {k.removeprefix(prefix): value for k, value in validation.items() if k.startswith(prefix)}
    suffix = "" if hours == 6 else f"@{hours}h"
    return {name: found[name + suffix] for name in found if "@" not in name}


def mean_ratio(own: dict[str, float], other: dict[str, float], variables: Iterable[str] = ()) -> float:
    return statistics.mean(own[name] / other[name] for name in (variables or own))


def costs(records: list[Row]) -> Row:
    """Return the time of a run's steps, without the start, validation and reading from a disk."""
    steps = [each for each in records if "step_seconds" in each]
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return {
        "minutes": sum(each["step_seconds"] for each in steps) * threads / 60,
        "tflop": sum(each["tflops"] * each["step_seconds"] for each in steps),
        "steps": len(steps),
    }


def spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{np.mean(found):.3f} ({np.min(found):.3f} to {np.max(found):.3f})" if found else ""


def grouped(rows: Any, by: list[str], columns: list[str]) -> Any:
    """Group rows as those of a data frame, and print the mean, least and largest of each group."""
    groups = pd.DataFrame(rows).groupby(by, sort=False, dropna=False)[columns]
    print(groups.agg(["mean", "min", "max"]).to_string(float_format="%.4g"))
    return groups


def chosen(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


@dataclass(frozen=True)
class Task:
    config: str
    variables: tuple[str, ...]
    lead_hours: tuple[int, ...]  # the last is scored
    baseline: str
    target: float = 0.0  # RMSE over the baseline's at the last lead, the mean over variables

    def run(self, options: Options, changes: list[str], seed: int) -> Row:
        rows = train(options, self.config, seed, leads(self.lead_hours), *changes)
        pairs = [(rmse(rows[-1], hours), rmse(rows[-1], hours, self.baseline)) for hours in self.lead_hours]
        return {"scores": [mean_ratio(*pair, self.variables) for pair in pairs], **costs(rows)}


WINDS = ("10m_u_component_of_wind", "10m_v_component_of_wind")
LISTED_TASKS = ("timed", "compared", "recipe")
TIMED, COMPARED, RECIPE = (
    {n: Task(**{k: each[k] for k in each if k in Task.__annotations__}) for n, each in LISTS[key].items()}
    for key in LISTED_TASKS
)


def time_to_skill(options: Options) -> int:
    listed = tomllib.loads((ROOT / "benchmarks/time_to_skill.toml").read_text())["run"]
    runs = []
    for task in [options.task] if options.task else TIMED:
        runs += [chosen(listed, task=task)[n] for n in (0, -1)]
    rows = []
    for seed in range(options.seeds):
        for run in runs:
            found = TIMED[run["task"]].run(options, run["options"], seed)
            rows.append({**run, "seed": seed, **found})
            print({key: rows[-1][key] for key in ("changed", "seed", "scores", "minutes")}, flush=True)
    record("time_to_skill", rows)
    frame = pd.DataFrame(rows).assign(score=[row["scores"][-1] for row in rows])
    columns = ["score", "steps", "minutes", "tflop"]
    means, missed = grouped(frame, ["task", "date", "changed"], columns).mean().reset_index(), False
    for name, own in means.groupby("task"):
        target = TIMED[str(name)].target
        time, work = (own[key].iloc[-1] / own[key].iloc[0] for key in ("minutes", "tflop"))
        good = own.score.iloc[-1] <= target and max(time, work) <= 0.5
        missed |= not good
        verdict = "met" if good else "missed"
        print(f"{name}: {time:.2f} x minutes, {work:.2f} x FLOPs, score {target} asked: {verdict}")
    return int(missed)


def ablations(options: Options) -> int:
    """Choices of ablations.toml; an option that is given twice counts as given last."""
    listed, rows = tomllib.loads((ROOT / "benchmarks/ablations.toml").read_text()), []
    for name in [options.task] if options.task else COMPARED:
        found, before = chosen(listed["choice"], task=name), listed["before"].get(name, [])
        choices = {each["choice"]: [*before, *each["options"]] for each in found}
        passes = {each["choice"]: each.get("passes", 1) for each in found}
        rows += at_equal_flops(options, "ablations", name, COMPARED[name], choices, found[0]["steps"], passes)
    return summarize(rows, COMPARED)


def recipe(options: Options) -> int:
    """Train a ViT with one change at a time, then with all changes that helped."""
    rows = []
    for name in [options.task] if options.task else RECIPE:
        own = LISTS["recipe"][name]

        choices = {change: [*own["before"], *words] for change, words in own["changes"].items()}
        rows += at_equal_flops(options, "recipe", name, RECIPE[name], choices, own["steps"])
    return summarize(rows, RECIPE)


def at_equal_flops(
    options: Options,
    kind: str,
    name: str,
    task: Task,
    choices: dict[str, list[str]],
    steps: int,
    passes: dict[str, int] | None = None,
) -> list[Row]:
    """A step of each choice counts its FLOPs; it is trained for as many steps as the first has FLOPs, times
    its `passes`.
    """
    tflop, rows, passes = {}, [], passes or {}
    for choice, words in choices.items():
        one = ["--training.steps=1", "--validation.enable=false"]
        (only,) = train(options, task.config, 0, *words, *one)
        tflop[choice] = only["tflops"] * only["step_seconds"]
    first = next(iter(tflop.values()))
    for seed in range(options.seeds):
        for choice, words in choices.items():
            own_steps = round(passes.get(choice, 1) * steps * first / tflop[choice])
            found = task.run(options, [*words, f"--training.steps={own_steps}"], seed)
            scores = {f"{h} h": score for h, score in zip(task.lead_hours, found["scores"], strict=True)}
            rows.append({"task": name, "choice": choice, "seed": seed, **found, **scores})
            record(kind, rows[-1:])  # an hour's work is not lost with its last minute
            print(rows[-1], flush=True)
    return rows


def summarize(rows: list[Row], tasks: dict[str, Task]) -> int:
    leads_of_all = {f"{hours} h": None for task in tasks.values() for hours in task.lead_hours}
    means = grouped(rows, ["task", "choice"], ["steps", *leads_of_all]).mean()
    print("\nover the first choice's:\n")
    print((means / means.groupby("task").transform("first")).to_string(float_format="%.3f"))
    return 0


SMALL_VIT = LISTS["small_vit"]


def scaling(options: Options) -> int:
    """The rate is constant after a warm-up, so that every validation is the end of a shorter run."""
    rows = []
    for width in options.widths:
        words = [*SMALL_VIT, f"--model.dim={width}", f"--optimizer.lr={0.256 / width}", leads([6])]
        words += ["--lr_scheduler.decay_type=constant", f"--training.steps={options.steps}"]
        flops = 0.0
        for each in train(options, "demo", 0, *words, f"--validation.interval={options.steps // 4}"):
            flops += each["tflops"] * each["step_seconds"] * 1e12 if "step_seconds" in each else 0.0
            if "val/loss" in each:
                rows.append({"width": width, "step": each["step"], "flops": flops, "loss": each["val/loss"]})
        print(rows[-1], flush=True)
    record("scaling", rows)
    print(pd.DataFrame(rows).groupby("width").last().to_string(float_format="%.4g"))
    best: list[Row] = []  # what nothing with fewer FLOPs has reached
    for row in sorted(rows, key=lambda row: row["flops"]):
        best += [row] if not best or row["loss"] < best[-1]["loss"] else []
    flops, losses = (np.log([row[key] for row in best]) for key in ("flops", "loss"))
    slope, intercept = np.polyfit(flops, losses, 1)
    errors = np.exp(losses - slope * flops - intercept) - 1
    ends = f"from {best[0]['flops']:.1e} to {best[-1]['flops']:.1e} FLOPs"
    print(f"loss = {np.exp(intercept):.3g} FLOPs^{slope:.3f} {ends}; points within {abs(errors).max():.0%}")
    return 0


def lora(options: Options) -> int:
    """Processor seconds are those of whole processes, with equal starts and validations."""
    with tempfile.TemporaryDirectory() as folder:
        last = train(options, "gfs_winds_vit", 0, leads([6]), folder=folder)[-1]
        load = f"--checkpoint.initial_load_path={folder}"
        pairs = [(seed, choice) for seed in range(options.seeds) for choice in LISTS["lora"]]
        rows = [adapt(options, seed, choice, load) for seed, choice in pairs]
    unchanged = {"choice": "the base", "seconds": 0.0, "steps": 0, "trained": 0.0}
    rows.append(unchanged | winds_of(last, rows[0]["damped"]))  # of the others' week
    record("lora", rows)
    means = grouped(rows, ["choice"], ["score", *WINDS, "trained", "seconds", "steps"]).mean()
    ours, nothing = (means.loc[name] for name in ("adapters", "from nothing"))
    better, no_longer = ours["score"] < nothing["score"], ours["seconds"] <= nothing["seconds"]
    few = ours["trained"] <= 0.02
    print(f"\nbetter: {better}; at no more time: {no_longer}; at most 2 % train: {few}")
    return 0 if better and no_longer and few else 1


def adapt(options: Options, seed: int, choice: str, load: str) -> Row:
    before = os.times()
    rows = train(options, "gfs_winds_lora", seed, load, leads([6]), *LISTS["lora"][choice])
    after = os.times()
    logged = re.search(r"LoRA: ([\d,]+) of ([\d,]+) parameters", rows[-1]["log"])
    some, every = (int(number.replace(",", "")) for number in logged.groups()) if logged else (1, 1)
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    row = {"choice": choice, "seed": seed, "seconds": seconds, "trained": some / every}
    row |= {"steps": max(each["step"] for each in rows)}
    return row | winds_of(rows[-1], rmse(rows[-1], baseline="damped_persistence"))


def winds_of(validation: Row, damped: dict[str, float]) -> Row:
    own = rmse(validation)
    return {"score": mean_ratio(own, damped, WINDS), "damped": damped} | own


AS_LONG, GAIN, LOSS = "one step, as long", 0.90, 1.02  # asked: of the RMSE at the last lead and at the first
DAYS = {"rollout_training": (6, 24, 72, 120), "ten_days": (6, 24, 72, 120, 240)}
PERIOD = ("--forecast.interval_hours=48", '--forecast.period=["2009-01-01","2009-03-31"]')
Runs = dict[str, list[str]]  # name -> configuration, options


def longer(first: str, stage: str) -> str:
    """Return the option that gives `first` as many passes through the model as both have.

    A rollout of R steps goes forward R - 1 times, and then R times forward and back.
    """
    files = [f"--job.config_file={file_of(name)}" for name in (first, stage)]
    own, training = (load_checked([file]).training for file in files)
    rollouts = Rollouts.of(training)
    lengths = [rollouts.at(step) for step in range(1, training.steps + 1)]
    passes = sum((n - 1) / 3 + n for n in lengths)
    return f"--training.steps={own.steps + round(passes)}"


Score = Callable[[list[Row], str, str, list[str]], Row]  # of records, configuration, folder, options


def run_stages(options: Options, runs: Runs, score: Score, *words: str) -> list[Row]:
    """Train all runs once a seed; those of other configurations than the first start from its weights."""
    first = next(iter(runs.values()))[0]

    def of_seed(seed: int) -> list[Row]:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, (config, *changes)) in enumerate(runs.items()):
                own, load = f"{folder}/{number}", [f"--checkpoint.initial_load_path={folder}/0"]
                more = [*words, *changes]
                found = train(options, config, seed, *more, *(load if config != first else []), folder=own)
                trained = sum(each.get("step_seconds", 0.0) for each in found)
                about = {"run": name, "config": config, "seed": seed, "trained": trained}
                about["steps"] = max(each["step"] for each in found)
                rows.append(about | score(found, config, own, [*more, *options.more]))
                record(options.command, rows[-1:])  # an hour's work is not lost with its last minute
                print(name, seed, f"{trained:.0f} s", flush=True)
        return rows

    with ThreadPoolExecutor(options.jobs) as jobs:
        return sum(jobs.map(of_seed, range(options.seeds)), [])


def rollout_training(options: Options) -> int:
    lead_hours = DAYS["rollout_training"]
    as_long = longer("gfs_winds", "gfs_winds_rollout")
    runs: Runs = LISTS["rollout_training"] | {AS_LONG: ["gfs_winds", as_long]}

    def score(found: list[Row], *_: object) -> Row:
        return {"scores": {key: value for key, value in found[-1].items() if key.startswith("val/rmse")}}

    rows, lines = run_stages(options, runs, score, leads(lead_hours)), []
    for row, hours in [(row, hours) for row in rows for hours in lead_hours]:
        (other,) = chosen(rows, run=AS_LONG, seed=row["seed"])
        errors, longer_ones = (rmse(each["scores"], hours) for each in (row, other))
        ratio = mean_ratio(errors, longer_ones)
        lines.append({"run": row["run"], "lead": hours, "steps": row["steps"], "ratio": ratio})
    ratios = grouped(lines, ["run", "lead"], ["steps", "ratio"]).mean().ratio
    first, last = (ratios["then rollouts", hours] for hours in (lead_hours[0], lead_hours[-1]))
    missed = last > GAIN or first > LOSS
    verdict = "missed" if missed else "met"
    print(f"asked: at most {GAIN} at {lead_hours[-1]} h, {LOSS} at {lead_hours[0]} h: {verdict}")
    return int(missed)


def ten_days(options: Options) -> int:
    # As many passes through the model as 4,400 steps and the rollouts: what demo_unet.toml has become.
    runs: Runs = LISTS["ten_days"] | {AS_LONG: ["demo_unet"]}

    def score(_: list[Row], config: str, folder: str, words: list[str]) -> Row:
        start("forecast.py", config, folder, *words, *PERIOD, "--forecast.num_steps=40")
        start("evaluate.py", config, folder, *words, "--baselines=persistence,climatology")
        return scores_of(Path(folder) / "evaluation")

    rows = run_stages(options, runs, score, leads([6]), "--validation.members=0")
    head = ("run", "lead", "RMSE / climatology", "RMSE / the first", "CRPS / MAE of the first")
    lines: list[tuple] = [(*head, "spread / skill", "energy")]
    for name in runs:
        own, first = chosen(rows, run=name), chosen(rows, run="one step")
        score_name = "crps" if own[0]["crps"] else "mae"
        for n, hours in enumerate(DAYS["ten_days"]):
            found = [[row["rmse"][n] for row in own], ratios_at(n, "rmse", own, first)]
            found += [ratios_at(n, score_name, own, first, "mae")]
            found += [[row["spread_skill"][n] for row in own if row["spread_skill"]]]
            last = [row["energy"] for row in own] if hours == DAYS["ten_days"][-1] else []
            energy = f"{np.min(last):.2f} to {np.max(last):.2f}" if last else ""
            lines.append((name, f"{hours} h", *(spread(np.ravel(each)) for each in found), energy))
    print(text_table("<20 >6 >24 >24 >26 >24 >16", lines))
    rollouts, long = (chosen(rows, run=name) for name in ("then rollouts", AS_LONG))
    for n, hours in enumerate(DAYS["ten_days"]):
        found = [float(np.mean(each)) for each in ratios_at(n, "rmse", rollouts, long)]
        print(f"rollouts over one step for as long, {hours:>3} h: {spread(found)}")
    return 0


def ratios_at(lead: int, score: str, rows: list[Row], others: list[Row], of_others: str = "") -> list:
    pairs = zip(rows, others, strict=True)
    return [np.divide(a[score][lead], b[of_others or score][lead]) for a, b in pairs]


def scores_of(folder: Path) -> Row:
    with xr.open_dataset(folder / "scores.nc", engine="h5netcdf", decode_timedelta=True) as whole:
        table = whole.load().drop_vars("wind_vector", errors="ignore")
    names = {"mae": "mae", "crps": "crps", "spread_skill": "unbiased_spread_skill_ratio"}
    found: Row = {key: by_lead(table, metric) for key, metric in names.items()}
    found["rmse"] = by_lead(table, "rmse", "climatology")
    return found | {"energy": energy(folder / "spectra_model.nc")}


def by_lead(table: xr.Dataset, metric: str, over: str = "") -> list[list[float]]:
    """Return the finite scores of all variables and levels at each lead; nothing where none has the name."""
    found = []
    for hours in DAYS["ten_days"] if metric in table.metric.values else ():
        at = table.sel(lead_time=np.timedelta64(hours, "h"), metric=metric)
        rows = [at.isel(forecast=0), *([at.sel(forecast=over)] if over else [])]
        own, *other = [np.concatenate([np.ravel(r[n].values) for n in r.data_vars]) for r in rows]
        own = own / other[0] if over else own
        found.append(own[np.isfinite(own)].tolist())
    return found


def energy(path: Path) -> list[list[float]]:
    """Return the least and largest ratio over each variable's waves, in middle latitudes at the last lead.

    The simulation damps short waves to nothing: those of less than 1 % of the strongest do not count.
    """
    with xr.open_dataset(path, engine="h5netcdf", decode_timedelta=True) as whole:
        spectra = whole.load().isel(zonal_wavenumber=slice(1, None), lead_time=-1)
    middle = spectra.sel(latitude=(abs(spectra.latitude) > 30) & (abs(spectra.latitude) < 60)).mean(
        "latitude"
    )
    model, truth = (middle.sel(source=who) for who in ("forecast", "truth"))
    ratios = (model / truth).where(truth >= 0.01 * truth.max("zonal_wavenumber"))
    ends = [[float(each.min()), float(each.max())] for each in ratios.data_vars.values()]
    return [pair for pair in ends if np.isfinite(pair).all()]


ALL, WINDOW_LEADS = "all tokens", (6, 24, 72)


def windows(options: Options) -> int:
    """RMSE of each choice of windows over that with all tokens, trained for as many steps and for as long."""
    rows: list[Row] = []
    for seed in range(options.seeds):
        for name, task in LISTS["windows"].items():
            if options.task in ("", name):
                rows += compare_windows(options, name, task, seed)
                record("windows", [row for row in rows if row["seed"] == seed and row["task"] == name])
    columns = ["step seconds", *(f"{hours} h" for hours in WINDOW_LEADS)]
    means = grouped(rows, ["task", "windows", "compared"], columns).mean().reset_index()
    best = means.groupby(["task", "windows"])["6 h"].max().groupby("task").min()
    print(f"\nthe best choice at 6 h, at equal steps and in equal time: {best.to_dict()} x")
    return int((best > 1.01).any())


def compare_windows(options: Options, name: str, task: Row, seed: int) -> list[Row]:
    def measure(window: str, steps: int = options.steps) -> tuple[float, int, list[dict[str, float]]]:
        changes = [*task["options"], leads(WINDOW_LEADS), f"--model.attention_windows={window}"]
        found = train(options, task["config"], seed, *changes, *[f"--training.steps={steps}"] * (steps > 0))
        seconds = [each["step_seconds"] for each in found if "step_seconds" in each]
        return statistics.median(seconds), len(seconds), [rmse(found[-1], hours) for hours in WINDOW_LEADS]

    whole, steps, expected = measure("[]")
    rows: list[Row] = [{"windows": ALL, "compared": "", "step seconds": whole}]
    for choice, window in task["choices"].items():
        seconds, _, errors = measure(window)
        _, _, in_time = measure("[]", round(steps * seconds / whole))
        for compared, others in (("equal steps", expected), ("equal time", in_time)):
            ratios = [mean_ratio(*pair) for pair in zip(errors, others, strict=True)]
            scores = {f"{hours} h": ratio for hours, ratio in zip(WINDOW_LEADS, ratios, strict=True)}
            rows.append({"windows": choice, "compared": compared, "step seconds": seconds} | scores)
        print(name, seed, rows[-2], rows[-1], flush=True)
    return [{"task": name, "seed": seed, "steps": steps} | row for row in rows]


WINDOW = 20  # steps that a loss is a mean of


def float8_loss(options: Options) -> int:
    """Losses are means of the last steps up to a third, two thirds and the whole run."""
    rows, steps = [], options.steps
    require(options.seeds, 2, "seeds, whose spread is the limit")
    half = ["--training.mixed_precision_param=bfloat16", "--training.local_batch_size=8"]
    for seed in range(options.seeds):
        for kind, words in LISTS["float8_loss"].items():
            more = [f"--training.steps={steps}", "--validation.enable=false", *half, *words]
            curve = [each["loss"] for each in train(options, "demo", seed, *more) if "loss" in each]
            ends = {"1/3": len(curve) // 3, "2/3": 2 * len(curve) // 3, "end": len(curve)}
            losses = {name: statistics.mean(curve[max(end - WINDOW, 0) : end]) for name, end in ends.items()}
            rows.append({"kind": kind, "seed": seed, "steps": steps} | losses)
    record("float8_loss", rows, ("torchao",))
    groups = grouped(rows, ["kind"], ["1/3", "2/3", "end"])
    means, width = groups.mean(), groups.max().loc["bf16"] - groups.min().loc["bf16"]
    farthest = float(((means - means.loc["bf16"]).abs() / width).to_numpy().max())
    print(f"farthest mean: {farthest:.2f} of bf16's spread")
    return int(not farthest <= 1)


DEMO = ROOT / "outputs/demo"
BLOCK = re.compile(r"(<!-- demo: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def readme(options: Options) -> int:
    """Write the demo's RMSE over the validation period into README.md, and its maps into docs/."""
    last = [each for each in records(DEMO) if "val/loss" in each][-1]
    columns = ("model", "persistence", "damped persistence", "training mean")
    table = f"| RMSE | lead | {' | '.join(columns)} | |\n{'|---' * 7}|\n"
    for variable in ("geopotential:300", "u_component_of_wind:850"):
        for hours in (6, 72):
            kinds = ("", *(name.replace(" ", "_") for name in columns[1:]))
            cells = " | ".join(f"{rmse(last, hours, kind)[variable]:.4g}" for kind in kinds)
            table += f"| {variable} | {hours} h | {cells} | {units(variable)} |\n"
    page = ROOT / "README.md"
    text, number = BLOCK.subn(lambda found: found[1] + table + found[2], page.read_text())
    assert number == 1, "README.md: the marks <!-- demo: ... --> and <!-- end --> are gone"
    page.write_text(text)
    shutil.copy(DEMO / "plots/maps.png", ROOT / "docs/demo_maps.png")
    print(table, end="")
    return 0


COMMANDS = (
    time_to_skill,
    ablations,
    recipe,
    scaling,
    lora,
    rollout_training,
    ten_days,
    windows,
    float8_loss,
    readme,
)


def main() -> int:
    rewrite()  # the land-sea mask that gfs_winds.toml reads
    commands = {each.__name__: each for each in COMMANDS}
    widths = (32, 64, 96, 128, 192)
    options = parse(__doc__, commands, seeds=3, jobs=1, more="", task="", steps=0, widths=widths)
    options.more = options.more.split()
    options.steps = options.steps or {"scaling": 128, "float8_loss": 150}.get(options.command, 0)
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
