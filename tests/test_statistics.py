"""Streaming statistics against numpy over everything at once; by many ranks, and over more dates; and
physical fields to normalised ones and back.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr

from datasets.archive import open_archive
from datasets.channels import Channels
from datasets.grid import Grid, area_weights, global_grid
from datasets.normalization import Normalizer
from datasets.statistics import (
    Counting,
    Source,
    Statistics,
    compute,
    first_shift,
    sampled_pairs,
)
from errors import DataError
from tests.sample_archives import NAMES, analyses, values, weatherbench
from training import shared_statistics
from training.shared_statistics import load_or_count

STEP = np.timedelta64(6 * 3600, "s")


def moments(fields: np.ndarray, area: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Area-weighted mean and deviation over dates and cells with a value; fields (T, V, H, W)."""
    weights = np.isfinite(fields) * area[:, None]
    total = weights.sum(axis=(0, 2, 3))
    mean = np.nansum(weights * fields, axis=(0, 2, 3)) / total
    squares = np.nansum(weights * (fields - mean[:, None, None]) ** 2, axis=(0, 2, 3))
    return mean, np.sqrt(squares / total)


@pytest.mark.parametrize("dates", [[0, 1, 2, 3, 4], [0, 1, 3, 4]], ids=["all", "with a gap"])
def test_statistics_are_those_of_all_dates_at_once(archive, dates):
    """Changes do not cross gaps."""
    fields, area = values(analyses()).astype(np.float64), area_weights(archive.grid.latitude)
    statistics = compute(Source(archive, NAMES, np.array(dates), STEP, area))
    mean, std = moments(fields[dates], area)
    changes = np.stack([fields[date + 1] - fields[date] for date in dates if date + 1 in dates])
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(statistics.std, std, rtol=1e-6)
    np.testing.assert_allclose(statistics.change_std, moments(changes, area)[1], rtol=1e-5)
    np.testing.assert_allclose(statistics.mean_field, np.nanmean(fields[dates], axis=0), rtol=1e-5, atol=1e-6)


def test_dates_without_any_value_are_left_out(tmp_path):
    ds = analyses()
    ds["2m_temperature"][3] = np.nan
    archive = open_archive(weatherbench(tmp_path, ds))
    statistics = compute(source_of(archive.path))
    assert np.isfinite(statistics.mean_field).all()


def source_of(path: str, count: int = 5) -> Source:
    archive = open_archive(path)
    return Source(archive, NAMES, np.arange(count), STEP, area_weights(archive.grid.latitude))


def test_cache_is_used_for_the_same_data_only(one_rank, archive, tmp_path, monkeypatch):
    cache, source = tmp_path / "run" / "statistics.npz", source_of(archive.path)
    first = load_or_count(cache, source)
    with monkeypatch.context() as patched:
        patched.setattr("training.shared_statistics.count_together", lambda *_: pytest.fail("counted"))
        again = load_or_count(cache, source)
    np.testing.assert_array_equal(first.std, again.std)
    other = load_or_count(cache, source_of(archive.path, 4))
    assert other.fingerprint != first.fingerprint


def warm(path: str) -> None:
    """By 5 K at the date in the middle."""
    array: Any = zarr.open_group(path, mode="r+")["2m_temperature"]
    array[2] = array[2] + 5


def test_a_change_in_the_middle_is_seen(one_rank, tmp_path):
    """First and last date stay as they were: a look at these alone would pass it."""
    path, cache = weatherbench(tmp_path, analyses()), tmp_path / "statistics.npz"
    before = load_or_count(cache, source_of(path))
    warm(path)
    after = load_or_count(cache, source_of(path))
    assert after.mean[NAMES.index("2m_temperature")] > before.mean[NAMES.index("2m_temperature")] + 0.5


def test_a_damaged_cache_is_said_and_made_anew(one_rank, archive, tmp_path, caplog):
    cache, source = tmp_path / "statistics.npz", source_of(archive.path)
    whole = load_or_count(cache, source)
    size = cache.stat().st_size
    for left in (0, size // 2, size - 1):
        cache.write_bytes(cache.read_bytes()[:left])
        np.testing.assert_array_equal(load_or_count(cache, source).mean, whole.mean)
        assert cache.stat().st_size == size
    assert caplog.text.count("is damaged") == 3


def test_a_resumed_run_keeps_its_statistics(one_rank, tmp_path, caplog):
    """Through dates that have come since, a copy of the data, a lost file; not through other fields."""
    caplog.set_level("INFO")
    path, cache = weatherbench(tmp_path, analyses()), tmp_path / "statistics.npz"
    first = load_or_count(cache, source_of(path, 4))
    grown = load_or_count(cache, source_of(path, 5), first.numbers)
    assert grown.numbers == first.numbers and len(grown.dates) == 4
    os.utime(next(Path(path, "2m_temperature").glob("[0-9]*")))  # as a copy has it
    assert load_or_count(cache, source_of(path, 5), first.numbers).numbers == first.numbers
    assert "other files than before, with the same statistics" in caplog.text
    cache.unlink()
    assert load_or_count(cache, source_of(path, 4), first.numbers).numbers == first.numbers
    warm(path)
    with pytest.raises(DataError, match="mean of 2m_temperature is .* here and was .*; take the data"):
        load_or_count(cache, source_of(path, 4), first.numbers)


def test_another_cache_than_was_written_is_one_line(one_rank, archive, tmp_path):
    """Another shape; a folder of that name."""
    path, source = tmp_path / "statistics.npz", source_of(archive.path)
    statistics = load_or_count(path, source)
    replace(statistics, std=statistics.std[:2]).write(path)
    with pytest.raises(DataError, match="statistics.npz: its arrays differ in length; remove it"):
        load_or_count(path, source)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match="statistics.npz: is a folder; remove it, and the next start"):
        load_or_count(path, source)


