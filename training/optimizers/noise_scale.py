"""The critical batch size, beyond which more samples add little to a step, from accumulated micro-batches.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: with |G|^2 the squared norm of the true gradient and
S the sum of its components' variances over samples, the gradient of B samples has E |g_B|^2 = |G|^2 + S / B.
Norms at two batch sizes give both, and S / |G|^2 is the critical batch size. The large batch is the global
one, with the norm that clipping needs; the small one is the first micro-batch, of a rank or of FSDP's ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from parallelisms.parallelize import ParallelModel
from training.gradients import total_norm

DECAY = 0.99  # of the averages at each step: the norm of a single step is mostly noise


class NoiseScale:
    """Averages over steps of both squared norms."""

    def __init__(self, model: ParallelModel, small: int, micro_batches: int) -> None:
        """small: samples that the gradient of a micro-batch is of, before replicas exchange theirs."""
        self.model, self.small, self.micro_batches = model, small, micro_batches
        self.large = micro_batches * small * model.mesh.degrees.dp_replicate
        self.square = torch.zeros((), device=model.device)  # of this step's small batch, times the loss scale
        self.means = torch.zeros(2, device=model.device)  # small, large: both from 0, so their ratio is right

    def restart(self) -> None:
        """Forget all steps."""
        self.means.zero_()

    def first_micro_batch(self) -> None:
        """Measure the gradients of the first of this step's micro-batches, before the others are added."""
        self.square = (total_norm(self.model.parameters.values()) * self.micro_batches).square()

    def step(self, norm: Tensor, loss_scale: float) -> None:
        """Update the averages, unless a norm is not finite. norm: of the global batch, unscaled."""
        squares = torch.stack([self.square / loss_scale**2, norm.detach().float().square()])
        updated = self.means.lerp(squares, 1 - DECAY)
        self.means = torch.where(squares.isfinite().all(), updated, self.means)

    def critical_batch(self) -> float | None:
        """Return the critical batch size in samples, None if the averages show nothing but noise.

        Called by all ranks; synchronizes with the device.
        """
        means = self.means.clone()
        dist.all_reduce(means)
        small, large = (means / dist.get_world_size()).tolist()
        return critical_batch(small, large, self.small, self.large)


def critical_batch(small_square: float, large_square: float, small: int, large: int) -> float | None:
    """Return the critical batch from mean squared gradient norms of `small` and of `large` samples."""
    gradient = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return max(noise, 0.0) / gradient if gradient > 0 else None


def build_noise_scale(model: ParallelModel, local_batch: int, micro_batches: int) -> NoiseScale | None:
    """Return None where no rank has the gradient of a smaller batch: with one micro-batch a step, with HSDP,
    which adds up the micro-batches itself, and where a layout splits the model or a sample.
    """
    degrees = model.mesh.degrees
    if micro_batches == 1 or degrees.splits_model or (degrees.uses_fsdp and degrees.dp_replicate > 1):
        return None
    return NoiseScale(model, local_batch * degrees.dp_shard, micro_batches)
