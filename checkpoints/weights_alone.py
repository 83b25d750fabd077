"""A run's folder with one checkpoint that holds weights and nothing else: to forecast, or to train on from.

What a run with adapters has learned is in it as plain weights, and where a run averaged its weights, these.
"""

from dataclasses import replace
from pathlib import Path

from torch import nn

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import COMPLETE, candidates
from checkpoints.identity import Identity
from checkpoints.trained_weights import Trained
from command_line import to_toml
from config import Checkpoint, Config, Lora
from errors import DataError
from jobs.durable_files import write_durably


def check_target(target: Path) -> None:
    """DataError: a checkpoint is there already."""
    if found := next(candidates(target), None):
        raise DataError(f"--export {target}: {found} is there already; name another folder")


def write_weights(target: Path, trained: Trained, model: nn.Module, config: Config) -> Path:
    """Writes the weights of a plain model, with the meaning of the checkpoint they came from; returns the
    checkpoint's folder. DataError: nobody can write there.
    """
    plain = replace(config.checkpoint, initial_load_path="")
    text = to_toml(replace(config, lora=Lora(), checkpoint=plain))
    about = {"layout": {}, "identity": Identity(trained.folder).more}
    saves = Checkpointer(target / "checkpoints", Checkpoint(async_mode="disabled"), text, about)
    name = COMPLETE.match(trained.folder.name)
    step = int(name[1]) if name else 0
    saves.save(step, {"model": {name: parameter.detach() for name, parameter in model.named_parameters()}})
    saves.close()
    if saves.last_error:
        raise DataError(f"--export {target}: {saves.last_error}")
    write_durably(target / "config.toml", text)
    return saves.folder / f"step-{step:08d}"
