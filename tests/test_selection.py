"""Periods, gaps and samples."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from config import Data
from datasets.dates import evenly_spaced
from datasets.options import parse_period
from datasets.selection import open_selection
from tests.sample_archives import analyses, weatherbench

NAMES = ("2m_temperature", "geopotential:500")
NOTHING = np.zeros(0, int)


def hours(n: int, missing: tuple[int, ...] = ()) -> xr.Dataset:
    """n dates 6 h apart from 2020-01-01, without some."""
    ds = xr.concat([analyses().isel(time=0)] * n, "time")
    ds = ds.assign_coords(time=np.datetime64("2020-01-01", "ns") + np.arange(n) * np.timedelta64(6, "h"))
    return ds.isel(time=[i for i in range(n) if i not in missing])


@pytest.fixture
def data(tmp_path):
    path = weatherbench(tmp_path, hours(20, missing=(7,)))
    return Data(
        path=path,
        variables=NAMES,
        train_period=("2020-01-01", "2020-01-03"),
        validation_period=("2020-01-04", "2020-01-05"),
        static_variables=("land_sea_mask",),
    )


def test_dates_with_an_offset_become_utc() -> None:
    first, last = parse_period("p", ("2020-01-01T06:00+02:00", "2020-01-01")) or (None, None)
    assert first and first.isoformat() == "2020-01-01T04:00:00"
    assert last and last.isoformat() == "2020-01-01T23:59:59"


def test_the_last_day_counts_to_its_end(data):
    selection = open_selection(data, (2, 2), ())
    assert selection.archive.times[selection.train[-1]] == np.datetime64("2020-01-03T18")
    precise = replace(data, train_period=("2020-01-01", "2020-01-03T06"))
    selection = open_selection(precise, (2, 2), ())
    assert selection.archive.times[selection.train[-1]] == np.datetime64("2020-01-03T06")


def test_evenly_spaced():
    assert evenly_spaced(np.arange(10), 0).tolist() == list(range(10))
    assert evenly_spaced(np.arange(10), 4).tolist() == [0, 3, 6, 9]
