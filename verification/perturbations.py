"""Initial states of an ensemble: random fields without a preferred place or direction on the sphere.

Shapes: V variables, H latitudes, W longitudes; l total and m zonal wavenumbers, 0 .. TRUNCATION.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from scipy.special import assoc_legendre_p_all

from datasets.grid import Grid

TRUNCATION = 20  # the shortest wave is 2,000 km long: analyses err in whole weather systems, not in cells


class RandomFields:
    """Gaussian fields of mean 0 and variance 1 at every point of a grid, correlated over about 1,000 km.

    Spherical harmonics of all total wavenumbers up to TRUNCATION with independent normal coefficients: by
    the addition theorem the squares of the basis add up to the same at every point, whatever the grid.
    """

    def __init__(self, grid: Grid) -> None:
        n = TRUNCATION
        sines = np.sin(np.deg2rad(grid.latitude)).clip(
            -1 + 1e-12, 1 - 1e-12
        )  # at 1 scipy 1.17 forgets `norm`
        table = assoc_legendre_p_all(n, n, sines, norm=True)[0]
        table = table[:, : n + 1]  # (l, m, H), of unit integral over sin(latitude)
        table[:, 1:] *= np.sqrt(2)  # cosine and sine each count twice as much as the zonal mean
        self.legendre = table * np.sqrt(2) / (n + 1)  # the squares add up to (n + 1)^2 / 2
        angle = np.arange(n + 1)[:, None] * np.deg2rad(grid.longitude)
        self.cosine, self.sine = np.cos(angle), np.sin(angle)  # (m, W)

    def draw(self, key: str) -> np.ndarray:
        """(H, W) float64, a function of `key` alone."""
        digest = hashlib.sha256(key.encode()).digest()
        shape = (2, *self.legendre.shape[:2])
        even, odd = np.random.default_rng(int.from_bytes(digest[:16], "little")).standard_normal(shape)
        rows = [np.einsum("lm,lmh->hm", part, self.legendre) for part in (even, odd)]
        return rows[0] @ self.cosine + rows[1] @ self.sine


def perturbation(
    fields: RandomFields,
    scale: np.ndarray,
    variables: Sequence[str],
    seed: int,
    date: np.datetime64,
    member: int,
) -> np.ndarray:
    """(V, H, W) float32 to be added to the analysis of `date`; zero for member 0.

    scale (V,): standard deviation in units of each variable. A function of (seed, date, member, variable).
    """
    shape = (len(variables), fields.legendre.shape[2], fields.cosine.shape[1])
    if member == 0:
        return np.zeros(shape, np.float32)
    start = f"{seed}/{date.astype('datetime64[s]')}/{member}"
    drawn = [size * fields.draw(f"{start}/{name}") for size, name in zip(scale, variables, strict=True)]
    return np.stack(drawn).astype(np.float32)
