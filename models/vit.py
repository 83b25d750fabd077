"""The weather Vision Transformer: fields in, fields out, plain PyTorch without knowledge of ranks.

Shapes: B batch, C input channels, V predicted variables, H latitudes, W longitudes, T tokens, D width,
N heads, E = D/N head size, M hidden width of the MLP.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Model
from models.attention import Kernel, WindowedKernel, choose_windows
from models.embeddings import (
    Position,
    Rotary,
    crop_grid,
    pad_grid,
    padded_shape,
    patchify,
    token_grid,
    unpatchify,
)
from models.noise import UNIT
from models.weather_model import TokenModel, run_blocks

NORM_EPS = 1e-6  # one constant, because layouts with different values would be different models


class LayerNorm(nn.LayerNorm):
    """x (..., D) -> the same shape and precision, normalised over D.

    Under autocast nn.LayerNorm would save a float32 copy of its input and return float32, which is cast for
    the next matmul and is twice as large to send. The kernel sums in float32 in any case.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """tokens (B, T, D) -> (B, T, D)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        dim = model.dim
        self.head_dim = dim // model.num_heads
        # Rows are ordered (head, q|k|v, E): a contiguous slice of rows is whole heads with their q, k, v.
        # Ordered (q|k|v, head, E), a slice for tensor parallelism would cut across q, k and v.
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = LayerNorm(self.head_dim, eps=NORM_EPS) if model.qk_norm else nn.Identity()
        self.k_norm = LayerNorm(self.head_dim, eps=NORM_EPS) if model.qk_norm else nn.Identity()
        self.rotary: Rotary | None = None
        self.kernel: nn.Module = Kernel(model.attention_backend)  # layouts and windows wrap or replace it
        self.projection = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(tokens)  # (B, T, 3 N E)
        b, t, _ = qkv.shape
        qkv = qkv.view(b, t, -1, 3, self.head_dim)  # (B, T, N, 3, E); N: heads of this shard
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # each (B, N, T, E)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, k) if self.rotary is not None else (q, k)
        out = self.kernel(q, k, v)  # (B, N, T, E)
        return self.projection(out.transpose(1, 2).reshape(b, t, -1))  # (B, T, D)


class MLP(nn.Module):
    """tokens (B, T, D) -> (B, T, D): exact GELU in between, or SwiGLU (Shazeer 2020)."""

    def __init__(self, dim: int, hidden_dim: int, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden_dim)
        self.gate = nn.Linear(dim, hidden_dim) if gated else None
        self.down = nn.Linear(hidden_dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.up(tokens)  # (B, T, M)
        hidden = F.gelu(hidden) if self.gate is None else F.silu(self.gate(tokens)) * hidden
        return self.down(hidden)


class StochasticDepth(nn.Module):
    """Multiply a branch (B, T, D) by the factor of each sample, 0 where it is dropped (Huang et al. 2016)."""

    def forward(self, branch: Tensor, factors: Tensor | None) -> Tensor:
        """factors (B, 1, 1) of `branch_factors`, or None: nothing is dropped."""
        return branch if factors is None else (branch * (factors * (1 / UNIT))).to(branch.dtype)


class Block(nn.Module):
    """Pre-norm transformer block: tokens (B, T, D) -> (B, T, D)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        dim = model.dim
        self.attention_norm = LayerNorm(dim, eps=NORM_EPS)
        self.attention = Attention(model)
        self.mlp_norm = LayerNorm(dim, eps=NORM_EPS)
        self.mlp = MLP(dim, model.hidden_dim, model.mlp == "swiglu")
        self.stochastic_depth = StochasticDepth()

    def forward(self, tokens: Tensor, factors: Tensor | None = None) -> Tensor:
        """factors (2, B, 1, 1): of stochastic depth, for attention and MLP."""
        attention, mlp = (None, None) if factors is None else factors.unbind()
        tokens = tokens + self.stochastic_depth(self.attention(self.attention_norm(tokens)), attention)
        return tokens + self.stochastic_depth(self.mlp(self.mlp_norm(tokens)), mlp)


