"""Who writes what of a checkpoint, agreed by all ranks once, by torch.distributed.checkpoint's own planner.

At 4,096 ranks the plans of all would be ten million items on rank 0. Ranks that hold the same (replicas)
have the same plan: each rank tells a digest of its own, one of each kind sends it, and the writing is dealt
out to as many of the kind as have a file of some size to write.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from jobs.rank_tree import RankTree

FILE_BYTES = 2**28  # ranks that hold the same share the writing only of files larger than this


def plan_of(tensors: dict[str, Tensor]) -> SavePlan:
    """All that this rank holds. A tensor with fewer rows than ranks has none on the last of them."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors)
    plan = planner.create_local_plan()
    return replace(plan, items=[item for item in plan.items if not is_empty_part(item)])


def plan_together(ranks: RankTree, own: SavePlan) -> tuple[SavePlan, Metadata]:
    """What this rank writes of what it holds, and on rank 0 what all write. Called by all ranks."""
    kinds = members_of(ranks.gather(digest(own)) or [])
    asked = ranks.share({members[0] for members in kinds})
    plans = ranks.gather(own if ranks.rank in asked else None)
    metadata, dealt = Metadata({}), None
    if plans:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        kept, metadata = planner.create_global_plan([plan for plan in plans if plan])
        of_kinds = [deal(plan.items, members) for plan, members in zip(kept, kinds, strict=True)]
        of_rank = {rank: items for dealt_out in of_kinds for rank, items in dealt_out.items()}
        dealt = [of_rank.get(rank, []) for rank in range(ranks.world)]
    items = ranks.deal(dealt)
    return replace(own, items=items, storage_data=_StoragePrefix(f"__{ranks.rank}_")), metadata


def is_empty_part(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.size.numel() > 0 == data.chunk.sizes.numel()


def bytes_of(item: WriteItem) -> int:
    """Of this part; DCP's own `tensor_storage_size` is the whole tensor's."""
    data = item.tensor_data
    return max(data.chunk.sizes.numel() * data.properties.dtype.itemsize, 1) if data else 1


def digest(plan: SavePlan) -> bytes:
    """Equal where plans are: a pickle depends on which objects are one and the same."""
    return hashlib.sha256(repr(plan.items).encode()).digest()


def members_of(digests: Sequence[bytes]) -> list[list[int]]:
    """The ranks of each kind, in the order of their first ones."""
    kinds: dict[bytes, list[int]] = {}
    for rank, each in enumerate(digests):
        kinds.setdefault(each, []).append(rank)
    return list(kinds.values())


def deal(items: Sequence[WriteItem], members: Sequence[int]) -> dict[int, list[WriteItem]]:
    """Rank -> what it writes: as few of `members`, evenly spread over them, as give files of FILE_BYTES."""
    sizes = [bytes_of(item) for item in items]
    writers = min(max(sum(sizes) // FILE_BYTES, 1), len(members))
    dealt: dict[int, list[WriteItem]] = {}
    before = 0
    for item, size in zip(items, sizes, strict=True):
        writer = before * writers // sum(sizes)
        dealt.setdefault(members[writer * len(members) // writers], []).append(item)
        before += size
    return dealt
