"""torch's fused AdamW over this rank's shards: every number has an update of its own."""

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from training.optimizers.shards import MOMENTS, allocate, gradient, local


def adamw_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], group: dict, bad: Tensor | None
) -> None:
    """Of parameters whose moments are float32. `bad` (0 or 1 as a float): 1 changes nothing, to the bit."""
    for parameter in parameters:
        allocate(optimizer, parameter, ("step", *MOMENTS))
    moments = [[local(optimizer.state[p][name]) for p in parameters] for name in MOMENTS]
    update(optimizer, parameters, moments, group, bad)


def update(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    moments: list[list[Tensor]],
    group: dict,
    bad: Tensor | None,
) -> None:
    """The same with moments that lie elsewhere: first those of all parameters, then the second ones."""
    adamw(
        [local(p) for p in parameters],
        [gradient(p) for p in parameters],
        moments[0],
        moments[1],
        [],
        [optimizer.state[p]["step"] for p in parameters],
        fused=True,
        found_inf=bad,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
