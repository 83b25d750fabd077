"""Scores of forecasts against the truth: statistics of single dates, and scores from their time means.

A statistic is the area mean over a region of a quantity at every cell; a score is computed from time means
of statistics (formulas: docs/verification.md), all in float64. Cells without a truth are left out. If a
forecast is not finite in a cell with a truth, the statistic is NaN, so that a broken forecast does not look
like a missing one. Regions are WeatherBench2's (scripts/evaluate.py, predefined_regions); a cell belongs to a
region if its centre does, limits included.

Shapes: B dates, L leads, V variables (a level counts as one), M members, R regions, S statistics, H
latitudes, W longitudes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from datasets.grid import Grid, area_weights
from errors import ConfigError

# The statistics of one date, in the order of the first axis of `date_statistics`.
ERRORS = ("mse", "mae", "bias")
ANOMALIES = ("anomaly_covariance", "forecast_anomaly_square", "truth_anomaly_square")
ENSEMBLE = ("crps", "variance")
DERIVED = ("rmse_sqrt_before_time_avg", "acc")  # of other statistics of the same date
CELLS_AT_ONCE = {"cpu": 2**16, "cuda": 2**25}  # of a block: its work arrays should stay in the cache

WIND_VECTORS = {
    "wind_vector": ("u_component_of_wind", "v_component_of_wind"),
    "10m_wind_vector": ("10m_u_component_of_wind", "10m_v_component_of_wind"),
}
Interval = tuple[float, float]
ON_THE_LIMIT = 1e-4  # tolerance in degrees: rounding of coordinates is smaller


@dataclass(frozen=True)
class Region:
    """Latitudes (south, north) and longitudes (west, east) in degrees, eastwards from 0."""

    latitudes: tuple[Interval, ...] = ((-90.0, 90.0),)
    longitudes: tuple[Interval, ...] = ((0.0, 360.0),)


REGIONS = {
    "global": Region(),
    "tropics": Region(((-20, 20),)),
    "extra-tropics": Region(((-90, -20), (20, 90))),
    "northern-hemisphere": Region(((20, 90),)),
    "southern-hemisphere": Region(((-90, -20),)),
    "europe": Region(((35, 75),), ((347.5, 360), (0, 42.5))),
    "north-america": Region(((25, 60),), ((240, 285),)),
    "north-atlantic": Region(((25, 65),), ((290, 350),)),
    "north-pacific": Region(((25, 60),), ((145, 230),)),
    "east-asia": Region(((25, 60),), ((102.5, 150),)),
    "ausnz": Region(((-45, -12.5),), ((120, 175),)),
    "arctic": Region(((60, 90),)),
    "antarctic": Region(((-90, -60),)),
}


def region_weights(grid: Grid, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows (R, H), area weights inside and 0 outside, and columns (R, W) of 1 and 0, both float64.

    A region without a cell on the grid has only zeros. Raises ConfigError for an unknown region.
    """
    if unknown := [name for name in names if name not in REGIONS]:
        raise ConfigError(f"region {unknown[0]!r}: not one of {', '.join(REGIONS)}")
    area, east = area_weights(grid.latitude), grid.longitude % 360
    rows = [_inside(grid.latitude, REGIONS[name].latitudes) * area for name in names]
    columns = [_inside(east, REGIONS[name].longitudes) for name in names]
    return np.stack(rows), np.stack(columns)


def regions_on(grid: Grid) -> list[str]:
    """Return the names of the regions that have a cell on the grid."""
    rows, columns = region_weights(grid, list(REGIONS))
    there = rows.sum(axis=1) * columns.sum(axis=1) > 0
    return [name for name, cells in zip(REGIONS, there, strict=True) if cells]


def _inside(values: np.ndarray, intervals: Sequence[Interval]) -> np.ndarray:
    """Return 1 where values (N,) are in one of the intervals, else 0."""
    limits = np.asarray(intervals)[:, :, None]  # (intervals, 2, 1)
    inside = (values >= limits[:, 0] - ON_THE_LIMIT) & (values <= limits[:, 1] + ON_THE_LIMIT)
    return np.any(inside, axis=0).astype(float)


