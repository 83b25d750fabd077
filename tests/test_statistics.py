"""Statistics against numpy over everything at once, and of a resumed run; physical fields to normalised
ones and back.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from datasets import statistics as module
from datasets.archive import Archive, TrainingStore, open_archive
from datasets.channels import Channels
from datasets.grid import area_weights
from datasets.normalization import Normalizer
from datasets.statistics import Statistics, load_statistics, read_changes, refuse_fills
from errors import DataError
from tests.sample_archives import NAMES, analyses, netcdf, training_store, values, weatherbench
from tests.started_jobs import small_dataset

T2M, STEP = "2m_temperature", np.timedelta64(6 * 3600, "s")


def moments(fields: np.ndarray, area: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Area-weighted mean and deviation over dates and cells with a value; fields (T, V, H, W)."""
    weights = np.isfinite(fields) * area[:, None]
    total = weights.sum(axis=(0, 2, 3))
    mean = np.nansum(weights * fields, axis=(0, 2, 3)) / total
    squares = np.nansum(weights * (fields - mean[:, None, None]) ** 2, axis=(0, 2, 3))
    return mean, np.sqrt(squares / total)


def of(store: TrainingStore, dates: Sequence[int] = range(5), step: np.timedelta64 = STEP) -> Statistics:
    return Statistics.of(store, NAMES, np.array(dates), step)


@pytest.fixture
def store(archive: Archive, tmp_path: Path) -> TrainingStore:
    return training_store(archive.path, tmp_path / "store")


@pytest.mark.parametrize(
    ("dates", "empty"),
    [([0, 1, 2, 3, 4], ""), ([0, 1, 3, 4], ""), ([0, 1, 2, 3, 4], T2M), ([0, 1, 2, 3, 4], "geopotential")],
)
def test_statistics_are_those_of_all_dates_at_once(tmp_path, dates, empty):
    """Changes do not cross gaps. A date on which one variable has no value counts for none."""
    ds = analyses()
    if empty:
        ds[empty][3] = np.nan
    store = training_store(weatherbench(tmp_path, ds), tmp_path / "store")
    area = area_weights(store.grid.latitude)
    complete = [date for date in dates if date != 3 or not empty]
    fields = values(ds).astype(np.float64)
    statistics = of(store, dates)
    mean, std = moments(fields[complete], area)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(statistics.std, std, rtol=1e-12)
    expected = np.nanmean(fields[complete], axis=0)
    np.testing.assert_allclose(statistics.mean_field, expected, rtol=1e-5, atol=1e-6)
    for step, error in ((1, 1e-12), (2, 1e-5)):  # of another step than the store's: from fields that are read
        changes = [fields[date + step] - fields[date] for date in complete if date + step in complete]
        found = of(store, dates, step * STEP).change_std
        np.testing.assert_allclose(found, moments(np.stack(changes), area)[1], rtol=error)


