"""The loss of a batch, on this rank's shard of it, and of whole fields in validations.

Shapes: B batch, M members of a sample (1 without an ensemble), which lie next to each other in the batch dim;
h states of a window (datasets/loader.py), V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from config import Config
from jobs.heartbeat import activity
from models.noise import hash64, keys_of_members, uniform_integers
from parallelisms.compile import compiled
from training.assembly import Assembly
from training.conservation import ShardedProjection
from training.losses.pointwise import (
    PENALTIES,
    by_member,
    fused_sum_of_costs,
    mean_weights,
    relative_l2_weights,
    root_loss,
    sum_of_costs,
)

TURNS = {"none": 0, "roll": 1, "roll_and_mirror": 2}  # of training.augmentation, times the columns
DROP_STREAM, TURN_STREAM = 2**32, 2**40  # of a sample's key: noise has the first streams, and those of dates


class Shards(NamedTuple):
    """This rank's shard of a micro-batch: the model's input, and the tensors of its loss by name."""

    inputs: Tensor
    targets: dict[str, Tensor]  # of the output's shape: "target", and "weights" of each of its errors


class Objective:
    """The weighted mean of the penalties of errors, of the roots of those of each variable and sample, or the
    relative L2 loss of the NERSC tutorial.

    Errors are those of the model's output, penalties in units of normalised states.
    """

    def __init__(self, config: Config, assembly: Assembly, area: np.ndarray) -> None:
        """area (H,): weights of the rows."""
        training, model, normalizer = config.training, assembly.model, assembly.normalizer
        self.model, self.normalizer, self.conditions = model, normalizer, assembly.conditions
        self.meta_model: Any = assembly.meta_model
        self.penalty, self.members = PENALTIES[training.loss], training.members
        self.seed, self.drops_branches = training.seed, config.model.stochastic_depth > 0
        self.local_batch_size, self.turns = training.local_batch_size, TURNS[training.augmentation]
        self.step_seconds = config.data.step_hours * 3600
        self.area = torch.tensor(area, dtype=torch.float32, device=model.device)
        self.projection = None  # of outputs, to the global means that the model conserves
        if normalizer.conservation:
            self.projection = ShardedProjection(normalizer.conservation, self.area, assembly)

        # -- weights of variables, with which the mean is taken over the predicted ones
        number, forcing = len(normalizer.mean), normalizer.num_forcing
        given = training.variable_weights and (*training.variable_weights, *[0.0] * forcing)
        weights = torch.tensor(given or [1.0] * number, device=model.device) * (number / (number - forcing))
        has_variable_roots = self.penalty.root_of == "variable"
        if training.weight_by_change:
            # Errors in units of a typical change over a step, so that slow variables count as much as fast
            # ones (GraphCast, Lam et al. 2023, section 4.2).
            power = 1 if has_variable_roots else self.penalty.power
            weights = weights * normalizer.change_scale.flatten().pow(-power)
        self.variable_weights = weights.square() if has_variable_roots else weights  # before a root

        # -- for roots of each variable, the variable at each position along a dim of the output
        dim, self.variables_of_output = None, None
        if has_variable_roots:
            dim = self.meta_model.variable_dim
            numbers = torch.arange(number, dtype=torch.float32, device=model.device)
            fields = numbers[:, None, None].expand(1, -1, *self.meta_model.grid_shape)
            output = self.meta_model.from_fields(fields)[0].movedim(dim - 1, 0)
            self.variables_of_output = output.flatten(1)[:, 0].long()

        self._sum_of_costs: Callable[..., Tensor] = partial(sum_of_costs, penalty=self.penalty, dim=dim)
        if config.compile.enable:
            # One graph each: uncompiled operators read and write fields four times as often.
            self.cut = compiled(self.cut)
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

    def augment(self, fields: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the fields (B, K, V, H, W) turned, if samples are, and by what (B M,); keys (B M,)."""
        if not self.turns:
            return fields, None
        shifts = uniform_integers(hash64(keys[:: self.members], TURN_STREAM), self.turns * fields.shape[-1])
        return self.conditions.turn(fields, shifts), self.repeat_members(shifts)

    def cut(
        self, window: Tensor, truth: Tensor, times: Tensor, shifts: Tensor | None, *noise: Tensor
    ) -> Shards:
        """Return this rank's shard, of all members, of a step from a normalised window (B M, h V, H, W) at
        `times` (B,) to the physical truth (B, V, H, W), both turned by `shifts` (B M,).
        """
        normalizer, from_fields = self.normalizer, self.meta_model.from_fields
        cut_output = self.model.shards.cut_output
        state = normalizer.newest(window)  # (B M, V, H, W)
        # -- the weight of each error, in units of the output: 0 where the truth has no value
        target, mask = normalizer.normalize_target(truth)
        weights = self._weights(target, mask)
        weights.mul_(normalizer.output_scale.pow(self.penalty.power) / self.members)
        # -- the input: window, what is known of the target's date, forcings, static fields, noise
        if normalizer.channels.of_target:
            window = normalizer.with_known(window, self.repeat_members(truth))
        times = self.repeat_members(times)
        inputs = self.conditions.append(window, times, *noise, shifts=shifts)  # (B M, C, H, W)
        # -- what the model should output, and this rank's shard of everything
        expected = normalizer.expected_output(state, self.repeat_members(target))
        targets = {"target": cut_output(from_fields(expected))}
        targets["weights"] = cut_output(from_fields(self.repeat_members(weights), with_zeros=True))
        return Shards(self.model.shards.cut_input(from_fields(inputs)), targets)

    def _weights(self, target: Tensor, mask: Tensor) -> Tensor:
        """Return the weight of each error of a normalised state, (B, V, H, W)."""
        if self.penalty.root_of == "sample":
            return relative_l2_weights(mask, target)
        return mean_weights(mask, self.area, self.variable_weights)

    def loss_part(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Return this rank's part of the loss of projected outputs; the parts of all ranks add up to it."""
        costs: Tensor = self._sum_of_costs(  # (B,), or (B, size of `variable_dim`)
            by_member(output, self.members),
            by_member(targets["target"], self.members),
            by_member(targets["weights"], self.members),
        )
        if not self.penalty.root_of:
            return costs.sum()
        number = self.local_batch_size
        if self.variables_of_output is not None:
            number *= len(self.variable_weights)
            sums = costs.new_zeros(len(costs), len(self.variable_weights))  # (B, V)
            costs = number * sums.index_add(1, self.variables_of_output, costs)
        return root_loss(costs, number, self.model.shards.sum_over_shards)

    def loss_of_fields(self, predicted: Tensor, truth: Tensor) -> Tensor:
        """Return the loss of whole physical fields of one date: (M, V, H, W) against (1, V, H, W)."""
        activity.progress()  # each batch of a validation counts as progress for the watchdog
        scale, members = self.normalizer.output_scale, len(predicted)
        target, mask = self.normalizer.normalize_target(truth)
        weights = self._weights(target, mask).mul_(scale.pow(self.penalty.power) / members)
        output = self.normalizer.normalize(predicted)[0].div_(scale)
        target = target.div_(scale).expand_as(output)
        costs = sum_of_costs(
            by_member(output, members),
            by_member(target, members),
            by_member(weights.expand_as(output), members),
            self.penalty,
            dim=1 if self.penalty.root_of == "variable" else None,
        )
        if self.penalty.root_of == "variable":
            costs = target.shape[1] * costs
        return costs.sqrt().mean() if self.penalty.root_of else costs.sum()
