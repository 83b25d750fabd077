"""What plots need beside scores, for a few leads: maps of errors, zonal spectra, ranks of the truth.

Sums over dates, so that memory does not grow with them. Shapes: D leads with details, V variables, M members,
H latitudes, W longitudes, K wavenumbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.grid import Grid
from verification.matching import Pair
from verification.score_tables import by_variable, lead_coordinate
from verification.scores import RegionMeans
from verification.spectra import circumference, wavelengths, zonal_energy_spectrum


class Details:
    """Sums over dates, float64: of errors and their squares at every cell, of spectra, of ranks."""

    def __init__(
        self,
        leads: Sequence[int],
        variables: Sequence[str],
        grid: Grid,
        num_members: int,
        device: torch.device | str,
    ) -> None:
        """leads: places of the leads that get details."""
        self.place, self.variables, self.grid = {lead: i for i, lead in enumerate(leads)}, variables, grid

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(len(leads), len(variables), *shape, dtype=torch.float64, device=device)

        self.cells = {name: zeros(*grid.shape) for name in ("count", "bias", "mse")}
        self.dates = torch.zeros(len(leads), dtype=torch.float64, device=device)
        self.length = torch.from_numpy(circumference(grid.latitude)).to(device)
        waves = (grid.shape[0], grid.shape[1] // 2 + 1)
        self.spectra = {name: zeros(*waves) for name in ("forecast", "truth")} if grid.periodic else {}
        self.ranks = zeros(num_members + 1) if num_members > 1 else None
        self.everywhere = RegionMeans(grid, ["global"], device)

    def add(self, pair: Pair) -> None:
        if pair.truth is None or pair.lead not in self.place:
            return
        place = self.place[pair.lead]
        self.dates[place] += 1
        for v, truth in enumerate(pair.truth.double()):  # one at a time: members and waves are large
            members = pair.forecast[..., v, :, :].double()
            state = members.mean(dim=0) if members.ndim == 3 else members
            error, valid = state - truth, torch.isfinite(truth)
            self.cells["count"][place, v] += valid
            self.cells["bias"][place, v] += torch.where(valid, error, 0.0)
            self.cells["mse"][place, v] += torch.where(valid, error, 0.0).square()
            for name, fields in {"forecast": members, "truth": truth}.items() if self.spectra else ():
                energy = zonal_energy_spectrum(fields, self.length)  # of members: their mean is too smooth
                self.spectra[name][place, v] += energy.mean(dim=0) if energy.ndim == 3 else energy
            if self.ranks is not None:
                self.ranks[place, v] += rank_frequencies(members, truth, self.everywhere)

    def reduce(self) -> None:
        """The sums of all ranks, on all ranks; equal to one rank's to rounding."""
        ranks = [] if self.ranks is None else [self.ranks]
        for total in (*self.cells.values(), self.dates, *self.spectra.values(), *ranks):
            dist.all_reduce(total)

    def maps(self, leads: np.ndarray) -> xr.Dataset:
        """Dims (metric, lead_time[, level], latitude, longitude): bias and rmse over the dates."""
        count = self.cells["count"]
        bias, rmse = self.cells["bias"] / count, (self.cells["mse"] / count).sqrt()
        coords = {"metric": ["bias", "rmse"], **self._coords(leads), "longitude": self.grid.longitude}
        dims = ("metric", "lead_time", "variable", "latitude", "longitude")
        return by_variable(_numpy(torch.stack([bias, rmse])), dims, self.variables, coords)

    def energy(self, leads: np.ndarray) -> xr.Dataset | None:
        """Dims (source, lead_time[, level], latitude, zonal_wavenumber), mean over dates; None on a grid that
        does not go round the globe.
        """
        if not self.spectra:
            return None
        mean = torch.stack(list(self.spectra.values())) / self.dates[:, None, None, None]
        length = wavelengths(self.grid.latitude, self.grid.shape[1])
        coords = {
            "source": list(self.spectra),
            **self._coords(leads),
            "zonal_wavenumber": np.arange(mean.shape[-1]),
        }
        coords["wavelength"] = (("latitude", "zonal_wavenumber"), length, {"units": "m"})
        dims = ("source", "lead_time", "variable", "latitude", "zonal_wavenumber")
        return by_variable(_numpy(mean), dims, self.variables, coords)

    def rank_histogram(self, leads: np.ndarray) -> xr.Dataset | None:
        """Dims (lead_time[, level], rank): how often so many members lie below the truth, of sum 1."""
        if self.ranks is None:
            return None
        mean = self.ranks / self.dates[:, None, None]
        coords = {"lead_time": lead_coordinate(leads), "rank": np.arange(mean.shape[-1])}
        return by_variable(_numpy(mean), ("lead_time", "variable", "rank"), self.variables, coords)

    def _coords(self, leads: np.ndarray) -> dict:
        return {"lead_time": lead_coordinate(leads), "latitude": self.grid.latitude}


def rank_frequencies(members: Tensor, truth: Tensor, mean: RegionMeans) -> Tensor:
    """Area share (M + 1,) of the cells where 0 .. M members (M, H, W) lie below the truth (H, W).

    Where members equal the truth the lowest and the highest rank it could have count half each.
    """
    below, not_above = (members < truth).sum(dim=0), (members <= truth).sum(dim=0)
    numbers = torch.arange(len(members) + 1, device=truth.device)[:, None, None]
    share = ((below == numbers).double() + (not_above == numbers).double()) / 2  # (M + 1, H, W)
    share = torch.where(torch.isfinite(truth), share, torch.nan)[:, None]  # (M + 1, 1, H, W)
    return mean(share, truth[None])[0][:, 0, 0]


def _numpy(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()
