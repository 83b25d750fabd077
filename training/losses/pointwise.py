"""Losses of normalised fields, in float32: weighted sums of penalties over cells, computed shard by shard.

Shapes: B samples, M members of an ensemble, V variables, H latitudes, W longitudes. The members of a sample
are adjacent: (B M, ...). A shard is a rank's part of a prediction: some of its tokens or a tile of its grid.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny

# -- penalties: squared, absolute and ensemble (CRPS), each with its slope for the gradient


@dataclass(frozen=True)
class Penalty:
    """A penalty function and its slope. Members of an ensemble are the last dim of errors (`by_member`)."""

    power: int  # cost(a error) = a^power cost(error), for a > 0: scales of variables are factors of a cost
    cost: Callable[[Tensor], Tensor]
    slope_: Callable[[Tensor], Tensor]  # in place: overwrites the error
    root_of: str = ""  # "variable" or "sample": the root of its sum over one is taken (`root_loss`)


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
PENALTIES = {  # by training.loss
    "mse": SQUARE,
    "rmse": replace(SQUARE, root_of="variable"),
    "mae": ABSOLUTE,
    "crps": CRPS,
    "relative_l2": replace(SQUARE, root_of="sample"),
}


# -- weights of cells and variables, from whole fields, so that no rank needs a mean from another


def mean_weights(mask: Tensor, area: Tensor, variable_weights: Tensor) -> Tensor:
    """Return weights (B, V, H, W) with which a weighted sum of penalties is their area-weighted mean.

    mask (bool) (B, V, H, W); area (H,) with mean 1; variable_weights (V,). The mean is taken over the cells
    that have a value, of each sample and variable first, then over these: so it does not depend on how a
    batch is divided.
    """
    weights = mask * area[:, None]  # (B, V, H, W)
    total = weights.sum(dim=(-2, -1), keepdim=True).clamp_min(TINY)  # (B, V, 1, 1)
    # In place, to avoid three more tensors of the size of the batch.
    return weights.div_(total).mul_(variable_weights[:, None, None] / (mask.shape[0] * mask.shape[1]))


def relative_l2_weights(mask: Tensor, target: Tensor) -> Tensor:
    """Return weights (B, V, H, W) with which a sample's weighted sum of squares is |p - y|^2 / |y|^2.

    The NERSC tutorial's loss is the mean over samples of the root of that; it is not weighted by area.
    """
    squares = (mask * target).square().sum(dim=(1, 2, 3), keepdim=True)  # (B, 1, 1, 1)
    return mask / squares.clamp_min(TINY)


# -- sums


def sum_of_costs(
    output: Tensor, target: Tensor, weights: Tensor, penalty: Penalty = SQUARE, dim: int | None = None
) -> Tensor:
    """Return the weighted sum of the penalties of a shard's errors, (B,). All arguments are (B, ...).

    dim: a dim that is kept, (B, size). Computed in float32, one sample at a time, because the errors of a
    whole batch would take five times its memory.
    """
    return SumOfCosts.apply(output, target, weights, penalty, dim)  # type: ignore[return-value]


def fused_sum_of_costs(
    output: Tensor, target: Tensor, weights: Tensor, penalty: Penalty, dim: int | None = None
) -> Tensor:
    """`sum_of_costs` for a compiler, which recomputes the errors in the backward pass by itself."""
    costs = weights * penalty.cost(output.float() - target)
    return costs.flatten(1).sum(1) if dim is None else costs.movedim(dim, 1).flatten(2).sum(2)


class SumOfCosts(torch.autograd.Function):
    """Saves its arguments and recomputes the errors in backward. The gradient has the output's dtype."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, target: Tensor, weights: Tensor, penalty: Penalty, dim: int | None
    ) -> Tensor:
        ctx.save_for_backward(output, target, weights)
        ctx.penalty, ctx.dim = penalty, dim
        summed = [i for i in range(output.ndim - 1) if dim is None or i != dim - 1]
        samples = zip(output, target, weights, strict=True)
        return torch.stack([(w * penalty.cost(p.float() - y)).sum(summed) for p, y, w in samples])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        output, target, weights = ctx.saved_tensors
        result = torch.empty_like(output)
        shape = [-1 if i + 1 == ctx.dim else 1 for i in range(output.ndim - 1)]
        for i, gradient in enumerate(gradients[0]):
            slope = ctx.penalty.slope_(output[i].float() - target[i])
            result[i] = slope.mul_(gradient.view(shape)).mul_(weights[i])
        return result, None, None, None, None


def root_loss(squares: Tensor, number: int, sum_over_shards: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this shard's part of sum sqrt(S) / number, S a sum over shards. Parts add up to the loss.

    d sqrt(S) = dS / (2 sqrt(S)), while S_shard / sqrt(S) has the right value and twice that gradient.
    """
    total = sum_over_shards(squares.detach().clone())
    # A variable without any value has weights 0; its gradient must be 0, not 0 times infinity.
    part = torch.where(total > 0, squares / total.sqrt().clamp_min(TINY), 0.0).sum() / number
    return part / 2 + (part / 2).detach()
