"""The norm of all gradients and the loss scaler of fp16: the same on every layout and all ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """All-reduce partial gradients, which tensor parallelism leaves for norms."""
    # Every operator on one would reduce it again, and torch 2.11's clipping does not change it.
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            placements = [Replicate() if p.is_partial() else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=placements)


def total_norm(parameters: Iterable[nn.Parameter], pipeline_group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the 2-norm of all gradients, a plain scalar; stages of a pipeline add theirs."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if pipeline_group is not None:
        square = norm.square()
        dist.all_reduce(square, group=pipeline_group)
        norm = square.sqrt()
    return norm


class LossScaler:
    """Dynamic loss scaling of fp16: doubled after `growth_interval` good steps, halved on overflow.

    One global gradient norm decides, on the device, so that all ranks decide alike and none waits. The factor
    is never below 1: gradients that overflow there are those of a bad step. Disabled, it is the number 1.
    """

    def __init__(
        self,
        enabled: bool,
        device: torch.device | str = "cpu",
        initial: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        self.enabled, self.growth_interval = enabled, growth_interval
        self.factor = torch.tensor(initial, device=device) if enabled else 1.0
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def may_overflow(self) -> Tensor | None:
        """Return True, on the device, if infinite gradients may be caused by the scale factor, and are not a
        bad step; None if disabled.
        """
        return self.factor > 1.0 if isinstance(self.factor, Tensor) else None

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the factor they were computed with."""
        if not isinstance(self.factor, Tensor):
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        if local:  # offloaded gradients are on the host, which then waits
            inverse = (1.0 / self.factor).to(local[0].device)
            torch._foreach_mul_(local, inverse)  # type: ignore[reportPrivateImportUsage]

    def update(self, norm: Tensor) -> Tensor:
        """Adjust the factor; return True, on the device, if the gradients have overflowed."""
        overflow = ~torch.isfinite(norm)
        if isinstance(self.factor, Tensor):
            self.good_steps += 1
            grows = self.good_steps == self.growth_interval
            grown = torch.where(grows, self.factor * 2, self.factor)
            self.factor = torch.where(overflow, (self.factor / 2).clamp(min=1.0), grown)
            self.good_steps.masked_fill_(overflow | grows, 0)
        return overflow & self.enabled
