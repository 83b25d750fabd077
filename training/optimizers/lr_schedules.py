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


def lr_factor(
    step: int, steps: int, warmup_steps: int, decay_type: str, min_factor: float, decay_ratio: float = 1.0
) -> float:
    """Fraction of the peak learning rate for the update that ends step `step` (1 is the first, `steps` the
    last).

    Linear warm-up that reaches 1 at step `warmup_steps`, then down to `min_factor` at the last step, over
    the last `decay_ratio` of the steps (Hu et al. 2024, arXiv:2404.06395: warm-up, stable, decay).
    """
    if step < warmup_steps:
        return step / warmup_steps
    begin = max(warmup_steps, steps - round(decay_ratio * steps))
    if decay_type == "constant" or step <= begin:
        return 1.0
    progress = min((step - begin) / max(steps - begin, 1), 1.0)
    falls = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
    }
    return min_factor + (1 - min_factor) * falls[decay_type]


def scheduled_factor(schedule: LrScheduler, steps: int, step: int) -> float:
    """Return the factor of a configuration's schedule at step `step` of `steps`."""
    warmup = round(schedule.warmup_fraction * steps) if schedule.warmup_fraction else schedule.warmup_steps
    shape = (schedule.decay_type, schedule.min_lr_factor, schedule.decay_ratio)
    return lr_factor(step, steps, warmup, *shape)


def learning_rate(
    optimizer: Optimizer, schedule: LrScheduler, steps: int, global_batch: int, step: int
) -> float:
    """Of the update that ends step `step` of `steps`, which had `global_batch` samples."""
    reference, ceiling = optimizer.lr_reference_batch_size, optimizer.lr_max
    peak = peak_lr(optimizer.lr, optimizer.lr_scaling, reference, global_batch, ceiling)
    return peak * scheduled_factor(schedule, steps, step)
