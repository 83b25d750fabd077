"""Foreign files that were read with wrong values, or refused, or refused with a wrong reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import xarray as xr
import zarr

from config import Data
from datasets.archive import Archive, open_archive
from datasets.channels import Channels
from datasets.convert import main as convert
from datasets.describe import main as describe
from datasets.selection import open_selection
from datasets.source import OpenFile, decode_times, open_fields
from datasets.statistics import check_static
from datasets.variables import (
    expand_levels,
    full_name,
    known_name,
    nearest_name,
    plain_units,
    split_name,
    unit_conversion,
)
from errors import ConfigError, DataError
from tests.sample_archives import (
    NAMES,
    analyses,
    anemoi,
    file_a_year,
    netcdf,
    values,
    weatherbench,
    zarr_chunked,
)
from tests.started_jobs import small_dataset, small_wave

T2M, U10, Z500 = "2m_temperature", "10m_u_component_of_wind", "geopotential:500"
HOURS = np.timedelta64(1, "h").astype("timedelta64[ns]")


def refusal(path: str, variable: str = T2M) -> str:
    """Return the one line with which opening, checking or reading fails."""
    with pytest.raises((DataError, ConfigError)) as error:
        archive = open_archive(path)
        archive.check([variable])
        archive.read(0, [variable])
    assert "\n" not in str(error.value)
    return str(error.value)


def opened(
    folder: Path, ds: xr.Dataset, selection: dict[str, str] | None = None, encoding: Any = None
) -> Archive:
    return open_archive(netcdf(folder, ds, encoding=encoding), selection)


def read(folder: Path, ds: xr.Dataset, variable: str = T2M) -> np.ndarray:
    """Return all dates (T, H, W) of a variable of a file."""
    archive = opened(folder, ds)
    return archive.read_block(0, len(archive.times), [variable])[:, 0]


def on_cells(name: str, **attrs: str) -> xr.DataArray:
    """Return three dates of a variable on 3 x 4 cells."""
    coords = {"time": np.datetime64("2020-01-01", "ns") + np.arange(3) * np.timedelta64(6, "h")}
    coords |= {"latitude": np.array([60.0, 0, -60]), "longitude": np.arange(0, 360, 90.0)}
    values = np.random.default_rng(len(name)).normal(8, 2, (3, 3, 4)).astype("f4")
    return xr.DataArray(values, coords, [*coords], name=name, attrs=attrs)


# -- dates


def cfgrib_forecasts(valid: dict[str, str], start: dict[str, str], steps: int = 0) -> xr.Dataset:
    """As cfgrib writes forecasts: `time` is the start, `step` a scalar (or `steps` of them), `valid_time` the
    date.
    """
    ds = on_cells("t2m").to_dataset()
    ds["time"] = ("time", ds.time.values, start)
    if steps:
        step = np.arange(steps) * 6 * HOURS
        ds = ds.expand_dims(step=step, axis=1)
        dates = ds.time.values[:, None] + step
        return ds.assign_coords(valid_time=(("time", "step"), dates, valid))
    return ds.assign_coords(step=6 * HOURS, valid_time=("time", ds.time.values + 6 * HOURS, valid))


TIME, START = {"standard_name": "time"}, {"standard_name": "forecast_reference_time"}


@pytest.mark.parametrize(("valid", "start"), [(TIME, START), ({}, START), (TIME, {})])
def test_the_date_of_a_forecast_is_its_valid_time(tmp_path, valid, start):
    """Every field was dated 6 h early, without a word."""
    archive = opened(tmp_path, cfgrib_forecasts(valid, start))
    first = np.datetime64("2020-01-01T06", "s")
    np.testing.assert_array_equal(archive.times, first + np.arange(3) * np.timedelta64(6, "h"))


@pytest.mark.parametrize(("valid", "start"), [({}, {}), (TIME, TIME)])
def test_two_different_dates_are_refused_where_neither_or_both_say_so(tmp_path, valid, start):
    line = refusal(netcdf(tmp_path, cfgrib_forecasts(valid, start)))
    assert "'time'" in line and "'valid_time'" in line and "standard_name" in line
    same = on_cells("t2m").to_dataset()
    same = same.assign_coords(valid_time=("time", same.time.values, valid))
    assert opened(tmp_path, same).times[0] == np.datetime64("2020-01-01")


def test_a_selected_step_is_dated_by_its_valid_time_or_refused(tmp_path):
    ds = cfgrib_forecasts(TIME, START, 3)
    hours = {"step": {"units": "hours", "dtype": "i4"}}
    archive = opened(tmp_path, ds, {"step": "12"}, hours)
    assert archive.times[0] == np.datetime64("2020-01-01T12")
    for number, start in enumerate((START, TIME)):
        ds["time"].attrs = start
        path = netcdf(tmp_path, ds.drop_vars("valid_time"), f"{number}.nc", hours)
        with pytest.raises(DataError, match="valid_time"):
            open_archive(path, {"step": "12"})
        assert open_archive(path, {"step": "0"}).times[0] == np.datetime64("2020-01-01")


# The dates are those that cftime 1.6.6 gives.
@pytest.mark.parametrize(
    ("value", "units", "calendar", "date"),
    [
        (17067072.0, "hours since 1-1-1 00:00:0.0", None, "1948-01-01T00"),
        (711128, "days since 0001-01-01", None, "1948-01-01T00"),
        (711126, "days since 0001-01-01", "proleptic_gregorian", "1948-01-01T00"),
        (711128.25, "days since 0001-01-01 00:00:00", "gregorian", "1948-01-01T06"),
        (711128 + 1 / 3, "days since 1-1-1", None, "1948-01-01T08"),
        (200000, "days since 1400-03-01", "standard", "1947-10-09T00"),
        (200000, "days since 1400-02-28", "standard", "1947-10-07T00"),
        (150000, "days since 1582-10-04", "standard", "1993-06-21T00"),
        (150000, "days since 1582-10-15", "standard", "1993-06-22T00"),
        (150000 * 24, "hours since 1600-01-01 06:00", "standard", "2010-09-08T06"),
        (150000 * 86400, "seconds since 1600-01-01", "proleptic_gregorian", "2010-09-08T00"),
        (6, "hours since 1900-1-1", None, "1900-01-01T06"),
        (6, "hours since 1900-01-01 00:00:0.0", None, "1900-01-01T06"),
        (6, "hours since 1900-01-01T00:00:00Z", None, "1900-01-01T06"),
        (0, "hours since 1900-01-01 00:00 UTC", None, "1900-01-01T00"),
        (0, "hours since 1900-01-01 00:00:00 +02:00", None, "1899-12-31T22"),
        (0, "hours since 1900-01-01 06:00:00 -6:00", None, "1900-01-01T12"),
        (0, "hours since 1900-01-01T06:00-0600", None, "1900-01-01T12"),
        (0.25, "days since 2000-02-29", None, "2000-02-29T06"),
        (9 * 10**9, "seconds since 1970-01-01", None, "2255-03-14T16"),
    ],
)
def test_times_count_from_a_date_in_utc(value, units, calendar, date):
    """NCEP's older files count from the year 1; the standard calendar is Julian before 15 October 1582."""
    attrs = {"units": units} | ({"calendar": calendar} if calendar else {})
    assert decode_times(xr.Variable("time", [value], attrs))[0] == np.datetime64(date, "s")


