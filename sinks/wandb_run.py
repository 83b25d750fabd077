"""Weights & Biases (an extra): offline in the run's folder, unless WANDB_MODE says otherwise."""

import logging
import os
import tomllib
import uuid
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import wandb  # type: ignore[reportMissingImports]  # an extra

from sinks.kept_run import KeptRun
from sinks.sink import scalars

logger = logging.getLogger(__name__)


class WandbRun:
    """Its project, entity and key are those of W&B's own environment variables."""

    def __init__(self, folder: Path, resume_step: int, written: int) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing leaves this machine
        state = folder / "wandb/rossby.json"
        self.kept = KeptRun(state, "wandb", resume_step, written, lambda: uuid.uuid4().hex)
        config = folder / "config.toml"
        self.run = wandb.init(
            id=self.kept.id,
            resume=None if mode == "offline" else "allow",  # offline, its name is what makes it the same
            project=os.environ.get("WANDB_PROJECT", "rossby"),
            name=os.environ.get("WANDB_NAME", folder.name),
            dir=folder,
            mode=mode,  # type: ignore[reportArgumentType]
            config=tomllib.loads(config.read_text()) if config.exists() else {},
            settings=wandb.Settings(console="off", silent=True),
        )
        logger.info(
            "Weights & Biases: run %s, %s", self.kept.id, self.run.url or f"offline in {state.parent}"
        )

    def write(self, record: dict[str, Any]) -> None:
        if self.kept.lacks(record["step"]):
            self.run.log(scalars(record), step=record["step"])

    def show(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        """With the values of the same step, which it has not closed yet."""
        if self.kept.lacks(step):
            images = {f"plots/{name}": wandb.Image(str(path)) for name, path in pictures.items()}
            table = wandb.Html(f"<pre>{escape(scorecard)}</pre>")
            self.run.log(images | {"plots/scorecard": table}, step=step)

    def go_back(self, step: int) -> None:
        self.kept.go_back()

    def close(self) -> None:
        self.run.finish()
