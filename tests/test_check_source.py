"""datasets.convert --check: sources with one thing wrong each, and the row that says so."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from conversion.field_watch import upside_down
from datasets.convert import main
from tests.sample_archives import file_a_year
from tests.test_archive import needs

T2M = "2m_temperature"


def waves(dates: int = 12) -> xr.Dataset:
    """Slowly moving waves on a temperature that falls from south to north."""
    time = np.datetime64("2019-12-30", "ns") + np.arange(dates) * np.timedelta64(6, "h")
    latitude, longitude = np.arange(75.0, -80, -30), np.arange(0, 360, 45.0)
    phase = np.deg2rad(longitude)[None, None] + 0.1 * np.arange(dates)[:, None, None]
    field = 280 - 0.2 * latitude[None, :, None] + 5 * np.cos(phase)
    coords = {"time": time, "latitude": latitude, "longitude": longitude}
    return xr.Dataset({name: (tuple(coords), field.astype("f4")) for name in (T2M, "skt")}, coords)


def missing_date(ds: xr.Dataset) -> xr.Dataset:
    return ds.isel(time=[*range(4), *range(5, 12)])


def repeated_date(ds: xr.Dataset) -> xr.Dataset:
    return ds.isel(time=[0, 1, 1, *range(2, 12)])


def other_units(ds: xr.Dataset) -> xr.Dataset:
    return ds.assign({T2M: (ds[T2M] - 273.15).assign_attrs(units="degC")})


def undeclared_fill(ds: xr.Dataset) -> xr.Dataset:
    ds[T2M][6:, :2, :2] = -9999
    return ds


def constant(ds: xr.Dataset) -> xr.Dataset:
    ds[T2M][5] = 273.0
    return ds


def repeated_field(ds: xr.Dataset) -> xr.Dataset:
    ds[T2M][8] = ds[T2M][7]
    return ds


def upside_down_from_the_ninth(ds: xr.Dataset) -> xr.Dataset:
    ds[T2M][8:11] = ds[T2M].values[8:11, ::-1]
    return ds


def no_value(ds: xr.Dataset) -> xr.Dataset:
    ds[T2M][2] = np.nan
    return ds


def other_holes(ds: xr.Dataset) -> xr.Dataset:
    ds[T2M][:, 0, 0] = np.nan
    ds[T2M][3, 0, 1:5] = np.nan
    return ds


def infinite(ds: xr.Dataset) -> xr.Dataset:
    ds[T2M][4, 1, 1] = np.inf
    return ds


CASES = [
    (missing_date, "dates missing", "2019-12-31T00", 1),
    (repeated_date, "dates that are there again", "2019-12-30T06", 1),
    (other_units, "units 'degC', where 'K' is known", "", 1),
    (other_units, "values outside 170 to 340 K", "2019-12-30T00", 12),
    (undeclared_fill, "-9999, a missing value that nothing declares", "2019-12-31T12", 6),
    (constant, "one value everywhere", "2019-12-31T06", 1),
    (repeated_field, "the same field as on the date before", "2020-01-01T00", 1),
    (upside_down_from_the_ninth, "upside down", "2020-01-01T00", 3),
    (no_value, "no value at all", "2019-12-30T12", 1),
    (other_holes, "other cells without a value than on most dates (5, not 1)", "2019-12-30T18", 1),
    (infinite, "infinite values", "2019-12-31T00", 1),
]


def check(path: str, capsys: pytest.CaptureFixture, *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main([path, "--check", *options])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("wrong, what, first, count", CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_wrong_has_its_row(
    wrong: Callable, what: str, first: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    wrong(waves()).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    code, lines = check(str(tmp_path / "a.nc"), capsys)
    (row,) = [line for line in lines if line.startswith(what)]
    assert code == 1 and row.endswith(f" {count}") and first in row
    assert len(lines) - 2 == (2 if wrong in (other_units, undeclared_fill) else 1), lines


def test_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also where a file runs the other way and its coordinate says so."""
    ds = waves()
    ds.isel(time=slice(0, 6)).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    rest = ds.isel(time=slice(6, 12), latitude=slice(None, None, -1))
    rest.to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    code, lines = check(str(tmp_path), capsys)
    assert (code, lines) == (0, ["checked: 12 dates of 2 variables; nothing found"])


def test_a_file_cut_short_and_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pattern = file_a_year(tmp_path, waves())
    last = tmp_path / "era5_2020.nc"
    last.write_bytes(last.read_bytes()[:-2000])
    code, lines = check(pattern, capsys)
    assert code == 1 and any("truncated" in line and "era5_2020.nc" in line for line in lines), lines
    assert lines[-1].startswith("checked: 8 dates of 2 variables")


def test_a_damaged_chunk_is_found_and_the_rest_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ds = waves()
    encoding = {name: {"chunks": (1, 6, 8)} for name in ds.data_vars}
    ds.to_zarr(tmp_path / "a.zarr", zarr_format=2, encoding=encoding)
    chunk = tmp_path / "a.zarr" / T2M / "3.0.0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    code, lines = check(str(tmp_path / "a.zarr"), capsys)
    rows = [line for line in lines if "cannot be read" in line]
    assert code == 1 and len(rows) == 1 and "2019-12-30T18" in rows[0] and T2M in rows[0]
    assert main([str(tmp_path / "a.zarr"), "--check", "--variables", "skin_temperature"]) == 0


def test_other_grids_are_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    waves().to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    waves().isel(latitude=slice(0, 4)).to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    code, lines = check(str(tmp_path), capsys)
    assert code == 1 and "grids differ" in lines[1]


def test_way_up_is_the_one_of_most_dates() -> None:
    dates = [np.datetime64("2020-01-01") + i for i in range(7)]
    turns = list(zip(dates, [-1, 1, 0, 0, -1, 0, 1], strict=True))
    assert upside_down(turns) == [dates[0], dates[6]]


def test_real_archives(capsys: pytest.CaptureFixture) -> None:
    """What their README says is wrong with them, and no more."""
    path = needs("gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc")
    code, lines = check(path, capsys)
    assert code == 1 and "2026-04-08T00" in lines[1] and len(lines) == 3
    _, lines = check(needs("storm_1996"), capsys)
    assert [line.split()[-1] for line in lines[1:-1]] == ["1", "1", "2"]
    assert all(line.startswith("no value at all") for line in lines[1:-1])
    assert check(needs("era5_europe_2020"), capsys)[0] == 0