@pytest.mark.parametrize(
    ("units", "calendar", "said"),
    [
        *(("days since 2000-01-01", calendar, calendar) for calendar in ("noleap", "360_day", "julian")),
        ("days since 1582-10-10", "standard", "standard"),  # a day that never was
        ("months since 2000-01-01", "standard", "its time has"),
        ("hours since 1900-01-01 00:00 Central European", "standard", "its time has"),
    ],
)
def test_other_times_are_refused(units, calendar, said):
    with pytest.raises(DataError, match=said) as error:
        decode_times(xr.Variable("time", [150000], {"units": units, "calendar": calendar}))
    assert ("convert_calendar" in str(error.value)) == (calendar != "standard")


@pytest.mark.parametrize("reftime", [np.float64(0), np.array(["2020-01-01"] * 3, "S10")])
def test_a_reference_time_is_no_reason_to_rename_variables(tmp_path, reftime):
    """A numeric one (THREDDS) was a TypeError; with text, t of gfs_20200101.nc was temperature:20200101."""
    ds = on_cells("t").to_dataset().rename(t="t2m")
    ds["reftime"] = ("time" if np.ndim(reftime) else (), reftime, {"units": "Hour since 2020-01-01"})
    ds.to_netcdf(tmp_path / "gfs_20200101.nc", engine="h5netcdf")
    assert open_archive(str(tmp_path / "gfs_20200101.nc")).variables == [T2M]


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


def test_a_time_axis_of_any_name(tmp_path):
    """`Date` was a dimension of which one should be selected."""
    ds = on_cells("t2m").to_dataset()
    for name in ("Date", "when"):
        assert len(opened(tmp_path, ds.rename(time=name)).times) == 3
    assert "init_time" in refusal(netcdf(tmp_path, ds.rename(time="init_time")))
    for name in ("Date", "t"):
        bare = ds.rename(time=name).assign_coords({name: np.arange(3.0)})
        line = refusal(netcdf(tmp_path, bare, f"{name}.nc"))
        assert "units" in line and "no variable in it has latitude" not in line
        assert ("data.select" in line) == (name == "t")


