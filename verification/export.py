"""A trained model in files that need nothing of this project: a program of torch.export, or its weights.

Shapes: B dates, h states of a window (datasets/window.py), V variables, C channels, H latitudes,
W longitudes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from datasets.conditions import Conditions
from datasets.normalization import Normalizer
from errors import ConfigError
from models.weather_model import WeatherModel


@dataclass(frozen=True)
class Description:
    """Metadata of an exported file."""

    variables: Sequence[str]  # in the order of the state's channels
    units: Sequence[str]
    latitude: Sequence[float]
    longitude: Sequence[float]
    step_hours: int
    history: int  # states of a window, that many times the variables are its channels, the newest first
    checkpoint: str
    config_toml: str

    def texts(self) -> dict[str, str]:
        """ "config.toml", and "model.json" with the rest."""
        rest = {key: value for key, value in asdict(self).items() if key != "config_toml"}
        return {"config.toml": self.config_toml, "model.json": json.dumps(rest)}


class OneStep(nn.Module):
    """The physical window one step later, with normalisation, constant fields and forcings inside."""

    def __init__(self, model: WeatherModel, normalizer: Normalizer, conditions: Conditions) -> None:
        super().__init__()
        self.model, self.normalizer, self.conditions = model, normalizer, conditions

    def forward(
        self, fields: Tensor, times: Tensor, keys: Tensor | None = None, steps: Tensor | None = None
    ) -> Tensor:
        """fields (B, h V, H, W) float32 in physical units, NaN where missing; times (B,) int64, dates of the
        newest states in seconds since 1970-01-01 UTC -> (B, h V, H, W). A model with noise takes keys (B,)
        int64 too, the same in all steps of a forecast: any numbers, each another member. One that is told the
        lead takes steps=(B,) int64: how many lie between the analysis and `times`, 0 in the first step.
        """
        window = self.normalizer.normalize_window(fields)
        drawn = self.conditions.draw(keys, times, steps)
        output = self.model.predict(self.conditions.append(window, times, *drawn))
        states = self.normalizer.advance(window, output).unflatten(1, (self.normalizer.history, -1))
        return self.normalizer.denormalize(states).flatten(1, 2)


def check_target(target: Path) -> None:
    """Raise ConfigError if an export would replace a file or mix with the content of another folder."""
    if target.is_dir():
        other = sorted(
            path.name for path in target.iterdir() if path.name not in ("checkpoints", "config.toml")
        )
        if other or target.suffix:
            content = other[0] if other else "a folder"
            raise ConfigError(f"--export {target}: exists and contains {content}; name another")
    elif target.exists():
        raise ConfigError(f"--export {target}: exists; remove it, or name another")


def export_step(target: Path, step: OneStep, description: Description) -> None:
    """Writes a program that `torch.export.load(target).module()` runs with torch alone, for any B."""
    step = step.eval().requires_grad_(False)
    channels = description.history * len(description.variables)
    shape = (2, channels, len(description.latitude), len(description.longitude))
    number = torch.zeros(2, dtype=torch.int64)
    example = {"fields": torch.zeros(shape), "times": number}
    if step.conditions.noise:
        example["keys"] = number.clone()
    steps = {"steps": number.clone()} if step.conditions.has_lead else {}
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in (*example, *steps)}
    with torch.no_grad():
        program = torch.export.export(step, tuple(example.values()), steps, dynamic_shapes=shapes)
    torch.export.save(program, target, extra_files=description.texts())


def write_safetensors(target: Path, model: WeatherModel, description: Description) -> None:
    """Writes the weights under their own names, float32, with the description as metadata."""
    tensors = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    save_file(tensors, target, metadata=description.texts())
