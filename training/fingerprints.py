"""Comparison of the weights of replicas, which start equal and take the same averaged gradients.

With a faulty device, flipped bits in memory, or code that decides on one rank alone, replicas train different
models while the loss continues to decrease. A fingerprint is the exact sum of a parameter's bits.
"""

import os
import socket

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
        sums: dict[str, dict[str, int]] = {}
        for shard, parameters in self.shards.items():
            values = torch.stack([sum_of_bits(parameter) for parameter in parameters.values()])
            sums[shard] = dict(zip(parameters, values.tolist(), strict=True))
        gathered = from_all_ranks((f"{socket.gethostname()}, pid {os.getpid()}", sums))

        # -- in each shard, the parameters with different sums on the ranks that have it
        for shard in dict.fromkeys(shard for _, of_rank in gathered for shard in of_rank):
            of_ranks = {
                rank: of_rank[shard] for rank, (_, of_rank) in enumerate(gathered) if shard in of_rank
            }
            names = []
            for name in next(iter(of_ranks.values())):
                values = [of_rank[name] for of_rank in of_ranks.values()]
                if min(values) != max(values):
                    names.append(name)
            if not names:
                continue
            places = [f"rank {rank} ({gathered[rank][0]})" for rank in of_ranks]
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            raise ReplicasDiverged(
                f"step {step}: replicas have diverged: {', '.join(places)} have different bits in "
                f"{', '.join(names[:MOST_NAMES])}{more}; all were alike {self.last_equal}. A device that "
                "computes wrong or memory that flips does this, or code that decides on one rank alone. "
                "Start again to go on from the newest checkpoint, which was compared before it was saved; if "
                "it happens again, without one of these hosts at a time"
            )
        self.last_equal = f"after step {step}"


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