# -- dates in pairs


@dataclass
class Simulated:
    """Fields in memory, 6-hourly: a wave that turns round the globe, and a warmth of the day."""

    times: np.ndarray
    grid: Grid
    values: np.ndarray  # (T, 1, H, W)
    path: str = "simulated"

    def read(self, index: int, variables: Sequence[str]) -> np.ndarray:
        return self.values[index]

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        return self.values[start:stop]

    def files_state(self, variables: Sequence[str]) -> bytes:
        return b"as they are"


def weather(num_dates: int) -> Source:
    rng, grid = np.random.default_rng(1), global_grid((4, 8))
    times = np.datetime64("2000-01-01", "s") + np.arange(num_dates) * STEP
    noise = rng.normal(size=(num_dates, 1, 4, 8))
    for date in range(1, num_dates):  # what tomorrow is depends on today
        noise[date] = 0.97 * noise[date - 1] + 0.24 * noise[date]
    hours = np.array([0.0, 1.0, 2.0, -3.0])[np.arange(num_dates) % 4]  # no two steps change alike
    fields: Any = Simulated(times, grid, (280 + 5 * noise + hours[:, None, None, None]).astype(np.float32))
    return Source(fields, ["2m_temperature"], np.arange(num_dates), STEP, area_weights(grid.latitude))


@pytest.mark.parametrize("num_dates", [3001, 12_000])
def test_sampled_pairs_give_the_change_of_all_dates(num_dates):
    """Evenly spaced dates have no two one step apart, and can all be of one hour: 3,001 dates in 750 steps
    are.
    """
    source = weather(num_dates)
    few = sampled_pairs(source, 400)
    assert 300 < len(few) <= 400
    whole, some = (compute(replace(source, dates=dates)) for dates in (source.dates, few))
    assert abs(some.change_std[0] / whole.change_std[0] - 1) < 0.05
    assert abs(some.std[0] / whole.std[0] - 1) < 0.05 and abs(some.mean[0] - whole.mean[0]) < 0.5


def test_two_dates_of_a_pair_both_count():
    source = weather(100)
    few = sampled_pairs(source, 2)
    assert len(few) == 2 and few[1] == few[0] + 1


def test_statistics_without_any_pair_are_refused():
    source = weather(100)
    with pytest.raises(DataError, match="no two dates a model step apart have values of all of them"):
        compute(replace(source, dates=np.arange(0, 100, 2)))


# -- by many ranks, many times


def of_a_rank(path: str, cache: Path, count: int) -> Statistics:
    return load_or_count(cache, source_of(path, count))


def equal_to_rounding(one: Statistics, other: Statistics) -> None:
    for name in ("mean", "std", "change_std"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_allclose(one.mean_field, other.mean_field, rtol=2e-7, atol=1e-7)
    np.testing.assert_array_equal(one.dates, other.dates)


def test_four_ranks_count_what_one_counts(ranks, tmp_path):
    """The moments to the bit: each date's share is the same, and they are added in the dates' order."""
    ds = analyses()
    ds["temperature"][1] = np.nan
    path = weatherbench(tmp_path, ds)
    together = ranks(4).run(of_a_rank, path, tmp_path / "run" / "statistics.npz", 5)
    alone = compute(source_of(path))
    for statistics in together:
        equal_to_rounding(statistics, alone)


def interrupted(path: str, cache: Path) -> str:
    """Rank 1 meets a fault in its last date; the others are told."""
    source = source_of(path)
    read = source.fields.read_block

    def failing(start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        if dist.get_rank() == 1:
            raise DataError("chunk 2 is damaged")
        return read(start, stop, variables)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.fields, "read_block", failing)
        patch.setattr(shared_statistics, "ROUND_SECONDS", 0.0)
        with pytest.raises(DataError) as error:
            load_or_count(cache, source)
    return str(error.value)


def test_what_one_rank_cannot_read_is_said_by_all(ranks, tmp_path):
    path = weatherbench(tmp_path, analyses())
    said = ranks(4).run(interrupted, path, tmp_path / "statistics.npz")
    assert said == ["chunk 2 is damaged"] * 4


def test_a_change_counts_only_between_two_dates_with_values(tmp_path):
    """Neither a pair with an empty later date counts, nor one with an empty earlier one."""
    ds = analyses()
    ds["geopotential"][2, 0] = np.nan  # of five dates the pairs (0, 1) and (3, 4) are left
    source = source_of(weatherbench(tmp_path, ds))
    fields = values(ds).astype(np.float64)
    changes = np.stack([fields[1] - fields[0], fields[4] - fields[3]])
    v = NAMES.index("temperature:850")
    weights = np.broadcast_to(source.weights[:, None], changes[:, v].shape)
    mean = np.average(changes[:, v], weights=weights)
    expected = np.sqrt(np.average((changes[:, v] - mean) ** 2, weights=weights))
    assert compute(source).change_std[v] == pytest.approx(expected, rel=1e-12)
    shift = first_shift(source)
    parts = [Counting(source, part, shift) for part in (source.dates[:3], source.dates[3:])]
    for part in parts:
        part.go_on()
    both = parts[0].sums
    both.dates += parts[1].sums.dates  # the empty date is read by the second part, too
    both.rows += parts[1].sums.rows
    assert both.moments()[2][v] == pytest.approx(expected, rel=1e-12)


# -- normalised fields


@pytest.mark.parametrize("predict", ["state", "change"])
def test_normalizer(archive, predict):
    statistics = compute(source_of(archive.path))
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
