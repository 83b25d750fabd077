"""What all ranks tell each other through a tree."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from jobs import rank_tree
from jobs.rank_tree import FANOUT, RankTree, tree_groups


@pytest.mark.parametrize("world", [1, 2, 8, 9, 64, 100, 4096])
def test_every_rank_reaches_the_first_in_few_groups(world):
    above = {rank: 0 for rank in range(world)}  # messages upwards until rank 0 has heard of it
    levels = {}
    for members, stride in tree_groups(world):
        assert len(members) <= FANOUT and all(rank % stride == 0 for rank in members)
        levels.setdefault(stride, []).extend(members)
    for stride in levels:
        assert len(set(levels[stride])) == len(levels[stride])
    for rank in range(1, world):
        holder = rank
        while holder:
            stride = max(s for s in levels if holder % s == 0 and holder in levels[s])
            holder, above[rank] = holder // (stride * FANOUT) * stride * FANOUT, above[rank] + 1
    assert max(above.values()) <= math.ceil(math.log(world, FANOUT) - 1e-9)


def speak() -> None:
    """On each of three ranks, in groups of two: as in groups of eight of 9 to 64."""
    rank_tree.FANOUT = 2
    ranks = RankTree()
    rank_tree.FANOUT = FANOUT
    rank, world = dist.get_rank(), dist.get_world_size()
    assert len(ranks.levels) == (2 if rank == 0 else 1)
    largest = ranks.all_reduce(torch.tensor([rank, -rank]), dist.ReduceOp.MAX)
    assert largest.tolist() == [world - 1, 0]
    told = ranks.gather({"rank": rank})
    assert told == ([{"rank": each} for each in range(world)] if rank == 0 else None)
    assert ranks.share("first" if rank == 0 else "") == "first"
    assert ranks.deal([f"for {each}" for each in range(world)] if rank == 0 else None) == f"for {rank}"
    assert ranks.first_of("" if rank == 0 else f"rank {rank}") == "rank 1" and ranks.first_of("") == ""
    check_groups_connect_late(ranks)
    ranks.close()


def check_groups_connect_late(ranks: RankTree) -> None:
    """A group is there before its other ranks are: none is connected that does not speak."""
    made = [dist.new_group(backend="gloo", timeout=timedelta(seconds=5))] if ranks.is_first else []
    ranks.barrier()
    group = made[0] if made else dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    assert one.item() == ranks.world


def test_ranks_of_two_levels_hear_each_other(ranks):
    ranks(3).run(speak)
