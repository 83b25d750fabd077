"""One forecast against another at a glance: relative difference of RMSE a variable, level and lead.

Blue is better. A dot: the 95 % interval of a bootstrap over initial dates, in blocks, excludes
0 (verification/significance.py).
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

from datasets.variables import short_label
from verification.evaluation import Evaluation
from verification.report import lead_hours, variable_names
from verification.significance import compare

BOUND = 50.0  # per cent, where colours end
BLOCK_DAYS = 5  # weather remembers about so long


@dataclass(frozen=True)
class Scorecard:
    """Per cent by variable and lead, (V, L): below 0 the first forecast has the smaller error."""

    first: str
    second: str
    variables: list[str]
    hours: list[int]
    percent: np.ndarray
    significant: np.ndarray
    num_dates: int


def build_scorecard(first: str, second: str, evaluations: dict[str, Evaluation]) -> Scorecard:
    """`first` relative to `second`, over what both have. ValueError where that is nothing."""
    ours, theirs = evaluations[first].by_date, evaluations[second].by_date
    block = block_length(ours)
    found = compare(theirs, ours, "rmse", relative=True, block_length=block).isel(region=0)
    difference = found.sel(quantity="difference")
    names = variable_names(difference)
    rows = [_rows(found, name) for name in names]
    return Scorecard(
        first,
        second,
        names,
        lead_hours(found),
        100 * np.array([row[0] for row in rows]),
        np.array([row[1] for row in rows]) == 1,
        len(np.intersect1d(ours["time"], theirs["time"])),
    )


def block_length(by_date: xr.Dataset) -> int:
    """Initial dates in BLOCK_DAYS, at most a quarter of all."""
    times = by_date["time"].values
    if len(times) < 2:
        return 1
    step = np.median(np.diff(times)) / np.timedelta64(1, "D")
    return int(np.clip(round(BLOCK_DAYS / step), 1, max(len(times) // 4, 1)))


def _rows(found: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray]:
    base, _, level = name.partition(":")
    array = found[base] if not level else found[base].sel(level=int(level))
    return array.sel(quantity="difference").values, array.sel(quantity="significant").values


def plot_scorecard(card: Scorecard, target: Path) -> None:
    """Rows are variables, columns leads, numbers per cent."""
    shape = card.percent.shape
    size = (max(6.0, 0.55 * shape[1] + 2.6), 0.36 * shape[0] + 1.8)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    shown = np.where(np.isfinite(card.percent), card.percent, np.nan)
    mesh = axes.imshow(shown, cmap="RdBu_r", vmin=-BOUND, vmax=BOUND, aspect="auto")
    for (row, column), value in np.ndenumerate(shown):
        if np.isfinite(value):
            dot = "•" if card.significant[row, column] else ""
            colour = "w" if abs(value) > 0.7 * BOUND else "k"
            axes.text(column, row, f"{value:.0f}{dot}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(shape[1]), [f"{hour}" for hour in card.hours], fontsize=7)
    axes.set_yticks(range(shape[0]), [short_label(name) for name in card.variables], fontsize=8)
    axes.set_xlabel("lead time (h)")
    title = f"RMSE of {card.first} relative to {card.second} (%), {card.num_dates} initial dates"
    axes.set_title(f"{title}\nbelow 0: {card.first} is better; • 95 % of resamples agree", fontsize=9)
    figure.colorbar(mesh, ax=axes, shrink=0.8, label="%")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def write_scorecard(card: Scorecard, target: Path) -> None:
    """The same as CSV."""
    with target.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "second", "variable", "lead_hours", "percent", "significant"])
        for (row, column), value in np.ndenumerate(card.percent):
            if np.isfinite(value):
                mark = int(card.significant[row, column])
                place = (card.variables[row], card.hours[column])
                writer.writerow([card.first, card.second, *place, f"{value:.4f}", mark])
