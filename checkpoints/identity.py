"""Identity of the weights in a checkpoint: their model, and its input and output fields.

It consists of the run's configuration (config.toml) and, in the manifest under "identity", of the grid, the
units, the statistics and the data. A configuration that would change the meaning is refused wherever weights
are used.
"""

import json
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from checkpoints.files import Damaged, complete_steps, read_errors, read_manifest, step_folder
from config import SECTIONS, Config, Model
from datasets.grid import Grid
from datasets.selection import Selection
from datasets.statistics import Numbers, Statistics
from datasets.variables import expand_levels, plain_units
from errors import ConfigError, without_secrets
from models.registry import MODELS, registered

ROLES = ("variables", "diagnostic_variables", "forcing_variables")
DATA = ("static_variables", "forcings", "step_hours", "history")
DATA += ("boundary_width", "forcings_of_target")
Values = dict[str, dict[str, Any]]  # section -> key -> value


def describe(selection: Selection, statistics: Statistics) -> dict[str, Any]:
    """Return the entry "identity" of a manifest."""
    archive, names = selection.archive, selection.variables
    dates = statistics.dates
    return {
        "grid": {axis: getattr(archive.grid, axis).round(6).tolist() for axis in ("latitude", "longitude")},
        "units": {name: archive.units(name) for name in names},
        "static": {name: static_numbers(field) for name, field in selection.static.items()},
        "statistics": statistics.numbers,
        "data": f"{len(dates)} dates, {dates[0]} to {dates[-1]}, SHA-256 {statistics.fingerprint}",
    }


def static_numbers(field: np.ndarray) -> list[float]:
    """Return numbers that identify a constant field (H, W): mean, deviation, and slope to south and east."""
    values = np.nan_to_num(field.astype(np.float64))
    anomaly = values - values.mean()
    south, east = (np.linspace(-1, 1, n) for n in field.shape)
    slopes = (anomaly * south[:, None]).mean(), (anomaly * east).mean()
    return [float(number) for number in (values.mean(), values.std()) + slopes]