# -- names


@pytest.mark.parametrize("text", ["", ":500", "z:", "z:high", "z:5:5", "z:-5", "z:0", "z:500.5", " t "])
def test_malformed_names(text: str):
    with pytest.raises(ValueError, match=f"variable {text!r} is not a name or name:level in hPa"):
        split_name(text)


def test_full_names():
    """As files have them, CMIP's too."""
    wanted = {
        "geopotential": "zg",
        "geopotential:50": "z50",
        "geopotential:500": "z500 Z500 geopotential_500 geopotential:500",
        "temperature": "ta",
        "temperature:850": "t_850",
        "u_component_of_wind": "ua",
        "u_component_of_wind:10": "u10hPa",
        "u_component_of_wind:850": "u850hPa",
        "v_component_of_wind": "va",
        "specific_humidity": "hus",
        "10m_u_component_of_wind": "u10 uas",
        "10m_v_component_of_wind": "vas",
        "2m_temperature": "2t T2M 2m_temperature tas",
        "mean_sea_level_pressure": "psl",
        "precipitation_flux": "pr",
    }
    for name, spellings in wanted.items():
        assert {full_name(each) for each in spellings.split()} == {name}
    for kept in ("t2", "q2", "Snowman", "snowman500", "channel_3", "total_precipitation_6hr"):
        assert full_name(kept) == kept


def test_expand_levels():
    names = [T2M, "geopotential", "temperature:1000"]
    expanded = [T2M, "geopotential:500", "geopotential:850", "temperature:1000"]
    assert expand_levels(names, [500, 850]) == expanded
    assert expand_levels(names, []) == names and expand_levels([], [500]) == []
    for twice, levels in ((["geopotential:500", "geopotential"], [500]), (["geopotential"], [500, 850, 500])):
        with pytest.raises(ValueError, match="variable 'geopotential:500' is listed twice"):
            expand_levels(twice, levels)


def test_a_variable_with_and_without_level_is_listed_once(tmp_path):
    """The store of forecasts wrote one over the other."""
    surface, upper = on_cells("temperature"), on_cells("t").expand_dims(level=[500], axis=1)
    for name, array in (("s.nc", surface), ("u.nc", upper)):
        netcdf(tmp_path, array, name)
    archive = open_archive(str(tmp_path))
    np.testing.assert_array_equal(archive.read(0, ["temperature"])[0], surface.values[0])
    np.testing.assert_array_equal(archive.read(0, ["temperature:500"])[0], upper.values[0, 0])
    with pytest.raises(ConfigError, match="temperature is listed with and without a level"):
        Channels.of(Data(variables=("temperature:500",), forcing_variables=("temperature",)))
    assert Channels.of(Data(variables=("temperature",), levels=(500, 850))).variables[1] == "temperature:850"


@pytest.mark.parametrize(
    ("names", "about", "expected"),
    [
        (["u100", "u50", "u150"], {}, "u_component_of_wind:100"),
        (["u100", "v100"], {}, "100m_u_component_of_wind"),
        (["u100", "t100", "t850"], {}, "u_component_of_wind:100"),
        (["u100", "u500"], {"long_name": "100 metre U wind component"}, "100m_u_component_of_wind"),
        (["u100", "u50", "u150"], {"long_name": "wind at 100 m"}, "100m_u_component_of_wind"),
        (["u100", "v100"], {"GRIB_typeOfLevel": "isobaricInhPa"}, "u_component_of_wind:100"),
        (["u100", "u500"], {}, ""),
        (["u10", "u500", "u850"], {}, "10m_u_component_of_wind"),
        (["u10", "u5hpa", "u20", "u50"], {}, "u_component_of_wind:10"),
        (["u80"], {"long_name": "80 metre U wind"}, "80m_u_component_of_wind"),
        (["ws100"], {"long_name": "wind speed at 100 m"}, "100m_wind_speed"),
        (["u_120"], {"GRIB_typeOfLevel": "heightAboveGround"}, "120m_u_component_of_wind"),
        (["t300"], {"long_name": "sea water temperature at 300 m depth"}, "t300"),
        (["z500"], {"long_name": "geopotential height at 500 hPa in metres"}, "geopotential:500"),
        (["t850"], {"long_name": "temperature"}, "temperature:850"),
        (["t"], {"GRIB_typeOfLevel": "surface"}, "temperature_at_surface"),
        (["u"], {"GRIB_typeOfLevel": "maxWind"}, "u_component_of_wind_at_max_wind"),
        (["t"], {}, "temperature"),
    ],
)
def test_a_number_in_a_name_is_in_metres_or_hectopascals(tmp_path, names, about, expected):
    """u100 next to u50 and u150 became the wind 100 m above the ground."""
    first, *others = on_cells(names[0], **about), *map(on_cells, names[1:])
    path = netcdf(tmp_path, xr.merge([first, *others]))
    if expected:
        np.testing.assert_array_equal(open_archive(path).read(1, [expected])[0], first.values[1])
        assert len(open_archive(path).variables) == len(names)
        return
    assert not [name for name in open_archive(path).variables if name.startswith("100m")]
    line = refusal(path, "100m_u_component_of_wind")
    assert "100m_u_component_of_wind or u_component_of_wind:100" in line


