"""Is one forecast better than another, or was it the choice of dates? Bootstrap over initial dates.

Both forecasts are scored on the same dates, and dates are drawn for both together (paired): what a hard day
adds to both cancels in the difference. Consecutive dates are alike, so that single dates drawn at random give
intervals that are too narrow; blocks of consecutive dates keep what they have in common (Kuensch 1989, moving
blocks). Shapes: n dates; N resamples.
"""

import numpy as np
import xarray as xr

from errors import DataError

RESAMPLES, CONFIDENCE = 1000, 0.95
RESAMPLES_AT_ONCE = 2**24  # elements of the means of resamples held at once


def draw_dates(num_dates: int, block_length: int) -> np.ndarray:
    """How often each date is drawn in each resample, (N, n) float64 of row sum n; always the same draws.

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
