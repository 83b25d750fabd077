"""Train recipes and score them on dates that were not seen: one command a question.

    .venv/bin/python benchmarks/skill.py COMMAND [--seeds 3] [--jobs 2] [--more "OPTIONS OF train.py"]

time_to_skill    processor minutes and FLOPs until a fixed score, of the runs in time_to_skill.toml; fails if
                 the last run of a task misses its score, or takes more than half of what the first took
ablations        choices of ablations.toml, at the FLOPs of the first
large_batch      batches of 8 to 512 at equal samples: the rate is chosen at 8 and scaled by a rule
scaling          a power law of loss against FLOPs, from five widths
lora             adapters against training from nothing, and against all weights, on other dates
rollout_training stages of rollouts and of replay against one step trained for as many passes, on winds
ten_days         the same on simulated weather to 240 h, with the spectral term and an ensemble
float8_loss      loss curves next to bf16's, seed by seed; fails if a mean is outside the spread of bf16's
readme           writes the scores of the demo in outputs/demo into README.md, and its plots into docs/

Every training is a process of train.py. With --jobs, which starts several at a time, set OMP_NUM_THREADS=1.
"""

import argparse
import json
import os
import re
import resource
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
import xarray as xr

from benchmarks.results_file import parser_of, record, require
from command_line import text_table
from datasets.variables import units
from training.config_checks import load_checked
from training.due import Rollouts
from verification.plots import build_panels, save

ROOT = Path(__file__).parent.parent
QUIET = ["--profiling.enable_profiling=false", "--metrics.enable_tensorboard=false"]
QUIET += ["--validation.plots=false", "--metrics.log_freq=1"]
Options = argparse.Namespace
Row = dict[str, Any]


# -- running and scoring


def train(options: Options, config: str, seed: int, *changes: str, folder: str = "") -> list[Row]:
    """Return metrics.jsonl of one run, and in its last record the log; a folder keeps what the run writes."""
    with tempfile.TemporaryDirectory() as temporary:
        target = folder or f"{temporary}/run"
        words = [] if folder else ["--checkpoint.enable=false", "--checkpoint.keep_best="]
        log = start("train.py", config, target, *words, f"--training.seed={seed}", *changes, *options.more)
        records = [json.loads(line) for line in (Path(target) / "metrics.jsonl").read_text().splitlines()]
    records[-1]["log"] = log
    return records


def start(script: str, config: str, folder: str, *words: str) -> str:
    """Run a command to its end and return what it printed."""
    named = [f"--job.config_file=train_configs/{config}.toml", f"--job.dump_folder={folder}"]
    command = [sys.executable, script, *named, *QUIET, *words]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NGPU": "1"}, capture_output=True, text=True, check=False
    )
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
    """Return what a run's steps took: neither the start nor the validation, and no reading from a disk."""
    steps = [each for each in records if "step_seconds" in each]
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    return {
        "minutes": sum(each["step_seconds"] for each in steps) * threads / 60,
        "tflop": sum(each["tflops"] * each["step_seconds"] for each in steps),
        "steps": len(steps),
        "critical_batch": steps[-1]["critical_batch_size"],
    }


def spread(values: Iterable[float]) -> str:
    """Return mean, least and largest."""
    found = list(values)
    return f"{np.mean(found):.3f} ({np.min(found):.3f} to {np.max(found):.3f})" if found else ""