def test_unknown_names_that_are_like_a_known_one():
    wanted = {
        "U10M": U10,
        "T2M_": None,
        "UGRD_10maboveground": U10,
        "TMP_2maboveground": T2M,
        "VGRD_500mb": "v_component_of_wind:500",
        "PRMSL_meansealevel": "mean_sea_level_pressure",
        "2m_temprature": T2M,
        Z500: None,
        "channel_3": None,
    }
    assert {name: known_name(name) for name in wanted} == wanted
    known = [Z500, "geopotential:850", T2M]
    near = {"geopotental:500": f"; nearest: {Z500!r}", "z850": f"; nearest: {known[1]!r}"}
    near |= {"t2m": f"; nearest: {T2M!r}", "xyz": f"; it has {known}"}
    assert {name: nearest_name(name, known) for name in near} == near
    assert nearest_name(U10, ["V10M", "U10M"]) == "; nearest: 'U10M'"


# -- selections


def heights() -> xr.Dataset:
    """Winds at two heights, as of GRIB."""
    u = on_cells("u", GRIB_typeOfLevel="heightAboveGround")
    labels = xr.DataArray([10.0, 80.0], dims="heightAboveGround", name="heightAboveGround")
    return xr.concat([u, u + 5], labels).transpose("time", "heightAboveGround", ...).to_dataset()


def test_a_selection_applies_to_the_arrays_that_have_the_label(tmp_path):
    """The advice heightAboveGround=80.0 was refused because another array has 2.0. One with a single height
    has it in its name, and is no choice.
    """
    path = netcdf(tmp_path, heights(), "u.nc")
    name = "80m_u_component_of_wind"
    netcdf(tmp_path, on_cells("t2m").expand_dims(heightAboveGround=[2.0], axis=1), "t2m.nc")
    assert "heightAboveGround=10.0" in refusal(path, "u_component_of_wind")
    archive = open_archive(str(tmp_path / "*.nc"), {"heightAboveGround": "80"})
    assert set(archive.variables) == {name, T2M}
    np.testing.assert_array_equal(archive.read(1, [name])[0], heights()["u"].values[1, 1])
    with pytest.raises(ConfigError, match="heightAboveGround has 10.0, 80.0"):
        open_archive(path, {"heightAboveGround": "100.0"})


def test_an_array_without_the_selected_label_is_left_out_with_the_reason(tmp_path):
    """As of GRIB, where two kinds of levels have a dimension of one name."""
    members = [
        on_cells(name).expand_dims(m=labels, axis=1) for name, labels in (("t2m", [0, 1]), ("sp", [5, 6]))
    ]
    kinds = [OpenFile("a.grib", each.to_dataset().variables, {}) for each in members]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.source.open_files", lambda path, access: kinds)
        fields, unreadable = open_fields("a.grib", {"m": "1"})
        assert [field.names for field in fields] == [(T2M,)]
        assert "5, 6" in unreadable["surface_pressure"]
        with pytest.raises(ConfigError, match="m has 0, 1, 5, 6"):
            open_fields("a.grib", {"m": "7"})


# -- coordinates


@pytest.mark.parametrize("names", [("y", "x"), ("latitude", "longitude"), ("rows", "columns")])
def test_coordinates_are_found_by_units_and_along_other_dimensions(tmp_path, names):
    """latitude(y) and longitude(x) of a regular grid, and a y in degrees_north, were not found."""
    field = on_cells("t2m")
    ds = field.rename(latitude="y", longitude="x").to_dataset()
    ds = ds.rename(dict(zip(("y", "x"), names, strict=True))) if names[0] == "rows" else ds
    degrees = {"units": "degrees_north"}, {"units": "degree_E"}
    for dim, name, attrs in zip(field.dims[1:], names, degrees, strict=True):
        along = name if name in ds.dims else dict(latitude="y", longitude="x")[str(dim)]
        values = field[dim].values
        ds = ds.drop_vars(along).assign_coords({name: (along, values, attrs)})
    archive = opened(tmp_path, ds)
    np.testing.assert_array_equal(archive.read(1, [T2M])[0], field.values[1])


