"""Groups of the mesh: none of one rank, all with the run's timeout."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallelisms.degrees import Degrees
from parallelisms.mesh import build_mesh
from tests.distributed import shared_mesh


@pytest.fixture
def sixty_four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=27, world_size=64)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("degrees", (Degrees(dp_shard=8, tp=8), Degrees(dp_replicate=8, tp=8)), ids=str)
def test_nobody_makes_groups_of_one_rank(
    degrees: Degrees, sixty_four_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the axis that FSDP needs where replicas split their model by tensor parallelism alone."""
    made: list[int] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        made.append(len(ranks))
        return new_group(ranks=ranks, **options)

    monkeypatch.setattr(device_mesh, "new_group", counted)
    mesh = build_mesh("cpu", degrees)
    assert made.count(8) == 4 * 8  # two axes of grid and parameters, eight groups each
    assert made.count(1) == (0 if degrees.dp_shard > 1 else 64) and len(made) in (32, 96)
    assert mesh.rank("tp") == 27 % 8 and mesh.dp_rank == 27 // 8
    assert [mesh.rank(axis) for axis in ("pp", "cp")] == [0, 0]
    assert mesh.fsdp_axes.ndim == (1 if degrees.dp_shard > 1 else 2)
    assert mesh.picture().splitlines()[27].startswith("rank   27: dp_")


def timeouts() -> list[timedelta]:
    groups = shared_mesh(Degrees(tp=2)).groups
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_group_has_the_timeout_of_the_run(ranks) -> None:
    """120 s in tests/distributed.py; torch would give new groups half an hour."""
    for found in ranks(2).run(timeouts):
        assert len(found) > 2 and set(found) == {timedelta(seconds=120)}
