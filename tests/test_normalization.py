"""Streaming statistics against numpy over everything at once."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from archives.archive import open_archive
from archives.grid import area_weights
from datasets.memory_archive import MemoryArchive
from datasets.normalization import (
    Normalizer,
    Source,
    compute,
    known_empty_dates,
    load_as_trained,
    load_or_compute,
)
from errors import DataError
from tests.archives import NAMES, analyses, values, weatherbench

STEP = np.timedelta64(6 * 3600, "s")


@pytest.fixture
def archive(tmp_path):
    return open_archive(weatherbench(tmp_path, analyses()))


def moments(fields: np.ndarray, area: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Area-weighted mean and deviation over dates and cells with a value; fields (T, V, H, W)."""
    weights = np.isfinite(fields) * area[:, None]
    total = weights.sum(axis=(0, 2, 3))
    mean = np.nansum(weights * fields, axis=(0, 2, 3)) / total
    squares = np.nansum(weights * (fields - mean[:, None, None]) ** 2, axis=(0, 2, 3))
    return mean, np.sqrt(squares / total)


def test_statistics_are_those_of_all_dates_at_once(archive):
    fields, area = values(analyses()).astype(np.float64), area_weights(archive.grid.latitude)
    statistics = compute(archive, NAMES, np.arange(5), STEP, area)
    mean, std = moments(fields, area)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(statistics.std, std, rtol=1e-6)
    np.testing.assert_allclose(statistics.change_std, moments(np.diff(fields, axis=0), area)[1], rtol=1e-5)
    np.testing.assert_allclose(statistics.mean_field, np.nanmean(fields, axis=0), rtol=1e-5, atol=1e-6)


def test_changes_do_not_cross_gaps(archive):
    dates = np.array([0, 1, 3, 4])
    fields, area = values(analyses()).astype(np.float64), area_weights(archive.grid.latitude)
    statistics = compute(archive, NAMES, dates, STEP, area)
    changes = np.stack([fields[1] - fields[0], fields[4] - fields[3]])
    np.testing.assert_allclose(statistics.change_std, moments(changes, area)[1], rtol=1e-5)


def test_dates_without_any_value_are_left_out(tmp_path):
    ds = analyses()
    ds["2m_temperature"][3] = np.nan
    archive = open_archive(weatherbench(tmp_path, ds))
    statistics = compute(archive, NAMES, np.arange(5), STEP, area_weights(archive.grid.latitude))
    assert statistics.empty_in(archive.times).tolist() == [3]
    assert known_empty_dates(
        MemoryArchive(archive, NAMES, np.arange(5)), NAMES, np.arange(1, 5)
    ).tolist() == [3]
    assert np.isfinite(statistics.mean_field).all()


def source_of(path: str, count: int = 5) -> Source:
    archive = open_archive(path)
    return Source(archive, NAMES, np.arange(count), STEP, area_weights(archive.grid.latitude))


def test_cache_is_used_for_the_same_data_only(archive, tmp_path, monkeypatch):
    cache, source = tmp_path / "run" / "statistics.npz", source_of(archive.path)
    first = load_or_compute([cache], source)
    with monkeypatch.context() as patched:
        patched.setattr("datasets.normalization.compute", lambda *_: pytest.fail("the cache was not used"))
        again = load_or_compute([tmp_path / "none.npz", cache], source)
    np.testing.assert_array_equal(first.std, again.std)
    other = load_or_compute([cache], source_of(archive.path, 4))
    assert other.fingerprint != first.fingerprint


def warm(path: str) -> None:
    """By 5 K at the date in the middle."""
    array: Any = zarr.open_group(path, mode="r+")["2m_temperature"]
    array[2] = array[2] + 5


def test_a_change_in_the_middle_is_seen(tmp_path):
    """First and last date stay as they were: a look at these alone would pass it."""
    path, cache = weatherbench(tmp_path, analyses()), tmp_path / "statistics.npz"
    before = load_or_compute([cache], source_of(path))
    warm(path)
    after = load_or_compute([cache], source_of(path))
    assert after.mean[NAMES.index("2m_temperature")] > before.mean[NAMES.index("2m_temperature")] + 0.5


def test_a_damaged_cache_is_said_and_made_anew(archive, tmp_path, caplog):
    cache, source = tmp_path / "statistics.npz", source_of(archive.path)
    whole = load_or_compute([cache], source)
    size = cache.stat().st_size
    for left in (0, size // 2, size - 1):
        cache.write_bytes(cache.read_bytes()[:left])
        np.testing.assert_array_equal(load_or_compute([cache], source).mean, whole.mean)
        assert cache.stat().st_size == size
    assert caplog.text.count("is damaged") == 3


def test_a_resumed_run_keeps_its_statistics(tmp_path, caplog):
    """Through dates that have come since, a copy of the data, a lost file; not through other fields."""
    caplog.set_level("INFO")
    path, cache = weatherbench(tmp_path, analyses()), tmp_path / "statistics.npz"
    first = load_or_compute([cache], source_of(path, 4))
    grown = load_as_trained(cache, source_of(path, 5), first.numbers)
    assert grown.numbers == first.numbers and len(grown.dates) == 4
    os.utime(next(Path(path, "2m_temperature").glob("[0-9]*")))  # as a copy has it
    assert load_as_trained(cache, source_of(path, 5), first.numbers).numbers == first.numbers
    assert "other files than before, with the same statistics" in caplog.text
    cache.unlink()
    assert load_as_trained(cache, source_of(path, 4), first.numbers).numbers == first.numbers
    warm(path)
    with pytest.raises(DataError, match="mean of 2m_temperature is .* here and was .*; take the data"):
        load_as_trained(cache, source_of(path, 4), first.numbers)


@pytest.mark.parametrize("predict", ["state", "change"])
def test_normalizer(archive, predict):
    statistics = compute(archive, NAMES, np.arange(5), STEP, area_weights(archive.grid.latitude))
    normalizer = Normalizer(statistics, predict)
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
