"""Weights of another run to start from: fine-tuning, with another lead time or with other variables.

Only weights are taken: averaged ones where the checkpoint has them, as they are what gets used. What belongs
to a variable (its part of the first and the last layer) is found by the variable's name, so that variables
may come, go or change places; a new one starts as in a new run.
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoints.checkpointer import problem_of
from checkpoints.files import (
    MANIFEST,
    Damaged,
    candidates,
    read_tensors,
    reading,
    stored_tensors,
)
from checkpoints.identity import Identity
from checkpoints.run_state import Parameters, RunState
from config import Config, Data
from datasets.field_dataset import channel_names
from datasets.variables import expand_levels
from errors import ConfigError, refuse
from jobs.rank_tree import RankTree
from models.lora import ADAPTERS, quantize
from models.noise import noise_names
from parallelisms.float8 import plain_weight
from parallelisms.mesh import copy_part

logger = logging.getLogger(__name__)
# Where a model's channels are: parameter -> (dim that counts them, whose they are).
CHANNELS = {
    "patch_embedding.weight": (1, "inputs"),
    "stem.weight": (1, "inputs"),
    "head.weight": (0, "outputs"),
    "head.bias": (0, "outputs"),
}


@dataclass(frozen=True)
class Channels:
    """Names of a model's channels, in order: predicted variables, those of older states, then static
    fields, forcings, noise.
    """

    inputs: list[str]
    outputs: list[str]

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Channels":
        """From a configuration; an older version's has not all keys."""
        data, noise_dim = asdict(Data()) | config["data"], config.get("model", {}).get("noise_dim", 0)
        outputs = expand_levels(data["variables"], data["levels"])
        window = channel_names(outputs, data["history"], data["step_hours"])
        given = [*data["static_variables"], *data["forcings"], *noise_names(noise_dim)]
        return cls([*window, *given], outputs)


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the newest in a folder of them, or in a run's folder. ConfigError: there is none."""
    if found := next(candidates(path), None):
        return found
    reason = "no checkpoint there; name a run's folder, or a step-... in it"
    refuse("checkpoint.initial_load_path", str(path), reason)


def start_from(path: Path, run: RunState, config: Config) -> None:
    """A new run's weights and averages: those of another run, as far as it has them. ConfigError: its model
    is another one, or has more layers.
    """
    way_out = "checkpoint.initial_load_path needs the [model] of that run"
    Identity(find_checkpoint(path)).check_model(config, way_out)
    load_initial_weights(path, run.parameters, Channels.of(asdict(config)))
    if run.average:
        run.average.restart()


def load_initial_weights(path: Path, parameters: Parameters, channels: Channels) -> None:
    """Fills the parameters, which have their initial weights, from a checkpoint; says what stays as it was.

    ConfigError where it is damaged, has none of this model's weights, or has them in another shape.
    """
    ranks = RankTree()
    folder = find_checkpoint(path)
    if (folder / MANIFEST).exists() and (problem := problem_of(folder, ranks)):
        raise Damaged(problem)
    stored = stored_tensors(folder)
    part = "ema" if any(name.startswith("ema.") for name in stored) else "model"
    theirs = {name: stored[f"{part}.{name}"].size for name in parameters if f"{part}.{name}" in stored}
    by_channel = [name for name in theirs if name in CHANNELS]
    _check(folder, theirs, by_channel, parameters, ranks)
    old = Channels.of(tomli.loads((folder / "config.toml").read_text()))
    missing = {name for name in parameters.keys() - theirs.keys() if not name.endswith("weight_scale")}
    _check_frozen(folder, missing, by_channel, parameters, (old, channels), ranks)
    quantised = [name for name in theirs if parameters[name].dtype == torch.int8]
    tensors = {name: torch.empty(theirs[name]) for name in by_channel}
    others = theirs.keys() - tensors.keys() - set(quantised)
    tensors |= {name: plain_weight(parameters[name].detach()) for name in others}
    with reading(folder):
        read_tensors(folder, {f"{part}.{name}": tensor for name, tensor in tensors.items()})
        for name in quantised:
            _read_quantised(folder, f"{part}.{name}", parameters[name], parameters[f"{name}_scale"])
    for name in by_channel:
        _copy_channels(name, parameters[name], tensors[name], old, channels)
    _say(folder, part, {name for name in missing if not name.endswith(ADAPTERS)}, old, channels)


def _check(
    folder: Path,
    theirs: dict[str, torch.Size],
    by_channel: list[str],
    parameters: Parameters,
    ranks: RankTree,
) -> None:
    """ConfigError on all ranks when a parameter of one of them has another shape, or none is there."""
    problem = "" if theirs else "has none of this model's weights"
    for name, shape in theirs.items():
        if name not in by_channel and shape != parameters[name].shape:
            problem = f"{name} is {list(shape)} there and {list(parameters[name].shape)} in this model"
    if problem := ranks.first_of(problem):
        raise ConfigError(f"checkpoint.initial_load_path: {folder}: {problem}; take the model of that run")


def _check_frozen(
    folder: Path,
    missing: set[str],
    by_channel: list[str],
    parameters: Parameters,
    channels: tuple[Channels, Channels],
    ranks: RankTree,
) -> None:
    """ConfigError on all ranks where weights would stay as they were drawn: frozen, and not in the checkpoint
    as a whole or in some channels of `channels`, those there and those here.
    """
    problem, (old, new) = "", channels
    for name in sorted(name for name in missing if not parameters[name].requires_grad):
        problem = f"has no {name}, which would stay as it was drawn; take the [model] of that run"
    for name in by_channel:
        there, here = (getattr(each, CHANNELS[name][1]) for each in (old, new))
        fresh = [channel for channel in here if channel not in there]
        if fresh and not parameters[name].requires_grad:
            module = name.partition(".")[0]
            problem = f'knows no {fresh[0]}, which {name} has to learn; add "{module}" to lora.also_train'
    if problem := ranks.first_of(problem):
        raise ConfigError(f"checkpoint.initial_load_path: {folder}: {problem}")


def _read_quantised(folder: Path, stored: str, weight: Tensor, scale: Tensor) -> None:
    """A matrix that rests in int8: whole on every rank, one at a time, so that its numbers are the same on
    every layout.
    """
    whole = torch.empty(weight.shape)
    read_tensors(folder, {stored: whole})
    with torch.no_grad():
        for parameter, value in zip((weight, scale), quantize(whole), strict=True):
            copy_part(parameter, value)


def _copy_channels(name: str, parameter: Tensor, stored: Tensor, old: Channels, new: Channels) -> None:
    """Puts the stored slice of every channel that both have into a parameter, in its own order."""
    dim, whose = CHANNELS[name]
    old_names, new_names = getattr(old, whose), getattr(new, whose)
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


def _say(folder: Path, part: str, missing: set[str], old: Channels, new: Channels) -> None:
    logger.info("started from %s of %s", "averaged weights" if part == "ema" else "weights", folder)
    if fresh := [name for name in new.inputs if name not in old.inputs]:
        logger.info("new channels, initialised: %s", ", ".join(fresh))
    if gone := [name for name in old.inputs if name not in new.inputs]:
        logger.info("channels that are not used any more: %s", ", ".join(gone))
    if missing:
        logger.info("weights that are not there, initialised: %s", ", ".join(sorted(missing)))
