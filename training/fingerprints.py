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
        # "stage 0, fsdp 1, tp 0" -> the parameters of which this rank has that part
        self.parts: dict[str, dict[str, Tensor]] = {}
        for name, parameter in model.parameters.items():
            self.parts.setdefault(part_of(parameter, model.mesh.rank("pp")), {})[name] = parameter

    def restart(self, step: int) -> None:
        """Note that the weights are equal after `step`: a checkpoint was compared before it was saved."""
        self.last_equal = f"after step {step}" if step else "as the run began"

    def compare(self, step: int, saves: bool) -> None:
        """Raise ReplicasDiverged on all ranks if two of them differ; then nothing is saved."""
        if dist.get_world_size() == 1 or not (saves or every(INTERVAL, step)):
            return
        place = f"{socket.gethostname()}, pid {os.getpid()}"
        mine = {part: fingerprints(parameters) for part, parameters in self.parts.items()}
        gathered = from_all_ranks((place, mine))
        if difference := find_difference([found for _, found in gathered]):
            raise ReplicasDiverged(self._describe(step, [place for place, _ in gathered], *difference))
        self.last_equal = f"after step {step}"

    def _describe(
        self, step: int, places: list[str], odd: list[int], rest: list[int], names: list[str]
    ) -> str:
        odd_places = ", ".join(f"rank {rank} ({places[rank]})" for rank in odd)
        against = f"rank{'s' * (len(rest) > 1)} {', '.join(map(str, rest))}"
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        hint = "" if len(rest) > len(odd) else ", and two ranks alone do not show which is right"
        return (
            f"step {step}: replicas have diverged: {odd_places} has other bits than {against} in "
            f"{', '.join(names[:MOST_NAMES])}{more}{hint}; all were alike {self.last_equal}. A device that "
            "computes wrong or memory that flips does this, or code that decides on one rank alone. Start "
            "again to go on from the newest checkpoint, which was compared before it was saved; if the same "
            "rank is named again, without its host"
        )


def part_of(parameter: Tensor, stage: int) -> str:
    """Return which part of a parameter this rank has, by its coordinates on the axes that shard it."""
    named = [f"stage {stage}"]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        cut = [axis for axis, size, how in axes if size > 1 and not how.is_replicate()]
        named += [f"{axis} {mesh.get_local_rank(axis)}" for axis in cut]
    return ", ".join(named)


@torch.no_grad()
def fingerprints(parameters: dict[str, Tensor]) -> dict[str, int]:
    """Return the sum of the bits of this rank's part of each parameter."""
    sums = torch.stack([sum_of_bits(parameter) for parameter in parameters.values()])
    return dict(zip(parameters, sums.tolist(), strict=True))


def sum_of_bits(parameter: Tensor) -> Tensor:
    """Return the sum of the bits of this rank's part, an int64 scalar on the device."""
    plain = plain_weight(parameter)
    local = (plain.to_local() if isinstance(plain, DTensor) else plain).detach().reshape(-1)
    numbers = 8 // local.element_size()  # in an int64, of which a CPU adds up 16 times as many bytes a second
    if local.storage_offset() % numbers:
        local = local.clone()
    whole = len(local) // numbers * numbers
    tail = local[whole:].view(INTEGERS[local.element_size()])
    return local[:whole].view(torch.int64).sum() + tail.sum(dtype=torch.int64)


def find_difference(
    ranks: list[dict[str, dict[str, int]]],
) -> tuple[list[int], list[int], list[str]] | None:
    """Return (the odd ranks, those they differ from, parameters) of the first part in which ranks differ.

    ranks: part -> parameter -> fingerprint of each rank. None: all are equal.
    """
    for part in dict.fromkeys(part for parts in ranks for part in parts):
        found = {rank: tuple(parts[part].values()) for rank, parts in enumerate(ranks) if part in parts}
        common, _ = Counter(found.values()).most_common(1)[0]
        if odd := [rank for rank, values in found.items() if values != common]:
            names = zip(ranks[odd[0]][part], common, found[odd[0]], strict=True)
            return odd, [rank for rank in found if rank not in odd], [n for n, a, b in names if a != b]
    return None
