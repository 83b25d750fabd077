"""Weights of a checkpoint: for forecasts, and as initial weights of another run.

Averaged weights are taken where the checkpoint has them. A forecast needs the model and the data of that run.
A new run may have another lead time or other variables: the parts of the first and last layer that belong to
a variable are found by the variable's name; a new one starts as in a new run. Learned positions are
interpolated to another grid.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from checkpoints.checkpointer import Found, find_checkpoint
from checkpoints.files import read_tensors, stored_tensors
from checkpoints.identity import Identity
from config import Config, Data
from datasets.channels import Channels
from datasets.grid import Grid
from datasets.selection import Selection
from datasets.statistics import Statistics
from errors import DataError, refuse
from models.embeddings import padded_shape, token_grid
from models.lora import ADAPTERS
from parallelisms.float8 import plain_weight
from parallelisms.mesh import copy_part, on_all_ranks

logger = logging.getLogger(__name__)
Parameters = dict[str, nn.Parameter]
# Parameters with a dim for channels: that dim, and the kind of channels.
CHANNELS = {
    "patch_embedding.weight": (1, "inputs"),
    "stem.weight": (1, "inputs"),
    "head.weight": (0, "variables"),
    "head.bias": (0, "variables"),
}
POSITION = "position.embedding"
KEY = "checkpoint.initial_load_path"


# -- for forecasts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """An undamaged checkpoint, and the statistics with which its weights were trained."""

    found: Found
    averaged: bool  # its averaged weights are taken
    statistics: Statistics
    identity: dict[str, Any]  # which weights these are, wherever the run's folder is


def checkpoint_source(config: Config) -> tuple[str, str]:
    """Return the key that names the checkpoint to forecast from, and its value."""
    source = config.forecast.checkpoint
    return ("forecast.checkpoint", source) if source else ("job.dump_folder", str(config.dump_folder))


def find_trained(config: Config, selection: Selection) -> Trained:
    """Return the checkpoint to forecast from, of this run or `forecast.checkpoint`. Called by all ranks.

    Raises ConfigError if there is none, or the configuration or the data give its weights another meaning,
    DataError if the statistics of its run are missing.
    """
    key, source = checkpoint_source(config)
    checkpoint = find_checkpoint(key, source)
    folder = checkpoint.folder
    identity = Identity.of(folder)
    identity.check(config, "take the config.toml of that checkpoint", selection)
    if not identity.statistics or not identity.grid:
        raise DataError(f"{folder}: its manifest has no statistics; resume its run, which adds them")
    # The data of the training may be deleted since.
    mean, std, change = (np.asarray(identity.statistics[name]) for name in ("mean", "std", "change_std"))
    mean_field = np.broadcast_to(mean[:, None, None], (len(mean),) + identity.grid.shape)
    dates = np.zeros(0, "datetime64[s]")
    statistics = Statistics(mean, std, change, mean_field, dates=dates, fingerprint="")
    averaged = any(name.startswith("ema.") for name in stored_tensors(folder))
    about = {"checkpoint": folder.name, "averaged": averaged, "crc32": identity.crc32}
    return Trained(checkpoint, averaged, statistics, about)


def load_weights(trained: Trained, parameters: Parameters) -> None:
    """Fill the parameters of this rank. Raises DataError if they are of another model."""
    folder = trained.found.folder
    stored, tensors = stored_tensors(folder), {}
    for name, parameter in parameters.items():
        section = "ema" if f"ema.{name}" in stored else "model"  # frozen weights have no average
        tensors[f"{section}.{name}"] = plain_weight(parameter.detach())
    with trained.found.lock:
        on_all_ranks(lambda: read_tensors(folder, tensors))
    logger.info("%s of %s", "averaged weights" if trained.averaged else "weights", folder)


# -- as initial weights ----------------------------------------------------------------------------------


def load_initial_weights(identity: Identity, parameters: Parameters, new: Channels, grid: Grid) -> None:
    """Fill the parameters from a checkpoint; log which of them keep their initial weights.

    new, grid: the channels and the grid of this run. Raises Damaged, ConfigError if the checkpoint has none
    of this model's weights, or frozen ones would keep their random values, DataError for other shapes.
    """
    folder, theirs = identity.folder, identity.values
    stored = stored_tensors(folder)
    section = "ema" if any(name.startswith("ema.") for name in stored) else "model"
    shapes = {n: stored[f"{section}.{n}"].size for n in parameters if f"{section}.{n}" in stored}
    old = Channels.of(Data(**theirs["data"]), theirs["model"]["noise_dim"])

    before, patch = identity.grid or grid, tuple(theirs["model"]["patch_size"])
    moves = POSITION in shapes and not before.same_as(grid)

    # -- what fits is read into place, the rest into tensors of its own
    changed = [name for name in shapes if name in CHANNELS or (moves and name == POSITION)]
    tensors = {name: plain_weight(parameters[name].detach()) for name in shapes}
    tensors |= {name: torch.empty(shapes[name]) for name in changed}

    def read() -> None:
        if not shapes:
            refuse(KEY, str(folder), "has none of this model's weights; take the model of that run")
        for name in [name for name, parameter in parameters.items() if not parameter.requires_grad]:
            if name not in shapes:
                reason = f"has no {name}, which would keep its random values; take the [model] of that run"
                refuse(KEY, str(folder), reason)
            kind = CHANNELS[name][1] if name in CHANNELS else ""
            known, wanted = (getattr(channels, kind, ()) for channels in (old, new))
            if fresh := [channel for channel in wanted if channel not in known]:
                reason = f"has no {fresh[0]}, which {name} has to learn"
                refuse(KEY, str(folder), f'{reason}; add "{name.partition(".")[0]}" to lora.also_train')
        read_tensors(folder, {f"{section}.{name}": tensor for name, tensor in tensors.items()})

    on_all_ranks(read)
    for name in changed:
        parameter, value = parameters[name].detach(), tensors[name]
        if name == POSITION:
            # Bilinear in degrees: the grid may be finer, or a part of the globe. Outside of the old tokens
            # the nearest row or column is used; longitudes go round.
            known, wanted = token_centres(before, patch), token_centres(grid, patch)
            weights = []
            for at, to, turn in ((-known[0], -wanted[0], None), (known[1], wanted[1], 360.0)):
                columns = [np.interp(to, at, one, period=turn) for one in np.eye(len(at))]
                weights.append(torch.from_numpy(np.stack(columns, axis=1)).float())
            field = value.unflatten(0, (len(known[0]), len(known[1])))  # (h, w, D)
            value = torch.einsum("hi,wj,ijd->hwd", weights[0], weights[1], field).flatten(0, 1)
            logger.info(f"{POSITION}: interpolated from {len(tensors[name])} tokens to {len(value)}")
        else:
            # The full parameter, with the stored slices of all channels that the checkpoint has.
            dim, kind = CHANNELS[name]
            there, here = getattr(old, kind), getattr(new, kind)
            size = value.shape[dim] // len(there)  # numbers of a channel: those of a patch
            full = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).cpu().clone()
            for index, channel in enumerate(here):
                if channel in there:
                    slices = value.narrow(dim, there.index(channel) * size, size)
                    full.narrow(dim, index * size, size).copy_(slices)
            value = full
        copy_part(parameter, value)

    # -- the log
    logger.info("started from %s of %s", "averaged weights" if section == "ema" else "weights", folder)
    missing = sorted(name for name in parameters.keys() - shapes.keys() if not name.endswith(ADAPTERS))
    lists = {
        "new channels, initialised": [name for name in new.inputs if name not in old.inputs],
        "channels that are no longer used": [name for name in old.inputs if name not in new.inputs],
        "weights missing there, initialised": missing,
    }
    for title, names in lists.items():
        if names:
            logger.info("%s: %s", title, ", ".join(names))


def token_centres(grid: Grid, patch_size: tuple[int, int]) -> list[np.ndarray]:
    """Return the latitudes (h,) and longitudes (w,) of the centres of patches, in degrees; the grid is padded
    to whole patches on both sides of its rows.
    """
    rows, columns = token_grid(grid.shape, patch_size)
    top = (padded_shape(grid.shape, patch_size)[0] - grid.shape[0]) // 2
    centres = []
    for axis, size, number, first in (
        (grid.latitude, patch_size[0], rows, top),
        (grid.longitude, patch_size[1], columns, 0),
    ):
        at = size * (np.arange(number) + 0.5) - 0.5 - first
        beyond = at - at.clip(0, len(axis) - 1)
        spacing = (axis[-1] - axis[0]) / (len(axis) - 1)
        centres.append(np.interp(at, np.arange(len(axis)), axis) + beyond * spacing)
    return centres
