"""What is minimised: the loss of a batch, on the shard of it that a rank has, and of whole fields.

Shapes: B batch, M members of a sample (1 but for an ensemble), side by side: B M, h states of a window
(datasets/window.py), V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from datasets.conditions import Conditions
from datasets.field_dataset import split_sample
from datasets.normalization import Normalizer
from jobs.heartbeat import activity
from models.noise import keys_of_members
from models.weather_model import WeatherModel
from parallelisms.compile import compiled
from parallelisms.parallelize import Shards
from training.due import ONE_STEP, Rollouts
from training.losses.conservation import FREE, Kept
from training.losses.penalties import Penalty, by_member
from training.losses.pointwise import fused_sum_of_costs, relative_l2_loss, sum_of_costs
from training.losses.spectral import SpectralPart, amse
from training.losses.weights import change_weights, mean_weights, relative_l2_weights
from training.replay import Replay


class Objective:
    """The mean of what errors cost, weighted by area (H,) and variable (V,), or `relative`: the NERSC
    tutorial's relative L2.

    Errors are those of the model's output, costs in units of normalised states.
    """

    replay: Replay | None = None  # where steps start from forecasts of earlier ones

    def __init__(
        self,
        penalty: Penalty,
        relative: bool,
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
        spectral_fraction: float = 0.0,
        members: int = 1,
        seed: int = 0,
        kept: Kept = FREE,
    ) -> None:
        """step_seconds: of a step of the model; spectral_fraction: of the loss, AMSE; seed: of noise."""
        self.penalty, self.relative, self.local_batch_size = penalty, relative, local_batch_size
        self.rollouts, self.step_seconds = rollouts, step_seconds
        self.geometry, self.shards, self.spectral_fraction = geometry, shards, spectral_fraction
        self.members, self.seed, self.kept = members, seed, kept
        self.conditions, self.normalizer, self.area = conditions, normalizer, area
        ratio = normalizer.change_scale.flatten()
        change = change_weights(ratio, penalty.power) if weight_by_change else 1.0
        self.variables = variables.to(area.device) * change
        self.sum_of_costs: Callable[..., Tensor] = partial(sum_of_costs, penalty=penalty)

    def compile(self) -> None:
        """One graph for the cut and one for the loss: operator by operator fields are read and written four
        times as often. Of whole fields, in validations, the loss stays as it is.
        """
        self.cut, self.cut_from = compiled(self.cut), compiled(self.cut_from)
        self.sum_of_costs = compiled(partial(fused_sum_of_costs, penalty=self.penalty))

    def weights(self, target: Tensor, mask: Tensor) -> Tensor:
        """(B, V, H, W): what the cost of each error of a normalised state weighs."""
        if self.relative:
            return relative_l2_weights(mask, target)
        return mean_weights(mask, self.area, self.variables)

    def of_members(self, values: Tensor) -> Tensor:
        """(B, ...) -> (B M, ...)."""
        return values if self.members == 1 else values.repeat_interleave(self.members, dim=0)

    def keys(self, step: int, times: Tensor) -> Tensor:
        """(B M,): of the noise in training step `step`, for samples that start at `times` (B,)."""
        return keys_of_members(self.seed, step, times, self.members)

    def cut(self, fields: Tensor, times: Tensor, *noise: Tensor) -> list[Tensor]:
        """What this rank has of a batch (B, h + 1, V, H, W): the model's input, its expected output, weights,
        for a spectral loss the truth times the root of what it weighs, and the state where a quantity that is
        paid for needs it; of all members, with their noise.
        """
        window, truth = split_sample(fields, self.normalizer.history)
        window = self.of_members(self.normalizer.normalize_window(window))
        return self.cut_from(window, truth[:, 0], times, *noise)

    def cut_from(self, window: Tensor, truth: Tensor, times: Tensor, *noise: Tensor) -> list[Tensor]:
        """The same of normalised windows (B M, h V, H, W), and physical fields a step later (B, V, H, W)."""
        state = self.normalizer.newest(window)
        target, mask = self.normalizer.normalize(truth)
        weights = self.weights(target, mask)
        further = [weights.sqrt() * target] if self.spectral_fraction else []
        weights.mul_(self.normalizer.output_scale.pow(self.penalty.power) / self.members)
        target, weights, times = map(self.of_members, (target, weights, times))
        further += [state] if self.kept.squares else []
        from_fields: Any = self.geometry.from_fields
        return [
            self.shards.cut_input(from_fields(self.conditions.append(window, times, *noise))),
            self.shards.cut_output(from_fields(self.normalizer.expected_output(state, target))),
            *(self.shards.cut_output(from_fields(each, with_zeros=True)) for each in (weights, *further)),
        ]

    def loss_part(self, output: Tensor, target: Tensor, weights: Tensor, *truth: Tensor) -> Tensor:
        """The part of the loss that a shard of a batch has; the parts of all ranks add up to it."""
        parts = (by_member(each, self.members) for each in (output, target, weights))
        costs = self.sum_of_costs(*parts)  # (B,)
        if self.relative:
            return relative_l2_loss(costs, self.local_batch_size, self.shards.sum_over_shards)
        if not truth:
            return costs.sum()
        part = SpectralPart.apply(output, target, weights, *truth, self.shards, self.geometry)
        return torch.lerp(costs.sum(), part, self.spectral_fraction)

    def of_fields(self, predicted: Tensor, truth: Tensor) -> Tensor:
        """The loss of whole physical fields, of one date: (M, V, H, W), and a truth (1, V, H, W)."""
        activity.progress()  # a validation may take as long as it likes while it gets on
        target, mask = self.normalizer.normalize(truth)
        scale = self.normalizer.output_scale
        weights = self.weights(target, mask).mul_(scale.pow(self.penalty.power) / len(predicted))
        output = self.normalizer.normalize(predicted)[0].div_(scale)
        target.div_(scale)
        parts = (by_member(each.expand_as(output), len(output)) for each in (output, target, weights))
        costs = sum_of_costs(*parts, penalty=self.penalty)
        if not self.spectral_fraction:
            return torch.mean(costs.sqrt()) if self.relative else costs.sum()
        roots = weights.sqrt_()
        spectral = amse(roots * (output - target), roots * target)
        return torch.lerp(costs.sum(), spectral, self.spectral_fraction)
