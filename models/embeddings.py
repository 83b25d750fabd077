"""Fields to tokens and back, and positions of tokens on the globe.

Shapes: B batch, C channels, H latitudes, W longitudes, (P, Q) patch, h = H/P, w = W/Q, T = h w tokens,
t tokens of this rank, D width, N heads, E head size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def padded_shape(grid_shape: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest (H, W) of whole patches: 721 x 1440 in 16 x 16 patches is 736 x 1440."""
    height, width = (math.ceil(n / p) * p for n, p in zip(grid_shape, patch_size, strict=True))
    return height, width


def token_grid(grid_shape: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Return (h, w), the rows and columns of patches."""
    height, width = padded_shape(grid_shape, patch_size)
    return height // patch_size[0], width // patch_size[1]


def pad_grid(x: Tensor, shape: tuple[int, int], periodic: bool, with_zeros: bool = False) -> Tensor:
    """x (B, C, H, W) -> (B, C, *shape): latitude repeats its last row on both sides, longitude wraps around.

    A regional grid (not `periodic`) repeats its last column too. `with_zeros`: for weights.
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
    """Inverse of `pad_grid`: x (B, V, H', W') -> (B, V, H, W)."""
    top = (x.shape[2] - grid_shape[0]) // 2
    return x[:, :, top : top + grid_shape[0], : grid_shape[1]]


def patchify(x: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """x (B, C, H, W) -> (B, T, C P Q); tokens are ordered by row, then by column."""
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
    """Learned vector per token, added to tokens (B, t, D). `first_token`: offset of a chunk of all tokens."""

    first_token = 0

    def __init__(self, token_shape: tuple[int, int], dim: int) -> None:
        super().__init__()
        # (T, D), not (1, T, D): FSDP shards the first dim, and would pad one row to as many as ranks.
        self.embedding = nn.Parameter(torch.empty(token_shape[0] * token_shape[1], dim))

    def forward(self, tokens: Tensor) -> Tensor:
        count, total = tokens.shape[1], self.embedding.shape[0]
        if count == total:
            return tokens + self.embedding.to(tokens.dtype)
        part = self.embedding[min(self.first_token, total - 1) : self.first_token + count]
        missing = count - part.shape[0]
        if missing > 0:  # padded tokens at the end: their vectors have no effect
            part = torch.cat([part, part[-1:].expand(missing, -1)])
        return tokens + part.to(tokens.dtype)


class Rotary(nn.Module):
    """Rotation of queries and keys (B, N, t, E) by row (half of E) and column (the other half).

    Their products then depend on the differences of both alone (Su et al. 2021; axial as in Heo et al. 2024).
    Wave numbers in longitude are integers on a global grid, so that angles at 360 and 0 degrees are equal. In
    latitude, and in longitude of a regional grid, angles per token decrease from 1 to nearly 1 / BASE.
    `first_token` is the offset of a chunk of all tokens.
    """

    BASE = 100.0  # as in Heo et al., smaller than the 10,000 of text: a grid has few rows of tokens
    first_token = 0

    def __init__(self, token_shape: tuple[int, int], head_dim: int, periodic: bool) -> None:
        super().__init__()
        self.width, self.count, self.periodic = token_shape[1], head_dim // 4, periodic

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(q.shape[2], q.device)
        cos, sin = angles.cos(), angles.sin()
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def angles(self, count: int, device: torch.device) -> Tensor:
        """(t, E/2) float32, of the `count` tokens of this rank."""
        tokens = self.first_token + torch.arange(count, device=device)  # padded ones are below the last row
        row, column = tokens // self.width, tokens % self.width
        steps = torch.arange(self.count, device=device)
        frequencies = self.BASE ** (-steps / self.count)
        latitude = row[:, None] * frequencies
        if not self.periodic:
            return torch.cat([latitude, column[:, None] * frequencies], dim=1)
        # From one wave around the globe to the shortest that the columns can carry, spaced geometrically.
        waves = (max(self.width / 2, 1) ** (steps / max(self.count - 1, 1))).round().long()
        phase = (column[:, None] * waves) % self.width  # integers: exact
        return torch.cat([latitude, phase * (2 * math.pi / self.width)], dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, N, t, E) by angles (t, E/2), in float32: number i with number i + E/2."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
