"""Numbers that were wrong without a word, found by reading the same data with xarray, scores by hand."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import forecast
from datasets.archive import open_archive
from datasets.convert import main as convert
from datasets.describe import main as describe
from datasets.statistics import check_static, refuse_fills
from errors import ConfigError, DataError
from tests.planned import run_train
from tests.sample_archives import analyses, anemoi, weatherbench, zarr_chunked
from tests.started_jobs import small_dataset, small_wave, write_config
from training.config_checks import load_checked

T2M, U10 = "2m_temperature", "10m_u_component_of_wind"


# -- reading


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_fill_value_of_0_of_packed_numbers_means_missing(tmp_path, zarr_format):
    """Unsigned packing leaves 0 for it; Zarr 2's own 0 of values that are not packed is a value."""
    ds = analyses()[[T2M]]
    packing = {"dtype": "uint16", "scale_factor": 0.01, "add_offset": 180.0, "_FillValue": 0}
    path = tmp_path / "packed.zarr"
    ds.to_zarr(path, zarr_format=zarr_format, encoding={T2M: packing}, consolidated=False)
    found = open_archive(str(path)).read(2, [T2M])[0]
    theirs = xr.open_zarr(path)[T2M].values[2]
    assert np.isnan(theirs).any()
    np.testing.assert_allclose(found, theirs, rtol=1e-6)


def test_a_store_that_is_written_again_is_read_again(tmp_path):
    """In one process, as in a notebook: its files were kept open, and decoded with the new offset."""
    source, target, ds = tmp_path / "a.nc", tmp_path / "a.zarr", analyses()[[T2M]].fillna(280)
    for factor in (1, 2):
        (ds * factor).assign_attrs(units="K").to_netcdf(source, engine="h5netcdf")
        shutil.rmtree(target, ignore_errors=True)
        convert([str(source), str(target)])
        found = open_archive(str(target)).read(2, [T2M])[0]
        np.testing.assert_allclose(found, factor * ds[T2M].values[2], rtol=1e-3)


@pytest.mark.parametrize("fill", ["-9999", "none"])
def test_a_fill_value_that_is_text_is_a_number_or_leaves_one_variable_out(tmp_path, fill):
    """The whole file was refused, with an error of struct that named neither variable nor attribute."""
    ds = analyses()[[T2M, "geopotential"]].fillna(-9999)
    ds[T2M].attrs["missing_value"] = fill
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding={T2M: {"_FillValue": None}})
    archive = open_archive(str(tmp_path / "a.nc"))
    assert archive.read(2, ["geopotential:500"]).shape == (1, 6, 8)
    if fill == "none":
        assert "'none' is no number" in archive.unreadable[T2M]
    else:
        assert np.isnan(archive.read(2, [T2M])).sum() == 2


def test_all_dates_that_files_have_in_common_can_be_compared(tmp_path, capsys):
    """Some of sixty dates are compared when a run starts, and the newest."""
    ds = small_dataset({U10: small_wave(60)})
    for name, date in (("a", None), ("b", 20), ("c", 58)):
        changed = ds.copy(deep=True)
        if date:
            changed[U10][date] += 1
        changed.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
    for names, noticed in (("ab", False), ("ac", True)):
        folder = tmp_path / names
        folder.mkdir()
        for name in names:
            shutil.copy(tmp_path / f"{name}.nc", folder)
        archive = open_archive(str(folder))
        if noticed:
            with pytest.raises(DataError, match="has different values"):
                archive.check([U10])
        else:
            archive.check([U10])
        assert describe([str(folder), "--all"]) == 1
        assert "has different values" in capsys.readouterr().out


def test_static_fields_are_checked_like_others(caplog):
    mask = np.eye(4, 6, dtype="f4")
    check_static({"land_sea_mask": mask}, "a.nc")
    assert not caplog.messages
    with pytest.raises(DataError, match="land_sea_mask is infinite in 1 cells"):
        check_static({"land_sea_mask": np.where(np.arange(24).reshape(4, 6) == 7, np.inf, mask)}, "a.nc")
    with pytest.raises(DataError, match="land_sea_mask is -9999 in 4 cells"):
        check_static({"land_sea_mask": np.where(mask > 0, -9999, 0)}, "a.nc")
    with pytest.raises(DataError, match="land_sea_mask is missing in all cells"):
        check_static({"land_sea_mask": mask * np.nan}, "a.nc")
    check_static({"land_sea_mask": np.where(mask > 0, np.nan, mask)}, "a.nc")
    assert "16.7 % of its cells are missing" in caplog.text