def test_statistics_do_not_depend_on_the_shards(store, archive, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.convert.SHARD_DATES", 2)
    shards = of(training_store(archive.path, tmp_path / "three"))
    for name in ("mean", "std", "change_std", "missing"):
        np.testing.assert_array_equal(getattr(of(store), name), getattr(shards, name))
    np.testing.assert_allclose(of(store).mean_field, shards.mean_field, rtol=1e-6)


def test_statistics_without_any_pair_are_refused(store):
    with pytest.raises(DataError, match="no two dates a model step apart have values of all of them"):
        of(store, [0, 2, 4])


def test_sampled_changes_are_near_those_of_all_dates(tmp_path, monkeypatch):
    """Of all hours of the day: what changes in the morning differs from what changes at night."""
    rng, num_dates = np.random.default_rng(1), 1200
    noise = rng.normal(size=(num_dates, 6, 8))
    for date in range(1, num_dates):  # what tomorrow is depends on today
        noise[date] = 0.97 * noise[date - 1] + 0.24 * noise[date]
    hours = np.array([0.0, 1.0, 2.0, -3.0])[np.arange(num_dates) % 4]  # no two steps change alike
    ds = small_dataset({T2M: 280 + 5 * noise + hours[:, None, None]}).drop_attrs()
    archive = open_archive(netcdf(tmp_path, ds))
    monkeypatch.setattr(module, "PAIRS", 200)
    weight, first, second = read_changes(archive, [T2M], np.arange(1, num_dates), STEP)[0]
    changes = np.diff(ds[T2M].values.astype("f8"), axis=0)[:, None]
    exact = moments(changes, area_weights(archive.grid.latitude))[1][0]
    assert np.sqrt(second / weight - (first / weight) ** 2) == pytest.approx(exact, rel=0.05)


# -- those of a run


def load(path: Path, archive: Archive, count: int = 5, trained: Any = None) -> Statistics:
    return load_statistics(path, archive, NAMES, np.arange(count), STEP, trained)


def test_a_damaged_file_is_said_and_written_again(archive, tmp_path, caplog):
    path, store = tmp_path / "statistics.npz", training_store(archive.path, tmp_path / "store")
    first = load(path, store)
    size = path.stat().st_size
    for left in (0, size // 2, size - 1):
        path.write_bytes(path.read_bytes()[:left])
        np.testing.assert_array_equal(load(path, store).mean, first.mean)
        assert path.stat().st_size == size
    assert caplog.text.count("is damaged") == 3
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="statistics.npz: is a folder; remove it"):
        load(path, store)


def test_a_resumed_run_keeps_its_statistics(tmp_path):
    """Through dates that have come since, and a lost file; not through other fields, or fewer dates."""
    source, path = weatherbench(tmp_path, analyses()), tmp_path / "statistics.npz"
    store = training_store(source, tmp_path / "store")
    first = load(path, store, 4)
    grown = load(path, store, 5, first.numbers)
    assert grown.numbers == first.numbers and len(grown.dates) == 4
    path.unlink()
    assert load(path, store, 4, first.numbers).numbers == first.numbers
    load(path, store, 4)
    short = training_store(source, tmp_path / "short", "--period", "2019-12-31T12", "2020-01-02")
    with pytest.raises(DataError, match="lacks 1 dates that the run was trained on, the first 2019-12-31T06"):
        load_statistics(path, short, NAMES, np.arange(4), STEP, first.numbers)
    other = analyses()
    other[T2M][2] += 5
    warmed = training_store(weatherbench(tmp_path / "warmer", other), tmp_path / "warmed")
    with pytest.raises(DataError, match="mean of 2m_temperature is .* here and was .*; take the data"):
        load(path, warmed, 4, first.numbers)


# -- normalised fields


@pytest.mark.parametrize("predict", ["state", "change"])
def test_normalizer(store, predict):
    statistics = of(store)
    normalizer = Normalizer(statistics, predict, Channels(tuple(NAMES)))
    fields = torch.from_numpy(values(analyses()))
    state, mask = normalizer.normalize(fields)
    assert torch.isfinite(state).all() and torch.equal(mask, torch.isfinite(fields))
    assert not state[~mask].any()
    torch.testing.assert_close(normalizer.denormalize(state)[mask], fields[mask], rtol=1e-5, atol=1e-5)
    output = torch.ones_like(state)
    change = normalizer.denormalize(normalizer.advance(state, output)) - normalizer.denormalize(state)
    if predict == "change":  # an output of 1 is one standard deviation of the change
        expected = torch.tensor(statistics.change_std, dtype=torch.float32).view(-1, 1, 1).expand_as(change)
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(normalizer.advance(state, output), output)


# -- impossible values


def statistics_of(tmp_path, ds: xr.Dataset) -> None:
    store = training_store(weatherbench(tmp_path, ds), tmp_path / "store")
    Statistics.of(store, [T2M], np.arange(5), STEP)


@pytest.mark.parametrize(
    ("fill", "units", "words"),
    [
        *((fill, "K", f"{fill:g}") for fill in (9.96921e36, 1e30, 1e20, -9999.0, -32767.0)),
        (-9999.0, "degC", "-9725.85"),  # on which a run trained
    ],
)
def test_a_fill_value_that_is_not_declared_is_refused(tmp_path, fill, units, words):
    ds = analyses()
    ds[T2M][3, 2, :2] = fill
    ds[T2M].attrs["units"] = units
    match = f"{T2M} is {re.escape(words)} in 2 cells at 2020-01-01T00:00:00.*_FillValue"
    with pytest.raises(DataError, match=match):
        statistics_of(tmp_path, ds)


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
    ds[T2M][2, 0, 0] = np.inf
    ds[T2M][4, 1:3, 1] = 21.5  # degrees Celsius
    statistics_of(tmp_path, ds)
    date = [str(time)[:19] for time in ds.time.values]
    assert f"{T2M}: 1 values infinite, the first at {date[2]}" in caplog.text
    assert f"{T2M}: 2 values outside 170 to 340 K, the first at {date[4]}" in caplog.text


def test_a_variable_that_never_changes_is_said(tmp_path, caplog):
    ds = analyses()
    ds[T2M][:] = 280
    statistics_of(tmp_path, ds)
    assert caplog.text.count(f"{T2M} is 280 in all cells") == 1
