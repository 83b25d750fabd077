"""The loss of a batch, on this rank's shard of it, and of whole fields in validations.

Shapes: B batch, M members of a sample (1 without an ensemble), which lie next to each other in the batch dim;
h states of a window (datasets/field_dataset.py), V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import Config
from datasets.field_dataset import split_sample
from jobs.heartbeat import activity
from models.noise import hash64, keys_of_members
from parallelisms.compile import compiled
from training.assembly import Assembly
from training.conservation import ShardedProjection
from training.due import Rollouts
from training.losses.penalties import PENALTIES, by_member
from training.losses.pointwise import fused_sum_of_costs, root_loss, sum_of_costs
from training.losses.weights import change_weights, mean_weights, relative_l2_weights

DROP_STREAM = 2**32  # of a step's key: noise has the first streams


class Shards(NamedTuple):
    """This rank's shard of a micro-batch: the model's input, and the tensors of its loss by name.

    targets: "target", the expected output; "weights" of each of its errors. Each has the shape of the model's
    output.
    """

    inputs: Tensor
    targets: dict[str, Tensor]


class Objective:
    """The weighted mean of the penalties of errors, of the roots of those of each variable and sample, or the
    relative L2 loss of the NERSC tutorial.

    Errors are those of the model's output, penalties in units of normalised states.
    """

    def __init__(self, config: Config, assembly: Assembly, area: np.ndarray) -> None:
        """area (H,): weights of the rows."""
        training, model, normalizer = config.training, assembly.model, assembly.normalizer
        self.assembly, self.model, self.normalizer = assembly, model, normalizer
        self.meta_model: Any = assembly.meta_model
        self.shards, self.conditions = model.shards, assembly.conditions
        self.penalty, self.relative = PENALTIES[training.loss], training.loss == "relative_l2"
        self.by_variable = training.loss == "rmse"
        self.members, self.drops_branches = training.members, config.model.stochastic_depth > 0
        self.local_batch_size, self.seed = training.local_batch_size, training.seed
        self.rollouts, self.step_seconds = Rollouts.of(training), config.data.step_hours * 3600
        self.area = torch.tensor(area, dtype=torch.float32, device=model.device)
        number, forcing = len(normalizer.mean), normalizer.num_forcing
        given = training.variable_weights and (*training.variable_weights, *[0.0] * forcing)
        # The mean is taken over the predicted variables.
        weights = torch.tensor(given or [1.0] * number, device=model.device) * (number / (number - forcing))
        if training.weight_by_change:
            power = 1 if self.by_variable else self.penalty.power
            weights = weights * change_weights(normalizer.change_scale.flatten(), power)
        self.variable_weights = weights.square() if self.by_variable else weights  # before a root
        projection = normalizer.conservation
        self.projection = projection and ShardedProjection(projection, self.area, assembly)
        self.cut_step = self._cut_step
        dim = self.meta_model.variable_dim if self.by_variable else None
        if self.by_variable:
            self.variables_of_output = self._variables_of_output()
        self._sum_of_costs: Callable[..., Tensor] = partial(sum_of_costs, penalty=self.penalty, dim=dim)
        if config.compile.enable:
            # One graph each: uncompiled operators read and write fields four times as often.
            self.cut_step = compiled(self._cut_step)
            self._sum_of_costs = compiled(partial(fused_sum_of_costs, penalty=self.penalty, dim=dim))

    def repeat_members(self, values: Tensor) -> Tensor:
        """(B, ...) -> (B M, ...)."""
        return values if self.members == 1 else values.repeat_interleave(self.members, dim=0)

    def noise_keys(self, step: int, times: Tensor) -> Tensor:
        """Return the keys (B M,) of the noise in training step `step`, for samples that start at `times`."""
        return keys_of_members(self.seed, step, times, self.members)

    def drop_keys(self, keys: Tensor, times: Tensor) -> Tensor | None:
        """Return the keys (B M,) of the branches that a step from `times` (B,) drops; keys (B M,)."""
        if not self.drops_branches:
            return None
        return hash64(hash64(keys, self.repeat_members(times)), DROP_STREAM)

    def draw_noise(self, keys: Tensor, times: Tensor) -> list[Tensor]:
        """Return the noise (B M, N, H, W) of a step from `times` (B,), if the model takes noise."""
        return self.conditions.draw(keys, self.repeat_members(times))

    def cut(self, fields: Tensor, times: Tensor, *noise: Tensor) -> Shards:
        """Return this rank's shard of physical fields (B, h + 1, V, H, W) of `times` (B,), of all members."""
        window, truth = split_sample(fields, self.normalizer.history)
        window = self.repeat_members(self.normalizer.normalize_window(window))
        return self.cut_step(window, truth[:, 0], times, *noise)

    def _cut_step(self, window: Tensor, truth: Tensor, times: Tensor, *noise: Tensor) -> Shards:
        """Return the shard of a normalised window (B M, h V, H, W) and the physical truth (B, V, H, W)."""
        normalizer = self.normalizer
        state = normalizer.newest(window)
        target, mask = normalizer.normalize_target(truth)
        weights = self._weights(target, mask)
        weights.mul_(normalizer.output_scale.pow(self.penalty.power) / self.members)
        target, weights, times = map(self.repeat_members, (target, weights, times))
        from_fields, cut_output = self.meta_model.from_fields, self.shards.cut_output
        if normalizer.channels.of_target:
            window = normalizer.with_known(window, self.repeat_members(truth))
        inputs = self.shards.cut_input(from_fields(self.conditions.append(window, times, *noise)))
        targets = {"target": cut_output(from_fields(normalizer.expected_output(state, target)))}
        targets["weights"] = cut_output(from_fields(weights, with_zeros=True))
        return Shards(inputs, targets)

    def _weights(self, target: Tensor, mask: Tensor) -> Tensor:
        """Return the weight of each error of a normalised state, (B, V, H, W)."""
        if self.relative:
            return relative_l2_weights(mask, target)
        return mean_weights(mask, self.area, self.variable_weights)

    def project(self, output: Tensor) -> Tensor:
        """Return the output with the global means that the model conserves."""
        return self.projection(output) if self.projection else output

    def loss_part(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Return this rank's part of the loss of projected outputs; the parts of all ranks add up to it."""
        target, weights = targets["target"], targets["weights"]
        parts = (by_member(each, self.members) for each in (output, target, weights))
        costs: Tensor = self._sum_of_costs(*parts)  # (B,), or (B, size of `variable_dim`)
        number = self.local_batch_size
        if self.by_variable:
            number *= len(self.variable_weights)
            sums = costs.new_zeros(len(costs), len(self.variable_weights))  # (B, V)
            costs = number * sums.index_add(1, self.variables_of_output, costs)
        if self.by_variable or self.relative:
            return root_loss(costs, number, self.shards.sum_over_shards)
        return costs.sum()

    def _variables_of_output(self) -> Tensor:
        """Return the index of the variable at each position along `variable_dim`."""
        numbers = torch.arange(len(self.variable_weights), dtype=torch.float32, device=self.area.device)
        fields = numbers[:, None, None].expand(1, -1, *self.meta_model.grid_shape)
        output = self.meta_model.from_fields(fields)[0]
        return output.movedim(self.meta_model.variable_dim - 1, 0).flatten(1)[:, 0].long()

    def loss_of_fields(self, predicted: Tensor, truth: Tensor) -> Tensor:
        """Return the loss of whole physical fields of one date: (M, V, H, W) against (1, V, H, W)."""
        activity.progress()  # each batch of a validation counts as progress for the watchdog
        target, mask = self.normalizer.normalize_target(truth)
        scale = self.normalizer.output_scale
        weights = self._weights(target, mask).mul_(scale.pow(self.penalty.power) / len(predicted))
        output = self.normalizer.normalize(predicted)[0].div_(scale)
        target.div_(scale)
        parts = [by_member(each.expand_as(output), len(output)) for each in (output, target, weights)]
        if self.by_variable:
            squares = len(target[0]) * sum_of_costs(parts[0], parts[1], parts[2], self.penalty, dim=1)
            return squares.sqrt().mean()
        costs = sum_of_costs(parts[0], parts[1], parts[2], self.penalty)
        return torch.mean(costs.sqrt()) if self.relative else costs.sum()
