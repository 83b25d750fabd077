"""The best checkpoint by a named score, which is kept in the run's folder.

    best/step-00000300/   that checkpoint: hard links, which take no space while it is in checkpoints/ too
         best.json        {"score": ..., "value": ..., "step": ..., "basis": ...}

It is never pruned, and removed only if the run continues from a step before it. `forecast.checkpoint` takes
it like any other.
"""

import json
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import INCOMPLETE, MANIFEST, complete_steps, remove, step_folder
from config import Config
from jobs.durable_files import write_durably
from jobs.heartbeat import span
from parallelisms.mesh import from_first_rank

logger = logging.getLogger(__name__)


class Best:
    """Selection of the best checkpoint by one score, the lower the better. Used by all ranks together."""

    def __init__(self, config: Config) -> None:
        """Create before the first `restart`."""
        self.folder, self.name = config.dump_folder / "best", config.checkpoint.keep_best
        self.basis = basis_of(config)
        self.value, self.step = math.inf, -1

    def judge(self, step: int, record: dict[str, float], checkpointer: Checkpointer) -> None:
        """Compare the scores of a validation after `step`, for which a save has been started."""
        value = from_first_rank(lambda: record[self.name])  # the same number on all ranks
        if not value < self.value:  # NaN is no improvement
            return
        with span("checkpoint"):
            checkpointer.wait()
        checkpoint = step_folder(checkpointer.folder, step)
        if from_first_rank(lambda: self._keep(checkpoint, step, value)):
            self.value, self.step = value, step

    def restart(self, step: int) -> None:
        """Read the best score up to `step` from the run's folder; remove a best checkpoint of later steps."""
        self.value, self.step = from_first_rank(lambda: self._read(step))

    def _read(self, step: int) -> tuple[float, int]:
        value, best = read_best(self.folder / "best.json", self.name, self.basis)
        if best <= step:
            return value, best
        logger.info(f"{self.name}: the best checkpoint is removed: its step {best} is repeated")
        remove_best(self.folder)
        return math.inf, -1

    def _keep(self, checkpoint: Path, step: int, value: float) -> bool:
        """Link the new one, write best.json, remove the old one: in this order a kill loses neither.

        Returns False if it cannot be kept.
        """
        content = {"score": self.name, "value": value, "step": step, "basis": self.basis}
        if step not in complete_steps(checkpoint.parent):
            logger.warning(f"{self.name} is {value:.4g}, the best so far, but step {step} was not saved")
            return False
        try:
            if not is_same(checkpoint, self.folder / checkpoint.name):  # of a step that was done again
                remove_best(self.folder)
            link_folder(checkpoint, self.folder / checkpoint.name)
            write_durably(self.folder / "best.json", json.dumps(content))
            for other in complete_steps(self.folder):
                if other != step:
                    remove(step_folder(self.folder, other))
        except OSError as error:  # as with any save: the run goes on
            logger.warning(f"the best checkpoint, of step {step}, could not be linked: {error}")
            return False
        logger.info(f"{self.name} is {value:.4g}, the best so far: {self.folder / checkpoint.name}")
        return True


def basis_of(config: Config) -> str:
    """Return what comparable scores have in common: dates, first lead, members; for val/loss the loss."""
    data, training, validation = config.data, config.training, config.validation
    parts: list[Any] = [data.validation_period, min(validation.lead_hours, default=0)]
    if training.loss == "crps":
        parts.append(validation.members or training.members)
    if config.checkpoint.keep_best.startswith("val/loss"):
        parts += [training.loss, training.variable_weights, training.weight_by_change]
    return repr(parts)


def read_best(file: Path, name: str, basis: str) -> tuple[float, int]:
    """Return the best value of a score and its step (-1: none); one on another basis is not compared."""
    if not file.exists():
        return math.inf, -1
    try:
        best = json.loads(file.read_text())
        if (best["score"], best["basis"]) == (name, basis):
            return best["value"], best["step"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    logger.warning("%s: is damaged, or of another score, loss, period or lead; starting again", file)
    return math.inf, -1


def is_same(checkpoint: Path, other: Path) -> bool:
    """Return False if `other` is a different checkpoint."""
    manifests = checkpoint / MANIFEST, other / MANIFEST
    return not other.exists() or manifests[0].read_bytes() == manifests[1].read_bytes()


def remove_best(folder: Path) -> None:
    """Remove best.json, then the checkpoints: in this order a kill leaves none marked as the best."""
    (folder / "best.json").unlink(missing_ok=True)
    for step in complete_steps(folder):
        remove(step_folder(folder, step), even_if_read=True)


def link_folder(source: Path, target: Path) -> None:
    """Link the files of a complete checkpoint under another name; copy where there are no hard links."""
    if target.exists():
        return
    unfinished = target.with_name(target.name + INCOMPLETE)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for path in source.iterdir():
        try:
            os.link(path, unfinished / path.name)
        except OSError:
            shutil.copy2(path, unfinished / path.name)
    os.replace(unfinished, target)