def chosen(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


# -- tasks: a configuration, and RMSE over a baseline's


@dataclass(frozen=True)
class Task:
    config: str
    variables: tuple[str, ...]
    lead_hours: tuple[int, ...]  # the last is scored
    baseline: str
    target: float = 0.0  # RMSE over the baseline's at the last lead, the mean over variables

    def run(self, options: Options, changes: list[str], seed: int) -> Row:
        """Train once: scores at all leads, and the costs."""
        records = train(options, self.config, seed, leads(self.lead_hours), *changes)
        last, scores = records[-1], []
        for hours in self.lead_hours:
            pair = rmse(last, hours), rmse(last, hours, self.baseline)
            scores.append(mean_ratio(*pair, self.variables))
        return {"scores": scores, **costs(records)}


WINDS = ("10m_u_component_of_wind", "10m_v_component_of_wind")
OF_LEVELS = ("geopotential", "u_component_of_wind", "v_component_of_wind")
WEATHER = (*(f"{name}:{level}" for name in OF_LEVELS for level in (300, 850)), "total_column_water_vapour")
TIMED = {
    "simulated": Task("demo", ("geopotential:300",), (6, 72), "persistence", 0.70),
    "winds": Task("gfs_winds", WINDS, (6,), "damped_persistence", 0.75),
}
COMPARED = {
    "winds": Task("gfs_winds", WINDS, (6, 24), "damped_persistence"),
    "simulated": Task("demo_unet", WEATHER, (6, 24), "training_mean"),
}


def time_to_skill(options: Options) -> int:
    listed = tomllib.loads((ROOT / "benchmarks/time_to_skill.toml").read_text())["run"]
    runs = []
    for task in [options.task] if options.task else TIMED:
        first, *later = chosen(listed, task=task)
        tried = [{"task": task, "changed": text, "options": text.split()} for text in options.options]
        runs += tried or [first, *later[-options.last :]]
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    rows = []
    for seed in range(options.seeds):
        for run in runs:
            found = TIMED[run["task"]].run(options, run["options"], seed)
            rows.append({**run, "seed": seed, "commit": commit, **found})
            print({key: rows[-1][key] for key in ("changed", "seed", "scores", "minutes")}, flush=True)
    if not options.options:
        record("time_to_skill", rows)
    head = ("task", "date", "steps", "score", "reached", "minutes", "TFLOP", "  what changed")
    lines, missed = [], False
    for run in runs:
        own, task = [row for row in rows if row["changed"] == run["changed"]], TIMED[run["task"]]
        scores = [row["scores"][-1] for row in own if row["task"] == run["task"]]
        run["score"] = statistics.mean(scores)
        run |= {key: statistics.mean(row[key] for row in own) for key in ("minutes", "tflop", "steps")}
        reached = "yes" if run["score"] <= task.target else f"no ({task.target})"
        figures = (round(run["steps"]), spread(scores), reached, run["minutes"], run["tflop"])
        lines.append((run["task"], run.get("date", ""), *figures, f"  {run['changed']}"))
    print(text_table("<11 <12 >6 >24 >11 >9.2f >8.1f <2", [head, *lines]))
    for name, task in TIMED.items() if not options.options else ():
        if own := chosen(runs, task=name):
            time, work = (own[-1][key] / own[0][key] for key in ("minutes", "tflop"))
            good = own[-1]["score"] <= task.target and max(time, work) <= 0.5
            missed |= not good
            print(f"{name}: {time:.2f} x minutes, {work:.2f} x FLOPs: {'met' if good else 'missed'}")
    return int(missed)


def ablations(options: Options) -> int:
    """A step of each choice counts its FLOPs; it is trained for as many steps as the first has FLOPs."""
    listed, rows = tomllib.loads((ROOT / "benchmarks/ablations.toml").read_text()), []
    lines: list[tuple] = [("task", "choice", "steps", "first lead", "", "last lead", "")]
    for name in [options.task] if options.task else COMPARED:
        task, (first, *others) = COMPARED[name], chosen(listed["choice"], task=name)
        choices = [first, *(each for each in others if options.choice in each["choice"])]
        for choice in choices:  # an option that is given twice counts as given last
            choice["options"] = [*listed["before"].get(name, []), *choice["options"]]
            one = ["--training.steps=1", "--validation.enable=false"]
            (only,) = train(options, task.config, 0, *choice["options"], *one)
            choice["tflop"] = only["tflops"] * only["step_seconds"]
        for seed in range(options.seeds):
            for choice in choices:
                steps = round(first["steps"] * first["tflop"] / choice["tflop"])
                found = task.run(options, [*choice["options"], f"--training.steps={steps}"], seed)
                rows.append({"task": name, "choice": choice["choice"], "seed": seed, **found})
                record("ablations", rows[-1:])  # an hour's work is not lost with its last minute
                print(rows[-1], flush=True)
        means = [0.0, 0.0]
        for choice in choices:
            own, cells = chosen(rows, task=name, choice=choice["choice"]), []
            for lead in range(2):
                scores = [row["scores"][lead] for row in own]
                means[lead] = means[lead] or statistics.mean(scores)  # of the first choice
                cells += [spread(scores), statistics.mean(scores) / means[lead]]
            lines.append((name, choice["choice"], own[0]["steps"], *cells))
    print(text_table("<11 <50 >6 >25 >7.3f >25 >7.3f", lines))
    return 0


# -- batches of many sizes


SMALL_VIT = "--model.patch_size=[8,8] --model.num_layers=2".split()
SMALL, LARGER, WITHIN = 8, (32, 128, 512), 1.03
RATES = {"AdamW": (4e-3, 8e-3, 1.6e-2), "LAMB": (1.6e-2, 3.2e-2, 6.4e-2), "Muon": (4e-3, 8e-3, 1.6e-2)}
RULES = (("AdamW", "sqrt"), ("AdamW", "linear"), ("LAMB", "sqrt"), ("Muon", "sqrt"))


def large_batch(options: Options) -> int:
    rules, tuned = [each for each in RULES if each[0] in options.optimizers], {}
    with ThreadPoolExecutor(options.jobs) as jobs:
        for name in options.optimizers:
            grid = [jobs.submit(one_batch, options, name, "none", lr, SMALL) for lr in RATES[name]]
            tuned[name] = min((job.result() for job in grid), key=lambda row: row["score"])
        scaled = {
            (name, rule): [
                jobs.submit(one_batch, options, name, rule, tuned[name]["lr"], batch) for batch in LARGER
            ]
            for name, rule in rules
        }
    rows, kept, larger_names = [], False, tuple(map(str, LARGER))
    head = ("optimiser", "rule", "lr at 8", "score at 8", *larger_names, "critical", "samples needed")
    lines: list[tuple] = [head]
    for (name, rule), jobs_of_rule in scaled.items():
        small, larger = {**tuned[name], "rule": rule}, [job.result() for job in jobs_of_rule]
        rows += [small, *larger]
        ratios, critical = [row["score"] / small["score"] for row in larger], small["critical_batch"]
        kept |= max(ratios) <= WITHIN
        needs = [(1 + batch / critical) / (1 + SMALL / critical) for batch in LARGER] if critical else []
        figures = (small["lr"], small["score"], *ratios, round(critical, 1) if critical else "-")
        lines.append((name, rule, *figures, ", ".join(f"{need:.1f}" for need in needs)))
    record("large_batch", rows)
    print(text_table("<10 <7 >9 >11.3f >7.3f >7.3f >7.3f >9 >20", lines))
    kind = "met" if kept else "missed"
    print(f"within {WITHIN - 1:.0%} of the score at {SMALL} up to {LARGER[-1]}: {kind}")
    return int(not kept)


def one_batch(options: Options, name: str, rule: str, lr: float, batch: int) -> Row:
    """Train in two micro-batches, which the critical batch needs."""
    steps = options.samples // batch
    words = [*SMALL_VIT, "--model.dim=64", f"--optimizer.name={name}", f"--optimizer.lr={lr}"]
    words += [f"--training.global_batch_size={batch}", f"--training.local_batch_size={batch // 2}"]
    words += [f"--training.steps={steps}", f"--lr_scheduler.warmup_steps={steps // 10}"]
    if rule != "none":
        words += [f"--optimizer.lr_scaling={rule}", f"--optimizer.lr_reference_batch_size={SMALL}"]
    words += ["--optimizer.momentum=0.95"] if name == "Muon" else []
    found = TIMED["simulated"].run(options, words, options.seed)
    about = {"optimizer": name, "rule": rule, "lr": lr, "batch": batch, "seed": options.seed}
    row = {**about, "samples": options.samples, "score": found["scores"][-1], **found}
    print({key: row[key] for key in (*about, "score", "minutes", "critical_batch")}, flush=True)
    return row


# -- loss against FLOPs


VIT1B = 126.8e12 * 350_000 * 50  # FLOPs of a sample x samples of an epoch x epochs (train_configs/vit1b.toml)
Law = tuple[float, float]  # exponent and logarithm of the factor: log loss = b log FLOPs + log a


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
    best = envelope(rows)
    law = fitted(best)
    others = [fitted(envelope([r for r in rows if r["width"] != w])) for w in options.widths]
    record("scaling", rows)
    draw(rows, best, law, options.plot)
    lasts = [chosen(rows, width=width)[-1] for width in options.widths]
    lines = [(row["width"], row["step"], row["flops"], row["loss"]) for row in lasts]
    print(text_table(">5 >6 >9.2e >9.4f", [("width", "steps", "FLOPs", "loss"), *lines]))
    print(f"{report(law, others, best)}\nwritten: {options.plot}")
    return 0


def envelope(rows: list[Row]) -> list[Row]:
    """Return the rows whose loss nothing with fewer FLOPs has reached."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: row["flops"]):
        if not found or row["loss"] < found[-1]["loss"]:
            found.append(row)
    return found


def fitted(rows: list[Row]) -> Law:
    """Return the law of least squares in logarithms."""
    flops, losses = (np.log([row[key] for row in rows]) for key in ("flops", "loss"))
    slope, intercept = np.polyfit(flops, losses, 1)
    return float(slope), float(intercept)


def loss_at(law: Law, flops: float) -> float:
    return float(np.exp(law[0] * np.log(flops) + law[1]))


def report(law: Law, others: list[Law], best: list[Row]) -> str:
    errors = [row["loss"] / loss_at(law, row["flops"]) - 1 for row in best]
    far, slopes = sorted(loss_at(each, VIT1B) for each in others), sorted(-each[0] for each in others)
    orders = np.log10(VIT1B / best[-1]["flops"])
    return (
        f"loss = {np.exp(law[1]):.3g} FLOPs^-{-law[0]:.3f} (without a size: {slopes[0]:.3f} to "
        f"{slopes[-1]:.3f}) from {best[0]['flops']:.1e} to {best[-1]['flops']:.1e} FLOPs; points within "
        f"{min(errors):+.0%} and {max(errors):+.0%}; ten times the FLOPs take {1 - 10 ** law[0]:.0%} off\n"
        f"EXTRAPOLATED over {orders:.1f} orders of magnitude to vit1b.toml's {VIT1B:.1e} FLOPs, another "
        f"model and other data: {loss_at(law, VIT1B):.1e} ({far[0]:.1e} to {far[-1]:.1e}), without a floor"
    )


def draw(rows: list[Row], best: list[Row], law: Law, target: Path) -> None:
    figure, (axes,) = build_panels(1, "simulated weather: loss against FLOPs of training", size=(7.0, 4.2))
    for width in dict.fromkeys(row["width"] for row in rows):
        own = chosen(rows, width=width)
        axes.plot([r["flops"] for r in own], [r["loss"] for r in own], ".-", label=f"width {width}")
    ends = np.array([best[0]["flops"], 10 * best[-1]["flops"]])
    axes.plot(ends, [loss_at(law, flops) for flops in ends], "k--", label=f"FLOPs^{law[0]:.2f}")
    axes.set(xlabel="FLOPs of training", ylabel="validation loss (normalised)", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, target)


# -- adapters


PLAIN = ["--lora.enable=false", "--optimizer.lr=1e-3"]
FROM_NOTHING = [*PLAIN, "--checkpoint.initial_load_path="]
ADAPTED = {"adapters": [], "from nothing": FROM_NOTHING, "all weights": PLAIN}


def lora(options: Options) -> int:
    """Processor seconds are of whole processes, whose starts and validations are alike."""
    with tempfile.TemporaryDirectory() as folder:
        base = str(options.base.absolute()) if options.base else f"{folder}/base"
        if not options.base:
            train(options, "gfs_winds_vit", 0, leads([6]), folder=base)
        load = f"--checkpoint.initial_load_path={base}"
        pairs = [(seed, choice) for seed in range(options.seeds) for choice in ADAPTED]
        rows = [adapt(options, seed, choice, load) for seed, choice in pairs]
        last = json.loads(Path(base, "metrics.jsonl").read_text().splitlines()[-1])
    damped = {
        wind: value for wind, value in zip(WINDS, rows[0]["damped"], strict=True)
    }  # of the others' week
    unchanged = {"choice": "the base", "seconds": 0.0, "steps": 0, "trained": 0.0}
    rows.append(unchanged | winds_of(last, damped))
    record("lora", rows)
    head = ("choice", "seeds", "RMSE over damped", "u10", "v10", "trained", "seconds", "steps")
    lines, means = [], {}
    for choice in (*ADAPTED, "the base"):
        own = chosen(rows, choice=choice)
        keys = ("trained", "seconds", "steps", "score")
        means[choice] = {key: statistics.mean(row[key] for row in own) for key in keys}
        winds = [statistics.mean(row["rmse"][number] for row in own) for number in (0, 1)]
        figures = [means[choice][key] for key in keys[:3]]
        lines.append((choice, len(own), spread(row["score"] for row in own), *winds, *figures))
    print(text_table("<14 >7d >26 >8.3f >8.3f >9.2% >9.0f >7.0f", [head, *lines]))
    ours, nothing = means["adapters"], means["from nothing"]
    better, no_longer = ours["score"] < nothing["score"], ours["seconds"] <= nothing["seconds"]
    few = ours["trained"] <= 0.02
    print(f"\nbetter: {better}; at no more time: {no_longer}; at most 2 % train: {few}")
    return 0 if better and no_longer and few else 1


def adapt(options: Options, seed: int, choice: str, load: str) -> Row:
    before = processor_seconds()
    records = train(options, "gfs_winds_lora", seed, load, leads([6]), *ADAPTED[choice])
    said = re.search(r"LoRA: ([\d,]+) of ([\d,]+) parameters", records[-1]["log"])
    some, every = (int(number.replace(",", "")) for number in said.groups()) if said else (1, 1)
    row = {"choice": choice, "seed": seed, "seconds": processor_seconds() - before, "trained": some / every}
    row |= {"steps": max(each["step"] for each in records)}
    return row | winds_of(records[-1], rmse(records[-1], baseline="damped_persistence"))


def processor_seconds() -> float:
    """Return the seconds of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def winds_of(validation: Row, damped: dict[str, float]) -> Row:
    own = rmse(validation)
    both = {"rmse": [own[wind] for wind in WINDS], "damped": [damped[wind] for wind in WINDS]}
    return {"score": mean_ratio(own, damped, WINDS), **both}


# -- stages after training one step


AS_LONG, GAIN, LOSS = "one step, as long", 0.90, 1.02  # asked: of the RMSE at the last lead and at the first
DAYS = {"rollout_training": (6, 24, 72, 120), "ten_days": (6, 24, 72, 120, 240)}
SPECTRAL = ("--training.loss=mse", "--training.spectral_fraction=0.5")
PERIOD = ("--forecast.interval_hours=48", '--forecast.period=["2009-01-01","2009-03-31"]')
Runs = dict[str, tuple[str, tuple[str, ...]]]  # name -> configuration, options


def longer(first: str, stage: str) -> str:
    """Return the option that gives `first` as many passes through the model as both have.

    A rollout of R steps goes forward R - 1 times, and then as often forward and back as it has gradients.
    """
    files = [f"--job.config_file=train_configs/{name}.toml" for name in (first, stage)]
    own, training = (load_checked([file]).training for file in files)
    rollouts = Rollouts.of(training)
    lengths = [rollouts.at(step) for step in range(1, training.steps + 1)]
    passes = sum((n - 1) / 3 + rollouts.with_gradients(n) for n in lengths)
    return f"--training.steps={own.steps + round(passes)}"


Score = Callable[[list[Row], str, str, list[str]], Row]  # of records, configuration, folder, options


def run_stages(options: Options, runs: Runs, score: Score, *words: str) -> list[Row]:
    """Train all runs once a seed; those of other configurations than the first start from its weights."""
    first = next(iter(runs.values()))[0]

    def of_seed(seed: int) -> list[Row]:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, (config, changes)) in enumerate(runs.items()):
                own, load = f"{folder}/{number}", [f"--checkpoint.initial_load_path={folder}/0"]
                more = [*words, *changes]
                records = train(options, config, seed, *more, *(load if config != first else []), folder=own)
                trained = sum(each.get("step_seconds", 0.0) for each in records)
                about = {"run": name, "config": config, "seed": seed, "trained": trained}
                about["steps"] = max(each["step"] for each in records)
                rows.append(about | score(records, config, own, [*more, *options.more]))
                record(options.command, rows[-1:])  # an hour's work is not lost with its last minute
                print(name, seed, f"{trained:.0f} s", flush=True)
        return rows

    with ThreadPoolExecutor(options.jobs) as jobs:
        return sum(jobs.map(of_seed, range(options.seeds)), [])


