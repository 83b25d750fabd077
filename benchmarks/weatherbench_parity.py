"""Scores against WeatherBench2's and WeatherBench-X's own code.

    PYTHONPATH=<checkout of weatherbench2>:<checkout of weatherbenchX>:<their requirements> \
        .venv/bin/python benchmarks/weatherbench_parity.py

Random fields, on a grid with poles and on one without; a row a score and tool with the largest relative
difference. Ends with 1 when one is above 1e-6.
"""

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pandas as pd
import torch
import xarray as xr

from benchmarks.results_file import parse, record
from datasets.archive import open_archive
from datasets.grid import Grid
from datasets.regrid import Regridder
from tests.forecasts import analyses, climatology, evaluate_one, forecasts, grid, write
from verification.climatology import compute_climatology, open_climatology
from verification.scores import REGIONS
from verification.stores import open_forecast

TOLERANCE = 1e-6
GRIDS = (grid(37, 72, poles=True), grid(32, 64, poles=False))
LEAD_HOURS = [6, 24, 72]
BOXES = [name for name, region in REGIONS.items() if len(region.latitudes) * len(region.longitudes) == 1]


def compare(coords: dict[str, np.ndarray], members: int, folder: Path) -> list[dict]:
    """Compare all scores of one set of forecasts with those of both tools."""
    truth = analyses(coords, 26)
    forecast, means = forecasts(truth, 6, LEAD_HOURS, members), climatology(truth)
    opened = open_forecast(write(forecast, folder / "forecast.zarr"))
    archive = open_archive(write(truth, folder / "truth.zarr"))
    clim = open_climatology(write(means, folder / "climatology.zarr"))
    ours = evaluate_one(opened, archive, clim, regions=list(REGIONS), detail_lead=24)
    forecast, truth, means = (dataset.astype("f8") for dataset in (forecast, truth, means))
    # With dimensions init_time and lead_time and the coordinate valid_time, as both tools want them.
    matched = forecast.rename(time="init_time", prediction_timedelta="lead_time")
    valid = (matched.init_time + matched.lead_time).rename("valid_time")
    matched = matched.assign_coords(valid_time=valid)
    truth = truth.sel(time=valid).drop_vars("time")
    # WeatherBench2: a metric and a region at a time.
    metrics, areas = import_module("weatherbench2.metrics"), import_module("weatherbench2.regions")
    u, v = "u_component_of_wind", "v_component_of_wind"
    wind = {"u_name": u, "v_name": v, "vector_name": "wind_vector"}
    if members:
        name = {"ensemble_dim": "number"}
        known = {"crps": metrics.CRPS(**name), "mse": metrics.EnsembleMeanMSE(**name)}
        known |= {"spread": metrics.EnsembleVariance(**name)}
        known |= {"rmse_sqrt_before_time_avg": metrics.EnsembleMeanRMSESqrtBeforeTimeAvg(**name)}
    else:
        known = {"mse": metrics.MSE([metrics.WindVectorMSE(**wind)]), "mae": metrics.MAE()}
        known |= {"bias": metrics.Bias(), "acc": metrics.ACC(means)}
        roots = [metrics.WindVectorRMSESqrtBeforeTimeAvg(**wind)]
        known["rmse_sqrt_before_time_avg"] = metrics.RMSESqrtBeforeTimeAvg(roots)
    rows = []
    for score, metric in known.items():
        for region, boxes in REGIONS.items():  # as WeatherBench2 writes it in scripts/evaluate.py
            limits = [[slice(*limit) for limit in side] for side in (boxes.latitudes, boxes.longitudes)]
            area = areas.SliceRegion(lat_slice=limits[0], lon_slice=limits[1])
            theirs = metric.compute(matched, truth, area)
            theirs = theirs**0.5 if score == "spread" else theirs
            rows.append(row("WeatherBench2", score, ours.scores.sel(metric=score, region=region), theirs))
    # WeatherBench-X: all metrics and regions at once.
    names = ("metrics.deterministic", "metrics.probabilistic", "aggregation", "binning", "weighting")
    modules = [import_module(f"weatherbenchX.{name}") for name in names]
    deterministic, ensemble, aggregation, binning, weighting = modules
    if members:
        known = {"crps": ensemble.CRPSEnsemble()}
        known["unbiased_spread_skill_ratio"] = ensemble.UnbiasedSpreadSkillRatio()
    else:
        known = {"rmse": deterministic.RMSE(), "mae": deterministic.MAE(), "bias": deterministic.Bias()}
        known |= {"mse": deterministic.MSE(), "acc_ratio_of_means": deterministic.ACC(means)}
        known |= {"forecast_activity": deterministic.PredictionActivity(means)}
    boxes = {name: (REGIONS[name].latitudes[0], REGIONS[name].longitudes[0]) for name in BOXES}
    axes, weights = ["init_time", "latitude", "longitude"], weighting.GridAreaWeighting()
    aggregator = aggregation.Aggregator(axes, [binning.Regions(boxes)], [weights])
    single = aggregation.compute_metric_values_for_single_chunk
    theirs = single(known, aggregator, dict(matched), dict(truth))
    for score in known:
        variables = {f"{score}.{name}": name for name in matched.data_vars}
        chosen = theirs[list(variables)].rename(variables)
        rows.append(row("WeatherBench-X", score, ours.scores.sel(metric=score, region=BOXES), chosen))
    # Energy by latitude.
    derived = import_module("weatherbench2.derived_variables")
    for name in () if members else ("geopotential", "2m_temperature"):
        fields = forecast[[name]].sel(prediction_timedelta=[np.timedelta64(24, "h")])
        theirs = derived.ZonalEnergySpectrum(name).compute(fields)
        mean = theirs.mean("time").rename(prediction_timedelta="lead_time").isel(latitude=slice(1, -1))
        assert ours.spectra is not None
        own = ours.spectra[name].sel(source="forecast", latitude=mean.latitude)
        rows.append(apart("zonal energy spectrum", own, mean.transpose(*own.dims)))
    return rows


