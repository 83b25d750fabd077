"""The weights of a finished or running training, for forecasts: found, checked and loaded on any layout."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.checkpointer import load, problem_of
from checkpoints.files import MANIFEST, candidates, stored_tensors
from checkpoints.identity import Identity
from checkpoints.run_state import Parameters
from config import Config
from datasets.archive import Archive
from datasets.statistics import Statistics, read_statistics
from errors import DataError
from jobs.rank_tree import RankTree
from parallelisms.float8 import plain_weight
from parallelisms.mesh import from_first_rank

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A checkpoint that can be trusted, and what its weights were trained with."""

    folder: Path
    averaged: bool  # whether the averaged weights are the ones to take
    statistics: Statistics

    @property
    def run_folder(self) -> Path:
        """That holds checkpoints/step-... and best/step-..., beside what was found when the run began."""
        return self.folder.parent.parent

    @property
    def identity(self) -> dict[str, Any]:
        """Which weights these are, wherever the run's folder lies."""
        manifest = self.folder / MANIFEST
        first = manifest.read_text().partition("\n")[0] if manifest.exists() else '{"crc32": 0}'
        return {"checkpoint": self.folder.name, "averaged": self.averaged} | json.loads(first)


def find_trained(path: Path, named_by: str, averaged: bool, config: Config, archive: Archive) -> Trained:
    """The newest checkpoint at `path` whose bytes are what was written. Called by all ranks together.

    averaged: take averaged weights where it has them. DataError: there is none, or the statistics of its run
    are missing. ConfigError: its weights mean something else than the configuration and the archive say.
    """
    ranks = RankTree()
    found = from_first_rank(lambda: list(candidates(path)))
    for folder in found:
        problem = problem_of(folder, ranks) if (folder / MANIFEST).exists() else ""
        if not problem:
            break
        logger.warning("%s; taking the one before", problem)
    else:
        reason = "all its checkpoints are damaged" if found else "no checkpoint there"
        raise DataError(f"{named_by} = '{path}': {reason}; train with checkpoint.enable, or name another")
    identity = Identity(folder)
    identity.check(config, "take the configuration beside these weights", archive)
    has_averages = any(name.startswith("ema.") for name in stored_tensors(folder))
    return Trained(folder, averaged and has_averages, statistics_of(identity, archive.grid.shape))


def statistics_of(identity: Identity, shape: tuple[int, int]) -> Statistics:
    """What the weights were trained with; the data they came from need not be there any more."""
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


def load_weights(trained: Trained, parameters: Parameters) -> None:
    """Fills the parameters, cut as they are on this rank. DataError: another model's."""
    tensors = {name: plain_weight(parameter.detach()) for name, parameter in parameters.items()}
    stored = stored_tensors(trained.folder) if trained.averaged else {}
    averaged = {name for name in tensors if f"ema.{name}" in stored}  # frozen ones have no average
    parts = {"ema": averaged, "model": tensors.keys() - averaged}
    load(trained.folder, {part: {name: tensors[name] for name in parts[part]} for part in parts}, RankTree())
    logger.info("%s of %s", "averaged weights" if trained.averaged else "weights", trained.folder)
