"""The weights of a training for forecasts: found, checked and loaded on any layout."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from checkpoints.checkpointer import Found, find_checkpoint
from checkpoints.files import read_tensors, stored_tensors
from checkpoints.identity import Identity
from config import Config
from datasets.selection import Selection
from datasets.statistics import Statistics
from errors import DataError
from parallelisms.float8 import plain_weight
from parallelisms.mesh import on_all_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """An undamaged checkpoint, and the statistics with which its weights were trained."""

    folder: Path
    averaged: bool  # its averaged weights are taken
    statistics: Statistics
    identity: dict[str, Any]  # which weights these are, wherever the run's folder is
    found: Found


def checkpoint_source(config: Config) -> tuple[str, str]:
    """Return the key that names the checkpoint to forecast from, and its value."""
    source = config.forecast.checkpoint
    return ("forecast.checkpoint", source) if source else ("job.dump_folder", str(config.dump_folder))


def find_trained(config: Config, selection: Selection) -> Trained:
    """Return the checkpoint to forecast from, of this run or `forecast.checkpoint`. Called by all ranks.

    Raises ConfigError if there is none, or the configuration or the data give its weights another meaning,
    DataError if the statistics of its run are missing.
    """
    found = find_checkpoint(*checkpoint_source(config))
    folder = found.folder
    identity = Identity.of(folder)
    identity.check(config, "take the config.toml of that checkpoint", selection)
    averaged = any(name.startswith("ema.") for name in stored_tensors(folder))
    name = {"checkpoint": folder.name, "averaged": averaged, "crc32": identity.crc32}
    return Trained(folder, averaged, statistics_of(identity), name, found)


def statistics_of(identity: Identity) -> Statistics:
    """Return the statistics with which weights were trained; the data may be deleted since."""
    if not identity.statistics or not identity.grid:
        raise DataError(f"{identity.folder}: its manifest has no statistics; resume its run, which adds them")
    mean, std, change = (np.asarray(identity.statistics[name]) for name in ("mean", "std", "change_std"))
    nothing, shape = np.zeros(0, "datetime64[s]"), identity.grid.shape
    mean_field = np.broadcast_to(mean[:, None, None], (len(mean), *shape))
    return Statistics(mean, std, change, mean_field, dates=nothing, fingerprint="")


def load_weights(trained: Trained, parameters: dict[str, nn.Parameter]) -> None:
    """Fill the parameters of this rank. Raises DataError if they are of another model."""
    stored = stored_tensors(trained.folder)
    tensors = {}
    for name, parameter in parameters.items():
        part = "ema" if f"ema.{name}" in stored else "model"  # frozen weights have no average
        tensors[f"{part}.{name}"] = plain_weight(parameter.detach())
    with trained.found.lock:
        on_all_ranks(lambda: read_tensors(trained.folder, tensors))
    logger.info("%s of %s", "averaged weights" if trained.averaged else "weights", trained.folder)
