"""Streaming statistics against numpy over everything at once."""

import numpy as np
import pytest
import torch

from datasets.era5 import open_archive
from datasets.grid import area_weights
from datasets.loader import MemoryArchive
from datasets.normalization import Normalizer, compute, known_empty_dates, load_or_compute
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
    assert statistics.empty_dates.tolist() == [3]
    assert known_empty_dates(
        MemoryArchive(archive, NAMES, np.arange(5)), NAMES, np.arange(1, 5)
    ).tolist() == [3]
    assert np.isfinite(statistics.mean_field).all()


def test_cache_is_used_for_the_same_data_only(archive, tmp_path, monkeypatch):
    cache, area = tmp_path / "run" / "statistics.npz", area_weights(archive.grid.latitude)
    first = load_or_compute(cache, archive, NAMES, np.arange(5), STEP, area)
    monkeypatch.setattr("datasets.normalization.compute", lambda *_: pytest.fail("the cache was not used"))
    again = load_or_compute(cache, archive, NAMES, np.arange(5), STEP, area)
    np.testing.assert_array_equal(first.std, again.std)
    monkeypatch.undo()
    other = load_or_compute(cache, archive, NAMES, np.arange(4), STEP, area)
    assert other.fingerprint != first.fingerprint


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
