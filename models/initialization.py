"""Initial weights: each parameter is a function of the seed and its name alone."""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from models.lora import ADAPTERS, adapter_std

CUT = 2.0  # standard deviations at which the normal distribution is cut


def fill_with_nan(model: nn.Module) -> None:
    """Fill all tensors with NaN, so that a parameter without initial weights is noticed."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))


def init_weights(
    model: nn.Module,
    seed: int,
    assign: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Initialize every parameter from (seed, its name): equal on every layout, in any order of construction.

    `assign(parameter, value)` copies the full value into a parameter, or a part of it into a sharded one.
    Uses as many threads as torch has.
    """

    def initialize(name: str, parameter: nn.Parameter) -> None:
        is_adapter = name.endswith(ADAPTERS)
        std = adapter_std(name, parameter.shape[1]) if is_adapter else model.initial_std(name)  # type: ignore[operator]
        with torch.no_grad():  # set for each thread
            assign(parameter, initial_value(name, parameter.shape, std, seed))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(initialize, *zip(*model.named_parameters(), strict=True)))


def initial_value(name: str, shape: torch.Size, std: float | None, seed: int) -> Tensor:
    """Return the float32 value of one parameter, on the CPU: normal, cut at two standard deviations.

    Uses the inverse of the distribution, like `trunc_normal_` of torch 2.11. That of torch 2.13 redraws the
    whole tensor until all numbers are inside, which takes ten times as long.
    """
    if std is None:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    inside = math.erf(CUT / math.sqrt(2))  # fraction of a normal distribution
    value = torch.empty(shape).uniform_(-inside, inside, generator=generator).erfinv_()
    return value.mul_(std * math.sqrt(2)).clamp_(-CUT * std, CUT * std)
