"""What the model is told besides the state: constant fields, forcings computed from date and position, noise.

Shapes: B batch, h states of a window (datasets/window.py), V variables, S static fields, F forcings,
N channels of noise, H latitudes, W longitudes, C = h V + S + F + N channels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from archives.grid import Grid, area_weights
from datasets.forcings import compute_forcings
from models.noise import NoiseFields


class Conditions(nn.Module):
    """Appends static fields, forcings and noise to a window. Computed on the device: the loader moves only
    states.
    """

    static: Tensor
    latitude: Tensor
    longitude: Tensor

    def __init__(
        self, static: Sequence[np.ndarray], forcings: Sequence[str], grid: Grid, noise_dim: int = 0
    ) -> None:
        """static: (H, W) each, in any units; forcings: names in `datasets.forcings.FORCINGS`."""
        super().__init__()
        self.forcings = tuple(forcings)
        fields = [standardize(field, area_weights(grid.latitude)) for field in static]
        stacked = torch.stack(fields) if fields else torch.empty(0, *grid.shape)
        self.register_buffer("static", stacked, persistent=False)  # (S, H, W)
        self.register_buffer("latitude", torch.from_numpy(grid.latitude.copy()), persistent=False)
        self.register_buffer("longitude", torch.from_numpy(grid.longitude.copy()), persistent=False)
        self.noise = NoiseFields(noise_dim, grid.shape, grid.periodic) if noise_dim else None

    @property
    def num_channels(self) -> int:
        return len(self.static) + len(self.forcings) + (self.noise.num_channels if self.noise else 0)

    def draw(self, keys: Tensor | None, times: Tensor) -> list[Tensor]:
        """Of a model with noise, that of the step from `times` (B,) of forecasts with these keys (B,):
        (B, N, H, W).
        """
        if not self.noise:
            return []
        assert keys is not None, "a model with noise is told which"
        return [self.noise.draw(keys, times)]

    def append(self, window: Tensor, times: Tensor, *noise: Tensor) -> Tensor:
        """window (B, h V, H, W) whose newest state is of `times` (B,), seconds since 1970, and what `draw`
        gave -> (B, C, H, W).
        """
        # Not len(window): an exported program would keep that number.
        parts = [window, self.static.expand(window.shape[0], -1, -1, -1)]
        if self.forcings:
            parts.append(compute_forcings(self.forcings, times, self.latitude, self.longitude))
        return torch.cat([*parts, *noise], dim=1)


def standardize(field: np.ndarray, area: np.ndarray) -> Tensor:
    """(H, W) -> float32 of area mean 0 and deviation 1: orography is in thousands, a mask in [0, 1]."""
    filled = np.where(np.isfinite(field), field, np.nanmean(field)).astype(np.float64)
    weights = np.broadcast_to(area[:, None], filled.shape)
    anomaly = filled - np.average(filled, weights=weights)
    deviation = np.sqrt(np.average(anomaly**2, weights=weights))
    return torch.from_numpy((anomaly / max(deviation, 1e-12)).astype(np.float32))
