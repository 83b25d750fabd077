"""Export of a trained model to a folder, which other programs can use, and forecast.py as a checkpoint.

    model.pt2           one step as a program of torch.export, which needs nothing but torch
    model.json          variables with units, roles and statistics, grid, step: also inside model.pt2
    model.safetensors   the weights, float32, averaged ones if there are any, adapters merged
    config.toml         the configuration of the run
    manifest.json       the identity of the weights and the checksums of all files: checkpoints/files.py

Shapes: B dates, h states of a window (datasets/loader.py), V variables, C channels, H latitudes,
W longitudes.
"""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from checkpoints.files import WEIGHTS, crc32_of, write_manifest
from checkpoints.identity import Identity
from checkpoints.weights import Trained
from command_line import to_toml
from config import Config, Lora
from datasets.conditions import Conditions
from datasets.normalization import Normalizer
from datasets.selection import Selection
from errors import ConfigError
from models.weather_model import WeatherModel

logger = logging.getLogger(__name__)
ROLES = ("prognostic", "diagnostic", "forcing")


class OneStep(nn.Module):
    """One step of a physical window, including normalisation, constant fields and forcings."""

    def __init__(self, model: WeatherModel, normalizer: Normalizer, conditions: Conditions) -> None:
        super().__init__()
        self.model, self.normalizer, self.conditions = model, normalizer, conditions
        further = {"keys": bool(conditions.noise), "later": bool(normalizer.channels.of_target)}
        # Names of the arguments of `forward` that this model takes.
        self.inputs = ["fields", "times", *(name for name, is_needed in further.items() if is_needed)]

    def forward(
        self,
        fields: Tensor,
        times: Tensor,
        keys: Tensor | None = None,
        later: Tensor | None = None,
    ) -> Tensor:
        """fields (B, h V, H, W) float32 in physical units, NaN where missing; times (B,) int64, dates of the
        newest states in seconds since 1970-01-01 UTC -> (B, h V, H, W). A model with noise also takes keys
        (B,) int64: arbitrary numbers, one per member, constant over a forecast. A model with known values
        of the next state also takes later=(B, V, H, W), from which it reads the boundary of a limited area
        and the forcing variables.
        """
        normalizer = self.normalizer
        window = normalizer.normalize_window(fields)
        drawn, inputs = self.conditions.draw(keys, times), normalizer.with_known(window, later)
        output = self.model.predict(self.conditions.append(inputs, times, *drawn))
        states = normalizer.advance(window, output, later).unflatten(1, (normalizer.history, -1))
        return normalizer.denormalize(states).flatten(1, 2)


def check_target(target: Path) -> None:
    """Raise ConfigError if the target exists or is not a folder name."""
    if target.suffix in (".pt2", ".safetensors"):
        raise ConfigError(f"--export {target}: name a folder, which will have model{target.suffix} in it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--export {target}: exists; remove it, or name another folder")


def export_model(target: Path, step: OneStep, trained: Trained, selection: Selection, config: Config) -> None:
    """Write a trained model with merged adapters. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    step = step.eval().requires_grad_(False)
    checkpoint, archive, channels = trained.found.folder, selection.archive, step.normalizer.channels
    role = {name: role for role in ROLES for name in getattr(channels, role)}
    variables = [
        {
            "name": name,
            "units": archive.units(name),
            "role": role[name],
            **{column: values[index] for column, values in trained.statistics.numbers.items()},
        }
        for index, name in enumerate(selection.variables)
    ]
    about = {
        "variables": variables,  # in the order of a state's channels
        "latitude": archive.grid.latitude.tolist(),
        "longitude": archive.grid.longitude.tolist(),
        "step_hours": config.data.step_hours,
        "history": config.data.history,  # states of a window, the newest first: h V channels
        "inputs": step.inputs,
        "checkpoint": checkpoint.name,
    }
    # -- weights, configuration and names, then a program that runs without this project
    weights = {name: tensor.detach().contiguous() for name, tensor in step.model.named_parameters()}
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
    plain = replace(config, lora=Lora(), checkpoint=replace(config.checkpoint, initial_load_path=""))
    (target / "config.toml").write_text(to_toml(plain))
    shutil.copymode(target / "config.toml", target / WEIGHTS)  # safetensors writes for its user alone
    (target / "model.json").write_text(json.dumps(about, indent=1))
    export_program(target / "model.pt2", step, about)
    files = {path.name: (path.stat().st_size, crc32_of(path)) for path in sorted(target.iterdir())}
    write_manifest(target, {"identity": Identity.of(checkpoint).more}, files)


def export_program(target: Path, step: OneStep, about: dict[str, Any]) -> None:
    """Write a program that `torch.export.load(target).module()` runs with torch alone, for any B.

    about: the content of model.json. If torch cannot export a model from outside this repository, logs a
    warning and writes no program.
    """
    state = torch.zeros(2, len(about["variables"]), len(about["latitude"]), len(about["longitude"]))
    tensors = {"fields": state.repeat(1, about["history"], 1, 1), "later": state}
    example = {name: tensors.get(name, torch.zeros(2, dtype=torch.int64)) for name in about["inputs"]}
    by_name = {name: example.pop(name) for name in ("later",) if name in example}
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in about["inputs"]}
    try:
        with torch.no_grad():
            program = torch.export.export(step, tuple(example.values()), by_name, dynamic_shapes=shapes)
    except Exception as error:
        if type(step.model).__module__.startswith("models."):
            raise
        logger.warning("model.pt2 is left out: torch.export: %s", str(error).partition("\n")[0])
        return
    torch.export.save(program, target, extra_files={"model.json": json.dumps(about)})
