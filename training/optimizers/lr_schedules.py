"""The learning rate as a pure function of the step: no state to save or restore."""

import math

from config import LrScheduler, Optimizer

# Linear: Goyal et al. 2017. Square root: Krizhevsky 2014, and the NERSC tutorial.
SCALINGS = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
# Factor of the learning rate in the decay, as a function of its progress from 0 to 1.
DECAYS = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


def peak_lr(lr: float, scaling: str, reference_batch: int, global_batch: int, ceiling: float) -> float:
    """Return `lr` scaled from the reference batch size to the run's, at most `ceiling`. 0: not scaled."""
    if reference_batch:
        lr *= SCALINGS[scaling](global_batch / reference_batch)
    return min(lr, ceiling)


def lr_factor(
    step: int, steps: int, warmup_steps: int, decay_type: str, min_factor: float, decay_ratio: float = 1.0
) -> float:
    """Return the fraction of the peak learning rate for the update that ends step `step` of 1 to `steps`.

    Linear warm-up that reaches 1 at step `warmup_steps`, then down to `min_factor` at the last step, over
    the last `decay_ratio` of the steps (Hu et al. 2024, arXiv:2404.06395: warm-up, stable, decay).
    """
    if step < warmup_steps:
        return step / warmup_steps
    begin = max(warmup_steps, steps - round(decay_ratio * steps))
    if decay_type == "constant" or step <= begin:
        return 1.0
    progress = min((step - begin) / max(steps - begin, 1), 1.0)
    return min_factor + (1 - min_factor) * DECAYS[decay_type](progress)


def learning_rate(
    optimizer: Optimizer, schedule: LrScheduler, steps: int, global_batch: int, step: int
) -> float:
    """Return the learning rate of the update that ends step `step` of `steps`, of `global_batch` samples."""
    reference, ceiling = optimizer.lr_reference_batch_size, optimizer.lr_max
    peak = peak_lr(optimizer.lr, optimizer.lr_scaling, reference, global_batch, ceiling)
    decay_type, min_factor, decay_ratio = schedule.decay_type, schedule.min_lr_factor, schedule.decay_ratio
    return peak * lr_factor(step, steps, schedule.warmup_steps, decay_type, min_factor, decay_ratio)
