"""Regridding: first-order conservative (Jones 1999) or bilinear, on any device.

Cells of two latitude-longitude grids overlap separably: one small matrix for the rows, one for the columns.
The weights of bilinear interpolation are separable, too. Shapes: H latitudes, W longitudes; _s of the source,
_t of the target.
"""

import numpy as np
import torch
from torch import Tensor

from datasets.grid import FLOAT32_DEGREES, Grid, latitude_bounds, longitude_bounds

# Two cells that only touch can overlap by rounding; below this fraction of a cell an overlap counts as none.
SLIVER = 1e-6


class Regridder:
    """Fields (..., H_s, W_s) on one grid -> (..., H_t, W_t) on another, computed in float64.

    A target value is the weighted mean of source cells; with "conservative" the area mean of the cells under
    it. NaN has no weight: the mean is over the other cells, NaN where there are none. Where the target is
    inside a source without NaN, "conservative" keeps the integral. An infinite cell makes the cells above it
    infinite: it is no missing value but a forecast that blew up.
    """

    def __init__(
        self, source: Grid, target: Grid, device: torch.device | str = "cpu", method: str = "conservative"
    ) -> None:
        """method: "conservative" or "bilinear"."""
        self.source = source
        rows, columns = METHODS[method](source, target)
        self.rows = torch.from_numpy(rows).to(device)  # (H_t, H_s)
        self.columns = torch.from_numpy(columns).T.contiguous().to(device)  # (W_s, W_t)
        self.weight = self.rows.sum(1)[:, None] * self.columns.sum(0)  # (H_t, W_t), 0 outside the source

    def __call__(self, fields: Tensor) -> Tensor:
        """Return the fields on the target grid, of the same dtype."""
        assert fields.shape[-2:] == self.source.shape
        total, weight = self._sum(fields.double()), self.weight
        if not torch.isfinite(total).all():
            weight = self._sum(torch.isfinite(fields).double())
            total = self._sum(torch.nan_to_num(fields.double(), 0, 0, 0))
            infinite = self._sum(torch.isinf(fields).double()) > 0
            total, weight = torch.where(infinite, torch.inf, total), torch.where(infinite, 1.0, weight)
        return torch.where(weight > 0, total / weight, torch.nan).to(fields.dtype)

    def _sum(self, fields: Tensor) -> Tensor:
        """Return weighted sums, rows first: to a coarser grid that is half the work of columns first."""
        return self.rows @ fields @ self.columns


def conservative_weights(source: Grid, target: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return the overlaps of cells: rows (H_t, H_s) in sin(latitude), columns (W_t, W_s) in degrees.

    The area that target cell (i, j) has in common with source cell (k, l) is rows[i, k] * columns[j, l], but
    for a constant. Longitudes overlap modulo 360.
    """
    bounds = [np.sin(np.deg2rad(latitude_bounds(grid.latitude)))[::-1] for grid in (target, source)]
    rows = _overlap(*bounds)[::-1, ::-1]  # ascending for the overlap, then back to north first
    target_columns, source_columns = longitude_bounds(target.longitude), longitude_bounds(source.longitude)
    turns = 360 * np.arange(-2, 3)  # -180..180 against 0..360, and cells that straddle the seam
    columns = sum(_overlap(target_columns, source_columns + turn) for turn in turns)
    return np.ascontiguousarray(rows), np.asarray(columns)


def _overlap(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the lengths (N_t, N_s) that the intervals between ascending bounds have in common."""
    upper = np.minimum(target[1:, None], source[None, 1:])
    lower = np.maximum(target[:-1, None], source[None, :-1])
    common = np.maximum(upper - lower, 0)
    common[common < SLIVER * np.diff(target)[:, None]] = 0
    return common


def bilinear_weights(source: Grid, target: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of the two nearest rows (H_t, H_s) and columns (W_t, W_s) of every target point.

    Between the outermost row and the pole that row counts, if the source reaches the pole; other points
    outside of the source have no weights. Longitudes go round the globe if the source does.
    """
    south_first = source.latitude[::-1]
    ends = [end if abs(abs(end) - 90) < 1e-9 else row for end, row in _ends_and_rows(source)]
    rows = _between(south_first, target.latitude, min(ends), max(ends))[:, ::-1]
    points = source.longitude
    if source.periodic:
        points = np.concatenate([points[-1:] - 360, points, points[:1] + 360])
    first, last = points[0], points[-1]
    targets = first - FLOAT32_DEGREES + (target.longitude - first + FLOAT32_DEGREES) % 360
    columns = _between(points, targets, first, last)
    if source.periodic:
        wrapped, columns = columns, columns[:, 1:-1].copy()
        columns[:, -1] += wrapped[:, 0]
        columns[:, 0] += wrapped[:, -1]
    return np.ascontiguousarray(rows), columns


def _ends_and_rows(grid: Grid) -> list[tuple[float, float]]:
    """Return the bound of the outermost cells and the latitude of their rows, north and south."""
    bounds = latitude_bounds(grid.latitude)
    return [(float(bounds[i]), float(grid.latitude[i])) for i in (0, -1)]


def _between(points: np.ndarray, targets: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the weights (N_t, N_s) of linear interpolation; zeros outside of [low, high]."""
    left = np.clip(np.searchsorted(points, targets, "right") - 1, 0, len(points) - 2)
    fraction = (targets - points[left]) / (points[left + 1] - points[left])
    fraction = np.clip(fraction, 0, 1)
    for whole in (0, 1):  # on a point only that point counts, though its neighbour be missing
        fraction[np.abs(fraction - whole) < SLIVER] = whole
    inside = (targets >= low - FLOAT32_DEGREES) & (targets <= high + FLOAT32_DEGREES)
    weights = np.zeros((len(targets), len(points)))
    every = np.arange(len(targets))
    weights[every, left], weights[every, left + 1] = inside * (1 - fraction), inside * fraction
    return weights


METHODS = {"conservative": conservative_weights, "bilinear": bilinear_weights}
