"""The optimizer of a configuration, and its parameter groups."""

import torch
from torch import nn

from config import Optimizer
from training.optimizers.layerwise import LAMB, LARS, SGD, SharedSums
from training.optimizers.muon import Muon


def build_optimizer(
    parameters: dict[str, nn.Parameter], settings: Optimizer, sums: SharedSums, product_dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Return the optimizer `settings.name`.

    parameters: those that this rank updates; product_dtype: of Muon's products of matrices. lr_schedules.py
    gives the learning rate of each step. Every optimizer skips a bad step on the device by `found_inf`, as
    torch's fused kernels do.
    """
    groups = parameter_groups(parameters, settings.weight_decay)
    betas, eps, momentum = settings.betas, settings.eps, settings.momentum
    match settings.name:
        case "AdamW":
            return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        case "LAMB":
            return LAMB(groups, betas, eps, sums)
        case "LARS":
            return LARS(groups, momentum, sums)
        case "SGD":
            return SGD(groups, momentum)
    # Muon updates matrices of blocks, AdamW embedding and head too, as Jordan et al. advise.
    inside = {name: p for name, p in parameters.items() if name.startswith("blocks.") and p.ndim > 1}
    outside = {name: p for name, p in parameters.items() if name not in inside}
    blocks = {"params": list(inside.values()), "weight_decay": settings.weight_decay, "blocks": True}
    others = [group | {"blocks": False} for group in parameter_groups(outside, settings.weight_decay)]
    return Muon([blocks, *others], betas, eps, momentum, product_dtype)


def parameter_groups(parameters: dict[str, nn.Parameter], weight_decay: float) -> list[dict]:
    """Return the group of matrices, which decay, and that of norms, biases and positions, which do not."""
    no_decay = {name for name, p in parameters.items() if p.ndim < 2 or "position." in name}
    matrices = [p for name, p in parameters.items() if name not in no_decay]
    vectors = [p for name, p in parameters.items() if name in no_decay]
    return [
        {"params": matrices, "weight_decay": weight_decay, "matrices": True},
        {"params": vectors, "weight_decay": 0.0, "matrices": False},
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
