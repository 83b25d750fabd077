"""Folder of a run: only one run at a time writes into it; it has the files of previous starts."""

import fcntl
import json
import logging
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from checkpoints.checkpointer import Checkpointer
from checkpoints.identity import check_resume, describe
from command_line import to_toml
from config import Config
from datasets.selection import Selection
from datasets.statistics import Numbers, Statistics
from errors import ConfigError, RunFailed
from jobs.durable_files import append_whole, write_durably
from jobs.journal import read_records
from parallelisms.degrees import Degrees
from parallelisms.mesh import from_first_rank

logger = logging.getLogger(__name__)
PATIENCE = 5.0  # seconds to wait for the end of the previous run


class RunFolder:
    """The folder of this run, created by all ranks together and locked until `release`.

    Raises ConfigError if another run has the lock, or if the checkpoints there have another identity.
    """

    def __init__(self, config: Config, selection: Selection) -> None:
        self.config, self.selection, self.path = config, selection, config.dump_folder
        self.lock: list[IO[str]] = []  # the first rank's
        from_first_rank(lambda: self.lock.append(lock_folder(self.path)))
        self.before = from_first_rank(lambda: check_resume(config, selection))

    @property
    def resumed_statistics(self) -> Numbers | None:
        """Return the statistics with which the weights to resume from were trained."""
        return self.before and self.before.statistics

    def begin(self, step: int, layout: dict[str, int]) -> None:
        """Write the configuration, and a line of starts.jsonl: first step, place and time."""
        if dist.get_rank():
            return
        for warning in start_warnings(self.config, Degrees(**layout).uses_fsdp):
            logger.warning(warning)
        try:
            write_durably(self.path / "config.toml", to_toml(self.config))
            append_whole(self.path / "starts.jsonl", json.dumps(self._start(step, layout)) + "\n")
        except OSError as error:
            raise RunFailed(
                f"{self.path}: cannot be written to ({error}); make room, then start again"
            ) from None

    def _start(self, step: int, layout: dict[str, int]) -> dict[str, Any]:
        """Return the record of this start. `reached`: the last logged step; all after `step` repeat."""
        records = read_records(self.path / "metrics.jsonl")
        return {
            "step": step,
            "reached": max((record["step"] for record in records), default=0),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "ranks": dist.get_world_size(),
            "layout": layout,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def open_checkpoints(self, statistics: Statistics, layout: dict[str, Any]) -> Checkpointer | None:
        """Open the checkpoints of the run, with its layout and identity for their manifests.

        Returns None if it saves none.
        """
        settings = self.config.checkpoint
        if not settings.enable:
            return None
        about = {"layout": layout, "identity": describe(self.selection, statistics)}
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


def lock_folder(folder: Path) -> IO[str]:
    """Create a folder if needed, and lock it until the returned file is closed. Raises ConfigError."""
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
                raise ConfigError(f"{folder}: {reason}") from None
            time.sleep(0.1)
        except OSError as error:
            logger.warning(
                "%s: cannot be locked (%s); make sure that no other run writes there", folder, error
            )
            return file
