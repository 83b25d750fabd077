"""The optimiser that a configuration names, and which parameters decay."""

import torch
from torch import nn

from config import Optimizer
from training.optimizers.compact_adamw import CompactAdamW
from training.optimizers.lamb import LAMB
from training.optimizers.momentum import LARS, SGD
from training.optimizers.muon import Muon
from training.optimizers.shared_sums import SharedSums


def build_optimizer(
    parameters: dict[str, nn.Parameter], settings: Optimizer, sums: SharedSums, product_dtype: torch.dtype
) -> torch.optim.Optimizer:
    """parameters: those that this rank updates; product_dtype: of Muon's products of matrices.

    The learning rate is set at every step, from lr_schedules.py. A bad step is left out on the
    device: every optimiser looks at `found_inf`, as torch's fused kernels do.
    """
    betas, eps, decay = (settings.beta1, settings.beta2), settings.eps, settings.weight_decay
    if settings.name == "AdamW":
        return build_adamw(parameters, betas, eps, decay, settings.state_dtype)
    if settings.name == "Muon":
        return Muon(muon_groups(parameters, decay), betas, eps, settings.momentum, product_dtype)
    groups, cap = parameter_groups(parameters, decay), settings.trust_ratio_max
    if settings.name == "LAMB":
        return LAMB(groups, betas, eps, cap, sums)
    if settings.name == "LARS":
        return LARS(groups, settings.momentum, settings.trust_coefficient, cap, sums)
    return SGD(groups, settings.momentum)


def build_adamw(
    parameters: dict[str, nn.Parameter],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    state_dtype: str = "float32",
) -> torch.optim.AdamW:
    """AdamW over two groups, with torch's fused kernel. `state_dtype` "bfloat16" or "int8": moments rest in
    so few bits between steps.
    """
    groups = parameter_groups(parameters, weight_decay)
    if state_dtype != "float32":
        return CompactAdamW(groups, state_dtype, betas, eps)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def parameter_groups(parameters: dict[str, nn.Parameter], weight_decay: float) -> list[dict]:
    """Matrices decay; norms, biases and positions do not: shrinking them would move what they stand for."""
    named = parameters.items()
    still = {name for name, p in named if p.ndim < 2 or "position." in name}
    matrices = [p for name, p in named if name not in still]
    others = [p for name, p in named if name in still]
    return [
        {"params": matrices, "weight_decay": weight_decay, "matrices": True},
        {"params": others, "weight_decay": 0.0, "matrices": False},
    ]


def muon_groups(parameters: dict[str, nn.Parameter], weight_decay: float) -> list[dict]:
    """The same, the matrices of blocks apart: embedding and head have AdamW, as Jordan et al. advise."""
    inside = {name: p for name, p in parameters.items() if name.startswith("blocks.") and p.ndim > 1}
    others = {name: p for name, p in parameters.items() if name not in inside}
    blocks = {"params": list(inside.values()), "weight_decay": weight_decay, "blocks": True}
    return [blocks, *({**group, "blocks": False} for group in parameter_groups(others, weight_decay))]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
