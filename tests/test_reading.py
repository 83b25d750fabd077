"""Layouts of foreign files that were read with wrong values, or refused, or refused with a wrong reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from config import Data
from datasets.archive import Archive, open_archive
from datasets.channels import Channels
from datasets.source import OpenFile, decode_times, open_fields
from datasets.variables import (
    expand_levels,
    full_name,
    join_name,
    known_name,
    nearest_name,
    plain_units,
    split_name,
    unit_conversion,
    units,
)
from errors import ConfigError, DataError
from tests.sample_archives import analyses
from tests.test_bad_sources import T2M, on_cells, refusal

HOURS = np.timedelta64(1, "h").astype("timedelta64[ns]")


def opened(path: Path, ds: xr.Dataset, selection: dict[str, str] | None = None, **encoding: Any) -> Archive:
    """Write a file and open it."""
    ds.to_netcdf(path / "a.nc", engine="h5netcdf", encoding=encoding)
    return open_archive(str(path / "a.nc"), selection)


# -- which coordinate has the dates


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
    cfgrib_forecasts(valid, start).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    line = refusal(str(tmp_path / "a.nc"))
    assert "'time'" in line and "'valid_time'" in line and "standard_name" in line
    same = on_cells("t2m").to_dataset()
    same = same.assign_coords(valid_time=("time", same.time.values, valid))
    assert opened(tmp_path, same).times[0] == np.datetime64("2020-01-01")


def test_a_selected_step_is_dated_by_its_valid_time_or_refused(tmp_path):
    ds = cfgrib_forecasts(TIME, START, 3)
    archive = opened(tmp_path, ds, {"step": "12"}, step={"units": "hours", "dtype": "i4"})
    assert archive.times[0] == np.datetime64("2020-01-01T12")
    for number, start in enumerate((START, TIME)):
        ds["time"].attrs = start
        path, encoding = tmp_path / f"{number}.nc", {"step": {"units": "hours", "dtype": "i4"}}
        ds.drop_vars("valid_time").to_netcdf(path, engine="h5netcdf", encoding=encoding)
        with pytest.raises(DataError, match="valid_time"):
            open_archive(str(path), {"step": "12"})
        assert open_archive(str(path), {"step": "0"}).times[0] == np.datetime64("2020-01-01")


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


# -- names


def test_split_and_join():
    wanted = {"geopotential:500": ("geopotential", 500), "2m_temperature": ("2m_temperature", None)}
    for text, parts in wanted.items():
        assert split_name(text) == parts and join_name(*parts) == text


@pytest.mark.parametrize("text", ["", ":500", "z:", "z:high", "z:5:5", "z:-5", "z:0", "z:500.5", " t "])
def test_malformed_names(text: str):
    with pytest.raises(ValueError, match=f"variable {text!r} is not a name or name:level in hPa"):
        split_name(text)


def test_full_names():
    wanted = {
        "z500": "geopotential:500",
        "Z500": "geopotential:500",
        "t_850": "temperature:850",
        "u850hPa": "u_component_of_wind:850",
        "u10hPa": "u_component_of_wind:10",
        "geopotential_500": "geopotential:500",
        "u10": "10m_u_component_of_wind",
        "2t": "2m_temperature",
        "T2M": "2m_temperature",
        "z50": "geopotential:50",
        "2m_temperature": "2m_temperature",
    }
    assert {name: full_name(name) for name in wanted} == wanted
    kept = ["t2", "q2", "Snowman", "snowman500", "channel_3", "geopotential:500", "total_precipitation_6hr"]
    assert [full_name(name) for name in kept] == kept


def test_names_of_cmip():
    names = "tas psl uas vas ta ua va hus zg pr".split()
    upper = "temperature u_component_of_wind v_component_of_wind specific_humidity geopotential".split()
    lower = "2m_temperature mean_sea_level_pressure 10m_u_component_of_wind 10m_v_component_of_wind".split()
    assert [full_name(name) for name in names] == [*lower, *upper, "precipitation_flux"]


def test_units():
    assert units("geopotential:500") == "m2 s-2" and units("2m_temperature") == "K" and units("snowman") == ""


def test_expand_levels():
    names = ["2m_temperature", "geopotential", "temperature:1000"]
    expanded = ["2m_temperature", "geopotential:500", "geopotential:850", "temperature:1000"]
    assert expand_levels(names, [500, 850]) == expanded
    assert expand_levels(names, []) == names and expand_levels([], [500]) == []
    with pytest.raises(ValueError, match="variable 'geopotential:500' is listed twice"):
        expand_levels(["geopotential:500", "geopotential"], [500])
    with pytest.raises(ValueError, match="variable 'geopotential:500' is listed twice"):
        expand_levels(["geopotential"], [500, 850, 500])
    with pytest.raises(ValueError, match="'z:low' is not a name"):
        expand_levels(["z:low"], [500])


def test_a_variable_with_and_without_level_is_listed_once(tmp_path):
    """The store of forecasts wrote one over the other."""
    surface, upper = on_cells("temperature"), on_cells("t").expand_dims(level=[500], axis=1)
    (tmp_path / "a").mkdir()
    for name, array in (("s", surface), ("u", upper)):
        array.to_netcdf(tmp_path / "a" / f"{name}.nc", engine="h5netcdf")
    archive = open_archive(str(tmp_path / "a"))
    np.testing.assert_array_equal(archive.read(0, ["temperature"])[0], surface.values[0])
    np.testing.assert_array_equal(archive.read(0, ["temperature:500"])[0], upper.values[0, 0])
    with pytest.raises(ConfigError, match="temperature is listed with and without a level"):
        Channels.of(Data(variables=("temperature:500",), forcing_variables=("temperature",)))
    assert Channels.of(Data(variables=("temperature",), levels=(500, 850))).variables[1] == "temperature:850"


@pytest.mark.parametrize(
    ("name", "attrs", "expected"),
    [
        ("u80", {"long_name": "80 metre U wind"}, "80m_u_component_of_wind"),
        ("ws100", {"long_name": "wind speed at 100 m"}, "100m_wind_speed"),
        ("u_120", {"GRIB_typeOfLevel": "heightAboveGround"}, "120m_u_component_of_wind"),
        ("t300", {"long_name": "sea water temperature at 300 m depth"}, "t300"),
        ("z500", {"long_name": "geopotential height at 500 hPa in metres"}, "geopotential:500"),
        ("t850", {"long_name": "temperature"}, "temperature:850"),
        ("t", {"GRIB_typeOfLevel": "surface"}, "temperature_at_surface"),
        ("u", {"GRIB_typeOfLevel": "maxWind"}, "u_component_of_wind_at_max_wind"),
        ("t", {}, "temperature"),
    ],
)
def test_heights_and_surfaces_are_no_pressure_levels(tmp_path, name, attrs, expected):
    assert opened(tmp_path, on_cells(name, **attrs).to_dataset()).variables == [expected]


def test_unknown_names_that_are_like_a_known_one():
    wanted = {
        "U10M": "10m_u_component_of_wind",
        "T2M_": None,
        "UGRD_10maboveground": "10m_u_component_of_wind",
        "TMP_2maboveground": "2m_temperature",
        "VGRD_500mb": "v_component_of_wind:500",
        "PRMSL_meansealevel": "mean_sea_level_pressure",
        "2m_temprature": "2m_temperature",
        "geopotential:500": None,
        "channel_3": None,
    }
    assert {name: known_name(name) for name in wanted} == wanted
    assert nearest_name("10m_u_component_of_wind", ["V10M", "U10M"]) == "; nearest: 'U10M'"
    known = ["geopotential:500", "geopotential:850", "2m_temperature"]
    wanted = {"geopotental:500": known[0], "z850": known[1], "t2m": known[2]}
    assert {name: nearest_name(name, known) for name in wanted} == {
        name: f"; nearest: {nearest!r}" for name, nearest in wanted.items()
    }
    assert nearest_name("xyz", known) == f"; it has {known}"


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
    t2m = on_cells("t2m").expand_dims(heightAboveGround=[2.0], axis=1)
    for name, ds in (("u", heights()), ("t2m", t2m)):
        ds.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
    assert "heightAboveGround=10.0" in refusal(str(tmp_path / "u.nc"), "u_component_of_wind")
    archive = open_archive(str(tmp_path / "*.nc"), {"heightAboveGround": "80"})
    name = "80m_u_component_of_wind"
    assert set(archive.variables) == {name, T2M}
    np.testing.assert_array_equal(archive.read(1, [name])[0], heights()["u"].values[1, 1])
    with pytest.raises(ConfigError, match="heightAboveGround has 10.0, 80.0"):
        open_archive(str(tmp_path / "u.nc"), {"heightAboveGround": "100.0"})


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


def test_a_time_axis_of_any_name(tmp_path):
    """`Date` was a dimension of which one should be selected."""
    ds = on_cells("t2m").to_dataset().rename(time="Date")
    for name in ("Date", "when"):
        ds.rename(Date=name).to_netcdf(tmp_path / f"dated_{name}.nc", engine="h5netcdf")
        assert len(open_archive(str(tmp_path / f"dated_{name}.nc")).times) == 3
    starts = ds.rename(Date="init_time")
    starts.to_netcdf(tmp_path / "starts.nc", engine="h5netcdf")
    assert "init_time" in refusal(str(tmp_path / "starts.nc"))
    for name in ("Date", "t"):
        bare = ds.rename(Date=name).assign_coords({name: np.arange(3.0)})
        bare.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
        line = refusal(str(tmp_path / f"{name}.nc"))
        assert "units" in line and "no variable in it has latitude" not in line
        assert ("data.select" in line) == (name == "t")


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
    for more, name in ((0.0, "same"), (0.004 if packing else 1e-7, "rounded"), (3.0, "other")):
        ds = xr.concat([field, again + np.float32(more)], "longitude").to_dataset()
        ds.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf", encoding={"t2m": packing})
        if name == "other":
            assert "360 degrees" in refusal(str(tmp_path / f"{name}.nc"))
        else:
            found = open_archive(str(tmp_path / f"{name}.nc")).read(0, [T2M])[0]
            np.testing.assert_allclose(found, field.values[0], atol=0.006 if packing else 0)


# -- values


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
