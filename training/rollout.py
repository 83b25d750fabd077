"""Gradients of a micro-batch, for one model step or for a rollout of several steps.

First the forecast is computed as in forecast.py, and the window of each step is stored: the initial state of
the step and, with data.history, the states before it. Then the steps are repeated from the last to the first,
each with an ordinary forward and backward pass, and each passes the gradient of its window to the previous
step. Therefore rollouts work on every layout, and each further step costs the memory of one window and one
forward pass.

Shapes: B batch, M members of each sample (1 without an ensemble), h states of a window
(datasets/loader.py), R steps, V variables, H latitudes, W longitudes.
"""

from itertools import count

import torch
from torch import Tensor

from datasets.loader import split_sample
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
    model, normalizer, conditions = objective.model, objective.normalizer, objective.conditions
    repeat, seconds = objective.repeat_members, objective.step_seconds
    keys = objective.noise_keys(step, batch.times)  # (B M,)
    # Whole samples are turned, by `shifts` (B M,), so that every layout agrees.
    fields, shifts = objective.augment(batch.fields, keys)
    # (B, h V, H, W) and (B, R, V, H, W), both physical
    start, truths = split_sample(fields, normalizer.history)
    num_steps, numbers = truths.shape[1], count()

    # -- the forecast: the normalised windows (B M, h V, H, W) that each step starts from
    def predict(inputs: Tensor) -> Tensor:
        return model.predict(inputs, objective.drop_keys(keys, batch.times + next(numbers) * seconds))

    def known(step: int, date: Tensor) -> Tensor:
        return repeat(truths[:, step - 1, normalizer.channels.known])

    windows = [repeat(normalizer.normalize_window(start))]
    if num_steps > 1:
        with span("forecast"), torch.no_grad():
            windows += rollout(
                predict,
                normalizer,
                conditions,
                seconds,
                repeat(start),
                repeat(batch.times),
                num_steps - 1,
                keys,
                known if normalizer.channels.is_known else None,
                shifts,
            )
    factor = scale * model.mesh.degrees.cp  # as in ParallelModel.forward_backward

    # -- one step again, for its own loss and that of all later steps: a function, whose memory is free after
    def step_back(number: int, later: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """later: gradient of the loss of all later steps with respect to the next window, None after the last
        step. Returns this rank's part of the loss of this step, and the gradient (B M, h V, H, W) with
        respect to its window, whole on every rank; None for the first window, which depends on no step.
        """
        truth, times = truths[:, number], batch.times + number * seconds  # (B, V, H, W) physical; (B,)
        window = windows.pop().requires_grad_(number > 0)
        noise = conditions.draw(keys, repeat(times))  # (B M, N, H, W), if any
        inputs, targets = objective.cut(window, truth, times, shifts, *noise)
        # Detached: each micro-batch of a pipeline would otherwise run backward through the cut of all.
        shards = {name: tensor.detach() for name, tensor in targets.items()}
        inputs_leaf = inputs.detach().requires_grad_(number > 0)
        if number == 0:
            del window  # to have its memory in the passes
        # -- what later steps ask of this one's output, which is a part of their windows
        if later is not None:  # as a gradient of the output
            later = normalizer.drop_boundary(later, repeat(truth))
            of_state = normalizer.newest(later) * normalizer.output_scale
            of_state[:, normalizer.forcing] = 0  # forcing variables do not come from the output
            of_output = objective.meta_model.from_fields(of_state, with_zeros=True)
            shards["later"] = model.shards.cut_output(of_output)
        output_gradients: list[Tensor] = []  # of the loss of this step, of each micro-batch of a pipeline

        def loss_part(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
            projected = objective.projection(output) if objective.projection else output

            def add_later(gradient: Tensor) -> Tensor:
                output_gradients.append(gradient)
                if "later" in targets:
                    gradient = gradient + (targets["later"] * factor).to(gradient.dtype)
                return gradient

            if num_steps > 1:
                projected.register_hook(add_later)
            return 1 / num_steps * objective.loss_part(projected, targets)

        drop_keys, reduces = objective.drop_keys(keys, times), is_last and number == 0
        loss = model.forward_backward(inputs_leaf, shards, loss_part, scale, reduces, drop_keys)
        if number == 0:
            return loss, None

        # The gradient with respect to the window, of which the inputs and the target are functions.
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

    # -- from the last step to the first
    loss, gradient = torch.zeros((), device=model.device), None
    for number in reversed(range(num_steps)):
        step_loss, gradient = step_back(number, gradient)
        loss += step_loss
    return loss