class RegionMeans:
    """Area-weighted means of fields (..., H, W) over regions -> (..., R), on one grid and device."""

    def __init__(self, grid: Grid, regions: Sequence[str], device: torch.device | str = "cpu") -> None:
        rows, columns = region_weights(grid, regions)
        distinct, self.column_of = np.unique(columns, axis=0, return_inverse=True)  # most go all round
        self.stretches = [stretches(inside) for inside in distinct]
        self.rows = torch.from_numpy(rows).T.contiguous().to(device)  # (H, R)
        self.weight = self.total(torch.ones(grid.shape, dtype=torch.float64, device=device))  # (R,)

    def total(self, fields: Tensor) -> Tensor:
        """Return weighted sums (..., R) of float64 fields (..., H, W): over longitude first, then latitude.

        Uses plain sums, because their order does not depend on the number of threads. A matrix product took
        ten times as long, and its last bits depended on the alignment of memory.
        """
        along = [sum(fields[..., part].sum(dim=-1) for part in parts) for parts in self.stretches]
        return (torch.stack([along[k] for k in self.column_of], dim=-1) * self.rows).sum(dim=-2)

    def __call__(self, fields: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
        """Return means (S, V, R) of float64 fields (S, V, H, W), and where the truth (V, H, W) has a value,
        (V, R) bool. Cells are divided into valid, missing and broken ones only if the sums are not finite.
        """
        totals = self.total(fields)
        if torch.isfinite(totals).all():
            return totals / self.weight, (self.weight > 0).expand(totals.shape[1:])
        valid = torch.isfinite(truth)
        broken = valid & ~torch.isfinite(fields)
        weight = self.total(valid.double())  # (V, R)
        totals = self.total(torch.where(valid & ~broken, fields, 0.0))
        totals = torch.where(self.total(broken.double()) > 0, torch.nan, totals)
        return totals / weight, weight > 0


def stretches(inside: np.ndarray) -> list[slice]:
    """Return slices of the columns (W,) that are not 0; an empty slice if all are 0."""
    edges = np.flatnonzero(np.diff(inside != 0, prepend=False, append=False)).tolist()
    return [slice(*ends) for ends in zip(edges[::2], edges[1::2], strict=True)] or [slice(0, 0)]


def statistic_names(with_climatology: bool, num_members: int) -> tuple[str, ...]:
    """Return the names of the statistics of `date_statistics` and `complete`, in their order."""
    names = ERRORS + ANOMALIES * with_climatology + ENSEMBLE * (num_members > 1)
    return names + DERIVED[: 1 + with_climatology]


def date_statistics(
    forecast: Tensor, truth: Tensor, climatology: Tensor | None, mean: RegionMeans
) -> tuple[Tensor, Tensor]:
    """Return statistics (S, V, R) of one date and lead, float64, and where there is a truth, (V, R) bool.

    forecast (V, H, W), or (M, V, H, W) for an ensemble: its mean is scored, its members give CRPS and
    variance; truth and the climatology of the valid time (V, H, W). Works through blocks of variables.
    """
    size = max(1, CELLS_AT_ONCE[truth.device.type] // truth[0].numel())
    parts = []
    for start in range(0, len(truth), size):
        block = slice(start, start + size)
        members = forecast[..., block, :, :]
        clim = None if climatology is None else climatology[block]
        fields = cell_statistics(members, truth[block].double(), clim)
        values, present = mean(fields, truth[block])
        if clim is not None and (missing := torch.isnan(clim)).any():
            rows = slice(len(ERRORS), len(ERRORS) + len(ANOMALIES))
            values[rows] = mean(fields[rows], torch.where(missing, torch.nan, truth[block]))[0]
        parts.append((values, present))
    values, present = zip(*parts, strict=True)
    return torch.cat(values, dim=1), torch.cat(present)


def cell_statistics(forecast: Tensor, truth: Tensor, climatology: Tensor | None) -> Tensor:
    """Return fields to average, (S, V, H, W) float64: squared error, absolute error and error; products of
    anomalies; CRPS and variance of an ensemble (M, V, H, W).
    """
    is_ensemble = forecast.ndim == truth.ndim + 1
    state = forecast.double().mean(dim=0) if is_ensemble else forecast.double()
    error = state - truth
    fields = [error * error, error.abs(), error]
    if climatology is not None:
        ours, theirs = state - climatology, truth - climatology
        fields += [ours * theirs, ours * ours, theirs * theirs]
    if is_ensemble:
        fields += [fair_crps(forecast, truth), forecast.double().var(dim=0, correction=1)]
    return torch.stack(fields)


def fair_crps(members: Tensor, truth: Tensor) -> Tensor:
    """Return the continuous ranked probability score of members (M, ...) at every cell (...), float64.

    mean |x - y| - sum over pairs |x_i - x_j| / (2 M (M - 1)): unbiased for any M >= 2 (Zamo and Naveau 2018,
    eFAIR, in their form for sorted members).
    """
    count = len(members)
    distance = torch.sort(members, dim=0).values.double() - truth.double()  # sorted by value
    rank = torch.arange(1, count + 1, dtype=torch.float64, device=members.device)
    factor = ((2 * rank - count - 1) / (count * (count - 1))).view(-1, *[1] * truth.ndim)
    return distance.abs().mean(dim=0) - (factor * distance).sum(dim=0)


def complete(values: Tensor, names: Sequence[str]) -> Tensor:
    """Append the root of the mean squared error and the ACC of the date to statistics (S, ...)."""
    of = dict(zip(names, values, strict=False))  # names go on with what is appended here
    more = [of["mse"].sqrt()]
    if "anomaly_covariance" in of:
        squares = of["forecast_anomaly_square"] * of["truth_anomaly_square"]
        more.append(of["anomaly_covariance"] / squares.sqrt())
    return torch.cat([values, torch.stack(more)])


def wind_pairs(variables: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the positions of both components by wind vector ("wind_vector:500")."""
    position, pairs = {name: i for i, name in enumerate(variables)}, {}
    for name in variables:
        base, colon, level = name.partition(":")
        for vector, (u, v) in WIND_VECTORS.items():
            if base == u and v + colon + level in position:
                pairs[vector + colon + level] = position[name], position[v + colon + level]
    return pairs


def append_wind(
    values: Tensor, present: Tensor, pairs: Mapping[str, tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Append wind vectors to (S, ..., V, R) and (..., V, R). Only their squared error, the first statistic,
    is defined: the sum over both components.
    """
    if not pairs:
        return values, present
    u, v = (torch.tensor(rows, device=values.device) for rows in zip(*pairs.values(), strict=True))
    vectors = torch.full_like(values[..., u, :], torch.nan)
    vectors[0] = values[0][..., u, :] + values[0][..., v, :]
    both = present[..., u, :] & present[..., v, :]
    return torch.cat([values, vectors], dim=-2), torch.cat([present, both], dim=-2)


def final_scores(means: Mapping[str, Tensor], num_members: int) -> dict[str, Tensor]:
    """Return scores by name from the time means of statistics, (L, V, R) each.

    Roots come after the mean over time. `acc` is WeatherBench2's, the mean of the dates' correlations;
    `acc_ratio_of_means` is WeatherBench-X's. Names are WeatherBench2's where it has the score.
    """
    scores = {"mse": means["mse"], "rmse": means["mse"].sqrt()}
    scores |= {name: means[name] for name in ("rmse_sqrt_before_time_avg", *ERRORS[1:])}
    if "acc" in means:
        ours, theirs = means["forecast_anomaly_square"], means["truth_anomaly_square"]
        scores["acc"] = means["acc"]
        scores["acc_ratio_of_means"] = means["anomaly_covariance"] / (ours * theirs).sqrt()
        scores |= {"forecast_activity": ours.sqrt(), "truth_activity": theirs.sqrt()}
    if "crps" in means:
        scores |= ensemble_scores(means, num_members)
    return scores


def ensemble_scores(means: Mapping[str, Tensor], num_members: int) -> dict[str, Tensor]:
    """Return the scores of the members by name, from the time means of statistics.

    The unbiased ratio of spread and skill is 1 for a perfect ensemble of any size (WeatherBench-X), and less
    for an overconfident one.
    """
    spread, unbiased = means["variance"].sqrt(), means["mse"] - means["variance"] / num_members
    scores = {"crps": means["crps"], "spread": spread, "spread_skill_ratio": spread / means["mse"].sqrt()}
    return scores | {"unbiased_spread_skill_ratio": (means["variance"] / unbiased).sqrt()}
