"""Penalty functions of an error: squared, absolute and ensemble (CRPS), each with its slope for the gradient.

Shapes: B samples, M members of an ensemble. The members of a sample are adjacent: (B M, ...).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalty:
    """A penalty function and its slope. Members of an ensemble are the last dim of errors (`by_member`)."""

    power: int  # cost(a error) = a^power cost(error), for a > 0: scales of variables are factors of a cost
    cost: Callable[[Tensor], Tensor]
    slope_: Callable[[Tensor], Tensor]  # in place: overwrites the error


SQUARE = Penalty(2, torch.square, lambda error: error.mul_(2))
ABSOLUTE = Penalty(1, torch.abs, Tensor.sign_)

# Lang et al. 2024, "AIFS-CRPS: Ensemble forecasting using a model trained with a loss function based on the
# Continuous Ranked Probability Score": the fraction of the fair CRPS; the rest is the plain one. The fair
# CRPS alone (1) does not depend on the position of one member if all others are right.
ALMOST_FAIR = 0.95


def by_member(values: Tensor, num_members: int) -> Tensor:
    """(B M, ...) -> (B, ..., M), a view."""
    return values.unflatten(0, (-1, num_members)).movedim(1, -1)


def pair_factor(num_members: int) -> float:
    """Return the factor of a member's summed distances from the other M - 1 members."""
    return (1 - (1 - ALMOST_FAIR) / num_members) / (num_members - 1)


def almost_fair_crps(error: Tensor) -> Tensor:
    """Return each member's part (..., M) of the almost fair CRPS of errors (..., M); their mean is

    mean |x_j - y| - (1 - e) / (2 M (M - 1)) x the sum over pairs |x_j - x_k|, e = (1 - ALMOST_FAIR) / M.
    Distances of members are those of their errors.
    """
    distances = sum((error - other).abs_() for other in error.split(1, dim=-1))  # (..., M)
    return error.abs() - pair_factor(error.shape[-1]) / 2 * distances


def almost_fair_crps_slope_(error: Tensor) -> Tensor:
    """Return the gradient of the sum of all members' parts with respect to each error (..., M)."""
    signs = sum((error - other).sign_() for other in error.split(1, dim=-1))
    return error.sign_().sub_(signs, alpha=pair_factor(error.shape[-1]))


CRPS = Penalty(1, almost_fair_crps, almost_fair_crps_slope_)
# Of `training.loss`. Roots are taken of sums of squares: `root_loss`.
PENALTIES = {"mse": SQUARE, "rmse": SQUARE, "mae": ABSOLUTE, "crps": CRPS, "relative_l2": SQUARE}
