"""Gradients of a micro-batch, for one model step or for a rollout of several steps.

First the forecast is computed as in forecast.py, and the window of each step is stored: the initial state of
the step and, with data.history, the states before it. Then the steps are repeated from the last to the first,
each with an ordinary forward and backward pass, and each passes the gradient of its window to the previous
step. Therefore rollouts work on every layout, and each further step costs the memory of one window and one
forward pass.

Shapes: B batch, M members of each sample (1 without an ensemble), h states of a window
(datasets/field_dataset.py), R steps, V variables, H latitudes, W longitudes.
"""

from contextlib import nullcontext
from itertools import count

import torch
from torch import Tensor

from datasets.field_dataset import split_sample
from jobs.heartbeat import span
from training.batches import Batch
from training.objective import Objective
from verification.rollout import rollout


def forward_backward(
    objective: Objective, step: int, batch: Batch, scale: float | Tensor, is_last: bool
) -> Tensor:
    """Return this rank's part of the loss of a micro-batch of training step `step`, averaged over the steps
    of its rollout. Gradients are those of scale x loss. is_last: reduce them over all ranks.
    """
    keys = objective.noise_keys(step, batch.times)  # (B M,)
    fields, shifts = objective.augment(batch.fields, keys)  # whole samples, so that every layout agrees
    # (B, h V, H, W) and (B, R, V, H, W), both physical
    start, truths = split_sample(fields, objective.normalizer.history)
    times, num_steps = batch.times, truths.shape[1]
    with span("forecast") if num_steps > 1 else nullcontext():
        windows = forecast(objective, start, truths, times, keys, shifts)
    loss, gradient = torch.zeros((), device=objective.model.device), None
    for number in reversed(range(num_steps)):
        date, reduces = times + number * objective.step_seconds, is_last and number == 0
        step_loss, gradient = step_back(
            objective, windows, truths[:, number], date, keys, shifts, gradient, 1 / num_steps, scale, reduces
        )
        loss += step_loss
    return loss


@torch.no_grad()
def forecast(
    objective: Objective, start: Tensor, truths: Tensor, times: Tensor, keys: Tensor, shifts: Tensor | None
) -> list[Tensor]:
    """Return the normalised windows (B M, h V, H, W) that each of R steps starts from.

    start (B, h V, H, W): physical, at `times` (B,); truths (B, R, V, H, W): the following states, from which
    known values are taken; keys (B M,): of the noise; shifts (B M,): by which these are turned.
    """
    normalizer, seconds, numbers = objective.normalizer, objective.step_seconds, count()
    if truths.shape[1] == 1:
        return [objective.repeat_members(normalizer.normalize_window(start))]

    def predict(inputs: Tensor) -> Tensor:
        return objective.model.predict(inputs, objective.drop_keys(keys, times + next(numbers) * seconds))

    def known(step: int, date: Tensor) -> Tensor:
        return objective.repeat_members(truths[:, step - 1, normalizer.channels.known])

    start = objective.repeat_members(start)
    later = rollout(
        predict,
        normalizer,
        objective.conditions,
        seconds,
        start,
        objective.repeat_members(times),
        truths.shape[1] - 1,
        keys,
        known if normalizer.channels.is_known else None,
        shifts,
    )
    return [normalizer.normalize_window(start), *later]


def step_back(
    objective: Objective,
    windows: list[Tensor],
    truth: Tensor,
    times: Tensor,
    keys: Tensor,
    shifts: Tensor | None,
    later: Tensor | None,
    share: float,
    scale: float | Tensor,
    is_last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run forward and backward of one step of a rollout, for its own loss and that of all later steps.

    windows: those of all steps up to this one, (B M, h V, H, W) normalised; the last, at `times` (B,), is
    removed. truth (B, V, H, W) physical; keys (B M,): of the noise; shifts (B M,): by which these
    are turned; later: the gradient of the loss of all later steps with respect to the next window, None after
    the last step; share: of this step in the loss of the rollout.

    Returns this rank's part of the loss of this step, and the gradient (B M, h V, H, W) of the loss with
    respect to the window, whole on every rank; None for the first window, which depends on no step.
    """
    model, normalizer = objective.model, objective.normalizer
    needs_gradient = len(windows) > 1
    window = windows.pop().requires_grad_(needs_gradient)
    noise = objective.conditions.draw(keys, objective.repeat_members(times))  # (B M, N, H, W), if any
    inputs, targets = objective.cut(window, truth, times, shifts, *noise)
    # Detached: each micro-batch of a pipeline would otherwise run backward through the cut of all.
    shards = {name: tensor.detach() for name, tensor in targets.items()}
    inputs_leaf = inputs.detach().requires_grad_(needs_gradient)
    if not needs_gradient:
        del window  # to have its memory in the passes
    if later is not None:  # as a gradient of the output
        later = normalizer.drop_boundary(later, objective.repeat_members(truth))
        of_state = normalizer.newest(later) * normalizer.output_scale
        of_state[:, normalizer.forcing] = 0  # forcing variables do not come from the output
        of_output = objective.meta_model.from_fields(of_state, with_zeros=True)
        shards["later"] = model.shards.cut_output(of_output)
    factor = scale * model.mesh.degrees.cp  # as in ParallelModel.forward_backward
    output_gradients: list[Tensor] = []  # of the loss of this step, of each micro-batch of a pipeline

    def loss_part(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        projected = objective.projection(output) if objective.projection else output

        def add_later(gradient: Tensor) -> Tensor:
            output_gradients.append(gradient)
            if "later" in targets:
                gradient = gradient + (targets["later"] * factor).to(gradient.dtype)
            return gradient

        if needs_gradient or later is not None:
            projected.register_hook(add_later)
        return share * objective.loss_part(projected, targets)

    drop_keys = objective.drop_keys(keys, times)
    loss = model.forward_backward(inputs_leaf, shards, loss_part, scale, is_last, drop_keys)
    if not needs_gradient:
        return loss, None

    # -- the gradient with respect to the window, of which the inputs and the target are functions
    of_inputs, of_target = torch.zeros_like(inputs), torch.zeros_like(targets["target"])
    if inputs_leaf.grad is not None and model.mesh.rank("tp") == 0:  # tp ranks have the same
        of_inputs += inputs_leaf.grad / factor
    if output_gradients:  # a loss depends only on output - target
        # A pipeline of torch 2.13 calls the loss once more at the start of its first batch.
        of_target -= torch.cat(output_gradients)[-len(of_target) :] / factor
    slopes = {inputs: of_inputs, targets["target"]: of_target}
    slopes = {function: slope for function, slope in slopes.items() if function.requires_grad}
    (gradient,) = torch.autograd.grad(list(slopes), window, list(slopes.values()))
    model.sum_over_sample(gradient)
    if later is not None:  # the states that `advance` copies to the next window
        normalizer.add_taken_over(gradient, later)
    return loss, gradient
