"""Spherical harmonic transforms between spectra (C, N, ...) and longitude-latitude grids (W, H, ...)."""

import numpy as np
import torch
from scipy.special import assoc_legendre_p_all

RADIUS = 6.371e6  # m


class SphericalHarmonics:
    """Transforms up to wavenumber `truncation` at sines of latitude `mu` (H,) and longitudes in radians (W,).

    Spectra have C = 2 N rows: coefficients of P_nm(mu) cos(m lon), m = 0..N-1, then of P_nm(mu) sin(m lon).
    P^2 integrates to 1 over mu. Analysis requires equidistant longitudes and Gaussian `weights` (H,).
    """

    def __init__(
        self, mu: np.ndarray, longitude: np.ndarray, truncation: int, weights=None, dtype=torch.float64
    ) -> None:
        def cast(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

        n, mu = truncation, mu.clip(-1 + 1e-12, 1 - 1e-12)  # scipy 1.17 ignores `norm` at 1
        legendre, slope = assoc_legendre_p_all(n, n, mu, norm=True, diff_n=1)  # at m = 0..n, then m < 0
        table = np.concatenate([legendre, (1 - mu**2) * slope])  # finite at the poles
        table = np.tile(table[:, : n + 1].transpose(1, 2, 0), (2, 1, 1))  # (C, H, 2 N)
        number = np.arange(n + 1.0)
        angle = number[:, None] * longitude
        waves = np.concatenate([np.cos(angle), np.sin(angle)])  # (C, W)
        self.zonal_number, self.laplacian = cast(number), cast(-number * (number + 1) / RADIUS**2)  # (N,)
        self.inverse_laplacian = cast(-(RADIUS**2) / np.maximum(number * (number + 1), 1.0) * (number > 0))
        self.to_latitude, self.to_longitude = cast(table), cast(waves.T)
        if weights is not None:
            norm = np.where(np.arange(2 * n + 2) % (n + 1) == 0, 1.0, 2.0) / len(longitude)
            self.from_longitude = cast(waves * norm[:, None])
            self.from_latitude = cast((table * (weights / (1 - mu**2))[:, None]).transpose(0, 2, 1))

    def differentiate(self, spectrum: torch.Tensor) -> torch.Tensor:
        """Return the derivative of a spectrum (C, N, F, M) with respect to longitude."""
        cosine, sine = (part * self.zonal_number[:, None, None, None] for part in spectrum.chunk(2))
        return torch.cat([sine, -cosine])

    def synthesize(self, scalar: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
        """Return the grid (W, H, ...) of sum(scalar P + slope (1 - mu2) dP/dmu) from spectra (C, N, ...)."""
        table, number = self.to_latitude, len(self.zonal_number)  # (C, H, 2 N)
        spectrum = scalar if slope is None else torch.cat([scalar, slope], dim=1)
        rows = torch.bmm(table if slope is not None else table[:, :, :number], spectrum.flatten(2))
        return (self.to_longitude @ rows.flatten(1)).unflatten(1, (rows.shape[1], *scalar.shape[2:]))

    def compute_winds(self, scalar: torch.Tensor, zeta: torch.Tensor, div: torch.Tensor) -> tuple:
        """Return grids of scalars and of u and v (m s-1) times cos(latitude) from spectra (C, N, F, M)."""
        psi, chi = (field * self.inverse_laplacian[:, None, None] / RADIUS for field in (zeta, div))
        flat = torch.cat([scalar, self.differentiate(chi), self.differentiate(psi)], dim=2)
        slope = torch.cat([torch.zeros_like(scalar), -psi, chi], dim=2)
        return self.synthesize(flat, slope).split([scalar.shape[2], *[zeta.shape[2]] * 2], dim=2)

    def analyze(self, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return projections (C, N, ...) on P and (1 - mu2) dP/dmu of a grid given times cos2(latitude)."""
        rows = (self.from_longitude @ grid.flatten(1)).unflatten(1, (grid.shape[1], -1))  # (C, H, F M)
        return torch.bmm(self.from_latitude, rows).unflatten(2, grid.shape[2:]).chunk(2, dim=1)
