"""Several sources of one run: joined variables and dates, and sources that cannot be joined."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from datasets.archive import evenly_spaced
from datasets.options import parse_period
from datasets.selection import open_selection
from errors import ConfigError, DataError
from tests.planned import run_train
from tests.sample_archives import netcdf
from tests.started_jobs import run_options, small_dataset, write_config
from training.config_checks import load_checked

WIND, SEA = "10m_u_component_of_wind", "sea_surface_temperature"


def write_sea(folder: Path, changes: dict | None = None, skip: int = 7) -> str:
    """A NetCDF file of another calendar's name, reference date and order, from noon, without one date."""
    ds = small_dataset({SEA: 278 + np.arange(40)[:, None, None] * np.ones((1, 6, 8))}).sortby("latitude")
    ds[SEA].attrs["units"] = "K"
    ds = ds.isel(time=np.delete(np.arange(2, 40), skip)).assign(changes or {})
    encoding = {"time": {"units": "days since 1900-01-01", "calendar": "gregorian", "dtype": "f8"}}
    return netcdf(folder, ds, "sea.nc", encoding)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    config = write_config(tmp_path, data={"forcing_variables": [SEA], "more_paths": [write_sea(tmp_path)]})
    return run_options(config, tmp_path / "run")


def test_variables_and_dates_are_joined(options: list[str]) -> None:
    data = load_checked(options).data
    selection = open_selection(data, (3, 4), ())
    archive = selection.archive
    assert archive.units(SEA) == "K" and len(archive.times) == 40
    lacking = np.flatnonzero(~archive.has([WIND, SEA]))
    assert lacking.tolist() == [0, 1, 9]  # the first two of the wind, and the one that the sea lacks
    field = archive.read(10, [WIND, SEA])
    assert np.isfinite(field).all() and (field[1] == 278 + 10).all()
    log = run_train(*options, "--training.steps", "2")[-1]
    assert log["step"] == 2 and np.isfinite(log["loss"])
    samples = selection.samples("train", [1])
    assert len(samples) and not np.isin(samples, lacking).any()


def test_what_cannot_be_joined_names_the_source(options: list[str], tmp_path: Path) -> None:
    data = load_checked(options).data
    wind = (("time", "latitude", "longitude"), np.zeros((37, 6, 8), "f4"))
    for units in ("knots", "m s-1"):
        write_sea(tmp_path, {WIND: (*wind, {"units": units})})
        with pytest.raises(DataError, match=f"(?s): {WIND} has different values .*sea.nc"):
            open_selection(data, (3, 4), ())
    netcdf(
        tmp_path, xr.open_dataset(tmp_path / "sea.nc").load().isel(longitude=slice(0, None, 2)), "coarse.nc"
    )
    for name in ("coarse.nc", "nowhere.nc"):
        with pytest.raises(DataError, match=name):
            open_selection(replace(data, more_paths=(str(tmp_path / name),)), (3, 4), ())


def test_another_static_field_is_another_meaning_of_the_weights(tmp_path: Path) -> None:
    words = [f"--data.path={tmp_path / 'wb.zarr'}", '--data.static_variables=["land_sea_mask"]']
    options = run_options(write_config(tmp_path), tmp_path / "run", *words)
    wind = xr.open_zarr(tmp_path / "wb.zarr")[WIND][0].drop_vars("time")
    rng = np.random.default_rng(0)
    for name in ("mask", "other"):
        mask = (wind * 0 + rng.random((6, 8)).astype("f4").round()).drop_attrs()
        mask.to_dataset(name="land_sea_mask").to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
    same, other = (f"--data.static_path={tmp_path / name}" for name in ("mask.nc", "other.nc"))
    run_train(*options, same, "--training.steps=2")
    with pytest.raises(ConfigError, match="the field land_sea_mask = .*was trained with"):
        run_train(*options, other, "--training.steps=4")
    run_train(*options, same, "--training.steps=3")


# -- periods and dates


def test_dates_with_an_offset_become_utc() -> None:
    first, last = parse_period("p", ("2020-01-01T06:00+02:00", "2020-01-01")) or (None, None)
    assert first and first.isoformat() == "2020-01-01T04:00:00"
    assert last and last.isoformat() == "2020-01-01T23:59:59"


@pytest.mark.parametrize(("last", "hour"), [("2020-01-03", 18), ("2020-01-03T06", 6)])
def test_the_last_day_counts_to_its_end(tmp_path: Path, last: str, hour: int) -> None:
    data = load_checked(run_options(write_config(tmp_path), tmp_path / "run")).data
    selection = open_selection(replace(data, train_period=("2020-01-01", last)), (2, 2), ())
    assert selection.archive.times[selection.train[-1]] == np.datetime64(f"2020-01-03T{hour:02d}")


def test_evenly_spaced():
    assert evenly_spaced(np.arange(10), 0).tolist() == list(range(10))
    assert evenly_spaced(np.arange(10), 4).tolist() == [0, 3, 6, 9]