def test_versions_count_by_their_label(tmp_path):
    """Stored as 5, 1, preliminary data won over final ones."""
    final, preliminary = on_cells("t2m"), on_cells("t2m") + 1
    final[2] = np.nan
    labels = xr.DataArray([5, 1], dims="expver", name="expver")
    both = xr.concat([preliminary, final], labels).transpose("time", "expver", ...)
    found = opened(tmp_path, both.to_dataset()).read_block(0, 3, [T2M])[:, 0]
    np.testing.assert_array_equal(found, final.fillna(preliminary))


@pytest.mark.parametrize("packing", [{}, {"dtype": "i2", "scale_factor": 0.01, "add_offset": 0.0}])
def test_a_repeated_column_is_compared_with_the_first(tmp_path, packing):
    """3 K apart, it was dropped without a word."""
    field = on_cells("t2m")
    again = field.isel(longitude=[0]).assign_coords(longitude=[360.0])
    for more in (0.0, 0.004 if packing else 1e-7, 3.0):
        ds = xr.concat([field, again + np.float32(more)], "longitude").to_dataset()
        path = netcdf(tmp_path, ds, f"{more}.nc", {"t2m": packing})
        if more == 3:
            assert "360 degrees" in refusal(path)
        else:
            np.testing.assert_allclose(
                open_archive(path).read(0, [T2M])[0], field[0], atol=0.006 if packing else 0
            )


def test_packed_coordinates_are_unpacked(tmp_path):
    """Dates, degrees and hPa were read as they are stored (CF 8.1)."""
    ds = analyses()[["temperature"]]
    packing = {"latitude": (0.5, 3.0), "longitude": (0.5, 0.0), "level": (10.0, 0.0), "time": (0.25, 0.0)}
    plain = ds.assign_coords(time=np.arange(5) / 4)
    for name, (scale, offset) in packing.items():
        stored = (plain[name].values - offset) / scale
        ds = ds.assign_coords({name: (name, stored, {"scale_factor": scale, "add_offset": offset})})
    ds["time"].attrs["units"] = "days since 2019-12-31T06:00:00"
    found, plain = opened(tmp_path, ds), open_archive(weatherbench(tmp_path, analyses()))
    assert found.grid.same_as(plain.grid) and (found.times == plain.times).all()
    assert found.variables == [name for name in plain.variables if name.startswith("temperature")]


@pytest.mark.parametrize(
    ("levels", "units"), [([50, 85, 100], "kPa"), ([0.5, 0.85, 1.0], "bar"), ([50000, 85000, 100000], "Pa")]
)
def test_levels_of_other_pressures_are_converted(tmp_path, truth, levels, units):
    archive = opened(tmp_path, truth.assign_coords(level=("level", np.array(levels, "f8"), {"units": units})))
    np.testing.assert_array_equal(archive.read_block(0, 5, NAMES), values(truth))


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
    path = netcdf(tmp_path, xr.merge([t2m, upper]))
    archive = open_archive(path)
    np.testing.assert_array_equal(archive.read(1, [T2M])[0], t2m.values[1])
    if attrs["units"] == "level":
        assert "'lev'" in refusal(path, "temperature:100")
        return
    assert archive.variables == [T2M, "temperature:100"] and list(archive.unreadable) == ["temperature:0.4"]
    np.testing.assert_array_equal(archive.read(1, ["temperature:100"])[0], upper.values[1, 1])


def test_a_region_across_the_seam(tmp_path, truth):
    path = file_a_year(tmp_path, truth)
    archive = open_archive(path, region=(80.0, -90.0, -20.0, 50.0))
    assert archive.grid.longitude.tolist() == [-90, -45, 0, 45]
    assert archive.grid.latitude.tolist() == [75, 45, 15, -15]
    expected = truth[T2M].values[:, :4][..., [6, 7, 0, 1]]
    np.testing.assert_array_equal(archive.read_block(0, 5, [T2M])[:, 0], expected)
    with pytest.raises(ConfigError, match="data.region"):
        open_archive(path, region=(10.0, 0.0, 9.0, 1.0))


# -- units