def row(tool: str, score: str, ours: xr.Dataset, theirs: xr.Dataset) -> dict:
    """Return the largest difference, over the value; both must be undefined for the same empty regions."""
    differences = []
    for name in theirs.data_vars:
        a, b = xr.align(ours[name], theirs[name], join="exact", exclude=["time"])
        b = b.transpose(*a.dims)
        assert (np.isnan(a.values) == np.isnan(b.values)).all(), (tool, score, name)
        size = np.maximum(np.abs(b.values), 1e-3 * np.nanmax(np.abs(b.values)))  # a bias may be near 0
        error = np.abs(a.values - b.values) / size
        differences.append(np.nanmax(error) if np.isfinite(b.values).any() else 0.0)
    return {"tool": tool, "score": score, "difference": float(max(differences))}


def apart(score: str, ours: Any, theirs: Any) -> dict:
    return {"tool": "WeatherBench2", "score": score, "difference": float(np.abs(ours / theirs - 1).max())}


def others(coords: dict[str, np.ndarray]) -> list[dict]:
    """Compare the climatology of four years, one a leap year, on a few cells; regridding to this grid."""
    utils, regridding = import_module("weatherbench2.utils"), import_module("weatherbench2.regridding")
    times = np.arange("2017-01-01", "2021-01-01", np.timedelta64(6, "h"), dtype="datetime64[ns]")
    rng = np.random.default_rng(0)
    values = rng.normal(280, 9, (len(times), 4, 8)).astype("f4")
    axes = {"time": times, **grid(4, 8, poles=False)}
    truth = xr.Dataset({"2m_temperature": (list(axes), values)}, axes)
    theirs = utils.compute_hourly_stat(truth.astype("f8"), 61, slice("2017", "2020"), 6)["2m_temperature"]
    with tempfile.TemporaryDirectory() as folder:
        archive = open_archive(write(truth, Path(folder) / "truth.zarr"))
        dates = np.arange(len(archive.times))
        compute_climatology(archive, ["2m_temperature"], dates, f"{folder}/climatology.zarr")
        ours = xr.open_zarr(f"{folder}/climatology.zarr")["2m_temperature"].load()
    rows = [apart("climatology (stored as float32)", ours, theirs.transpose(*ours.dims))]
    source, target = grid(73, 144, poles=True), coords
    fields = rng.normal(280, 9, (3, 73, 144))
    poles = bool(abs(target["latitude"][0]) == 90)
    make = lambda side, ends: regridding.Grid(  # noqa: E731
        longitudes=side["longitude"], latitudes=side["latitude"], periodic=True, includes_poles=ends
    )
    regridder = regridding.ConservativeRegridder(source=make(source, True), target=make(target, poles))
    wanted = np.asarray(regridder.regrid_array(fields.swapaxes(1, 2))).swapaxes(1, 2)
    north = [Grid(side["latitude"][::-1], side["longitude"]) for side in (source, target)]
    mine = Regridder(north[0], north[1])(torch.from_numpy(fields[:, ::-1].copy())).numpy()[:, ::-1]
    return [*rows, apart("conservative regridding", mine, wanted)]


def main() -> int:
    parse(__doc__)
    os.environ["JAX_ENABLE_X64"] = "1"  # WeatherBench2 regrids with jax, else in float32
    rows = []
    for coords in GRIDS:
        for members in (0, 5):
            with tempfile.TemporaryDirectory() as folder:
                rows += compare(coords, members, Path(folder))
        rows += others(coords)
    worst = pd.DataFrame(rows).groupby(["tool", "score"]).difference.agg(lambda of: of.max(skipna=False))
    record("weatherbench_parity", worst.reset_index().to_dict("records"))
    print(worst.to_string(float_format="%.1e"))
    bad = int((~(worst <= TOLERANCE)).sum())
    print(f"\n{len(worst)} scores, {bad} above {TOLERANCE:g}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
