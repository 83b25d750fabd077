"""Gradients of a micro-batch, for one model step or for a rollout of several steps.

First the forecast is computed as in forecast.py, and the window of each step is stored: the initial state of
the step and, with data.history, the states before it. Then the steps are repeated from the last to the first,
each with an ordinary forward and backward pass, and each passes the gradient of its window to the previous
step. Therefore rollouts work on every layout, and each further step costs the memory of one window and one
forward pass.

Shapes: B batch, M members of each sample (1 without an ensemble), h states of a window
(datasets/field_dataset.py), R steps, V variables, H latitudes, W longitudes.
"""

from functools import partial
from itertools import count

import torch
from torch import Tensor

from datasets.field_dataset import split_sample
from jobs.heartbeat import span
from training.batches import Batch
from training.objective import Objective
from verification.rollout import rollout


def forward_backward(objective: Objective, step: int, batch: Batch, scale: float, is_last: bool) -> Tensor:
    """Return this rank's part of the loss of a micro-batch of training step `step`, averaged over the steps
    of its rollout. Gradients are those of scale x loss. is_last: reduce them over all ranks.
    """
    num_steps = batch.fields.shape[1] - objective.normalizer.history
    if num_steps == 1:
        return one_step(objective, step, batch, scale, is_last)
    model, times = objective.model, batch.times
    start, truths = split_sample(batch.fields, objective.normalizer.history)
    keys = objective.noise_keys(step, times)
    with span("forecast"):
        windows = forecast(objective, start, truths, times, keys)
    loss, later = torch.zeros((), device=model.device), None
    for number in reversed(range(num_steps)):
        date, is_first = times + number * objective.step_seconds, number == 0
        window = windows.pop().requires_grad_(not is_first)
        noise = objective.draw_noise(keys, date)
        step_back = StepBack(objective, window, truths[:, number], date, later, noise)
        drop_keys = objective.drop_keys(keys, date)
        loss += step_back.run(1 / num_steps, scale, is_last and is_first, drop_keys)
        later = None if is_first else step_back.gradient()
    return loss


def one_step(objective: Objective, step: int, batch: Batch, scale: float, is_last: bool) -> Tensor:
    """Forward and backward of one step of the model."""
    fields, times = batch
    keys = objective.noise_keys(step, times)
    inputs, targets = objective.cut(fields, times, *objective.draw_noise(keys, times))

    def loss_part(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return objective.loss_part(objective.project(output), targets)

    drop_keys = objective.drop_keys(keys, times)
    return objective.model.forward_backward(inputs, targets, loss_part, scale, is_last, drop_keys)


@torch.no_grad()
def forecast(
    objective: Objective, start: Tensor, truths: Tensor, times: Tensor, keys: Tensor
) -> list[Tensor]:
    """Return the normalised windows (B M, h V, H, W) that each of R steps starts from.

    start (B, h V, H, W): physical, at `times` (B,); truths (B, R, V, H, W): the following states, from which
    known values are taken; keys (B M,): of the noise.
    """
    seconds, numbers, first = objective.step_seconds, count(), times

    def predict(inputs: Tensor) -> Tensor:
        return objective.model.predict(inputs, objective.drop_keys(keys, first + next(numbers) * seconds))

    start, times = objective.repeat_members(start), objective.repeat_members(times)
    normalizer, conditions = objective.normalizer, objective.conditions

    def known(step: int, date: Tensor) -> Tensor:
        return objective.repeat_members(truths[:, step - 1, normalizer.channels.known])

    settings = (predict, normalizer, conditions, seconds, start, times, truths.shape[1] - 1, keys)
    later = rollout(*settings, known if normalizer.channels.is_known else None)
    return [normalizer.normalize_window(start), *later]


class StepBack:
    """Backward pass of one step of a rollout. `later` is the gradient of the loss of all later steps with
    respect to the next window.
    """

    def __init__(
        self,
        objective: Objective,
        window: Tensor,
        truth: Tensor,
        times: Tensor,
        later: Tensor | None,
        noise: list[Tensor],
    ) -> None:
        """window, later (B M, h V, H, W) normalised; truth (B, V, H, W) physical; times (B,) of the window;
        noise: of `Objective.draw_noise`.
        """
        self.objective, self.model, self.normalizer = objective, objective.model, objective.normalizer
        if later is not None:
            later = self.normalizer.drop_boundary(later, objective.repeat_members(truth))
        self.window, self.later = window, later
        inputs, targets = objective.cut_step(window, truth, times, *noise)
        self.functions_of_window = (inputs, targets["target"])
        # Detached: each micro-batch of a pipeline would otherwise run backward through the cut of all.
        self.inputs = inputs.detach().requires_grad_(window.requires_grad)
        self.targets = {name: each.detach() for name, each in targets.items()}
        if later is not None:
            of_state = self.normalizer.newest(later) * self.normalizer.output_scale
            of_state[:, self.normalizer.forcing] = 0  # forcing variables do not come from the output
            of_output = objective.meta_model.from_fields(of_state, with_zeros=True)
            self.targets["later"] = self.model.shards.cut_output(of_output)
        self.output_gradients: list[Tensor] = []  # of its own loss, of each micro-batch of a pipeline

    def run(self, share: float, scale: float, is_last: bool, keys: Tensor | None) -> Tensor:
        """Run forward and backward for the loss of this step and of later steps. Return this rank's part of
        the loss of this step, times its `share` of the rollout's loss. keys: of `Objective.drop_keys`.
        """
        self.factor = scale * self.model.mesh.degrees.cp  # as in ParallelModel.forward_backward

        def loss_part(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
            projected = self.objective.project(output)
            projected.register_hook(partial(self._add_later, targets.get("later")))
            return share * self.objective.loss_part(projected, targets)

        return self.model.forward_backward(self.inputs, self.targets, loss_part, scale, is_last, keys)

    def _add_later(self, later: Tensor | None, gradient: Tensor) -> Tensor:
        self.output_gradients.append(gradient)
        return gradient if later is None else gradient + (later * self.factor).to(gradient.dtype)

    def gradient(self) -> Tensor:
        """Return the gradient with respect to the window, (B M, h V, H, W), whole on every rank."""
        of_inputs, of_target = (torch.zeros_like(function) for function in self.functions_of_window)
        if self.inputs.grad is not None and self.model.mesh.rank("tp") == 0:  # tp ranks have the same
            of_inputs += self.inputs.grad / self.factor
        if self.output_gradients:  # a loss depends only on output - target
            # A pipeline of torch 2.13 calls the loss once more at the start of its first batch.
            of_target -= torch.cat(self.output_gradients)[-len(of_target) :] / self.factor
        parts = zip(self.functions_of_window, (of_inputs, of_target), strict=True)
        functions, gradients = zip(*(pair for pair in parts if pair[0].requires_grad), strict=True)
        (gradient,) = torch.autograd.grad(functions, self.window, gradients)
        self.model.sum_over_sample(gradient)
        if self.later is not None:  # the states that `advance` copies to the next window
            self.normalizer.add_taken_over(gradient, self.later)
        return gradient
