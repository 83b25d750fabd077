"""Weights that a model starts with: of every parameter a function of the seed and its name alone."""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from models.embeddings import SinCosPosition, SphericalPosition
from models.lora import ADAPTERS, adapter_std, quantize

CUT = 2.0  # standard deviations that no weight is beyond


def fill_with_nan(model: nn.Module) -> None:
    """So that a parameter which the initialisation forgets cannot pass unseen."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))


def init_weights(
    model: nn.Module,
    seed: int,
    name_of: Callable[[str], str] = str,
    assign: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Every parameter from (seed, its name) alone: the same on every layout, whatever is built first.

    `name_of` takes off what wrappers have put before a name; `assign(parameter, value)` puts the full value
    into a parameter, of which a sharded one takes its part. As many parameters at a time as torch has
    threads.
    """

    own = {name_of(wrapped): parameter for wrapped, parameter in model.named_parameters()}

    def start(name: str, parameter: nn.Parameter) -> None:
        shape = own[name.removesuffix("_scale")].shape
        if name.endswith(ADAPTERS):
            std = adapter_std(name, shape[1])
        else:
            std = model.initial_std(name.removesuffix("_scale"))  # type: ignore[operator]
        with torch.no_grad():  # which holds for a thread
            value = initial_value(name.removesuffix("_scale"), shape, std, seed)
            assign(parameter, resting(name, value, parameter.dtype))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(start, *zip(*own.items(), strict=True)))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, SinCosPosition):
                assign(module.embedding, module.values())
            if isinstance(module, SphericalPosition):
                assign(module.basis, module.values())


def resting(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """What a parameter holds of a float32 `value`: itself, or one of the two that int8 makes of a matrix."""
    if name.endswith("_scale"):
        return quantize(value)[1]
    return quantize(value)[0] if dtype == torch.int8 else value


def initial_value(name: str, shape: torch.Size, std: float | None, seed: int) -> Tensor:
    """The float32 start of one parameter, on the CPU: normal, cut at two standard deviations.

    Through the inverse of the distribution, as torch 2.11's `trunc_normal_`: that of 2.13 draws a whole
    tensor anew until the last number is inside, which takes ten times as long.
    """
    if std is None:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    inside = math.erf(CUT / math.sqrt(2))  # fraction of a normal distribution
    value = torch.empty(shape).uniform_(-inside, inside, generator=generator).erfinv_()
    return value.mul_(std * math.sqrt(2)).clamp_(-CUT * std, CUT * std)
