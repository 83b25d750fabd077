"""Scores by the definitions in docs/verification.md, in numpy and float64: what scores.nc has to contain.

Nothing of datasets/ or verification/ is used. Shapes: D dates, M members, R regions, H latitudes, W
longitudes.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.odd_inputs import HOUR, REGIONS, Array, Case, Fields, base

WINDS = {"wind_vector": "u_component_of_wind", "10m_wind_vector": "10m_u_component_of_wind"}


def row_edges(latitude: Array) -> Array:
    """Return bounds half-way between rows; a side ends at a pole that is within a spacing of its last row."""
    ends = []
    for edge, inner in ((latitude[0], latitude[1]), (latitude[-1], latitude[-2])):
        spacing = edge - inner
        pole = np.copysign(90.0, spacing)
        ends.append(pole if abs(pole - edge) < abs(spacing) + 1e-5 else edge + spacing / 2)
    return np.concatenate([ends[:1], (latitude[1:] + latitude[:-1]) / 2, ends[1:]])


def column_edges(longitude: Array) -> Array:
    half = (longitude[1] - longitude[0]) / 2
    return np.append(longitude - half, longitude[-1] + half)


def cell_size(fields: Fields) -> float:
    return float(-np.diff(row_edges(fields.latitude)).mean() * np.diff(column_edges(fields.longitude)).mean())


def overlaps(target: Array, source: Array) -> Array:
    low, high = np.maximum.outer(target[:-1], source[:-1]), np.minimum.outer(target[1:], source[1:])
    return np.where(high - low > 1e-9, high - low, 0)  # cells that touch do not overlap


def regrid(values: Array, source: Fields, target: Fields) -> Array:
    """Return first-order conservative means; a cell that is not wholly on the source's grid, or of which less
    than half has values, has none.
    """
    heights = [np.sin(np.deg2rad(row_edges(each.latitude)))[::-1] for each in (target, source)]
    rows = overlaps(*heights)[::-1, ::-1]
    east, west = (column_edges(each.longitude) for each in (target, source))
    columns = np.sum([overlaps(east, west + turn) for turn in (-720, -360, 0, 360, 720)], axis=0)
    area = np.outer(np.diff(heights[0])[::-1], np.diff(east))
    whole = np.outer(rows.sum(1), columns.sum(1)) > 0.999 * area
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        finite = np.where(np.isfinite(values), values, 0.0)
        valid = rows @ there.astype(float) @ columns.T
        mean = np.where(valid > (0.5 - 1e-6) * area, (rows @ finite @ columns.T) / valid, np.nan)
        mean = np.where(rows @ np.isinf(values).astype(float) @ columns.T > 0, np.inf, mean)
    return np.where(whole, mean, np.nan)


def on_grid(fields: Fields, target: Fields) -> Fields:
    if all(map(np.array_equal, (fields.latitude, fields.longitude), (target.latitude, target.longitude))):
        return fields
    values = {name: regrid(each, fields, target) for name, each in fields.values.items()}
    return replace(fields, values=values, latitude=target.latitude, longitude=target.longitude)


def crop(fields: Fields, region: list[float]) -> Fields:
    if not region:
        return fields
    north, west, south, east = region
    rows = (fields.latitude <= north) & (fields.latitude >= south)
    offset = (fields.longitude - west + 1e-9) % 360 - 1e-9
    width = 360 if east - west == 360 else (east - west) % 360
    columns = np.argsort(offset)[: int((offset <= width).sum())]
    values = {name: each[..., rows, :][..., columns] for name, each in fields.values.items()}
    return replace(fields, values=values, latitude=fields.latitude[rows], longitude=(west + offset)[columns])


def region_weights(fields: Fields, names: list[str]) -> dict[str, Array]:
    """Return area weights (H, W) inside of each region that has a cell."""
    area = -np.diff(np.sin(np.deg2rad(row_edges(fields.latitude))))
    north, east, found = fields.latitude[:, None], fields.longitude % 360, {}
    for name in names:
        inside = [(north >= a - 1e-4) & (north <= b + 1e-4) & (east >= c - 1e-4) & (east <= d + 1e-4)
                  for a, b, c, d in REGIONS[name]]  # fmt: skip
        found[name] = area[:, None] * np.any(inside, axis=0)
    return {name: each for name, each in found.items() if each.any()}


def pick(values: Array, labels: Array, wanted: Array) -> Array:
    """Return the values at labels of their first axis, NaN where there is none."""
    there = np.isin(wanted, labels)
    found = np.full((len(wanted), *values.shape[1:]), np.nan)
    order = np.argsort(labels)
    found[there] = values[order][np.searchsorted(labels[order], wanted[there])]
    return found


def climatology_at(fields: Fields, name: str, times: Array) -> Array:
    """Return (D, H, W), NaN for hours and days that it lacks."""
    stamps = pd.DatetimeIndex(times)
    labels = {"hour": np.asarray(stamps.hour), "dayofyear": np.asarray(stamps.dayofyear)}
    key, there = [], np.ones(len(times), bool)
    for axis, own in fields.axes.items():
        position = {int(label): i for i, label in enumerate(own)}
        rows = np.array([position.get(int(label), -1) for label in labels[axis]], int)
        there &= rows >= 0
        key.append(rows)
    return np.where(there[:, None, None], fields.values[name][tuple(key)], np.nan)


def statistics(
    state: Array, truth: Array, clim: Array | None, mask: Array, weights: Array
) -> dict[str, Array]:
    """Return area means (D, R) of one variable and lead: state (D[, M], H, W), others (D, H, W)."""

    def mean(x: Array, where: Array) -> Array:
        finite = np.isfinite(x)
        summed = np.where(where & finite, x, 0.0), where.astype(float), where & ~finite
        with np.errstate(invalid="ignore", divide="ignore"):
            total, area, broken = (np.einsum("dhw,rhw->dr", each, weights) for each in summed)
            return np.where(broken > 0, np.inf, total) / area

    members = state.shape[1] if state.ndim == 4 else 1
    with np.errstate(invalid="ignore"):
        middle = state.mean(axis=1) if members > 1 else state.reshape(truth.shape)
        error = middle - truth
        found = {"mse": mean(error**2, mask), "mae": mean(abs(error), mask), "bias": mean(error, mask)}
        if clim is not None:
            both, ours, theirs = mask & np.isfinite(clim), middle - clim, truth - clim
            found |= {"covariance": mean(ours * theirs, both), "ours": mean(ours**2, both)}
            found |= {"theirs": mean(theirs**2, both)}
        if members > 1:
            apart = sum(abs(state[:, m] - state[:, n]) for m in range(members) for n in range(members))
            crps = abs(state - truth[:, None]).mean(axis=1) - apart / (2 * members * (members - 1))
            found |= {"crps": mean(crps, mask), "variance": mean(state.var(axis=1, ddof=1), mask)}
    return found


def mean_of(values: Array) -> Array:
    """Return the mean over dates that have a value: infinite ones make it infinite."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, values, 0.0).sum(axis=0) / there.sum(axis=0)


