"""One training step: the gradients of all micro-batches, then one update of the weights.

train.py, the dry run, the benchmarks and the tests call these functions.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoints.checkpointer import Checkpointer
from config import Config
from jobs.heartbeat import span
from training.assembly import Assembly
from training.bad_steps import Fingerprints, step_unless
from training.batches import Batch
from training.gradients import reduce_partial_gradients, total_norm
from training.objective import Objective
from training.optimizers.build import learning_rate, set_lr
from training.rollout import forward_backward
from training.state import TrainState


class MicroBatches(Protocol):
    """Sized iterable of micro-batches: a list, or an object that loads them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...


class Run:
    """Objects that a training step uses."""

    def __init__(
        self,
        config: Config,
        assembly: Assembly,
        state: TrainState,
        area: np.ndarray,
        global_batch: int,
        checkpointer: Checkpointer | None = None,  # its save may still be copying the weights
    ) -> None:
        """area (H,): weights of the rows; global_batch: samples of a step over all ranks."""
        self.assembly, self.state, self.checkpointer = assembly, state, checkpointer
        self.objective = Objective(config, assembly, area)
        self.learning_rate = partial(  # of a step
            learning_rate, config.optimizer, config.lr_scheduler, config.training.steps, global_batch
        )
        self.max_norm = config.training.max_norm  # gradients are clipped to it; 0: they are not clipped
        self.fingerprints = Fingerprints(assembly.model)


class StepResult(NamedTuple):
    """Scalars on the device; reading one waits for the step."""

    loss: Tensor  # this rank's part of the loss
    grad_norm: Tensor  # of all gradients, before clipping


def train_step(run: Run, step: int, batches: MicroBatches) -> StepResult:
    """Take step `step`; 1 is the first."""
    loss = accumulate_gradients(run, step, batches)
    grad_norm = update_weights(run, step, loss)
    run.assembly.model.zero_grad()
    return StepResult(loss, grad_norm)


def accumulate_gradients(run: Run, step: int, batches: MicroBatches) -> Tensor:
    """Return this rank's part of the loss; gradients are those of the mean over all micro-batches."""
    model, number = run.assembly.model, len(batches)
    loss, scale = torch.zeros((), device=model.device), run.state.scaler.factor / number
    # Here autocast casts each weight once: its cache lasts until the outermost of its contexts ends.
    # A compiled block casts in each pass, and FSDP casts what it gathers.
    with torch.autocast(model.device.type, enabled=False):
        for index, batch in enumerate(batches):
            loss += forward_backward(run.objective, step, batch, scale, index == number - 1) / number
    return loss


def update_weights(run: Run, step: int, loss: Tensor) -> Tensor:
    """Clip the gradients and update the weights, unless the step is bad; return the norm of all gradients."""
    model, state = run.assembly.model, run.state
    parameters, scaler = model.parameters.values(), state.scaler
    with span("optimizer"):
        set_lr(state.optimizer, run.learning_rate(step))
        reduce_partial_gradients(parameters)
        scaler.unscale(parameters)
        grad_norm = total_norm(parameters, model.pipeline_group)
        if run.max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, run.max_norm, grad_norm)
        grad_norm = grad_norm.to(loss.device)  # offloaded gradients, and so their norm, are on the host
        if run.checkpointer:
            run.checkpointer.wait_for_staging()  # also of the window of losses
        is_bad = state.bad_steps.judge(step, loss, grad_norm, scaler.may_overflow)
        step_unless(is_bad | scaler.update(grad_norm), state.optimizer)
        model.after_update()
        if state.average:
            state.average.update(step)
    return grad_norm