def rollout_training(options: Options) -> int:
    lead_hours = DAYS["rollout_training"]
    stages = ("gfs_winds_rollout", "gfs_winds_replay")
    (as_long,) = {longer("gfs_winds", stage) for stage in stages}
    runs: Runs = {"one step": ("gfs_winds", ()), AS_LONG: ("gfs_winds", (as_long,))}
    runs |= {"then rollouts": (stages[0], ()), "then replay": (stages[1], ())}

    def score(records: list[Row], *_: object) -> Row:
        return {"scores": {key: value for key, value in records[-1].items() if key.startswith("val/rmse")}}

    rows, met, lines = run_stages(options, runs, score, leads(lead_hours)), False, []
    for name in runs:
        own, others, means = chosen(rows, run=name), chosen(rows, run=AS_LONG), []
        for hours in lead_hours:
            errors, longest = ([rmse(row["scores"], hours) for row in each] for each in (own, others))
            damped = [rmse(row["scores"], hours, "damped_persistence") for row in own]
            ratios, over_damped = ([*map(mean_ratio, errors, each)] for each in (longest, damped))
            means.append(statistics.mean(ratios))
            lines.append((name, own[0]["steps"], f"{hours} h", spread(ratios), spread(over_damped)))
        met |= name.startswith("then") and means[-1] <= GAIN and means[0] <= LOSS
    head = ("run", "steps", "lead", f"over {AS_LONG}", "over damped persistence")
    print(text_table("<20 >6 >7 >26 >26", [head, *lines]))
    verdict = "met" if met else "missed"
    print(f"asked: at most {GAIN} at {lead_hours[-1]} h, {LOSS} at {lead_hours[0]} h: {verdict}")
    return 0 if met else 1


