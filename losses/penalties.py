"""What an error costs: squared, absolute and Huber errors, with the slopes that gradients are made of."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalty:
    """What an error costs, and the slope of that, which takes the place of the error: it is computed in its
    memory.
    """

    power: int  # of small errors, that their cost grows by
    cost: Callable[[Tensor], Tensor]
    slope_: Callable[[Tensor], Tensor]


SQUARE = Penalty(2, torch.square, lambda error: error.mul_(2))
ABSOLUTE = Penalty(1, torch.abs, Tensor.sign_)


def huber(threshold: float) -> Penalty:
    """e^2/2 up to the threshold d, d (|e| - d/2) beyond it (Huber 1964)."""

    def cost(error: Tensor) -> Tensor:
        slope = error.clamp(-threshold, threshold)
        return slope * (error - slope / 2)

    return Penalty(2, cost, lambda error: error.clamp_(-threshold, threshold))


def penalty_of(loss: str, huber_threshold: float) -> Penalty:
    """Of `training.loss`; the root of "relative_l2" comes after the sum."""
    return {"mae": ABSOLUTE, "huber": huber(huber_threshold)}.get(loss, SQUARE)
