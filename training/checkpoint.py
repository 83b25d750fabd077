"""Checkpoints through torch.distributed.checkpoint: written aside, renamed when complete, tensors only.

A checkpoint is a folder `step-00000100` with DCP's files and the run's `config.toml`. What has another name
is not a checkpoint. Names in it are the model's own, whatever wraps the model (parallelisms/names.py).
"""

import logging
import os
import re
import shutil
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from training.ema import EMA
from training.gradients import LossScaler

logger = logging.getLogger(__name__)
COMPLETE = re.compile(r"step-(\d{8})$")
UNFINISHED = ".incomplete"
State = dict[str, dict[str, Tensor]]
Parameters = dict[str, nn.Parameter]  # under their own names, those of this rank


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := COMPLETE.match(path.name)))


class Checkpointer:
    """Saves and loads the checkpoints of one run; at most one save is in flight."""

    def __init__(self, folder: Path, asynchronous: bool, keep_latest_k: int, config_toml: str) -> None:
        self.folder, self.asynchronous, self.keep, self.config_toml = (
            folder,
            asynchronous,
            keep_latest_k,
            config_toml,
        )
        self.is_first = dist.get_rank() == 0
        # The background save has a group of its own: on the trainer's it would meet other collectives.
        self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self.pending: tuple[int, Future] | None = None
        if self.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(leftover)

    def save(self, step: int, state: State) -> None:
        """Starts (or, synchronously, makes) the checkpoint of `step`, after the one before it is complete."""
        self.wait()
        target = step_folder(self.folder, step)
        if target.exists():
            return
        writer = FileSystemWriter(f"{target}{UNFINISHED}", sync_files=True)
        if self.asynchronous:
            written = cast(
                Future, state_dict_saver.async_save(state, storage_writer=writer, process_group=self.group)
            )
            self.pending = (step, Future())
            written.add_done_callback(partial(self._finish, target, self.pending[1]))
        else:
            state_dict_saver.save(state, storage_writer=writer, process_group=self.group)
            self._complete(target)

    def _finish(self, target: Path, finished: Future, written: Future) -> None:
        """In the background, on every rank, once the coordinator (rank 0) has seen all files written."""
        try:
            written.result()
            self._complete(target)
            finished.set_result(None)
        except BaseException as error:  # DCP's CheckpointException is no Exception
            finished.set_exception(error)  # raised in the trainer by wait()

    def _complete(self, target: Path) -> None:
        if not self.is_first:
            return
        unfinished = Path(f"{target}{UNFINISHED}")
        (unfinished / "config.toml").write_text(self.config_toml)
        os.replace(unfinished, target)
        logger.info("saved %s", target)
        if self.keep:
            for old in complete_steps(self.folder)[: -self.keep]:
                shutil.rmtree(step_folder(self.folder, old))

    def wait(self) -> None:
        """Until the save in flight is complete; an error of the background write is raised here, with its
        step.
        """
        if self.pending is None:
            return
        (step, future), self.pending = self.pending, None
        try:
            future.result()
        except (Exception, CheckpointException) as error:
            raise RuntimeError(f"the checkpoint of step {step} could not be written: {error}") from error

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint, as rank 0 sees it."""
        steps = complete_steps(self.folder) if self.is_first else []
        found = torch.tensor(steps[-1] if steps else -1)
        dist.broadcast(found, src=0, group=self.group)
        return None if found < 0 else int(found)

    def newest_folder(self) -> Path | None:
        """The newest complete checkpoint, after the save in flight has become one."""
        self.wait()
        steps = complete_steps(self.folder)
        return step_folder(self.folder, steps[-1]) if steps else None

    def load(self, step: int, state: State) -> None:
        """Fills the tensors of `state` from the checkpoint of `step`. ValueError where a tensor does not
        fit.
        """
        path = step_folder(self.folder, step)
        stored = stored_tensors(path)
        for name, tensor in flatten(state).items():
            if name not in stored:
                raise ValueError(f"{path}: has no {name}; another model; choose another job.dump_folder")
            if stored[name].size != tensor.shape:
                shapes = f"{list(stored[name].size)} there and {list(tensor.shape)} in this configuration"
                raise ValueError(f"{path}: {name} is {shapes}; choose another job.dump_folder")
        state_dict_loader.load(cast(dict[str, Any], state), checkpoint_id=str(path), process_group=self.group)


def stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and type of every tensor in a checkpoint."""
    metadata = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def flatten(state: State) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def optimizer_state(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter>.<moment>` -> tensor. The groups hold nothing that the configuration and the step do not
    say.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    return {
        f"{names[parameter]}.{moment}": value
        for parameter, moments in optimizer.state.items()
        for moment, value in moments.items()
    }


def allocate_optimizer_state(path: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Makes the tensors that a checkpoint holds for each parameter, sharded like it, ready to be loaded
    into.
    """
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, entry in stored_tensors(path).items():
        part, _, rest = key.partition(".")
        name, _, moment = rest.rpartition(".")
        if part == "optimizer" and name in parameters and parameters[name] in own:
            parameter, dtype = parameters[name], entry.properties.dtype
            like = entry.size == parameter.shape
            empty = torch.zeros_like(parameter, dtype=dtype) if like else torch.zeros(entry.size, dtype=dtype)
            optimizer.state[parameter][moment] = empty.detach()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's generators, which stochastic depth draws from, under names of this rank."""
    rank = dist.get_rank()
    state = {f"{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    for name, value in state.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, device)


def run_state(
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    average: EMA | None,
    step: int,
    device: torch.device,
) -> State:
    """Everything a run has to know to go on as if it had not stopped. The sampler is a function of the
    step.
    """
    return {
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": optimizer_state(parameters, optimizer),
        "train": {"step": torch.tensor(step), **scaler.state()},
        "random": random_state(device),
        **({"ema": average.averages} if average else {}),
    }


def resume(
    checkpointer: Checkpointer,
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    average: EMA | None,
    device: torch.device,
) -> int:
    """Restores the newest complete checkpoint and returns its step; 0 where there is none. ValueError: no
    fit.
    """
    step = checkpointer.newest()
    if step is None:
        return 0
    path = step_folder(checkpointer.folder, step)
    allocate_optimizer_state(path, parameters, optimizer)
    state, stored = run_state(parameters, optimizer, scaler, average, step, device), stored_tensors(path)
    # Another number of ranks has ranks without a stored generator: they keep the one their seed gave them.
    state["random"] = {name: value for name, value in state["random"].items() if f"random.{name}" in stored}
    checkpointer.load(step, state)
    scaler.load(state["train"])
    set_random_state(state["random"], device)
    logger.info("resumed from %s", path)
    return step


def check_steps(folder: Path, steps: int) -> None:
    """ValueError when a folder already holds more steps than the run asks for: it would train nothing."""
    done = complete_steps(folder)
    if done and done[-1] > steps:
        raise ValueError(
            f"training.steps = {steps}: {folder} already holds step {done[-1]}; "
            "ask for more steps, choose another job.dump_folder, or remove that folder"
        )
