"""Simulated analyses of any size in WeatherBench2's layout, for benchmarks that need a large store quickly.

Zarr 2, (time, level, latitude, longitude), all levels of a date in a chunk, float32. A few dates are written
and linked to by the others, so that the disk holds only these and a date costs its decoding.
"""

from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Blosc

from benchmarks.loader import Shape, weather

WRITTEN = 8
# name -> mean and standard deviation, in its own units; what is not listed has those of a wind
SCALES = {
    "geopotential": (6e4, 3e3),
    "temperature": (260.0, 15.0),
    "specific_humidity": (5e-3, 1e-3),
    "2m_temperature": (280.0, 15.0),
    "mean_sea_level_pressure": (1.01e5, 1e3),
}
WIND = (3.0, 8.0)


def write_tiled_analyses(
    path: Path,
    variables: list[str],
    levels: list[int],
    latitude: np.ndarray,
    longitude: np.ndarray,
    hours: list[int],
) -> None:
    """At these hours after 2000-01-01; `levels` for the variables that have no height in their names."""
    dates = len(hours)
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    grid = (len(latitude), len(longitude))
    shape = Shape(path.name, len(variables), grid, "f4", dates)
    for number, name in enumerate(variables):
        on = levels if is_on_levels(name) else []
        array = create(root, name, (dates, *([len(on)] if on else []), *grid), bool(on))
        for date in range(min(WRITTEN, dates)):
            field = values(shape, date, number, name)
            # Levels differ: equal ones would be one to the eye, and compress as one.
            array[date] = np.stack([field * (1 + 0.01 * k) for k in range(len(on))]) if on else field
        rest = ".0" * (array.ndim - 1)
        for date in range(WRITTEN, dates):
            (path / name / f"{date}{rest}").symlink_to(path / name / f"{date % WRITTEN}{rest}")
    units = {"units": "hours since 2000-01-01"}
    coordinate(root, "time", np.array(hours), units)
    coordinate(root, "level", np.array(levels), {})
    coordinate(root, "latitude", latitude, {})
    coordinate(root, "longitude", longitude, {})


def is_on_levels(name: str) -> bool:
    """As in WeatherBench2, whose surface variables say their height, or have none."""
    return not name.startswith(("2m_", "10m_", "mean_sea", "total_", "surface_"))


def create(root: zarr.Group, name: str, shape: tuple[int, ...], on_levels: bool) -> Any:
    dims = ["time", *(["level"] if on_levels else []), "latitude", "longitude"]
    return root.create_array(
        name,
        shape=shape,
        chunks=(1, *shape[1:]),
        dtype="f4",
        compressors=[Blosc("lz4", clevel=5, shuffle=Blosc.SHUFFLE)],
        attributes={"_ARRAY_DIMENSIONS": dims},
    )


def values(shape: Shape, date: int, number: int, name: str) -> np.ndarray:
    """(H, W) float32, plausible for a variable of this name."""
    mean, deviation = SCALES.get(name, WIND)
    south = np.linspace(0, 1, shape.grid[0])[:, None]  # that a field lies upside down would be seen by this
    return (mean + deviation * (2 * south + 0.3 * weather(shape, date, number))).astype(np.float32)


def coordinate(root: zarr.Group, name: str, numbers: np.ndarray, attributes: dict[str, str]) -> None:
    root.create_array(name, data=numbers, attributes={"_ARRAY_DIMENSIONS": [name], **attributes})
