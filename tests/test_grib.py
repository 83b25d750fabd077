"""GRIB by cfgrib, an extra: read as the other layouts are, converted, and refused in one line."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from datasets.archive import open_archive
from errors import DataError
from tests.sample_archives import NAMES, analyses, grib, values, write_message


@pytest.fixture(scope="module")
def truth() -> xr.Dataset:
    pytest.importorskip("cfgrib", reason="cfgrib is not installed: requirements-extras.txt")
    ds = analyses()
    return ds[[*(name for name in ds.data_vars if name != "land_sea_mask"), "land_sea_mask"]]


@pytest.mark.parametrize("edition", [1, 2])
def test_grib_is_read_as_the_others(edition: int, tmp_path: Path, truth: xr.Dataset) -> None:
    archive = open_archive(grib(tmp_path, truth, edition))
    assert set(archive.variables) == set(NAMES) and archive.static_variables == ["land_sea_mask"]
    np.testing.assert_array_equal(archive.times, truth.time.values.astype("datetime64[s]"))
    block, wanted = archive.read_block(0, 5, NAMES), values(truth)
    assert (np.isnan(block) == np.isnan(wanted)).all()
    # 24 bits over a field's range; where values are missing the range is theirs and 9999's no longer.
    np.testing.assert_allclose(block, wanted, atol=1e-4)
    np.testing.assert_array_equal(archive.read_static("land_sea_mask"), truth.land_sea_mask.values)
    assert archive.units("geopotential:500") == "m2 s-2"
    some = ["temperature:850", "2m_temperature"]
    np.testing.assert_array_equal(archive.read(3, some), block[3, [NAMES.index(name) for name in some]])


def test_rows_and_columns_that_run_the_other_way(tmp_path: Path, truth: xr.Dataset) -> None:
    """South first, as its scanning mode says, and -180 to 135."""
    turned = truth.isel(latitude=slice(None, None, -1))
    turned = turned.assign_coords(longitude=(turned.longitude + 180) % 360 - 180).sortby("longitude")
    archive = open_archive(grib(tmp_path, turned))
    np.testing.assert_allclose(archive.read_block(0, 5, NAMES), values(truth), atol=1e-4)
    assert archive.grid.latitude[0] == 75 and archive.grid.longitude[0] == 0


def test_several_steps_of_a_date_are_chosen_by_data_select(tmp_path: Path, truth: xr.Dataset) -> None:
    """The last message counted: 206, 216, 226 K, where the analyses were 200, 210 and 220."""
    with open(tmp_path / "a.grib", "wb") as file:
        for number, date in enumerate(truth.time.values[:3]):
            for step in (0, 6):
                field = truth["2m_temperature"][0] * 0 + 200 + 10 * number + step
                write_message(file, field, "2m_temperature", 0, date, 2, {"step": step})
    path, start = str(tmp_path / "a.grib"), truth.time.values[0].astype("datetime64[s]")
    with pytest.raises(DataError, match="dimension step of size 2; choose one .*'step=0.0'"):
        open_archive(path)
    for step in (0, 6):
        archive = open_archive(path, {"step": str(step)})
        assert archive.times[0] == start + np.timedelta64(step, "h")
        expected = [number + step for number in (200, 210, 220)]
        assert archive.read_block(0, 3, ["2m_temperature"])[:, 0, 0, 0].tolist() == expected


def test_a_variable_on_several_kinds_of_surfaces(tmp_path: Path, truth: xr.Dataset) -> None:
    """TMP:surface and the winds at 10 and 80 m were one variable with those on pressure levels."""
    field, date = truth["2m_temperature"][0], truth.time.values[0]
    with open(tmp_path / "a.grib", "wb") as file:
        for number, hours in enumerate((0, 6)):
            at, date = field + number, date + np.timedelta64(hours, "h")
            write_message(file, at, "t", 500, date, 2)
            write_message(file, at + 1, "t", 0, date, 2, {"typeOfLevel": "surface"})
            for height in (80, 100):
                keys = {"typeOfLevel": "heightAboveGround", "level": height}
                write_message(file, at + height, "q", 0, date, 2, keys)
    archive = open_archive(str(tmp_path / "a.grib"), {"heightAboveGround": "80"})
    names = ["temperature:500", "temperature_at_surface", "80m_specific_humidity"]
    assert set(archive.variables) == set(names)
    found = archive.read(0, names)
    np.testing.assert_allclose(found - found[:1], np.array([0, 1, 80])[:, None, None] + 0 * found, atol=1e-4)


def test_a_message_that_is_cut_short(tmp_path: Path, truth: xr.Dataset) -> None:
    path = Path(grib(tmp_path, truth))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="^cannot read .*a.grib': .*damaged or cut short"):
        open_archive(str(path))


def test_without_cfgrib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.grib").write_bytes(b"GRIB" + bytes(100))
    monkeypatch.setitem(sys.modules, "cfgrib", None)
    with pytest.raises(ValueError, match="it is GRIB .*grib"):
        open_archive(str(tmp_path / "a.grib"))
