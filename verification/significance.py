"""Is one forecast better than another, or was it the choice of dates? Bootstrap over initial dates.

Both forecasts are scored on the same dates, and dates are drawn for both together (paired): what a hard day
adds to both cancels in the difference. Consecutive dates are alike, so that single dates drawn at random give
intervals that are too narrow; blocks of consecutive dates keep what they have in common (Kuensch 1989, moving
blocks). Shapes: n dates, then anything; N resamples.
"""

from typing import NamedTuple

import numpy as np
import xarray as xr

from errors import DataError

RESAMPLES_AT_ONCE = 2**24  # elements of the means of resamples held at once


class Interval(NamedTuple):
    """A difference (second minus first), its confidence interval, and whether that excludes 0."""

    difference: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @property
    def significant(self) -> np.ndarray:
        return (self.lower > 0) | (self.upper < 0)


def draw_dates(num_dates: int, block_length: int, resamples: int, seed: int) -> np.ndarray:
    """How often each date is drawn in each resample, (N, n) float64 of row sum n.

    Blocks of `block_length` consecutive dates begin at random ones (1: single dates); the last is cut.
    DataError where a block is longer than the dates.
    """
    if not 1 <= block_length <= num_dates:
        raise ValueError(
            f"blocks of {block_length} dates: the scores have {num_dates}; take 1 to {num_dates}"
        )
    generator, blocks = np.random.default_rng(seed), -(-num_dates // block_length)
    starts = generator.integers(0, num_dates - block_length + 1, (resamples, blocks))
    drawn = (starts[:, :, None] + np.arange(block_length)).reshape(resamples, -1)[:, :num_dates]
    flat = drawn + num_dates * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * num_dates).reshape(resamples, -1).astype(float)


def bootstrap_difference(
    first: np.ndarray,
    second: np.ndarray,
    *,
    root: bool = False,
    relative: bool = False,
    block_length: int = 1,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Interval of the difference of two mean scores, second - first, over dates: (n, ...) twice -> (...).

    root: of the roots of the means (RMSE from mean squared errors). relative: over the first's. Dates
    where both are NaN (no truth) do not count; where only one is, that forecast is broken and the difference
    is NaN. Percentile interval.
    """
    valid = ~(np.isnan(first) & np.isnan(second))
    shape, num_dates = first.shape[1:], len(first)
    flat = [np.where(valid, each, 0).reshape(num_dates, -1) for each in (first, second)]
    counts = valid.reshape(num_dates, -1).astype(float)
    weights = np.concatenate([np.ones((1, num_dates)), draw_dates(num_dates, block_length, resamples, seed)])
    columns = max(1, RESAMPLES_AT_ONCE // len(weights))
    found = []
    for start in range(0, counts.shape[1], columns):
        part = slice(start, start + columns)
        total = weights @ counts[:, part]
        with np.errstate(invalid="ignore", divide="ignore"):
            means = [weights @ each[:, part] / total for each in flat]
            found.append(_interval(means[0], means[1], root, relative, confidence))
    return Interval(*(np.concatenate(each).reshape(shape) for each in zip(*found, strict=True)))


def _interval(
    first: np.ndarray, second: np.ndarray, root: bool, relative: bool, confidence: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From means (1 + N, C), the first row without resampling, to difference, lower and upper (C,)."""
    if root:
        first, second = np.sqrt(first), np.sqrt(second)
    difference = (second - first) / first if relative else second - first
    tail = (1 - confidence) / 2
    lower, upper = np.quantile(difference[1:], [tail, 1 - tail], axis=0)
    return difference[0], lower, upper


def compare(first: xr.Dataset, second: xr.Dataset, metric: str, **options) -> xr.Dataset:
    """`bootstrap_difference` of one metric of two `Evaluation.by_date`, for all variables that both have.

    metric: a statistic of by_date, or "rmse" (roots of means of mse). Dims (quantity, region, lead_time[,
    level]), quantity: difference, lower, upper, significant (1 or 0, NaN where undefined). Leads, regions,
    levels and dates are those that both have; DataError where nothing is.
    """
    names = [name for name in first.data_vars if name in second.data_vars]
    if not names:
        raise DataError("the two forecasts have no variable in common: nothing to compare")
    pick = {"metric": "mse" if metric == "rmse" else metric}
    ours, theirs = xr.align(first[names].sel(pick), second[names].sel(pick), join="inner")
    if not ours.sizes["time"] or not ours.sizes["lead_time"]:
        raise DataError("the two forecasts have no initial date and lead in common: score them on the same")
    results = {}
    for name in names:
        a, b = ours[name].transpose("time", ...), theirs[name].transpose("time", ...)
        interval = bootstrap_difference(a.values, b.values, root=metric == "rmse", **options)
        significant = np.where(np.isnan(interval.difference), np.nan, interval.significant)
        results[name] = (("quantity", *a.dims[1:]), np.stack([*interval, significant]), a.attrs)
    coords = {dim: ours[dim] for dim in ours.dims if dim != "time"}
    quantities = ["difference", "lower", "upper", "significant"]
    return xr.Dataset(results, {"quantity": quantities, **coords}, {"metric": metric})