class VisionTransformer(TokenModel):
    """Patches of fields to patches of fields: (B, T, C P Q) -> (B, T, V P Q); T may be a part of all tokens.

    `from_fields` cuts fields of any grid into patches, with padding; `to_fields` is its inverse.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        grid_shape: tuple[int, int],
        model: Model,
        periodic: bool = True,
    ) -> None:
        super().__init__()
        dim, patch_size = model.dim, model.patch_size
        self.grid_shape, self.patch_size, self.periodic = grid_shape, patch_size, periodic
        self.in_channels, self.out_channels, self.dim = in_channels, out_channels, dim
        self.mlp_weights = (3 if model.mlp == "swiglu" else 2) * dim * model.hidden_dim
        # -- from the grid to tokens
        self.padded_shape = padded_shape(grid_shape, patch_size)
        self.token_shape = token_grid(grid_shape, patch_size)
        self.num_tokens = self.token_shape[0] * self.token_shape[1]
        self.patch_embedding = nn.Linear(in_channels * patch_size[0] * patch_size[1], dim)
        is_learned = model.position == "learned"  # rotary positions are part of attention
        self.position = Position(self.token_shape, dim) if is_learned else nn.Identity()
        # -- blocks, each with its window of tokens
        self.drop_rate = model.stochastic_depth / max(model.num_layers - 1, 1)
        blocks = [Block(model) for _ in range(model.num_layers)]
        # A dict, not a list: in a pipeline stage of blocks 6 to 11 they keep their names.
        self.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.windows = choose_windows(model, self.token_shape)
        self.kinds_of_blocks = len(set(self.windows))
        for block, window in zip(blocks, self.windows, strict=True):
            if window != self.token_shape:
                block.attention.kernel = WindowedKernel(block.attention.kernel, self.token_shape, window)
        if model.position == "rotary":
            for block in blocks:
                block.attention.rotary = Rotary(self.token_shape, block.attention.head_dim, periodic)
        # -- from tokens to the values of a patch
        self.norm = LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, out_channels * patch_size[0] * patch_size[1])

    def forward(self, patches: Tensor, keys: Tensor | None = None) -> Tensor:
        """keys (B,): of the random numbers of each sample in training, or None."""
        tokens = self.position(self.patch_embedding(patches))  # (B, T, D)
        tokens = run_blocks(self, tokens, keys)
        return self.head(self.norm(tokens))  # (B, T, V P Q)

    def from_fields(self, fields: Tensor, with_zeros: bool = False) -> Tensor:
        """fields (B, C, H, W) -> patches (B, T, C P Q), with padding."""
        return patchify(pad_grid(fields, self.padded_shape, self.periodic, with_zeros), self.patch_size)

    def to_fields(self, patches: Tensor) -> Tensor:
        """patches (B, T, V P Q) -> fields (B, V, H, W)."""
        return crop_grid(unpatchify(patches, self.padded_shape, self.patch_size), self.grid_shape)

    def initial_std(self, name: str) -> float | None:
        """Initial standard deviation of a parameter; None: norms start as the identity, biases at 0."""
        if name.endswith("bias") or "norm" in name:
            return None
        if name.endswith(("attention.projection.weight", "mlp.down.weight")):
            return 0.02 / (2 * len(self.blocks)) ** 0.5  # GPT-2: preserves the size of the residual stream
        return 0.02

    def flops(self) -> int:
        """Floating-point operations of one sample's forward pass; attention is not causal: no halving."""
        return self._blocks_flops() + sum(self._end_flops())

    def ends_in_blocks(self) -> tuple[float, float]:
        block, (embedding, head) = self._blocks_flops() / len(self.windows), self._end_flops()
        return embedding / block, head / block

    def _blocks_flops(self) -> int:
        t, d = self.num_tokens, self.dim
        linear = 2 * t * (4 * d**2 + self.mlp_weights)
        return sum(linear + 4 * t * rows * columns * d for rows, columns in self.windows)

    def _end_flops(self) -> tuple[int, int]:
        values = 2 * self.num_tokens * self.dim * self.patch_size[0] * self.patch_size[1]
        return values * self.in_channels, values * self.out_channels
