"""Folder of a run: only one run at a time writes into it; it has the files of previous starts. The start of a
run from it, new or resumed, and rollback after bad steps.

All objects that remember steps are in one list, and continue from a step by one method.
"""

import fcntl
import json
import logging
import platform
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import tomli
import torch
import torch.distributed as dist

from checkpoints.checkpointer import Checkpointer, find_checkpoint
from checkpoints.files import step_folder, stored_tensors
from checkpoints.identity import NEW_RUN, Identity, check_resume, describe, plain, with_defaults
from checkpoints.weights import KEY, load_initial_weights
from command_line import to_toml
from config import Config
from datasets.channels import Channels
from datasets.grid import Grid
from datasets.options import parse_period
from datasets.selection import Selection
from datasets.statistics import Numbers, load_statistics
from errors import ConfigError, RunFailed, format_value, refuse
from jobs.durable_files import append_whole, read_records, write_durably
from parallelisms.degrees import Degrees
from parallelisms.mesh import from_all_ranks, from_first_rank, on_all_ranks
from training.bad_steps import WINDOW, TrainingDiverged
from training.optimizers.shards import moment_names, zero_moment
from training.state import OPTIONAL, TrainState

logger = logging.getLogger(__name__)
PATIENCE = 5.0  # seconds to wait for the end of the previous run
SHARED_SECONDS = 10.0  # in which every rank has to see what rank 0 has written: NFS remembers what was absent
PLACES = ("job.", "data.store_path", "checkpoint.initial_load_path")  # keys that change no weights


class RunFolder:
    """The folder of this run, created by all ranks together and locked until `release`.

    Raises ConfigError if another run has the lock, if the checkpoints there have another identity, or if
    validation or test overlap what they were trained on, DataError if the training dates have changed.
    """

    def __init__(self, config: Config, selection: Selection) -> None:
        self.config, self.selection, self.path = config, selection, config.dump_folder
        self.lock: list[IO[str]] = []  # the first rank's
        if dist.get_world_size() > 1:
            compare_ranks(config, selection)
        # A node that is lost may still have the lock, which NFS keeps for a while: that is no bad input.
        from_first_rank(lambda: self.lock.append(lock_folder(self.path, RunFailed)))
        if dist.get_world_size() > 1:
            check_shared(self.path)
        self.before = from_first_rank(lambda: check_resume(config, selection))
        self.settings_before = from_first_rank(lambda: read_settings(self.path / "config.toml"))
        # Dates of validation or test must not be among those that the run was trained on.
        trained = self.settings_before.get("data.train_period")
        if self.before and trained:
            start, end = cast(tuple[datetime, datetime], parse_period("data.train_period", trained))
            for name in ("validation_period", "test_period"):
                span = parse_period(f"data.{name}", period := getattr(config.data, name))
                if span and span[0] <= end and start <= span[1]:
                    reason = f"it overlaps data.train_period = {trained}, which the run was trained on"
                    refuse(f"data.{name}", list(period), f"{reason}; move it, or {NEW_RUN}")
        # The statistics with which the weights to resume from were trained, or those of the training dates.
        numbers: Numbers | None = self.before and self.before.statistics
        archive, names, file = selection.archive, selection.variables, self.path / "statistics.npz"
        self.statistics = from_first_rank(
            lambda: load_statistics(file, archive, names, selection.train, selection.step, numbers)
        )

    def begin(self, step: int, layout: dict[str, int]) -> None:
        """Write the configuration, and a line of starts.jsonl: first step, place, time, and the settings that
        have changed since the start before.
        """
        if dist.get_rank():
            return
        # -- what the user should know
        for warning in start_warnings(self.config, Degrees(**layout).uses_fsdp):
            logger.warning(warning)
        now, changed = flatten(plain(self.config)), {}
        for key, value in self.settings_before.items() if step else ():
            if value != now.get(key) and not key.startswith(PLACES):
                changed[key] = [value, now.get(key)]
                logger.warning(f"{key} {value!r} -> {now.get(key)!r} from step {step} on")
        if is_done := step >= self.config.training.steps:
            logger.warning(f"nothing left to train: {self.path} has step {step} of training.steps already")
        # -- config.toml, and the record of this start
        try:
            if not is_done:  # else it describes what was trained
                write_durably(self.path / "config.toml", to_toml(self.config))
            records = read_records(self.path / "metrics.jsonl")
            start: dict[str, Any] = {
                "step": step,
                "reached": max((record["step"] for record in records), default=0),  # all after `step` repeat
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "ranks": dist.get_world_size(),
                "layout": layout,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            if changed:
                start["changed"] = changed
            if start["reached"] <= step - self.config.metrics.log_freq:
                lost = f"the lines of steps {start['reached'] + 1} to {step} are missing"
                logger.warning(f"{self.path / 'metrics.jsonl'}: {lost}, as after a copy or a full disk")
            append_whole(self.path / "starts.jsonl", json.dumps(start) + "\n")
        except OSError as error:
            raise RunFailed(
                f"{self.path}: cannot be written to ({error}); make room, then start again"
            ) from None

    def open_checkpoints(self, layout: dict[str, Any]) -> Checkpointer | None:
        """Open the checkpoints of the run, with layout and identity for manifests; None: it saves none."""
        settings = self.config.checkpoint
        if not settings.enable:
            return None
        about = {"layout": layout, "identity": describe(self.selection, self.statistics)}
        return Checkpointer(self.path / "checkpoints", settings, to_toml(self.config), about)

    def release(self) -> None:
        self.lock.clear()


def start_warnings(config: Config, is_sharded: bool = True) -> list[str]:
    """Return warnings about settings that may waste the run. is_sharded: FSDP shards the parameters."""
    warnings, schedule, steps = [], config.lr_scheduler, config.training.steps
    unused = {
        "parallelism.cpu_offload": config.parallelism.cpu_offload,
        "parallelism.fsdp_reshard_after_forward": config.parallelism.fsdp_reshard_after_forward != "default",
        "training.mixed_precision_reduce": config.training.mixed_precision_reduce != "float32",
    }
    if names := [name for name, is_set in unused.items() if is_set and not is_sharded]:
        warnings.append(f"{', '.join(names)}: no effect, because FSDP shards nothing on this layout")
    if not config.checkpoint.enable:
        warnings.append(
            "checkpoint.enable = false: this run saves nothing, and starting it again begins from the "
            "first step"
        )
    if schedule.warmup_steps > steps:
        warnings.append(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} is above training.steps = {steps}: the "
            "learning rate does not reach optimizer.lr"
        )
    return warnings


