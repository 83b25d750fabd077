"""First-order conservative regridding (Jones 1999), on any device.

Cells of two latitude-longitude grids overlap separably: one small matrix for the rows, one for the columns.
Shapes: H latitudes, W longitudes; _s of the source, _t of the target.
"""

import numpy as np
import torch
from torch import Tensor

from datasets.grid import Grid, latitude_bounds, longitude_bounds

# Adjacent cells can overlap by rounding: overlaps below this fraction of a cell are ignored.
SLIVER = 1e-6
WHOLE = 1 - 1e-3  # of a target cell that the source covers
LEAST = 0.5 - 1e-6  # of a target cell that has values, for it to have one


class Regridder:
    """Fields (..., H_s, W_s) on one grid -> (..., H_t, W_t) on another, computed in float64.

    A target value is the area mean of the source cells under it, or of numbered classes the class with the
    largest share. NaN has no weight: the mean is over the other cells, and a target cell of which they cover
    less than half is NaN. An infinite cell makes the cells above it infinite: a forecast that blew up is not
    missing.
    """

    def __init__(self, source: Grid, target: Grid, device: torch.device | str = "cpu") -> None:
        self.source = source
        rows, columns = conservative_weights(source, target)
        self.rows = torch.from_numpy(rows).to(device)  # (H_t, H_s)
        self.columns = torch.from_numpy(columns).T.contiguous().to(device)  # (W_s, W_t)
        self.weight = self.rows.sum(1)[:, None] * self.columns.sum(0)  # (H_t, W_t), 0 outside the source
        heights = -np.diff(np.sin(np.deg2rad(latitude_bounds(target.latitude))))
        areas = torch.from_numpy(heights[:, None] * np.diff(longitude_bounds(target.longitude))).to(device)
        self.covered, self.least = self.weight > WHOLE * areas, LEAST * areas  # (H_t, W_t)

    def __call__(self, fields: Tensor, is_class: bool = False) -> Tensor:
        """Return the fields on the target grid, of the same dtype. is_class: they are numbers of classes."""
        assert fields.shape[-2:] == self.source.shape
        if is_class:
            classes = fields[torch.isfinite(fields)].unique()
            shares = torch.stack([self._sum((fields == number).double()) for number in classes])
            largest = classes[shares.argmax(0)]
            return torch.where(shares.sum(0) >= self.least, largest, torch.nan).to(fields.dtype)
        total, weight = self._sum(fields.double()), self.weight
        if not torch.isfinite(total).all():
            weight = self._sum(torch.isfinite(fields).double())
            total = self._sum(torch.nan_to_num(fields.double(), 0, 0, 0))
            infinite = self._sum(torch.isinf(fields).double()) > 0
            total, weight = (
                torch.where(infinite, torch.inf, total),
                torch.where(infinite, self.weight, weight),
            )
        is_covered = (weight >= self.least) | torch.isinf(total)
        return torch.where(is_covered, total / weight, torch.nan).to(fields.dtype)

    def _sum(self, fields: Tensor) -> Tensor:
        """Return weighted sums, rows first: to a coarser grid that is half the work of columns first."""
        return self.rows @ fields @ self.columns


def conservative_weights(source: Grid, target: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Return the overlaps of cells: rows (H_t, H_s) in sin(latitude), columns (W_t, W_s) in degrees, modulo
    360. Target cell (i, j) and source cell (k, l) overlap by rows[i, k] * columns[j, l], times a constant.
    """
    bounds = [np.sin(np.deg2rad(latitude_bounds(grid.latitude)))[::-1] for grid in (target, source)]
    rows = _overlap(*bounds)[::-1, ::-1]  # ascending for the overlap, then back to north first
    target_columns, source_columns = longitude_bounds(target.longitude), longitude_bounds(source.longitude)
    turns = 360 * np.arange(-2, 3)  # for -180..180 and 0..360, and for cells across the first meridian
    columns = sum(_overlap(target_columns, source_columns + turn) for turn in turns)
    return np.ascontiguousarray(rows), np.asarray(columns)


def _overlap(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Return the lengths (N_t, N_s) of the overlaps of the intervals between ascending bounds."""
    upper = np.minimum(target[1:, None], source[None, 1:])
    lower = np.maximum(target[:-1, None], source[None, :-1])
    common = np.maximum(upper - lower, 0)
    common[common < SLIVER * np.diff(target)[:, None]] = 0
    return common
