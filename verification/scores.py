"""Scores of forecasts against the truth: statistics of single dates, and scores from their means over dates.

A statistic is the area mean over a region of a quantity at every cell; a score is computed from means of
statistics over dates (formulas: docs/verification.md), all in float64. Cells without a truth are left out.
Without any, a statistic is NaN; if a forecast is not finite in a cell with a truth, it is infinite, so that a
broken forecast does not look like a missing one. Regions are WeatherBench2's (scripts/evaluate.py,
predefined_regions); a cell belongs to a region if its centre does, limits included.

Shapes: F forecasts, V variables (a level counts as one), M members, R regions, S statistics, H latitudes, W
longitudes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from datasets.grid import Grid, area_weights
from errors import ConfigError

# The statistics of one date, in the order of the first axis of `date_statistics`.
ERRORS = ("mse", "mae", "bias")
ANOMALIES = ("anomaly_covariance", "forecast_anomaly_square", "truth_anomaly_square")
ENSEMBLE = ("crps", "variance")
COMMON_AREA = "common_area"  # the fraction of the truth's area in which all forecasts have a value
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

    def __call__(self, fields: Tensor, truth: Tensor) -> Tensor:
        """Return means (S, V, R) of float64 fields (S, V, H, W) over cells where the truth (V, H, W) has a
        value: NaN without such a cell, infinite where a field is not finite in one of them.
        """
        totals = self.total(fields)
        if torch.isfinite(totals).all():
            return totals / self.weight  # 0 / 0 in a region without a cell
        # Cells are divided into valid, missing and broken ones only here, where sums are not finite.
        valid = torch.isfinite(truth)
        broken = valid & ~torch.isfinite(fields)
        means = self.total(torch.where(valid & ~broken, fields, 0.0)) / self.total(valid.double())
        return torch.where(self.total(broken.double()) > 0, torch.inf, means)


def stretches(inside: np.ndarray) -> list[slice]:
    """Return slices of the columns (W,) that are not 0; an empty slice if all are 0."""
    edges = np.flatnonzero(np.diff(inside != 0, prepend=False, append=False)).tolist()
    return [slice(*ends) for ends in zip(edges[::2], edges[1::2], strict=True)] or [slice(0, 0)]


# -- one date and lead ---------------------------------------------------------------------------------


def statistic_names(with_climatology: bool, with_members: bool) -> tuple[str, ...]:
    """Return the names of the statistics of `date_statistics`, in their order."""
    return ERRORS + ANOMALIES * with_climatology + ENSEMBLE * with_members


def date_statistics(
    forecasts: Sequence[Tensor], truth: Tensor, climatology: Tensor | None, mean: RegionMeans
) -> Tensor:
    """Return statistics (F, S, V, R) float64 of forecasts at one date and lead; NaN for those of an ensemble
    where a forecast is none.

    forecasts: (V, H, W), or (M, V, H, W) of an ensemble: its mean is scored, its members give CRPS and
    variance; truth and the climatology of the valid time (V, H, W).
    """
    names = statistic_names(climatology is not None, any(each.ndim > truth.ndim for each in forecasts))
    anomalies = slice(len(ERRORS), len(ERRORS) + len(ANOMALIES))
    shape = (len(forecasts), len(names), len(truth), len(mean.weight))
    values = torch.full(shape, torch.nan, dtype=torch.float64, device=truth.device)
    # Blocks of variables, because work arrays should stay in the cache.
    size = max(1, CELLS_AT_ONCE[truth.device.type] // truth[0].numel())
    for start in range(0, len(truth), size):
        block = slice(start, start + size)
        exact, normal, expected = truth[block].double(), None, None
        if climatology is not None:
            normal = climatology[block].double()
            expected = exact - normal
            known = torch.where(torch.isnan(normal), torch.nan, exact)
        for f, forecast in enumerate(forecasts):
            members = forecast[..., block, :, :]
            is_ensemble = members.ndim > exact.ndim
            state = members.double().mean(dim=0) if is_ensemble else members.double()
            error = state - exact
            fields = [error * error, error.abs(), error]
            values[f, : len(ERRORS), block] = mean(torch.stack(fields), exact)
            if normal is not None and expected is not None:
                anomaly = state - normal
                fields = [anomaly * expected, anomaly * anomaly, expected * expected]
                values[f, anomalies, block] = mean(torch.stack(fields), known)
            if is_ensemble:
                fields = [fair_crps(members, exact), members.double().var(dim=0, correction=1)]
                values[f, -len(ENSEMBLE) :, block] = mean(torch.stack(fields), exact)
    return values


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


def wind_pairs(variables: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the positions of both components by wind vector ("wind_vector:500")."""
    position, pairs = {name: i for i, name in enumerate(variables)}, {}
    for name in variables:
        base, colon, level = name.partition(":")
        for vector, (u, v) in WIND_VECTORS.items():
            if base == u and v + colon + level in position:
                pairs[vector + colon + level] = position[name], position[v + colon + level]
    return pairs


