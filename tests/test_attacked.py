"""Errors that benchmarks/attack.py found and that have been fixed since."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from numcodecs import Blosc
from zarr.codecs import BloscCodec

from datasets.grid import Grid
from datasets.shards import register_codecs
from datasets.statistics import Statistics
from errors import ConfigError, DataError
from planning.start_checks import open_checked
from tests.sample_archives import analyses, training_store, weatherbench
from tests.started_jobs import write_config
from training.config_checks import load_checked
from verification.climatology import open_climatology
from verification.stores import ForecastStore


@pytest.mark.parametrize("format", [2, 3])
@pytest.mark.parametrize("keep", [-1, 100])
def test_a_blosc_chunk_that_was_cut_short_is_not_read_past_its_end(tmp_path, format, keep):
    """Where nothing can be compressed, blosc copies as many bytes as there were."""
    root = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=format)
    codec = Blosc() if format == 2 else BloscCodec()
    values = np.random.default_rng(0).integers(0, 2**32, (6, 8)).astype("u4")
    root.create_array("x", data=values, chunks=(6, 8), compressors=codec)
    path = next(p for p in (tmp_path / "a.zarr/x").rglob("*") if p.name in ("0.0", "0") and p.is_file())
    path.write_bytes(path.read_bytes()[:keep])
    register_codecs()
    with pytest.raises(RuntimeError, match="a blosc chunk has"):
        zarr.open_array(str(tmp_path / "a.zarr"), path="x", mode="r")[:]


@pytest.mark.parametrize(
    "more", ["--model.dim=4096 --model.num_layers=16", "--training.local_batch_size=65536"]
)
def test_sizes_that_the_machine_does_not_hold_are_refused(tmp_path, monkeypatch, more):
    options = ["--job.config_file", str(write_config(tmp_path)), "--job.dump_folder", str(tmp_path / "run")]
    monkeypatch.setattr("planning.start_checks.host_memory", lambda: 2**24)
    open_checked(load_checked(options))
    with pytest.raises(ConfigError, match="GiB, and this machine has"):
        open_checked(load_checked([*options, *more.split()]))


def forecast_store(path: Path) -> ForecastStore:
    grid = Grid(np.array([30.0, -30.0]), np.arange(0, 360, 90.0))
    dates = np.array(["2020-01-01"], "datetime64[s]")
    store = ForecastStore(path, ["2m_temperature"], grid, dates, [6])
    store.create({"weights": 1})
    return store


@pytest.mark.parametrize("content", [b"", b"{", b"\x82", b"{}"])
def test_damaged_metadata_of_an_array_of_a_forecast_are_one_line(tmp_path, content: bytes):
    store = forecast_store(tmp_path / "forecast.zarr")
    (store.path / "2m_temperature/zarr.json").write_bytes(content)
    with pytest.raises(ConfigError, match="forecast.zarr"):
        store.create({"weights": 1})


def test_hours_of_a_climatology_that_cannot_be_read_are_one_line(tmp_path):
    hours = {"hour": [0, 6], "latitude": [30.0, -30.0], "longitude": np.arange(0, 360, 90.0)}
    field = xr.DataArray(
        np.zeros((2, 2, 4), "f4"), hours, ("hour", "latitude", "longitude"), "2m_temperature"
    )
    field.to_dataset().to_zarr(tmp_path / "c.zarr", zarr_format=2)
    (tmp_path / "c.zarr/hour/0").write_bytes(b"")
    with pytest.raises(DataError, match="cannot read .*c.zarr"):
        open_climatology(str(tmp_path / "c.zarr"))


def test_a_variable_that_never_changes_is_said(tmp_path, caplog):
    ds = analyses()
    ds["2m_temperature"][:] = 280
    archive = training_store(weatherbench(tmp_path, ds), tmp_path / "store")
    names, step = ["2m_temperature", "geopotential:500"], np.timedelta64(6 * 3600, "s")
    Statistics.of(archive, names, np.arange(5), step)
    assert caplog.text.count("in all cells") == 1 and "2m_temperature is 280 in all cells" in caplog.text