@dataclass(frozen=True)
class Identity:
    """The identity of one checkpoint."""

    folder: Path
    values: Values  # of its configuration
    more: dict[str, Any]  # entry "identity" of its manifest; empty in one of an older version
    crc32: int  # of its manifest
    statistics: Numbers | None
    grid: Grid | None

    @classmethod
    def of(cls, folder: Path) -> "Identity":
        """Read it. Raises Damaged, DataError if a file cannot be read, ConfigError for a model of another
        version.
        """
        path, manifest = folder / "config.toml", read_manifest(folder)
        with read_errors(path):
            content = path.read_bytes()
        # An emptied file is TOML, too, and would be that of a run with all defaults.
        if manifest["files"].get(path.name, {}).get("crc32", zlib.crc32(content)) != zlib.crc32(content):
            raise Damaged(f"{path}: its bytes are not those that were written (CRC-32)")
        try:
            values = with_defaults(tomli.loads(content.decode()))
        except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Damaged(f"{path}: {error}") from None
        if (name := values["model"]["name"]) not in MODELS and ":" not in name:
            known = ", ".join(MODELS)
            raise ConfigError(f"{folder}: its model.name = {name!r} is not in this version: {known}")
        more = manifest.get("identity", {})
        grid = Grid(**more["grid"]) if "grid" in more else None
        return cls(folder, values, more, manifest["crc32"], more.get("statistics"), grid)

    def check(self, config: Config, way_out: str, selection: Selection | None = None) -> None:
        """Raise ConfigError if `config`, or the data, give these weights another meaning."""
        ours, theirs = meaning(plain(config)), meaning(self.values)
        self._compare({key: (ours.get(key), theirs.get(key)) for key in theirs | ours}, way_out)
        # -- the data: grid, units, constant fields
        if selection is None or not self.more:
            return
        archive, pairs = selection.archive, {}
        if self.grid and not self.grid.same_as(archive.grid):
            texts = []
            for grid in (archive.grid, self.grid):
                ends = [f"{axis[0]:g} to {axis[-1]:g}" for axis in (grid.latitude, grid.longitude)]
                shape = f"{len(grid.latitude)} x {len(grid.longitude)}"
                texts.append(f"{shape}, latitudes {ends[0]}, longitudes {ends[1]}")
            pairs["the grid of data.path"] = texts[0], texts[1]
        for name, unit in self.more["units"].items():
            if (plain_units(archive.units(name)) or "1") != (plain_units(unit) or "1"):
                pairs[f"the units of {name} in data.path"] = archive.units(name), unit
        for name, numbers in self.more.get("static", {}).items():
            here = static_numbers(selection.static[name])
            if not np.allclose(here, numbers, rtol=1e-3, atol=1e-3 * numbers[1]):
                texts = [f"mean {values[0]:.5g}, deviation {values[1]:.5g}" for values in (here, numbers)]
                pairs[f"the field {name}"] = texts[0], texts[1]
        self._compare(pairs, f"read data with the same, or {way_out}")

    def check_model(self, config: Config, way_out: str) -> None:
        """Check the model alone, which may have more layers and other channels: for fine-tuning."""
        if self.values["lora"]["rank"]:
            reason = "its weights need their adapters; use the folder that forecast.py --export FOLDER writes"
            raise ConfigError(f"checkpoint.initial_load_path: {self.folder}: {reason} of that run")
        ours, theirs = meaning(plain(config)), meaning(self.values)
        free = {"model.noise_dim", "model.conserve"}
        if (ours.get("model.num_layers") or 0) >= theirs.get("model.num_layers", 0):
            free.add("model.num_layers")
        keys = [key for key in theirs if key.startswith("model.") and key not in free]
        self._compare({key: (ours.get(key), theirs[key]) for key in keys}, way_out)

    def _compare(self, pairs: dict[str, tuple[Any, Any]], way_out: str) -> None:
        """Raise ConfigError for the first key with other values here than in the checkpoint."""
        for key, (ours, theirs) in pairs.items():
            if ours != theirs:
                raise ConfigError(f"{key} = {ours!r}: {self.folder} was trained with {theirs!r}; {way_out}")


def plain(config: Config) -> Values:
    """Return a configuration as to_toml writes it: lists for tuples, no passwords."""
    return json.loads(without_secrets(json.dumps(asdict(config))))


def with_defaults(stored: Values) -> Values:
    """Return all keys of this version: defaults for those that a file lacks, without unknown ones."""
    filled = {name: asdict(cls()) | stored.get(name, {}) for name, cls in SECTIONS.items()}
    known = {name: {f: keys[f] for f in SECTIONS[name].__dataclass_fields__} for name, keys in filled.items()}
    return json.loads(json.dumps(known))


def meaning(values: Values) -> dict[str, Any]:
    """Return all settings that weights depend on."""
    model, data = values["model"], values["data"]
    settings = {"model.name": model["name"], "lora.rank": values["lora"]["rank"]}
    settings |= {f"model.{key}": model[key] for key in registered(model["name"]).settings}
    if "model.mlp_dim" in settings:
        settings["model.mlp_dim"] = Model(**model).hidden_dim
    settings |= {f"data.{key}": data[key] for key in DATA}
    return settings | {f"data.{key}": expand_levels(data[key], data["levels"]) for key in ROLES}


NEW_RUN = "choose another job.dump_folder for a new run, with checkpoint.initial_load_path for these weights"


def check_resume(config: Config, selection: Selection) -> Identity | None:
    """Return the identity of the checkpoint that a run resumes from, None for a new run. Raises ConfigError
    if it differs from the run's, DataError if a file cannot be read.
    """
    folder = config.dump_folder / "checkpoints"
    for step in reversed(complete_steps(folder)) if config.checkpoint.enable else ():
        with suppress(Damaged):  # which `Checkpointer.newest` handles
            identity = Identity.of(step_folder(folder, step))
            identity.check(config, NEW_RUN, selection)
            return identity
    return None