def with_units(ds: xr.Dataset, name: str, units: str, factor: float = 1.0) -> xr.Dataset:
    return ds.assign({name: (ds[name] * factor).assign_attrs(units=units)})


@pytest.mark.parametrize(
    ("name", "units", "factor", "offset"),
    [
        (T2M, "degC", 1.0, 273.15),
        (T2M, "celsius", 1.0, 273.15),
        (T2M, "degF", 5 / 9, 459.67 * 5 / 9),
        ("surface_pressure", "kPa", 1000.0, 0.0),
        (U10, "km h-1", 1 / 3.6, 0.0),
        (U10, "knots", 1852 / 3600, 0.0),
        ("total_precipitation", "cm", 0.01, 0.0),
        ("mean_sea_level_pressure", "hPa", 100.0, 0.0),
        ("geopotential:500", "gpm", 9.80665, 0.0),
        ("geopotential:500", "m**2 s**-2", 1.0, 0.0),
        ("specific_humidity:500", "g/kg", 1e-3, 0.0),
        # Capitals on levels kept their name, and missed the conversion.
        ("T:500", "degC", 1.0, 273.15),
        ("U:500", "knots", 1852 / 3600, 0.0),
        ("Q:500", "g/kg", 1e-3, 0.0),
    ],
)
def test_known_units_are_converted(tmp_path, truth, name, units, factor, offset):
    name, _, level = name.partition(":")
    source = "geopotential" if level else T2M
    ds = with_units(truth[[source]].rename({source: name}), name, units)
    full = f"{full_name(name)}:500" if level else name
    field = truth[source].isel(level=0) if level else truth[source]
    expected = field.values.astype("f8") * factor + offset
    np.testing.assert_allclose(read(tmp_path, ds, full), expected, rtol=1e-6, atol=1e-6)


def test_units_that_differ_between_files_are_converted_or_refused(tmp_path, truth):
    """Refused where the variable is unknown."""
    for year, part in truth.rename({T2M: "own"}).groupby("time.year"):
        units, factor, other = ("m", 1 / 9.80665, "mm") if year == 2020 else ("m2 s-2", 1.0, "m")
        part = with_units(part, "geopotential", units, factor)
        netcdf(tmp_path, with_units(part, "own", other), f"{year}.nc")
    archive = open_archive(str(tmp_path))
    archive.check([Z500])
    block = archive.read_block(0, 5, [Z500])[:, 0]
    np.testing.assert_allclose(block, truth.geopotential.sel(level=500), rtol=1e-6, atol=1e-6)
    assert archive.units(Z500) == "m2 s-2"
    text = refusal(str(tmp_path), "own")
    assert "'mm'" in text and "'m'" in text


@pytest.mark.parametrize(
    ("spellings", "plain"),
    [
        ("m s^-1|m.s-1|m/s|m s**-1|meters/second|m*s-1|m s-1|metre s-1", "m s-1"),
        ("kg kg^-1|kg/kg|kg kg**-1|kg.kg-1", "kg kg-1"),
        ("m2/s2|m**2 s**-2|m^2 s^-2|m2.s-2|m^2/s^2", "m2 s-2"),
        ("degrees K|K|kelvin|degrees_kelvin|deg K", "K"),
        ("deg C|degC|degrees C|Celsius|degree_C", "degC"),
        ("mm/day|mm day-1|mm d-1|mm.day^-1", "mm day-1"),
        ("kg/m2/s|kg m**-2 s**-1|kg m-2 s-1", "kg m-2 s-1"),
        ("furlong per fortnight!", "furlong per fortnight!"),
        ("1|(0 - 1)|-|~|fraction", "1"),
    ],
)
def test_spellings_of_units(spellings, plain):
    assert {plain_units(text) for text in spellings.split("|")} == {plain}


def test_units_of_energy_and_of_rain():
    assert unit_conversion("geopotential:500", "J kg-1")[1] == (1.0, 0.0)
    assert unit_conversion("precipitation_flux", "mm/day")[1] == (1 / 86400, 0.0)
    assert unit_conversion("total_precipitation_24hr", "mm/day")[1] == (1e-3, 0.0)
    with pytest.raises(DataError):  # of how many hours?
        unit_conversion("total_precipitation", "mm/day")


# -- packed numbers and fill values


def packed(stored: np.ndarray, **attributes: Any) -> xr.Dataset:
    """The temperature of the analyses as numbers (5, 6, 8) of any type."""
    ds = analyses()[[T2M]]
    return ds.assign({T2M: (ds[T2M].dims, stored, attributes)})


