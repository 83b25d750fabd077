"""Gradients of forecasts of several steps, a step of the model at a time.

First the forecast is made, as forecast.py makes it, and of each step only the state is kept. Then the steps
are taken again from the last to the first, each with a forward and a backward pass as in any training step,
and hand the gradient of the state that they started from on to the step before. So what can take one step
can take many, whatever the layout, and one more costs the memory of one state, and a forward pass.

Shapes: B batch, M members of each sample (1 but for an ensemble), R steps, V variables, H latitudes, W
longitudes.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from parallelisms.parallelize import LossPart, ParallelModel
from traces.profiler import span
from training.batches import Batch
from training.objective import Objective
from verification.rollout import rollout


def forward_backward(
    step: int,
    objective: Objective,
    model: ParallelModel,
    batch: Batch,
    loss_part: LossPart,
    scale: float,
    exchange: bool,
) -> Tensor:
    """Of a micro-batch of step `step`, fields (B, 1 + R, V, H, W) and first dates (B,): this rank's part of
    its loss, the weighted mean over the steps; gradients are those of scale x loss. `exchange`: they are
    complete.
    """
    fields, times = batch
    num_steps, keys, draw = fields.shape[1] - 1, objective.keys(step, times), objective.conditions.draw
    if num_steps == 1:
        inputs, *expected = objective.cut(fields, times, *draw(keys))
        return model.forward_backward(inputs, expected, loss_part, scale, exchange)
    shares, seed = objective.rollouts.shares(num_steps), torch.initial_seed()
    with span("forecast"):
        states = forecast(objective, model, fields[:, 0], times, num_steps, seed, keys)
    first = num_steps - objective.rollouts.with_gradients(num_steps)
    loss, later = torch.zeros((), device=model.device), None
    for number in reversed(range(first, num_steps)):
        seed_again(seed, number)
        date, is_last = times + number * objective.step_seconds, number == first
        state = states.pop().requires_grad_(not is_last)
        back = StepBack(objective, model, state, fields[:, number + 1], date, later, draw(keys, number))
        loss += back.run(loss_part, shares[number], scale, exchange=exchange and is_last)
        later = None if is_last else back.gradient()
    return loss


def seed_again(seed: int, number: int) -> None:
    """What step `number` of a rollout draws (stochastic depth) is drawn again when it is repeated."""
    torch.manual_seed((seed * 1_000_003 + number) % 2**63)


@torch.no_grad()
def forecast(
    objective: Objective,
    model: ParallelModel,
    fields: Tensor,
    times: Tensor,
    num_steps: int,
    seed: int,
    keys: Tensor,
) -> list[Tensor]:
    """The normalised states (B M, V, H, W) that each of `num_steps` steps starts from, the first physical
    `fields` (B, V, H, W); keys (B M,) of noise.
    """
    numbers = count()

    def predict(inputs: Tensor) -> Tensor:
        seed_again(seed, next(numbers))
        return model.predict(inputs)

    fields, times = objective.of_members(fields), objective.of_members(times)
    start, _ = objective.normalizer.normalize(fields)
    normalizer, conditions, seconds = objective.normalizer, objective.conditions, objective.step_seconds
    return [start, *rollout(predict, normalizer, conditions, seconds, fields, times, num_steps - 1, keys)]


class StepBack:
    """A step of a rollout, given the gradient (`later`) of the loss of all steps after it with respect to the
    state that it leads to.
    """

    def __init__(
        self,
        objective: Objective,
        model: ParallelModel,
        state: Tensor,
        truth: Tensor,
        times: Tensor,
        later: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> None:
        """state, later (B M, V, H, W) normalised, truth (B, V, H, W) physical, times (B,) of the state, noise
        (B M, N, H, W) of the model, where it has some.
        """
        self.normalizer, self.model, self.state, self.later = objective.normalizer, model, state, later
        inputs, target, *weights = objective.cut_from(state, truth, times, *noise)
        self.of_state = [inputs, target]  # as functions of it
        # Cut off: the micro-batches of a pipeline would each go back through the cut of them all.
        self.inputs = inputs.detach().requires_grad_(state.requires_grad)
        self.expected = [target.detach(), *(each.detach() for each in weights)]
        if later is not None:
            from_fields: Any = objective.geometry.from_fields
            of_output = from_fields(later * self.normalizer.output_scale, with_zeros=True)
            self.expected.append(model.shards.cut_output(of_output))
        self.of_output: list[Tensor] = []  # gradients of its loss alone, of each micro-batch of a pipeline

    def run(self, loss_part: LossPart, share: float, scale: float, exchange: bool) -> Tensor:
        """Forward and backward, of its own loss and of those of later steps: this rank's part of its own."""
        self.factor = scale * self.model.mesh.degrees.cp  # as ParallelModel.forward_backward has it

        def part(output: Tensor, *expected: Tensor) -> Tensor:
            later = None if self.later is None else expected[-1]
            output.register_hook(partial(self._joined, later))
            return share * loss_part(output, *(expected if later is None else expected[:-1]))

        return self.model.forward_backward(self.inputs, self.expected, part, scale, exchange)

    def _joined(self, later: Tensor | None, gradient: Tensor) -> Tensor:
        self.of_output.append(gradient)
        return gradient if later is None else gradient + (later * self.factor).to(gradient.dtype)

    def gradient(self) -> Tensor:
        """With respect to the state (B M, V, H, W), whole on every rank that takes part in the sample."""
        of_inputs, of_target = (torch.zeros_like(end) for end in self.of_state)
        if self.inputs.grad is not None and self.model.mesh.rank("tp") == 0:  # tp ranks have the same
            of_inputs += self.inputs.grad / self.factor
        if self.of_output:  # a loss knows the difference between output and target alone
            # In its first batch a pipeline of torch 2.13 goes through the loss once more before.
            of_target -= torch.cat(self.of_output)[-len(of_target) :] / self.factor
        parts = zip(self.of_state, (of_inputs, of_target), strict=True)
        ends, gradients = zip(*(pair for pair in parts if pair[0].requires_grad), strict=True)
        (gradient,) = torch.autograd.grad(ends, self.state, gradients)
        self.model.sum_over_sample(gradient)
        if self.later is not None and self.normalizer.predict == "change":  # what is added to the state
            gradient += self.later
        return gradient
