"""What an error costs: squared, absolute and Huber errors, and those of an ensemble together (CRPS), with the
slopes that gradients are made of.

Shapes: B samples, M members of an ensemble, which has one sample's members side by side: (B M, ...).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalty:
    """What an error costs, and the slope of that, which takes the place of the error: it is computed in its
    memory. Errors have the members of an ensemble last (`by_member`), where there is one.
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


# Lang et al. 2024, "AIFS-CRPS: Ensemble forecasting using a model trained with a loss function based on the
# Continuous Ranked Probability Score": so much of the fair CRPS, and the plain one for the rest. The fair
# one alone (1) does not care where one member is while all others are right.
ALMOST_FAIR = 0.95


def by_member(values: Tensor, num_members: int) -> Tensor:
    """(B M, ...) -> (B, ..., M), a view."""
    return values.unflatten(0, (-1, num_members)).movedim(1, -1)


def pairs_count(num_members: int) -> float:
    """What the mean distance of a member from the others counts in its cost, over M - 1 of them."""
    return (1 - (1 - ALMOST_FAIR) / num_members) / (num_members - 1)


def almost_fair_crps(error: Tensor) -> Tensor:
    """Of errors (..., M): each member's part (..., M), whose mean is the almost fair CRPS,

    mean |x_j - y| - (1 - e) / (2 M (M - 1)) x the sum over pairs |x_j - x_k|, e = (1 - ALMOST_FAIR) / M:
    members and their errors are equally far apart.
    """
    count = error.shape[-1]
    apart = sum((error - other).abs_() for other in error.split(1, dim=-1))  # (..., M)
    return error.abs() - pairs_count(count) / 2 * apart


def almost_fair_crps_slope_(error: Tensor) -> Tensor:
    """Of the sum of all members' parts, with respect to each error (..., M)."""
    sides = sum((error - other).sign_() for other in error.split(1, dim=-1))
    return error.sign_().sub_(sides, alpha=pairs_count(error.shape[-1]))


CRPS = Penalty(1, almost_fair_crps, almost_fair_crps_slope_)


def penalty_of(loss: str, huber_threshold: float = 1.0) -> Penalty:
    """Of `training.loss`; the root of "relative_l2" comes after the sum."""
    return {"mae": ABSOLUTE, "huber": huber(huber_threshold), "crps": CRPS}.get(loss, SQUARE)
