"""What all ranks tell each other through a tree, and the plan of a save that is agreed on through it."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from checkpoints import save_plan
from checkpoints.save_plan import deal, members_of, plan_together
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
    check_plan(ranks)
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


def item(name: str, first: int, rows: int, of: int) -> WriteItem:
    offsets, sizes = torch.Size((first, 0)), torch.Size((rows, 4))
    chunk, properties = ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=torch.float32)
    data = TensorWriteData(chunk, properties, torch.Size((of, 4)))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def check_plan(ranks: RankTree) -> None:
    """Ranks 0 and 2 hold the same half of a weight, rank 1 the other; all hold a bias."""
    own = SavePlan([item("weight", 3 * (ranks.rank % 2), 3, 6), item("bias", 0, 1, 1)])
    plan, metadata = plan_together(ranks, own)
    written = ranks.gather([(each.index.fqn, tuple(each.index.offset or ())[:1]) for each in plan.items])
    assert plan.storage_data.prefix == f"__{ranks.rank}_"
    if written is not None:
        assert sorted(sum(written, [])) == [("bias", (0,)), ("weight", (0,)), ("weight", (3,))]
        assert written[2] == []  # nothing that is worth a file of its own
        assert len(metadata.state_dict_metadata["weight"].chunks) == 2  # type: ignore[union-attr]


def test_ranks_of_two_levels_hear_each_other_and_agree_on_a_plan(ranks):
    ranks(3).run(speak)


def test_replicas_share_the_writing_of_large_files_alone(monkeypatch):
    items = [item(f"weight {n}", 0, 2, 2) for n in range(6)]  # of 32 bytes
    assert members_of([b"a", b"b", b"a", b"a"]) == [[0, 2, 3], [1]]
    assert deal(items, [0, 2, 3]) == {0: items}
    monkeypatch.setattr(save_plan, "FILE_BYTES", 90)
    assert deal(items, [0, 2, 3, 5]) == {0: items[:3], 3: items[3:]}
    monkeypatch.setattr(save_plan, "FILE_BYTES", 1)
    assert [len(part) for part in deal(items, [0, 2, 3]).values()] == [2, 2, 2]
