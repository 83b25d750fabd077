"""A transformer as the planner sees it: shapes, and no modules.

Shapes: T tokens of a sample, D width, M hidden width of the MLP.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

Shapes = dict[str, tuple[int, ...]]

COLUMN = ("attention.qkv.", "mlp.up.", "mlp.gate.", "patch_embedding.")  # rows are dealt out over tp
ROW = ("attention.projection.weight", "mlp.down.weight", "head.weight")  # columns are; biases are whole


@dataclass(frozen=True)
class Architecture:
    """The ViT of models/vit.py. benchmarks/planner_published.py derives language models from it."""

    tokens: int  # T
    dim: int  # D
    layers: int
    heads: int
    mlp_dim: int  # M
    in_features: int  # values of a token that the patch embedding takes
    out_features: int  # values of a token that the head gives
    qkv_bias: bool = True
    qk_norm: bool = False
    learned_position: bool = True
    axial: bool = False  # queries and keys are turned by row and column: models/embeddings.py
    biases: ClassVar[bool] = True
    reads_words: ClassVar[bool] = False
    loss_bytes: ClassVar[int] = 0  # read and written by the loss, for each number that the head gives
    gradient_sums: ClassVar[int] = 0  # of the gradients of a tensor that several matrices of a block multiply

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def heads_of_keys(self) -> int:
        """Heads of keys, and of values."""
        return self.heads

    @property
    def qkv_features(self) -> int:
        return self.dim + 2 * self.head_dim * self.heads_of_keys

    @property
    def hidden_kept(self) -> float:
        """Values that the MLP keeps before its activation, and as many after it, over the width."""
        return self.mlp_dim / self.dim

    def activation_passes(self, compiled: bool, backward: bool) -> int:
        """Return the reads and writes of the MLP's hidden values by its activation."""
        return 3 if backward else 2

    def turning_units(self, itemsize: int, compiled: bool) -> float:
        """Return the units of rotating queries and keys as models/embeddings.py does.

        Compiled one pass each. Uncompiled, of a value: products 16 bytes, their sums 12, both halves put
        together 8, and of half precision 12 to float32 and back.
        """
        uncompiled = (36 + 12 * (itemsize < 4)) / itemsize
        return 2 * self.axial * (2 if compiled else uncompiled)

    def computed_scores(self, attention: str) -> float:
        """Return the fraction of the T x T scores that a kernel of attention computes."""
        return 1.0

    def block(self) -> Shapes:
        """Parameters of one block, by the names of models/vit.py."""
        d, m = self.dim, self.mlp_dim
        shapes: Shapes = {"attention_norm.weight": (d,), "attention_norm.bias": (d,)}
        shapes |= self._linear("attention.qkv", d, self.qkv_features, self.qkv_bias)
        if self.qk_norm:
            norms = ("attention.q_norm", "attention.k_norm")
            shapes |= {f"{n}.{part}": (self.head_dim,) for n in norms for part in ("weight", "bias")}
        shapes |= self._linear("attention.projection", d, d, self.biases)
        shapes |= {"mlp_norm.weight": (d,), "mlp_norm.bias": (d,)}
        shapes |= self._linear("mlp.up", d, m, self.biases)
        return shapes | self._linear("mlp.down", m, d, self.biases)

    def first(self) -> Shapes:
        """Parameters before the first block."""
        shapes = self._linear("patch_embedding", self.in_features, self.dim, True)
        if self.learned_position:
            shapes["position.embedding"] = (self.tokens, self.dim)
        return shapes

    def last(self) -> Shapes:
        """Parameters after the last block."""
        norm: Shapes = {"norm.weight": (self.dim,), "norm.bias": (self.dim,)}
        return norm | self._linear("head", self.dim, self.out_features, self.biases)

    @staticmethod
    def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
        shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
        return shapes | ({f"{name}.bias": (outputs,)} if bias else {})

    @property
    def block_parameters(self) -> int:
        return count(self.block())

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + count(self.first()) + count(self.last())

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the matrices of one block."""
        return sum(math.prod(shape) for shape in self.block().values() if len(shape) == 2)

    def matmul_flops(self) -> float:
        """FLOPs of one sample and block, forward: every token passes through each matrix."""
        return sum(2.0 * self.tokens * math.prod(shape) for shape in self.block().values() if len(shape) == 2)

    def attention_flops(self) -> float:
        """FLOPs of one sample and block, forward: two products of T x T x D."""
        return 4 * self.tokens**2 * self.dim

    def block_flops(self) -> float:
        """FLOPs of one sample and block, forward."""
        return self.matmul_flops() + self.attention_flops()

    def flops(self) -> float:
        """Floating-point operations of one sample's forward pass; a training step has 3 x as many."""
        ends = 2 * self.tokens * self.dim * (self.in_features + self.out_features)
        return self.layers * self.block_flops() + ends


def count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def cut(shapes: Shapes, tp: int) -> Shapes:
    """Parameters of one of `tp` ranks of tensor parallelism."""
    result = {}
    for name, shape in shapes.items():
        part = list(shape)
        if any(layer in name for layer in COLUMN):
            part[0] = -(-part[0] // tp)
        elif any(layer in name for layer in ROW):
            part[1] = -(-part[1] // tp)
        result[name] = tuple(part)
    return result


def padded(shapes: Shapes, ranks: int) -> int:
    """Values that FSDP gathers: the first dim of each parameter is padded to a multiple of the ranks."""
    return sum(math.ceil(s[0] / ranks) * ranks * math.prod(s[1:]) for s in shapes.values())


def vit_architecture(
    grid_shape: tuple[int, int],
    patch_size: tuple[int, int],
    in_channels: int,
    out_channels: int,
    dim: int,
    layers: int,
    heads: int,
    mlp_dim: int = 0,
    **options: bool,
) -> Architecture:
    """The ViT of models/vit.py for a grid, which is padded to whole patches.

    mlp_dim: 0 for 4 x dim. options: qkv_bias, qk_norm, learned_position and axial.
    """
    cells = math.prod(patch_size)
    tokens = math.prod(math.ceil(n / p) for n, p in zip(grid_shape, patch_size, strict=True))
    features = (in_channels * cells, out_channels * cells)
    return Architecture(tokens, dim, layers, heads, mlp_dim or 4 * dim, *features, **options)
