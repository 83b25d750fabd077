"""Conservation of global means (`model.conserve`) for outputs that are sharded over ranks.

models/conservation.py defines it, for whole fields. Ranks that share a sample add up their parts of the
means, also in the backward pass.

Shapes: B batch, V variables, n of these that conserved quantities are made of, t tokens of C values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets.statistics import Statistics
from errors import DataError
from models.conservation import ConservationProjection, correction
from training.losses.quantities import coefficients, shifted_variable, variables_of


def build_conservation(
    quantities: Sequence[str], variables: Sequence[str], statistics: Statistics, area: np.ndarray
) -> ConservationProjection | None:
    """Return the projection of outputs, which are changes in units of their deviations; area (H,).

    Raises DataError if a variable that it needs has missing cells, because the global mean is then unknown.
    """
    if not quantities:
        return None
    names = variables_of(quantities, variables)
    for name in names:
        refuse_missing(quantities, name, variables.index(name), statistics)
    deviations = dict(zip(variables, statistics.change_std, strict=True))
    rows = [names.index(shifted_variable(quantity, variables)) for quantity in quantities]
    matrix = correction(coefficients(quantities, deviations), rows)
    return ConservationProjection([variables.index(name) for name in names], matrix, area)


def refuse_missing(quantities: Sequence[str], name: str, index: int, statistics: Statistics) -> None:
    if statistics.missing is None:
        return  # a forecast: the training has checked this
    counts, cells = statistics.missing[:, index], statistics.mean_field[0].size
    if number := int(((counts > 0) & (counts < cells)).sum()):
        raise DataError(
            f"model.conserve = {list(quantities)}: {name} has no value in some cells on {number} of "
            f"{len(counts)} dates; leave it out, or fill these cells"
        )


class ShardedProjection:
    """The projection of a model on this rank's shard of its outputs."""

    def __init__(self, projection: ConservationProjection, area: Tensor, assembly: Any) -> None:
        """area (H,): weights of the rows of all fields; assembly: of training/assembly.py."""
        meta_model, self.shards = assembly.meta_model, assembly.model.shards
        self.used, self.correction = projection.used, projection.correction
        self.num_variables = len(assembly.normalizer.mean)
        columns = meta_model.grid_shape[1]
        fields = (area / (area.sum() * columns))[None, None, :, None].expand(1, 1, -1, columns)
        part = self.shards.cut_output(meta_model.from_fields(fields.contiguous(), with_zeros=True))
        # (1, ...) of the cells that a shard has of a variable: 1 over all shards, 0 on padding.
        self.area = part.flatten(0, part.ndim - 3)

    def __call__(self, output: Tensor) -> Tensor:
        """Return the projected shard, float32, of a shard of the output."""
        return Project.apply(output, self)  # type: ignore[return-value]

    def by_variable(self, output: Tensor) -> Tensor:
        """Return a view (B, V, ...) of a shard: of tokens (B, t, V C) or of a tile (B, V, h, w)."""
        if output.ndim == 4:
            return output
        return output.unflatten(-1, (self.num_variables, -1)).movedim(-2, 1)

    def sums(self, output: Tensor, area: Tensor | None = None) -> Tensor:
        """Return the sums (B, n) float64 of `used` variables over all shards, of each cell times its area."""
        fields = self.by_variable(output)
        parts = [fields[:, i] if area is None else fields[:, i].float() * area for i in self.used]
        own = torch.stack([part.flatten(1).sum(1, dtype=torch.float64) for part in parts], dim=1)
        return self.shards.sum_over_shards(own)


class Project(torch.autograd.Function):
    """x - C mean(x) with the correction C (n, n): linear, so that its gradient is g - area C' sum(g)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, projection: ShardedProjection) -> Tensor:
        ctx.projection, ctx.dtype = projection, output.dtype
        shift = (projection.sums(output, projection.area) @ projection.correction.T).float()  # (B, n)
        result = output.float().clone()
        fields = projection.by_variable(result)
        for number, variable in enumerate(projection.used):
            fields[:, variable] -= shift[:, number].view(-1, 1, 1)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        projection, result = ctx.projection, gradients[0].float().clone()
        fields = projection.by_variable(result)
        shift = (projection.sums(result) @ projection.correction).float()  # (B, n)
        for number, variable in enumerate(projection.used):
            fields[:, variable] -= shift[:, number].view(-1, 1, 1) * projection.area
        return result.to(ctx.dtype), None
