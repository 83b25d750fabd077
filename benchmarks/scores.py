"""Scores against WeatherBench2, WeatherBench-X and plain xarray code: their values, their time and memory.

    .venv/bin/python benchmarks/scores.py speed [--dates 20] [--levels 13]
    PYTHONPATH=<checkout of weatherbench2>:<checkout of weatherbenchX>:<their requirements> \
        .venv/bin/python benchmarks/scores.py parity

speed: a random forecast of 5 variables on 13 levels, 240 x 121 cells, 40 leads, twice a day: 300 MB a date,
written once to a temporary folder. MSE, MAE, bias and ACC for the globe alone and for WeatherBench2's 13
regions; against xarray code with its formulas on a quarter of the dates, each in a process of its own. Ends
with 1 when scores differ, come less than 5 times as fast, or memory grows with the dates.

parity: random fields, on a grid with poles and on one without; a row a score and tool with the largest
relative difference. Ends with 1 when one is above 1e-6.
"""

import argparse
import multiprocessing as mp
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import xarray as xr
from dask import array as dask

from benchmarks.results_file import parse, record, require, table
from datasets.archive import open_archive
from datasets.grid import Grid
from datasets.regrid import Regridder
from tests.forecasts import analyses, climatology, forecasts, grid, write
from verification.climatology import compute_climatology, open_climatology
from verification.details import mean_over_latitudes
from verification.evaluation import Evaluation, evaluate
from verification.forecast_layouts import open_forecast
from verification.scores import REGIONS

NAMES = ("geopotential", "temperature", "u_component_of_wind", "v_component_of_wind", "specific_humidity")
LEVELS = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
PLACES = {"latitude": np.linspace(90, -90, 121), "longitude": np.arange(240) * 1.5}
HOUR, START = np.timedelta64(3600, "s").astype("m8[ns]"), np.datetime64("2020-01-01", "ns")
LEADS = 6 * HOUR * np.arange(1, 41)
METRICS = ("mse", "mae", "bias", "acc")
LEAST_SPEEDUP, MOST_GROWTH = 5.0, 1.1  # growth of memory from a quarter of the dates to all of them


def main() -> int:
    commands = {"speed": measure_speed, "parity": compare_with_tools}
    options = parse(__doc__, commands, dates=20, levels=len(LEVELS))
    return commands[options.command](options)


