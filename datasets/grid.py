"""Latitude-longitude grids: their cells and the one definition of the area weight.

A grid point represents its cell; the cells' bounds are half-way between points. Shapes: H latitudes, W
longitudes. Degrees everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from errors import ConfigError

# Coordinates stored as float32 are off by up to 4e-6 degrees at 90 and 1.5e-5 at 360.
FLOAT32_DEGREES = 2e-5


def equal_spacing(coordinate: np.ndarray) -> np.ndarray:
    """Return the coordinate (N,) float64, made equidistant if it is so up to float32 rounding, which on a 0.1
    degree grid would change a row's weight by 1e-4; not Gaussian latitudes.
    """
    values = np.asarray(coordinate, np.float64)
    regular = np.linspace(values[0], values[-1], len(values))
    return regular if np.abs(values - regular).max() < FLOAT32_DEGREES else values


@dataclass(frozen=True, eq=False)
class Grid:
    """A latitude-longitude grid: latitude (H,) north to south, longitude (W,) ascending, float64 degrees.

    ValueError where a coordinate is not one-dimensional, too short, not in that order or out of range.
    """

    latitude: np.ndarray
    longitude: np.ndarray

    def __post_init__(self):
        for name, sign in (("latitude", -1), ("longitude", 1)):
            values = np.asarray(getattr(self, name), np.float64)
            if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all():
                raise ValueError(f"{name} has shape {values.shape}: two or more finite values expected")
            if not (sign * np.diff(values) > 0).all():
                order = "ascending" if sign > 0 else "north to south"
                raise ValueError(f"{name} has to be {order}, without repeats")
            object.__setattr__(self, name, equal_spacing(values))
        if np.abs(self.latitude).max() > 90 + FLOAT32_DEGREES:
            raise ValueError(f"latitude reaches {np.abs(self.latitude).max():g} degrees: the poles are at 90")
        if self.longitude[-1] - self.longitude[0] > 360 - FLOAT32_DEGREES:
            raise ValueError("longitude goes round the globe more than once: drop the repeated columns")

    @property
    def shape(self) -> tuple[int, int]:
        """Return (H, W)."""
        return len(self.latitude), len(self.longitude)

    @property
    def periodic(self) -> bool:
        """True if the longitudes cover the globe: the eastern neighbour of the last column is the first."""
        return is_periodic(self.longitude)

    def same_as(self, other: "Grid") -> bool:
        """Return True if both grids have the same points, to 1e-3 degrees; longitudes modulo 360."""
        if self.shape != other.shape:
            return False
        turn = (self.longitude - other.longitude + 180) % 360 - 180
        return max(np.abs(self.latitude - other.latitude).max(), np.abs(turn).max()) <= 1e-3

    def crop(self, region: Sequence[float], key: str = "data.region") -> "tuple[Grid, slice, np.ndarray]":
        """Return the points inside (north, west, south, east), and their rows and columns in this grid.
        Raises ConfigError for fewer than two rows or columns.
        """
        north, west, south, east = region
        rows = np.flatnonzero((self.latitude >= south - 1e-6) & (self.latitude <= north + 1e-6))
        offset = (self.longitude - west + 1e-6) % 360 - 1e-6  # degrees east of `west`
        width = 360.0 if east - west >= 360 else (east - west) % 360
        columns = np.flatnonzero(offset <= width + 1e-6)
        if len(rows) < 2 or len(columns) < 2:
            count = f"{len(rows)} x {len(columns)} points of the grid are in it"
            raise ConfigError(f"{key} = {list(region)}: {count}; two of each are needed")
        columns = columns[np.argsort(offset[columns], kind="stable")]
        longitude = self.longitude[columns]
        longitude = longitude + 360 * np.round((west + offset[columns] - longitude) / 360)
        if longitude[-1] >= 360 and longitude[0] >= 180:
            longitude = longitude - 360
        chosen = slice(int(rows[0]), int(rows[-1]) + 1)
        return Grid(self.latitude[chosen], longitude), chosen, columns


def coarser(one: Grid, other: Grid) -> Grid:
    """Return the grid with the larger cells; the grids may cover different parts of the globe."""
    sizes = []
    for grid in (one, other):
        rows, columns = latitude_bounds(grid.latitude), longitude_bounds(grid.longitude)
        sizes.append(float(np.abs(np.diff(rows)).mean() * np.diff(columns).mean()))
    return other if sizes[1] > sizes[0] * (1 + 1e-6) else one


def global_grid(shape: tuple[int, int], poles: bool = False) -> Grid:
    """Return a global grid of (H, W) cells of one size; with `poles` the outer rows are on the poles."""
    (rows, columns), half = shape, 0 if poles else 90 / shape[0]
    return Grid(np.linspace(90 - half, half - 90, rows), np.arange(columns) * 360 / columns)


def is_periodic(longitude: np.ndarray) -> bool:
    """Return True if ascending longitudes (W,) of even spacing cover 360 degrees, to a tenth of a column."""
    spacing = (longitude[-1] - longitude[0]) / (len(longitude) - 1)
    return bool(abs(len(longitude) * spacing - 360) < 0.1 * spacing)


def latitude_bounds(latitude: np.ndarray) -> np.ndarray:
    """Return the bounds of rows (H + 1,) in degrees, in the direction of `latitude`: midpoints and two ends,
    at the pole if that is within one spacing. A regional grid ends half a cell beyond its last row.
    """
    values = equal_spacing(latitude)
    if len(values) < 2:
        raise ValueError(f"latitude has {len(values)} rows: the bounds of cells need two or more")
    middle = (values[1:] + values[:-1]) / 2
    edges, inner = values[[0, -1]], values[[1, -2]]
    spacing = edges - inner
    poles = np.copysign(90.0, spacing)
    is_near_pole = np.abs(poles - edges) <= np.abs(spacing) * (1 + 1e-6) + FLOAT32_DEGREES
    ends = np.where(is_near_pole, poles, edges + spacing / 2)
    return np.concatenate([ends[:1], middle, ends[1:]])


def area_weights(latitude: np.ndarray) -> np.ndarray:
    """Return the weights of the rows (H,), float64: w_i = sin(upper_i) - sin(lower_i), over their mean.

    The area of a sphere between two latitudes is 2 pi R^2 (sin(upper) - sin(lower)). A row on the pole keeps
    its half cell; cos(latitude) would give it 0. Any direction. Source: WeatherBench2, get_lat_weights.
    """
    areas = np.abs(np.diff(np.sin(np.deg2rad(latitude_bounds(latitude)))))
    return areas / areas.mean()


def sum_moments(fields: np.ndarray, reference: np.ndarray | float, area: np.ndarray) -> np.ndarray:
    """Return weight, first and second moment (n, 3) of fields - reference (n, H, W); area: of rows (H,)."""
    anomaly = np.subtract(fields, reference, dtype=np.float64)
    valid = np.isfinite(anomaly)
    anomaly[~valid] = 0
    by_row = valid.sum(axis=2), anomaly.sum(axis=2), np.einsum("nhw,nhw->nh", anomaly, anomaly)
    # Row by row, so that the sums of a field do not depend on the fields next to it.
    return np.array([[area @ row for row in sums] for sums in by_row]).reshape(3, -1).T


def longitude_bounds(longitude: np.ndarray) -> np.ndarray:
    """Return the bounds of ascending columns (W + 1,) in degrees: midpoints and two ends, 360 apart where the
    columns go round the globe.
    """
    values = equal_spacing(longitude)
    middle = (values[1:] + values[:-1]) / 2
    if is_periodic(values):
        seam = (values[0] + values[-1] - 360) / 2
        return np.concatenate([[seam], middle, [seam + 360]])
    first, last = values[0] - (middle[0] - values[0]), values[-1] + (values[-1] - middle[-1])
    return np.concatenate([[first], middle, [last]])
