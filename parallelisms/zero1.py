"""ZeRO-1: parameters are replicated, optimiser states are dealt out, each parameter to one rank.

Rajbhandari et al. 2020. An update is made by the rank that owns the parameter and sent to the others: the
same arithmetic as DDP's, so the same bits.
"""

import torch
import torch.distributed as dist
from torch import nn


def owners(parameters: dict[str, nn.Parameter], num_ranks: int) -> dict[str, int]:
    """The rank that updates each parameter: the largest first, each to whom has least."""
    loads, result = [0] * num_ranks, {}
    for name, parameter in sorted(parameters.items(), key=lambda item: (-item[1].numel(), item[0])):
        rank = loads.index(min(loads))
        result[name] = rank
        loads[rank] += parameter.numel()
    return result


class Zero1:
    """Who owns what in a group of replicas."""

    def __init__(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters, self.group = parameters, group
        self.owner = owners(parameters, dist.get_world_size(group))

    def mine(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank's optimiser is made of."""
        rank = dist.get_rank(self.group)
        return {name: p for name, p in self.parameters.items() if self.owner[name] == rank}

    @torch.no_grad()
    def broadcast_updates(self) -> None:
        """After the optimiser's step: every owner broadcasts what it has, in one message."""
        for rank in range(dist.get_world_size(self.group)):
            owned = [p for name, p in self.parameters.items() if self.owner[name] == rank]
            if not owned:
                continue
            flat = torch.cat([p.flatten() for p in owned])
            dist.broadcast(flat, group=self.group, group_src=rank)
            for parameter, part in zip(owned, flat.split([p.numel() for p in owned]), strict=True):
                parameter.copy_(part.view_as(parameter))
