"""First-order conservative regridding on torch, with the overlaps computed once for a pair of grids."""

import torch
from torch import Tensor

from datasets.grid import Grid, conservative_weights


class Regridder:
    """Fields (..., H_s, W_s) on one grid -> (..., H_t, W_t) on another, float32, computed in float64.

    The same as datasets.grid.regrid_conservative: a target value is the area mean of the source cells under
    it; NaN counts as no area. An infinite cell makes the cells above it infinite: it is no missing value but
    a forecast that blew up.
    """

    def __init__(self, source: Grid, target: Grid, device: torch.device | str = "cpu") -> None:
        self.source = source
        rows, columns = conservative_weights(source, target)
        self.rows = torch.from_numpy(rows).to(device)  # (H_t, H_s)
        self.columns = torch.from_numpy(columns).T.contiguous().to(device)  # (W_s, W_t)
        self.area = self.rows.sum(1)[:, None] * self.columns.sum(0)  # (H_t, W_t), 0 outside the source

    def __call__(self, fields: Tensor) -> Tensor:
        assert fields.shape[-2:] == self.source.shape
        total, area = self._overlaid(fields.double()), self.area
        if not torch.isfinite(total).all():
            area = self._overlaid(torch.isfinite(fields).double())
            total = self._overlaid(torch.nan_to_num(fields.double(), 0, 0, 0))
            burst = self._overlaid(torch.isinf(fields).double()) > 0
            total, area = torch.where(burst, torch.inf, total), torch.where(burst, 1.0, area)
        return torch.where(area > 0, total / area, torch.nan).float()

    def _overlaid(self, fields: Tensor) -> Tensor:
        """Sums over overlaps, rows first: to a coarser grid that is half the work of columns first."""
        return self.rows @ fields @ self.columns
