"""Start of a run, new or resumed, and rollback after bad steps.

All objects that remember steps are in one list, and continue from a step by one method.
"""

import logging
from typing import Protocol

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import step_folder, stored_tensors
from checkpoints.weights import start_from
from config import Config
from datasets.grid import Grid
from training.bad_steps import WINDOW, TrainingDiverged
from training.state import OPTIONAL, TrainState

logger = logging.getLogger(__name__)


def resume(checkpointer: Checkpointer | None, state: TrainState) -> bool:
    """Load the newest checkpoint that is not damaged. Raises DataError if it does not fit this model."""
    step = checkpointer.newest() if checkpointer else None
    if checkpointer and step is not None:
        load(checkpointer, step, state)
    return step is not None


def load_or_start(checkpointer: Checkpointer | None, state: TrainState, config: Config, grid: Grid) -> None:
    """Resume, or take the weights of `checkpoint.initial_load_path`. Raises ConfigError or DataError."""
    if not resume(checkpointer, state) and config.checkpoint.initial_load_path:
        start_from(config, state.parameters, grid)
        if state.average:
            state.average.restart(state.parameters)


def load(checkpointer: Checkpointer, step: int, state: TrainState) -> None:
    """Load the checkpoint of `step`, whatever layout saved it."""
    folder = step_folder(checkpointer.folder, step)
    stored = stored_tensors(folder)
    state.allocate_moments(stored)
    tensors = state.state_dict()
    for name in [name for name in tensors if name not in stored and name.startswith(OPTIONAL)]:
        del tensors[name]
    if state.average and (fresh := {f"ema.{name}" for name in state.average.averages} - stored.keys()):
        logger.info("%s: averages of %d parameters start from its weights", folder, len(fresh))
    checkpointer.load(step, tensors)
    state.load_state_dict(tensors)
    logger.info("resumed from %s", folder)


class Restartable(Protocol):
    """An object that remembers steps."""

    def restart(self, step: int) -> None:
        """Continue after `step`, and forget all later steps. Called by all ranks together."""


class Restart:
    """Objects that remember steps, in the order in which they continue from a step: at the start of a run,
    new or resumed, and at a rollback.
    """

    def __init__(self, checkpointer: Checkpointer | None, state: TrainState, *others: Restartable) -> None:
        """The state has been loaded."""
        self.checkpointer, self.state = checkpointer, state
        saves: list[Restartable] = [checkpointer] if checkpointer else []
        self.objects: list[Restartable] = [*saves, state, *others]
        self._continue()

    def _continue(self) -> None:
        for restartable in self.objects:
            restartable.restart(self.state.progress.step)

    def roll_back(self) -> None:
        """Go back to the newest checkpoint with a good step after it, and take the samples in another order.

        Later checkpoints are removed, because their weights led to bad steps. Raises TrainingDiverged if
        there is no such checkpoint, or the run has gone back to it before.
        """
        bad_steps, progress = self.state.bad_steps, self.state.progress
        before = bad_steps.first - 2
        step = self.checkpointer.newest(before) if self.checkpointer else None
        if step is not None and step > before and bad_steps.bad[(step + 1) % WINDOW]:
            step = None  # the older ones were pruned, and the step after this one was bad
        if self.checkpointer is None or step is None or step == progress.went_back_to:
            again = f"going back to step {step} and taking other samples did not help"
            tried = again if step else "no checkpoint to go back to"
            raise TrainingDiverged(
                f"{bad_steps.diagnosis}; {tried}; "
                "lower optimizer.lr, raise lr_scheduler.warmup_steps, or look at the data of those steps"
            )
        rollbacks = progress.rollbacks + 1
        load(self.checkpointer, step, self.state)
        progress.rollbacks, progress.went_back_to = rollbacks, step
        logger.warning(f"{bad_steps.diagnosis}: back to step {step}, on with other samples")
        bad_steps.reset()
        self._continue()
