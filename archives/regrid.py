"""Regridding: first-order conservative (Jones 1999) on torch, and that or bilinear on numpy for conversions.

Cells of two latitude-longitude grids overlap separably: one small matrix for the rows, one for the columns.
So do the weights of bilinear interpolation.
Shapes: H latitudes, W longitudes; _s of the source, _t of the target.
"""

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from archives.grid import FLOAT32_DEGREES, Grid, latitude_bounds, longitude_bounds

# Two cells that only touch can overlap by rounding; below this fraction of a cell an overlap counts as none.
SLIVER = 1e-6


class Regridder:
    """Fields (..., H_s, W_s) on one grid -> (..., H_t, W_t) on another, computed in float64.

    A target value is the area mean of the source cells under it. NaN counts as no area: the mean is over the
    rest, and NaN where nothing valid lies below. Where the target lies inside a source without NaN the
    integral is kept. An infinite cell makes the cells above it infinite: it is no missing value but a
    forecast that blew up.
    """

    def __init__(self, source: Grid, target: Grid, device: torch.device | str = "cpu") -> None:
        self.source = source
        rows, columns = conservative_weights(source, target)
        self.rows = torch.from_numpy(rows).to(device)  # (H_t, H_s)
        self.columns = torch.from_numpy(columns).T.contiguous().to(device)  # (W_s, W_t)
        self.area = self.rows.sum(1)[:, None] * self.columns.sum(0)  # (H_t, W_t), 0 outside the source

    def __call__(self, fields: Tensor) -> Tensor:
        """The result has the dtype of `fields`."""
        assert fields.shape[-2:] == self.source.shape
        total, area = self._overlaid(fields.double()), self.area
        if not torch.isfinite(total).all():
            area = self._overlaid(torch.isfinite(fields).double())
            total = self._overlaid(torch.nan_to_num(fields.double(), 0, 0, 0))
            burst = self._overlaid(torch.isinf(fields).double()) > 0
            total, area = torch.where(burst, torch.inf, total), torch.where(burst, 1.0, area)
        return torch.where(area > 0, total / area, torch.nan).to(fields.dtype)

    def _overlaid(self, fields: Tensor) -> Tensor:
        """Sums over overlaps, rows first: to a coarser grid that is half the work of columns first."""
        return self.rows @ fields @ self.columns


def conservative_weights(source: Grid, target: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Overlaps of the cells of two grids: rows (H_t, H_s) in sin(latitude), columns (W_t, W_s) in degrees.

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
    """Lengths (N_t, N_s) that the intervals between ascending bounds have in common."""
    upper = np.minimum(target[1:, None], source[None, 1:])
    lower = np.maximum(target[:-1, None], source[None, :-1])
    common = np.maximum(upper - lower, 0)
    common[common < SLIVER * np.diff(target)[:, None]] = 0
    return common


def bilinear_weights(source: Grid, target: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the two nearest rows (H_t, H_s) and columns (W_t, W_s) of every target point.

    Between the outermost rows and the pole the outermost row counts, where the source reaches the pole at
    all; other points outside of the source have no weights. Longitudes go round the globe where the source
    does.
    """
    south_first = source.latitude[::-1]
    ends = [end if abs(abs(end) - 90) < 1e-9 else row for end, row in _ends_and_rows(source)]
    rows = _between(south_first, target.latitude, min(ends), max(ends))[:, ::-1]
    points = source.longitude
    if source.periodic:
        points = np.concatenate([points[-1:] - 360, points, points[:1] + 360])
    first, last = points[0], points[-1]
    wanted = first - FLOAT32_DEGREES + (target.longitude - first + FLOAT32_DEGREES) % 360
    columns = _between(points, wanted, first, last)
    if source.periodic:
        wrapped, columns = columns, columns[:, 1:-1].copy()
        columns[:, -1] += wrapped[:, 0]
        columns[:, 0] += wrapped[:, -1]
    return np.ascontiguousarray(rows), columns


def _ends_and_rows(grid: Grid) -> list[tuple[float, float]]:
    """The bound of the outermost cells and the latitude of their rows, north and south."""
    bounds = latitude_bounds(grid.latitude)
    return [(float(bounds[i]), float(grid.latitude[i])) for i in (0, -1)]


def _between(points: np.ndarray, wanted: np.ndarray, low: float, high: float) -> np.ndarray:
    """Weights (N_t, N_s) of linear interpolation between ascending points; zeros outside of [low, high]."""
    left = np.clip(np.searchsorted(points, wanted, "right") - 1, 0, len(points) - 2)
    fraction = (wanted - points[left]) / (points[left + 1] - points[left])
    fraction = np.clip(fraction, 0, 1)
    for whole in (0, 1):  # on a point only that point counts, though its neighbour be missing
        fraction[np.abs(fraction - whole) < SLIVER] = whole
    inside = (wanted >= low - FLOAT32_DEGREES) & (wanted <= high + FLOAT32_DEGREES)
    weights = np.zeros((len(wanted), len(points)))
    every = np.arange(len(wanted))
    weights[every, left], weights[every, left + 1] = inside * (1 - fraction), inside * fraction
    return weights


METHODS = {"conservative": conservative_weights, "bilinear": bilinear_weights}


class SparseRegridder:
    """Fields (..., H_s, W_s) of numpy on one grid -> (..., H_t, W_t) on another, in float64, as they come.

    The same bits whatever else runs: sums go row by row, where a matrix product sums as its threads please.
    And only over cells that overlap. Missing
    values count as no area, as in Regridder.
    """

    def __init__(self, source: Grid, target: Grid, method: str = "conservative") -> None:
        """method: one of METHODS."""
        rows, columns = METHODS[method](source, target)
        self.rows, self.columns = csr_array(rows), csr_array(columns)
        self.area = rows.sum(1)[:, None] * columns.sum(1)

    def __call__(self, fields: np.ndarray) -> np.ndarray:
        """The result is float32, NaN where nothing valid lies below."""
        out = np.empty((*fields.shape[:-2], *self.area.shape), np.float32)
        for index in np.ndindex(fields.shape[:-2]):
            out[index] = self._one(fields[index])
        return out

    def _one(self, field: np.ndarray) -> np.ndarray:
        missing, area = np.isnan(field), self.area
        values = field.astype(np.float64)
        if missing.any():
            values[missing] = 0
            area = self._overlaid((~missing).astype(np.float64))
        total = self._overlaid(values)
        return np.divide(total, area, out=np.full(area.shape, np.nan), where=area > 0)

    def _overlaid(self, field: np.ndarray) -> np.ndarray:
        return (self.columns @ (self.rows @ field).T).T
