"""Zonal energy spectra as WeatherBench2 derives them (derived_variables.ZonalEnergySpectrum).

On a circle of latitude of circumference C with values f[l], l = 0 .. W-1, and F[k] = sum f[l] exp(-2 pi i k l
/ W) / W, the energy is S[0] = C |F[0]|^2 and S[k] = 2 C |F[k]|^2: the sum over k is the integral of f^2 along
the circle, in units of f^2 times metres. Shapes: H latitudes, W longitudes, K = W // 2 + 1 wavenumbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from errors import DataError

EARTH_RADIUS = (6357e3 + 6378e3) / 2  # metres; WeatherBench2's


def circumference(degrees_north: np.ndarray) -> np.ndarray:
    """Lengths (H,) in metres of the circles at these latitudes; 0 at the poles, to rounding."""
    return 2 * np.pi * EARTH_RADIUS * np.cos(np.deg2rad(np.asarray(degrees_north, np.float64)))


def zonal_energy_spectrum(fields: Tensor, length: Tensor) -> Tensor:
    """Energy (..., H, K) float64 of fields (..., H, W) that go round the globe; length (H,): circumferences.

    As in WeatherBench2 the highest wavenumber of an even W counts twice too. NaN along a row with a NaN.
    """
    waves = torch.fft.rfft(fields.double(), norm="forward")
    energy = waves.real.square() + waves.imag.square()
    energy[..., 1:] *= 2  # positive and negative wavenumbers
    return energy * length[:, None]


def wavelengths(degrees_north: np.ndarray, num_longitudes: int) -> np.ndarray:
    """(H, K) in metres; infinite for wavenumber 0."""
    numbers = np.arange(num_longitudes // 2 + 1)
    with np.errstate(divide="ignore"):
        return circumference(degrees_north)[:, None] / numbers


def mean_over_latitudes(spectrum: xr.DataArray, bands: Sequence[tuple[float, float]]) -> xr.DataArray:
    """Mean spectrum over the rows inside the bands (south, north), on common frequencies (1/m).

    spectrum has dimensions latitude and zonal_wavenumber; the result `frequency` and `wavelength` instead.
    Frequencies run over what all these rows have, and rows are interpolated linearly between their own
    (WeatherBench2, interpolate_spectral_frequencies). DataError where no row lies inside.
    """
    north = spectrum.latitude.values
    inside = np.any([(north >= low) & (north <= high) for low, high in bands], axis=0)
    if not inside.any():
        raise DataError(f"no latitude of the spectrum lies in {list(bands)}")
    rows = spectrum.isel(latitude=np.flatnonzero(inside)).transpose("latitude", ..., "zonal_wavenumber")
    numbers = np.arange(rows.sizes["zonal_wavenumber"])
    own = numbers / circumference(rows.latitude.values)[:, None]  # (H, K)
    common = np.linspace(own[:, 0].max(), own[:, -1].min(), len(numbers))
    at = [
        np.apply_along_axis(lambda e, f=f: np.interp(common, f, e), -1, row)
        for row, f in zip(rows.values, own, strict=True)
    ]
    mean = (
        rows.isel(latitude=0, drop=True)
        .copy(data=np.mean(at, axis=0))
        .drop_vars("zonal_wavenumber", errors="ignore")
    )
    mean = mean.drop_vars("wavelength", errors="ignore").rename(zonal_wavenumber="frequency")
    with np.errstate(divide="ignore"):
        return mean.assign_coords(frequency=common, wavelength=("frequency", 1 / common))