def ten_days(options: Options) -> int:
    runs: Runs = {
        "one step": ("demo_unet", ()),
        "then rollouts": ("demo_rollout", ()),
        "rollouts, spectral": ("demo_rollout", SPECTRAL),
        "CRPS, 8 members": ("demo_crps", ()),
        AS_LONG: ("demo_unet", (longer("demo_unet", "demo_rollout"),)),
    }
    runs = {name: run for name, run in runs.items() if name == "one step" or options.only in name}

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
    for n, hours in enumerate(DAYS["ten_days"]) if rollouts and long else ():
        found = [float(np.mean(each)) for each in ratios_at(n, "rmse", rollouts, long)]
        print(f"rollouts over one step for as long, {hours:>3} h: {spread(found)}")
    return 0


def ratios_at(lead: int, score: str, rows: list[Row], others: list[Row], of_others: str = "") -> list:
    pairs = zip(rows, others, strict=True)
    return [np.divide(a[score][lead], b[of_others or score][lead]) for a, b in pairs]


def scores_of(folder: Path) -> Row:
    """Return scores by lead and variable; of energy the least and the largest ratio to the truth's."""
    with xr.open_dataset(folder / "scores.nc", engine="h5netcdf", decode_timedelta=True) as whole:
        table = whole.load().drop_vars("wind_vector", errors="ignore")
    names = {"mae": "mae", "crps": "crps", "spread_skill": "unbiased_spread_skill_ratio"}
    found: Row = {key: by_lead(table, metric) for key, metric in names.items()}
    return found | {
        "rmse": by_lead(table, "rmse", "climatology"),
        "energy": energy(folder / "spectra_model.nc"),
    }


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
        spectra = whole.load()
    latitude = abs(spectra.latitude)
    middle = spectra.sel(latitude=(latitude > 30) & (latitude < 60)).mean("latitude").isel(lead_time=-1)
    found = []
    for name in middle.data_vars:
        waves = middle[name].transpose("source", ..., "zonal_wavenumber")
        model, truth = (waves.sel(source=who).values[..., 1:] for who in ("forecast", "truth"))
        for own, real in zip(np.atleast_2d(model), np.atleast_2d(truth), strict=True):
            ratios = (own / real)[real >= 0.01 * real.max()]
            if np.isfinite(real).all():
                found.append([float(ratios.min()), float(ratios.max())])
    return found


