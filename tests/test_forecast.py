"""Forecasts from a checkpoint: the store and its values, restarts, ranks, ensembles, what goes wrong."""

import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import forecast
from datasets.conditions import compute_forcings
from errors import UserError
from tests.forecasts import plain_forecast
from tests.planned import run_forecast, run_main, run_train
from tests.sample_archives import netcdf, zarr_chunked
from tests.started_jobs import (
    LATITUDE,
    LONGITUDE,
    Job,
    run_options,
    small_dataset,
    small_wave,
    started_by,
    write_config,
)
from verification.stores import open_forecast
from verification.tables import lead_hours

VARIABLES = ["geopotential:500", "geopotential:850", "temperature:850", "2m_temperature"]
EMPTY = np.datetime64("2020-01-09T06")  # 2m_temperature has no value on this date


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a short training with averaged weights, with the archive and the configuration."""
    folder = tmp_path_factory.mktemp("forecast")
    data = {"variables": VARIABLES, "forcings": ["toa_incident_solar_radiation"]}
    data |= {"train_period": ["2020-01-01", "2020-01-06"]}
    write_config(
        folder,
        path=write_archive(folder),
        data=data | {"validation_period": ["2020-01-07", "2020-01-10"]},
        training={"steps": 4, "ema_decay": 0.9},
        checkpoint={"interval": 2, "async_mode": "disabled"},
        validation={"local_batch_size": 4},
        forecast={"period": ["2020-01-07", "2020-01-08T06"], "num_steps": 5},
    )
    run_train(*arguments(folder / "run"))
    return folder / "run"


def write_archive(folder: Path) -> str:
    """Ten days of waves that travel east, on 6 x 8 points."""
    ds = small_dataset({"2m_temperature": small_wave(40, size=1.0)}).drop_attrs()
    wave = ds["2m_temperature"]
    levels = xr.DataArray([1.0, 0.5], {"level": [500, 850]})
    upper = wave.expand_dims(level=levels.level, axis=1)
    ds["geopotential"] = (5e4 * levels**1.8 + 900 * levels * upper).astype("f4")
    ds["temperature"] = (310 - 60 * levels + 9 * levels * upper).astype("f4")
    ds["2m_temperature"] = 288 - 7 * wave
    ds["2m_temperature"].loc[EMPTY] = np.nan
    return zarr_chunked(folder / "wb.zarr", ds.drop_sel(time=np.datetime64("2020-01-08T12")), {"time": 1})


def arguments(run: Path, *options: str) -> list[str]:
    return run_options(run.parent / "tiny.toml", run, *options)


def store(run: Path, path: Path, *options: str, code: int = 0) -> xr.Dataset:
    """The forecasts of a run made in this process."""
    return run_forecast(arguments(run), path, *options, code=code)


def start(start_job, run: Path, path: Path, *options: str, ranks: int = 1) -> Job:
    """The same as a user starts it."""
    words = ["--forecast.path", str(path), *options]
    return start_job(run.parent / "tiny.toml", run, *words, command=started_by("forecast.py", ranks))


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def path(run) -> Path:
    """The forecasts of the run as it is configured."""
    store(run, run.parent / "forecast.zarr")
    return run.parent / "forecast.zarr"


@pytest.fixture(scope="module")
def plain(path) -> xr.Dataset:
    return xr.open_zarr(path, decode_timedelta=True).load()


def test_the_store_has_weatherbenchs_schema(path):
    with warnings.catch_warnings(action="error"):  # it opens as it is, without options
        ds = xr.open_zarr(path)
    assert set(ds.data_vars) == {"geopotential", "temperature", "2m_temperature", "forecast_status"}
    assert ds["forecast_status"].dims == ds["geopotential"].dims[:2] and (ds["forecast_status"] == 1).all()
    assert ds["geopotential"].dims == ("time", "prediction_timedelta", "level", "latitude", "longitude")
    assert ds["2m_temperature"].dims == ("time", "prediction_timedelta", "latitude", "longitude")
    assert ds["geopotential"].encoding["chunks"] == (1, 1, 2, 6, 8)
    assert ds["geopotential"].dtype == np.float32 and ds["geopotential"].attrs["units"] == "m2 s-2"
    assert ds.time.values[0] == np.datetime64("2020-01-07") and ds.sizes["time"] == 6
    assert lead_hours(ds.rename(prediction_timedelta="lead_time")) == [6, 12, 18, 24, 30]
    assert ds.level.values.tolist() == [500, 850] and ds.latitude.values[0] == 75
    has_values = ds["temperature"].notnull()
    assert has_values.sel(level=850).all() and not has_values.sel(level=500).any()


def test_a_netcdf_file_by_xarray_has_the_values_of_the_store_and_names_of_the_cf_conventions(path, plain):
    """The line of docs/forecasting.md; forecast.py does not write such files."""
    copy = netcdf(path.parent, xr.open_zarr(path, decode_timedelta=True).drop_encoding(), "forecast.nc")
    with xr.open_dataset(copy, decode_timedelta=True) as found:
        xr.testing.assert_equal(found.load(), plain)
        assert found.attrs["Conventions"] == "CF-1.11" and plain.latitude.attrs["axis"] == "Y"
        names = {name: each.attrs.get("standard_name") for name, each in found.variables.items()}
        status = found["forecast_status"]  # its flags were int64, and it int8: CF wants one type
        assert np.asarray(status.attrs["flag_values"]).dtype == status.dtype
    assert names["2m_temperature"] == "air_temperature" and names["level"] == "air_pressure"
    assert names["time"] == "forecast_reference_time" and names["prediction_timedelta"] == "forecast_period"
    both = [open_forecast(each) for each in (copy, str(path))]
    blocks = [each.read_block(slice(0, 6), slice(0, 5), each.variables) for each in both]
    np.testing.assert_array_equal(blocks[0], blocks[1])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_raw_weights_are_validated_beside_the_averaged_ones(run: Path, tmp_path: Path) -> None:
    """They are those of a run that averages nothing, to the bit."""
    options = ("--validation.enable=true", "--validation.plots=false", "--checkpoint.enable=false")
    scores = []
    for decay in ("0.9", "0"):
        words = run_options(run.parent / "tiny.toml", tmp_path / decay, *options)
        scores.append(run_train(*words, "--training.ema_decay", decay)[-1])
    averaged, plain = scores
    key = "geopotential:500@24h"
    assert averaged[f"val/rmse_raw_weights/{key}"] == plain[f"val/rmse/{key}"] != averaged[f"val/rmse/{key}"]
    assert f"val/rmse_raw_weights/{key}" not in plain


def test_values_are_those_of_a_plain_loop(run, tmp_path):
    """Of the averaged weights, which the checkpoint has."""
    ds = store(run, tmp_path / "f.zarr", "--forecast.num_steps", "40")
    analysis = xr.open_zarr(run.parent / "wb.zarr").sel(time="2020-01-07T00")

    def field_of(variable: str, fields: xr.Dataset) -> np.ndarray:
        name, _, level = variable.partition(":")
        return (fields[name].sel(level=int(level)) if level else fields[name]).values

    def sun(lead: int) -> Tensor:
        seconds = torch.tensor([1578355200 + lead * 6 * 3600])
        axes = (torch.tensor(axis) for axis in (LATITUDE, LONGITUDE))
        return compute_forcings(["toa_incident_solar_radiation"], seconds, *axes)[0]

    start = [field_of(variable, analysis) for variable in VARIABLES]
    expected, std = plain_forecast(run, (4, "ema"), [start], 40, sun), np.load(run / "statistics.npz")["std"]
    for v, variable in enumerate(VARIABLES):
        got = field_of(variable, ds.isel(time=0))
        np.testing.assert_allclose(got, expected[:, v], atol=2e-5 * std[v], rtol=1e-6)


@pytest.mark.slow
def test_killed_and_started_again_it_completes_what_is_missing(start_job, run, tmp_path):
    options = ["--forecast.num_steps", "60", "--validation.local_batch_size", "1"]
    store(run, tmp_path / "whole.zarr", *options)
    path = tmp_path / "killed.zarr"
    job = start(start_job, run, path, *options)
    while not list(path.glob("forecast_status/c/*/0")):
        assert job.process.poll() is None, job.output
        time.sleep(0.002)
    job.kill_all()
    done = [p for p in path.glob("forecast_status/c/*/0")]
    assert 1 <= len(done) < 6
    assert 0 < int(xr.open_zarr(path)["2m_temperature"].isnull().sum()) < 6 * 60 * 48  # opens as it is
    written = (path / "geopotential/c/0/0/0/0/0").stat().st_mtime_ns
    half_written = path / "geopotential/c/5/0/0/0/0.partial"  # what a kill inside a write leaves
    half_written.parent.mkdir(parents=True, exist_ok=True)
    half_written.write_bytes(b"half")
    store(run, path, *options)
    assert files(path) == files(tmp_path / "whole.zarr")
    assert (path / "geopotential/c/0/0/0/0/0").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "layout", [[], pytest.param(["--parallelism.tensor_parallel_degree", "2"], marks=pytest.mark.slow)]
)
def test_two_ranks_forecast_what_one_does(start_job, run, tmp_path, layout):
    """Sharded over dates to the bit; over heads and tokens to rounding."""
    options = ["--validation.local_batch_size", "2"]
    job = start(start_job, run, tmp_path / "two", *options, *layout, ranks=2)
    one = store(run, tmp_path / "one", *options)
    assert job.end() == 0, job.output
    xr.testing.assert_allclose(xr.open_zarr(tmp_path / "two").load(), one, rtol=1e-5)
    assert layout or files(tmp_path / "two") == files(tmp_path / "one")


def test_bfloat16_follows_float32(run, plain, tmp_path):
    half = store(run, tmp_path / "half.zarr", "--training.mixed_precision_param", "bfloat16")
    difference = float(np.abs(half["2m_temperature"] - plain["2m_temperature"]).max())
    assert 0 < difference < 0.05 * plain["2m_temperature"].std()


# -- what goes wrong


def test_a_blow_up_is_reported_and_the_others_go_on(run, plain, tmp_path, monkeypatch, capsys):
    def unstable(*rest):
        for lead, state in enumerate(forecast_rollout(*rest), 1):
            if lead >= 3 and len(state) == 4:  # of the first batch
                state[1, 2] *= 1e6
            yield state

    forecast_rollout = forecast.rollout
    monkeypatch.setattr(forecast, "rollout", unstable)
    ds = store(run, tmp_path / "f.zarr", code=1)
    error = capsys.readouterr().err
    assert "rossby: forecast from 2020-01-07T06:00:00: blew up at 18 h: temperature:850\n" in error
    assert "1 of 6 forecasts went wrong" in error
    good = [0, 2, 3, 4, 5]
    xr.testing.assert_equal(ds.isel(time=good), plain.isel(time=good))
    store(run, tmp_path / "f.zarr", code=1)  # nothing is left to do, and it is still said
    assert "blew up at 18 h" in capsys.readouterr().err


def test_a_date_without_values_is_reported_and_left_empty(run, tmp_path, capsys):
    options = ["--forecast.period", '["2020-01-09", "2020-01-09T12"]']
    ds = store(run, tmp_path / "f.zarr", *options, code=1)
    error = capsys.readouterr().err
    assert "forecast from 2020-01-09T06:00:00: the analysis has no value of 2m_temperature" in error
    absent = ds["2m_temperature"].isnull().all(("prediction_timedelta", "latitude", "longitude"))
    assert absent.values.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            '--forecast.interval_hours=6 --forecast.period=["2020-01-08","2020-01-09T00"]',
            "at 2020-01-08T12:00:00 (forecast.interval_hours = 6) in the data, which are from",
        ),
        ('--forecast.period=["2021-01-08","2021-01-09"]', "forecast.period = ['2021-01-08', '2021-01-09']"),
        ("--forecast.checkpoint=nowhere", "forecast.checkpoint = 'nowhere': no checkpoint there"),
        ('--data.variables=["vorticity:500"]', "has no variable 'vorticity:500'; it has "),
        ("--forecast.path=/proc/f.zarr", "the folder of forecast.path = '/proc': /proc is no folder"),
        ("--forecast.path={run}/../wb.zarr/f.zarr", "is inside the store"),
        ("--forecast.path={run}/forecast.nc", "Zarr"),
        ("--export={run}/../wb.zarr/model", "is inside the store"),
        ("--forecast.path={run}/../wb.zarr", "wb.zarr': exists, and is not a forecast of Rossby"),
        ('--data.variables=["2m_temperature","geopotential:500"]', "was trained with"),
        ("--model.dim=32", "was trained with 16; take the config.toml of"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, options, message):
    words = arguments(
        run, "--forecast.path", str(tmp_path / "f.zarr"), *options.replace("{run}", str(run)).split()
    )
    ended = run_main(forecast.main, *words)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("rossby: ")]
    assert ended.returncode == 2 and len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "f.zarr").exists()


def test_a_full_disk_is_one_line_and_the_rest_is_written_later(run, plain, tmp_path, monkeypatch):
    path = tmp_path / "f.zarr"
    write = forecast.ForecastStore.write_chunks

    def full(self, name, pairs, lead, fields):
        if pairs[0][0] == 4 and lead == 3:
            raise OSError(28, "No space left on device")
        write(self, name, pairs, lead, fields)

    with monkeypatch.context() as patch:
        patch.setattr(forecast.ForecastStore, "write_chunks", full)
        ended = run_main(forecast.main, *arguments(run, "--forecast.path", str(path)))
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "rossby: [Errno 28] No space left on device" in ended.stderr
    assert len(list(path.glob("forecast_status/c/*/0"))) == 4
    xr.testing.assert_equal(store(run, path), plain)


def test_another_forecast_is_not_written_over(run, path, tmp_path):
    path = shutil.copytree(path, tmp_path / "f.zarr")
    before = files(path)
    with pytest.raises(UserError, match=r"leads is \[6, .*, 30\] there and \[6, .*, 36\] here"):
        store(run, path, "--forecast.num_steps", "6")
    assert files(path) == before
    intact = (path / "zarr.json").read_text()
    array = path / "2m_temperature/zarr.json"
    # Of the description of the forecast, and of the metadata of an array, consolidated and its own.
    description = intact.replace(r"\"leads\":", r"\"leads\";")
    for damaged in (description, intact.replace('"float32"', '"flo`t32"', 1), b"", b"{", b"\x82", b"{}"):
        (path / "zarr.json").write_text(damaged if isinstance(damaged, str) else intact)
        array.write_bytes(damaged if isinstance(damaged, bytes) else before["2m_temperature/zarr.json"])
        with pytest.raises(UserError, match="damaged"):
            store(run, path)


def test_a_store_of_other_initial_states_is_not_finished(run, tmp_path):
    """The same path, dates and variables, but corrected values: the old forecasts were taken for these."""
    path = shutil.copytree(run.parent / "wb.zarr", tmp_path / "wb.zarr")
    options = ["--data.path", str(path)]
    for _ in range(2):  # finished, and the same
        store(run, tmp_path / "f.zarr", *options)
    ds = xr.open_zarr(path).load().drop_encoding() + 1
    shutil.rmtree(path)
    zarr_chunked(path, ds, {"time": 1})
    with pytest.raises(UserError, match="another forecast: states is CRC-32"):
        store(run, tmp_path / "f.zarr", *options)


def test_an_export_replaces_nothing(run, tmp_path):
    (tmp_path / "model").write_text("another's")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("another's")
    for name in ("model", "folder", "new.pt2"):
        ended = run_main(forecast.main, *arguments(run, "--export", str(tmp_path / name)))
        assert ended.returncode == 2 and "--export" in ended.stderr and name in ended.stderr
    assert (tmp_path / "model").read_text() == "another's"


def test_of_the_checkpoints_the_newest_good_one_is_taken(run, plain, tmp_path):
    first = str(run / "checkpoints/step-00000002")
    older = store(run, tmp_path / "older.zarr", "--forecast.checkpoint", first)
    shutil.copytree(run, tmp_path / "run")
    damaged = next((tmp_path / "run/checkpoints/step-00000004").glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    options = ["--forecast.checkpoint", str(tmp_path / "run")]
    xr.testing.assert_equal(store(run, tmp_path / "newest.zarr", *options), older)
    assert float(np.abs(plain["2m_temperature"] - older["2m_temperature"]).max()) > 0


def test_initial_dates_by_interval(run, tmp_path):
    options = ["--forecast.period", '["2020-01-07", "2020-01-10"]', "--forecast.interval_hours", "24"]
    ds = store(run, tmp_path / "f.zarr", *options, "--forecast.num_steps", "1")
    np.testing.assert_array_equal(ds.time, np.arange("2020-01-07", "2020-01-11", dtype="datetime64[D]"))
