"""Ranks that need the same samples read each chunk once between them."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from archives.archive import open_archive
from archives.chunks import work
from archives.field_chunks import chunks_of
from datasets.field_dataset import FieldDataset
from datasets.read_ahead import ThreadedLoader
from datasets.shared_dataset import SharedDataset, even_parts
from parallelisms.degrees import Degrees
from parallelisms.mesh import build_mesh
from tests.sample_archives import NAMES, analyses, one_level_a_chunk, weatherbench

SAMPLES = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
BATCHES = [[0, 2], [3, 0]]


def read(path: str, shared: bool) -> tuple[list[Tensor], int]:
    """Two batches, unpacked, and the bytes that this rank decoded for them."""
    archive, group = open_archive(path), dist.group.WORLD
    assert group
    dataset = (
        SharedDataset(archive, NAMES, SAMPLES, group) if shared else FieldDataset(archive, NAMES, SAMPLES)
    )
    work.take()
    batches = [dataset.unpack(fields).clone() for fields, _ in ThreadedLoader(dataset, BATCHES, 2, 2, False)]
    return batches, work.take().bytes


def bytes_of_groups(path: str) -> list[int]:
    """Of the chunks, all latitudes of them, that hold one date of NAMES."""
    archive = open_archive(path)
    fields = [archive._find(group[0])[0][1] for group in archive.stored_together(NAMES, in_chunks=True)]
    return [array.nbytes * array.shape[-2] // array.chunks[-2] for array in map(chunks_of, fields) if array]


@pytest.mark.parametrize("layout", [weatherbench, one_level_a_chunk])
def test_two_ranks_read_half_each_and_get_all(ranks, tmp_path, layout):
    ds = analyses()
    ds["2m_temperature"][3, 1] = np.nan
    path = layout(tmp_path, ds)
    groups, alone = bytes_of_groups(path), ranks(2).run(read, path, False)[0]
    dates = alone[1] // sum(groups)
    assert dates == 5
    for batches, read_bytes in ranks(2).run(read, path, True):
        for ours, whole in zip(batches, alone[0], strict=True):
            assert torch.equal(ours.nan_to_num(-1), whole.nan_to_num(-1))
        assert read_bytes <= dates * (sum(groups) / 2 + max(groups)) and read_bytes < alone[1]


def test_groups_are_those_of_one_data_parallel_part(ranks):
    assert ranks(4).run(group_of, Degrees(dp_shard=2, tp=2)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert ranks(4).run(group_of, Degrees(pp=2, dp_shard=2)) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert ranks(4).run(group_of, Degrees(dp_shard=4)) == [None] * 4


def group_of(degrees: Degrees) -> list[int] | None:
    group = build_mesh("cpu", degrees).same_samples
    return dist.get_process_group_ranks(group) if group else None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_no_part_has_more_than_its_share_and_a_group(count):
    groups = [["a"], ["b", "c", "d"], ["e"], ["f"], ["g", "h"]]
    parts = even_parts(groups, count)
    assert [name for part in parts for name in part] == list("abcdefgh") and len(parts) == count
    assert max(map(len, parts)) <= 8 / count + 3
    assert all(len({*group} & {*part}) in (0, len(group)) for group in groups for part in parts)
