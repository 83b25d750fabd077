"""Gradients of forecasts of several steps, a step of the model at a time.

First the forecast is made, as forecast.py makes it, and of each step only the window is kept: the state that
it starts from and, with data.history, those before it. Then the steps are taken again from the last to the
first, each with a forward and a backward pass as in any training step, and hand the gradient of the window
that they started from on to the step before. So what can take one step can take many, whatever the layout,
and one more costs the memory of one window, and a forward pass.

Shapes: B batch, M members of each sample (1 but for an ensemble), h states of a window (datasets/window.py),
R steps, V variables, H latitudes, W longitudes.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from datasets.field_dataset import split_sample
from parallelisms.parallelize import LossPart, ParallelModel
from traces.profiler import span
from training.batches import Batch
from training.objective import Objective
from training.replay import watched, weighed
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
    """Of a micro-batch of step `step`, fields (B, h + R, V, H, W) and first dates (B,): this rank's part of
    its loss, the weighted mean over the steps; gradients are those of scale x loss. `exchange`: they are
    complete.
    """
    fields, times = batch
    start, truths = split_sample(fields, objective.normalizer.history)
    num_steps, keys = truths.shape[1], objective.keys(step, times)
    if num_steps == 1:
        inputs, *expected = objective.cut(fields, times, *told(objective, keys, times, 0))
        part, replay = kept_part(objective, loss_part), objective.replay
        if not replay:
            return model.forward_backward(inputs, expected, part, scale, exchange)
        outputs: list[Tensor] = []
        kind = {"relative": objective.relative, "spectral": objective.spectral_fraction > 0}
        expected, part = weighed(expected, replay.shares, **kind), watched(part, outputs)
        loss = model.forward_backward(inputs, expected, part, scale, exchange)
        replay.keep(objective.normalizer, model, start, times, outputs)
        return loss
    shares, seed = objective.rollouts.shares(num_steps), torch.initial_seed()
    with span("forecast"):
        windows = forecast(objective, model, start, times, num_steps, seed, keys)
    first = num_steps - objective.rollouts.with_gradients(num_steps)
    loss, later = torch.zeros((), device=model.device), None
    for number in reversed(range(first, num_steps)):
        seed_again(seed, number)
        date, is_last = times + number * objective.step_seconds, number == first
        window = windows.pop().requires_grad_(not is_last)
        back = StepBack(
            objective, model, window, truths[:, number], date, later, told(objective, keys, date, number)
        )
        loss += back.run(loss_part, shares[number], scale, exchange=exchange and is_last)
        later = None if is_last else back.gradient()
    return loss


def kept_part(objective: Objective, loss_part: LossPart) -> LossPart:
    """Of outputs that are held to what the model conserves, or pay for it."""

    def part(output: Tensor, *expected: Tensor) -> Tensor:
        expected, start = objective.kept.split(expected)
        return loss_part(objective.kept.hold(output), *expected) + objective.kept.cost(output, *start)

    return part


def told(objective: Objective, keys: Tensor, times: Tensor, lead: int) -> list[Tensor]:
    """What members of samples whose states are of `times` (B,) are told of step `lead` of a rollout."""
    return objective.conditions.draw(keys, objective.of_members(times), lead)


def seed_again(seed: int, number: int) -> None:
    """What step `number` of a rollout draws (stochastic depth) is drawn again when it is repeated."""
    torch.manual_seed((seed * 1_000_003 + number) % 2**63)


@torch.no_grad()
def forecast(
    objective: Objective,
    model: ParallelModel,
    start: Tensor,
    times: Tensor,
    num_steps: int,
    seed: int,
    keys: Tensor,
) -> list[Tensor]:
    """The normalised windows (B M, h V, H, W) that each of `num_steps` steps starts from, the first physical
    `start` (B, h V, H, W); keys (B M,) of noise.
    """
    numbers = count()

    def predict(inputs: Tensor) -> Tensor:
        seed_again(seed, next(numbers))
        return model.predict(inputs)

    start, times = objective.of_members(start), objective.of_members(times)
    normalizer, conditions, seconds = objective.normalizer, objective.conditions, objective.step_seconds
    later = rollout(predict, normalizer, conditions, seconds, start, times, num_steps - 1, keys)
    return [normalizer.normalize_window(start), *later]


class StepBack:
    """A step of a rollout, given the gradient (`later`) of the loss of all steps after it with respect to the
    window that it leads to.
    """

    def __init__(
        self,
        objective: Objective,
        model: ParallelModel,
        window: Tensor,
        truth: Tensor,
        times: Tensor,
        later: Tensor | None,
        noise: Sequence[Tensor] = (),
    ) -> None:
        """window, later (B M, h V, H, W) normalised, truth (B, V, H, W) physical, times (B,) of the window,
        noise (B M, N, H, W) of the model, where it has some.
        """
        self.normalizer, self.model, self.window, self.later = objective.normalizer, model, window, later
        self.kept = objective.kept
        inputs, target, *weights = objective.cut_from(window, truth, times, *noise)
        self.of_window = [inputs, target]  # as functions of it
        # Cut off: the micro-batches of a pipeline would each go back through the cut of them all.
        self.inputs = inputs.detach().requires_grad_(window.requires_grad)
        self.expected = [target.detach(), *(each.detach() for each in weights)]
        if later is not None:
            from_fields: Any = objective.geometry.from_fields
            of_state = self.normalizer.newest(later) * self.normalizer.output_scale
            of_output = from_fields(of_state, with_zeros=True)
            self.expected.append(model.shards.cut_output(of_output))
        self.of_output: list[Tensor] = []  # gradients of its loss alone, of each micro-batch of a pipeline

    def run(self, loss_part: LossPart, share: float, scale: float, exchange: bool) -> Tensor:
        """Forward and backward, of its own loss and of those of later steps: this rank's part of its own."""
        self.factor = scale * self.model.mesh.degrees.cp  # as ParallelModel.forward_backward has it

        def part(output: Tensor, *expected: Tensor) -> Tensor:
            later = None if self.later is None else expected[-1]
            expected, start = self.kept.split(expected if later is None else expected[:-1])
            held = self.kept.hold(output)
            held.register_hook(partial(self._joined, later))
            return share * (loss_part(held, *expected) + self.kept.cost(output, *start))

        return self.model.forward_backward(self.inputs, self.expected, part, scale, exchange)

    def _joined(self, later: Tensor | None, gradient: Tensor) -> Tensor:
        self.of_output.append(gradient)
        return gradient if later is None else gradient + (later * self.factor).to(gradient.dtype)

    def gradient(self) -> Tensor:
        """With respect to the window (B M, h V, H, W), whole on every rank that takes part in the sample."""
        of_inputs, of_target = (torch.zeros_like(end) for end in self.of_window)
        if self.inputs.grad is not None and self.model.mesh.rank("tp") == 0:  # tp ranks have the same
            of_inputs += self.inputs.grad / self.factor
        if self.of_output:  # a loss knows the difference between output and target alone
            # In its first batch a pipeline of torch 2.13 goes through the loss once more before.
            of_target -= torch.cat(self.of_output)[-len(of_target) :] / self.factor
        parts = zip(self.of_window, (of_inputs, of_target), strict=True)
        ends, gradients = zip(*(pair for pair in parts if pair[0].requires_grad), strict=True)
        (gradient,) = torch.autograd.grad(ends, self.window, gradients)
        self.model.sum_over_sample(gradient)
        if self.later is not None:  # what passes the model by
            self.normalizer.add_taken_over(gradient, self.later)
        return gradient
