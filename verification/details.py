"""Maps of errors, zonal spectra and ranks of the truth at some leads, for plots.

Sums over dates, so that memory does not grow with them. Spectra are WeatherBench2's
(derived_variables.ZonalEnergySpectrum): on a circle of latitude of circumference C with values f[l], l = 0 ..
W-1, and F[k] = sum f[l] exp(-2 pi i k l / W) / W, the energy is S[0] = C |F[0]|^2 and S[k] = 2 C |F[k]|^2:
the sum over k is the integral of f^2 along the circle, in units of f^2 times metres. Shapes: D leads with
details, V variables, M members, H latitudes, W longitudes, K = W // 2 + 1 wavenumbers.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.grid import Grid
from verification.matching import Pair
from verification.score_tables import by_variable, squared
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
        units: Mapping[str, str],
    ) -> None:
        """leads: positions of the leads that get spectra and ranks; the last of them gets a map of errors."""
        self.row, self.variables, self.grid = {lead: i for i, lead in enumerate(leads)}, variables, grid
        self.units, self.everywhere = units, RegionMeans(grid, ["global"], device)
        self.length = torch.from_numpy(circumference(grid.latitude)).to(device)
        waves = (grid.shape[0], grid.shape[1] // 2 + 1)
        shapes: dict[str, tuple[int, ...]] = {"dates": (), "whole_rows": grid.shape[:1]}
        shapes |= {"forecast": waves, "truth": waves} if grid.periodic else {}
        shapes |= {"ranks": (num_members + 1,)} if num_members > 1 else {}
        shapes = {name: (len(leads), len(variables), *shape) for name, shape in shapes.items()}
        shapes |= dict.fromkeys(("error", "valid"), (1, len(variables), *grid.shape))
        self.sums = {name: torch.zeros(s, dtype=torch.float64, device=device) for name, s in shapes.items()}

    def add(self, pair: Pair) -> None:
        if pair.lead not in self.row:
            return
        row, sums = self.row[pair.lead], self.sums
        for i, v in enumerate(pair.rows):  # one at a time: members and waves are large
            truth = pair.truth[i].double()
            members = pair.forecast[..., i, :, :].double().reshape(-1, *truth.shape)
            valid = torch.isfinite(truth)
            if not valid.any():
                continue
            sums["dates"][row, v] += 1
            if row == len(self.row) - 1:
                sums["valid"][0, v] += valid
                sums["error"][0, v] += torch.where(valid, members.mean(dim=0) - truth, 0.0)
            whole = valid.all(dim=-1)  # a row with a missing value has no spectrum
            sums["whole_rows"][row, v] += whole
            for name, fields in {"forecast": members, "truth": truth[None]}.items():
                if name in sums:  # energy of the members: their mean is too smooth
                    energy = zonal_energy_spectrum(fields, self.length).mean(dim=0)
                    sums[name][row, v] += torch.where(whole[:, None], energy, 0.0)
            if "ranks" in sums:
                sums["ranks"][row, v] += rank_frequencies(members, truth, self.everywhere)

    def reduce(self) -> None:
        """Add the sums of all ranks, on all ranks; equal to one rank's to rounding."""
        for total in self.sums.values():
            dist.all_reduce(total)

    def results(self, leads: np.ndarray) -> tuple[xr.Dataset | None, ...]:
        """Return bias, energy and rank histogram; leads: all of them."""
        own = leads[list(self.row)]
        return self.bias(own), self.energy(own), self.rank_histogram(own)

    def bias(self, leads: np.ndarray) -> xr.Dataset:
        """Return dims (lead_time[, level], latitude, longitude): forecast - truth at the last lead, mean over
        the dates, of which coordinate `num_dates` (lead_time) has the number, here as in the others.
        """
        coords = {"latitude": self.grid.latitude, "longitude": self.grid.longitude}
        mean = self.sums["error"] / self.sums["valid"]
        return self._dataset(mean, leads[-1:], ["variable", *coords], coords)

    def energy(self, leads: np.ndarray) -> xr.Dataset | None:
        """Return dims (lead_time[, level], latitude, zonal_wavenumber, source), mean over the dates that lack
        no value on the circle of latitude; None on a grid that does not go round the globe.
        """
        if not self.grid.periodic:
            return None
        sources, waves = ["forecast", "truth"], ("latitude", "zonal_wavenumber")
        mean = torch.stack([self.sums[name] for name in sources], dim=-1)
        mean = mean / self.sums["whole_rows"][..., None, None]
        length = wavelengths(self.grid.latitude, self.grid.shape[1])
        coords = {"latitude": self.grid.latitude, "zonal_wavenumber": np.arange(mean.shape[-2])}
        coords |= {"source": sources, "wavelength": (waves, length, {"units": "m"})}
        return self._dataset(mean, leads, ["variable", *waves, "source"], coords, energy_units)

    def rank_histogram(self, leads: np.ndarray) -> xr.Dataset | None:
        """Return dims (lead_time[, level], rank): how often so many members are below the truth, of sum 1."""
        if "ranks" not in self.sums:
            return None
        mean = self.sums["ranks"] / self.sums["dates"][..., None]
        ranks = {"rank": np.arange(mean.shape[-1])}
        return self._dataset(mean, leads, ["variable", "rank"], ranks, lambda own: "1")

    def _dataset(
        self,
        values: Tensor,
        leads: np.ndarray,
        dims: list[str],
        coords: dict,
        units: Callable[[str], str] = str,
    ) -> xr.Dataset:
        """units: of the values, from those of their variable."""
        num_dates = self.sums["dates"].amax(dim=1)[-len(leads) :].long().cpu().numpy()
        coords = {"lead_time": leads.astype("timedelta64[ns]"), **coords}
        coords["num_dates"] = ("lead_time", num_dates)
        dims = ["lead_time", *dims]
        found = by_variable(values.cpu().numpy(), dims, self.variables, coords, self.units)
        for array in found.data_vars.values():
            array.attrs["units"] = units(array.attrs["units"])
        return found


