"""WeatherBench2's regions, as weights of rows and columns.

A cell belongs to a region when its centre does, limits included. Every region here is a set of rows times a
set of columns. Shapes: R regions, H latitudes, W longitudes. Source: WeatherBench2, scripts/evaluate.py,
predefined_regions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datasets.grid import Grid, area_weights
from datasets.variables import nearest_name
from errors import ConfigError

Interval = tuple[float, float]
EVERYWHERE: tuple[Interval, ...] = ((-90.0, 90.0),)
ALL_ROUND: tuple[Interval, ...] = ((0.0, 360.0),)
ON_THE_LIMIT = 1e-4  # degrees: float32 coordinates, and those made equidistant, miss a limit by less


@dataclass(frozen=True)
class Region:
    """Latitudes (south, north) and longitudes (west, east) in degrees, eastwards from 0."""

    latitudes: tuple[Interval, ...] = EVERYWHERE
    longitudes: tuple[Interval, ...] = ALL_ROUND


REGIONS = {
    "global": Region(),
    "tropics": Region(((-20, 20),)),
    "extra-tropics": Region(((-90, -20), (20, 90))),
    "northern-hemisphere": Region(((20, 90),)),
    "southern-hemisphere": Region(((-90, -20),)),
    "europe": Region(((35, 75),), ((347.5, 360), (0, 42.5))),
    "north-america": Region(((25, 60),), ((240, 285),)),
    "north-atlantic": Region(((25, 65),), ((290, 350),)),
    "north-pacific": Region(((25, 60),), ((145, 230),)),
    "east-asia": Region(((25, 60),), ((102.5, 150),)),
    "ausnz": Region(((-45, -12.5),), ((120, 175),)),
    "arctic": Region(((60, 90),)),
    "antarctic": Region(((-90, -60),)),
}


def region_weights(grid: Grid, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows (R, H), area weights inside and 0 outside, and columns (R, W) of 1 and 0, both float64.

    A region without a cell on the grid has only zeros. ConfigError for a name that WeatherBench2 has not.
    """
    unknown = next((name for name in names if name not in REGIONS), None)
    if unknown is not None:
        raise ConfigError(
            f"region {unknown!r}: not one of {', '.join(REGIONS)}{nearest_name(unknown, REGIONS)}"
        )
    area, east = area_weights(grid.latitude), grid.longitude % 360
    rows = [_inside(grid.latitude, REGIONS[name].latitudes) * area for name in names]
    columns = [_inside(east, REGIONS[name].longitudes) for name in names]
    return np.stack(rows), np.stack(columns)


def regions_on(grid: Grid) -> list[str]:
    """The names of the regions that have a cell on the grid."""
    rows, columns = region_weights(grid, list(REGIONS))
    there = rows.sum(axis=1) * columns.sum(axis=1) > 0
    return [name for name, cells in zip(REGIONS, there, strict=True) if cells]


def _inside(values: np.ndarray, intervals: Sequence[Interval]) -> np.ndarray:
    """1 where values (N,) lie in one of the intervals, else 0."""
    limits = np.asarray(intervals)[:, :, None]  # (intervals, 2, 1)
    inside = (values >= limits[:, 0] - ON_THE_LIMIT) & (values <= limits[:, 1] + ON_THE_LIMIT)
    return np.any(inside, axis=0).astype(float)
