"""This rank's parts of parameters, gradients and moments, as plain tensors for kernels, and AdamW on them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from errors import ConfigError
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


def allocate(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Create the state of a parameter before its first step: zeros, sharded like the parameter."""
    state = optimizer.state[parameter]
    for name in moment_names(optimizer, parameter) if not state else ():
        state[name] = zero_moment(parameter, name)


def zero_moment(parameter: nn.Parameter, name: str) -> Tensor:
    if name == "step":  # the fused kernel wants it on the device of the weights
        return torch.zeros((), device=parameter.device)
    return torch.zeros_like(plain_weight(parameter.detach()), dtype=torch.float32)


def moment_names(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names in the state of a parameter: AdamW's, unless the optimizer has a method for it."""
    own = getattr(optimizer, "moment_names", None)
    return own(parameter) if own else ("step", *MOMENTS)


def empty_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str) -> Tensor:
    """Return the tensor into which a checkpoint's `optimizer.state[parameter][name]` is loaded.

    Raises ConfigError if another optimizer saved it; AdamW and LAMB have the same state.
    """
    if name not in moment_names(optimizer, parameter):
        raise ConfigError(
            f'optimizer.name = "{type(optimizer).__name__}": the checkpoint has states of another optimizer '
            f'("{name}"); set it back, or start from weights alone: checkpoint.initial_load_path, in a new '
            "job.dump_folder"
        )
    return zero_moment(parameter, name)


def adamw_step(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], group: dict, bad: Tensor | None
) -> None:
    """Update parameters with torch's fused AdamW. `bad` is 0 or 1, a float; 1 leaves everything bit-exact."""
    for parameter in parameters:
        allocate(optimizer, parameter)
    states = [optimizer.state[parameter] for parameter in parameters]
    first, second = ([local(state[name]) for state in states] for name in MOMENTS)
    adamw(
        [local(p) for p in parameters],
        [gradient(p) for p in parameters],
        first,
        second,
        [],
        [state["step"] for state in states],
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