def test_unsigned_integers_and_their_fill_values(tmp_path):
    """`_Unsigned = "true"`: stored -1 is 65535. A fill value may be written as unsigned, too."""
    stored = np.full((5, 6, 8), -1, "i2")
    stored[0] = 100
    block = read(tmp_path, packed(stored, scale_factor=0.01, _Unsigned="true"))
    np.testing.assert_allclose(block[0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(block[1:], 655.35, rtol=1e-6)
    stored = np.full((5, 6, 8), 2731, "i2")
    stored[1, 2, 3] = -32767
    block = read(tmp_path, packed(stored, scale_factor=0.1, missing_value=np.int32(32769)))
    assert np.isnan(block[1, 2, 3]) and np.isfinite(block).sum() == block.size - 1


@pytest.mark.parametrize("fill", [None, 0])
def test_a_packed_number_that_is_the_fill_value_of_zarr_is_read(tmp_path, fill, caplog):
    """Zarr 3 does not write chunks of it: a constant field was missing. With _FillValue = 0 it is."""
    ds = analyses()[[T2M]].fillna(280)
    ds[T2M][1] = 250
    packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 250.0, "_FillValue": fill}
    encoding = {T2M: packing | {"chunks": (1, 6, 8)}}
    ds.to_zarr(tmp_path / "a.zarr", zarr_format=3, encoding=encoding, consolidated=False)
    group: Any = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert group[T2M].nchunks_initialized == 4
    found = open_archive(str(tmp_path / "a.zarr")).read(1, [T2M])
    assert np.isnan(found).all() if fill == 0 else (found == 250).all()


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


@pytest.mark.parametrize("fill", ["-9999", "none"])
def test_a_fill_value_that_is_text_is_a_number_or_leaves_one_variable_out(tmp_path, fill):
    """The whole file was refused, with an error of struct that named neither variable nor attribute."""
    ds = analyses()[[T2M, "geopotential"]].fillna(-9999)
    ds[T2M].attrs["missing_value"] = fill
    archive = opened(tmp_path, ds, encoding={T2M: {"_FillValue": None}})
    assert archive.read(2, [Z500]).shape == (1, 6, 8)
    if fill == "none":
        assert "'none' is no number" in archive.unreadable[T2M]
    else:
        assert np.isnan(archive.read(2, [T2M])).sum() == 2


def test_static_fields_are_checked_like_others(caplog):
    mask = np.eye(4, 6, dtype="f4")
    check_static({"land_sea_mask": mask}, "a.nc")
    assert not caplog.messages
    for holes, words in ((np.inf, "infinite in 4 cells"), (-9999, "-9999 in 4 cells")):
        with pytest.raises(DataError, match=f"land_sea_mask is {words}"):
            check_static({"land_sea_mask": np.where(mask > 0, holes, 0)}, "a.nc")
    with pytest.raises(DataError, match="land_sea_mask is missing in all cells"):
        check_static({"land_sea_mask": mask * np.nan}, "a.nc")
    check_static({"land_sea_mask": np.where(mask > 0, np.nan, mask)}, "a.nc")
    assert "16.7 % of its cells are missing" in caplog.text


def test_a_store_that_is_written_again_is_read_again(tmp_path):
    """In one process, as in a notebook: its files were kept open, and decoded with the new offset."""
    source, target, ds = tmp_path / "a.nc", tmp_path / "a.zarr", analyses()[[T2M]].fillna(280)
    for factor in (1, 2):
        (ds * factor).assign_attrs(units="K").to_netcdf(source, engine="h5netcdf")
        shutil.rmtree(target, ignore_errors=True)
        convert([str(source), str(target)])
        found = open_archive(str(target)).read(2, [T2M])[0]
        np.testing.assert_allclose(found, factor * ds[T2M].values[2], rtol=1e-3)


# -- files that differ


def test_all_dates_that_files_have_in_common_can_be_compared(tmp_path, capsys):
    """Some of sixty dates are compared when a run starts, and the newest."""
    ds = small_dataset({U10: small_wave(60)})
    for name, date in (("a", None), ("b", 20), ("c", 58), ("d", None)):
        changed = ds.copy(deep=True)
        if date:
            changed[U10][date] += 1
        netcdf(tmp_path, changed, f"{name}.nc")
    for names, at_start, at_all in (("ab", False, True), ("ac", True, True), ("ad", False, False)):
        paths = str(tmp_path / f"[{names}].nc")
        if at_start:
            line = refusal(paths, U10)
            assert "has different values" in line and "2020-01-15T12:00:00" in line
            assert "a.nc" in line and "c.nc" in line
        else:
            open_archive(paths).check([U10])
            assert len(open_archive(paths).times) == 60
        assert describe([paths, "--all"]) == at_all
        assert ("has different values" in capsys.readouterr().out) == at_all


def test_a_file_that_is_left_out_is_named(tmp_path, caplog):
    """A later year with dates that cannot be read was not there, without a word."""
    first = on_cells("t2m").to_dataset()
    later = first.drop_vars("time").assign_coords(time=("time", np.arange(3.0), {"units": "fortnights"}))
    for name, ds in (("first.nc", first), ("later.nc", later)):
        netcdf(tmp_path, ds, name)
    open_archive(str(tmp_path)).check([T2M])
    assert "an array of 2m_temperature is left out: its time has units 'fortnights'" in caplog.text


def test_static_fields_that_differ_are_refused(tmp_path):
    """The first file's was taken, without a word."""
    for year, value in ((2000, 0.0), (2001, 0.0), (2002, 1.0)):
        ds = on_cells("t2m").to_dataset()
        ds = ds.assign_coords(time=ds.time + np.timedelta64(365 * (year - 2000), "D"))
        netcdf(tmp_path, ds.assign(lsm=ds["t2m"][0].drop_vars("time") * 0 + value), f"{year}.nc")
    assert (open_archive(str(tmp_path / "200[01].nc")).read_static("land_sea_mask") == 0).all()
    with pytest.raises(DataError, match="land_sea_mask differs between .*2002.nc and .*2000.nc"):
        open_archive(str(tmp_path / "*.nc")).read_static("land_sea_mask")


# -- what is refused


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


def with_coordinate(name: str, numbers: Any, units: str = "") -> Callable[[xr.Dataset], xr.Dataset]:
    return lambda ds: ds.assign_coords(
        {name: (name, np.array(numbers, "f8"), {"units": units} if units else {})}
    )


def with_scale(scale: Any) -> Callable[[xr.Dataset], xr.Dataset]:
    return lambda _: packed(np.zeros((5, 6, 8), "i2"), scale_factor=scale)


def in_radians(ds: xr.Dataset) -> xr.Dataset:
    return ds.assign_coords({name: np.deg2rad(ds[name]) for name in ("latitude", "longitude")})


NONE = float("nan")

OF_OTHER_TYPE = packed(np.zeros((5, 6, 8), "i2"), scale_factor=0.1, missing_value=1e20)
REFUSED = {  # how the analyses are changed, the variable that is read, words of the line
    "a speed": (lambda ds: with_units(ds, T2M, "m s-1"), T2M, ["'m s-1'", "'K'"]),
    "a temperature": (lambda ds: with_units(ds, "geopotential", "K"), Z500, ["'K'", "'m2 s-2'"]),
    "no units": (lambda ds: with_units(ds, T2M, "furlong"), T2M, ["'furlong'", "'K'"]),
    "two scales": (with_scale(np.array([1.0, 2.0])), T2M, ["scale_factor"]),
    "a scale of NaN": (with_scale(np.nan), T2M, ["scale_factor"]),
    "a scale of text": (with_scale("ten"), T2M, ["scale_factor"]),
    "a fill of another type": (
        lambda _: OF_OTHER_TYPE,
        T2M,
        ["_FillValue 1e+20 does not fit its type int16"],
    ),
    "radians": (in_radians, T2M, ["latitude from -1.309 to 1.309 is in radians"]),
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
    text = refusal(netcdf(tmp_path, change(truth)), variable)
    assert all(word in text for word in words), text


def test_cells_of_a_rotated_grid_are_no_rows(tmp_path, truth):
    group: Any = zarr.open_group(path := anemoi(tmp_path, truth), mode="r+")
    group["latitudes"][:] = group["latitudes"][:] + 0.1 * group["longitudes"][:]
    assert "regrid" in refusal(path)


@pytest.mark.parametrize(("name", "call"), [("", "datasets.source.os.listdir"), ("a.nc", "builtins.open")])
def test_what_may_not_be_read_is_one_line(tmp_path, monkeypatch, name: str, call: str):
    """Root may read everything, so that the system's answer is made here."""
    analyses()[[T2M]].to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    monkeypatch.setattr(call, Mock(side_effect=PermissionError(13, "Permission denied")))
    assert "Permission denied" in refusal(str(tmp_path / name))


def test_a_test_period_is_not_trained_on(tmp_path, truth):
    data = Data(
        path=weatherbench(tmp_path, truth),
        variables=(T2M,),
        validation_period=("2019-12-31", "2019-12-31T06"),
        test_period=("2020-01-01", "2020-01-01"),
    )
    assert open_selection(data, (1, 1), ()).train.tolist() == [1, 2]
