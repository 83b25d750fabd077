"""Whether ranks hold the same bits where they should: replicas of a shard, and what no axis has cut.

Replicas start alike and take the same averaged gradients, so that their weights stay the same bits. A device
that computes wrong, memory that flips, or code that decides on one rank alone ends that without a word: every
replica trains a model of its own, and the loss goes on falling. A fingerprint is a sum of the bits, as
integers, of which each parameter counts with another odd factor; it is exact, whatever the order of sums.
"""

import os
import socket
import zlib
from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from errors import RunFailed
from parallelisms.float8 import plain_weight
from parallelisms.parallelize import ParallelModel
from training.due import every

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
MOST_PARTS = 8  # kinds of parts of parameters that a rank holds: cut by FSDP alone, by tp too, whole, ...
SHOWN = 3  # names of parameters in a message
Part = str  # which part of parameters a rank holds: its coordinates on the axes that cut them


class ReplicasDiverged(RunFailed):
    """Ranks hold other bits in what should be the same weights; the message says who, where, since when."""


class Fingerprints:
    """Compared every `interval` steps and before every save; all ranks together. 0: never."""

    def __init__(self, model: ParallelModel, interval: int) -> None:
        self.interval = interval if dist.get_world_size() > 1 else 0
        self.device = model.device
        self.alike = "as the run began"
        self.parts: dict[Part, dict[str, Tensor]] = {}
        for name, parameter in model.parameters.items():
            self.parts.setdefault(part_of(parameter, model.mesh.rank("pp")), {})[name] = parameter
        assert len(self.parts) <= MOST_PARTS, list(self.parts)

    def compare(self, step: int, saves: bool) -> None:
        """ReplicasDiverged on every rank where two of them differ; then nothing is saved."""
        if not self.interval or not (saves or every(self.interval, step)):
            return
        found = self._of_all_ranks()
        if any(len({digest for _, digest in ranks}) > 1 for ranks in found.values()):
            raise ReplicasDiverged(self._diagnosis(step))
        self.alike = f"after step {step}"

    def _of_all_ranks(self) -> dict[int, list[tuple[int, int]]]:
        """Checksum of a part's name -> (rank, fingerprint) of each rank that has it."""
        mine = torch.zeros(MOST_PARTS, 2, dtype=torch.int64, device=self.device)
        for row, (part, parameters) in enumerate(self.parts.items()):
            mine[row, 0] = zlib.crc32(part.encode())
            mine[row, 1] = combined(parameters.values())
        every_rank = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every_rank, mine)
        found: dict[int, list[tuple[int, int]]] = {}
        for rank, rows in enumerate(every_rank):
            for part, digest in rows.tolist():
                if part:
                    found.setdefault(part, []).append((rank, digest))
        return found

    def _diagnosis(self, step: int) -> str:
        """In words: all ranks say what they hold in each parameter."""
        mine = {
            part: {name: int(fingerprint(p)) for name, p in parameters.items()}
            for part, parameters in self.parts.items()
        }
        told: list = [None] * dist.get_world_size()
        dist.all_gather_object(told, (f"{socket.gethostname()}, pid {os.getpid()}", mine))
        who = [place for place, _ in told]
        odd, others, names = most_different([each for _, each in told])
        places = ", ".join(f"rank {rank} ({who[rank]})" for rank in odd)
        against = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        hint = "" if len(others) > len(odd) else ", and which of them is right cannot be told from two"
        return (
            f"step {step}: replicas have diverged: {places} holds other bits than {against} in "
            f"{', '.join(names[:SHOWN])}{more}{hint}; all were alike {self.alike}. A device that computes "
            "wrong or memory that flips does this, or code that decides on one rank alone. Ranks compare "
            "before every save, so that the checkpoints there are sound: start again to go on from the "
            "newest, and if the same rank is named again, without its host"
        )


def part_of(parameter: Tensor, stage: int) -> Part:
    """Which part of a parameter this rank holds: "stage 0, fsdp 1, tp 0", by the axes that cut it."""
    named = [f"stage {stage}"]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
        cut = [axis for axis, size, how in axes if size > 1 and not how.is_replicate()]
        named += [f"{axis} {mesh.get_local_rank(axis)}" for axis in cut]
    return ", ".join(named)


@torch.no_grad()
def fingerprint(parameter: Tensor) -> Tensor:
    """Sum of the bits of this rank's part, an int64 scalar on the device."""
    plain = plain_weight(parameter)
    local = (plain.to_local() if isinstance(plain, DTensor) else plain).detach().reshape(-1)
    numbers = (
        8 // local.element_size()
    )  # in one int64, of which a CPU adds up 16 times as many bytes a second
    if local.storage_offset() % numbers:
        local = local.clone()
    whole = len(local) // numbers * numbers
    rest = local[whole:].view(INTEGERS[local.element_size()])
    return local[:whole].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def combined(parameters: Iterable[Tensor]) -> Tensor:
    """Of many: an int64 scalar on their device; sums wrap around."""
    sums = torch.stack([fingerprint(parameter) for parameter in parameters])
    factors = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return (sums * factors).sum()


def most_different(told: list[dict[Part, dict[str, int]]]) -> tuple[list[int], list[int], list[str]]:
    """(ranks that stand alone, those they differ from, names of parameters), of the first part in which ranks
    differ.
    """
    for part in dict.fromkeys(part for parts in told for part in parts):
        held = {rank: tuple(parts[part].values()) for rank, parts in enumerate(told) if part in parts}
        common, _ = Counter(held.values()).most_common(1)[0]
        odd = [rank for rank, values in held.items() if values != common]
        if odd:
            names = list(told[odd[0]][part])
            differing = [n for n, a, b in zip(names, common, held[odd[0]], strict=True) if a != b]
            return odd, [rank for rank in held if rank not in odd], differing
    raise AssertionError("no two ranks differ")
