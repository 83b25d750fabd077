"""Small analyses, forecasts and climatologies for the tests and benchmarks of scores."""

from pathlib import Path

import numpy as np
import xarray as xr

UPPER = ("geopotential", "u_component_of_wind", "v_component_of_wind")
SURFACE = ("2m_temperature",)
LEVELS = [500, 850]
START = np.datetime64("2019-12-25", "ns")
HOURS = np.timedelta64(1, "h").astype("timedelta64[ns]")


def grid(num_latitudes: int, num_longitudes: int, poles: bool) -> dict[str, np.ndarray]:
    """Coordinates as WeatherBench2's equiangular grids have them, south to north."""
    edges = np.linspace(-90, 90, num_latitudes + 1)
    latitude = np.linspace(-90, 90, num_latitudes) if poles else (edges[1:] + edges[:-1]) / 2
    return {"latitude": latitude, "longitude": np.arange(num_longitudes) * 360 / num_longitudes}


def analyses(coords: dict[str, np.ndarray], num_times: int, seed: int = 0) -> xr.Dataset:
    """6-hourly analyses (time[, level], latitude, longitude) float32, of size and mean like weather's."""
    rng, shape = np.random.default_rng(seed), (len(coords["latitude"]), len(coords["longitude"]))
    axes = {"time": START + 6 * HOURS * np.arange(num_times), "level": LEVELS, **coords}
    upper = {n: (list(axes), rng.normal(500, 90, (num_times, 2, *shape)).astype("f4")) for n in UPPER}
    dims = ["time", "latitude", "longitude"]
    lower = {n: (dims, rng.normal(280, 9, (num_times, *shape)).astype("f4")) for n in SURFACE}
    return xr.Dataset(upper | lower, axes)


def forecasts(
    truth: xr.Dataset, num_dates: int, lead_hours: list[int], members: int = 0, seed: int = 1
) -> xr.Dataset:
    """Twice a day the truth plus errors that grow: (time, prediction_timedelta[, number][, level], ...)"""
    rng, times = np.random.default_rng(seed), truth.time.values[: 2 * num_dates : 2]
    leads = np.asarray(lead_hours) * HOURS
    valid = xr.DataArray(times[:, None] + leads, dims=("time", "prediction_timedelta"))
    found = truth.rename(time="valid").sel(valid=valid).drop_vars("valid")
    if members:
        found = found.expand_dims(number=np.arange(members), axis=2)
    noisy = {}
    for name, field in found.items():
        dims = ["time", "prediction_timedelta", *["number"] * bool(members)]
        field = field.transpose(*dims, ...)
        size = 0.1 * float(truth[name].std()) * np.sqrt(1 + np.arange(len(leads)))
        size = size.reshape(1, -1, *[1] * (field.ndim - 2))
        noise = size * rng.normal(0.3, 1, field.shape)
        noisy[name] = (field.dims, (field.values + noise).astype("f4"))
    coords = {dim: truth[dim] for dim in ("level", "latitude", "longitude")}
    coords |= {"number": np.arange(members)} if members else {}
    return xr.Dataset(noisy, {"time": times, "prediction_timedelta": leads, **coords})


def climatology(truth: xr.Dataset, seed: int = 2) -> xr.Dataset:
    """(hour, dayofyear[, level], latitude, longitude) float32 near the mean of the truth."""
    rng, found = np.random.default_rng(seed), {}
    for name, field in truth.items():
        shape = (4, 366, *field.shape[1:])
        values = rng.normal(float(field.mean()), 0.3 * float(field.std()), shape).astype("f4")
        found[name] = (("hour", "dayofyear", *field.dims[1:]), values)
    coords = {dim: truth[dim] for dim in ("level", "latitude", "longitude")}
    return xr.Dataset(found, {"hour": [0, 6, 12, 18], "dayofyear": np.arange(1, 367), **coords})


def write(dataset: xr.Dataset, path: Path) -> str:
    dataset.to_zarr(path, zarr_format=2, consolidated=True)
    return str(path)
