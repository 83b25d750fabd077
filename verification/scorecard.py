"""One forecast against another: relative difference of RMSE by variable, level and lead.

Significant: the 95 % interval of a bootstrap over initial dates excludes 0. Both forecasts are scored on the
same dates, and dates are drawn for both together (paired), so that the effect of a difficult day cancels in
the difference. Blocks of consecutive dates are drawn, because these are correlated, and single dates would
give intervals that are too narrow (Kuensch 1989, moving blocks). Shapes: n dates; N resamples.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from errors import DataError
from verification.evaluation import Evaluation
from verification.score_tables import lead_hours, one_variable, variable_names

BOUND = 50.0  # per cent at the ends of the colour scale
BLOCK_DAYS = 5  # about the decorrelation time of weather
MIN_BLOCKS = 6  # with fewer the interval of a bootstrap is too narrow
RESAMPLES, CONFIDENCE = 1000, 0.95


def build_scorecard(first: str, second: str, evaluations: Mapping[str, Evaluation]) -> pd.DataFrame:
    """Return `first` relative to `second`, over what both have: a row a variable and lead.

    Columns first, second, variable, lead_hours, percent (below 0 the first has the smaller error),
    significant (1 or 0; 0 also where the dates are fewer than `dates_needed`), num_dates that both have.
    Attribute `dates_needed`. Raises DataError if there is nothing to compare.
    """
    own = (evaluations[name].by_date.sel(metric="mse").isel(region=0) for name in (first, second))
    ours, theirs = xr.align(*own, join="inner")
    names = [name for name in variable_names(ours) if name in variable_names(theirs)]
    if not names or not ours.sizes["time"] or not ours.sizes["lead_time"]:
        raise DataError(f"{first} and {second} have no variable, date and lead in common: nothing to compare")
    block, parts = dates_of_block(ours), []
    for name in names:
        a, b = (one_variable(each, name).transpose("lead_time", "time").values for each in (ours, theirs))
        difference, lower, upper = bootstrap(b, a, max(1, min(block, ours.sizes["time"] // 4))).T
        num_dates = (~np.isnan(a + b)).sum(axis=1)
        columns = {"variable": name, "lead_hours": lead_hours(ours), "percent": 100 * difference}
        outside = ((lower > 0) | (upper < 0)) & (num_dates >= MIN_BLOCKS * block)
        columns |= {"significant": outside.astype(int), "num_dates": num_dates}
        parts.append(pd.DataFrame({"first": first, "second": second, **columns}))
    card = pd.concat(parts, ignore_index=True)
    if not np.isfinite(card["percent"]).any():
        raise DataError(f"{first} and {second} have no number to compare: one is broken, or lacks the dates")
    card.attrs["dates_needed"] = MIN_BLOCKS * block
    return card


def dates_of_block(by_date: xr.Dataset) -> int:
    """Return the number of initial dates in BLOCK_DAYS."""
    times = by_date["time"].values
    if len(times) < 2:
        return 1
    return max(1, math.ceil(BLOCK_DAYS / float(np.median(np.diff(times)) / np.timedelta64(1, "D"))))


def draw_dates(num_dates: int, block_length: int) -> np.ndarray:
    """Return how often each resample draws each date, (N, n) float64 of row sum n; always the same.

    Blocks of `block_length` consecutive dates start at random dates (1: single dates); the last is cut.
    """
    assert 1 <= block_length <= num_dates, f"blocks of {block_length} of {num_dates} dates"
    generator, blocks = np.random.default_rng(0), -(-num_dates // block_length)
    starts = generator.integers(0, num_dates - block_length + 1, (RESAMPLES, blocks))
    drawn = (starts[:, :, None] + np.arange(block_length)).reshape(RESAMPLES, -1)[:, :num_dates]
    return np.stack([np.bincount(dates, minlength=num_dates) for dates in drawn]).astype(float)


def bootstrap(first: np.ndarray, second: np.ndarray, block_length: int) -> np.ndarray:
    """Return the relative difference of two RMSEs, second over first minus 1, from squared errors (..., n):
    (..., 3), the difference and the lower and upper end of its percentile interval.

    The root is taken after the mean over dates. Dates that one of them lacks (NaN) do not count; an infinite
    error means that the forecast is broken, and the difference is NaN.
    """
    valid = ~(np.isnan(first) | np.isnan(second))
    weights = np.vstack([np.ones(first.shape[-1]), draw_dates(first.shape[-1], block_length)])
    with np.errstate(invalid="ignore", divide="ignore"):
        total = valid @ weights.T  # (..., 1 + N), the first column of all dates
        ours, theirs = (np.sqrt(np.where(valid, each, 0) @ weights.T / total) for each in (first, second))
        difference = (theirs - ours) / ours
    tail = (1 - CONFIDENCE) / 2
    known = np.isfinite(difference[..., :1])  # a resample may consist of dates that do not count
    resampled = np.where(known & (total[..., 1:] == 0), difference[..., :1], difference[..., 1:])
    limits = np.quantile(resampled, [tail, 1 - tail], axis=-1)
    return np.stack([difference[..., 0], *limits], axis=-1)


def write_scorecard(card: pd.DataFrame, folder: Path) -> None:
    """Write the scorecard as CSV, and as an HTML table of coloured per cents, bold where significant."""
    finite = card.loc[np.isfinite(card["percent"])]  # others: a forecast is broken, or no date is common
    finite.to_csv(folder / "scorecard.csv", index=False, float_format="%.4f", lineterminator="\r\n")
    table = finite.pivot(index="variable", columns="lead_hours").reindex(finite["variable"].unique())
    weights = table["significant"].map(lambda significant: "font-weight: bold" * (significant == 1))
    style = table["percent"].style.apply(lambda _: weights, axis=None)
    style.background_gradient("RdBu_r", axis=None, vmin=-BOUND, vmax=BOUND).format("{:.0f}", na_rep="")
    names, needed = " relative to ".join(card.loc[0, ["first", "second"]]), card.attrs["dates_needed"]
    note = f"below 0: better; bold: 95 % of resamples agree (tested from {needed} initial dates on)"
    style.set_caption(f"RMSE of {names} (%), by lead in hours; {note}")
    (folder / "scorecard.html").write_text(style.to_html())
