"""Fields to tokens and back, and where on the globe a token lies.

Shapes: B batch, C channels, H latitudes, W longitudes, (P, Q) patch, h = H/P, w = W/Q, T = h w tokens,
t tokens at hand, D width, N heads, E head size.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import sph_harm_y_all
from torch import Tensor, nn

from config import Model


def padded_shape(grid_shape: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """The smallest (H, W) that whole patches cover: 721 x 1440 in 16 x 16 patches is 736 x 1440."""
    height, width = (math.ceil(n / p) * p for n, p in zip(grid_shape, patch_size, strict=True))
    return height, width


def tokens_of(grid_shape: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """(h, w): rows and columns of patches."""
    height, width = padded_shape(grid_shape, patch_size)
    return height // patch_size[0], width // patch_size[1]


def pad_grid(x: Tensor, shape: tuple[int, int], periodic: bool, with_zeros: bool = False) -> Tensor:
    """x (B, C, H, W) -> (B, C, *shape): latitude repeats its last row on both sides, longitude wraps around.

    A regional grid (not `periodic`) repeats its last column too. `with_zeros` is for weights: what is padded
    counts for nothing.
    """
    rows, columns = shape[0] - x.shape[2], shape[1] - x.shape[3]
    if with_zeros:
        return F.pad(x, (0, columns, rows // 2, rows - rows // 2))
    if columns:
        x = F.pad(x, (0, columns, 0, 0), mode="circular" if periodic else "replicate")
    if rows:
        x = F.pad(x, (0, 0, rows // 2, rows - rows // 2), mode="replicate")
    return x


def crop_grid(x: Tensor, grid_shape: tuple[int, int]) -> Tensor:
    """Undoes `pad_grid`: x (B, V, H', W') -> (B, V, H, W)."""
    top = (x.shape[2] - grid_shape[0]) // 2
    return x[:, :, top : top + grid_shape[0], : grid_shape[1]]


def patchify(x: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """x (B, C, H, W) -> (B, T, C P Q); tokens run along a latitude first."""
    b, c, height, width = x.shape
    p, q = patch_size
    x = x.view(b, c, height // p, p, width // q, q)  # (B, C, h, P, w, Q)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * q)


def unpatchify(x: Tensor, shape: tuple[int, int], patch_size: tuple[int, int]) -> Tensor:
    """x (B, T, V P Q) -> (B, V, H, W) with (H, W) = shape."""
    p, q = patch_size
    h, w = shape[0] // p, shape[1] // q
    x = x.view(x.shape[0], h, w, -1, p, q)  # (B, h, w, V, P, Q)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(x.shape[0], -1, h * p, w * q)


class Position(nn.Module):
    """tokens (B, t, D) plus one vector a token. They may be a chunk of all: `first_token` says where it
    begins.
    """

    first_token = 0
    embedding: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        count, total = tokens.shape[1], self.embedding.shape[0]
        if count == total:
            return tokens + self.embedding.to(tokens.dtype)
        part = self.embedding[min(self.first_token, total - 1) : self.first_token + count]
        missing = count - part.shape[0]
        if missing > 0:  # padded tokens at the end: any vector will do
            part = torch.cat([part, part[-1:].expand(missing, -1)])
        return tokens + part.to(tokens.dtype)


class LearnedPosition(Position):
    """A learned vector a token."""

    def __init__(self, token_shape: tuple[int, int], dim: int) -> None:
        super().__init__()
        # (T, D), not (1, T, D): FSDP shards the first dim, and would pad one row to as many as ranks.
        self.embedding = nn.Parameter(torch.empty(token_shape[0] * token_shape[1], dim))


class SinCosPosition(Position):
    """Sines and cosines of latitude (half of D) and longitude (half of D)."""

    def __init__(self, token_shape: tuple[int, int], dim: int, periodic: bool) -> None:
        super().__init__()
        self.token_shape, self.dim, self.periodic = token_shape, dim, periodic
        self.register_buffer("embedding", torch.empty(token_shape[0] * token_shape[1], dim), persistent=False)

    def values(self) -> Tensor:
        """What the buffer has to hold: a module built on the meta device has no values yet."""
        return sincos_positions(self.token_shape, self.dim, self.periodic)


class SphericalPosition(Position):
    """A learned sum of real spherical harmonics of the patch's centre, of all degrees up to `degree`: smooth
    on the sphere, at the poles too, and less of it to learn than a vector a token (as Russwurm et al. 2024,
    arXiv:2310.06743, for places on Earth).

    Rows of the basis have length 1: vectors start at the size of learned ones.
    """

    basis: Tensor

    def __init__(
        self, grid_shape: tuple[int, int], patch_size: tuple[int, int], dim: int, degree: int
    ) -> None:
        super().__init__()
        self.grid_shape, self.patch_size, self.degree = grid_shape, patch_size, degree
        tokens, number = math.prod(tokens_of(grid_shape, patch_size)), (degree + 1) ** 2
        self.register_buffer("basis", torch.empty(tokens, number), persistent=False)
        self.weight = nn.Parameter(torch.empty(number, dim))

    @property
    def embedding(self) -> Tensor:  # type: ignore[override]
        """(T, D): of few waves, and as exact as the weights under autocast too."""
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.basis.to(self.weight.dtype) @ self.weight

    def values(self) -> Tensor:
        """What the basis has to hold."""
        return harmonics(*patch_centres(self.grid_shape, self.patch_size), self.degree).float()


class NoPosition(nn.Module):
    """tokens (B, t, D) as they are: attention knows where they lie."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


