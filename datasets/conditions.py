"""Inputs of the model besides the state: constant fields, forcings, noise.

Forcings need no data: they are functions of date and position, known in advance for any lead time. Angles are
in float64: seconds since 1970 do not fit float32; results are float32, of order one. MPS has no float64: use
a CPU.

Shapes: B batch, h states of a window (datasets/loader.py), V variables, S static fields, F forcings,
N channels of noise, H latitudes, W longitudes, C = h V + S + F + N channels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from datasets.channels import Channels
from datasets.grid import Grid, area_weights
from models.noise import NoiseFields

SECONDS_PER_DAY = 86400
DAYS_PER_YEAR = 365.2425  # Gregorian mean
EPOCH_TO_J2000 = 10957.5  # days from 1970-01-01 00:00 to 2000-01-01 12:00
MIRRORED = ("v_component", "northward", "vorticity")  # have the other sign in an image at the equator
SOLAR_CONSTANT = 1361.0  # W m-2; the unit of toa_incident_solar_radiation here, from 0 to 1.035


@dataclass(frozen=True)
class Instant:
    """Dates and positions as float64 tensors that broadcast to (B, H, W)."""

    seconds: Tensor  # (B, 1, 1) since 1970-01-01 UTC, int64
    latitude: Tensor  # (1, H, 1) radians
    longitude: Tensor  # (1, W), or (B, 1, W) where samples are turned; radians
    hemisphere: Tensor | int = 1  # (B, 1, 1): -1 where north and south are exchanged

    def local_time(self) -> Tensor:
        """Return the mean solar time as an angle (B, 1, W): 0 at midnight, pi at noon of the mean sun."""
        fraction = (self.seconds % SECONDS_PER_DAY).double() / SECONDS_PER_DAY
        return 2 * math.pi * fraction + self.longitude

    def day_of_year(self) -> Tensor:
        """Return the season as an angle (B, 1, 1), 0 at 1 January of 2000 and after each mean Gregorian year:
        less than a day from the calendar's, without jumps at midnight or after a leap year.
        """
        days = self.seconds.double() / SECONDS_PER_DAY - (EPOCH_TO_J2000 - 0.5)
        return 2 * math.pi * torch.remainder(days / DAYS_PER_YEAR, 1.0)


@dataclass(frozen=True)
class Sun:
    """Position of the sun, each (B, 1, 1)."""

    declination: Tensor  # radians
    equation_of_time: Tensor  # radians by which the true sun is ahead of the mean one
    inverse_distance_squared: Tensor  # (mean distance / distance)^2


def sun_position(seconds: Tensor) -> Sun:
    """Return the position of the sun at seconds since 1970-01-01 UTC, to 0.01 degrees in 1950-2050.

    Source: The Astronomical Almanac, section C, "Low precision formulas for the Sun's coordinates".
    """
    days = seconds.double() / SECONDS_PER_DAY - EPOCH_TO_J2000
    mean_longitude = torch.deg2rad(torch.remainder(280.460 + 0.9856474 * days, 360.0))
    anomaly = torch.deg2rad(torch.remainder(357.528 + 0.9856003 * days, 360.0))
    centre = 1.915 * torch.sin(anomaly) + 0.020 * torch.sin(2 * anomaly)  # degrees
    ecliptic = mean_longitude + torch.deg2rad(centre)
    obliquity = torch.deg2rad(23.439 - 4e-7 * days)
    ascension = torch.atan2(torch.cos(obliquity) * torch.sin(ecliptic), torch.cos(ecliptic))
    difference = torch.remainder(mean_longitude - ascension + math.pi, 2 * math.pi) - math.pi
    distance = 1.00014 - 0.01671 * torch.cos(anomaly) - 0.00014 * torch.cos(2 * anomaly)
    return Sun(torch.asin(torch.sin(obliquity) * torch.sin(ecliptic)), difference, distance**-2)


def insolation(at: Instant) -> Tensor:
    """Return the instantaneous radiation at the top of the atmosphere / solar constant, (B, H, W); ERA5's
    variable of this name is accumulated over the hour before, in J m-2.
    """
    sun = sun_position(at.seconds)
    hour_angle = at.local_time() - math.pi + sun.equation_of_time
    vertical = at.hemisphere * torch.sin(at.latitude) * torch.sin(sun.declination)
    horizontal = torch.cos(at.latitude) * torch.cos(sun.declination)
    cosine_zenith = vertical + horizontal * torch.cos(hour_angle)
    return sun.inverse_distance_squared * cosine_zenith.clamp(min=0)


FORCINGS: dict[str, Callable[[Instant], Tensor]] = {
    "toa_incident_solar_radiation": insolation,
    "sin_local_time": lambda at: torch.sin(at.local_time()),
    "cos_local_time": lambda at: torch.cos(at.local_time()),
    "sin_day_of_year": lambda at: at.hemisphere * torch.sin(at.day_of_year()),
    "cos_day_of_year": lambda at: at.hemisphere * torch.cos(at.day_of_year()),
    "sin_latitude": lambda at: torch.sin(at.latitude),
    "cos_latitude": lambda at: torch.cos(at.latitude),
    "sin_longitude": lambda at: torch.sin(at.longitude),
    "cos_longitude": lambda at: torch.cos(at.longitude),
}


def compute_forcings(
    names: Sequence[str], times: Tensor, latitude: Tensor, longitude: Tensor, hemisphere: Tensor | int = 1
) -> Tensor:
    """Return forcings (B, F, H, W), float32 and of order one, in the order of `names`, at `times` (B,) int64
    seconds since 1970, `latitude` (H,) and `longitude` (W,) or (B, 1, W) in degrees, on one device.
    hemisphere: (B, 1, 1), -1 for the other season.
    """
    if times.dtype != torch.int64:
        raise ValueError(f"times.dtype = {times.dtype}: give int64 seconds since 1970-01-01 UTC")
    at = Instant(
        seconds=times[:, None, None],
        latitude=torch.deg2rad(latitude.double())[None, :, None],
        longitude=torch.deg2rad(longitude.double()),
        hemisphere=hemisphere,
    )
    shape = (times.shape[0], len(latitude), longitude.shape[-1])
    result = torch.empty(shape[0], len(names), *shape[1:], dtype=torch.float32, device=times.device)
    for index, name in enumerate(names):
        result[:, index] = FORCINGS[name](at).expand(shape)
    return result


def turn(fields: Tensor, shifts: Tensor) -> Tensor:
    """Return fields (B, ..., H, W) moved to the east by `shifts` (B,) columns, modulo W; where that is W or
    more, the rows are exchanged as well, north and south.
    """
    height, width = fields.shape[-2:]
    rows, columns = (torch.arange(number, device=fields.device) for number in (height, width))
    rows = torch.where((shifts >= width)[:, None], height - 1 - rows, rows)  # (B, H)
    columns = torch.remainder(columns - shifts[:, None], width)  # (B, W)
    sources = (rows[:, :, None] * width + columns[:, None]).view(len(shifts), *[1] * (fields.ndim - 3), -1)
    points = fields.flatten(-2)
    return points.gather(-1, sources.expand_as(points)).view_as(fields)


class Conditions(nn.Module):
    """Static fields, forcings and noise that are appended to a window, on the device."""

    static: Tensor
    latitude: Tensor
    longitude: Tensor
    hidden: Tensor
    signs: Tensor  # (V,) of the states' mirror images

    def __init__(self, static: Sequence[np.ndarray], channels: Channels, grid: Grid) -> None:
        """static: (H, W) each, in any units: they are scaled to area mean 0 and deviation 1."""
        super().__init__()
        self.forcings, noise_dim = channels.computed, channels.noise_dim
        weights = np.broadcast_to(area_weights(grid.latitude)[:, None], grid.shape)
        stacked = torch.empty(len(static), *grid.shape)  # (S, H, W)
        for number, field in enumerate(static):
            filled = np.where(np.isfinite(field), field, np.nanmean(field)).astype(np.float64)
            anomaly = filled - np.average(filled, weights=weights)
            deviation = np.sqrt(np.average(anomaly**2, weights=weights))
            stacked[number] = torch.from_numpy((anomaly / max(deviation, 1e-12)).astype(np.float32))
        signs = [-1.0 if any(word in name for word in MIRRORED) else 1.0 for name in channels.variables]
        buffers = {
            "hidden": torch.tensor(channels.hidden, dtype=torch.int64),
            "static": stacked,
            "latitude": torch.from_numpy(grid.latitude.copy()),
            "longitude": torch.from_numpy(grid.longitude.copy()),
            "signs": torch.tensor(signs),
        }
        for name, values in buffers.items():
            self.register_buffer(name, values, persistent=False)
        self.noise = NoiseFields(noise_dim, grid.shape, grid.periodic) if noise_dim else None

    def draw(self, keys: Tensor | None, times: Tensor) -> list[Tensor]:
        """Return the noise (B, N, H, W) of the step from `times` (B,) of forecasts with these keys (B,)."""
        if not self.noise:
            return []
        assert keys is not None, "a model with noise needs keys"
        return [self.noise.draw(keys, times)]

    def turn(self, states: Tensor, shifts: Tensor) -> Tensor:
        """Return physical states (B, K, V, H, W) turned by `shifts` (B,), a symmetry of the physics."""
        mirrored = (shifts >= states.shape[-1]).view(-1, 1, 1, 1, 1)
        return turn(states, shifts).mul_(torch.where(mirrored, self.signs[:, None, None], 1.0))

    def append(self, window: Tensor, times: Tensor, *noise: Tensor, shifts: Tensor | None = None) -> Tensor:
        """Append the inputs to a window (B, h V, H, W), with its newest state at `times` (B,), seconds since
        1970: (B, C, H, W). shifts (B,): by which the window is turned, and with it what depends on the
        position.
        """
        if len(self.hidden):
            window = window.index_fill(1, self.hidden, 0.0)
        # Not len(window): an exported program would keep that number.
        static, longitude = self.static.expand(window.shape[0], -1, -1, -1), self.longitude
        hemisphere: Tensor | int = 1
        if shifts is not None:
            static = turn(static, shifts)
            longitude = turn(longitude.expand(window.shape[0], 1, -1), shifts)  # (B, 1, W)
            hemisphere = torch.where(shifts >= static.shape[-1], -1, 1)[:, None, None]  # (B, 1, 1)
        inputs = [window, static]
        if self.forcings:
            inputs.append(compute_forcings(self.forcings, times, self.latitude, longitude, hemisphere))
        return torch.cat([*inputs, *noise], dim=1)
