"""Low-rank adapters (LoRA): the matrices of a ViT's blocks are frozen; two thin ones for each are trained.

Hu et al. 2021 (arXiv:2106.09685): W x becomes W x + SCALE B (A x), with A (rank, in) random and B (out,
rank) zero, so that the first step is the base model's. W keeps its name, so that checkpoints of the base are
loaded by name. Shapes: B batch, T tokens, r rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Lora

ADAPTERS = ("lora_a", "lora_b")
SCALE = 2.0  # Hu et al.'s alpha / rank: alpha = 2 rank, so that a learning rate suits all ranks


class AdaptedLinear(nn.Linear):
    """x (B, T, in) -> (B, T, out): a frozen matrix with its frozen bias, and its trained adapter."""

    def __init__(self, plain: nn.Linear, rank: int) -> None:
        """Create the adapter on the device of `plain`, the meta device; weights are initialized later."""
        device, bias = plain.weight.device, plain.bias is not None
        super().__init__(plain.in_features, plain.out_features, bias, device, torch.float32)
        self.lora_a = nn.Parameter(torch.empty(rank, plain.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(plain.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        # In autocast's precision, or that of x; of plain tensors.
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)
        adapted = F.linear(SCALE * F.linear(x, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype))
        output = F.linear(x, self.weight.to(x.dtype)) + adapted
        return output if self.bias is None else output + self.bias.to(output.dtype)


def apply_lora(model: nn.Module, lora: Lora) -> None:
    """Add adapters to all matrices of the blocks of a model on the meta device, and freeze the rest.

    The parts in `lora.also_train` are not frozen.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.startswith("blocks."):
            model.set_submodule(name, AdaptedLinear(layer, lora.rank))
    for name, parameter in model.named_parameters():
        in_list = name.partition(".")[0] in lora.also_train or ("norms" in lora.also_train and "norm" in name)
        parameter.requires_grad_(name.endswith(ADAPTERS) or in_list)


def trained(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained; frozen ones have no gradients and no moments."""
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trained parameters and of all."""
    named = dict(model.named_parameters())
    return sum(p.numel() for p in trained(named).values()), sum(p.numel() for p in named.values())


def adapter_std(name: str, in_features: int) -> float:
    """Standard deviation of an initial adapter: A as in Hu et al.'s code (Kaiming, a = sqrt 5), B is 0."""
    return (3 * in_features) ** -0.5 if name.endswith("lora_a") else 0.0


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Replace every adapted layer by the plain one of the same product: W + SCALE B A, float32."""
    adapted = {name: layer for name, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}
    for name, layer in adapted.items():
        has_bias = layer.bias is not None
        plain = nn.Linear(layer.in_features, layer.out_features, has_bias, layer.weight.device)
        plain.weight.copy_(layer.weight + SCALE * (layer.lora_b @ layer.lora_a))
        if has_bias:
            plain.bias.copy_(layer.bias)
        model.set_submodule(name, plain)
