"""train_configs/era5_64x32.toml unchanged, on a store of the same metadata behind a real S3 server."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from numcodecs import Blosc

from datasets.selection import open_selection
from tests.planned import run_train
from tests.s3_server import S3Server
from tests.started_jobs import ROOT
from training.config_checks import load_checked

CONFIG = ROOT / "train_configs/era5_64x32.toml"
LEVELS = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
UPPER = {
    "geopotential": ("Geopotential", "m**2 s**-2", 5e4, 2e3),
    "temperature": ("Temperature", "K", 250.0, 9.0),
    "u_component_of_wind": ("U component of wind", "m s**-1", 0.0, 12.0),
    "v_component_of_wind": ("V component of wind", "m s**-1", 0.0, 12.0),
}
SURFACE = {
    "2m_temperature": ("2 metre temperature", "K", 285.0, 12.0),
    "mean_sea_level_pressure": ("Mean sea level pressure", "Pa", 101_000.0, 900.0),
    "10m_u_component_of_wind": ("10 metre U wind component", "m s**-1", 0.0, 6.0),
    "10m_v_component_of_wind": ("10 metre V wind component", "m s**-1", 0.0, 6.0),
}
STATIC = {
    "geopotential_at_surface": ("Geopotential", "m**2 s**-2", 3e3, 3e3),
    "land_sea_mask": ("Land-sea mask", "(0 - 1)", 0.5, 0.4),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Random fields with dims, chunks, types and attributes of WeatherBench2's store, of the last three weeks
    of 2017 and the first of 2018. The configuration's periods are there.
    """
    time = np.datetime64("2017-12-11", "ns") + np.arange(112) * np.timedelta64(6, "h")
    coords = {"time": time, "level": LEVELS, "longitude": np.arange(64) * 5.625}
    dataset, rng = (
        xr.Dataset(coords=coords | {"latitude": -87.1875 + np.arange(32) * 5.625}),
        np.random.default_rng(0),
    )
    encoding: dict[str, Any] = {"time": {"units": "hours since 1959-01-01", "dtype": "int64"}}
    for name, (long_name, units, mean, spread) in (UPPER | SURFACE | STATIC).items():
        dims = [dim for dim in dataset.sizes if dim not in ("time", "level")]
        dims = (["time", "level"] if name in UPPER else ["time"] if name in SURFACE else []) + dims
        field = mean + spread * rng.standard_normal([dataset.sizes[dim] for dim in dims], "f4")
        dataset[name] = dims, field, {"long_name": long_name, "units": units, "short_name": name}
        chunks = tuple(min(100, size) if dim == "time" else size for dim, size in dataset[name].sizes.items())
        encoding[name] = {"chunks": chunks, "compressors": Blosc("lz4", 5, Blosc.SHUFFLE)}
    path = tmp_path_factory.mktemp("era5") / "64x32.zarr"
    dataset.to_zarr(path, zarr_format=2, consolidated=True, encoding=encoding)
    return path


def test_the_configuration_trains_and_validates(store, tmp_path):
    with S3Server({"weatherbench2/64x32.zarr": store}, latency=0.01, error_rate=0.02) as server:
        source = ["--data.path", "s3://weatherbench2/64x32.zarr", *server.arguments]
        source += ["--data.store_path", str(tmp_path / "store.zarr")]
        run = ["--job.config_file", str(CONFIG), "--job.dump_folder", str(tmp_path), "--training.steps", "2"]
        few = ["--validation.plots", "false", "--metrics.loggers=[]", "--metrics.log_freq", "1"]
        records = run_train(*run, *source, *few)
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    scores = {key: value for record in records for key, value in record.items() if key.startswith("val/")}
    assert math.isfinite(scores["val/rmse/geopotential:500@72h"]) and "val/rmse/2m_temperature" in scores


def test_its_data_are_those_of_the_store(store):
    """Grid, order of dims and levels are found out; north stands first."""
    config = load_checked(["--job.config_file", str(CONFIG), "--data.path", str(store)])
    selection = open_selection(config.data, config.model.patch_size, config.validation.lead_hours)
    assert selection.archive.grid.shape == (32, 64) and selection.archive.grid.latitude[0] > 87
    assert len(selection.variables) == 16 and len(selection.train) == 84 and len(selection.validation) == 28
