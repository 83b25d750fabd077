"""Conservation of global means (`model.conserve`); models/conservation.py defines it, for whole fields."""

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
    """Return the projection of outputs, which are changes over their deviations; area (H,). DataError."""
    if not quantities:
        return None
    # -- variables with missing cells, whose global mean is not known
    names = variables_of(quantities, variables)
    indices = [variables.index(name) for name in names]
    for name, index in zip(names, indices, strict=True):
        if statistics.missing is None:
            break  # a forecast: the training has checked this
        counts, cells = statistics.missing[:, index], statistics.mean_field[0].size
        if number := int(((counts > 0) & (counts < cells)).sum()):
            raise DataError(
                f"model.conserve = {list(quantities)}: {name} has no value in some cells on {number} of "
                f"{len(counts)} dates; leave it out, or fill these cells"
            )
    deviations = dict(zip(variables, statistics.change_std, strict=True))
    rows = [names.index(shifted_variable(quantity, variables)) for quantity in quantities]
    return ConservationProjection(indices, correction(coefficients(quantities, deviations), rows), area)


class ShardedProjection:
    """The conservation of global means (`model.conserve`) on this rank's shard of the outputs.

    models/conservation.py defines it, for whole fields. Ranks that share a sample add up their parts of the
    means, also in the backward pass. n: the variables that conserved quantities are made of.
    """

    def __init__(self, projection: ConservationProjection, area: Tensor, assembly: Any) -> None:
        """area (H,): weights of the rows of all fields; assembly: of training/assembly.py."""
        meta_model, self.shards = assembly.meta_model, assembly.model.shards
        self.used, self.correction = projection.used, projection.correction
        self.num_variables = len(assembly.normalizer.mean)
        columns = meta_model.grid_shape[1]
        fields = (area / (area.sum() * columns))[None, None, :, None].expand(1, 1, -1, columns)
        shard = self.shards.cut_output(meta_model.from_fields(fields.contiguous(), with_zeros=True))
        # (1, ...) of the cells that a shard has of a variable: 1 over all shards, 0 on padding.
        self.area = shard.flatten(0, shard.ndim - 3)

    def __call__(self, output: Tensor) -> Tensor:
        """Return the projected shard, float32, of a shard of the output."""
        return SubtractMeans.apply(output, self)  # type: ignore[return-value]

    def split_variables(self, output: Tensor) -> Tensor:
        """Return a view (B, V, ...) of a shard: of t tokens (B, t, V C) or of a tile (B, V, h, w)."""
        if output.ndim == 4:
            return output
        return output.unflatten(-1, (self.num_variables, -1)).movedim(-2, 1)

    def sums(self, output: Tensor, area: Tensor | None = None) -> Tensor:
        """Return the sums (B, n) float64 of `used` variables over all shards, of each cell times its area."""
        fields = self.split_variables(output)
        cells = [fields[:, i] if area is None else fields[:, i].float() * area for i in self.used]
        sums = torch.stack([values.flatten(1).sum(1, dtype=torch.float64) for values in cells], dim=1)
        return self.shards.sum_over_shards(sums)


class SubtractMeans(torch.autograd.Function):
    """x - C mean(x) with the correction C (n, n): linear, so that its gradient is g - area C' sum(g)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, projection: ShardedProjection) -> Tensor:
        ctx.projection, ctx.dtype = projection, output.dtype
        shift = (projection.sums(output, projection.area) @ projection.correction.T).float()  # (B, n)
        result = output.float().clone()
        fields = projection.split_variables(result)
        for number, variable in enumerate(projection.used):
            fields[:, variable] -= shift[:, number].view(-1, 1, 1)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        projection, result = ctx.projection, gradients[0].float().clone()
        fields = projection.split_variables(result)
        shift = (projection.sums(result) @ projection.correction).float()  # (B, n)
        for number, variable in enumerate(projection.used):
            fields[:, variable] -= shift[:, number].view(-1, 1, 1) * projection.area
        return result.to(ctx.dtype), None
