"""Initial weights from another run: fine-tuning, also with another lead time or other variables.

Only weights are taken: averaged ones where the checkpoint has them. The parts of the first and last layer
that belong to a variable are found by the variable's name, so that variables may be added, removed or
reordered; a new variable starts as in a new run. Learned positions are interpolated to another grid.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from checkpoints.checkpointer import find_checkpoint
from checkpoints.files import read_tensors, stored_tensors
from checkpoints.identity import Identity
from config import Config, Data
from datasets.channels import Channels
from datasets.grid import Grid
from errors import refuse
from models.embeddings import padded_shape
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


@dataclass(frozen=True, eq=False)
class TokenGrid:
    """Centres of the tokens of a grid, in degrees."""

    latitude: np.ndarray  # (h,)
    longitude: np.ndarray  # (w,)

    @classmethod
    def of(cls, grid: Grid, patch_size: tuple[int, int]) -> "TokenGrid":
        """Return those of patches of a grid, which is padded to whole ones on both sides of its rows."""
        top = (padded_shape(grid.shape, patch_size)[0] - grid.shape[0]) // 2
        centres = []
        for axis, size, first in ((grid.latitude, patch_size[0], top), (grid.longitude, patch_size[1], 0)):
            at = size * (np.arange(math.ceil((len(axis) + first) / size)) + 0.5) - 0.5 - first
            beyond = at - at.clip(0, len(axis) - 1)
            spacing = (axis[-1] - axis[0]) / (len(axis) - 1)
            centres.append(np.interp(at, np.arange(len(axis)), axis) + beyond * spacing)
        return cls(*centres)

    def interpolate(self, vectors: Tensor, tokens: "TokenGrid") -> Tensor:
        """Return vectors (T, D) of these tokens, bilinearly interpolated to others (T', D).

        Outside these tokens the nearest row or column is used.
        """
        shape = len(self.latitude), len(self.longitude)
        rows = _weights(-self.latitude, -tokens.latitude)
        columns = _weights(self.longitude, tokens.longitude, period=360.0)
        field = vectors.reshape(*shape, -1)
        return torch.einsum("hi,wj,ijd->hwd", rows, columns, field).flatten(0, 1)


def _weights(known: np.ndarray, wanted: np.ndarray, period: float | None = None) -> Tensor:
    """Return the matrix (m, n) of linear interpolation from n ascending points to m others."""
    points = [np.interp(wanted, known, column, period=period) for column in np.eye(len(known))]
    return torch.from_numpy(np.stack(points, axis=1)).float()


def start_from(config: Config, parameters: Parameters, grid: Grid) -> None:
    """Fill a new run's weights from `checkpoint.initial_load_path`. Raises ConfigError if they do not fit.

    grid: that of this run's data.
    """
    found = find_checkpoint(KEY, config.checkpoint.initial_load_path)
    identity = Identity.of(found.folder)
    identity.check_model(config, f"{KEY} needs the [model] of that run")
    tokens, there = None, identity.grid
    if POSITION in parameters and there and not there.same_as(grid):
        tokens = TokenGrid.of(there, config.model.patch_size), TokenGrid.of(grid, config.model.patch_size)
    channels = Channels.of(config.data, config.model.noise_dim)
    with found.lock:
        load_initial_weights(found.folder, parameters, channels, tokens)


def load_initial_weights(
    folder: Path,
    parameters: Parameters,
    channels: Channels,
    tokens: tuple[TokenGrid, TokenGrid] | None = None,
) -> None:
    """Fill the parameters from a checkpoint; log which of them keep their initial weights.

    tokens: those of the checkpoint and those of this model, if learned positions are to be interpolated.
    Raises Damaged, or ConfigError if it has none of this model's weights, or has them in another shape.
    """
    stored = stored_tensors(folder)
    part = "ema" if any(name.startswith("ema.") for name in stored) else "model"
    shapes = {name: stored[f"{part}.{name}"].size for name in parameters if f"{part}.{name}" in stored}
    theirs = Identity.of(folder).values
    old = Channels.of(Data(**theirs["data"]), theirs["model"]["noise_dim"])
    on_all_ranks(lambda: check_weights(folder, shapes, parameters, old, channels, tokens is not None))
    changed = [name for name in shapes if name in CHANNELS or (tokens and name == POSITION)]
    tensors = {name: plain_weight(parameters[name].detach()) for name in shapes}
    tensors |= {name: torch.empty(shapes[name]) for name in changed}
    read_tensors(folder, {f"{part}.{name}": tensor for name, tensor in tensors.items()})
    for name in changed:
        value = tensors[name]
        if name in CHANNELS:
            value = with_channels(name, parameters[name].detach(), value, old, channels)
        elif tokens:
            value = tokens[0].interpolate(value, tokens[1])
            logger.info(f"{POSITION}: interpolated from {len(tensors[name])} tokens to {len(value)}")
        with torch.no_grad():
            copy_part(parameters[name], value)
    _log(folder, part, parameters.keys() - shapes.keys(), old, channels)


def check_weights(
    folder: Path,
    shapes: dict[str, torch.Size],
    parameters: Parameters,
    old: Channels,
    new: Channels,
    interpolates: bool,
) -> None:
    """Raise ConfigError if shapes differ, or frozen weights would keep their random values.

    shapes: of the parameters that the checkpoint has; old, new: the channels of the checkpoint and of this
    model; interpolates: its positions are those of another grid.
    """
    if not shapes:
        refuse(KEY, str(folder), "has none of this model's weights; take the model of that run")
    for name, shape in shapes.items():
        here = list(parameters[name].shape)
        if name in CHANNELS:
            dim, which = CHANNELS[name]
            known, wanted = getattr(old, which), getattr(new, which)
            here[dim] = here[dim] // len(wanted) * len(known)
            fresh = [channel for channel in wanted if channel not in known]
            if fresh and not parameters[name].requires_grad:
                reason = f"has no {fresh[0]}, which {name} has to learn"
                refuse(KEY, str(folder), f'{reason}; add "{name.partition(".")[0]}" to lora.also_train')
        if list(shape) != here and not (interpolates and name == POSITION):
            shapes_differ = f"{name} is {list(shape)} there and {here} in this model"
            refuse(KEY, str(folder), f"{shapes_differ}; take the model of that run")
    for name in sorted(parameters.keys() - shapes.keys()):
        if not parameters[name].requires_grad:
            reason = f"has no {name}, which would keep its random values; take the [model] of that run"
            refuse(KEY, str(folder), reason)


def with_channels(name: str, parameter: Tensor, stored: Tensor, old: Channels, new: Channels) -> Tensor:
    """Return a full parameter with the stored slices of all channels that the checkpoint has."""
    dim, which = CHANNELS[name]
    old_names, new_names = getattr(old, which), getattr(new, which)
    whole = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).cpu().clone()
    size = stored.shape[dim] // len(old_names)  # numbers a channel: those of a patch
    for index, channel in enumerate(new_names):
        if channel in old_names:
            part = stored.narrow(dim, old_names.index(channel) * size, size)
            whole.narrow(dim, index * size, size).copy_(part)
    return whole


def _log(folder: Path, part: str, missing: set[str], old: Channels, new: Channels) -> None:
    logger.info("started from %s of %s", "averaged weights" if part == "ema" else "weights", folder)
    lists = {
        "new channels, initialised": [name for name in new.inputs if name not in old.inputs],
        "channels that are no longer used": [name for name in old.inputs if name not in new.inputs],
        "weights missing there, initialised": sorted(n for n in missing if not n.endswith(ADAPTERS)),
    }
    for title, names in lists.items():
        if names:
            logger.info("%s: %s", title, ", ".join(names))
