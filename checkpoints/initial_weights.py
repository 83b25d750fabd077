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

from checkpoints.checkpointer import Found, find_undamaged
from checkpoints.files import candidates, local_path, read_tensors, stored_tensors
from checkpoints.identity import Identity
from config import Config, Data
from datasets.channels import Channels
from datasets.grid import Grid
from errors import ConfigError, refuse
from models.embeddings import padded_shape
from models.lora import ADAPTERS
from parallelisms.float8 import plain_weight
from parallelisms.mesh import copy_part, on_all_ranks

logger = logging.getLogger(__name__)
Parameters = dict[str, nn.Parameter]
# Parameters with a dim that counts channels: that dim, and which channels it counts.
CHANNELS = {
    "patch_embedding.weight": (1, "inputs"),
    "stem.weight": (1, "inputs"),
    "head.weight": (0, "outputs"),
    "head.bias": (0, "outputs"),
}
POSITION = "position.embedding"


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

        North and south of these tokens the nearest row counts, east and west the nearest column.
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


def channels_of(identity: Identity) -> Channels:
    """Return the channels of the model of a checkpoint. Raises ConfigError without a configuration."""
    if not identity.values:
        reason = "has no config.toml, which says what its weights mean"
        raise ConfigError(f"checkpoint.initial_load_path: {identity.folder}: {reason}")
    return Channels.of(Data(**identity.values["data"]), identity.values["model"]["noise_dim"])


def find_checkpoint(text: str) -> Found:
    """Return the checkpoint that `checkpoint.initial_load_path` names, or the newest in a folder of them.

    Called by all ranks together. Raises ConfigError.
    """
    key = "checkpoint.initial_load_path"
    path = on_all_ranks(lambda: local_path(key, text))
    if found := find_undamaged(lambda: candidates(path)):
        return found
    refuse(key, text, "no checkpoint there, or damaged ones only; name a run's folder, or a step-... in it")


def start_from(config: Config, parameters: Parameters, grid: Grid) -> None:
    """Fill a new run's weights from `checkpoint.initial_load_path`. Raises ConfigError if they do not fit.

    grid: that of this run's data.
    """
    found = find_checkpoint(config.checkpoint.initial_load_path)
    way_out = "checkpoint.initial_load_path needs the [model] of that run"
    identity = Identity.of(found.folder)
    identity.check_model(config, way_out)
    tokens: tuple[TokenGrid, ...] | None = None
    if POSITION in parameters and "grid" in identity.more:
        there = Grid(*(np.array(identity.more["grid"][axis]) for axis in ("latitude", "longitude")))
        if not there.same_as(grid):
            tokens = tuple(TokenGrid.of(each, config.model.patch_size) for each in (there, grid))
    channels = Channels.of(config.data, config.model.noise_dim)
    with found.lock:
        load_initial_weights(found.folder, parameters, channels, tokens)


def load_initial_weights(
    folder: Path, parameters: Parameters, channels: Channels, tokens: tuple[TokenGrid, ...] | None = None
) -> None:
    """Fill the parameters, which have their initial weights, from a checkpoint; log which keep those.

    tokens: those of the checkpoint and those of this model, if learned positions are to be interpolated.
    Raises Damaged, or ConfigError if it has none of this model's weights, or has them in another shape.
    """
    stored = stored_tensors(folder)
    part = "ema" if any(name.startswith("ema.") for name in stored) else "model"
    shapes = {name: stored[f"{part}.{name}"].size for name in parameters if f"{part}.{name}" in stored}
    old = channels_of(Identity.of(folder))
    missing = parameters.keys() - shapes.keys()
    by_place: set[str] = {POSITION} & shapes.keys() if tokens else set()
    on_all_ranks(lambda: check_weights(folder, shapes, missing, parameters, old, channels, by_place))
    by_channel = {name: torch.empty(shapes[name]) for name in shapes if name in CHANNELS}
    positions = {name: torch.empty(shapes[name]) for name in by_place}
    direct = shapes.keys() - by_channel.keys() - by_place
    tensors = by_channel | positions
    tensors |= {name: plain_weight(parameters[name].detach()) for name in direct}
    read_tensors(folder, {f"{part}.{name}": tensor for name, tensor in tensors.items()})
    for name, tensor in by_channel.items():
        _copy_channels(name, parameters[name], tensor, old, channels)
    if tokens and POSITION in positions:
        value = tokens[0].interpolate(positions[POSITION], tokens[1])
        with torch.no_grad():
            copy_part(parameters[POSITION], value)
        logger.info(f"{POSITION}: interpolated from {len(positions[POSITION])} tokens to {len(value)}")
    _log(folder, part, {name for name in missing if not name.endswith(ADAPTERS)}, old, channels)