class Rotary(nn.Module):
    """Queries and keys (B, N, t, E), turned by their tokens' rows (half of E) and columns (the other half):
    so their products know the differences of both alone (Su et al. 2021; axial as in Heo et al. 2024).

    Whole wave numbers in longitude where the grid goes round: 360 degrees meet 0 without a seam. In latitude,
    and in longitude where it does not, angles a token fall from 1 to nearly 1 / BASE. The tokens may be a
    chunk of all: `first_token` says where it begins.
    """

    BASE = 100.0  # of Heo et al.: a hundred tokens are few rows of a grid
    first_token = 0

    def __init__(self, token_shape: tuple[int, int], head_dim: int, periodic: bool) -> None:
        super().__init__()
        self.width, self.count, self.periodic = token_shape[1], head_dim // 4, periodic

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(q.shape[2], q.device)
        cos, sin = angles.cos(), angles.sin()
        return _turned(q, cos, sin), _turned(k, cos, sin)

    def angles(self, count: int, device: torch.device) -> Tensor:
        """(t, E/2) float32, of the `count` tokens at hand."""
        tokens = self.first_token + torch.arange(count, device=device)  # padded ones lie below the last row
        row, column = tokens // self.width, tokens % self.width
        steps = torch.arange(self.count, device=device)
        frequencies = self.BASE ** (-steps / self.count)
        latitude = row[:, None] * frequencies
        if not self.periodic:
            return torch.cat([latitude, column[:, None] * frequencies], dim=1)
        # From one wave round the globe to the shortest that the columns can carry, spaced geometrically.
        waves = (max(self.width / 2, 1) ** (steps / max(self.count - 1, 1))).round().long()
        turns = (column[:, None] * waves) % self.width  # as whole numbers: exact
        return torch.cat([latitude, turns * (2 * math.pi / self.width)], dim=1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, N, t, E), by angles (t, E/2), in float32: number i with number i + E/2."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def build_position(model: Model, grid_shape: tuple[int, int], periodic: bool) -> nn.Module:
    """What is added to tokens."""
    name, dim, token_shape = model.position, model.dim, tokens_of(grid_shape, model.patch_size)
    if name == "learned":
        return LearnedPosition(token_shape, dim)
    if name == "spherical":
        return SphericalPosition(grid_shape, model.patch_size, dim, model.position_degree)
    return SinCosPosition(token_shape, dim, periodic) if name == "sincos" else NoPosition()


def patch_centres(grid_shape: tuple[int, int], patch_size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Angles from the pole of the first row (h,), and longitudes (w,), of patches of a whole globe. Its rows
    are taken for bands of equal height: with rows at the poles that is up to half a row from where they are.
    """
    top = (padded_shape(grid_shape, patch_size)[0] - grid_shape[0]) // 2  # as pad_grid has it
    h, w = tokens_of(grid_shape, patch_size)
    rows = (np.arange(h) + 0.5) * patch_size[0] - top
    columns = (np.arange(w) + 0.5) * patch_size[1] - 0.5  # the first stands at 0
    colatitude = np.pi * (rows / grid_shape[0]).clip(0, 1)
    return colatitude, 2 * np.pi * columns / grid_shape[1]


def harmonics(colatitude: np.ndarray, longitude: np.ndarray, degree: int) -> Tensor:
    """(h w, (degree + 1)^2) float64: real spherical harmonics of all degrees, rows of length 1."""
    table = sph_harm_y_all(degree, degree, colatitude, 0.0).real  # (n, m, h); m < 0 come last
    n, m = np.tril_indices(degree + 1)
    legendre = np.where(m > 0, math.sqrt(2), 1.0) * table[n, m].T  # (h, pairs)
    angles = np.outer(longitude, m)  # (w, pairs)
    waves = np.concatenate([np.cos(angles), np.sin(angles[:, m > 0])], axis=1)
    found = np.concatenate([legendre, legendre[:, m > 0]], axis=1)[:, None] * waves
    return torch.from_numpy(found.reshape(len(colatitude) * len(longitude), -1)) * (
        math.sqrt(4 * math.pi) / (degree + 1)
    )


def sincos_positions(token_shape: tuple[int, int], dim: int, periodic: bool) -> Tensor:
    """(h w, D) float32. Whole wave numbers in longitude, so that 360 degrees meets 0 without a seam."""
    h, w = token_shape
    turn = 2 * math.pi if periodic else math.pi
    waves_latitude = _wave_numbers(dim // 4, h)
    waves_longitude = _wave_numbers(dim // 4, w).round() if periodic else _wave_numbers(dim // 4, w)
    rows = torch.arange(h, dtype=torch.float64).add(0.5).div(h) * math.pi
    columns = torch.arange(w, dtype=torch.float64).div(w) * turn
    latitude, longitude = torch.outer(rows, waves_latitude), torch.outer(columns, waves_longitude)
    latitude = torch.cat([latitude.sin(), latitude.cos()], dim=1)[:, None].expand(h, w, dim // 2)
    longitude = torch.cat([longitude.sin(), longitude.cos()], dim=1)[None].expand(h, w, dim // 2)
    return torch.cat([latitude, longitude], dim=2).reshape(h * w, dim).float()


def _wave_numbers(count: int, tokens: int) -> Tensor:
    """From one wave around the grid to the shortest that `tokens` points can carry, spaced geometrically."""
    return torch.logspace(0, math.log10(max(tokens / 2, 1)), count, dtype=torch.float64)
