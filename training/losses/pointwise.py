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
