"""The training step: what train.py, a dry run, the table of layouts, the benchmarks and the tests call."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parallelisms.parallelize import ParallelModel
from training.batches import Batch
from training.gradients import casting_once
from training.objective import Objective
from training.rollout import forward_backward
from training.update import Update, UpdateInBackward


class MicroBatches(Protocol):
    """A list of batches, or what loads them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Step:
    """What a step was, as scalars on the device, which nobody has waited for."""

    loss: Tensor  # this rank's part of the loss
    grad_norm: Tensor  # of all gradients


def train_step(
    step: int,
    batches: MicroBatches,
    objective: Objective,
    model: ParallelModel,
    update: Update | UpdateInBackward,
) -> Step:
    """Step `step` (1 is the first): gradients of all micro-batches, one update."""
    update.begin(step)
    loss, last = torch.zeros((), device=model.device), len(batches) - 1
    scale = update.loss_scale / len(batches)
    with casting_once(model.device):
        for number, batch in enumerate(batches):
            exchange = number == last
            part = forward_backward(step, objective, model, batch, update.loss_part, scale, exchange)
            loss += part / len(batches)
            if number == 0 and update.noise:
                update.noise.first_micro_batch(len(batches))
    grad_norm = update.finish(step, loss)
    model.zero_grad()
    return Step(loss, grad_norm)
