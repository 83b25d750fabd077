"""Inputs of the model besides the state: constant fields, computed forcings, noise, single numbers.

Single numbers are those of models/conditioning.py.
Shapes: B batch, h states of a window (datasets/field_dataset.py), V variables, S static fields, F forcings,
N channels of noise, K of single numbers, H latitudes, W longitudes, C = h V + S + F + N + K channels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from datasets.forcings import Instant, compute_forcings
from datasets.grid import Grid, area_weights
from models.noise import NoiseFields
from models.registry import num_channels


class Conditions(nn.Module):
    """Static fields, forcings and noise that are appended to a window, on the device."""

    static: Tensor
    latitude: Tensor
    longitude: Tensor
    hidden: Tensor

    def __init__(
        self,
        static: Sequence[np.ndarray],
        forcings: Sequence[str],
        grid: Grid,
        noise_dim: int = 0,
        single: Sequence[str] = (),
        hidden: Sequence[int] = (),
    ) -> None:
        """static: (H, W) each, in any units; forcings: names in `FORCINGS`; single: in `CHANNELS` of
        models/registry.py; hidden: channels of a window that are 0: diagnostic variables.
        """
        super().__init__()
        self.register_buffer("hidden", torch.tensor(hidden, dtype=torch.int64), persistent=False)
        self.single, self.has_lead = tuple(single), "lead_time" in single
        self.forcings = tuple(forcings)
        fields = [standardize(field, area_weights(grid.latitude)) for field in static]
        stacked = torch.stack(fields) if fields else torch.empty(0, *grid.shape)
        self.register_buffer("static", stacked, persistent=False)  # (S, H, W)
        self.register_buffer("latitude", torch.from_numpy(grid.latitude.copy()), persistent=False)
        self.register_buffer("longitude", torch.from_numpy(grid.longitude.copy()), persistent=False)
        self.noise = NoiseFields(noise_dim, grid.shape, grid.periodic) if noise_dim else None

    @property
    def num_channels(self) -> int:
        noise = self.noise.num_channels if self.noise else 0
        return len(self.static) + len(self.forcings) + noise + num_channels(self.single)

    def draw(self, keys: Tensor | None, times: Tensor, lead: Tensor | int | None) -> list[Tensor]:
        """Return the inputs of the step from `times` (B,) of forecasts with these keys (B,).

        Noise (B, N, H, W), and the number of steps after the analysis (B, 1, H, W). lead: that number, or
        (B,) of them.
        """
        inputs = []
        if self.noise:
            assert keys is not None, "a model with noise needs keys"
            inputs.append(self.noise.draw(keys, times))
        if self.has_lead:
            assert lead is not None, "a model with leads needs them"
            leads = torch.full_like(times, lead) if isinstance(lead, int) else lead
            inputs.append(leads.float()[:, None, None, None].expand(-1, 1, *self.static.shape[1:]))
        return inputs

    def append(self, window: Tensor, times: Tensor, *drawn: Tensor) -> Tensor:
        """Append the inputs to a window (B, h V, H, W), with its newest state at `times` (B,): (B, C, H, W).

        `times` are seconds since 1970.
        """
        if len(self.hidden):
            window = window.index_fill(1, self.hidden, 0.0)
        # Not len(window): an exported program would keep that number.
        parts = [window, self.static.expand(window.shape[0], -1, -1, -1)]
        if self.forcings:
            parts.append(compute_forcings(self.forcings, times, self.latitude, self.longitude))
        noise, lead = (drawn[:-1], drawn[-1:]) if self.has_lead else (drawn, ())
        return torch.cat([*parts, *noise, *self._single_numbers(times, *lead)], dim=1)

    def _single_numbers(self, times: Tensor, *lead: Tensor) -> list[Tensor]:
        """Return (B, 1 or 2, H, W) each, in the order of their names in CHANNELS."""
        zero = self.latitude.new_zeros(1, 1, 1)
        at = Instant(times[:, None, None], latitude=zero, longitude=zero)
        angles = {"time_of_day": at.local_time, "day_of_year": at.day_of_year}
        return [lead[0] if name == "lead_time" else self._waves(angles[name]()) for name in self.single]

    def _waves(self, angle: Tensor) -> Tensor:
        """Return sine and cosine (B, 2, H, W) of (B, 1, 1) radians."""
        pair = torch.stack([angle.sin(), angle.cos()], dim=1).float()  # (B, 2, 1, 1)
        return pair.expand(-1, -1, len(self.latitude), len(self.longitude))


def standardize(field: np.ndarray, area: np.ndarray) -> Tensor:
    """Scale a field (H, W) to area mean 0 and deviation 1: orography is in thousands, a mask in [0, 1]."""
    filled = np.where(np.isfinite(field), field, np.nanmean(field)).astype(np.float64)
    weights = np.broadcast_to(area[:, None], filled.shape)
    anomaly = filled - np.average(filled, weights=weights)
    deviation = np.sqrt(np.average(anomaly**2, weights=weights))
    return torch.from_numpy((anomaly / max(deviation, 1e-12)).astype(np.float32))
