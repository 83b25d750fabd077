"""The state of a run from one replica to another: rank to rank, so that nothing is gathered or cut anew."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from config import Config
from errors import ConfigError
from jobs.replicas import Alone, Replicas, State, local
from optimizers.compact_adamw import empty_moment
from training.state import TrainState as RunState


def hand_over(run: RunState) -> State:
    """What this rank holds of everything that decides how the run goes on."""
    return {
        part: {name: local(tensor) for name, tensor in tensors.items()}
        for part, tensors in run.tensors().items()
    }


@torch.no_grad()
def take_over(run: RunState, state: State) -> None:
    """Makes another replica's state this one's. ConfigError where the two have another layout."""
    for key, value in state["optimizer"].items():
        _allocate_moment(run, key, value)
    for part, mine in run.tensors().items():
        if part != "train":  # numbers, which are no tensors here
            _copy(part, mine, state[part])
    run.progress.load(state["train"])
    run.scaler.load(state["train"])


def _allocate_moment(run: RunState, key: str, value: Tensor) -> None:
    """A new replica's optimiser has not stepped yet, and holds nothing."""
    name, _, moment = key.rpartition(".")
    parameter = run.parameters.get(name)
    if parameter is None:
        raise ConfigError(f"optimizer.{key}: only another replica has it; start all of them with one layout")
    if moment in run.optimizer.state[parameter]:
        return
    empty = empty_moment(run.optimizer, parameter, moment, value.dtype)
    run.optimizer.state[parameter][moment] = empty


def _copy(part: str, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """In place. A tensor that only one of the two has, or of another shape, is a ConfigError."""
    for name in mine | theirs:
        sizes = [list(local(t[name]).shape) if name in t else "nothing" for t in (mine, theirs)]
        if sizes[0] != sizes[1]:
            reason = f"{sizes[0]} here and {sizes[1]} in another replica"
            raise ConfigError(f"{part}.{name}: {reason}; start all of them with one layout")
        local(mine[name]).copy_(theirs[name])


def settings_of_replicas(config: Config, num_ranks: int) -> dict[str, Any]:
    """What all replicas of a run must have alike, key -> value; where they find their data may differ."""
    sections = ("data", "model", "optimizer", "lr_scheduler", "training", "parallelism", "float8", "lora")
    own = {"data.path", "data.source", "data.static_path", "data.cache_gib", "data.num_workers"}
    own |= {"data.storage_options"}
    own |= {"training.max_wall_time"}
    values = {
        f"{section}.{key}": value
        for section in sections
        for key, value in dataclasses.asdict(getattr(config, section)).items()
        if f"{section}.{key}" not in own
    }
    return values | {"fault_tolerance.group_size": config.fault_tolerance.group_size, "ranks": num_ranks}


def meet_replicas(config: Config, run: RunState) -> Replicas | Alone:
    """Meets the other replicas before the first step: all of them, or the state of those that have gone on.

    It gives up before the watchdog would, and knows the reason.
    """
    if not config.fault_tolerance.enable:
        return Alone()
    replicas = Replicas(
        config.fault_tolerance,
        settings_of_replicas(config, dist.get_world_size()),
        give=lambda: hand_over(run),
        take=lambda state: take_over(run, state),
        patience=int(0.9 * config.comm.timeout_seconds),
        timeout=config.comm.train_timeout_seconds,
        device=next(iter(run.parameters.values())).device,
    )
    replicas.set_step(run.progress.step)
    replicas.begin_step(run.progress.step)
    return replicas
