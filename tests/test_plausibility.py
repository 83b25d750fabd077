"""Impossible values are refused or counted; coordinates that are not degrees are detected."""

import numpy as np
import pytest
import xarray as xr

from datasets.archive import open_archive
from datasets.plausibility import refuse_fills
from datasets.statistics import Statistics
from errors import DataError
from tests.sample_archives import analyses, training_store, weatherbench

NAME = "2m_temperature"
STEP = np.timedelta64(6 * 3600, "s")


def statistics_of(tmp_path, ds: xr.Dataset) -> None:
    store = training_store(weatherbench(tmp_path, ds), tmp_path / "store")
    Statistics.of(store, [NAME], np.arange(5), STEP)


@pytest.mark.parametrize("fill", [9.96921e36, 1e30, 1e20, -9999.0, -32767.0])
def test_a_fill_value_that_is_not_declared_is_refused(tmp_path, fill):
    ds = analyses()
    ds[NAME][3, 2, :2] = fill
    with pytest.raises(DataError) as error:
        statistics_of(tmp_path, ds)
    text = str(error.value)
    assert f"{NAME} is {np.float32(fill):g} in 2 cells at {str(ds.time.values[3])[:19]}" in text
    assert "_FillValue" in text


def test_numbers_that_happen_to_look_like_one_stay():
    field = np.full((1, 4, 5), -9999.0)  # of a variable that nobody knows, everywhere: a value
    field[0, 0] = np.linspace(-2e4, 2e4, 5)
    refuse_fills(np.abs(field), ["geopotential:500"], "2020-01-01", "a.nc")  # 9999: within its range
    field[0, 1, :2] = 9999.0, -999.0
    refuse_fills(field, ["hgt:300"], "2020-01-01", "a.nc")  # whole metres of any height
    for impossible in (1e20, -9.96921e36):
        with pytest.raises(DataError, match="'a.nc': hgt:300 is"):
            refuse_fills(np.full((1, 4, 5), impossible), ["hgt:300"], "2020-01-01", "a.nc")


def test_infinities_and_other_units_are_counted_in_one_line(tmp_path, caplog):
    ds = analyses()
    ds[NAME][2, 0, 0] = np.inf
    ds[NAME][4, 1:3, 1] = 21.5  # degrees Celsius
    statistics_of(tmp_path, ds)
    date = [str(time)[:19] for time in ds.time.values]
    assert f"{NAME}: 1 values infinite, the first at {date[2]}" in caplog.text
    assert f"{NAME}: 2 values outside 170 to 340 K, the first at {date[4]}" in caplog.text


@pytest.mark.parametrize("says", [True, False])
def test_radians_are_refused(tmp_path, says):
    latitude, longitude = np.deg2rad(np.linspace(87.5, -87.5, 36)), np.deg2rad(np.arange(0, 360, 5.0))
    units = {"units": "radians"} if says else {}
    ds = xr.Dataset(
        {NAME: (("time", "latitude", "longitude"), np.full((1, 36, 72), 280, "f4"))},
        {
            "time": np.array(["2020-01-01"], "datetime64[ns]"),
            "latitude": ("latitude", latitude, units),
            "longitude": ("longitude", longitude, units),
        },
    )
    with pytest.raises(DataError, match="latitude from -1.527 to 1.527 is in radians"):
        open_archive(weatherbench(tmp_path, ds))
