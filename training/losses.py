"""Losses of normalised fields, in float32, as weighted sums of squares that can be taken shard by shard.

Shapes: B batch, V variables, H latitudes, W longitudes. A shard is what a rank has of a prediction: some of
its tokens or a tile of its grid; weights are made of whole fields, so that no rank has to ask another for
a mean.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def mse_weights(mask: Tensor, area: Tensor, variable_weights: Tensor) -> Tensor:
    """(B, V, H, W) weights of squared errors whose weighted sum is the area-weighted mean squared error.

    mask (bool) (B, V, H, W); area (H,) with mean 1; variable_weights (V,). The mean is taken over the cells
    that have a value, of each sample and variable first, then over these: so it does not depend on how a
    batch is divided.
    """
    weights = mask * area[:, None]  # (B, V, H, W)
    total = weights.sum(dim=(-2, -1), keepdim=True).clamp_min(TINY)  # (B, V, 1, 1)
    # In place: three more fields of the size of the batch otherwise.
    return weights.div_(total).mul_(variable_weights[:, None, None] / (mask.shape[0] * mask.shape[1]))


def relative_l2_weights(mask: Tensor, target: Tensor) -> Tensor:
    """(B, V, H, W) weights of squared errors whose weighted sum over a sample is |p - y|^2 / |y|^2.

    The NERSC tutorial's loss is the mean over samples of the root of that; it is not weighted by area.
    """
    squares = (mask * target).square().sum(dim=(1, 2, 3), keepdim=True)  # (B, 1, 1, 1)
    return mask / squares.clamp_min(TINY)


def sum_of_squares(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """(B,): the weighted sum of squared errors of a shard, all of the same shape (B, ...).

    In float32, a sample at a time: errors of a whole batch of fields would be five copies of it.
    """
    return SumOfSquares.apply(output, target, weights)  # type: ignore[return-value]


def fused_sum_of_squares(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """`sum_of_squares` for a compiler, which keeps no error: it computes them again in the backward pass."""
    return (weights * (output.float() - target).square()).flatten(1).sum(1)


class SumOfSquares(torch.autograd.Function):
    """Keeps its arguments, and computes errors again for their gradient: 2 w (p - y), in p's precision."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(output, target, weights)
        samples = zip(output, target, weights, strict=True)
        return torch.stack([(w * (p.float() - y).square()).sum() for p, y, w in samples])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        output, target, weights = ctx.saved_tensors
        result = torch.empty_like(output)
        for i, gradient in enumerate(gradients[0]):
            result[i] = (output[i].float() - target[i]).mul_(2 * gradient).mul_(weights[i])
        return result, None, None


def mse_loss(squares: Tensor) -> Tensor:
    """This shard's part of the loss, from `sum_of_squares` with `mse_weights`."""
    return squares.sum()


def relative_l2_loss(squares: Tensor, batch_size: int, sum_over_shards: Callable[[Tensor], Tensor]) -> Tensor:
    """This shard's part of mean sqrt(S), where S sums over the shards of a sample; parts add up to the loss.

    d sqrt(S) = dS / (2 sqrt(S)), while S_shard / sqrt(S) has the right value and twice that gradient.
    """
    total = sum_over_shards(squares.detach().clone())
    part = (squares / total.sqrt().clamp_min(TINY)).sum() / batch_size
    return part / 2 + (part / 2).detach()


def variable_weights(given: tuple[float, ...], num_variables: int) -> Tensor:
    """(V,) weights that the user gives, or ones."""
    return torch.tensor(given) if given else torch.ones(num_variables)


def change_weights(change_ratio: Tensor) -> Tensor:
    """(V,) weights 1/(change std / std)^2: an error counts in units of a variable's typical change over a
    step.

    Slow variables are then not drowned by fast ones (GraphCast, Lam et al. 2023, section 4.2).
    """
    return change_ratio.square().reciprocal()
