"""Low-rank adapters (LoRA): matrices of a ViT's blocks stay as they are, and a thin one beside each trains.

Hu et al. 2021 (arXiv:2106.09685): W x becomes W x + (alpha / rank) B (A x), with A (rank, in) drawn at random
and B (out, rank) zero, so that the first step is the base model's. W rests as float32, bfloat16, or int8 with
a scale a row (torchao's quantisation), and keeps its name, so that checkpoints of the base are read by name.

Shapes: B batch, T tokens, r rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Lora

ADAPTERS = ("lora_a", "lora_b")


class AdaptedLinear(nn.Linear):
    """x (B, T, in) -> (B, T, out): a frozen matrix, its frozen bias, and the adapter that trains."""

    weight_scale: nn.Parameter | None

    def __init__(self, plain: nn.Linear, rank: int, alpha: float, base_dtype: str) -> None:
        """On the device of `plain`, the meta device: weights come later."""
        device, bias = plain.weight.device, plain.bias is not None
        super().__init__(plain.in_features, plain.out_features, bias, device, torch.float32)
        weight = torch.empty_like(plain.weight, dtype=getattr(torch, base_dtype))
        self.weight = nn.Parameter(weight, requires_grad=False)
        scale = torch.empty(plain.out_features, 1, device=device) if base_dtype == "int8" else None
        self.weight_scale = None if scale is None else nn.Parameter(scale)
        self.lora_a = nn.Parameter(torch.empty(rank, plain.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(plain.out_features, rank, device=device))
        self.factor = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        output = adapted_product(
            x, self.weight, self.weight_scale, self.lora_a, self.lora_b, factor=self.factor
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


def adapted_product(
    x: Tensor, weight: Tensor, scale: Tensor | None, lora_a: Tensor, lora_b: Tensor, factor: float
) -> Tensor:
    """W x + factor B (A x) of plain tensors, in autocast's precision or that of x."""
    kind = x.device.type
    x = x.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)
    if weight.dtype.itemsize < x.dtype.itemsize:
        base = RestingProduct.apply(x, weight, scale)
    else:
        base = F.linear(x, weight.to(x.dtype))
    return base + F.linear(factor * F.linear(x, lora_a.to(x.dtype)), lora_b.to(x.dtype))


class RestingProduct(torch.autograd.Function):
    """x (..., in) W^T, of a frozen W that rests in fewer bits than x has.

    Backward makes W in the precision of x anew: kept from forward, the copies of all layers would take more
    than the bits that rest save.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(x, awake(weight, scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight, scale = ctx.saved_tensors
        return gradient @ awake(weight, scale, gradient.dtype), None, None


def awake(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A resting matrix in the precision that products have."""
    return weight.to(dtype) if scale is None else weight.to(dtype) * scale.to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (out, in) float32 -> int8 and the scales of its rows (out, 1): torchao's symmetric quantisation.

    Scales are bfloat16 numbers, held as float32: FSDP gathers them in the precision of products, and would
    round them in one layout and not in another.
    """
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    block: Any = (1, weight.shape[1])  # a scale a row
    scale, zero = choose_qparams_affine(weight, MappingType.SYMMETRIC, block, torch.int8, eps=1e-12)
    scale = scale.bfloat16().float()
    return quantize_affine(weight, block, scale, zero, torch.int8), scale[:, None]


def apply_lora(model: nn.Module, lora: Lora) -> None:
    """Adapters beside all matrices of the blocks of a model on the meta device; nothing else trains but what
    `lora.also_train` names.
    """
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for name in layers:
        if name.startswith("blocks."):
            adapted = AdaptedLinear(model.get_submodule(name), lora.rank, lora.alpha, lora.base_dtype)  # type: ignore[arg-type]
            model.set_submodule(name, adapted)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name, lora.also_train))


def trains(name: str, also: tuple[str, ...]) -> bool:
    """Whether a parameter is an adapter's, or of a part of the model that trains with them."""
    part = name.partition(".")[0]
    return name.endswith(ADAPTERS) or part in also or ("norms" in also and "norm" in name)


def trained(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that an optimiser updates; frozen ones have neither gradients nor moments."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def count(model: nn.Module) -> tuple[int, int]:
    """Parameters that train, and all; a scale is no parameter of the model's."""
    named = dict(model.named_parameters())
    numbers = {name: p.numel() for name, p in named.items() if not name.endswith("weight_scale")}
    return sum(numbers[name] for name in trained(named)), sum(numbers.values())


def share_that_trains(model: nn.Module) -> str:
    """In words, for the log."""
    some, every = count(model)
    return f"{some:,} of {every:,} parameters train ({some / every:.2%})"


def adapter_std(name: str, in_features: int) -> float:
    """Of the start of an adapter: A as Hu et al.'s code draws it (Kaiming, a = sqrt 5), B is 0."""
    return (3 * in_features) ** -0.5 if name.endswith("lora_a") else 0.0


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Makes of every adapted layer the plain one that computes the same: W + (alpha / rank) B A, float32."""
    adapted = {name: layer for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}
    for name, layer in adapted.items():
        device = layer.weight.device
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device)
        base = awake(layer.weight, layer.weight_scale, torch.float32)
        plain.weight.copy_(base + layer.factor * (layer.lora_b @ layer.lora_a))
        if layer.bias is not None:
            plain.bias.copy_(layer.bias)
        model.set_submodule(name, plain)
