"""Scores of forecasts against the truth: statistics of single dates, scores from their means over dates, and
zonal energy spectra.

A statistic is the area mean over a region of a quantity at every cell; a score is computed from means of
statistics over dates (formulas: docs/verification.md), all in float64. Cells without a truth are left out.
Without any, a statistic is NaN; if a forecast is not finite in a cell with a truth, it is infinite, so that a
broken forecast does not look like a missing one. Regions are WeatherBench2's (scripts/evaluate.py,
predefined_regions); a cell belongs to a region if its centre does, limits included.

Shapes: F forecasts, V variables (a level counts as one), M members, R regions, S statistics, H latitudes, W
longitudes, K = W // 2 + 1 wavenumbers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from datasets.grid import Grid, area_weights
from errors import ConfigError
from verification.tables import by_variable

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
MIDLATITUDES = (30.0, 60.0)  # degrees north and south, where spectra are averaged for plots
EARTH_RADIUS = (6357e3 + 6378e3) / 2  # metres; WeatherBench2's
ON_THE_LIMIT = 1e-4  # tolerance in degrees: rounding of coordinates is smaller


@dataclass(frozen=True)
class Region:
    """Intervals of latitude (south, north) and longitude (west, east) in degrees, eastwards from 0."""

    latitudes: Sequence[tuple[float, float]] = ((-90, 90),)
    longitudes: Sequence[tuple[float, float]] = ((0, 360),)


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


class RegionMeans:
    """Area-weighted means of fields (..., H, W) over regions -> (..., R), on one grid and device.

    `weight` (R,) is 0 for a region without a cell on the grid.
    """

    def __init__(self, grid: Grid, regions: Sequence[str], device: torch.device | str = "cpu") -> None:
        """Raises ConfigError for an unknown region."""
        if unknown := [name for name in regions if name not in REGIONS]:
            raise ConfigError(f"region {unknown[0]!r}: not one of {', '.join(REGIONS)}")

        def inside(degrees: np.ndarray, intervals: Sequence[tuple[float, float]]) -> np.ndarray:
            west, east = np.array(intervals).T[..., None]  # (intervals, 1)
            cells = (degrees >= west - ON_THE_LIMIT) & (degrees <= east + ON_THE_LIMIT)
            return cells.any(axis=0).astype(float)

        rows = np.stack([inside(grid.latitude, REGIONS[name].latitudes) for name in regions])  # (R, H)
        columns = [inside(grid.longitude % 360, REGIONS[name].longitudes) for name in regions]  # R of (W,)
        distinct, self.column_of = np.unique(columns, axis=0, return_inverse=True)  # most go all round
        self.stretches = []  # of columns inside, as slices: one of no column in a region off the grid
        for of_region in distinct:
            ends = np.flatnonzero(np.diff(of_region, prepend=0, append=0)).tolist() or [0, 0]
            self.stretches.append([slice(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)])
        weights = rows * area_weights(grid.latitude)
        self.rows = torch.from_numpy(weights).T.contiguous().to(device)  # (H, R)
        self.weight = self.total(torch.ones(grid.shape, dtype=torch.float64, device=device))  # (R,)

    def total(self, fields: Tensor) -> Tensor:
        """Return weighted sums (..., R) of float64 fields (..., H, W): over longitude first, then latitude.

        Uses plain sums, because their order does not depend on the number of threads. A matrix product took
        ten times as long, and its last bits depended on the alignment of memory.
        """
        return (self._over_longitude(fields) * self.rows).sum(dim=-2)

    def _over_longitude(self, fields: Tensor) -> Tensor:
        along = [sum(fields[..., part].sum(dim=-1) for part in parts) for parts in self.stretches]
        return torch.stack([along[k] for k in self.column_of], dim=-1)  # (..., H, R)

    def __call__(self, fields: Sequence[Tensor], truth: Tensor) -> Tensor:
        """Return means (S, V, R) of S float64 fields (V, H, W) over cells where the truth (V, H, W) has a
        value: NaN without such a cell, infinite where a field is not finite in one of them.
        """
        # Only these sums are stacked: a stack of fields takes longer than their arithmetic.
        totals = (torch.stack([self._over_longitude(field) for field in fields]) * self.rows).sum(dim=-2)
        if torch.isfinite(totals).all():
            return totals / self.weight  # 0 / 0 in a region without a cell
        stacked = torch.stack(list(fields))
        # Cells are divided into valid, missing and broken ones only here, where sums are not finite.
        valid = torch.isfinite(truth)
        broken = valid & ~torch.isfinite(stacked)
        means = self.total(torch.where(valid & ~broken, stacked, 0.0)) / self.total(valid.double())
        return torch.where(self.total(broken.double()) > 0, torch.inf, means)


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
    names = statistic_names(climatology is not None, any(f.ndim > truth.ndim for f in forecasts))
    first = len(ERRORS)  # of ANOMALIES
    shape = (len(forecasts), len(names), len(truth), len(mean.weight))
    values = torch.full(shape, torch.nan, dtype=torch.float64, device=truth.device)
    # Blocks of variables, because work arrays should stay in the cache.
    size = max(1, CELLS_AT_ONCE[truth.device.type] // truth[0].numel())
    for start in range(0, len(truth), size):
        block = slice(start, start + size)
        exact = truth[block].double()
        if climatology is not None:
            normal = climatology[block].double()
            expected, known = exact - normal, torch.where(torch.isnan(normal), torch.nan, exact)
            values[:, first + 2, block] = mean([expected * expected], known)[0]
        for f, forecast in enumerate(forecasts):
            # An ensemble's mean is scored as a forecast is, over the cells in which the truth has values.
            members = forecast[..., block, :, :]
            is_ensemble = members.ndim > exact.ndim
            state = members.double().mean(dim=0) if is_ensemble else members.double()
            error = state - exact
            values[f, : len(ERRORS), block] = mean([error * error, error.abs(), error], exact)
            if climatology is not None:
                anomaly = state - normal
                fields = [anomaly * expected, anomaly * anomaly]
                values[f, first : first + 2, block] = mean(fields, known)
            if is_ensemble:
                fields = [fair_crps(members, exact), members.double().var(dim=0, correction=1)]
                values[f, -len(ENSEMBLE) :, block] = mean(fields, exact)
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
    pairs = {}
    for row, name in enumerate(variables):
        base, colon, level = name.partition(":")
        for vector, (u, v) in WIND_VECTORS.items():
            if base == u and v + colon + level in variables:
                pairs[vector + colon + level] = row, variables.index(v + colon + level)
    return pairs


# -- means over dates ----------------------------------------------------------------------------------


def final_scores(statistics: xr.DataArray, num_members: xr.DataArray | int = 1) -> xr.DataArray:
    """Return scores with a first dimension `metric` from statistics of dates (initial_time, ..., score).

    Roots come after the mean over dates. `acc` is WeatherBench2's, the mean of the dates' correlations;
    `acc_ratio_of_means` is WeatherBench-X's. The unbiased ratio of spread and skill is 1 for a perfect
    ensemble of any size (WeatherBench-X), and less for an overconfident one. Names are WeatherBench2's where
    it has the score. NaN where a forecast is broken on a date. num_members: of each forecast.
    """
    by_date = {str(name): statistics.sel(score=name, drop=True) for name in statistics["score"].values}
    means, scores = {name: values.mean("initial_time") for name, values in by_date.items()}, {}
    mse, variance = means["mse"], means.get("variance")
    with np.errstate(invalid="ignore", divide="ignore"):
        scores |= {"mse": mse, "rmse": mse**0.5}
        scores["rmse_sqrt_before_time_avg"] = (by_date["mse"] ** 0.5).mean("initial_time")
        scores |= {name: means[name] for name in ERRORS[1:]}
        # -- correlations and sizes of anomalies, where there is a climatology
        if "anomaly_covariance" in means:
            squares = by_date["forecast_anomaly_square"] * by_date["truth_anomaly_square"]
            scores["acc"] = (by_date["anomaly_covariance"] / squares**0.5).mean("initial_time")
            ours, theirs = means["forecast_anomaly_square"], means["truth_anomaly_square"]
            scores["acc_ratio_of_means"] = means["anomaly_covariance"] / (ours * theirs) ** 0.5
            scores |= {"forecast_activity": ours**0.5, "truth_activity": theirs**0.5}
        # -- of ensembles
        if variance is not None:
            spread = variance**0.5
            scores |= {"crps": means["crps"], "spread": spread, "spread_skill_ratio": spread / scores["rmse"]}
            scores["unbiased_spread_skill_ratio"] = (variance / (mse - variance / num_members)) ** 0.5
    # A mean that is infinite is that of a forecast that is broken on some date; the truth is not.
    scores = {
        name: s if name == "truth_activity" else s.where(np.isfinite(mse)) for name, s in scores.items()
    }
    # -- how many dates the means are of: scores of different dates are not to be compared
    counts = {"num_dates": by_date["mse"].notnull().sum("initial_time").astype(float)}
    if COMMON_AREA in means:
        counts[COMMON_AREA] = means[COMMON_AREA]
    scores = counts | scores
    index = xr.DataArray(list(scores), dims="metric", name="metric")
    result = xr.concat(list(scores.values()), index, coords="minimal", compat="override")
    return result.transpose("metric", ..., "region", "lead_time", "variable", missing_dims="ignore")


def combine(scores: Sequence[xr.DataArray], variables: Sequence[str], units: Mapping[str, str]) -> xr.Dataset:
    """Return the `final_scores` of forecasts, which have a dimension `forecast` of size 1, by variable; with
    the coordinate `num_dates` (forecast, lead_time).
    """
    array = xr.concat(scores, "forecast", join="outer", coords="minimal", compat="override")
    array = array.transpose("forecast", "metric", ...)
    num_dates = array.sel(metric="num_dates", drop=True).max(("variable", "region")).astype(int)
    return by_variable(array, variables, units).assign_coords(num_dates=num_dates)


# -- zonal energy spectra ------------------------------------------------------------------------------


class Spectra:
    """Sums over dates of the zonal energy spectra of a forecast and the truth at one lead, float64."""

    def __init__(self, variables: Sequence[str], grid: Grid, device: torch.device | str) -> None:
        self.variables, self.grid = list(variables), grid
        # Metres of the circles of latitude (H,), 0 at the poles to rounding.
        length = 2 * np.pi * EARTH_RADIUS * np.cos(np.deg2rad(np.asarray(grid.latitude, np.float64)))
        self.length = torch.from_numpy(length).to(device)
        waves = (grid.shape[0], grid.shape[1] // 2 + 1)
        shapes = {"dates": (), "whole_rows": grid.shape[:1], "forecast": waves, "truth": waves}
        self.sums = {
            name: torch.zeros((len(variables), *shape), dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }

    def add(self, forecast: Tensor, truth: Tensor, rows: Sequence[int]) -> None:
        """Add a date: forecast ([M,] V, H, W), truth (V, H, W); rows: positions of these V among all."""
        for i, v in enumerate(rows):  # one at a time: members and waves are large
            exact = truth[i].double()
            members = forecast[..., i, :, :].double().reshape(-1, *exact.shape)
            valid = torch.isfinite(exact)
            is_complete = valid.all(dim=-1)  # a row with a missing value has no spectrum
            self.sums["dates"][v] += valid.any()
            self.sums["whole_rows"][v] += is_complete
            for name, fields in {"forecast": members, "truth": exact[None]}.items():
                # Mean energy of the members, not the energy of their mean, which is too smooth.
                energy = zonal_energy_spectrum(fields, self.length).mean(dim=0)
                self.sums[name][v] += torch.where(is_complete[:, None], energy, 0.0)

    def result(self, lead: np.ndarray, has: Sequence[bool], units: Mapping[str, str]) -> xr.Dataset:
        """Return dims (lead_time[, level], latitude, zonal_wavenumber, source): means over the dates that
        have all values on the circle of latitude. Coordinate `num_dates`: all dates. has: the variables that
        the forecast has; the others are left out. lead: (1,).
        """
        sources, rows = ["forecast", "truth"], np.flatnonzero(has).tolist()
        mean = torch.stack([self.sums[name][rows] for name in sources], dim=-1)[None]
        mean /= self.sums["whole_rows"][rows][..., None, None]
        coords: dict[str, Any] = {"lead_time": lead.astype("timedelta64[ns]")}
        coords |= {"latitude": self.grid.latitude, "zonal_wavenumber": np.arange(mean.shape[-2])}
        coords |= {"source": sources, "num_dates": ("lead_time", [int(self.sums["dates"].max())])}
        dims = ["lead_time", "variable", "latitude", "zonal_wavenumber", "source"]
        array = xr.DataArray(mean.cpu().numpy(), coords, dims)
        spectra = by_variable(array, [self.variables[row] for row in rows], units)
        for field in spectra.data_vars.values():
            # Squared, "m2 s-2" of "m s-1", times the length of a circle of latitude; pure numbers stay "1".
            words = [re.fullmatch(r"(.*?[^\d-])(-?\d+)?", word) for word in field.attrs["units"].split()]
            squares = [f"{word[1]}{2 * int(word[2] or 1)}" if word else "1" for word in words]
            field.attrs["units"] = " ".join([*squares, "m"])
        return spectra


def zonal_energy_spectrum(fields: Tensor, length: Tensor) -> Tensor:
    """Return the energy (..., H, K) float64 of fields (..., H, W) round the globe; length (H,) in metres of
    the circles of latitude. The sum over K is the integral of the square along the circle.

    WeatherBench2's derived_variables.ZonalEnergySpectrum, in which the highest wavenumber of an even W counts
    twice, too. NaN along a row with a NaN.
    """
    waves = torch.fft.rfft(fields.double(), norm="forward")
    energy = waves.real.square() + waves.imag.square()
    energy[..., 1:] *= 2  # positive and negative wavenumbers
    return energy * length[:, None]


def mean_of_midlatitudes(spectrum: xr.DataArray) -> xr.DataArray:
    """Return the mean of a spectrum over the rows of middle latitudes; over all but the poles where the grid
    has none. Rows without a value (NaN) are left out.
    """
    north = abs(spectrum["latitude"])
    inside = (north >= MIDLATITUDES[0]) & (north <= MIDLATITUDES[1])
    return spectrum.where(inside if inside.any() else north < 90).mean("latitude")
