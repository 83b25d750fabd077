"""The weights of a training for forecasts: found, checked and loaded on any layout."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from checkpoints.checkpointer import check_together
from checkpoints.files import MANIFEST, WEIGHTS, Damaged, candidates, read_tensors, stored_tensors
from checkpoints.identity import Identity
from config import Config
from datasets.selection import Selection
from datasets.statistics import Statistics, read_statistics
from errors import DataError
from parallelisms.float8 import plain_weight
from parallelisms.mesh import from_first_rank, on_all_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A checkpoint that can be trusted, and the statistics that its weights were trained with."""

    folder: Path
    averaged: bool  # its averaged weights are taken
    statistics: Statistics

    @property
    def run_folder(self) -> Path:
        """The folder that contains checkpoints/step-... or best/step-..., and the choices of the run."""
        return self.folder.parent.parent

    @property
    def is_exported(self) -> bool:
        """True for a folder of checkpoints/export.py, which belongs to no run."""
        return (self.folder / WEIGHTS).exists()

    @property
    def identity(self) -> dict[str, Any]:
        """Which weights these are, wherever the run's folder is."""
        manifest = self.folder / MANIFEST
        first = manifest.read_text().partition("\n")[0] if manifest.exists() else '{"crc32": 0}'
        return {"checkpoint": self.folder.name, "averaged": self.averaged} | json.loads(first)


def find_trained(path: Path, named_by: str, config: Config, selection: Selection) -> Trained:
    """Return the newest checkpoint at `path` that is not damaged. Called by all ranks together.

    Raises DataError if there is none or the statistics of its run are missing, ConfigError if the
    configuration or the data give its weights another meaning.
    """
    found = from_first_rank(lambda: list(candidates(path)))
    for folder in found:
        try:
            if (folder / MANIFEST).exists():  # of another program: there is nothing to check
                check_together(folder)
            break
        except Damaged as error:
            logger.warning("%s; taking the one before", error)
    else:
        reason = "all its checkpoints are damaged" if found else "no checkpoint there"
        raise DataError(f"{named_by} = '{path}': {reason}; train with checkpoint.enable, or name another")
    identity = Identity(folder)
    identity.check(config, "take the config.toml of that checkpoint", selection)
    averaged = any(name.startswith("ema.") for name in stored_tensors(folder))
    return Trained(folder, averaged, statistics_of(identity, selection.archive.grid.shape))


def statistics_of(identity: Identity, shape: tuple[int, int]) -> Statistics:
    """Return the statistics that weights were trained with; their data need not be there any more."""
    if numbers := identity.statistics:
        moments = {name: np.asarray(values) for name, values in numbers.items()}
        nothing = np.zeros(0, "datetime64[s]")
        mean_field = np.broadcast_to(moments["mean"][:, None, None], (len(moments["mean"]), *shape))
        mean, std, change = (moments[name] for name in ("mean", "std", "change_std"))
        return Statistics(mean, std, change, mean_field, empty_dates=nothing, dates=nothing, fingerprint="")
    path = identity.folder.parent.parent / "statistics.npz"
    if statistics := read_statistics(path):
        return statistics
    raise DataError(f"{path}: is missing or damaged; copy it from the run that trained the weights")


def load_weights(trained: Trained, parameters: dict[str, nn.Parameter]) -> None:
    """Fill the parameters of this rank. Raises DataError if they are of another model."""
    stored = stored_tensors(trained.folder) if trained.averaged else {}
    tensors = {}
    for name, parameter in parameters.items():
        part = "ema" if f"ema.{name}" in stored else "model"  # frozen weights have no average
        tensors[f"{part}.{name}"] = plain_weight(parameter.detach())
    on_all_ranks(lambda: read_tensors(trained.folder, tensors))
    logger.info("%s of %s", "averaged weights" if trained.averaged else "weights", trained.folder)