def flatten(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return {"optimizer.lr": 0.01} for {"optimizer": {"lr": 0.01}}."""
    return {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings of the start before, {} without a file, and with a warning for a damaged one."""
    try:
        return flatten(with_defaults(tomli.loads(file.read_text())))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        logger.warning("%s: is damaged (%s): changed settings are not listed", file, error)
        return {}


def compare_ranks(config: Config, selection: Selection) -> None:
    """Raise ConfigError on all ranks where one has other settings or data than rank 0."""
    # -- a digest of dates and of one state
    archive, digest = selection.archive, sha256()
    for rows in (selection.train, selection.validation):
        digest.update(archive.times[rows].astype(np.int64).tobytes())
    digest.update(archive.read(int(selection.train[0]), selection.variables).tobytes())
    mine = flatten(plain(config)) | {"the data of data.path": digest.hexdigest()[:16]}
    # -- the first key that differs, the same on all ranks
    settings = from_all_ranks(mine)
    for rank, theirs in enumerate(settings):
        for key in settings[0]:
            if theirs.get(key) != settings[0][key]:
                reason = f"on rank {rank}, and {format_value(settings[0][key])} on rank 0"
                refuse(key, theirs.get(key), f"{reason}: start all ranks with the same settings and data")


def check_shared(folder: Path) -> None:
    """Raise ConfigError on all ranks where one of them does not see what rank 0 writes into the folder."""
    file, host = folder / ".shared", from_first_rank(socket.gethostname)
    token = from_first_rank(lambda: uuid.uuid4().hex)
    from_first_rank(lambda: write_durably(file, token))

    def look() -> None:
        deadline = time.monotonic() + SHARED_SECONDS
        while not (file.is_file() and file.read_text() == token):
            if time.monotonic() > deadline:
                place = f"rank {dist.get_rank()} on {socket.gethostname()}"
                reason = f"{place} does not see what rank 0 on {host} writes"
                refuse("job.dump_folder", str(folder), f"{reason}; name a folder that all nodes share")
            time.sleep(0.2)

    try:
        on_all_ranks(look)
    finally:
        from_first_rank(lambda: file.unlink(missing_ok=True))


def lock_folder(folder: Path, in_use: type[Exception] = ConfigError) -> IO[str]:
    """Create a folder if needed, and lock it until the returned file is closed. Raises ConfigError, and
    `in_use` if another process has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, deadline = (folder / ".lock").open("a"), time.monotonic() + PATIENCE
    except OSError as error:
        raise ConfigError(f"job.dump_folder = '{folder}': cannot be written to: {error.strerror}") from None
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                reason = "another run writes there; wait for it, or choose another job.dump_folder"
                raise in_use(f"{folder}: {reason}") from None
            time.sleep(0.1)
        # Some file systems have no locks. A run there is possible, and one line says what it lacks.
        except OSError as error:
            logger.warning(
                "%s: cannot be locked (%s); make sure that no other run writes there", folder, error
            )
            return file


# -- the start, new or resumed, and rollback after bad steps -----------------------------------------------


def resume(checkpointer: Checkpointer | None, state: TrainState) -> bool:
    """Load the newest checkpoint that is not damaged. Raises DataError if it does not fit this model."""
    step = checkpointer.newest() if checkpointer else None
    if checkpointer and step is not None:
        load(checkpointer, step, state)
    return step is not None


def load_or_start(checkpointer: Checkpointer | None, state: TrainState, config: Config, grid: Grid) -> None:
    """Resume, or take the weights of `checkpoint.initial_load_path`. Raises ConfigError or DataError."""
    if not resume(checkpointer, state) and config.checkpoint.initial_load_path:
        checkpoint = find_checkpoint(KEY, config.checkpoint.initial_load_path)
        identity, channels = Identity.of(checkpoint.folder), Channels.of(config.data, config.model.noise_dim)
        identity.check_model(config, f"{KEY} needs the [model] of that run")
        with checkpoint.lock:
            load_initial_weights(identity, state.parameters, channels, grid)
        if state.average:
            state.average.restart(state.parameters)


def load(checkpointer: Checkpointer, step: int, state: TrainState) -> None:
    """Load the checkpoint of `step`, whatever layout saved it. Raises DataError for another model, and
    ConfigError if another optimizer saved it; AdamW and LAMB have the same state.
    """
    folder = step_folder(checkpointer.folder, step)
    stored = stored_tensors(folder)
    # -- the optimizer's tensors that are there, of this rank's parameters and sharded alike
    optimized = {p for group in state.optimizer.param_groups for p in group["params"]}
    parameters = {f"optimizer.{name}": p for name, p in state.parameters.items() if p in optimized}
    for key in stored:
        owner, _, moment = key.rpartition(".")
        if (parameter := parameters.get(owner)) is None:
            continue
        if moment not in moment_names(state.optimizer, parameter):
            raise ConfigError(
                f'optimizer.name = "{type(state.optimizer).__name__}": the checkpoint has states of another '
                f'optimizer or momentum ("{moment}"); set it back, or start from weights alone: '
                "checkpoint.initial_load_path, in a new job.dump_folder"
            )
        state.optimizer.state[parameter][moment] = zero_moment(parameter, moment)

    # -- all tensors
    tensors = state.state_dict()
    for name in [name for name in tensors if name not in stored and name.startswith(OPTIONAL)]:
        del tensors[name]
    if state.average and (fresh := {f"ema.{name}" for name in state.average.averages} - stored.keys()):
        logger.info("%s: averages of %d parameters start from its weights", folder, len(fresh))
    checkpointer.load(step, tensors)
    state.load_state_dict(tensors)
    logger.info("resumed from %s", folder)


class Restart:
    """Objects that remember steps, in the order in which they continue from a step: at the start of a run,
    new or resumed, and at a rollback. Each has a method restart(step), called by all ranks together: continue
    after `step`, and forget all later steps.
    """

    def __init__(
        self, checkpointer: Checkpointer | None, state: TrainState, restartables: Sequence[Any] = ()
    ) -> None:
        """The state has been loaded."""
        self.checkpointer, self.state = checkpointer, state
        self.objects = ([checkpointer] if checkpointer else []) + [state] + list(restartables)
        for restartable in self.objects:
            restartable.restart(state.progress.step)

    def roll_back(self) -> None:
        """Go back to the newest checkpoint with a good step after it, and take the samples in another order.
        Raises TrainingDiverged if there is none, or the run has gone back to it before.
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
        # -- all objects continue from there; later checkpoints, whose weights led to bad steps, are removed
        bad_steps.reset()
        for restartable in self.objects:
            restartable.restart(progress.step)
