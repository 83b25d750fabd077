"""One forecast against another at a glance: relative difference of RMSE a variable, level and lead.

Blue is better. A dot: the 95 % interval of a bootstrap over initial dates, in blocks, excludes
0 (verification/significance.py).
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr

from datasets.variables import short_label
from verification.evaluation import Evaluation
from verification.plots import save
from verification.score_tables import lead_hours, one_variable, variable_names
from verification.significance import compare

BOUND = 50.0  # per cent, where colours end
BLOCK_DAYS = 5  # weather remembers about so long


def build_scorecard(first: str, second: str, evaluations: dict[str, Evaluation]) -> pd.DataFrame:
    """`first` relative to `second`, over what both have: a row a variable and lead.

    Columns first, second, variable, lead_hours, percent (below 0 the first has the smaller error),
    significant (1 or 0). DataError where both have nothing in common.
    """
    ours, theirs = evaluations[first].by_date, evaluations[second].by_date
    found = compare(theirs, ours, block_length(ours)).isel(region=0)
    parts = []
    for name in variable_names(found):
        difference, lower, upper = one_variable(found, name).transpose("quantity", "lead_time").values
        columns = {"variable": name, "lead_hours": lead_hours(found), "percent": 100 * difference}
        columns["significant"] = ((lower > 0) | (upper < 0)).astype(int)
        parts.append(pd.DataFrame({"first": first, "second": second, **columns}))
    card = pd.concat(parts, ignore_index=True)
    card.attrs["num_dates"] = len(np.intersect1d(ours["time"], theirs["time"]))
    return card


def block_length(by_date: xr.Dataset) -> int:
    """Initial dates in BLOCK_DAYS, at most a quarter of all."""
    times = by_date["time"].values
    if len(times) < 2:
        return 1
    step = np.median(np.diff(times)) / np.timedelta64(1, "D")
    return int(np.clip(round(BLOCK_DAYS / step), 1, max(len(times) // 4, 1)))


def plot_scorecard(card: pd.DataFrame, target: Path) -> None:
    """Rows are variables, columns leads, numbers per cent."""
    table = card.replace(np.inf, np.nan).pivot(index="variable", columns="lead_hours")
    table = table.loc[card["variable"].unique()]
    percent, significant = table["percent"], table["significant"].to_numpy()
    size = (max(6.0, 0.55 * percent.shape[1] + 2.6), 0.36 * percent.shape[0] + 1.8)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    mesh = axes.imshow(percent, cmap="RdBu_r", vmin=-BOUND, vmax=BOUND, aspect="auto")
    for (row, column), value in np.ndenumerate(percent):
        if np.isfinite(value):
            dot = "•" if significant[row, column] else ""
            colour = "w" if abs(value) > 0.7 * BOUND else "k"
            axes.text(column, row, f"{value:.0f}{dot}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(percent.shape[1]), [f"{hours}" for hours in percent.columns], fontsize=7)
    axes.set_yticks(range(percent.shape[0]), [short_label(name) for name in percent.index], fontsize=8)
    axes.set_xlabel("lead time (h)")
    first, second = card["first"][0], card["second"][0]
    title = f"RMSE of {first} relative to {second} (%), {card.attrs['num_dates']} initial dates"
    axes.set_title(f"{title}\nbelow 0: {first} is better; • 95 % of resamples agree", fontsize=9)
    figure.colorbar(mesh, ax=axes, shrink=0.8, label="%")
    save(figure, target)


def write_scorecard(card: pd.DataFrame, target: Path) -> None:
    """The same as CSV."""
    finite = card[np.isfinite(card["percent"])]
    finite.to_csv(target, index=False, float_format="%.4f", lineterminator="\r\n")
