"""What is minimised: the loss of a batch, on the shard of it that a rank has, and of whole fields.

Shapes: B batch, V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from datasets.conditions import Conditions
from datasets.normalization import Normalizer
from jobs.heartbeat import activity
from models.build import WeatherModel
from parallelisms.compile import compiled
from parallelisms.parallelize import Shards
from training.due import ONE_STEP, Rollouts
from training.losses import (
    change_weights,
    fused_sum_of_squares,
    mse_loss,
    mse_weights,
    relative_l2_loss,
    relative_l2_weights,
    sum_of_squares,
)


class Objective:
    """`name`: "mse", weighted by area (H,) and variable (V,), or "relative_l2", the NERSC tutorial's."""

    def __init__(
        self,
        name: str,
        geometry: WeatherModel,
        shards: Shards,
        conditions: Conditions,
        normalizer: Normalizer,
        area: Tensor,
        variables: Tensor,
        weight_by_change: bool,
        local_batch_size: int,
        rollouts: Rollouts = ONE_STEP,
        step_seconds: int = 0,
    ) -> None:
        """step_seconds: of a step of the model."""
        self.relative, self.local_batch_size = name == "relative_l2", local_batch_size
        self.rollouts, self.step_seconds = rollouts, step_seconds
        self.geometry, self.shards = geometry, shards
        self.conditions, self.normalizer, self.area = conditions, normalizer, area
        change = change_weights(normalizer.change_scale.flatten()) if weight_by_change else 1.0
        self.variables = variables.to(area.device) * change
        self.sum_of_squares: Callable[[Tensor, Tensor, Tensor], Tensor] = sum_of_squares

    def compile(self) -> None:
        """One graph for the cut and one for the loss: operator by operator fields are read and written four
        times as often. Of whole fields, in validations, the loss stays as it is.
        """
        self.cut, self.cut_from = compiled(self.cut), compiled(self.cut_from)
        self.sum_of_squares = compiled(fused_sum_of_squares)

    def weights(self, target: Tensor, mask: Tensor) -> Tensor:
        """(B, V, H, W): what each squared error of a normalised state weighs."""
        if self.relative:
            return relative_l2_weights(mask, target)
        return mse_weights(mask, self.area, self.variables)

    def cut(self, fields: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank has of a batch (B, 2, V, H, W): the model's input, its expected output, weights."""
        return self.cut_from(self.normalizer.normalize(fields[:, 0])[0], fields[:, 1], times)

    def cut_from(self, state: Tensor, truth: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of normalised states, and of physical fields one step later (B, V, H, W)."""
        target, mask = self.normalizer.normalize(truth)
        weights = self.weights(target, mask).mul_(self.normalizer.output_scale.square())
        from_fields: Any = self.geometry.from_fields
        return (
            self.shards.cut_input(from_fields(self.conditions.append(state, times))),
            self.shards.cut_output(from_fields(self.normalizer.expected_output(state, target))),
            self.shards.cut_output(from_fields(weights, with_zeros=True)),
        )

    def loss_part(self, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        """The part of the loss that a shard of a batch has; the parts of all ranks add up to it."""
        squares = self.sum_of_squares(output, target, weights)  # (B,)
        if self.relative:
            return relative_l2_loss(squares, self.local_batch_size, self.shards.sum_over_shards)
        return mse_loss(squares)

    def of_fields(self, predicted: Tensor, truth: Tensor) -> Tensor:
        """The loss of whole physical fields (1, V, H, W)."""
        activity.progress()  # a validation may take as long as it likes while it gets on
        target, mask = self.normalizer.normalize(truth)
        weights = self.weights(target, mask)
        squares = sum_of_squares(self.normalizer.normalize(predicted)[0], target, weights)
        return torch.mean(squares.sqrt()) if self.relative else mse_loss(squares)
