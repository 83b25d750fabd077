"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from config import LrScheduler, Optimizer


def peak_lr(lr: float, scaling: str, reference_batch: int, global_batch: int, ceiling: float) -> float:
    """`lr`, grown linearly or with the square root from the reference batch to this run's, at most `ceiling`.

    Linear: Goyal et al. 2017. Square root: Krizhevsky 2014, and the NERSC tutorial.
    """
    if reference_batch:
        ratio = global_batch / reference_batch
        lr *= ratio if scaling == "linear" else math.sqrt(ratio)
    return min(lr, ceiling)


def lr_factor(step: int, steps: int, warmup_steps: int, decay_type: str, min_factor: float) -> float:
    """Fraction of the peak learning rate for the update that ends step `step` (1 is the first, `steps` the
    last).

    Linear warm-up that reaches 1 at step `warmup_steps`, then down to `min_factor` at the last step.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if decay_type == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if decay_type == "cosine" else 1 - progress
    return min_factor + (1 - min_factor) * fall


def learning_rate(
    optimizer: Optimizer, schedule: LrScheduler, steps: int, global_batch: int, step: int
) -> float:
    """Of the update that ends step `step` of `steps`, each of `global_batch` samples."""
    reference, ceiling = optimizer.lr_reference_batch_size, optimizer.lr_max
    peak = peak_lr(optimizer.lr, optimizer.lr_scaling, reference, global_batch, ceiling)
    shape = (schedule.warmup_steps, schedule.decay_type, schedule.min_lr_factor)
    return peak * lr_factor(step, steps, *shape)
