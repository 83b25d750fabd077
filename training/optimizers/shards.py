"""This rank's parts of parameters, gradients and moments, as plain tensors for kernels, and AdamW on them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from parallelisms.float8 import plain_weight

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam and its relatives, which also have a "step" in their state


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part itself, not a copy."""
    tensor = plain_weight(tensor.detach())
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient; tensor parallelism may leave it partial or sharded otherwise."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return local(grad).contiguous()


def with_gradient(group: dict) -> list[nn.Parameter]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def moment_names(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names in the state of a parameter: AdamW's, unless the optimizer has a method for it."""
    names_of = getattr(optimizer, "moment_names", None)
    return names_of(parameter) if names_of else ("step", *MOMENTS)


def zero_moment(parameter: nn.Parameter, name: str) -> Tensor:
    """Return a moment before the first step: zeros, sharded like the parameter."""
    if name == "step":  # the fused kernel wants it on the device of the weights
        return torch.zeros((), device=parameter.device)
    return torch.zeros_like(plain_weight(parameter.detach()), dtype=torch.float32)


def allocate(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Create the states of parameters that have none yet."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        for name in moment_names(optimizer, parameter) if not state else ():
            state[name] = zero_moment(parameter, name)


def adamw_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    group: dict,
    bad: Tensor | None,
    directions: list[Tensor] | None = None,
) -> None:
    """Update parameters with torch's fused AdamW. `bad` is 0 or 1, a float; 1 leaves everything bit-exact.

    directions: the gradients, to be replaced by Adam's directions m / (sqrt(v) + eps), bias-corrected; the
    parameters stay unchanged.
    """
    allocate(optimizer, parameters)
    states = [optimizer.state[parameter] for parameter in parameters]
    # For directions the kernel gets the gradients as weights, too: with a learning rate and a weight decay of
    # -1 it computes gradient - gradient + direction, in the memory of the gradient.
    adamw(
        directions or [local(p) for p in parameters],
        directions or [gradient(p) for p in parameters],
        [local(state[MOMENTS[0]]) for state in states],
        [local(state[MOMENTS[1]]) for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=bad,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=-1.0 if directions else group["lr"],
        weight_decay=-1.0 if directions else group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