def measure_speed(options: argparse.Namespace) -> int:
    dates, rows = options.dates, []
    require(dates, 4, "dates, of which a quarter is compared")
    require(options.levels, 1, "levels")
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder, dates, LEVELS[-options.levels :])
        for regions in (["global"], list(REGIONS)):
            (ours, own), (theirs, other) = (
                measure(code, folder, dates // 4, regions) for code in (with_rossby, with_xarray)
            )
            own["speedup"] = other["seconds"] / own["seconds"]
            own["cpu_speedup"] = other["cpu_seconds"] / own["cpu_seconds"]
            own["difference"] = difference(ours, theirs)
            rows += [own, other]
        for more in (dates // 2, dates):
            rows.append(measure(with_rossby, folder, more, list(REGIONS))[1])
    record("verification_speed", rows, ("xarray", "zarr"))
    growth = rows[-1]["peak_mib"] / rows[2]["peak_mib"]
    columns = {"code": "<10", "dates": ">6", "regions": ">9", "seconds": ">10.1f", "cpu_seconds": ">13.1f"}
    columns |= {"load": ">6.1f", "peak_mib": ">10.0f", "speedup": ">9.1f", "cpu_speedup": ">13.1f"}
    print(table(rows, **columns, difference=">12.1e"))
    print(f"\nmemory from {dates // 4} to {dates} dates: x {growth:.2f}")
    compared = [row for row in rows if "speedup" in row]
    fast = all(row["speedup"] >= LEAST_SPEEDUP and row["difference"] < 1e-4 for row in compared)
    return 0 if fast and growth <= MOST_GROWTH else 1


def write_data(folder: str, dates: int, levels: tuple[int, ...]) -> None:
    """Write forecast, truth and the needed days of the climatology, float32, all levels in a chunk.

    Not compressed: it is arithmetic that is measured, not the codec.
    """
    random, places = dask.random.default_rng(0), {"level": np.asarray(levels)} | PLACES
    times = START + 12 * HOUR * np.arange(dates)
    last, days = times[-1] + LEADS[-1], {"hour": np.arange(0, 24, 6), "dayofyear": np.arange(1, 367)}
    stores = {"forecast": {"time": times, "prediction_timedelta": LEADS}, "climatology": days}
    stores["truth"] = {"time": np.arange(START, last + HOUR, 6 * HOUR)}
    for store, own in stores.items():
        coords = own | places
        shape = tuple(map(len, coords.values()))
        chunks: Any = (1,) * len(own) + shape[len(own) :]
        draw = lambda: random.normal(500, 90, shape, chunks=chunks).astype("f4")  # noqa: B023, E731
        ds = xr.Dataset({name: ([*coords], draw()) for name in NAMES}, coords)
        path = f"{folder}/{store}.zarr"
        encoding: Any = {name: {"compressors": None, "chunks": chunks} for name in NAMES}
        # Without a fill value: xarray would take 0 h for missing.
        encoding |= {name: {"_FillValue": None} for name in coords}
        ds.to_zarr(path, zarr_format=2, encoding=encoding, compute=store != "climatology")
        if store == "climatology":
            region = {"dayofyear": slice(0, int((last - START) / (24 * HOUR)) + 1)}
            needed = ds.isel(region).drop_vars([name for name in coords if name != "dayofyear"])
            needed.to_zarr(path, region=region)


def with_rossby(folder: str, dates: int, regions: list[str]) -> xr.Dataset:
    forecast, truth = open_forecast(f"{folder}/forecast.zarr"), open_archive(f"{folder}/truth.zarr")
    clim = open_climatology(f"{folder}/climatology.zarr")
    return evaluate(forecast, truth, clim, dates=forecast.times[:dates], regions=regions).scores[list(NAMES)]


def with_xarray(folder: str, dates: int, regions: list[str]) -> xr.Dataset:
    paths = [f"{folder}/{name}.zarr" for name in ("forecast", "truth", "climatology")]
    stores = [xr.open_zarr(path, chunks=None, decode_timedelta=True) for path in paths]
    forecasts, truths, climatology = (store[list(NAMES)].sortby("latitude") for store in stores)
    results = [one_date(forecasts.isel(time=[i]), truths, climatology, regions) for i in range(dates)]
    mean: Any = xr.concat(results, "time").mean("time")
    return mean.rename(prediction_timedelta="lead_time")


def one_date(
    forecast: xr.Dataset, truths: xr.Dataset, climatology: xr.Dataset, regions: list[str]
) -> xr.Dataset:
    valid = forecast.time + forecast.prediction_timedelta
    forecast, truth = forecast.load(), truths.sel(time=valid).load().drop_vars("time")
    clim = climatology.sel(dayofyear=valid.dt.dayofyear, hour=valid.dt.hour).load()
    error, ours, theirs = forecast - truth, forecast - clim, truth - clim
    products = [error**2, abs(error), error, ours * theirs, ours**2, theirs**2]
    found = []
    for region in regions:
        mse, mae, bias, both, first, second = (area_mean(each, region) for each in products)
        scores = xr.concat([mse, mae, bias, both / np.sqrt(first * second)], "metric")
        found.append(scores.assign_coords(metric=list(METRICS)))
    by_region: Any = xr.concat(found, xr.DataArray(regions, dims="region", name="region"))
    return by_region


def area_mean(fields: xr.Dataset, region: str) -> xr.Dataset:
    """WeatherBench2's _spatial_average with its SliceRegion."""
    middles = (fields.latitude[1:] + fields.latitude[:-1].values) / 2
    bounds = np.deg2rad(np.concatenate([[-90], middles, [90]]))
    weights = fields.latitude.copy(data=np.diff(np.sin(bounds)))
    where = {"latitude": REGIONS[region].latitudes, "longitude": REGIONS[region].longitudes}
    for axis, limits in where.items():
        parts = [fields[axis].sel({axis: slice(*limit)}) for limit in limits]
        fields = fields.sel({axis: xr.concat(parts, axis)})
    weighted = fields.weighted(weights.sel(latitude=fields.latitude))
    return weighted.mean(["latitude", "longitude"], skipna=False)


def measure(code: Callable, folder: str, dates: int, regions: list[str]) -> tuple[xr.Dataset, dict]:
    """Return the scores, and a row with seconds (of the clock, and of all processors) and peak memory."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as process:
        values, cost = process.submit(run, code, folder, dates, regions).result()
    name = code.__name__.removeprefix("with_")
    head = {"code": name, "dates": dates, "regions": len(regions), "load": os.getloadavg()[0]}
    return values, head | cost


def run(code: Callable, folder: str, dates: int, regions: list[str]) -> tuple[xr.Dataset, dict]:
    started, worked = time.perf_counter(), time.process_time()
    values = code(folder, dates, regions)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    return values.load(), {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak / 1024}


def difference(ours: xr.Dataset, theirs: xr.Dataset) -> float:
    pair = (each.sel(metric=list(METRICS)).to_array() for each in (ours, theirs))
    a, b = (each.transpose("metric", "region", "lead_time", ...) for each in pair)
    b = b.sel(level=a.level).transpose(*a.dims)
    over = [dim for dim in a.dims if dim != "metric"]
    return float((abs(a - b.values).max(over) / abs(a).max(over)).max())


TOLERANCE = 1e-6
GRIDS = (grid(37, 72, poles=True), grid(32, 64, poles=False))
LEAD_HOURS = [6, 24, 72]
BOXES = [name for name, region in REGIONS.items() if len(region.latitudes) * len(region.longitudes) == 1]


def compare_with_tools(_: argparse.Namespace) -> int:
    os.environ["JAX_ENABLE_X64"] = "1"  # WeatherBench2 regrids with jax, else in float32
    rows = []
    for coords in GRIDS:
        for members in (0, 5):
            with tempfile.TemporaryDirectory() as folder:
                rows += compare(coords, members, Path(folder))
        rows += others(coords)
    worst: dict[tuple[str, str], float] = {}
    for each in rows:
        key = each["tool"], each["score"]
        worst[key] = max(worst.get(key, 0.0), each["difference"])
    found = [
        {"tool": tool, "score": score, "difference": worst[tool, score]} for tool, score in sorted(worst)
    ]
    record("weatherbench_parity", found)
    print(table(found, tool="<16", score="<32", difference=">12.1e"))
    bad = [key for key, difference in worst.items() if not difference <= TOLERANCE]
    print(f"\n{len(worst)} scores, {len(bad)} above {TOLERANCE:g}")
    return 1 if bad else 0


def compare(coords: dict[str, np.ndarray], members: int, folder: Path) -> list[dict]:
    """Compare all scores of one set of forecasts with those of both tools."""
    truth = analyses(coords, 26)
    forecast, means = forecasts(truth, 6, LEAD_HOURS, members), climatology(truth)
    opened = open_forecast(write(forecast, folder / "forecast.zarr"))
    archive = open_archive(write(truth, folder / "truth.zarr"))
    clim = open_climatology(write(means, folder / "climatology.zarr"))
    ours = evaluate(opened, archive, clim, regions=list(REGIONS), detailed_hours=[24])
    wide = [dataset.astype("f8") for dataset in (forecast, truth, means)]
    rows = weatherbench2_scores(ours, wide[0], wide[1], wide[2], members)
    rows += weatherbench_x_scores(ours, wide[0], wide[1], wide[2], members)
    return rows + ([] if members else spectra(ours, wide[0]))


def matched(forecast: xr.Dataset, truth: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Both with dimensions init_time and lead_time and coordinate valid_time, as both tools want them."""
    forecast = forecast.rename(time="init_time", prediction_timedelta="lead_time")
    valid = (forecast.init_time + forecast.lead_time).rename("valid_time")
    forecast = forecast.assign_coords(valid_time=valid)
    return forecast, truth.sel(time=valid).drop_vars("time")


def weatherbench2_scores(
    ours: Evaluation, forecast: xr.Dataset, truth: xr.Dataset, means: xr.Dataset, members: int
) -> list[dict]:
    metrics, regions = import_module("weatherbench2.metrics"), import_module("weatherbench2.regions")
    forecast, truth = matched(forecast, truth)
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
        for region in REGIONS:
            found = REGIONS[region]  # as WeatherBench2 writes it in scripts/evaluate.py
            limits = [[slice(*each) for each in side] for side in (found.latitudes, found.longitudes)]
            box = regions.SliceRegion(lat_slice=limits[0], lon_slice=limits[1])
            theirs = metric.compute(forecast, truth, box)
            theirs = theirs**0.5 if score == "spread" else theirs
            rows.append(row("WeatherBench2", score, ours.scores.sel(metric=score, region=region), theirs))
    return rows


def weatherbench_x_scores(
    ours: Evaluation, forecast: xr.Dataset, truth: xr.Dataset, means: xr.Dataset, members: int
) -> list[dict]:
    names = ("metrics.deterministic", "metrics.probabilistic", "aggregation", "binning", "weighting")
    deterministic, ensemble, aggregation, binning, weighting = (
        import_module(f"weatherbenchX.{n}") for n in names
    )
    forecast, truth = matched(forecast, truth)
    if members:
        known = {"crps": ensemble.CRPSEnsemble()}
        known["unbiased_spread_skill_ratio"] = ensemble.UnbiasedSpreadSkillRatio()
    else:
        known = {"rmse": deterministic.RMSE(), "mae": deterministic.MAE(), "bias": deterministic.Bias()}
        known |= {"mse": deterministic.MSE(), "acc_ratio_of_means": deterministic.ACC(means)}
        known |= {"forecast_activity": deterministic.PredictionActivity(means)}
    boxes = {name: (REGIONS[name].latitudes[0], REGIONS[name].longitudes[0]) for name in BOXES}
    axes, area = ["init_time", "latitude", "longitude"], weighting.GridAreaWeighting()
    aggregator = aggregation.Aggregator(axes, [binning.Regions(boxes)], [area])
    single = aggregation.compute_metric_values_for_single_chunk
    theirs = single(known, aggregator, dict(forecast), dict(truth))
    rows = []
    for score in known:
        names = {f"{score}.{name}": name for name in forecast.data_vars}
        chosen = theirs[list(names)].rename(names)
        rows.append(row("WeatherBench-X", score, ours.scores.sel(metric=score, region=BOXES), chosen))
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


def spectra(ours: Evaluation, forecast: xr.Dataset) -> list[dict]:
    """Energy by latitude, and interpolated to common frequencies and averaged from 30 to 60 degrees north."""
    derived = import_module("weatherbench2.derived_variables")
    assert ours.spectra is not None
    rows = []
    for name in ("geopotential", "2m_temperature"):
        fields = forecast[[name]].sel(prediction_timedelta=[np.timedelta64(24, "h")])
        theirs = derived.ZonalEnergySpectrum(name).compute(fields)
        mean = theirs.mean("time").rename(prediction_timedelta="lead_time").isel(latitude=slice(1, -1))
        own = ours.spectra[name].sel(source="forecast", latitude=mean.latitude)
        rows.append(apart("zonal energy spectrum", own, mean.transpose(*own.dims)))
        band = mean.sel(latitude=slice(30, 60))
        common = derived.interpolate_spectral_frequencies(band, "zonal_wavenumber").mean("latitude")
        ours_band = mean_over_latitudes(ours.spectra[name].sel(source="forecast"), [(30, 60)])
        wanted = common.transpose(*ours_band.dims).values
        rows.append(apart("spectrum, 30 to 60 degrees", ours_band.values, wanted))
    return rows


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


if __name__ == "__main__":
    sys.exit(main())
