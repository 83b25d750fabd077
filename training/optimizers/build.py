"""The optimizer of a configuration, its parameter groups, and the learning rate as a pure function of the
step: no state to save or restore.
"""

import math

import torch
from torch import nn

from config import LrScheduler, Optimizer
from training.optimizers.layerwise import LAMB, LARS, SGD, SharedSums
from training.optimizers.muon import Muon

EPS = 1e-8  # Kingma and Ba 2014: added to the root of the second moment
# Linear: Goyal et al. 2017. Square root: Krizhevsky 2014, and the NERSC tutorial.
SCALINGS = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
# Factor of the learning rate in the decay, as a function of its progress from 0 to 1.
DECAYS = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


def build_optimizer(
    parameters: dict[str, nn.Parameter], settings: Optimizer, sums: SharedSums, product_dtype: torch.dtype
) -> torch.optim.Optimizer:
    """Return the optimizer `settings.name`.

    parameters: those that this rank updates; product_dtype: of Muon's products of matrices. Every optimizer
    skips a bad step on the device by `found_inf`, as torch's fused kernels do.
    """
    groups = parameter_groups(parameters, settings.weight_decay)
    betas, momentum = settings.betas, settings.momentum
    match settings.name:
        case "AdamW":
            return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=EPS, fused=True)
        case "LAMB":
            return LAMB(groups, betas, EPS, sums)
        case "LARS":
            return LARS(groups, momentum, sums)
        case "SGD":
            return SGD(groups, momentum)
    # Muon updates matrices of blocks, AdamW embedding and head too, as Jordan et al. advise.
    inside = {name: p for name, p in parameters.items() if name.startswith("blocks.") and p.ndim > 1}
    outside = {name: p for name, p in parameters.items() if name not in inside}
    blocks = {"params": list(inside.values()), "weight_decay": settings.weight_decay, "blocks": True}
    outside_groups = [group | {"blocks": False} for group in parameter_groups(outside, settings.weight_decay)]
    return Muon([blocks] + outside_groups, betas, EPS, momentum, product_dtype)


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


def peak_lr(lr: float, scaling: str, reference_batch: int, global_batch: int) -> float:
    """Return `lr` scaled from the reference batch size to the run's. 0: not scaled."""
    return lr * SCALINGS[scaling](global_batch / reference_batch) if reference_batch else lr


def learning_rate(
    optimizer: Optimizer, schedule: LrScheduler, steps: int, global_batch: int, step: int
) -> float:
    """Return the learning rate of the update that ends step `step` of `steps`; global_batch: its samples.

    Linear warm-up that reaches the peak at step `warmup_steps`, then down to `min_lr_factor` at the last
    step, over the last `decay_ratio` of the steps (Hu et al. 2024, arXiv:2404.06395: warm-up, stable, decay).
    """
    reference, warmup = optimizer.lr_reference_batch_size, schedule.warmup_steps
    peak = peak_lr(optimizer.lr, optimizer.lr_scaling, reference, global_batch)
    if step < warmup:
        return peak * (step / warmup)
    begin = max(warmup, steps - round(schedule.decay_ratio * steps))
    if schedule.decay_type == "constant" or step <= begin:
        return peak
    progress = min((step - begin) / max(steps - begin, 1), 1.0)
    factor = schedule.min_lr_factor + (1 - schedule.min_lr_factor) * DECAYS[schedule.decay_type](progress)
    return peak * factor
