"""Time and memory of scores, against plain xarray code that follows WeatherBench2's formulas.

    .venv/bin/python benchmarks/verification_speed.py [--dates 20] [--levels 13]

A random forecast of 5 variables on 13 levels, 240 x 121 cells, 40 leads, twice a day: 300 MB a date, written
once to a temporary folder. MSE, MAE, bias and ACC for the globe alone and for WeatherBench2's 13 regions;
against xarray code on a quarter of the dates, each in a process of its own. Ends with 1 when scores differ,
come less than 5 times as fast, or memory grows with the dates.
"""

import multiprocessing as mp
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import xarray as xr
from dask import array as dask

from benchmarks.results_file import parse, record, require, table
from datasets.archive import open_archive
from verification.climatology import open_climatology
from verification.scores import REGIONS
from verification.scores_by_date import evaluate
from verification.stores import open_forecast

NAMES = ("geopotential", "temperature", "u_component_of_wind", "v_component_of_wind", "specific_humidity")
LEVELS = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
PLACES = {"latitude": np.linspace(90, -90, 121), "longitude": np.arange(240) * 1.5}
HOUR, START = np.timedelta64(3600, "s").astype("m8[ns]"), np.datetime64("2020-01-01", "ns")
LEADS = 6 * HOUR * np.arange(1, 41)
METRICS = ("mse", "mae", "bias", "acc")
LEAST_SPEEDUP, MOST_GROWTH = 5.0, 1.1  # growth of memory from a quarter of the dates to all of them


def write_data(folder: str, dates: int, levels: tuple[int, ...]) -> None:
    """Write forecast, truth and the needed days of the climatology, float32, all levels in a chunk.

    Not compressed: it is arithmetic that is measured, not the codec.
    """
    random, places = dask.random.default_rng(0), {"level": np.asarray(levels)} | PLACES
    times = START + 12 * HOUR * np.arange(dates)
    last = times[-1] + LEADS[-1]
    stores = {"forecast": {"time": times, "prediction_timedelta": LEADS}}
    stores["truth"] = {"time": np.arange(START, last + HOUR, 6 * HOUR)}
    days = np.arange(1, int((last - START) / (24 * HOUR)) + 2)
    stores["climatology"] = {"hour": np.arange(0, 24, 6), "dayofyear": days}
    for store, own in stores.items():
        coords = own | places
        shape = tuple(map(len, coords.values()))
        chunks: Any = (1,) * len(own) + shape[len(own) :]
        draw = lambda: random.normal(500, 90, shape, chunks=chunks).astype("f4")  # noqa: B023, E731
        ds = xr.Dataset({name: ([*coords], draw()) for name in NAMES}, coords)
        encoding: Any = {name: {"compressors": None, "chunks": chunks} for name in NAMES}
        # Without a fill value: xarray would take 0 h for missing.
        encoding |= {name: {"_FillValue": None} for name in coords}
        ds.to_zarr(f"{folder}/{store}.zarr", zarr_format=2, encoding=encoding)


def with_rossby(folder: str, dates: int, regions: list[str]) -> xr.Dataset:
    forecast, truth = open_forecast(f"{folder}/forecast.zarr"), open_archive(f"{folder}/truth.zarr")
    clim = open_climatology(f"{folder}/climatology.zarr")
    found = evaluate({"f": forecast}, truth, clim, dates=forecast.times[:dates], regions=regions)
    return found.scores.isel(forecast=0)[list(NAMES)]


def with_xarray(folder: str, dates: int, regions: list[str]) -> xr.Dataset:
    """WeatherBench2's formulas, a date at a time."""
    paths = [f"{folder}/{name}.zarr" for name in ("forecast", "truth", "climatology")]
    stores = [xr.open_zarr(path, chunks=None, decode_timedelta=True) for path in paths]
    forecasts, truths, climatology = (store[list(NAMES)].sortby("latitude") for store in stores)
    by_date = []
    for i in range(dates):
        forecast = forecasts.isel(time=[i]).load()
        valid = forecast.time + forecast.prediction_timedelta
        truth = truths.sel(time=valid).load().drop_vars("time")
        clim = climatology.sel(dayofyear=valid.dt.dayofyear, hour=valid.dt.hour).load()
        error, ours, theirs = forecast - truth, forecast - clim, truth - clim
        products = [error**2, abs(error), error, ours * theirs, ours**2, theirs**2]
        by_region = []
        for region in regions:
            mse, mae, bias, both, first, second = (area_mean(fields, region) for fields in products)
            scores = xr.concat([mse, mae, bias, both / np.sqrt(first * second)], "metric")
            by_region.append(scores.assign_coords(metric=list(METRICS)))
        by_date.append(xr.concat(by_region, xr.DataArray(regions, dims="region", name="region")))
    mean: Any = xr.concat(by_date, "time").mean("time")
    return mean.rename(prediction_timedelta="lead_time")


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
        return process.submit(run, code, folder, dates, regions).result()


def run(code: Callable, folder: str, dates: int, regions: list[str]) -> tuple[xr.Dataset, dict]:
    started, worked = time.perf_counter(), time.process_time()
    values = code(folder, dates, regions)
    row = {"code": code.__name__.removeprefix("with_"), "dates": dates, "regions": len(regions)}
    row |= {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - worked}
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])
    return values.load(), row | {"peak_mib": peak / 1024}


def main() -> int:
    options, rows = parse(__doc__, dates=20, levels=len(LEVELS)), []
    dates = options.dates
    require(dates, 4, "dates, of which a quarter is compared")
    require(options.levels, 1, "levels")
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder, dates, LEVELS[-options.levels :])
        for regions in (["global"], list(REGIONS)):
            ours, own = measure(with_rossby, folder, dates // 4, regions)
            theirs, other = measure(with_xarray, folder, dates // 4, regions)
            own["speedup"] = other["seconds"] / own["seconds"]
            own["cpu_speedup"] = other["cpu_seconds"] / own["cpu_seconds"]
            pair = (scores.sel(metric=list(METRICS)).to_array() for scores in (ours, theirs))
            a, b = (array.transpose("metric", "region", "lead_time", ...) for array in pair)
            b = b.sel(level=a.level).transpose(*a.dims)
            over = [dim for dim in a.dims if dim != "metric"]
            own["difference"] = float((abs(a - b.values).max(over) / abs(a).max(over)).max())
            rows += [own, other]
        for more in (dates // 2, dates):
            rows.append(measure(with_rossby, folder, more, list(REGIONS))[1])
    record("verification_speed", rows, ("xarray", "zarr"))
    growth = rows[-1]["peak_mib"] / rows[2]["peak_mib"]
    columns = ("code", "dates", "regions", "seconds", "cpu_seconds", "peak_mib", "speedup", "cpu_speedup")
    print(table(rows, *columns, "difference"))
    print(f"\nmemory from {dates // 4} to {dates} dates: x {growth:.2f}")
    compared = [row for row in rows if "speedup" in row]
    fast = all(row["speedup"] >= LEAST_SPEEDUP and row["difference"] < 1e-4 for row in compared)
    return 0 if fast and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
