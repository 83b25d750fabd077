"""Scores of forecasts against the truth. Shapes: B dates, L leads, V variables, H latitudes, W longitudes."""

import torch
from torch import Tensor


def mean_squared_error(forecast: Tensor, truth: Tensor, area: Tensor) -> Tensor:
    """Area-weighted mean over the cells that have a truth, in float64: (B, L, V, H, W) twice -> (B, L, V).

    NaN where a field has no cell with a truth. A forecast that is not finite where the truth is gives NaN
    or inf: a broken forecast must not look like a missing one.
    """
    valid = torch.isfinite(truth)
    weights = valid * area.double()[:, None]
    squares = torch.where(valid, forecast.double() - truth.double(), 0.0).square()
    return (weights * squares).sum(dim=(-2, -1)) / weights.sum(dim=(-2, -1))


def rmse(squared_errors: Tensor, present: Tensor) -> Tensor:
    """(n, L, V) errors of single dates -> (L, V): the root of the mean over the dates that have a truth.

    present (n, L, V) is 1 where there is a truth; errors are 0 elsewhere. The root comes after the mean
    over time (WeatherBench2).
    """
    return (squared_errors.sum(dim=0) / present.sum(dim=0)).sqrt()


def rmse_root_first(squared_errors: Tensor, present: Tensor) -> Tensor:
    """The same with the root before the mean over dates: the NERSC tutorial's metric, never above `rmse`."""
    return squared_errors.sqrt().sum(dim=0) / present.sum(dim=0)