# -- limited areas


BOUNDARY = "--data.boundary_width=4"
AREA = (
    "--data.path=../shared/data/gfs_winds_2026/gfs_winds_20260324-20260419_2.8125deg.nc",
    "--data.region=[75,-45,15,60]",
)


def limited_area(options: Options) -> int:
    """Winds over Europe, scored inside of 4 cells: with the boundary of later dates, and without."""
    runs: Runs = {"without": ("gfs_winds", AREA), "with": ("gfs_winds", (*AREA, BOUNDARY))}

    def score(_: list[Row], config: str, folder: str, words: list[str]) -> Row:
        start("forecast.py", config, folder, *words, "--forecast.num_steps=8")
        start("evaluate.py", config, folder, *words, BOUNDARY, "--baselines=persistence")
        with xr.open_dataset(f"{folder}/evaluation/scores.nc", decode_timedelta=True) as whole:
            rows = whole[list(WINDS)].sel(metric="rmse").isel(forecast=0, region=0).to_array("wind")
            hours = (rows.lead_time / np.timedelta64(1, "h")).values.tolist()
            return {"hours": hours, "rmse": rows.values.tolist()}

    rows = run_stages(options, runs, score, leads([6]))
    own, others = (np.array([row["rmse"] for row in chosen(rows, run=run)]) for run in ("with", "without"))
    lines: list[tuple] = [("lead", "without", "with", "ratio")]
    for n, hours in enumerate(rows[0]["hours"]):
        pair = [each[:, :, n].mean(1) for each in (others, own)]
        lines.append((f"{hours:.0f} h", *map(spread, (*pair, pair[1] / pair[0]))))
    print(text_table("<6 >24 >24 >24", lines))
    return int(own[:, :, -1].mean() >= others[:, :, -1].mean())


