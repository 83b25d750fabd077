"""A transformer as the planner sees it: shapes, read from the model of models/vit.py on meta tensors.

Shapes: T tokens of a sample, D width, M hidden width of the MLP.
"""

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from config import Model
from models.registry import build_model

Shapes = dict[str, tuple[int, ...]]

COLUMN = ("attention.qkv.", "mlp.up.", "mlp.gate.", "patch_embedding.")  # rows are sharded over tp
ROW = ("attention.projection.weight", "mlp.down.weight", "head.weight")  # columns are; biases are whole


@dataclass(frozen=True)
class Architecture:
    """A transformer of `layers` equal blocks."""

    tokens: int  # T
    dim: int  # D
    layers: int
    heads: int
    in_features: int  # values of a token that the patch embedding takes
    out_features: int  # values of a token that the head gives
    block: Shapes = field(hash=False)  # parameters of one block
    first: Shapes = field(hash=False)  # parameters before the first block
    last: Shapes = field(hash=False)  # parameters after the last block
    qk_norm: bool = False
    rotary: bool = False  # queries and keys are rotated by row and column: models/embeddings.py
    window_tokens: tuple[int, ...] = ()  # tokens of a window, of each block that has windows
    copied_fraction: float = 0.0  # part of the blocks whose windows are copied together: those that cut rows

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def mlp_dim(self) -> int:
        return self.block["mlp.up.weight"][0]

    @property
    def hidden_units(self) -> float:
        """Outputs of the products before the activation of the MLP over D; SwiGLU has two."""
        return self.mlp_dim / self.dim * (2 if "mlp.gate.weight" in self.block else 1)

    @property
    def qkv_features(self) -> int:
        return self.block["attention.qkv.weight"][0]

    @property
    def matrices(self) -> list[tuple[int, ...]]:
        """Shapes of the matrices of one block."""
        return [shape for shape in self.block.values() if len(shape) == 2]

    @property
    def matrix_parameters(self) -> int:
        return sum(map(math.prod, self.matrices))

    @property
    def parameters(self) -> int:
        return self.layers * count(self.block) + count(self.first) + count(self.last)

    def matmul_flops(self) -> float:
        """FLOPs of one sample and block, forward: every token passes through each matrix."""
        return 2.0 * self.tokens * self.matrix_parameters

    @property
    def mean_window_tokens(self) -> float:
        """Tokens that a token attends to, the mean of the blocks."""
        return statistics.mean(self.window_tokens or (self.tokens,))

    def attention_flops(self) -> float:
        """FLOPs of one sample and block, forward: two products of T x T x D, with windows of fewer."""
        return 4 * self.tokens * self.mean_window_tokens * self.dim

    def flops(self) -> float:
        """Floating-point operations of one sample's forward pass; a training step has 3 x as many."""
        ends = 2 * self.tokens * self.dim * (self.in_features + self.out_features)
        return self.layers * (self.matmul_flops() + self.attention_flops()) + ends


def count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


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


def architecture_of(
    model: Model, grid_shape: tuple[int, int], in_channels: int, out_channels: int
) -> Architecture:
    """Return the shapes of the configured ViT on a grid."""
    from models.attention import choose_windows  # here: they take torch's seconds
    from models.embeddings import token_grid

    built = build_model(
        replace(model, num_layers=1), out_channels, in_channels - out_channels, grid_shape, True
    )
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    block = {name.removeprefix("blocks.0."): s for name, s in shapes.items() if name.startswith("blocks.")}
    first = {name: s for name, s in shapes.items() if name.startswith(("patch_embedding.", "position."))}
    last = {name: s for name, s in shapes.items() if name.startswith(("norm.", "head."))}
    cells = math.prod(model.patch_size)
    token_shape = token_grid(grid_shape, model.patch_size)
    features = (in_channels * cells, out_channels * cells)
    options: dict[str, Any] = {"qk_norm": model.qk_norm, "rotary": model.position == "rotary"}
    if model.attention_windows:
        windows = choose_windows(model, token_shape)
        options["window_tokens"] = tuple(math.prod(window) for window in windows)
        options["copied_fraction"] = statistics.mean(columns < token_shape[1] for _, columns in windows)
    shape = (math.prod(token_shape), model.dim, model.num_layers, model.num_heads, *features)
    return Architecture(*shape, block, first, last, **options)


def vit_architecture(
    grid_shape: tuple[int, int],
    patch_size: tuple[int, int],
    in_channels: int,
    out_channels: int,
    dim: int,
    layers: int,
    heads: int,
    **options: Any,
) -> Architecture:
    """Return the shapes of a ViT that no configuration has. options: other keys of [model]."""
    model = Model("vit", patch_size, dim, layers, heads, **options)
    return architecture_of(model, grid_shape, in_channels, out_channels)
