"""ZeRO-1: parameters are replicated, optimizer states sharded, each parameter's on one rank.

Rajbhandari et al. 2020. The owner of a parameter updates it and sends it to the others: the arithmetic is
DDP's, bit-exact.
"""

import torch
import torch.distributed as dist
from torch import nn


def assign_owners(parameters: dict[str, nn.Parameter], num_ranks: int) -> dict[str, int]:
    """Return the rank that updates each parameter: largest first, each assigned to the least loaded rank."""
    loads, result = [0] * num_ranks, {}
    for name, parameter in sorted(parameters.items(), key=lambda item: (-item[1].numel(), item[0])):
        rank = loads.index(min(loads))
        result[name] = rank
        loads[rank] += parameter.numel()
    return result


class Zero1:
    """The owners of parameters in a group of replicas."""

    def __init__(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self.group = parameters, group
        self.owner = assign_owners(parameters, dist.get_world_size(group))

    def mine(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's optimizer."""
        return self._owned_by(dist.get_rank(self.group))

    @torch.no_grad()
    def broadcast_updates(self) -> None:
        """Send the parameters of every owner to all ranks, in one message each, after an update."""
        for rank in range(dist.get_world_size(self.group)):
            owned = list(self._owned_by(rank).values())
            if not owned:
                continue
            flat = torch.cat([p.flatten() for p in owned])
            dist.broadcast(flat, group=self.group, group_src=rank)
            for parameter, part in zip(owned, flat.split([p.numel() for p in owned]), strict=True):
                parameter.copy_(part.view_as(parameter))

    def _owned_by(self, rank: int) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters.items() if self.owner[name] == rank}
