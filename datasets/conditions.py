"""Inputs of the model besides the state: constant fields, computed forcings, noise.

Shapes: B batch, h states of a window (datasets/field_dataset.py), V variables, S static fields, F forcings,
N channels of noise, H latitudes, W longitudes, C = h V + S + F + N channels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from datasets.channels import Channels
from datasets.forcings import compute_forcings
from datasets.grid import Grid, area_weights
from models.noise import NoiseFields


class Conditions(nn.Module):
    """Static fields, forcings and noise that are appended to a window, on the device."""

    static: Tensor
    latitude: Tensor
    longitude: Tensor
    hidden: Tensor

    def __init__(
        self,
        static: Sequence[np.ndarray],
        channels: Channels,
        grid: Grid,
    ) -> None:
        """static: (H, W) each, in any units."""
        super().__init__()
        hidden = torch.tensor(channels.hidden, dtype=torch.int64)
        self.register_buffer("hidden", hidden, persistent=False)
        self.forcings, noise_dim = channels.computed, channels.noise_dim
        fields = [standardize(field, area_weights(grid.latitude)) for field in static]
        stacked = torch.stack(fields) if fields else torch.empty(0, *grid.shape)
        self.register_buffer("static", stacked, persistent=False)  # (S, H, W)
        self.register_buffer("latitude", torch.from_numpy(grid.latitude.copy()), persistent=False)
        self.register_buffer("longitude", torch.from_numpy(grid.longitude.copy()), persistent=False)
        self.noise = NoiseFields(noise_dim, grid.shape, grid.periodic) if noise_dim else None

    def draw(self, keys: Tensor | None, times: Tensor) -> list[Tensor]:
        """Return the noise (B, N, H, W) of the step from `times` (B,) of forecasts with these keys (B,)."""
        if not self.noise:
            return []
        assert keys is not None, "a model with noise needs keys"
        return [self.noise.draw(keys, times)]

    def append(self, window: Tensor, times: Tensor, *noise: Tensor) -> Tensor:
        """Append the inputs to a window (B, h V, H, W), with its newest state at `times` (B,): (B, C, H, W).

        `times` are seconds since 1970.
        """
        if len(self.hidden):
            window = window.index_fill(1, self.hidden, 0.0)
        # Not len(window): an exported program would keep that number.
        parts = [window, self.static.expand(window.shape[0], -1, -1, -1)]
        if self.forcings:
            parts.append(compute_forcings(self.forcings, times, self.latitude, self.longitude))
        return torch.cat([*parts, *noise], dim=1)


def standardize(field: np.ndarray, area: np.ndarray) -> Tensor:
    """Scale a field (H, W) to area mean 0 and deviation 1: orography is in thousands, a mask in [0, 1]."""
    filled = np.where(np.isfinite(field), field, np.nanmean(field)).astype(np.float64)
    weights = np.broadcast_to(area[:, None], filled.shape)
    anomaly = filled - np.average(filled, weights=weights)
    deviation = np.sqrt(np.average(anomaly**2, weights=weights))
    return torch.from_numpy((anomaly / max(deviation, 1e-12)).astype(np.float32))
