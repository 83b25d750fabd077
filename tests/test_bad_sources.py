"""Sources that could be read with wrong values and no error: converted, read correctly, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import xarray as xr
import zarr

from config import Data
from datasets.archive import open_archive
from datasets.selection import open_selection
from errors import ConfigError, DataError
from tests.sample_archives import NAMES, analyses, file_a_year, values, weatherbench, zarr_chunked

T2M, Z500 = "2m_temperature", "geopotential:500"


def refusal(path: str, variable: str = T2M) -> str:
    """Return the one line with which opening, checking or reading fails."""
    with pytest.raises((DataError, ConfigError)) as error:
        archive = open_archive(path)
        archive.check([variable])
        archive.read(0, [variable])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("axis", ["latitude", "longitude", "time"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_coordinates_longer_than_the_arrays_are_refused(tmp_path, truth, axis, zarr_format):
    """They were read: the surplus rows were memory that nobody had written."""
    path = zarr_chunked(tmp_path / "a.zarr", truth[[T2M]], {"time": 1}, zarr_format)
    array: Any = zarr.open_group(path, mode="r+", use_consolidated=False)[axis]
    step = array[1] - array[0]
    array.resize((array.shape[0] + 3,))
    array[-3:] = array[-4] + step * np.arange(1, 4)
    if zarr_format == 2:
        zarr.consolidate_metadata(path, zarr_format=2)
    assert axis in refusal(path)


def test_an_array_larger_than_its_grid_is_refused(tmp_path, truth):
    path = Path(zarr_chunked(tmp_path / "a.zarr", truth[[T2M]], {"time": 1}, 3))
    metadata = path / T2M / "zarr.json"
    content = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(content | {"shape": [5, 200_000, 400_000]}))
    assert T2M in refusal(str(path)) or "latitude" in refusal(str(path))


def with_units(ds: xr.Dataset, name: str, units: str, factor: float = 1.0) -> xr.Dataset:
    return ds.assign({name: (ds[name] * factor).assign_attrs(units=units)})


def test_units_that_differ_between_files_are_converted(tmp_path, truth):
    ds = with_units(truth[["geopotential", T2M]], "geopotential", "m2 s-2")
    for year, part in ds.groupby("time.year"):
        other = with_units(part, "geopotential", "m", 1 / 9.80665) if year == 2020 else part
        other.to_netcdf(tmp_path / f"{year}.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path))
    archive.check(archive.variables)
    block = archive.read_block(0, 5, [Z500])[:, 0]
    np.testing.assert_allclose(block, truth.geopotential.sel(level=500), rtol=1e-6, atol=1e-6)
    assert archive.units(Z500) == "m2 s-2"


def test_units_of_unknown_variables_may_not_differ(tmp_path, truth):
    ds = truth[[T2M]].rename({T2M: "own"})
    for year, part in ds.groupby("time.year"):
        with_units(part, "own", "mm" if year == 2020 else "m").to_netcdf(tmp_path / f"{year}.nc")
    text = refusal(str(tmp_path), "own")
    assert "'mm'" in text and "'m'" in text


@pytest.mark.parametrize(
    ("name", "units", "factor", "offset"),
    [
        (T2M, "degC", 1.0, 273.15),
        (T2M, "celsius", 1.0, 273.15),
        (T2M, "degF", 5 / 9, 459.67 * 5 / 9),
        ("surface_pressure", "kPa", 1000.0, 0.0),
        ("10m_u_component_of_wind", "km h-1", 1 / 3.6, 0.0),
        ("total_precipitation", "cm", 0.01, 0.0),
        ("geopotential", "gpm", 9.80665, 0.0),
        ("10m_u_component_of_wind", "knots", 1852 / 3600, 0.0),
        ("mean_sea_level_pressure", "hPa", 100.0, 0.0),
        ("specific_humidity", "g/kg", 1e-3, 0.0),
        ("geopotential", "m**2 s**-2", 1.0, 0.0),
    ],
)
def test_known_units_are_converted(tmp_path, truth, name, units, factor, offset):
    source = "geopotential" if name in ("geopotential", "specific_humidity") else T2M
    ds = with_units(truth[[source]].rename({source: name}), name, units)
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    full = f"{name}:500" if "level" in ds[name].dims else name
    found = open_archive(str(tmp_path / "a.nc")).read_block(0, 5, [full])[:, 0]
    field = truth[source].values[:, 0] if ":" in full else truth[source].values
    np.testing.assert_allclose(found, field.astype("f8") * factor + offset, rtol=1e-6, atol=1e-6)


def packed(tmp_path: Path, stored: np.ndarray, **attributes: Any) -> str:
    coords = analyses().drop_vars("level").coords
    axes = ("time", "latitude", "longitude")
    ds = xr.Dataset({T2M: (axes, stored, attributes)}, {name: coords[name] for name in axes})
    ds.to_netcdf(tmp_path / "packed.nc", engine="h5netcdf")
    return str(tmp_path / "packed.nc")


def test_unsigned_integers_and_their_fill_values(tmp_path):
    """`_Unsigned = "true"`: stored -1 is 65535. A fill value may be written as unsigned, too."""
    stored = np.full((5, 6, 8), -1, "i2")
    stored[0] = 100
    scale = {"scale_factor": 0.01, "_Unsigned": "true"}
    block = open_archive(packed(tmp_path, stored, **scale)).read_block(0, 5, [T2M])[:, 0]
    np.testing.assert_allclose(block[0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(block[1:], 655.35, rtol=1e-6)
    stored = np.full((5, 6, 8), 2731, "i2")
    stored[1, 2, 3] = -32767
    path = packed(tmp_path, stored, scale_factor=0.1, missing_value=np.int32(32769))
    block = open_archive(path).read_block(0, 5, [T2M])[:, 0]
    assert np.isnan(block[1, 2, 3]) and np.isfinite(block).sum() == block.size - 1
    path = packed(tmp_path, stored, scale_factor=0.1, missing_value=1e20)
    assert "_FillValue 1e+20 does not fit its type int16" in refusal(path)


@pytest.mark.parametrize(
    ("levels", "units"), [([50, 85, 100], "kPa"), ([0.5, 0.85, 1.0], "bar"), ([50000, 85000, 100000], "Pa")]
)
def test_levels_of_other_pressures_are_converted(tmp_path, truth, levels, units):
    ds = truth.assign_coords(level=("level", np.array(levels, "f8"), {"units": units}))
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    np.testing.assert_array_equal(open_archive(str(tmp_path / "a.nc")).read_block(0, 5, NAMES), values(truth))


def with_coordinate(name: str, numbers: list[float], units: str) -> Callable[[xr.Dataset], xr.Dataset]:
    return lambda ds: ds.assign_coords({name: (name, np.array(numbers, "f8"), {"units": units})})


def with_scale(scale: Any) -> Callable[[xr.Dataset], xr.Dataset]:
    return lambda ds: ds.assign({T2M: (ds[T2M].dims, np.zeros((5, 6, 8), "i2"), {"scale_factor": scale})})


NONE = float("nan")
REFUSED = {  # how the analyses are changed, the variable that is read, words of the line
    "a speed": (lambda ds: with_units(ds, T2M, "m s-1"), T2M, ["'m s-1'", "'K'"]),
    "a temperature": (lambda ds: with_units(ds, "geopotential", "K"), Z500, ["'K'", "'m2 s-2'"]),
    "no units": (lambda ds: with_units(ds, T2M, "furlong"), T2M, ["'furlong'", "'K'"]),
    "two scales": (with_scale(np.array([1.0, 2.0])), T2M, ["scale_factor"]),
    "a scale of NaN": (with_scale(np.nan), T2M, ["scale_factor"]),
    "a scale of text": (with_scale("ten"), T2M, ["scale_factor"]),
    "heights": (with_coordinate("level", [500, 850, 1000], "m"), Z500, ["'level'"]),
    "numbers of levels": (with_coordinate("level", [1, 2, 3], "1"), Z500, ["'level'"]),
    "a level of NaN": (with_coordinate("level", [500, NONE, 1000], "hPa"), Z500, ["'level'"]),
    "dates of NaN": (with_coordinate("time", 5 * [NONE], "hours since 2020-01-01"), T2M, ["cannot read"]),
    "longitudes of NaN": (with_coordinate("longitude", 8 * [NONE], "degrees_east"), T2M, ["cannot read"]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", REFUSED)
def test_what_is_no_weather_is_refused(tmp_path, truth, row):
    change, variable, words = REFUSED[row]
    change(truth).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    text = refusal(str(tmp_path / "a.nc"), variable)
    assert all(word in text for word in words), text


def test_files_that_overlap_with_other_values_are_refused(tmp_path, truth):
    ds = truth[[T2M]]
    ds.isel(time=slice(0, 4)).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    ds.isel(time=slice(3, 5)).to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path))
    archive.check([T2M])  # the same values twice are one date
    assert len(archive.times) == 5
    del archive
    (tmp_path / "b.nc").unlink()
    (ds.isel(time=slice(3, 5)) + 1).to_netcdf(tmp_path / "c.nc", engine="h5netcdf")
    text = refusal(str(tmp_path))
    assert "a.nc" in text and "c.nc" in text and "2020-01-01T00:00:00" in text


def on_cells(name: str, **attrs: str) -> xr.DataArray:
    """Return three dates of a variable on 3 x 4 cells."""
    coords = {"time": np.datetime64("2020-01-01", "ns") + np.arange(3) * np.timedelta64(6, "h")}
    coords |= {"latitude": np.array([60.0, 0, -60]), "longitude": np.arange(0, 360, 90.0)}
    values = np.random.default_rng(len(name)).normal(8, 2, (3, 3, 4)).astype("f4")
    return xr.DataArray(values, coords, [*coords], name=name, attrs=attrs)


@pytest.mark.parametrize(
    ("names", "about", "expected"),
    [
        (["u50", "u100", "u150"], {}, "u_component_of_wind:100"),
        (["u100", "v100"], {}, "100m_u_component_of_wind"),
        (["u100", "t100", "t850"], {}, "u_component_of_wind:100"),
        (["u100", "u500"], {"long_name": "100 metre U wind component"}, "100m_u_component_of_wind"),
        (["u50", "u100", "u150"], {"long_name": "wind at 100 m"}, "100m_u_component_of_wind"),
        (["u100", "v100"], {"GRIB_typeOfLevel": "isobaricInhPa"}, "u_component_of_wind:100"),
        (["u100", "u500"], {}, ""),
        (["u10", "u500", "u850"], {}, "10m_u_component_of_wind"),
        (["u10", "u5hpa", "u20", "u50"], {}, "u_component_of_wind:10"),
    ],
)
def test_a_wind_at_100_is_in_metres_or_hectopascals(tmp_path, names, about, expected):
    """u100 next to u50 and u150 became the wind 100 m above the ground."""
    arrays = [on_cells(name, **(about if name == "u100" else {})) for name in names]
    xr.merge(arrays).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path / "a.nc"))
    meant = names[0] if names[0] != "u50" else "u100"
    if not expected:
        assert not [name for name in archive.variables if name.startswith("100m")]
        line = refusal(str(tmp_path / "a.nc"), "100m_u_component_of_wind")
        assert "100m_u_component_of_wind or u_component_of_wind:100" in line
        return
    index = archive.variables.index(expected)
    field = next(array for array in arrays if array.name == meant)
    np.testing.assert_array_equal(archive.read(1, [archive.variables[index]])[0], field.values[1])


@pytest.mark.parametrize(
    ("levels", "attrs"),
    [
        ([0.4, 100.0], {"units": "hPa"}),
        ([40.0, 10000.0], {"units": "Pa"}),
        ([0.4, 100.0], {"units": "level", "long_name": "hybrid level"}),
    ],
)
def test_levels_that_cannot_be_named_cost_no_others(tmp_path, levels, attrs):
    """MERRA-2's 0.4 hPa cost the variable on all levels, CAM's hybrid levels the whole file."""
    t2m, labels = on_cells("t2m"), xr.DataArray(levels, dims="lev", name="lev", attrs=attrs)
    upper = xr.concat([on_cells("T"), on_cells("T") + 7], labels).transpose("time", "lev", ...)
    xr.merge([t2m, upper]).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path / "a.nc"))
    np.testing.assert_array_equal(archive.read(1, [T2M])[0], t2m.values[1])
    if attrs["units"] == "level":
        assert "'lev'" in refusal(str(tmp_path / "a.nc"), "temperature:100")
        return
    assert archive.variables == [T2M, "temperature:100"] and list(archive.unreadable) == ["temperature:0.4"]
    np.testing.assert_array_equal(archive.read(1, ["temperature:100"])[0], upper.values[1, 1])


def test_capitals_on_levels_are_names_too(tmp_path):
    """T kept its capital and missed the conversion of its units, where T2M is renamed."""
    upper = [on_cells(name, units=units) for name, units in (("T", "degC"), ("U", "knots"), ("Q", "g/kg"))]
    ds = xr.merge([each.expand_dims(level=[500, 850], axis=1) for each in upper])
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path / "a.nc"))
    wanted = ["temperature:850", "u_component_of_wind:500", "specific_humidity:500"]
    found = archive.read(2, wanted)
    expected = [ds["T"][2, 1] + 273.15, ds["U"][2, 0] * 1852 / 3600, ds["Q"][2, 0] / 1000]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("fill", [-9999, 9.969209968386869e36, np.nan])
def test_a_missing_time_is_no_date(tmp_path, fill):
    """The fill value -9999 became 10 November 1998, and a larger one made the axis unreadable."""
    ds = on_cells("t2m").to_dataset().drop_vars("time")
    attrs = {"units": "hours since 2000-01-01", "_FillValue": fill}
    time = xr.Variable("time", np.array([0, fill, 12], type(fill)), attrs)
    ds.assign_coords(time=time).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    expected = np.array(["2000-01-01T00", "2000-01-01T12"], "M8[s]")
    np.testing.assert_array_equal(open_archive(str(tmp_path / "a.nc")).times, expected)


@pytest.mark.parametrize("since", ["2000-01-01", "1850-01-01"])
def test_days_of_single_precision_are_whole_hours(tmp_path, since):
    """13:00 became 12:59:46, and was no date of a forecast or of another file."""
    hours = np.datetime64("2021-02-26T12", "s") + np.arange(3) * np.timedelta64(3600, "s")
    days = ((hours - np.datetime64(since, "s")) / np.timedelta64(86400, "s")).astype("f4")
    ds = on_cells("t2m").to_dataset().drop_vars("time")
    ds = ds.assign_coords(time=("time", days, {"units": f"days since {since}"}))
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    np.testing.assert_array_equal(open_archive(str(tmp_path / "a.nc")).times, hours)


def test_a_file_that_is_left_out_is_named(tmp_path, caplog):
    """A later year with dates that cannot be read was not there, without a word."""
    first = on_cells("t2m").to_dataset()
    later = first.drop_vars("time").assign_coords(time=("time", np.arange(3.0), {"units": "fortnights"}))
    for name, ds in (("first", first), ("later", later)):
        ds.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
    open_archive(str(tmp_path)).check(["2m_temperature"])
    assert "an array of 2m_temperature is left out: its time has units 'fortnights'" in caplog.text


def test_static_fields_that_differ_are_refused(tmp_path):
    """The first file's was taken, without a word."""
    for year, value in ((2000, 0.0), (2001, 0.0), (2002, 1.0)):
        ds = on_cells("t2m").to_dataset()
        ds = ds.assign_coords(time=ds.time + np.timedelta64(365 * (year - 2000), "D"))
        ds["lsm"] = ds["t2m"][0].drop_vars("time") * 0 + value
        ds.to_netcdf(tmp_path / f"{year}.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path / "200[01].nc"))
    assert (archive.read_static("land_sea_mask") == 0).all()
    with pytest.raises(DataError, match="land_sea_mask differs between .*2002.nc and .*2000.nc"):
        open_archive(str(tmp_path / "*.nc")).read_static("land_sea_mask")


@pytest.mark.parametrize(("name", "call"), [("", "datasets.source.os.listdir"), ("a.nc", "builtins.open")])
def test_what_may_not_be_read_is_one_line(tmp_path, monkeypatch, name: str, call: str):
    """Root may read everything, so that the system's answer is made here."""
    analyses()[[T2M]].to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    monkeypatch.setattr(call, Mock(side_effect=PermissionError(13, "Permission denied")))
    assert "Permission denied" in refusal(str(tmp_path / name))


# -- configurations


def test_a_test_period_is_not_trained_on(tmp_path, truth):
    data = Data(
        path=weatherbench(tmp_path, truth),
        variables=(T2M,),
        validation_period=("2019-12-31", "2019-12-31T06"),
        test_period=("2020-01-01", "2020-01-01"),
    )
    assert open_selection(data, (1, 1), ()).train.tolist() == [1, 2]


# -- regions


def test_a_region_across_the_seam(tmp_path, truth):
    path = file_a_year(tmp_path, truth)
    archive = open_archive(path, region=(80.0, -90.0, -20.0, 50.0))
    assert archive.grid.longitude.tolist() == [-90, -45, 0, 45]
    assert archive.grid.latitude.tolist() == [75, 45, 15, -15]
    expected = truth[T2M].values[:, :4][..., [6, 7, 0, 1]]
    np.testing.assert_array_equal(archive.read_block(0, 5, [T2M])[:, 0], expected)
    with pytest.raises(ConfigError, match="data.region"):
        open_archive(path, region=(10.0, 0.0, 9.0, 1.0))
