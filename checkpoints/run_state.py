"""What a run has to know to go on as if it had not stopped, and how it is restored on any layout.

Names are the model's own, whatever wraps the model (parallelisms/parameter_names.py). Tensors are DTensors
where they are sharded: torch.distributed.checkpoint cuts them anew for the layout that loads them. The order
of samples and what is drawn at random are functions of (seed, step), so that no generator has to be kept.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoints.checkpointer import Checkpointer, NoCheckpoints, State
from checkpoints.files import step_folder, stored_tensors
from config import Training
from errors import ConfigError
from optimizers.compact_adamw import empty_moment
from parallelisms.float8 import plain_weight
from training.bad_steps import BadSteps, TrainingDiverged
from training.due import GlobalBatch
from training.ema import EMA
from training.gradients import LossScaler
from training.replay import Replay

logger = logging.getLogger(__name__)
Parameters = dict[str, nn.Parameter]  # under their own names, those of this rank


@dataclass
class Progress:
    """Where a run stands in its data: after `step` steps it has taken `samples` samples."""

    step: int = 0
    samples: int = 0
    global_batch: int = 0  # samples of the last step; 0: none was taken
    rollbacks: int = 0  # how often it went back to a checkpoint to take other samples
    went_back_to: int = -1  # the step that the last of these times ended at

    def advance(self, samples: int) -> None:
        """One step was taken, of so many."""
        self.step, self.samples, self.global_batch = self.step + 1, self.samples + samples, samples

    def state(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Names that an older version did not save keep their defaults."""
        for name in vars(self).keys() & state.keys():
            setattr(self, name, int(state[name]))


@dataclass
class RunState:
    """Everything that a checkpoint holds, where it lives on this rank."""

    parameters: Parameters
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    average: EMA | None
    progress: Progress
    bad_steps: BadSteps
    replay: Replay | None = None

    def tensors(self) -> State:
        """Part -> name -> tensor: the live ones, not copies."""
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.parameters,
            "optimizer": self._optimizer_tensors(),
            **({"ema": self.average.averages} if self.average else {}),
        }
        state = {
            part: {name: plain_weight(tensor.detach()) for name, tensor in tensors.items()}
            for part, tensors in parts.items()
        }
        train = {**self.progress.state(), **self.scaler.state()}
        replay = self.replay.state() if self.replay else {}
        return state | {"train": train, "bad_steps": self.bad_steps.window, "replay": replay}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """`<parameter>.<moment>` -> tensor. The groups hold nothing that the configuration and the step do
        not say.
        """
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        return {
            f"{names[parameter]}.{moment}": value
            for parameter, moments in self.optimizer.state.items()
            for moment, value in moments.items()
        }

    def allocate_optimizer(self, stored: dict[str, TensorStorageMetadata]) -> None:
        """Makes the tensors that a checkpoint holds of each parameter, sharded like it, to be loaded into."""
        own = {p for group in self.optimizer.param_groups for p in group["params"]}
        for key, entry in stored.items():
            part, _, rest = key.partition(".")
            name, _, moment = rest.rpartition(".")
            parameter = self.parameters.get(name)
            if part != "optimizer" or parameter is None or parameter not in own:
                continue  # another rank's
            empty = empty_moment(self.optimizer, parameter, moment, entry.properties.dtype)
            self.optimizer.state[parameter][moment] = empty


def resume(checkpointer: Checkpointer | NoCheckpoints, run: RunState) -> bool:
    """Restores the newest checkpoint that can be trusted. ConfigError: it does not fit this model."""
    step = checkpointer.newest()
    if step is None or isinstance(checkpointer, NoCheckpoints):
        return False
    restore(checkpointer, step, run)
    return True


def restore(checkpointer: Checkpointer, step: int, run: RunState) -> None:
    """Everything as it was after `step`, whatever layout saved it."""
    folder = step_folder(checkpointer.folder, step)
    stored = stored_tensors(folder)
    run.allocate_optimizer(stored)
    state = run.tensors()
    if run.average and not any(name.startswith("ema.") for name in stored):
        del state["ema"]
        logger.info("%s has no averaged weights: averages start from its weights", folder)
    # What an older version did not save, and the scaler of a run that was not trained in fp16, starts anew.
    for part in ("train", "bad_steps", "replay"):
        state[part] = {name: value for name, value in state[part].items() if f"{part}.{name}" in stored}
    checkpointer.load(step, state)
    run.progress.load(state["train"])
    if "scaler.factor" in state["train"]:
        run.scaler.load(state["train"])
    if run.replay:
        run.replay.load(state["replay"])
    if run.average and "ema" not in state:
        run.average.restart()
    logger.info("resumed from %s", folder)


def go_back(checkpointer: Checkpointer | NoCheckpoints, run: RunState) -> None:
    """To the newest checkpoint that a good step followed, to go on with the samples in another order.

    Those after it are removed: their weights led to bad steps. Raises TrainingDiverged where there is none,
    or the run has been there before.
    """
    bad_steps = run.bad_steps
    step = checkpointer.newest(bad_steps.first - 2)
    if isinstance(checkpointer, NoCheckpoints) or step is None or step == run.progress.went_back_to:
        tried = (
            f"going back to step {step} and taking other samples did not help"
            if step
            else "no checkpoint to go back to"
        )
        raise TrainingDiverged(
            f"{bad_steps.diagnosis}; training.max_skipped_steps = {bad_steps.max_skipped}; {tried}; "
            "lower optimizer.lr, raise lr_scheduler.warmup_steps, or look at the data of those steps"
        )
    checkpointer.remove_after(step)
    rollbacks = run.progress.rollbacks + 1
    restore(checkpointer, step, run)
    run.progress.rollbacks, run.progress.went_back_to = rollbacks, step
    logger.warning(f"{bad_steps.diagnosis}: back to step {step}, on with other samples")
    bad_steps.forgive()


def global_batch_of(training: Training, smallest: int, progress: Progress) -> GlobalBatch:
    """Samples a step. -1 asks for what the run has taken so far, or else for the smallest batch there is.

    ConfigError: what the run has taken cannot be dealt out to this number of ranks.
    """
    asked, stored = training.global_batch_size, progress.global_batch
    if asked == -1 and stored % smallest:
        raise ConfigError(
            f"training.global_batch_size = -1: the checkpoint's {stored} samples a step are no multiple of "
            f"local_batch_size x data-parallel ranks = {smallest}; change training.local_batch_size, or set "
            "training.global_batch_size to what you want from here on"
        )
    chosen = GlobalBatch.of(training, (stored or smallest) if asked == -1 else asked, smallest)
    if stored and (now := chosen.at(progress.step + 1)) != stored:
        logger.info(f"the global batch was {stored} samples so far and is {now} from here on")
    return chosen
