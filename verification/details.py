"""Maps of errors, zonal spectra and ranks of the truth at some leads, for plots.

Sums over dates, so that memory does not grow with them. Spectra are WeatherBench2's
(derived_variables.ZonalEnergySpectrum): on a circle of latitude of circumference C with values f[l], l = 0 ..
W-1, and F[k] = sum f[l] exp(-2 pi i k l / W) / W, the energy is S[0] = C |F[0]|^2 and S[k] = 2 C |F[k]|^2:
the sum over k is the integral of f^2 along the circle, in units of f^2 times metres. Shapes: D leads with
details, V variables, M members, H latitudes, W longitudes, K = W // 2 + 1 wavenumbers.
"""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.grid import Grid
from verification.matching import Pair
from verification.score_tables import by_variable
from verification.scores import RegionMeans

MIDLATITUDES = ((-60.0, -30.0), (30.0, 60.0))  # where spectra are averaged for plots and tables
EARTH_RADIUS = (6357e3 + 6378e3) / 2  # metres; WeatherBench2's


class Details:
    """Sums over dates, float64: of errors at every cell, of spectra, of ranks."""

    def __init__(
        self,
        leads: Sequence[int],
        variables: Sequence[str],
        grid: Grid,
        num_members: int,
        device: torch.device | str,
        units: Mapping[str, str] | None = None,
    ) -> None:
        """leads: positions of the leads that get spectra and ranks; the last of them gets a map of errors.
        units: those of variables that the project does not know.
        """
        self.units = units or {}
        self.row, self.variables, self.grid = {lead: i for i, lead in enumerate(leads)}, variables, grid

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(len(leads), len(variables), *shape, dtype=torch.float64, device=device)

        self.dates = zeros()
        self.error, self.valid = (zeros(*grid.shape)[-1:].clone() for _ in range(2))
        self.length = torch.from_numpy(circumference(grid.latitude)).to(device)
        waves = (grid.shape[0], grid.shape[1] // 2 + 1)
        self.spectra = {name: zeros(*waves) for name in ("forecast", "truth")} if grid.periodic else {}
        self.whole_rows = zeros(grid.shape[0])  # dates without a missing value on a circle of latitude
        self.ranks = zeros(num_members + 1) if num_members > 1 else None
        self.everywhere = RegionMeans(grid, ["global"], device)

    def add(self, pair: Pair) -> None:
        if pair.truth is None or pair.lead not in self.row:
            return
        row = self.row[pair.lead]
        for v, truth in enumerate(pair.truth.double()):  # one at a time: members and waves are large
            members = pair.forecast[..., v, :, :].double()
            state = members.mean(dim=0) if members.ndim == 3 else members
            valid = torch.isfinite(truth)
            if not valid.any():
                continue
            self.dates[row, v] += 1
            if row == len(self.row) - 1:
                self.valid[0, v] += valid
                self.error[0, v] += torch.where(valid, state - truth, 0.0)
            whole = valid.all(dim=-1)
            self.whole_rows[row, v] += whole
            for name, fields in {"forecast": members, "truth": truth}.items() if self.spectra else ():
                energy = zonal_energy_spectrum(fields, self.length)  # of members: their mean is too smooth
                energy = energy.mean(dim=0) if energy.ndim == 3 else energy
                self.spectra[name][row, v] += torch.where(whole[:, None], energy, 0.0)
            if self.ranks is not None:
                self.ranks[row, v] += rank_frequencies(members, truth, self.everywhere)

    def reduce(self) -> None:
        """The sums of all ranks, on all ranks; equal to one rank's to rounding."""
        ranks = [] if self.ranks is None else [self.ranks]
        for total in (self.dates, self.error, self.valid, self.whole_rows, *self.spectra.values(), *ranks):
            dist.all_reduce(total)

    def bias(self, leads: np.ndarray) -> xr.Dataset:
        """Dims (lead_time[, level], latitude, longitude): forecast - truth at the last lead, mean over the
        dates, of which coordinate `num_dates` (lead_time) has the number, here as in the others.
        """
        coords = {"latitude": self.grid.latitude, "longitude": self.grid.longitude}
        return self._dataset(self.error / self.valid, leads[-1:], ["variable", *coords], coords)

    def energy(self, leads: np.ndarray) -> xr.Dataset | None:
        """Dims (lead_time[, level], latitude, zonal_wavenumber, source), mean over the dates that lack no
        value on the circle of latitude; None on a grid that does not go round the globe.
        """
        if not self.spectra:
            return None
        mean = torch.stack(list(self.spectra.values()), dim=-1)
        mean = mean / self.whole_rows[..., None, None]
        waves = ("latitude", "zonal_wavenumber")
        length = wavelengths(self.grid.latitude, self.grid.shape[1])
        coords = {"latitude": self.grid.latitude, "zonal_wavenumber": np.arange(mean.shape[-2])}
        coords |= {"source": list(self.spectra), "wavelength": (waves, length, {"units": "m"})}
        return self._dataset(mean, leads, ["variable", *waves, "source"], coords)

    def rank_histogram(self, leads: np.ndarray) -> xr.Dataset | None:
        """Dims (lead_time[, level], rank): how often so many members lie below the truth, of sum 1."""
        if self.ranks is None:
            return None
        mean = self.ranks / self.dates[..., None]
        return self._dataset(mean, leads, ["variable", "rank"], {"rank": np.arange(mean.shape[-1])})

    def _dataset(self, values: Tensor, leads: np.ndarray, dims: list[str], coords: dict) -> xr.Dataset:
        coords = {"lead_time": leads.astype("timedelta64[ns]"), **coords}
        num_dates = self.dates.amax(dim=1)[-len(leads) :]
        coords["num_dates"] = ("lead_time", num_dates.long().cpu().numpy())
        return by_variable(values.cpu().numpy(), ["lead_time", *dims], self.variables, coords, self.units)


def rank_frequencies(members: Tensor, truth: Tensor, mean: RegionMeans) -> Tensor:
    """Fraction of the area (M + 1,) where 0 .. M members (M, H, W) lie below the truth (H, W).

    Where members equal the truth the lowest and the highest rank it could have count half each.
    """
    below, not_above = (members < truth).sum(dim=0), (members <= truth).sum(dim=0)
    numbers = torch.arange(len(members) + 1, device=truth.device)[:, None, None]
    counts = ((below == numbers).double() + (not_above == numbers).double()) / 2  # (M + 1, H, W)
    counts = torch.where(torch.isfinite(truth), counts, torch.nan)[:, None]  # (M + 1, 1, H, W)
    return mean(counts, truth[None])[0][:, 0, 0]


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


def mean_over_latitudes(
    spectrum: xr.DataArray, bands: Sequence[tuple[float, float]] = MIDLATITUDES
) -> xr.DataArray:
    """Mean spectrum over the rows inside the bands (south, north), on common frequencies (1/m); over all rows
    but the poles where no row is inside.

    spectrum has dimensions latitude and zonal_wavenumber; the result `frequency` and `wavelength` instead.
    Frequencies run over what all these rows have, and rows are interpolated linearly between their own
    (WeatherBench2, interpolate_spectral_frequencies). Rows without a value (NaN) are left out.
    """
    north = spectrum.latitude.values
    inside = np.any([(north >= low) & (north <= high) for low, high in bands], axis=0)
    inside = inside if inside.any() else np.abs(north) < 90
    rows = spectrum.isel(latitude=np.flatnonzero(inside)).transpose("latitude", ..., "zonal_wavenumber")
    numbers = np.arange(rows.sizes["zonal_wavenumber"])
    own = numbers / circumference(rows.latitude.values)[:, None]  # (H, K)
    common = np.linspace(own[:, 0].max(), own[:, -1].min(), len(numbers))
    at = [
        np.apply_along_axis(lambda e, f=f: np.interp(common, f, e), -1, row)
        for row, f in zip(rows.values, own, strict=True)
    ]
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # no row has a value: NaN
        averaged = np.nanmean(at, axis=0)
    mean = rows.isel(latitude=0, drop=True).copy(data=averaged)
    mean = mean.drop_vars("zonal_wavenumber", errors="ignore")
    mean = mean.drop_vars("wavelength", errors="ignore").rename(zonal_wavenumber="frequency")
    with np.errstate(divide="ignore"):
        return mean.assign_coords(frequency=common, wavelength=("frequency", 1 / common))
