"""A transformer whose tokens attend within windows of latitude x longitude: fields in, fields out.

The attention is that of Liu et al. 2021, "Swin Transformer", of which Willard et al. 2024 (arXiv:2404.19630)
train one on ERA5; the blocks are those of models/vit.py, all at one resolution, and positions too. In every
second block windows lie half a window further on, so that what is in one reaches its neighbours. Round the
globe they go on at the other end; beyond a pole there is nothing: windows there are smaller, and none holds
tokens of both poles. So no token has to be masked, and every kernel of models/attention.py serves.

Shapes: as models/vit.py; h x w = T tokens, T' with padding; r rows and c columns of windows of P x Q tokens.
"""

import torch
from torch import Tensor

from config import Model
from errors import refuse
from models.attention import Kernel, attention
from models.embeddings import tokens_of
from models.vit import VisionTransformer

Bands = list[tuple[int, int]]  # how many windows side by side, and how many tokens each has on that side


def bands(length: int, window: int, shift: int) -> Bands:
    """`length` tokens in windows of `window`, the first `shift` of them in one of their own; and what is left
    in one.
    """
    first = min(shift, length)
    number, rest = divmod(length - first, window)
    return [(n, size) for n, size in ((1, first), (number, window), (1, rest)) if n and size]


def to_windows(x: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, N, r P, c Q, E) -> (B r c, N, P Q, E)."""
    x = x.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0]))  # (B, N, r, P, c, Q, E)
    return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(0, 2)


def from_windows(x: Tensor, size: tuple[int, int], numbers: tuple[int, int]) -> Tensor:
    """(B r c, N, P Q, E) -> (B, N, r P, c Q, E); `numbers`: r and c."""
    x = x.unflatten(2, size).unflatten(0, (-1, *numbers))  # (B, r, c, N, P, Q, E)
    return x.permute(0, 3, 1, 4, 2, 5, 6).flatten(4, 5).flatten(2, 3)


class WindowKernel(Kernel):
    """Attention within windows, in the place of one over all tokens: whatever has brought all tokens of some
    heads together calls it as it calls the other.
    """

    def __init__(
        self,
        backend: str,
        token_shape: tuple[int, int],
        window: tuple[int, int],
        shift: tuple[int, int],
        periodic: bool,
    ) -> None:
        super().__init__(backend)
        self.token_shape = token_shape
        self.turn = shift[1] if periodic else 0  # columns by which the globe is turned before it is cut
        self.rows = bands(token_shape[0], window[0], shift[0])
        self.columns = bands(token_shape[1], window[1], 0 if periodic else shift[1])

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a key."""
        rows, columns = (sum(n * size**2 for n, size in side) for side in (self.rows, self.columns))
        return rows * columns

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, N, T', E), the first T of them tokens; k, v (B, N, T, E) -> (B, N, T', E)."""
        padding = q.shape[2] - k.shape[2]
        q, k, v = (x[:, :, : k.shape[2]].unflatten(2, self.token_shape) for x in (q, k, v))
        qkv = torch.stack([q, k, v]).roll(-self.turn, dims=4)  # (3, B, N, h, w, E)
        strips = qkv.split([n * size for n, size in self.rows], dim=3)
        out = torch.cat([self._strip(*pair) for pair in zip(strips, self.rows, strict=True)], dim=2)
        out = out.roll(self.turn, dims=3).flatten(2, 3)  # (B, N, T, E)
        return torch.cat([out, out.new_zeros(*out.shape[:2], padding, out.shape[3])], dim=2)

    def _strip(self, qkv: Tensor, rows: tuple[int, int]) -> Tensor:
        """(3, B, N, r P, w, E), windows of one height -> (B, N, r P, w, E)."""
        parts = qkv.split([n * size for n, size in self.columns], dim=4)
        return torch.cat([self._alike(*pair, rows) for pair in zip(parts, self.columns, strict=True)], dim=3)

    def _alike(self, qkv: Tensor, columns: tuple[int, int], rows: tuple[int, int]) -> Tensor:
        """(3, B, N, r P, c Q, E), windows of one shape -> (B, N, r P, c Q, E)."""
        (r, height), (c, width) = rows, columns
        q, k, v = (to_windows(x, (height, width)) for x in qkv.unbind(0))
        return from_windows(attention(q, k, v, self.backend), (height, width), (r, c))


class SwinTransformer(VisionTransformer):
    """A ViT with windows. ConfigError: they do not go round the globe in whole ones."""

    kinds_of_blocks = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        grid_shape: tuple[int, int],
        model: Model,
        periodic: bool = True,
    ) -> None:
        self.window = window = model.window_size
        _check_columns(tokens_of(grid_shape, model.patch_size)[1], window, periodic)
        super().__init__(in_channels, out_channels, grid_shape, model, periodic)
        self.num_scores = []  # of each block, whose kernel may be replaced
        for number, block in enumerate(self.blocks.values()):
            shift = (window[0] // 2, window[1] // 2) if number % 2 else (0, 0)
            kernel = WindowKernel(model.attention_backend, self.token_shape, window, shift, periodic)
            block.get_submodule("attention").kernel = kernel
            self.num_scores.append(kernel.num_scores)

    @property
    def attention_shape(self) -> tuple[int, int]:
        """Most windows are whole ones."""
        (h, w), (p, q) = self.token_shape, self.window
        return -(-h // p) * -(-w // q), min(h, p) * min(w, q)

    def describe(self) -> str:
        return f"{self.num_tokens} tokens in windows of {self.window[0]} x {self.window[1]}"

    def flops(self) -> int:
        """Windows at the poles are smaller in shifted blocks: these have fewer scores."""
        matrices = 2 * self.num_tokens * (4 * self.dim**2 + 2 * self.dim * self.mlp_dim)
        scores = 4 * self.dim * sum(self.num_scores)
        return len(self.num_scores) * matrices + scores + sum(self._end_flops())

    def _block_flops(self) -> int:
        """Of the blocks' mean."""
        return (self.flops() - sum(self._end_flops())) // len(self.num_scores)


def _check_columns(columns: int, window: tuple[int, int], periodic: bool) -> None:
    if periodic and columns % window[1]:
        valid = [n for n in range(1, columns + 1) if columns % n == 0]
        near = sorted(sorted(valid, key=lambda n: abs(n - window[1]))[:3])
        reason = f"{columns} columns of tokens go round the globe, and no whole number of such windows"
        refuse("model.window_size", list(window), f"{reason}; near columns that do: {near}")
