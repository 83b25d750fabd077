"""The critical batch size, beyond which more samples add little to a step, from accumulated micro-batches.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: with |G|^2 the squared norm of the true gradient and
S the sum of its components' variances over samples, the gradient of B samples has E |g_B|^2 = |G|^2 + S / B.
Norms at two batch sizes give both, and S / |G|^2 is the critical batch size. The large batch is the global
one, with the norm that clipping needs; the small one is a rank's first micro-batch, before any reduction.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallelisms.parallelize import ParallelModel

DECAY = 0.99  # of the averages at each step: the norm of a single step is mostly noise


class NoiseScale:
    """Averages over steps of both squared norms, of each rank's own micro-batches until they are logged."""

    def __init__(self, model: ParallelModel, local_batch: int) -> None:
        self.model, self.small, self.large = model, local_batch, local_batch  # samples
        self.square = torch.zeros((), device=model.device)  # of this step's small batch, times the loss scale
        self.means = torch.zeros(2, device=model.device)  # small, large: both from 0, so their ratio is right

    def first_micro_batch(self, micro_batches: int) -> None:
        """Measure the gradients of the first of this step's micro-batches, before the others are added."""
        large = self.small * micro_batches * self.model.mesh.degrees.dp
        if large != self.large:  # the first step, or the next stage of a batch ramp
            self.large = large
            self.means.zero_()
        if micro_batches > 1:
            norm = torch.nn.utils.get_total_norm(list(local_gradients(self.model)))
            self.square = (norm * micro_batches).square()

    def step(self, norm: Tensor, loss_scale: float) -> None:
        """Update the averages, unless a norm is not finite. norm: of the global batch, unscaled."""
        squares = torch.stack([self.square / loss_scale**2, norm.detach().float().square()])
        updated = self.means.lerp(squares, 1 - DECAY)
        self.means = torch.where(squares.isfinite().all(), updated, self.means)

    def critical_batch(self) -> float | None:
        """Return the critical batch size in samples. Called by all ranks; synchronizes with the device.

        None: one micro-batch a step, or averages without any gradient, only noise.
        """
        if self.large == self.small * self.model.mesh.degrees.dp:
            return None
        means = self.means.clone()
        dist.all_reduce(means)
        small, large = (means / dist.get_world_size()).tolist()
        return critical_batch(small, large, self.small, self.large)


def local_gradients(model: ParallelModel) -> Iterator[Tensor]:
    """Yield this rank's accumulated gradients: FSDP keeps its own until it reduces them."""
    for module in (module for part in model.parts for module in part.modules()):
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group else ():
            accumulated = parameter.unsharded_accumulated_grad  # if the reduction has another dtype
            grad = parameter.unsharded_param.grad if accumulated is None else accumulated
            yield from () if grad is None else (grad,)
    yield from (p.grad for p in model.parameters.values() if p.grad is not None)


def critical_batch(small_square: float, large_square: float, small: int, large: int) -> float | None:
    """Return the critical batch from mean squared gradient norms of `small` and of `large` samples."""
    gradient = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return max(noise, 0.0) / gradient if gradient > 0 else None


def build_noise_scale(model: ParallelModel, local_batch: int, micro_batches: int) -> NoiseScale | None:
    """Return None where no rank has the whole gradient of a smaller batch: with one micro-batch a step, and
    where a layout splits the model or a sample. micro_batches: the most of any step.
    """
    return None if micro_batches == 1 or model.mesh.degrees.splits_model else NoiseScale(model, local_batch)
