"""Losses of normalised fields, in float32: weighted sums over cells, computed shard by shard.

Shapes: B batch. A shard is a rank's part of a prediction: some of its tokens or a tile of its grid. Weights
of cells: training/losses/weights.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from training.losses.penalties import SQUARE, Penalty
from training.losses.weights import TINY


def sum_of_costs(output: Tensor, target: Tensor, weights: Tensor, penalty: Penalty = SQUARE) -> Tensor:
    """Return the weighted sum of the penalties of a shard's errors, (B,). All arguments are (B, ...).

    Computed in float32, one sample at a time: errors of a whole batch of fields would be five copies of it.
    """
    return SumOfCosts.apply(output, target, weights, penalty)  # type: ignore[return-value]


def fused_sum_of_costs(output: Tensor, target: Tensor, weights: Tensor, penalty: Penalty) -> Tensor:
    """`sum_of_costs` for a compiler, which recomputes the errors in the backward pass by itself."""
    return (weights * penalty.cost(output.float() - target)).flatten(1).sum(1)


class SumOfCosts(torch.autograd.Function):
    """Saves its arguments and recomputes the errors in backward. The gradient has the output's dtype."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor, weights: Tensor, penalty: Penalty) -> Tensor:
        ctx.save_for_backward(output, target, weights)
        ctx.penalty = penalty
        samples = zip(output, target, weights, strict=True)
        return torch.stack([(w * penalty.cost(p.float() - y)).sum() for p, y, w in samples])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        output, target, weights = ctx.saved_tensors
        result = torch.empty_like(output)
        for i, gradient in enumerate(gradients[0]):
            result[i] = ctx.penalty.slope_(output[i].float() - target[i]).mul_(gradient).mul_(weights[i])
        return result, None, None, None


def relative_l2_loss(squares: Tensor, batch_size: int, sum_over_shards: Callable[[Tensor], Tensor]) -> Tensor:
    """Return this shard's part of mean sqrt(S), S a sample's sum over its shards. Parts add up to the loss.

    d sqrt(S) = dS / (2 sqrt(S)), while S_shard / sqrt(S) has the right value and twice that gradient.
    """
    total = sum_over_shards(squares.detach().clone())
    part = (squares / total.sqrt().clamp_min(TINY)).sum() / batch_size
    return part / 2 + (part / 2).detach()
