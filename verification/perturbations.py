"""Initial states of an ensemble: random fields without a preferred position or direction on the sphere.

Shapes: V variables, H latitudes, W longitudes.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from datasets.grid import Grid
from datasets.spherical_harmonics import SphericalHarmonics

TRUNCATION = 20  # the shortest wave is 2,000 km long: analyses err in whole weather systems, not in cells


class RandomFields:
    """Gaussian fields of mean 0 and variance 1 at every point of a grid, correlated over about 1,000 km.

    Spherical harmonics of all total wavenumbers up to TRUNCATION with independent normal coefficients: by
    the addition theorem the squares of the basis add up to the same at every point, whatever the grid.
    """

    def __init__(self, grid: Grid) -> None:
        sines, self.shape = np.sin(np.deg2rad(grid.latitude)), grid.shape
        self.harmonics = SphericalHarmonics(sines, np.deg2rad(grid.longitude), TRUNCATION)
        number = np.arange(TRUNCATION + 1)  # zonal
        # Cosine and sine each count twice as much as the zonal mean; the squares of all add up to 1.
        self.size = np.sqrt(np.where(number > 0, 4, 2)) / len(number)

    def draw(self, key: str) -> np.ndarray:
        """Return a field (H, W) float64, a function of `key` alone."""
        digest, count = hashlib.sha256(key.encode()).digest(), len(self.size)
        generator = np.random.default_rng(int.from_bytes(digest[:16], "little"))
        normal = generator.standard_normal((2, count, count)) * self.size  # cosine and sine, total, zonal
        spectrum = normal.transpose(0, 2, 1).reshape(2 * count, count, 1)
        return self.harmonics.synthesize(torch.from_numpy(spectrum))[:, :, 0].T.numpy()


def perturbation(
    fields: RandomFields,
    scale: np.ndarray,
    variables: Sequence[str],
    seed: int,
    date: np.datetime64,
    member: int,
) -> np.ndarray:
    """Return fields (V, H, W) float32 to add to the analysis of `date`, from (seed, date, member, variable).

    scale (V,): standard deviation in units of each variable.
    """
    start = f"{seed}/{date.astype('datetime64[s]')}/{member}"
    drawn = [size * fields.draw(f"{start}/{name}") for size, name in zip(scale, variables, strict=True)]
    return np.stack(drawn).astype(np.float32)
