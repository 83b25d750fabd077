"""Data behind URLs: against a real S3 server (moto's) that is slow and fails; what goes wrong in one line."""

import json
import math
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from numcodecs import Blosc

from command_line import to_toml
from datasets import remote
from datasets.archive import open_archive
from datasets.options import parse_storage_options
from datasets.remote import Access
from datasets.selection import open_selection
from errors import ConfigError, DataError, without_secrets
from tests.planned import run_forecast, run_train
from tests.s3_server import S3Server
from tests.sample_archives import NAMES, analyses, values, weatherbench, zarr3
from tests.started_jobs import ROOT, run_options, write_config
from tests.test_damaged_data import store
from tests.test_forecast import write_archive
from training.config_checks import load_checked
from verification.climatology import open_climatology
from verification.stores import open_forecast

URL = "s3://bucket/wb.zarr"
BACKOFF = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(seconds=1), "base": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Analyses in Zarr 2 and 3, without consolidated metadata, and ten days to train on."""
    path = tmp_path_factory.mktemp("stores")
    truth = analyses()
    weatherbench(path, truth)
    zarr3(path, truth)
    store(path / "holed.zarr", "zlib").unlink()
    (path / "training").mkdir()
    write_archive(path / "training")
    return path


@pytest.fixture(scope="module")
def started(folder) -> Iterator[S3Server]:
    stores = {name: folder / name for name in ("wb.zarr", "three.zarr", "holed.zarr")}
    stores["ten.zarr"] = folder / "training/wb.zarr"
    with S3Server({f"bucket/{name}": path for name, path in stores.items()}) as server:
        yield server


@pytest.fixture
def server(started, monkeypatch) -> S3Server:
    """Quick and reliable again, asked by nobody."""
    monkeypatch.setitem(remote.RETRIES, "backoff", BACKOFF)
    started.latency = started.error_rate = 0.0
    started.seen.clear()
    return started


@pytest.mark.parametrize("name", ["wb.zarr", "three.zarr"])
def test_failures_and_latency_cost_no_value(server, folder, name):
    server.latency, server.error_rate = 0.02, 0.1
    archive = open_archive(f"s3://bucket/{name}", access=Access(server.options))
    for _ in range(4):
        np.testing.assert_array_equal(archive.read_block(0, 5, NAMES), values(analyses()))
    assert len(server.seen) > 60


def test_a_missing_chunk_is_missing_there_too(server):
    """It reads as zeros: then the store is asked. This one has no consolidated metadata, and is listed."""
    archive = open_archive("s3://bucket/holed.zarr", access=Access(server.options))
    found = archive.read_block(0, 5, ["2m_temperature"])[:, 0]
    assert np.isnan(found[2]).all() and np.isfinite(found[[0, 1, 3, 4]]).all()


def test_train_validate_and_forecast_from_a_store_that_fails(server, folder, tmp_path):
    """The losses are those of local files, to the bit, and the forecasts too."""
    data = {"variables": ["geopotential:500", "2m_temperature"], "train_period": ["2020-01-01", "2020-01-06"]}
    config = write_config(
        tmp_path,
        path=str(folder / "training/wb.zarr"),
        data=data | {"validation_period": ["2020-01-07", "2020-01-10"]},
        training={"steps": 3, "local_batch_size": 4},
        checkpoint={"async_mode": "disabled"},
        validation={"enable": True, "lead_hours": [6], "plots": False},
        forecast={"period": ["2020-01-07", "2020-01-07T06"], "num_steps": 20},
    )
    server.latency, server.error_rate, records, forecasts = 0.005, 0.1, [], []
    for name, source in (
        ("local", []),
        ("remote", ["--data.path", "s3://bucket/ten.zarr", *server.arguments]),
    ):
        words = run_options(config, tmp_path / name, *source, f"--data.store_path={tmp_path / name}.zarr")
        records.append([record.get("loss", record.get("val/loss")) for record in run_train(*words)])
        forecasts.append(run_forecast(words, tmp_path / f"{name}/forecast.zarr"))
    assert records[0] == records[1] and len(records[0]) > 3
    xr.testing.assert_equal(*forecasts)


def test_forecasts_and_climatologies_may_be_behind_urls_too(server, folder, tmp_path):
    truth, leads = analyses()[["2m_temperature"]], np.array([6, 12], "timedelta64[h]")
    made = truth.expand_dims(prediction_timedelta=leads.astype("timedelta64[ns]"), axis=1)
    hours = truth.isel(time=slice(0, 4)).rename(time="hour").assign_coords(hour=[0, 6, 12, 18])
    for name, dataset in (("forecast.zarr", made), ("climatology.zarr", hours)):
        dataset.to_zarr(tmp_path / name, zarr_format=2, consolidated=True)
        server.upload(f"bucket/{name}", tmp_path / name)
    access = Access(server.options, "s3")
    found = open_forecast("s3://bucket/forecast.zarr", access=access)
    assert found.leads.tolist() == leads.astype("timedelta64[s]").tolist() and len(found.times) == 5
    fields = found.read_block(slice(0, 5), slice(0, 2), ["2m_temperature"])
    np.testing.assert_array_equal(fields[:, 1, 0], truth["2m_temperature"].values)
    assert open_climatology("s3://bucket/climatology.zarr", access).rows["hour"].keys() == {0, 6, 12, 18}


# -- train_configs/era5_64x32.toml unchanged, on a store of the same metadata

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
def era5(tmp_path_factory) -> Path:
    """Random fields with dims, chunks, types and attributes of WeatherBench2's store, of the last three weeks
    of 2017 and the first of 2018. The configuration's periods are there.
    """
    time = np.datetime64("2017-12-11", "ns") + np.arange(112) * np.timedelta64(6, "h")
    coords = {"time": time, "level": LEVELS, "longitude": np.arange(64) * 5.625}
    rng = np.random.default_rng(0)
    dataset = xr.Dataset(coords=coords | {"latitude": -87.1875 + np.arange(32) * 5.625})
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


def test_the_configuration_trains_and_validates(server, era5, tmp_path):
    server.upload("weatherbench2/64x32.zarr", era5)
    server.latency, server.error_rate = 0.01, 0.02
    source = ["--data.path", "s3://weatherbench2/64x32.zarr", *server.arguments]
    source += ["--data.store_path", str(tmp_path / "store.zarr")]
    few = ["--training.steps=2", "--validation.plots=false", "--metrics.loggers=[]", "--metrics.log_freq=1"]
    records = run_train(*run_options(CONFIG, tmp_path, *source, *few))
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    scores = {key: value for record in records for key, value in record.items() if key.startswith("val/")}
    assert math.isfinite(scores["val/rmse/geopotential:500@72h"]) and "val/rmse/2m_temperature" in scores


def test_its_data_are_those_of_the_store(era5):
    """Grid, order of dims and levels are found out; north stands first."""
    config = load_checked(["--job.config_file", str(CONFIG), "--data.path", str(era5)])
    selection = open_selection(config.data, config.model.patch_size, config.validation.lead_hours)
    assert selection.archive.grid.shape == (32, 64) and selection.archive.grid.latitude[0] > 87
    assert len(selection.variables) == 16 and len(selection.train) == 84 and len(selection.validation) == 28


# -- what goes wrong


def first_error(url: str, *options: str) -> str:
    """One line, within ten seconds or so."""
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        open_archive(url, access=Access(options))
    assert time.monotonic() - began < 20 and "\n" not in str(error.value)
    return str(error.value)


def test_errors_of_a_store_are_one_line(server):
    anonymous, endpoint = server.options
    for url in ("s3://nowhere/x.zarr", "s3://bucket/x.zarr"):
        assert "Zarr" in first_error(url, *server.options) or "found" in first_error(url, *server.options)
    options = ("key=AKIAEXAMPLE", "secret=topsecret", endpoint)
    refused = first_error("s3://forbidden/x.zarr", *options)
    assert "topsecret" not in refused and "AKIAEXAMPLE" not in refused
    assert "forbidden" in first_error("s3://forbidden/x.zarr", *server.options)


def test_a_store_that_does_not_answer_is_one_line(monkeypatch):
    monkeypatch.setitem(remote.RETRIES, "max_retries", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"endpoint_url=http://127.0.0.1:{free.getsockname()[1]}"
    line = first_error(URL, "anon=true", endpoint)
    assert "cannot read 's3://bucket/wb.zarr'" in line and "is there a network?" in line


def test_a_store_that_ends_during_a_run_is_one_line(server, monkeypatch):
    monkeypatch.setitem(remote.RETRIES, "max_retries", 1)
    archive = open_archive(URL, access=Access(server.options))
    server.error_rate = 1.0
    with pytest.raises(DataError, match="s3://bucket/wb.zarr: geopotential at .* cannot be read") as error:
        archive.read_block(0, 5, NAMES)
    assert "\n" not in str(error.value)


# -- options, secrets


def test_options_are_toml_or_text():
    found = parse_storage_options(["anon=true", "endpoint_url=http://h:5000", "key=123", "retries = 4"])
    assert found == {"anon": True, "endpoint_url": "http://h:5000", "key": "123", "retries": 4}
    with pytest.raises(ConfigError, match="data.storage_options = ") as error:
        parse_storage_options(["c={token='s3cr'}"])
    assert "s3cr" not in str(error.value)


def test_options_are_for_the_protocol_of_the_data():
    access = Access(("anon=true",), "s3")
    assert access.options_for("s3://b/x") == access.options_for("simplecache::s3://b/x") == {"anon": True}
    assert access.options_for("gs://b/x") == {}


def test_secrets_are_not_written_down():
    options = ["key=AKIA1", "secret=s3cr", "token=anon", 'password="pw d"', "anon=false"]
    text = to_toml(load_checked(["--data.storage_options", json.dumps(options)]))
    assert not any(secret in text for secret in ("AKIA1", "s3cr", "pw d"))
    assert '"secret=***"' in text and '"token=anon"' in text and '"anon=false"' in text
    assert without_secrets(f"data.storage_options = {options!r}").count("***") == 3
    assert without_secrets("data.select = ['monkey=1']") == "data.select = ['monkey=1']"


def test_without_credentials_requests_are_not_signed(monkeypatch, tmp_path):
    for name in (*remote.AWS_VARIABLES, *remote.GOOGLE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(remote, "MACHINE", tmp_path)
    options = remote._obstore_options
    for protocol in ("s3", "gs"):
        assert options(protocol, {})[0] == {"skip_signature": True}
    assert options("gs", {"token": "anon"})[0] == {"skip_signature": True}
    assert "skip_signature" not in options("s3", {"key": "x", "secret": "y"})[0]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert options("s3", {})[0] == {} == options("gs", {})[0]
    store = remote.open_store("gs://weatherbench2/datasets/era5.zarr", Access(("skip_signature=true",)))
    assert "GCSStore" in str(store)