# -- weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[str], Path]:
    """Options of a run with a land-sea mask, and the folder of its data."""
    folder = tmp_path_factory.mktemp("static")
    ds = small_dataset({U10: small_wave(60)})
    rng = np.random.default_rng(0)
    for name in ("mask", "other"):
        field = xr.DataArray(rng.random((6, 8)).astype("f4").round(), ds.drop_dims("time").coords)
        field.to_dataset(name="land_sea_mask").to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
    (folder / "data").mkdir()
    path = weatherbench(folder / "data", ds)
    options = ["--job.config_file", str(write_config(folder)), "--data.path", path]
    options += ['--data.static_variables=["land_sea_mask"]', "--training.steps=2"]
    options += ["--job.dump_folder", str(folder / "run")]
    run_train(*options, "--data.static_path", str(folder / "mask.nc"))
    return options, folder


def test_another_static_field_is_another_meaning_of_the_weights(trained):
    options, folder = trained
    with pytest.raises(ConfigError, match="the field land_sea_mask = .*was trained with"):
        run_train(*options, "--data.static_path", str(folder / "other.nc"), "--training.steps=4")
    run_train(*options, "--data.static_path", str(folder / "mask.nc"), "--training.steps=3")


# -- forecasts


def forecast_of(options: list[str], folder: Path, *more: str) -> int:
    words = [*options, "--forecast.path", str(folder / "f.zarr"), "--forecast.num_steps=1"]
    words += ['--forecast.period=["2020-01-03","2020-01-04"]', *more]
    return forecast.forecast(load_checked(words))


def test_a_store_of_other_initial_states_is_not_finished(trained):
    """The same path, dates and variables, but corrected values: the old forecasts were taken for these."""
    options, folder = trained
    options = [*options, "--data.static_path", str(folder / "mask.nc")]
    assert forecast_of(options, folder) == 0
    assert forecast_of(options, folder) == 0  # finished, and the same
    path = Path(options[options.index("--data.path") + 1])
    ds = xr.open_zarr(path).load().drop_encoding()
    shutil.move(path, folder / "before.zarr")
    zarr_chunked(path, ds + 1, {"time": 1})
    try:
        with pytest.raises(ConfigError, match="another forecast: states is CRC-32"):
            forecast_of(options, folder)
    finally:
        shutil.rmtree(path)
        shutil.move(folder / "before.zarr", path)


# -- coordinates and fills


def refused(source: str | Path, match: str, *names: str) -> None:
    with pytest.raises(DataError, match=match):
        archive = open_archive(str(source))
        refuse_fills(archive.read(2, names), names, archive.times[2], archive.path)


def test_an_undeclared_fill_is_one_in_any_units(tmp_path):
    """-9999 degC became -9725.85 K, on which a run trained."""
    ds = analyses()[[T2M]].fillna(280)
    values = ds[T2M].values - 273.15
    values[2, 1, :3] = -9999
    source = ds.assign({T2M: (ds[T2M].dims, values, {"units": "degC"})})
    source.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    refused(tmp_path / "a.nc", "a missing value that is not declared", T2M)


def test_packed_coordinates_are_unpacked(tmp_path):
    """Dates, degrees and hPa were read as they are stored (CF 8.1)."""
    ds = analyses()[["temperature"]]
    packing = {"latitude": (0.5, 3.0), "longitude": (0.5, 0.0), "level": (10.0, 0.0), "time": (0.25, 0.0)}
    stored = ds.assign_coords(time=np.arange(5.0))
    attrs: dict[str, dict[str, Any]] = {
        name: {"scale_factor": scale, "add_offset": offset} for name, (scale, offset) in packing.items()
    }
    attrs["time"]["units"] = "days since 2019-12-31T06:00:00"
    for name, (scale, offset) in packing.items():
        values = stored[name].values if name == "time" else (stored[name].values - offset) / scale
        stored = stored.assign_coords({name: (name, values.astype("f8"), attrs[name])})
    stored.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    found, plain = open_archive(str(tmp_path / "a.nc")), open_archive(weatherbench(tmp_path, analyses()))
    assert found.grid.same_as(plain.grid)
    assert found.variables == [name for name in plain.variables if name.startswith("temperature")]
    assert (found.times == plain.times).all()


def test_cells_of_a_rotated_grid_are_no_rows(tmp_path):
    path = anemoi(tmp_path, analyses())
    group: Any = zarr.open_group(path, mode="r+")
    group["latitudes"][:] = group["latitudes"][:] + 0.1 * group["longitudes"][:]
    refused(path, "regrid", T2M)
