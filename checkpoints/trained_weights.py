"""The weights of a training for forecasts: found, checked and loaded on any layout."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from checkpoints.checkpointer import Found, find_undamaged
from checkpoints.files import candidates, read_tensors, stored_tensors
from checkpoints.identity import Identity
from config import Config
from datasets.selection import Selection
from datasets.statistics import Statistics, read_statistics
from errors import DataError
from parallelisms.float8 import plain_weight
from parallelisms.mesh import on_all_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A checkpoint that can be trusted, and the statistics that its weights were trained with."""

    folder: Path
    averaged: bool  # its averaged weights are taken
    statistics: Statistics
    identity: dict[str, Any]  # which weights these are, wherever the run's folder is
    found: Found


def find_trained(path: Path, named_by: str, config: Config, selection: Selection) -> Trained:
    """Return the newest checkpoint at `path` that is not damaged. Called by all ranks together.

    Raises DataError if there is none or the statistics of its run are missing, ConfigError if the
    configuration or the data give its weights another meaning.
    """
    found = find_undamaged(lambda: candidates(path))
    if found is None:
        reason = "no checkpoint there, or damaged ones only"
        raise DataError(f"{named_by} = '{path}': {reason}; train with checkpoint.enable, or name another")
    folder = found.folder
    identity = Identity.of(folder)
    identity.check(config, "take the config.toml of that checkpoint", selection)
    averaged = any(name.startswith("ema.") for name in stored_tensors(folder))
    statistics = statistics_of(identity, selection.archive.grid.shape)
    name = {"checkpoint": folder.name, "averaged": averaged, "crc32": identity.crc32}
    return Trained(folder, averaged, statistics, name, found)


def statistics_of(identity: Identity, shape: tuple[int, int]) -> Statistics:
    """Return the statistics that weights were trained with; their data need not be there any more."""
    if numbers := identity.statistics:
        moments = {name: np.asarray(values) for name, values in numbers.items()}
        nothing = np.zeros(0, "datetime64[s]")
        mean_field = np.broadcast_to(moments["mean"][:, None, None], (len(moments["mean"]), *shape))
        mean, std, change = (moments[name] for name in ("mean", "std", "change_std"))
        return Statistics(mean, std, change, mean_field, dates=nothing, fingerprint="")
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
    with trained.found.lock:
        on_all_ranks(lambda: read_tensors(trained.folder, tensors))
    logger.info("%s of %s", "averaged weights" if trained.averaged else "weights", trained.folder)
