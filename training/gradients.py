"""The norm of all gradients, clipping, and the loss scaler of fp16: the same on every layout, for all ranks.
And what the passes that gradients come from share.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def casting_once(device: torch.device) -> torch.autocast:
    """Around all passes of a step: autocast keeps what it has cast of a weight until the outermost of its
    contexts ends. A compiled block casts its own in each pass, and FSDP what it gathers.
    """
    return torch.autocast(device.type, enabled=False)


def add_up(parameters: Iterable[nn.Parameter]) -> None:
    """Gradients of which each rank has a summand: tensor parallelism leaves those of norms so.

    Every operator on such a gradient would add it up anew, and torch 2.11's clipping does not change it.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
            parameter.grad = gradient.redistribute(placements=whole)


def total_norm(parameters: Iterable[nn.Parameter], pipeline_group: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients, a plain scalar; stages of a pipeline add theirs."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = summed(torch.nn.utils.get_total_norm(gradients))
    if pipeline_group is not None:
        square = norm.square()
        dist.all_reduce(square, group=pipeline_group)
        norm = square.sqrt()
    return norm


def summed(norm: Tensor) -> Tensor:
    """A norm of all ranks' parts, as a plain scalar."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales gradients down so that their norm is at most `max_norm`; 0 leaves them."""
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


class LossScaler:
    """Dynamic loss scaling of fp16: doubled after `growth_interval` good steps, halved on overflow.

    One global gradient norm decides, so that all ranks decide alike. Disabled, it does nothing.
    """

    def __init__(self, enabled: bool, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.enabled, self.growth_interval = enabled, growth_interval
        self.factor, self.good_steps = initial if enabled else 1.0, 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor if self.enabled else loss

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides the gradients by the factor they were computed with."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.enabled:
            for gradient in gradients:
                gradient.mul_(1.0 / self.factor)

    def good(self, norm: Tensor) -> bool:
        """Whether this step may be taken; adjusts the factor. Reads the device, in fp16 only."""
        if not self.enabled:
            return True
        if not torch.isfinite(norm):
            self.factor, self.good_steps = self.factor / 2, 0
            return False
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.factor, self.good_steps = self.factor * 2, 0
        return True

    def state(self) -> dict[str, Tensor]:
        if not self.enabled:
            return {}
        values = {"factor": self.factor, "good_steps": float(self.good_steps)}
        return {f"scaler.{name}": torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.enabled:
            self.factor = state["scaler.factor"].item()
            self.good_steps = int(state["scaler.good_steps"].item())
