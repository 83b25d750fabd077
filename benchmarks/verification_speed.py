"""Time and memory of scores, against plain xarray code that follows WeatherBench2's formulas.

    .venv/bin/python benchmarks/verification_speed.py [number of dates, 20 if not given] [--levels 13]

A synthetic forecast of 5 variables on 13 levels, 240 x 121 cells, 40 leads, twice a day: 300 MB a date,
written once to a temporary folder (6 GB for 20 dates). MSE, MAE, bias and ACC for the globe alone and for
WeatherBench2's 13 regions; beside xarray on a quarter of the dates. Every measurement in a process of its
own. Ends with 1 when the scores differ, ours come less than 5 times as fast, or memory grows with the number
of dates.
"""

import multiprocessing as mp
import os
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
import zarr

from benchmarks.results_file import parser_of, record, require
from command_line import text_table
from datasets.archive import open_archive
from verification.climatology import open_climatology
from verification.evaluation import evaluate
from verification.forecast_layouts import open_forecast
from verification.scores import REGIONS

NAMES = ("geopotential", "temperature", "u_component_of_wind", "v_component_of_wind", "specific_humidity")
LEVELS = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
LATITUDE, LONGITUDE = np.linspace(90, -90, 121), np.arange(240) * 1.5
LEADS, START = 6 * np.arange(1, 41), np.datetime64("2020-01-01", "h")
METRICS = ("mse", "mae", "bias", "acc")
LEAST_SPEEDUP, MOST_GROWTH = 5.0, 1.1  # growth of memory from a quarter of the dates to all of them


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("dates", nargs="?", type=int, default=20)
    parser.add_argument("--levels", type=int, default=len(LEVELS))
    options = parser.parse_args()
    dates, rows = options.dates, []
    require(dates, 4, "dates, of which a quarter is compared")
    require(options.levels, 1, "levels")
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder, dates, LEVELS[-options.levels :])
        for regions in (["global"], list(REGIONS)):
            rows += side_by_side(folder, dates // 4, regions)
        for more in (dates // 2, dates):
            rows.append(measure(with_rossby, folder, more, list(REGIONS))[1])
    record("verification_speed", rows, ("xarray", "zarr"))
    growth = rows[-1]["peak_mib"] / rows[2]["peak_mib"]
    print(f"{table(rows)}\n\nmemory from {dates // 4} to {dates} dates: x {growth:.2f}")
    compared = [row for row in rows if "speedup" in row]
    fast = all(row["speedup"] >= LEAST_SPEEDUP and row["difference"] < 1e-4 for row in compared)
    return 0 if fast and growth <= MOST_GROWTH else 1


def side_by_side(folder: str, dates: int, regions: list[str]) -> list[dict]:
    """Both codes on the same dates; xarray's time is proportional to them."""
    (ours, row), (theirs, other) = (
        measure(code, folder, dates, regions) for code in (with_rossby, with_xarray)
    )
    row["speedup"] = other["seconds"] / row["seconds"]
    row["cpu_speedup"] = other["cpu_seconds"] / row["cpu_seconds"]
    row["difference"] = difference(ours, theirs)
    return [row, other]


# -- data


def write_data(folder: str, dates: int, levels: tuple[int, ...]) -> None:
    """Write forecast, truth and the needed days of the climatology, float32, all levels in a chunk."""
    hours, shape = 12 * np.arange(dates), (len(levels), len(LATITUDE), len(LONGITUDE))
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(len(NAMES), 7, *shape)).astype("f4")

    def field(name: int, seed: int, size: float) -> np.ndarray:
        return size * np.roll(noise[name, seed % 7], seed, axis=-1)

    valid = np.unique(hours[:, None] + LEADS)
    axes = {"time": hours, "prediction_timedelta": LEADS, "level": np.asarray(levels)}
    axes |= {"latitude": LATITUDE, "longitude": LONGITUDE}
    stores = {"forecast": axes, "truth": {**axes, "time": valid}, "climatology": {**axes}}
    del stores["truth"]["prediction_timedelta"]
    clim = {"hour": np.arange(0, 24, 6), "dayofyear": np.arange(1, 367)}
    stores["climatology"] = clim | {axis: axes[axis] for axis in ("level", "latitude", "longitude")}
    for store, coords in stores.items():
        group = create(f"{folder}/{store}.zarr", coords)
        for n, name in enumerate(NAMES):
            if store == "forecast":
                for i, j in np.ndindex(dates, len(LEADS)):
                    t = int(hours[i] + LEADS[j])
                    group[name][i, j] = 500 + field(n, t, 90) + field(n, t + i + 3 * j + 1, 10)
            elif store == "truth":
                for i, t in enumerate(valid):
                    group[name][i] = 500 + field(n, int(t), 90)
            else:
                for t in valid:
                    group[name][t % 24 // 6, t // 24] = 500 + field(n, int(t) + 5, 20)


def create(path: str, coords: dict[str, np.ndarray]) -> Any:
    """Create a Zarr 2 store, not compressed: it is arithmetic that is measured, not the codec."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    units = {"time": f"hours since {START}:00:00", "prediction_timedelta": "hours"}
    for axis, values in coords.items():
        attributes: dict[str, Any] = {"_ARRAY_DIMENSIONS": [axis]}
        attributes |= {"units": units[axis]} if axis in units else {}
        # Without a fill value: xarray would take 0 h for missing.
        about: dict[str, Any] = {"shape": values.shape, "dtype": values.dtype, "attributes": attributes}
        group.create_array(axis, fill_value=None, **about)[:] = values
    shape = tuple(map(len, coords.values()))
    about = {"shape": shape, "chunks": (1,) * (len(shape) - 3) + shape[-3:], "dtype": "f4"}
    about |= {"compressors": None, "fill_value": np.nan, "attributes": {"_ARRAY_DIMENSIONS": list(coords)}}
    for name in NAMES:
        group.create_array(name, **about)
    zarr.consolidate_metadata(path, zarr_format=2)
    return group


# -- both codes


def with_rossby(folder: str, dates: int, regions: list[str]) -> xr.Dataset:
    forecast, truth = open_forecast(f"{folder}/forecast.zarr"), open_archive(f"{folder}/truth.zarr")
    clim = open_climatology(f"{folder}/climatology.zarr")
    return evaluate(forecast, truth, clim, dates=forecast.times[:dates], regions=regions).scores[list(NAMES)]


def with_xarray(folder: str, dates: int, regions: list[str]) -> xr.Dataset:
    """A date at a time, each product of a date once for all regions."""
    stores = [xr.open_zarr(f"{folder}/{name}.zarr", chunks=None, decode_timedelta=True) for name in STORES]
    forecasts, truths, climatology = (store[list(NAMES)].sortby("latitude") for store in stores)
    results = [one_date(forecasts.isel(time=[i]), truths, climatology, regions) for i in range(dates)]
    mean: Any = xr.concat(results, "time").mean("time")
    return mean.rename(prediction_timedelta="lead_time")


STORES = ("forecast", "truth", "climatology")


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
    bounds = np.deg2rad(
        np.concatenate([[-90], (fields.latitude[1:] + fields.latitude[:-1].values) / 2, [90]])
    )
    weights = fields.latitude.copy(data=np.diff(np.sin(bounds)))
    where = {"latitude": REGIONS[region].latitudes, "longitude": REGIONS[region].longitudes}
    for axis, limits in where.items():
        parts = [fields[axis].sel({axis: slice(*limit)}) for limit in limits]
        fields = fields.sel({axis: xr.concat(parts, axis)})
    return fields.weighted(weights.sel(latitude=fields.latitude)).mean(
        ["latitude", "longitude"], skipna=False
    )


# -- measurements


def measure(code: Callable, folder: str, dates: int, regions: list[str]) -> tuple[xr.Dataset, dict]:
    """What a code gives, and a row with its seconds (of the clock, and of all processors together) and the
    peak of its process's memory in MiB.
    """
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as process:
        values, cost = process.submit(run, code, folder, dates, regions).result()
    name = code.__name__.removeprefix("with_")
    head = {"code": name, "dates": dates, "regions": len(regions), "load": os.getloadavg()[0]}
    return values, head | cost


def run(code: Callable, folder: str, dates: int, regions: list[str]) -> tuple[xr.Dataset, dict]:
    started, worked = time.perf_counter(), time.process_time()
    values = code(folder, dates, regions)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
    status = Path("/proc/self/status").read_text()
    peak = next(int(text.split()[1]) for text in status.splitlines() if text.startswith("VmHWM"))
    return values.load(), {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak / 1024}


def difference(ours: xr.Dataset, theirs: xr.Dataset) -> float:
    """The largest one, over the largest value of a metric; xarray's products are float32."""
    a, b = (
        d.sel(metric=list(METRICS)).to_array().transpose("metric", "region", "lead_time", ...)
        for d in (ours, theirs)
    )
    b = b.sel(level=a.level).transpose(*a.dims)
    over = [dim for dim in a.dims if dim != "metric"]
    return float((abs(a - b.values).max(over) / abs(a).max(over)).max())


def table(rows: list[dict]) -> str:
    columns = ("code", "dates", "regions", "seconds", "cpu_seconds", "load", "peak_mib")
    compared = ("speedup", "cpu_speedup", "difference")
    lines = [[row.get(name) for name in (*columns, *compared)] for row in rows]
    head = (
        "code",
        "dates",
        "regions",
        "seconds",
        "cpu s",
        "load",
        "peak MiB",
        "speedup",
        "of cpu",
        "difference",
    )
    return text_table("<10 >6 >9 >10.1f >9.1f >6.1f >10.0f >9.1f >8.1f >12.1e", [head, *lines])


if __name__ == "__main__":
    sys.exit(main())
