"""Maps: a field in degrees with coastlines, and the colours of what is compared.

Coastlines are Natural Earth's (coastlines.csv, public domain). The data's own land-sea mask takes their place
if it is of another planet, or fine enough to be drawn. Shapes: H latitudes, W longitudes.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from datasets.grid import Grid, latitude_bounds, longitude_bounds

COASTLINES = Path(__file__).with_name("coastlines.csv")
STEPS = [1, 1.5, 2, 3, 6, 10]  # of ticks: 15, 20, 30, 60 degrees
MOST_COLUMNS = 720  # of cells: a panel has fewer pixels, and nine of 1024 x 2048 take 1.1 GiB
FINE_SPACING = 1.5  # degrees: up to here a land-sea mask gives coastlines without steps
EARTH_SHARE = 0.8  # of Earth's coast that lies at the coast of a coarse mask of Earth
OUTLIERS = 0.1  # per cent at either end that the range of colours may leave out


class Land(NamedTuple):
    """The data's own land-sea mask (H, W), 0 sea and 1 land, on its grid."""

    grid: Grid
    mask: np.ndarray


def draw_map(
    axes: Axes, grid: Grid, field: np.ndarray, title: str, land: Land | None = None, **colours: Any
) -> None:
    """A field (H, W) on its grid, in degrees, with coastlines and a colour bar.

    Of a fine grid every n-th cell, which shows noise as it is, where a mean would not.
    """
    mesh = axes.pcolormesh(*thinned(grid, field), shading="nearest", rasterized=True, **colours)
    draw_coastlines(axes, land)
    east, north = longitude_bounds(grid.longitude), latitude_bounds(grid.latitude)
    axes.set(xlim=(east[0], east[-1]), ylim=(north[-1], north[0]))
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=STEPS))
    axes.xaxis.set_major_formatter(lambda x, _: degrees_east(x))
    axes.yaxis.set_major_formatter(lambda x, _: degrees_north(x))
    axes.figure.colorbar(mesh, ax=axes, shrink=0.9, pad=0.01).ax.tick_params(labelsize=7)


def thinned(grid: Grid, field: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Longitudes, latitudes and values of at most MOST_COLUMNS columns."""
    every = -(-field.shape[1] // MOST_COLUMNS)
    return grid.longitude[::every], grid.latitude[::every], field[::every, ::every]


def draw_coastlines(axes: Axes, land: Land | None) -> None:
    """The data's own, or Natural Earth's, once more to the east and to the west for maps that go on there."""
    if land is not None and not (is_coarse(land.grid) and is_earth(land)):
        contour = {"levels": [0.5], "colors": "k", "linewidths": 0.6}
        axes.contour(*thinned(land.grid, land.mask), **contour)
        return
    for turn in (-360, 0, 360):
        east, north = coastlines().T
        axes.plot(east + turn, north, color="k", linewidth=0.6, scalex=False, scaley=False)


def is_coarse(grid: Grid) -> bool:
    """Return True if contours of a mask on the grid would show its cells."""
    return float(np.abs(np.diff(grid.latitude)).mean()) > FINE_SPACING


def is_earth(land: Land) -> bool:
    """Return True if most of Natural Earth's coast on the grid has land and sea in the cells next to it."""
    points = coastlines()[np.isfinite(coastlines()).all(axis=1)]
    north, east = land.grid.latitude, land.grid.longitude
    inside = (points[:, 1] >= north[-1]) & (points[:, 1] <= north[0])
    points = points[inside & ((points[:, 0] - east[0]) % 360 <= east[-1] - east[0])]
    rows = np.abs(north[:, None] - points[:, 1]).argmin(axis=0)
    columns = np.abs((points[:, 0] - east[:, None] + 180) % 360 - 180).argmin(axis=0)
    steps = np.array(list(np.ndindex(3, 3))) - 1
    near_rows = (rows[:, None] + steps[:, 0]).clip(0, len(north) - 1)
    near = land.mask[near_rows, (columns[:, None] + steps[:, 1]) % len(east)] > 0.5
    return len(points) > 0 and float((near.any(axis=1) & ~near.all(axis=1)).mean()) > EARTH_SHARE


@cache
def coastlines() -> np.ndarray:
    """(n, 2): degrees east, -180 to 180, and north; NaN between stretches."""
    return np.genfromtxt(COASTLINES, delimiter=",", skip_header=3)


def degrees_north(latitude: float) -> str:
    """ "20°S" """
    return f"{abs(latitude):g}°{'S' if latitude < 0 else 'N' if latitude > 0 else ''}"


def degrees_east(longitude: float) -> str:
    """ "60°W", also of 300."""
    turned = (longitude + 180) % 360 - 180
    side = "" if turned in (0, -180) else "W" if turned < 0 else "E"
    return f"{abs(turned):g}°{side}"


def field_colours(*fields: np.ndarray) -> dict[str, Any]:
    """One range for all of what is compared: truth and forecast. Winds have 0 in the middle."""
    values = np.concatenate([field[np.isfinite(field)] for field in fields])
    if not len(values):
        return {"cmap": "viridis"}
    low, high = np.percentile(values, [OUTLIERS, 100 - OUTLIERS])
    if low < 0 < high and min(-low, high) > 0.1 * max(-low, high):
        return {"vmin": -max(-low, high), "vmax": max(-low, high), "cmap": "RdBu_r"}
    return {"vmin": low, "vmax": high, "cmap": "viridis"}


def error_colours(error: np.ndarray) -> dict[str, Any]:
    """0 in the middle, and an end that a few outliers do not move."""
    finite = np.abs(error[np.isfinite(error)])
    bound = float(np.percentile(finite, 99.5)) if len(finite) else 0.0
    return {"vmin": -(bound or 1.0), "vmax": bound or 1.0, "cmap": "PuOr_r"}
