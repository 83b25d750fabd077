"""Forecasts of ten days on the simulated weather: one step, rollouts, the spectral term, an ensemble by CRPS.

    .venv/bin/python benchmarks/ten_days.py [--seeds 3] [--jobs 2] [--only "CRPS"]

For each seed train_configs/demo_unet.toml; from its weights the stages demo_rollout.toml, the same for
squared errors with `training.spectral_fraction = 0.5`, and demo_crps.toml; and demo_unet.toml with as many
steps as take the model through as many passes as it and the stage of rollouts. Then forecast.py from 45
dates of the season that none was trained on, and evaluate.py's scores. Printed are means over variables and
seeds (brackets: the least and the largest of a variable): RMSE over climatology's, and over that of the
first run, of an ensemble that of the mean; fair CRPS (of a single forecast the MAE) over the first run's
MAE; spread over skill, unbiased; and zonal energy over the truth's in the middle latitudes, of members,
over the waves that hold at least 1 % of it (the simulation damps shorter ones to nothing). Then rollouts
over one step for as long. Needs half an hour a seed on one thread; `--jobs` seeds are run at a time, one a
processor with OMP_NUM_THREADS=1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import xarray as xr

from benchmarks.results_file import record
from benchmarks.rollout_training import longer
from command_line import text_table

ROOT = Path(__file__).parent.parent
AS_LONG = "one step, as long"
LEADS = (6, 24, 72, 120, 240)
RUNS = {
    "one step": ("demo_unet", []),
    "then rollouts": ("demo_rollout", []),
    "rollouts, spectral": ("demo_rollout", ["--training.loss=mse", "--training.spectral_fraction=0.5"]),
    "CRPS, 8 members": ("demo_crps", []),
    AS_LONG: ("demo_unet", [longer("demo_unet", "demo_rollout")]),
}
QUIET = [
    "--profiling.enable_profiling=false",
    "--metrics.enable_tensorboard=false",
    "--validation.plots=false",
    "--validation.lead_hours=[6]",
    "--validation.members=0",
]
PERIOD = ["--forecast.interval_hours=48", '--forecast.period=["2009-01-01","2009-03-31"]']
CARRIES = 0.01  # of the energy of the strongest wave: below that a ratio says nothing


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="runs with this in their name, and the first")
    options = parser.parse_args()
    first, *others = RUNS
    names = [first, *(name for name in others if options.only in name)]
    with ThreadPoolExecutor(options.jobs) as jobs:
        rows = sum(jobs.map(partial(of_seed, names), range(options.seeds)), [])
    print(table(names, rows))
    if {AS_LONG, "then rollouts"} <= {*names}:
        print(beside_as_long(rows))
    return 0


def of_seed(names: list[str], seed: int) -> list[dict]:
    """The runs of a seed, all but the first from its weights."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            own = f"{folder}/{len(rows)}"
            stage = RUNS[name][0] != "demo_unet"
            start = [f"--checkpoint.initial_load_path={folder}/0"] if stage else []
            seconds = one_run(name, seed, own, start)
            rows.append({"run": name, "seed": seed, "seconds": seconds, **scores(Path(own) / "evaluation")})
            record("ten_days", rows[-1:])  # an hour's work is not lost with its last minute
            print(name, seed, f"{seconds:.0f} s", flush=True)
    return rows


def one_run(name: str, seed: int, folder: str, start: list[str]) -> float:
    """Trains, forecasts and evaluates, a process each; seconds of the training."""
    config, more = RUNS[name]
    own = [f"--job.config_file=train_configs/{config}.toml", f"--job.dump_folder={folder}", *QUIET, *more]
    began = time.monotonic()
    verb("train.py", *own, f"--training.seed={seed}", *start)
    seconds = time.monotonic() - began
    verb("forecast.py", *own, *PERIOD, "--forecast.num_steps=40")
    verb("evaluate.py", *own, "--baselines=persistence,climatology")
    return seconds


def verb(*words: str) -> None:
    command, environment = [sys.executable, *words], {**os.environ, "NGPU": "1"}
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment)


