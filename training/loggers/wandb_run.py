"""Weights & Biases (an extra): offline in the run's folder, unless WANDB_MODE has another value."""

import os
import tomllib
from typing import Any

import wandb  # type: ignore[reportMissingImports]

from config import Config
from training.loggers.opening import StoredRun, scalars


class Logger:
    """Project, entity and key come from W&B's own environment variables."""

    def __init__(self, config: Config, resume_step: int, written: int) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing leaves this machine
        folder = config.dump_folder
        path, settings = folder / "wandb/rossby.json", folder / "config.toml"
        self.stored = StoredRun(path, resume_step, written)
        self.run = wandb.init(
            id=self.stored.id,
            resume=None if mode == "offline" else "allow",  # offline, the id makes it the same run
            project=os.environ.get("WANDB_PROJECT", "rossby"),
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=folder,
            mode=mode,  # type: ignore[reportArgumentType]
            config=tomllib.loads(settings.read_text()) if settings.exists() else {},
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, record: dict[str, Any]) -> None:
        if self.stored.lacks(record["step"]):
            self.run.log(scalars(record), step=record["step"])

    def restart(self, step: int) -> None:
        self.stored.restart()

    def close(self) -> None:
        self.run.finish()
