"""What a rank has of a parameter, its gradient and its moments, as plain tensors that kernels take."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.float8 import plain_weight

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam and its relatives, whose state has their "step" too


def local(tensor: Tensor) -> Tensor:
    """This rank's part itself, not a copy."""
    tensor = plain_weight(tensor.detach())
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of it. Tensor parallelism leaves sums of it to be made, and parts cut otherwise."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return local(grad).contiguous()


def zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Sharded as the parameter is."""
    return torch.zeros_like(plain_weight(parameter.detach()), dtype=dtype)


def with_gradient(group: dict) -> list[nn.Parameter]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def allocate(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: Sequence[str]) -> None:
    """A parameter's state before its first step: zeros."""
    state = optimizer.state[parameter]
    for name in moments if not state else ():
        scalar = torch.zeros((), device=parameter.device)
        state[name] = scalar if name == "step" else zeros_like(parameter, torch.float32)


def moments_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Names in the state of a parameter; those that say themselves are not AdamW's."""
    own = getattr(optimizer, "moments_of", None)
    return own(parameter) if own else ("step", *MOMENTS)
