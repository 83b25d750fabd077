"""One forecast against another at a glance: relative difference of RMSE a variable, level and lead.

Blue is better. A dot: the 95 % interval of a bootstrap over initial dates excludes 0. Both forecasts are
scored on the same dates, and dates are drawn for both together (paired): what a hard day adds to both cancels
in the difference. Consecutive dates are alike, so that single dates drawn at random give intervals that are
too narrow; blocks of consecutive dates keep what they have in common (Kuensch 1989, moving blocks). Shapes: n
dates; N resamples.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes

from datasets.variables import short_label
from errors import DataError
from verification.evaluation import Evaluation
from verification.plots import save
from verification.report import shown_leads
from verification.score_tables import lead_hours, one_variable, variable_names

BOUND = 50.0  # per cent, where colours end
MOST_NUMBERS = 16  # columns that all have numbers
FULL_CELL, NARROW_CELL = 0.55, 0.25  # inches
BLOCK_DAYS = 5  # weather remembers about so long
MIN_BLOCKS = 6  # from fewer the interval of a bootstrap is too narrow
RESAMPLES, CONFIDENCE = 1000, 0.95
RESAMPLES_AT_ONCE = 2**24  # elements of the means of resamples held at once


def build_scorecard(first: str, second: str, evaluations: dict[str, Evaluation]) -> pd.DataFrame:
    """`first` relative to `second`, over what both have: a row a variable and lead.

    Columns first, second, variable, lead_hours, percent (below 0 the first has the smaller error),
    significant (1 or 0; 0 also where the dates are fewer than `dates_needed`), num_dates that both have.
    Attribute `dates_needed`. DataError where both have nothing in common.
    """
    ours, theirs = evaluations[first].by_date, evaluations[second].by_date
    found = compare(theirs, ours, block_length(ours)).isel(region=0)
    needed = dates_needed(ours)
    both = xr.align(*(each.sel(metric="mse").isel(region=0) for each in (ours, theirs)), join="inner")
    dates = (both[0].notnull() & both[1].notnull()).sum("time")
    parts = []
    for name in variable_names(found):
        difference, lower, upper = one_variable(found, name).transpose("quantity", "lead_time").values
        columns = {"variable": name, "lead_hours": lead_hours(found), "percent": 100 * difference}
        columns["num_dates"] = one_variable(dates, name).values
        outside = (lower > 0) | (upper < 0)
        columns["significant"] = (outside & (columns["num_dates"] >= needed)).astype(int)
        parts.append(pd.DataFrame({"first": first, "second": second, **columns}))
    card = pd.concat(parts, ignore_index=True)
    card.attrs["dates_needed"] = needed
    return card


def block_length(by_date: xr.Dataset) -> int:
    """Initial dates in BLOCK_DAYS, at most a quarter of all."""
    return max(1, min(dates_of_block(by_date), by_date.sizes["time"] // 4))


def dates_of_block(by_date: xr.Dataset) -> int:
    times = by_date["time"].values
    if len(times) < 2:
        return 1
    return max(1, round(BLOCK_DAYS / float(np.median(np.diff(times)) / np.timedelta64(1, "D"))))


def dates_needed(by_date: xr.Dataset) -> int:
    """Number of initial dates from which on a difference is tested for significance."""
    return MIN_BLOCKS * dates_of_block(by_date)


def draw_dates(num_dates: int, block_length: int) -> np.ndarray:
    """Return how often each resample draws each date, (N, n) float64 of row sum n; always the same.

    Blocks of `block_length` consecutive dates begin at random ones (1: single dates); the last is cut.
    """
    assert 1 <= block_length <= num_dates, f"blocks of {block_length} of {num_dates} dates"
    generator, blocks = np.random.default_rng(0), -(-num_dates // block_length)
    starts = generator.integers(0, num_dates - block_length + 1, (RESAMPLES, blocks))
    drawn = (starts[:, :, None] + np.arange(block_length)).reshape(RESAMPLES, -1)[:, :num_dates]
    flat = drawn + num_dates * np.arange(RESAMPLES)[:, None]
    return np.bincount(flat.ravel(), minlength=RESAMPLES * num_dates).reshape(RESAMPLES, -1).astype(float)


def bootstrap(first: np.ndarray, second: np.ndarray, block_length: int) -> np.ndarray:
    """Relative difference of two RMSEs, second over first minus 1, from squared errors (..., n) -> (..., 3).

    The difference, and the lower and upper end of its percentile interval. The root comes after the mean over
    dates. Dates where both are NaN (no truth) do not count; where only one is, that forecast is broken and
    the difference is NaN.
    """
    shape, num_dates = first.shape[:-1], first.shape[-1]
    valid = ~(np.isnan(first) & np.isnan(second))
    flat = [np.where(valid, each, 0).reshape(-1, num_dates).T for each in (first, second)]
    counts = valid.reshape(-1, num_dates).T.astype(float)
    weights = np.concatenate([np.ones((1, num_dates)), draw_dates(num_dates, block_length)])
    columns, tail = max(1, RESAMPLES_AT_ONCE // len(weights)), (1 - CONFIDENCE) / 2
    found = []
    for start in range(0, counts.shape[1], columns):
        some = slice(start, start + columns)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = weights @ counts[:, some]
            ours, theirs = (np.sqrt(weights @ each[:, some] / total) for each in flat)
            difference = (theirs - ours) / ours  # (1 + N, columns), the first row of all dates
        found.append(np.stack([difference[0], *np.quantile(difference[1:], [tail, 1 - tail], axis=0)]))
    return np.concatenate(found, axis=1).T.reshape(*shape, 3)


def compare(first: xr.Dataset, second: xr.Dataset, block_length: int) -> xr.Dataset:
    """`bootstrap` of two `Evaluation.by_date`, for all variables that both have.

    Dims (region, lead_time[, level], quantity), quantity: difference, lower, upper. Leads, regions, levels
    and dates are those that both have; DataError where nothing is.
    """
    names = [name for name in first.data_vars if name in second.data_vars]
    if not names:
        raise DataError("the two forecasts have no variable in common: nothing to compare")
    pair = xr.align(*(each[names].sel(metric="mse", drop=True) for each in (first, second)), join="inner")
    if not pair[0].sizes["time"] or not pair[0].sizes["lead_time"]:
        raise DataError("the two forecasts have no initial date and lead in common: score them on the same")
    found = xr.apply_ufunc(
        lambda a, b: bootstrap(a, b, block_length),
        *pair,
        input_core_dims=[["time"], ["time"]],
        output_core_dims=[["quantity"]],
    )
    return found.assign_coords(quantity=["difference", "lower", "upper"])


def plot_scorecard(card: pd.DataFrame, target: Path) -> None:
    """Rows are variables, columns leads with their number of dates, colours and numbers per cent. Of many
    leads every cell has its colour, but only the columns that are labelled have numbers.
    """
    table = card.replace(np.inf, np.nan).pivot(index="variable", columns="lead_hours")
    table = table.loc[card["variable"].unique()]
    percent = table["percent"]
    leads = np.array(percent.columns)
    labelled = np.isin(leads, leads if len(leads) <= MOST_NUMBERS else shown_hours(leads))
    width = FULL_CELL if labelled.all() else NARROW_CELL
    size = (max(6.0, width * len(leads) + 2.6), 0.36 * percent.shape[0] + 2.0)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    mesh = axes.imshow(percent, cmap="RdBu_r", vmin=-BOUND, vmax=BOUND, aspect="auto")
    write_cells(axes, percent.to_numpy(), table["significant"].to_numpy(), labelled)
    ticks, dates = np.flatnonzero(labelled), table["num_dates"].max()
    axes.set_xticks(ticks, [f"{leads[i]}\n{int(dates.iloc[i])}" for i in ticks], fontsize=7)
    axes.set_yticks(range(percent.shape[0]), [short_label(name) for name in percent.index], fontsize=8)
    axes.set_xlabel("lead time (h), and below it the number of initial dates")
    first, second = card["first"][0], card["second"][0]
    title = f"RMSE of {first} relative to {second} (%)"
    needed = card.attrs["dates_needed"]
    note = "• 95 % of resamples agree"
    if not bool(np.any(card["significant"])):
        few = bool(np.max(card["num_dates"]) < needed)
        note = f"significance needs {needed} dates" if few else "no difference is significant"
    axes.set_title(f"{title}\nbelow 0: {first} is better; {note}", fontsize=9)
    figure.colorbar(mesh, ax=axes, shrink=0.8, label="%", extend="both")
    save(figure, target)


def shown_hours(leads: np.ndarray) -> np.ndarray:
    """Leads that tables show too."""
    return shown_leads(leads.astype("timedelta64[h]")).astype(int)


def write_cells(axes: Axes, percent: np.ndarray, significant: np.ndarray, labelled: np.ndarray) -> None:
    """The number of a cell in labelled columns (L,), and a dot where it is significant."""
    for (row, column), value in np.ndenumerate(percent):
        if np.isfinite(value):
            text = f"{value:.0f}" * bool(labelled[column]) + "•" * bool(significant[row, column])
            colour = "w" if abs(value) > 0.7 * BOUND else "k"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)


def write_scorecard(card: pd.DataFrame, target: Path) -> None:
    """Write the scorecard as CSV."""
    finite = card[np.isfinite(card["percent"])]
    finite.to_csv(target, index=False, float_format="%.4f", lineterminator="\r\n")
