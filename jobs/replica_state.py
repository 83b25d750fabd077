"""The state of a run from one replica to another: rank to rank, so that nothing is gathered or cut anew."""

import torch
from torch import Tensor

from checkpoints.run_state import RunState
from config import Config, settings_of_replicas
from errors import ConfigError
from jobs.replicas import Replicas, State, local
from training.bad_steps import BadSteps
from training.optimizer_states import empty_moment


def hand_over(run: RunState, bad_steps: BadSteps) -> State:
    """What this rank holds of everything that decides how the run goes on."""
    return {
        part: {name: local(tensor) for name, tensor in tensors.items()}
        for part, tensors in _tensors(run, bad_steps).items()
    }


@torch.no_grad()
def take_over(run: RunState, bad_steps: BadSteps, state: State) -> None:
    """Makes another replica's state this one's. ConfigError where the two have another layout."""
    for key, value in state["optimizer"].items():
        _allocate_moment(run, key, value)
    for part, mine in _tensors(run, bad_steps).items():
        if part != "train":  # numbers, which are no tensors here
            _copy(part, mine, state[part])
    run.progress.load(state["train"])
    run.scaler.load(state["train"])


def _tensors(run: RunState, bad_steps: BadSteps) -> State:
    """Beside what a checkpoint has, what bad steps are judged by: all replicas have to judge alike."""
    return {
        **run.tensors(),
        "bad_steps": {name: getattr(bad_steps, name) for name in ("losses", "bad")},
    }


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
    """Into place. A tensor that only one of the two has, or of another shape, is a ConfigError."""
    for name in mine | theirs:
        sizes = [list(local(t[name]).shape) if name in t else "nothing" for t in (mine, theirs)]
        if sizes[0] != sizes[1]:
            reason = f"{sizes[0]} here and {sizes[1]} in another replica"
            raise ConfigError(f"{part}.{name}: {reason}; start all of them with one layout")
        local(mine[name]).copy_(theirs[name])


def join_replicas(config: Config, num_ranks: int, run: RunState, bad_steps: BadSteps) -> Replicas:
    """Meets the other replicas before the first step: all of them, or the state of those that have gone on.

    It gives up before the watchdog would, and knows the reason.
    """
    replicas = Replicas(
        config.fault_tolerance,
        settings_of_replicas(config, num_ranks),
        give=lambda: hand_over(run, bad_steps),
        take=lambda state: take_over(run, bad_steps, state),
        patience=int(0.9 * config.comm.timeout_seconds),
        timeout=config.comm.train_timeout_seconds,
        device=next(iter(run.parameters.values())).device,
    )
    replicas.set_step(run.progress.step)
    replicas.begin_step()
    return replicas
