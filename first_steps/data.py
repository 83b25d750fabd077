"""What a first run finds in the data: variables, grid and dates, opened as training opens them.

Shapes: H latitudes, W longitudes.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from archives.archive import Archive, open_archive
from archives.files import is_url
from archives.grid import latitude_bounds
from archives.picks import check_used, parse_picks
from archives.variables import expand_levels, full_name, named_by, nearest_name, split_name
from conversion.description import gaps_line, grid_line, period_line, usual_interval, variables_table
from conversion.source import parse_grid
from datasets.selection import SIMULATED_PATH
from datasets.simulated import ensure_simulated
from errors import ConfigError, DataError, refuse, without_secrets
from project_folder import SIMULATED, in_project
from text_tables import text_table

MANY = 20  # variables: with more, "all" is no sensible first run
LEVELS = (300, 500, 850)  # hPa, of "usual": train_configs/era5_64x32.toml
USUAL = (
    "geopotential",
    "temperature",
    "u_component_of_wind",
    "v_component_of_wind",
    "specific_humidity",
    "2m_temperature",
    "mean_sea_level_pressure",
    "10m_u_component_of_wind",
    "10m_v_component_of_wind",
)
# Known at every date, or the same at all of them: nothing to predict, though files may give them times.
NOT_WEATHER = ("land_sea_mask", "geopotential_at_surface", "soil_type", "standard_deviation_of_orography")
NOT_WEATHER += ("slope_of_sub_gridscale_orography", "toa_incident_solar_radiation")


@dataclass(frozen=True)
class Found:
    """An archive, by the name that data.path has for it."""

    path: str
    select: tuple[str, ...]
    archive: Archive

    @property
    def shape(self) -> tuple[int, int]:
        """(H, W)"""
        return self.archive.grid.shape

    @property
    def step_hours(self) -> int:
        return max(1, round(float(usual_interval(self.archive.times) / np.timedelta64(1, "h"))))

    @property
    def is_simulated(self) -> bool:
        return self.path == SIMULATED

    @property
    def weather(self) -> list[str]:
        """Variables that can be predicted."""
        return [name for name in self.archive.variables if split_name(name)[0] not in NOT_WEATHER]

    @property
    def configured_path(self) -> str:
        """As a configuration file has it that may lie anywhere."""
        return self.path if is_url(self.path) or self.is_simulated else os.path.abspath(self.path)

    @property
    def stem(self) -> str:
        """A name for files that are made of it."""
        plain = re.sub(r"[^\w-]+", "_", Path(self.path.rstrip("/")).stem).strip("_")
        return plain or "first_run"

    def summary(self) -> str:
        """Variables with their levels and units, grid, dates and their distance."""
        archive = self.archive
        rows = [
            ("static", ", ".join(archive.static_variables) or "none"),
            ("grid", grid_line(archive.grid)),
            ("period", period_line(archive.times)),
            ("gaps", gaps_line(archive.times)),
        ]
        parts = [without_secrets(self.path), variables_table(archive, {}), text_table("<10 <90", rows)]
        return "\n\n".join(parts)


def find(path: str, select: Sequence[str] = ()) -> Found:
    """Raises ConfigError, DataError."""
    if not path:
        raise ConfigError("--data: name what data.path takes: a file, folder, glob or URL; or simulated")
    there = str(ensure_simulated(in_project(SIMULATED_PATH))) if path == SIMULATED else path
    archive = open_archive(there, parse_picks(select))
    check_used(archive.picks, archive.extra_dimensions, path)
    found = Found(path, tuple(select), archive)
    if len(archive.times) < 3 or not found.weather:
        fix = "a run needs three dates, and a variable that changes between them"
        raise DataError(f"{path!r}: {archive}: {fix}")
    return found


# -- variables


def choose_variables(found: Found, names: Sequence[str]) -> list[str]:
    """Those that are named, of the archive: all levels of a name without one; "all", or "usual".

    DataError for one that is not there, with the nearest.
    """
    if list(names) == ["all"]:
        return found.weather
    if list(names) == ["usual"]:
        return usual(found)
    chosen: list[str] = []
    for name in names:
        wanted = named_by([full_name(name)], found.archive.variables)
        if not wanted:
            near = nearest_name(name, found.archive.variables)
            raise DataError(f"--variables {name!r}: not in {found.path!r}{near}; datasets.describe lists all")
        chosen += [each for each in wanted if each not in chosen]
    return expand_levels(chosen, ())


def usual(found: Found) -> list[str]:
    """All where they are few; else state on three levels and at the surface, as far as it is there."""
    if len(found.weather) <= MANY:
        return found.weather
    named = [name for name in found.weather if name in USUAL]
    for base in USUAL:
        own = {split_name(name)[1] or 0: name for name in found.weather if name.startswith(f"{base}:")}
        nearest = {min(own, key=lambda have: abs(have - level)) for level in LEVELS} if own else set()
        named += [own[level] for level in sorted(nearest)]
    return [name for name in found.weather if name in named] or found.weather[:MANY]


def is_whole_state(variables: Sequence[str]) -> bool:
    """Whether both mass and wind are predicted: then one state nearly says how the next one is."""
    bases = {split_name(name)[0] for name in variables}
    mass = {"geopotential", "mean_sea_level_pressure", "surface_pressure"}
    return bool(bases & mass) and "u_component_of_wind" in bases | {
        name.removeprefix("10m_") for name in bases
    }


# -- resolution


def choose_grid(found: Found, text: str) -> tuple[int, int]:
    """(H, W) of "HxW", no finer than the data. Raises ConfigError."""
    rows, columns = found.shape
    if text == f"{rows}x{columns}":
        return found.shape
    shape = parse_grid(text).shape
    if shape[0] > rows or shape[1] > columns:
        reason = f"finer than the data, which have {rows}x{columns}"
        refuse("--resolution", text, f"{reason}; name that, or fewer rows and columns")
    if found.is_simulated:
        refuse("--resolution", text, f"the simulated weather is computed at {rows}x{columns}; name that")
    latitude = found.archive.grid.latitude
    if not found.archive.grid.periodic or np.abs(latitude_bounds(latitude)[[0, -1]]).min() < 90 - 1e-6:
        reason = f"a region: its grid of {rows}x{columns} stays, or datasets.convert --grid_like changes it"
        refuse("--resolution", text, f"{reason}; name {rows}x{columns}")
    return shape
