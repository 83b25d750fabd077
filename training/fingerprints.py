"""Comparison of the weights of replicas, which start equal and take the same averaged gradients.

With a faulty device, flipped bits in memory, or code that decides on one rank alone, replicas train different
models while the loss continues to decrease. A fingerprint is the exact sum of a parameter's bits.
"""

import os
import socket
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from errors import RunFailed
from parallelisms.float8 import plain_weight
from parallelisms.mesh import from_all_ranks
from parallelisms.parallelize import ParallelModel
from training.due import every

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
INTERVAL = 100  # steps
MOST_NAMES = 3  # parameters in a message


class ReplicasDiverged(RunFailed):
    """Error of ranks with different bits in weights that should be equal."""


class Fingerprints:
    """Compares every `INTERVAL` steps and before every save, all ranks together."""

    def __init__(self, model: ParallelModel) -> None:
        self.last_equal = ""  # description of the last step at which all were equal
        # "stage 0, fsdp 1, tp 0" -> the parameters of which this rank has that shard, by its coordinates on
        # the axes that shard them
        self.shards: dict[str, dict[str, Tensor]] = {}
        for name, parameter in model.parameters.items():
            coordinates = [f"stage {model.mesh.rank('pp')}"]
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
                for axis, size, placement in axes:
                    if size > 1 and not placement.is_replicate():
                        coordinates.append(f"{axis} {mesh.get_local_rank(axis)}")
            self.shards.setdefault(", ".join(coordinates), {})[name] = parameter

    def restart(self, step: int) -> None:
        """Note that the weights are equal after `step`: a checkpoint was compared before it was saved."""
        self.last_equal = f"after step {step}" if step else "as the run began"

    @torch.no_grad()
    def compare(self, step: int, saves: bool) -> None:
        """Raise ReplicasDiverged on all ranks if two of them differ; then nothing is saved."""
        if dist.get_world_size() == 1 or not (saves or every(INTERVAL, step)):
            return
        mine = {}
        for shard, parameters in self.shards.items():
            sums = torch.stack([sum_of_bits(parameter) for parameter in parameters.values()])
            mine[shard] = dict(zip(parameters, sums.tolist(), strict=True))
        gathered = from_all_ranks((f"{socket.gethostname()}, pid {os.getpid()}", mine))
        difference = find_difference([sums for _, sums in gathered])
        if not difference:
            self.last_equal = f"after step {step}"
            return
        odd, rest, names = difference
        odd_places = ", ".join(f"rank {rank} ({gathered[rank][0]})" for rank in odd)
        against = f"rank{'s' * (len(rest) > 1)} {', '.join(map(str, rest))}"
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        hint = "" if len(rest) > len(odd) else ", and two ranks alone do not show which is right"
        raise ReplicasDiverged(
            f"step {step}: replicas have diverged: {odd_places} has other bits than {against} in "
            f"{', '.join(names[:MOST_NAMES])}{more}{hint}; all were alike {self.last_equal}. A device that "
            "computes wrong or memory that flips does this, or code that decides on one rank alone. Start "
            "again to go on from the newest checkpoint, which was compared before it was saved; if the same "
            "rank is named again, without its host"
        )


def sum_of_bits(parameter: Tensor) -> Tensor:
    """Return the sum of the bits of this rank's shard, an int64 scalar on the device."""
    plain = plain_weight(parameter)
    local = (plain.to_local() if isinstance(plain, DTensor) else plain).detach().reshape(-1)
    numbers = 8 // local.element_size()  # in an int64, of which a CPU adds up 16 times as many bytes a second
    if local.storage_offset() % numbers:
        local = local.clone()
    end = len(local) // numbers * numbers
    tail = local[end:].view(INTEGERS[local.element_size()])
    return local[:end].view(torch.int64).sum() + tail.sum(dtype=torch.int64)


def find_difference(
    ranks: list[dict[str, dict[str, int]]],
) -> tuple[list[int], list[int], list[str]] | None:
    """Return (the odd ranks, those they differ from, parameters) of the first shard in which ranks differ.

    ranks: shard -> parameter -> fingerprint of each rank. None: all are equal.
    """
    for shard in dict.fromkeys(shard for sums in ranks for shard in sums):
        values = {rank: tuple(sums[shard].values()) for rank, sums in enumerate(ranks) if shard in sums}
        common, _ = Counter(values.values()).most_common(1)[0]
        if odd := [rank for rank, of_rank in values.items() if of_rank != common]:
            names = zip(ranks[odd[0]][shard], common, values[odd[0]], strict=True)
            return odd, [rank for rank in values if rank not in odd], [n for n, a, b in names if a != b]
    return None
