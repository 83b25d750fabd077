"""Zonal energy spectra of forecasts and truth at one lead, defined as in WeatherBench2.

On a circle of latitude of circumference C with values f[l], l = 0 .. W-1, and F[k] = sum f[l] exp(-2 pi i k l
/ W) / W, the energy is S[0] = C |F[0]|^2 and S[k] = 2 C |F[k]|^2 (derived_variables.ZonalEnergySpectrum): the
sum over k is the integral of f^2 along the circle, in units of f^2 times metres. Shapes: V variables, M
members, H latitudes, W longitudes, K = W // 2 + 1 wavenumbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from datasets.grid import Grid
from verification.tables import by_variable, squared

MIDLATITUDES = (30.0, 60.0)  # degrees north and south, where spectra are averaged for plots
EARTH_RADIUS = (6357e3 + 6378e3) / 2  # metres; WeatherBench2's


class Spectra:
    """Sums of spectra over dates, float64; memory does not grow with the number of dates."""

    def __init__(self, variables: Sequence[str], grid: Grid, device: torch.device | str) -> None:
        self.variables, self.grid = list(variables), grid
        self.length = torch.from_numpy(circumference(grid.latitude)).to(device)
        waves = (grid.shape[0], grid.shape[1] // 2 + 1)
        shapes = {"dates": (), "whole_rows": grid.shape[:1], "forecast": waves, "truth": waves}
        self.sums = {
            name: torch.zeros((len(variables), *shape), dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }

    def add(self, forecast: Tensor, truth: Tensor, rows: Sequence[int]) -> None:
        """Add a date: forecast (V, H, W) or (M, V, H, W), truth (V, H, W); rows: positions of these variables
        among all.
        """
        for i, v in enumerate(rows):  # one at a time: members and waves are large
            exact = truth[i].double()
            members = forecast[..., i, :, :].double().reshape(-1, *exact.shape)
            valid = torch.isfinite(exact)
            whole = valid.all(dim=-1)  # a row with a missing value has no spectrum
            self.sums["dates"][v] += valid.any()
            self.sums["whole_rows"][v] += whole
            for name, fields in {"forecast": members, "truth": exact[None]}.items():
                # Mean energy of the members, not the energy of their mean, which is too smooth.
                energy = zonal_energy_spectrum(fields, self.length).mean(dim=0)
                self.sums[name][v] += torch.where(whole[:, None], energy, 0.0)

    def result(self, lead: np.ndarray, has: Sequence[bool], units: Mapping[str, str]) -> xr.Dataset:
        """Return dims (lead_time[, level], latitude, zonal_wavenumber, source): means over the dates that
        have all values on the circle of latitude. Coordinate `num_dates`: all dates. has: the variables that
        the forecast has; the others are left out. lead: (1,).
        """
        sources, there = ["forecast", "truth"], np.flatnonzero(has).tolist()
        mean = torch.stack([self.sums[name][there] for name in sources], dim=-1)[None]
        mean = mean / self.sums["whole_rows"][there][..., None, None]
        coords: dict[str, Any] = {"lead_time": lead.astype("timedelta64[ns]")}
        coords |= {"latitude": self.grid.latitude, "zonal_wavenumber": np.arange(mean.shape[-2])}
        coords |= {"source": sources, "num_dates": ("lead_time", [int(self.sums["dates"].max())])}
        dims = ["lead_time", "variable", "latitude", "zonal_wavenumber", "source"]
        names = [self.variables[row] for row in there]
        spectra = by_variable(xr.DataArray(mean.cpu().numpy(), coords, dims), names, units)
        for array in spectra.data_vars.values():  # squared, times the length of a circle of latitude
            array.attrs["units"] = f"{squared(array.attrs['units'])} m".strip()
        return spectra


def circumference(degrees_north: np.ndarray) -> np.ndarray:
    """Return the lengths (H,) in metres of the circles at these latitudes; 0 at the poles, to rounding."""
    return 2 * np.pi * EARTH_RADIUS * np.cos(np.deg2rad(np.asarray(degrees_north, np.float64)))


def zonal_energy_spectrum(fields: Tensor, length: Tensor) -> Tensor:
    """Return the energy (..., H, K) float64 of fields (..., H, W) round the globe; length (H,) in metres.

    As in WeatherBench2 the highest wavenumber of an even W counts twice too. NaN along a row with a NaN.
    """
    waves = torch.fft.rfft(fields.double(), norm="forward")
    energy = waves.real.square() + waves.imag.square()
    energy[..., 1:] *= 2  # positive and negative wavenumbers
    return energy * length[:, None]


def mean_of_midlatitudes(spectrum: xr.DataArray) -> xr.DataArray:
    """Return the mean of a spectrum over the rows of middle latitudes; over all but the poles where the grid
    has none. Rows without a value (NaN) are left out.
    """
    north = abs(spectrum["latitude"])
    inside = (north >= MIDLATITUDES[0]) & (north <= MIDLATITUDES[1])
    return spectrum.where(inside if inside.any() else north < 90).mean("latitude")
