"""A statistics.npz that is not as it was written is one line that names it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datasets.archive import open_archive
from datasets.grid import area_weights
from datasets.statistics import Source
from errors import DataError
from tests.sample_archives import NAMES, analyses, weatherbench
from training.shared_statistics import load_or_count
from training.stored_statistics import write_statistics


@pytest.fixture
def source(tmp_path) -> Source:
    archive = open_archive(weatherbench(tmp_path, analyses()))
    area = area_weights(archive.grid.latitude)
    return Source(archive, NAMES, np.arange(5), np.timedelta64(6 * 3600, "s"), area)


def change(path: Path, name: str) -> None:
    """Change a number, with the archive's own checksums right."""
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays[name] = arrays[name] + 1
    np.savez(path, **arrays)


@pytest.mark.parametrize("name", ["mean", "change_std", "mean_field"])
def test_changed_numbers_are_seen(one_rank, source, tmp_path, name):
    path = tmp_path / "statistics.npz"
    load_or_count([path], source)
    change(path, name)
    with pytest.raises(
        DataError, match=r"statistics.npz: its numbers are not those that were written .*; remove"
    ):
        load_or_count([path], source)


def test_another_shape_and_a_folder_of_that_name_are_one_line_each(one_rank, source, tmp_path):
    path = tmp_path / "statistics.npz"
    statistics = load_or_count([path], source)
    write_statistics(replace(statistics, std=statistics.std[:2]), path)
    with pytest.raises(
        DataError, match=r"statistics.npz: std has the shape \[2\], \[\d+\] expected; remove it"
    ):
        load_or_count([path], source)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"statistics.npz: is a folder; remove it, and the next start"):
        load_or_count([path], source)


def test_one_of_an_older_version_is_used(one_rank, source, tmp_path):
    path = tmp_path / "statistics.npz"
    whole = load_or_count([path], source)
    whole.write(path)  # without a checksum
    again = load_or_count([path], source)
    np.testing.assert_array_equal(again.mean, whole.mean)
