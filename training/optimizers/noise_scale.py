"""The gradient noise scale: how many samples a batch may have before more of them add little to a step.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: with |G|^2 the squared norm of the true gradient and
S the sum of its components' variances over samples, the gradient of B samples has E |g_B|^2 = |G|^2 + S / B.
Norms at two sizes of batch give both, and their ratio S / |G|^2 is the critical batch. The large batch is
the global one, whose norm clipping needs anyhow; the small one is what a rank has before any exchange.
"""

import logging

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from parallelisms.parallelize import ParallelModel
from training.gradients import total_norm

logger = logging.getLogger(__name__)
KEPT = 0.99  # of the averages at each step: norms of single steps are noise themselves
SETTLED = 100  # steps from which on the averages are good enough for advice
FAR = 4  # times the critical batch


class NoiseScale:
    """Averages of both squared norms over steps. A rank keeps those of its own small batches; what all have
    is put together when somebody asks.
    """

    def __init__(
        self, model: ParallelModel, small: int, large: int, micro_batches: int, reduced: bool
    ) -> None:
        """Samples in a small and in the large batch. reduced: a rank's gradient is seen on its way to the
        others; else after the first of `micro_batches`, as long as it is not exchanged.
        """
        self.model, self.small, self.large = model, small, large
        self.micro_batches, self.reduced = micro_batches, reduced
        self.square = torch.zeros((), device=model.device)  # of this step's small batch, times the scales
        self.means = torch.zeros(
            2, device=model.device
        )  # small, large; both begin at 0, so their ratio is right
        self.steps, self.has_advised = 0, False
        if reduced:
            watch_reductions(model, self.square)

    def first_micro_batch(self, micro_batches: int) -> None:
        """Its gradients are there, and no others, of this step's micro-batches."""
        if micro_batches != self.micro_batches:
            self._begin_anew(micro_batches)
        if not self.reduced:
            norm = total_norm(self.model.parameters.values())
            self.square += (norm * self.micro_batches).square()

    def _begin_anew(self, micro_batches: int) -> None:
        """Averages of norms are those of two sizes, and a ramp has come to others."""
        self.large = self.large // self.micro_batches * micro_batches
        self.micro_batches, self.steps = micro_batches, 0
        self.means.zero_()

    def step(self, norm: Tensor, loss_scale: float) -> None:
        """norm: of the global batch's gradients, unscaled. A step that is not finite does not count."""
        # Gradients on their way are those of all micro-batches, each divided by the number of these.
        square = self.square * self.micro_batches if self.reduced else self.square
        seen = torch.stack([square / loss_scale**2, norm.detach().float().square()])
        grown = self.means.lerp(seen, 1 - KEPT)
        self.means = torch.where(seen.isfinite().all(), grown, self.means)
        self.square.zero_()
        self.steps += 1

    def critical_batch(self) -> float | None:
        """In samples. None: gradients are nothing but noise so far, or there is no smaller batch in this
        stage of a ramp. All ranks; waits for the device.
        """
        if self.small == self.large:
            return None
        means = self.means.clone()
        dist.all_reduce(means)
        small, large = (means / dist.get_world_size()).tolist()
        return critical_batch(small, large, self.small, self.large)

    def advise(self, critical: float | None) -> None:
        """Once, in one line."""
        if self.has_advised or critical is None or self.steps < SETTLED or self.large <= FAR * critical:
            return
        self.has_advised = True
        samples = (critical + self.large) / (critical + 1)  # it may be a fraction, a batch is not
        steps = 1 + critical / self.large
        logger.warning(
            f"the global batch of {self.large} samples lies far beyond the critical one, about "
            f"{shown(critical)}: it takes {samples:.2g} times the samples that batches of one need, and "
            f"{steps:.1f} times the steps that the largest need (docs/batch_and_rate.md)"
        )


def shown(critical: float) -> str:
    return f"{critical:.0f}" if critical >= 10 else f"{critical:.2g}"


def critical_batch(small_square: float, large_square: float, small: int, large: int) -> float | None:
    """From mean squared norms of gradients of `small` and of `large` samples: samples, or None."""
    gradient = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1 / small - 1 / large)
    return max(noise, 0.0) / gradient if gradient > 0 else None


def build_noise_scale(
    model: ParallelModel,
    local_batch: int,
    micro_batches: int,
    reduce_dtype: torch.dtype,
    gradient_steps: int = 1,
) -> NoiseScale | None:
    """None where no rank ever has the gradient of a smaller batch than the global one, whole: one micro-batch
    on one rank, or on each of DDP's, and whatever divides a sample. float16 divides gradients on their way,
    and FSDP reduces those of each step of a rollout by themselves.

    micro_batches: of a step; the most of them, where they become more.
    """
    degrees = model.mesh.degrees
    large = local_batch * micro_batches * degrees.dp
    if degrees.splits_model or (degrees.uses_fsdp and reduce_dtype == torch.float16):
        return None
    if degrees.uses_fsdp:
        whole = gradient_steps == 1
        return NoiseScale(model, local_batch, large, micro_batches, reduced=True) if whole else None
    if micro_batches == 1:
        return None
    return NoiseScale(model, local_batch, large, micro_batches, reduced=False)


def watch_reductions(model: ParallelModel, square: Tensor) -> None:
    """FSDP has a rank's gradients whole, of one micro-batch, in one flat tensor a block."""
    watched = WatchedReduceScatter(square)
    for part in model.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(watched)


class WatchedReduceScatter(DefaultReduceScatter):
    """FSDP's own, which adds the squared norm of what a rank gives to `square`: in FSDP's stream, where the
    reductions of a step follow each other, and for which it waits at the end of backward.
    """

    def __init__(self, square: Tensor) -> None:
        super().__init__()
        self.square = square

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *others, **options) -> dist.Work:
        self.square += torch.linalg.vector_norm(input_tensor, dtype=torch.float32).square()
        return super().__call__(output_tensor, input_tensor, *others, **options)