def append_wind(values: np.ndarray, names: Sequence[str], pairs: Mapping[str, tuple[int, int]]) -> np.ndarray:
    """Append wind vectors to statistics (S, ..., V, R) of these names. Only their squared error is defined,
    the sum over both components; of the areas they have those of u.
    """
    u, v = (list(rows) for rows in zip(*pairs.values(), strict=True)) if pairs else ([], [])
    vectors = np.full_like(values[..., u, :], np.nan)
    mse = names.index("mse")
    vectors[mse] = values[mse][..., u, :] + values[mse][..., v, :]
    if COMMON_AREA in names:
        area = names.index(COMMON_AREA)
        vectors[area] = values[area][..., u, :]
    return np.concatenate([values, vectors], axis=-2)


# -- means over dates ----------------------------------------------------------------------------------


def final_scores(statistics: xr.DataArray, num_members: xr.DataArray | int = 1) -> xr.DataArray:
    """Return scores with a first dimension `metric` from statistics of dates (initial_time, ..., score).

    Roots come after the mean over dates. `acc` is WeatherBench2's, the mean of the dates' correlations;
    `acc_ratio_of_means` is WeatherBench-X's. The unbiased ratio of spread and skill is 1 for a perfect
    ensemble of any size (WeatherBench-X), and less for an overconfident one. Names are WeatherBench2's where
    it has the score. NaN where a forecast is broken on a date. num_members: of each forecast.
    """
    by_date = {str(name): statistics.sel(score=name, drop=True) for name in statistics["score"].values}
    mse = by_date["mse"]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = {name: values.mean("initial_time") for name, values in by_date.items()}
        scores = {"mse": means["mse"], "rmse": means["mse"] ** 0.5}
        scores["rmse_sqrt_before_time_avg"] = (mse**0.5).mean("initial_time")
        scores |= {name: means[name] for name in ERRORS[1:]}
        if "anomaly_covariance" in means:
            squares = by_date["forecast_anomaly_square"] * by_date["truth_anomaly_square"]
            scores["acc"] = (by_date["anomaly_covariance"] / squares**0.5).mean("initial_time")
            ours, theirs = means["forecast_anomaly_square"], means["truth_anomaly_square"]
            scores["acc_ratio_of_means"] = means["anomaly_covariance"] / (ours * theirs) ** 0.5
            scores |= {"forecast_activity": ours**0.5, "truth_activity": theirs**0.5}
        if "crps" in means:
            spread, unbiased = means["variance"] ** 0.5, means["mse"] - means["variance"] / num_members
            scores |= {"crps": means["crps"], "spread": spread, "spread_skill_ratio": spread / scores["rmse"]}
            scores["unbiased_spread_skill_ratio"] = (means["variance"] / unbiased) ** 0.5
    # A mean that is infinite is that of a forecast that is broken on some date; the truth is not.
    is_whole = np.isfinite(means["mse"])
    scores = {name: s if name == "truth_activity" else s.where(is_whole) for name, s in scores.items()}
    area = {name: values for name, values in means.items() if name == COMMON_AREA}
    scores = {"num_dates": mse.notnull().sum("initial_time").astype(float)} | area | scores
    index = xr.DataArray(list(scores), dims="metric", name="metric")
    result = xr.concat(list(scores.values()), index, coords="minimal", compat="override")
    return result.transpose("metric", ..., "region", "lead_time", "variable", missing_dims="ignore")
