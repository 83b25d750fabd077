"""Transforms between spherical harmonics and latitude-longitude grids.

Shapes: (C, N, ...) spectra, (W, H, ...) grids: C = 2 N cosine and sine rows of the zonal wavenumbers 0..N-1,
N total wavenumbers. So laid out, both stages of the transform are matrix products without a permutation.
(torch-harmonics has such transforms, but pins another torch.)
"""

import numpy as np
import torch
from scipy.special import assoc_legendre_p_all

RADIUS = 6.371e6  # m


class SphericalHarmonics:
    """Transforms between spectra (C, N, ...) and grids (W, H, ...) at the sines of latitude `mu` (H,).

    Longitudes (W,) are in radians, `truncation` is the largest wavenumber. Real basis P_nm(mu) cos(m lon),
    P_nm(mu) sin(m lon), with P normalised to a unit integral of P^2 over mu. Analysis needs longitudes all
    round and the Gaussian `weights` (H,) of those latitudes; synthesis is exact anywhere.
    A vector is given as its components times cos(latitude), which are regular at the poles.
    """

    def __init__(
        self,
        mu: np.ndarray,
        longitude: np.ndarray,
        truncation: int,
        weights: np.ndarray | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

        n, mu = truncation, mu.clip(-1 + 1e-12, 1 - 1e-12)  # at 1 scipy 1.17 forgets `norm`
        table = assoc_legendre_p_all(n, n, mu, norm=True, diff_n=1)  # P and dP/dmu, at m = 0..n, then m < 0
        table = np.tile(table[:, :, : n + 1].transpose(0, 2, 3, 1), (1, 2, 1, 1))  # (2, C, H, N)
        table[1] *= (1 - mu**2)[:, None]  # cos2 dP/dmu, finite everywhere
        table = np.concatenate([table[0], table[1]], axis=2)  # (C, H, 2N)
        angle = np.arange(n + 1)[:, None] * longitude
        waves = np.concatenate([np.cos(angle), np.sin(angle)])  # (C, W)
        number = np.arange(n + 1.0)
        self.zonal_number = tensor(number)
        self.laplacian = tensor(-number * (number + 1) / RADIUS**2)  # (N,)
        self.inverse_laplacian = tensor(-(RADIUS**2) / np.maximum(number * (number + 1), 1.0) * (number > 0))
        self.to_latitude, self.to_longitude = tensor(table), tensor(waves.T)
        if weights is not None:
            norm = np.where(np.arange(2 * n + 2) % (n + 1) == 0, 1.0, 2.0) / len(longitude)
            self.from_longitude = tensor(waves * norm[:, None])
            # Every analysed field arrives times cos2(latitude), as a flux does: divided out here.
            self.from_latitude = tensor((table * (weights / (1 - mu**2))[:, None]).transpose(0, 2, 1))

    def d_longitude(self, spectrum: torch.Tensor) -> torch.Tensor:
        """The derivative along longitude of a spectrum (C, N, ...)."""
        m = self.zonal_number.view(-1, *[1] * (spectrum.ndim - 1))
        cosine, sine = spectrum.chunk(2)
        return torch.cat([m * sine, -m * cosine])

    def synthesize(self, scalar: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
        """The grid (W, H, ...) of sum(scalar P + slope (1 - mu2) dP/dmu), from spectra (C, N, ...)."""
        slope = torch.zeros_like(scalar) if slope is None else slope
        both = torch.cat([scalar, slope], dim=1).flatten(2)
        rows = torch.bmm(self.to_latitude, both)  # (C, H, F M)
        return (self.to_longitude @ rows.flatten(1)).unflatten(1, (rows.shape[1], *scalar.shape[2:]))

    def analyze(self, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Projections (C, N, ...) of a grid (W, H, ...), given times cos2, on P and on (1 - mu2) dP/dmu."""
        rows = (self.from_longitude @ grid.flatten(1)).unflatten(1, (grid.shape[1], -1))  # (C, H, F M)
        both = torch.bmm(self.from_latitude, rows).unflatten(2, grid.shape[2:])
        flat, slope = both.chunk(2, dim=1)
        return flat, slope

    def winds(self, scalar: torch.Tensor, zeta: torch.Tensor, div: torch.Tensor) -> list[torch.Tensor]:
        """Grids of scalars and of u, v times cos(latitude), in m s-1, from spectra (C, N, F, M)."""
        psi, chi = (field * self.inverse_laplacian[:, None, None] / RADIUS for field in (zeta, div))
        flat = torch.cat([scalar, self.d_longitude(chi), self.d_longitude(psi)], dim=2)
        slope = torch.cat([torch.zeros_like(scalar), -psi, chi], dim=2)
        return list(self.synthesize(flat, slope).split([scalar.shape[2], *[zeta.shape[2]] * 2], dim=2))
