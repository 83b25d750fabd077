"""Conservation on the shards of a sample: outputs held to it, or what leaving it costs.

A shard is what a rank has of a prediction. Ranks that share a sample add up their parts of its means, in the
backward pass too. models/conservation.py says what is held, and does it to whole fields.

Shapes: B batch, Q quantities, V variables, n of these that quantities are made of, t tokens of C values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.weather_model import WeatherModel
from parallelisms.parallelize import Shards


@dataclass(frozen=True)
class Cells:
    """A rank's cells: its part of a mean over the globe, of variables `used` among `num_variables`."""

    area: Tensor  # (1, ...) of the cells that a shard has of a variable; 1 over all shards, 0 on padding
    used: Sequence[int]
    num_variables: int
    shards: Shards

    @classmethod
    def of(
        cls, area: Tensor, used: Sequence[int], num: int, geometry: WeatherModel, shards: Shards
    ) -> "Cells":
        """area (H,): weights of the rows of all fields."""
        columns = geometry.grid_shape[1]
        fields = (area / (area.sum() * columns))[None, None, :, None].expand(1, 1, -1, columns)
        part = shards.cut_output(geometry.from_fields(fields.contiguous(), with_zeros=True))
        return cls(part.flatten(0, part.ndim - 3), used, num, shards)

    def by_variable(self, output: Tensor) -> Tensor:
        """A view (B, V, ...) of a shard: of tokens (B, t, V C) or of a tile (B, V, h, w)."""
        if output.ndim == 4:
            return output
        return output.unflatten(-1, (self.num_variables, -1)).movedim(-2, 1)

    def own_means(self, output: Tensor) -> Tensor:
        """(B, n) float64: this shard's part of the global means."""
        fields = self.by_variable(output)
        parts = [(fields[:, i].float() * self.area).flatten(1) for i in self.used]
        return torch.stack([part.sum(1, dtype=torch.float64) for part in parts], dim=1)

    def summed(self, values: Tensor) -> Tensor:
        return self.shards.sum_over_shards(values.detach().clone())


class Hold(torch.autograd.Function):
    """x - C mean(x), C (n, n) a `correction`: linear, and so is its gradient g - area C' sum(g)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, correction: Tensor, cells: Cells) -> Tensor:
        ctx.correction, ctx.cells, ctx.dtype = correction, cells, output.dtype
        shift = (cells.summed(cells.own_means(output)) @ correction.T).float()  # (B, n)
        result = output.float().clone()
        fields = cells.by_variable(result)
        for number, variable in enumerate(cells.used):
            fields[:, variable] -= shift[:, number].view(-1, 1, 1)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cells, result = ctx.cells, gradients[0].float().clone()
        fields = cells.by_variable(result)
        sums = [fields[:, i].flatten(1).sum(1, dtype=torch.float64) for i in cells.used]
        sums = (cells.summed(torch.stack(sums, dim=1)) @ ctx.correction).float()  # (B, n)
        for number, variable in enumerate(cells.used):
            fields[:, variable] -= sums[:, number].view(-1, 1, 1) * cells.area
        return result.to(ctx.dtype), None, None


@dataclass(frozen=True)
class Squares:
    """The part of a quantity that is made of squares: of a change d of x, factor x (x d + d^2 / 2)."""

    row: int  # of the quantity
    used: Sequence[int]  # n variables
    mean: Sequence[float]  # (n,) and of the normalised state that a step starts from
    std: Sequence[float]
    change_std: Sequence[float]  # (n,) of 1 of the output
    factors: Sequence[float]  # (n,) what half a square of x counts, in the quantity's units

    def own_means(self, output: Tensor, start: Tensor, cells: Cells) -> Tensor:
        """(B,) float64: this shard's part of the global mean of its change."""
        changes, states = cells.by_variable(output), cells.by_variable(start)
        total = torch.zeros(len(output), dtype=torch.float64, device=output.device)
        columns = zip(self.used, self.mean, self.std, self.change_std, self.factors, strict=True)
        for index, mean, std, change_std, factor in columns:
            change = change_std * changes[:, index].float()
            grown = (mean + std * states[:, index].float() + change / 2) * change * cells.area
            total = total + factor * grown.flatten(1).sum(1, dtype=torch.float64)
        return total


@dataclass(frozen=True)
class Kept:
    """What becomes of an output before its loss is taken, and what the loss has beside."""

    cells: Cells | None = None
    correction: Tensor | None = None  # (n, n): outputs are held, as the model's steps are
    coefficients: Tensor | None = None  # (Q, n): outputs are free, and this is added to their loss:
    weight: float = 0.0  # x the sum of squares of the quantities' means, over
    num_samples: int = 1  # of a batch on this rank
    squares: Squares | None = None  # what `cost` needs the state for that a step starts from

    def split(self, expected: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What the loss is given, and what `cost` is: training/objective.py puts the state last."""
        return (expected[:-1], expected[-1:]) if self.squares else (expected, ())

    def hold(self, output: Tensor) -> Tensor:
        """The output that errors are those of; a tensor of its own, where it is not alone in the loss."""
        if self.cells and self.correction is not None:
            output = Hold.apply(output, self.correction, self.cells)  # type: ignore[assignment]
        return output if self.coefficients is None else output.view_as(output)

    def cost(self, output: Tensor, *start: Tensor) -> Tensor | float:
        """This shard's part. Of a square: the whole times a part has its value, and half its gradient.

        start: the state that a step starts from. It counts as given, also where it is a forecast.
        """
        if self.cells is None or self.coefficients is None:
            return 0.0
        own = self.cells.own_means(output) @ self.coefficients.T  # (B, Q)
        if self.squares:
            column = torch.arange(own.shape[1], device=own.device) == self.squares.row
            own = own + self.squares.own_means(output, start[0], self.cells)[:, None] * column
        part = (self.cells.summed(own) * own).sum() * (self.weight / self.num_samples)
        return (2 * part - part.detach()).float()


FREE = Kept()
