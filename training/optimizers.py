"""The optimiser, and which parameters decay."""

import torch
from torch import nn

from training.optimizer_states import CompactAdamW


def build_optimizer(
    parameters: dict[str, nn.Parameter],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    state_dtype: str = "float32",
) -> torch.optim.AdamW:
    """AdamW over two groups. Its learning rate is set at every step, from training/lr_schedules.py.

    The kernel is the fused one, which leaves out a bad step by itself, on the device. `state_dtype`
    "bfloat16" or "int8": moments rest in so few bits between steps.
    """
    groups = parameter_groups(parameters, weight_decay)
    if state_dtype != "float32":
        return CompactAdamW(groups, state_dtype, betas, eps)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def parameter_groups(parameters: dict[str, nn.Parameter], weight_decay: float) -> list[dict]:
    """Matrices decay; norms, biases and positions do not: shrinking them would move what they stand for."""
    named = parameters.items()
    still = {name for name, p in named if p.ndim < 2 or "position." in name}
    return [
        {"params": [p for name, p in named if name not in still], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in still], "weight_decay": 0.0},
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
