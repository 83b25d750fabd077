"""Maps of fields in degrees, with coastlines, and ranges of colours for what is compared.

Coastlines are the outline of the data's own land-sea mask, which may be of another planet, or else Natural
Earth's (coastlines.csv, public domain). Shapes: H latitudes, W longitudes.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from datasets.grid import Grid, latitude_bounds, longitude_bounds

COASTLINES = Path(__file__).with_name("coastlines.csv")
MAX_COLUMNS = 720  # of cells: a panel has fewer pixels, and nine of 1024 x 2048 take 1.1 GiB
OUTLIERS = 0.1  # per cent at either end that the range of colours may leave out


class Land(NamedTuple):
    """The data's own land-sea mask (H, W), 0 sea and 1 land, on its grid."""

    grid: Grid
    mask: np.ndarray


def draw_map(
    axes: Axes, grid: Grid, field: np.ndarray, title: str, land: Land | None = None, **colors: Any
) -> None:
    """Draw a field (H, W) on its grid, in degrees, with coastlines and a colour bar."""
    mesh = axes.pcolormesh(*thin(grid, field), shading="nearest", rasterized=True, **colors)
    if land is not None:
        axes.contour(*thin(*land), levels=[0.5], colors="k", linewidths=0.6)
    else:
        for shift in (-360, 0, 360):  # for maps that go on east or west of 180
            axes.plot(coastlines()[:, 0] + shift, coastlines()[:, 1], color="k", linewidth=0.6)
    east, north = longitude_bounds(grid.longitude), latitude_bounds(grid.latitude)
    axes.set(xlim=(east[0], east[-1]), ylim=(north[-1], north[0]))
    axes.set_title(title, fontsize=9)
    axes.figure.colorbar(mesh, ax=axes, shrink=0.9, pad=0.01)


def thin(grid: Grid, field: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return longitudes, latitudes and values of every n-th cell: a mean would hide noise."""
    every = -(-field.shape[1] // MAX_COLUMNS)
    return grid.longitude[::every], grid.latitude[::every], field[::every, ::every]


@cache
def coastlines() -> np.ndarray:
    """Return points (n, 2) in degrees east, -180 to 180, and north; NaN between lines."""
    return np.genfromtxt(COASTLINES, delimiter=",", skip_header=3)


def color_range(*fields: np.ndarray, signed: bool = False) -> dict[str, Any]:
    """Return one range of colours for fields that are compared, with 0 in the middle if they are `signed`, as
    errors are, or have both signs, as winds have.
    """
    values = np.concatenate([field[np.isfinite(field)] for field in fields])
    low, high = np.percentile(values, [OUTLIERS, 100 - OUTLIERS]) if len(values) else (-1.0, 1.0)
    bound = max(-low, high)
    if signed or min(-low, high) > 0.1 * bound:
        return {"vmin": -(bound or 1.0), "vmax": bound or 1.0, "cmap": "RdBu_r"}
    return {"vmin": low, "vmax": high, "cmap": "viridis"}