def energy_units(own: str) -> str:
    """Return the units of zonal energy: the variable's squared, times the length of a circle of latitude."""
    return f"{squared(own)} m".strip()


def rank_frequencies(members: Tensor, truth: Tensor, mean: RegionMeans) -> Tensor:
    """Return the fraction of the area (M + 1,) where 0 .. M members (M, H, W) are below the truth (H, W).

    Where members equal the truth the lowest and the highest rank it could have count half each.
    """
    below, not_above = (members < truth).sum(dim=0), (members <= truth).sum(dim=0)
    numbers = torch.arange(len(members) + 1, device=truth.device)[:, None, None]
    counts = ((below == numbers).double() + (not_above == numbers).double()) / 2  # (M + 1, H, W)
    counts = torch.where(torch.isfinite(truth), counts, torch.nan)[:, None]  # (M + 1, 1, H, W)
    return mean(counts, truth[None])[0][:, 0, 0]


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


def wavelengths(degrees_north: np.ndarray, num_longitudes: int) -> np.ndarray:
    """Return wavelengths (H, K) in metres; infinite for wavenumber 0."""
    with np.errstate(divide="ignore"):
        return circumference(degrees_north)[:, None] / np.arange(num_longitudes // 2 + 1)


def mean_over_latitudes(
    spectrum: xr.DataArray, bands: Sequence[tuple[float, float]] = MIDLATITUDES
) -> xr.DataArray:
    """Return the mean spectrum over the rows inside the bands (south, north), on common frequencies (1/m);
    over all rows but the poles where no row is inside.

    spectrum has dimensions latitude and zonal_wavenumber; the result `frequency` and `wavelength` instead.
    Frequencies run over what all these rows have, and rows are interpolated linearly between their own
    (WeatherBench2, interpolate_spectral_frequencies). Rows without a value (NaN) are left out.
    """
    north = spectrum.latitude.values
    inside = np.any([(north >= low) & (north <= high) for low, high in bands], axis=0)
    inside = inside if inside.any() else np.abs(north) < 90
    rows = spectrum.isel(latitude=np.flatnonzero(inside)).transpose("latitude", ..., "zonal_wavenumber")
    rows = rows.drop_vars(["zonal_wavenumber", "wavelength"], errors="ignore")
    numbers = np.arange(rows.sizes["zonal_wavenumber"])
    own = numbers / circumference(rows.latitude.values)[:, None]  # (H, K)
    common = np.linspace(own[:, 0].max(), own[:, -1].min(), len(numbers))
    at_common = [
        np.apply_along_axis(lambda e, f=f: np.interp(common, f, e), -1, row)
        for row, f in zip(rows.values, own, strict=True)
    ]
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # no row has a value: NaN
        mean = rows.isel(latitude=0, drop=True).copy(data=np.nanmean(at_common, axis=0))
    mean = mean.rename(zonal_wavenumber="frequency")
    with np.errstate(divide="ignore"):
        return mean.assign_coords(frequency=common, wavelength=("frequency", 1 / common))