def final(by_date: dict[str, Array], members: int) -> dict[str, Array]:
    """Return scores (R,) from the statistics (D, R)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mse = mean_of(by_date["mse"])
        scores = {"mse": mse, "rmse": np.sqrt(mse)}
        scores["rmse_sqrt_before_time_avg"] = mean_of(np.sqrt(by_date["mse"]))
        scores |= {name: mean_of(by_date[name]) for name in ("mae", "bias", "crps") if name in by_date}
        if "ours" in by_date:
            ours, theirs = by_date["ours"], by_date["theirs"]
            scores["acc"] = mean_of(by_date["covariance"] / np.sqrt(ours * theirs))
            ours, theirs = mean_of(ours), mean_of(theirs)
            scores["acc_ratio_of_means"] = mean_of(by_date["covariance"]) / np.sqrt(ours * theirs)
            scores |= {"forecast_activity": np.sqrt(ours), "truth_activity": np.sqrt(theirs)}
        if "variance" in by_date:
            variance = mean_of(by_date["variance"])
            scores |= {"spread": np.sqrt(variance), "spread_skill_ratio": np.sqrt(variance / mse)}
            scores["unbiased_spread_skill_ratio"] = np.sqrt(variance / (mse - variance / members))
    broken = ~np.isfinite(mse) & ~np.isnan(by_date["mse"]).all(axis=0)
    if broken.any():
        scores.pop("truth_activity", None)
    return {name: np.where(broken, np.nan, each) for name, each in scores.items()}


def baselines_of(case: Case, truth: Fields, dates: Array, leads: Array) -> dict[str, Fields]:
    there = np.array([np.isin(dates + lead, case.analyses.axes["time"]).any() for lead in leads], bool)
    there &= leads % case.step == 0 * HOUR
    axes, found = {"time": dates, "lead": leads[there]}, {}
    if "persistence" in case.baselines:
        first = truth if case.analyses is case.truth else case.analyses  # which data.region crops
        today = {n: pick(v, first.axes["time"], dates) for n, v in first.values.items()}
        values = {n: np.repeat(v[:, None], sum(there), axis=1) for n, v in today.items()}
        found["persistence"] = replace(first, values=values, axes=axes)
    clim = case.climatology
    if "climatology" in case.baselines and clim is not None:
        valid = (dates[:, None] + axes["lead"]).ravel()
        name = next(iter(clim.values))
        ones = replace(clim, values={name: np.ones_like(clim.values[name])})
        if not np.isnan(climatology_at(ones, name, valid)).any():
            shape = (len(dates), sum(there), len(clim.latitude), len(clim.longitude))
            values = {n: climatology_at(clim, n, valid).reshape(shape) for n in clim.values}
            found["climatology"] = replace(clim, values=values, axes=axes)
    return found


def expected(case: Case) -> tuple[dict[tuple[str, str, str, int], Any], list[str], Any, bool]:
    """Return forecast, metric, variable and lead in hours -> values of the regions; the regions; the rows of
    the scorecard, variable and lead in hours -> per cent; True where nothing is rounded.
    """
    truth, first = crop(case.truth, case.region), next(iter(case.forecasts.values()))
    names = [n for n in case.variables if n in first.values and n in truth.values]
    dates, leads = (sorted(set.intersection(*({*f.axes[axis].tolist()} for f in case.forecasts.values())))
                    for axis in ("time", "lead"))  # fmt: skip
    dates, leads = np.array(dates, "M8[s]"), np.array([lead for lead in leads if lead], "m8[s]")
    leads = leads[leads > 0 * HOUR]
    if case.test_period:
        dates = dates[(dates >= case.test_period[0]) & (dates <= case.test_period[1])]
    compared = case.forecasts | baselines_of(case, truth, dates, leads)
    target = truth
    for each in case.forecasts.values():
        target = each if cell_size(each) > cell_size(target) * 1.000001 else target
    used = [*compared.values(), truth, *([case.climatology] if case.climatology else [])]
    exact = all(each.plain and on_grid(each, target) is each for each in used)
    compared = {name: on_grid(each, target) for name, each in compared.items()}
    clim = case.climatology and on_grid(case.climatology, target)
    regions, truth = region_weights(target, case.regions), on_grid(truth, target)
    weights, found, by_date = np.stack([*regions.values()]), {}, {}
    inside, width = np.zeros((len(target.latitude), len(target.longitude)), bool), case.boundary
    inside[width : len(target.latitude) - width, width : len(target.longitude) - width] = True
    for lead in leads:
        hours = int(lead / HOUR)
        there = {name: f for name, f in compared.items() if lead in f.axes["lead"]}
        for name in names:
            own = {}
            for n, f in there.items():
                if name in f.values and not np.isnan(pick(f.values[name], f.axes["time"], dates)).all():
                    of_lead = f.values[name][:, [*f.axes["lead"]].index(lead)]
                    own[n] = pick(of_lead, f.axes["time"], dates)
            analysis = pick(truth.values[name], truth.axes["time"], dates + lead)
            whole = mask = np.isfinite(analysis) & inside
            for state in own.values():
                mask = mask & ~np.isnan(state.reshape(len(dates), -1, *inside.shape)).any(axis=1)
            means = climatology_at(clim, name, dates + lead) if clim and name in clim.values else None
            means = analysis * np.nan if clim and means is None else means
            for n, state in own.items():
                statistic = by_date[n, name, hours] = statistics(state, analysis, means, mask, weights)
                scores = final(statistic, state.shape[1] if state.ndim == 4 else 1)
                areas = [np.einsum("dhw,rhw->dr", each.astype(float), weights) for each in (mask, whole)]
                with np.errstate(invalid="ignore", divide="ignore"):
                    part = np.where(areas[0] > 0, areas[0] / areas[1], np.nan)
                scores |= {"num_dates": (areas[0] > 0).sum(axis=0), "common_area": mean_of(part)}
                found |= {(n, metric, name, hours): each for metric, each in scores.items()}
        for n, (vector, component) in product(there, WINDS.items()):
            for name in [each for each in names if base(each) == component]:
                key = n, name.replace("u_comp", "v_comp"), hours
                if key in by_date and (n, name, hours) in by_date:
                    mse = by_date[n, name, hours]["mse"] + by_date[key]["mse"]
                    whole_name = name.replace(component, vector)
                    by_date[n, whole_name, hours] = {"mse": mse}
                    scores = final({"mse": mse, "mae": mse, "bias": mse}, 1)
                    for metric in ("mse", "rmse", "rmse_sqrt_before_time_avg"):
                        found[n, metric, whole_name, hours] = scores[metric]
    return found, [*regions], scorecard(case, compared, by_date), exact


def scorecard(case: Case, compared: dict[str, Fields], by_date: dict) -> dict[tuple[str, int], float]:
    """Return per cent by variable and lead in hours, of the first forecast relative to another."""
    first, second = next(iter(compared)), case.against
    found = {}
    for (name, variable, hours), own in by_date.items():
        if name == first and (second, variable, hours) in by_date:
            ours, theirs = own["mse"][:, 0], by_date[second, variable, hours]["mse"][:, 0]
            both = ~np.isnan(ours) & ~np.isnan(theirs)
            with np.errstate(invalid="ignore", divide="ignore"):
                rmse = [np.sqrt(each[both].sum() / both.sum()) for each in (ours, theirs)]
                found[variable, hours] = 100 * (rmse[0] - rmse[1]) / rmse[1]
    return {key: value for key, value in found.items() if np.isfinite(value)}
