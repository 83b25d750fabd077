"""What all ranks tell each other beside the model's tensors, in the logarithm of their number.

Gloo's all-reduce goes round a ring: at 4,096 ranks 8,190 messages, one after the other, to agree on a number;
its gather takes as much as the largest answer from every rank. Here eight neighbours, which mostly share a
host, form a group, the first ranks of eight such groups another, up to rank 0.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
FANOUT = 8  # ranks of a group: what a host usually has


def tree_groups(world: int) -> Iterator[tuple[list[int], int]]:
    """The ranks of every group, the lowest level first, and for how many ranks each of them speaks."""
    stride = 1
    while stride < world:
        for first in range(0, world, stride * FANOUT):
            members = list(range(first, min(first + stride * FANOUT, world), stride))
            if len(members) > 1:
                yield members, stride
        stride *= FANOUT


class RankTree:
    """Made, and each of its methods called, by all ranks together, in the same order."""

    def __init__(self, timeout_seconds: float | None = None) -> None:
        """timeout_seconds: after which a rank that does not answer is given up; None: torch's own."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0
        timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else None
        self.levels: list[tuple[dist.ProcessGroup, int]] = []  # this rank's, the lowest first
        for members, stride in tree_groups(self.world):
            # All ranks make all groups, so that these are called the same; who is not in one talks to nobody.
            group = dist.new_group(members, backend="gloo", timeout=timeout)
            if self.rank in members:
                self.levels.append((cast(dist.ProcessGroup, group), stride))

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """In place, on the CPU; the same bits on every rank."""
        for group, _ in self.levels:
            dist.reduce(tensor, op=op, group=group, group_dst=0)
        for group, _ in reversed(self.levels):
            dist.broadcast(tensor, group=group, group_src=0)
        return tensor

    def barrier(self) -> None:
        """Until all ranks are here."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Ends the groups and their threads."""
        for group, _ in self.levels:
            dist.destroy_process_group(group)

    def gather(self, value: T) -> list[T] | None:
        """The values of all ranks, in their order, on rank 0; None on the others."""
        held = [value]
        for group, _ in self.levels:
            own = group.rank() == 0
            parts: list[Any] = [None] * group.size()
            dist.gather_object(held, parts if own else None, group=group, group_dst=0)
            held = [each for part in parts for each in part] if own else []
        return held if self.is_first else None

    def share(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        held: list[Any] = [value]
        for group, _ in reversed(self.levels):
            dist.broadcast_object_list(held, group=group, group_src=0)
        return held[0]

    def deal(self, values: list[T] | None) -> T:
        """Of the values that rank 0 has, one a rank, this rank's."""
        held: list[Any] = values or []
        for group, stride in reversed(self.levels):
            own = group.rank() == 0
            parts = [held[i * stride : (i + 1) * stride] for i in range(group.size())]
            mine: list[Any] = [None]
            dist.scatter_object_list(mine, parts if own else None, group=group, group_src=0)
            held = mine[0]
        return held[0]

    def first_of(self, value: T) -> T:
        """What the lowest rank says that says anything (an empty text says nothing), on every rank."""
        told = self.gather(value) or [value]
        return self.share(next(filter(None, told), told[0]))