# -- float8, and the demo's scores


FLOAT8 = {"bf16": []} | {
    f"float8 {recipe}": ["--float8.enable", f"--float8.recipe={recipe}"]
    for recipe in ("tensorwise", "rowwise")
}
WINDOW = 20  # steps that a loss is a mean of


def float8_loss(options: Options) -> int:
    """Losses are means of the last steps up to a third, two thirds and the whole run."""
    rows, steps = [], options.steps
    require(options.seeds, 2, "seeds, whose spread is the limit")
    half = ["--training.mixed_precision_param=bfloat16", "--training.local_batch_size=8"]
    for seed in range(options.seeds):
        for kind, words in FLOAT8.items():
            more = [f"--training.steps={steps}", "--validation.enable=false", *half, *words]
            curve = [each["loss"] for each in train(options, "demo", seed, *more) if "loss" in each]
            ends = [len(curve) // 3, 2 * len(curve) // 3, len(curve)]
            losses = [statistics.mean(curve[max(end - WINDOW, 0) : end]) for end in ends]
            rows.append({"kind": kind, "seed": seed, "losses": losses, "steps": steps})
    record("float8_loss", rows, ("torchao",))
    curves = {kind: np.array([row["losses"] for row in chosen(rows, kind=kind)]) for kind in FLOAT8}
    means, width = {kind: found.mean(0) for kind, found in curves.items()}, np.ptp(curves["bf16"], axis=0)
    lines = [(row["kind"], row["seed"], *row["losses"]) for row in rows]
    lines += [(kind, "mean", *map(float, mean)) for kind, mean in means.items()]
    lines.append(("bf16", "max - min", *map(float, width)))
    print(text_table("<18 >10 >10.6f >10.6f >10.6f", [("", "seed", "1/3", "2/3", "end"), *lines]))
    farthest = max(float(np.max(abs(mean - means["bf16"]) / width)) for mean in means.values())
    print(f"farthest mean: {farthest:.2f} of bf16's spread")
    return int(not farthest <= 1)


PLOTS = {"rmse.png": "demo_rmse.png", "maps.png": "demo_maps.png"}
BLOCK = re.compile(r"(<!-- demo: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def readme(options: Options) -> int:
    """Write the demo's RMSE over the validation period into README.md, and its plots into docs/."""
    records = map(json.loads, (options.run / "metrics.jsonl").read_text().splitlines())
    last = [each for each in records if "val/loss" in each][-1]
    columns = ("model", "persistence", "damped persistence", "training mean")
    table = f"| RMSE | lead | {' | '.join(columns)} | |\n{'|---' * 7}|\n"
    for variable in ("geopotential:300", "u_component_of_wind:850"):
        for hours in (6, 24, 72):
            kinds = ("", *(name.replace(" ", "_") for name in columns[1:]))
            cells = " | ".join(f"{rmse(last, hours, kind)[variable]:.4g}" for kind in kinds)
            table += f"| {variable} | {hours} h | {cells} | {units(variable)} |\n"
    page = ROOT / "README.md"
    text, number = BLOCK.subn(lambda found: found[1] + table + found[2], page.read_text())
    assert number == 1, "README.md: the marks <!-- demo: ... --> and <!-- end --> are gone"
    page.write_text(text)
    for source, target in PLOTS.items():
        shutil.copy(options.run / "plots" / source, ROOT / "docs" / target)
    print(table, end="")
    return 0


COMMANDS = (
    limited_area,
    time_to_skill,
    ablations,
    large_batch,
    scaling,
    lora,
    rollout_training,
    ten_days,
    float8_loss,
    readme,
)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("command", choices=[each.__name__ for each in COMMANDS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--more", type=str.split, default=[], help="options of train.py for every run")
    parser.add_argument("--task", choices=[*TIMED], help="of time_to_skill and ablations; default: both")
    parser.add_argument("--last", type=int, default=1, help="time_to_skill: so many runs after the first")
    parser.add_argument("--options", action="append", default=[], help="time_to_skill: of a run to try")
    parser.add_argument("--choice", default="", help="ablations: words in the names of choices")
    parser.add_argument("--samples", type=int, default=8192, help="large_batch: that every run sees")
    parser.add_argument("--seed", type=int, default=0, help="large_batch")
    parser.add_argument("--optimizers", nargs="+", choices=[*RATES], default=[*RATES])
    parser.add_argument("--steps", type=int, default=0, help="default: scaling 128, float8_loss 150")
    parser.add_argument("--widths", type=int, nargs="+", default=(32, 64, 96, 128, 192), help="scaling")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/scaling.png", help="scaling")
    parser.add_argument("--base", type=Path, help="lora: a run of gfs_winds_vit.toml that has ended")
    parser.add_argument("--only", default="", help="ten_days: words in the names of runs")
    parser.add_argument("--run", type=Path, default=ROOT / "outputs/demo", help="readme")
    options = parser.parse_args()
    options.steps = options.steps or {"scaling": 128, "float8_loss": 150}.get(options.command, 0)
    return next(each for each in COMMANDS if each.__name__ == options.command)(options)


if __name__ == "__main__":
    sys.exit(main())