def check_weights(
    folder: Path,
    shapes: dict[str, torch.Size],
    missing: set[str],
    parameters: Parameters,
    old: Channels,
    new: Channels,
    by_place: set[str],
) -> None:
    """Raise ConfigError if weights have another shape, or frozen ones would keep their random values.

    shapes: of the parameters that the checkpoint has, the others are `missing`; old, new: the channels of the
    checkpoint and of this model; by_place: those that are interpolated.
    """
    problem = "" if shapes else "has none of this model's weights; take the model of that run"
    for name, shape in shapes.items():
        if name not in CHANNELS and name not in by_place and shape != parameters[name].shape:
            there, here = list(shape), list(parameters[name].shape)
            problem = f"{name} is {there} there and {here} in this model; take the model of that run"
    for name in sorted(name for name in missing if not parameters[name].requires_grad):
        problem = f"has no {name}, which would stay as it was drawn; take the [model] of that run"
    for name in shapes.keys() & CHANNELS.keys():
        fresh = [c for c in getattr(new, CHANNELS[name][1]) if c not in getattr(old, CHANNELS[name][1])]
        if fresh and not parameters[name].requires_grad:
            module = name.partition(".")[0]
            problem = f'knows no {fresh[0]}, which {name} has to learn; add "{module}" to lora.also_train'
    if problem:
        raise ConfigError(f"checkpoint.initial_load_path: {folder}: {problem}")


def _copy_channels(name: str, parameter: Tensor, stored: Tensor, old: Channels, new: Channels) -> None:
    """Copy the slice of every channel that both have into a parameter, in the parameter's order."""
    dim, which = CHANNELS[name]
    old_names, new_names = getattr(old, which), getattr(new, which)
    value = parameter.detach()
    whole = (value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone()
    size = stored.shape[dim] // len(old_names)  # numbers a channel: those of a patch
    fits = list(whole.shape)
    fits[dim] = stored.shape[dim]
    if fits != list(stored.shape) or whole.shape[dim] != size * len(new_names):
        shapes = f"{list(stored.shape)} for {len(old_names)} channels there and {list(whole.shape)} for"
        reason = f"{name} is {shapes} {len(new_names)} in this model; take the model of that run"
        raise ConfigError(f"checkpoint.initial_load_path: {reason}")
    for index, channel in enumerate(new_names):
        if channel in old_names:
            part = stored.narrow(dim, old_names.index(channel) * size, size)
            whole.narrow(dim, index * size, size).copy_(part)
    with torch.no_grad():
        copy_part(parameter, whole)


def _log(folder: Path, part: str, missing: set[str], old: Channels, new: Channels) -> None:
    logger.info("started from %s of %s", "averaged weights" if part == "ema" else "weights", folder)
    if fresh := [name for name in new.inputs if name not in old.inputs]:
        logger.info("new channels, initialised: %s", ", ".join(fresh))
    if gone := [name for name in old.inputs if name not in new.inputs]:
        logger.info("channels that are not used any more: %s", ", ".join(gone))
    if missing:
        logger.info("weights that are not there, initialised: %s", ", ".join(sorted(missing)))