def scores(folder: Path) -> dict[str, list[list[float]]]:
    """By lead and variable: "rmse" over climatology's, "crps", "mae", "spread_skill", "energy", of two
    numbers a variable, the least and the largest.
    """
    with xr.open_dataset(folder / "scores.nc", engine="h5netcdf", decode_timedelta=True) as whole:
        table = whole.load()
    variables = [name for name in table.data_vars if name not in ("wind_vector",)]
    return {
        "rmse": lead_by_variable(table, variables, "rmse", relative_to="climatology"),
        "mae": lead_by_variable(table, variables, "mae"),
        "crps": lead_by_variable(table, variables, "crps"),
        "spread_skill": lead_by_variable(table, variables, "unbiased_spread_skill_ratio"),
        "energy": energy_ratios(folder / "spectra_model.nc"),
    }


def lead_by_variable(
    table: xr.Dataset, variables: list, metric: str, relative_to: str = ""
) -> list[list[float]]:
    """Empty where no score has the name."""
    if metric not in table.metric.values:
        return []
    found = []
    for hours in LEADS:
        lead = {"lead_time": np.timedelta64(hours, "h"), "metric": metric}
        own = flat(table.isel(forecast=0).sel(lead), variables)
        if relative_to:
            own = own / flat(table.sel(forecast=relative_to).sel(lead), variables)
        found.append(own[np.isfinite(own)].tolist())
    return found


def flat(scores: xr.Dataset, variables: list) -> np.ndarray:
    """The scores of all variables and levels."""
    return np.concatenate([np.ravel(scores[name].values) for name in variables])


def energy_ratios(path: Path) -> list[list[float]]:
    """(least, largest) over the waves of each variable, at the leads for which evaluate.py keeps spectra."""
    with xr.open_dataset(path, engine="h5netcdf", decode_timedelta=True) as whole:
        spectra = whole.load()
    latitude = abs(spectra.latitude)
    middle = spectra.sel(latitude=(latitude > 30) & (latitude < 60)).mean("latitude").isel(lead_time=-1)
    found = []
    for name in middle.data_vars:
        energy = middle[name].transpose("source", ..., "zonal_wavenumber")
        model, truth = (energy.sel(source=who).values[..., 1:] for who in ("forecast", "truth"))
        for own, real in zip(np.atleast_2d(model), np.atleast_2d(truth), strict=True):
            strong = real >= CARRIES * real.max()
            if np.isfinite(real).all():
                found.append([float((own / real)[strong].min()), float((own / real)[strong].max())])
    return found


def table(names: list[str], rows: list[dict]) -> str:
    head = ["run", "lead", "RMSE / climatology", "RMSE / the first", "CRPS / MAE of the first"]
    head += ["spread / skill", "energy"]
    lines = [head]
    for name in names:
        own = [row for row in rows if row["run"] == name]
        first = [row for row in rows if row["run"] == names[0]]
        for number, hours in enumerate(LEADS):
            score = "crps" if own[0]["crps"] else "mae"
            pairs = [*zip(own, first, strict=True)]
            errors = [np.divide(a["rmse"][number], b["rmse"][number]) for a, b in pairs]
            ratios = [np.divide(a[score][number], b["mae"][number]) for a, b in pairs]
            last = [row["energy"] for row in own] if hours == LEADS[-1] else []
            lines.append(
                [
                    name,
                    f"{hours} h",
                    spread([row["rmse"][number] for row in own]),
                    spread(errors),
                    spread(ratios),
                    spread([row["spread_skill"][number] for row in own if row["spread_skill"]]),
                    f"{np.min(last):.2f} to {np.max(last):.2f}" if last else "",
                ]
            )
    return text_table("<20 >6 >24 >24 >26 >24 >16", lines)


def beside_as_long(rows: list[dict]) -> str:
    """RMSE of the rollouts over that of one step for as long: means over variables, brackets over seeds."""
    both = [[row["rmse"] for row in rows if row["run"] == name] for name in ("then rollouts", AS_LONG)]
    means = np.array([np.mean(np.divide(a, b), axis=1) for a, b in zip(*both, strict=True)])  # (seed, lead)
    lines: list[list] = [["rollouts over one step for as long", "mean", "seeds"]]
    for hours, each in zip(LEADS, means.T, strict=True):
        lines.append([f"{hours} h", f"{each.mean():.3f}", f"{each.min():.3f} to {each.max():.3f}"])
    return text_table("<36 >6 >16", lines)


def spread(values: list) -> str:
    """Mean, least and largest over seeds and variables."""
    if not values:
        return ""
    return f"{np.mean(values):.3f} ({np.min(values):.3f} to {np.max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
