"""Shapes of a transformer for the planner, read from the model in models/vit.py on meta tensors.

Shapes: T tokens of a sample, D width, M hidden width of the MLP.
"""

import math
import statistics
from dataclasses import dataclass, field

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
    flops: float  # of a sample's forward pass; a training step has three times as many
    block: Shapes = field(hash=False)  # parameters of one block
    first: Shapes = field(hash=False)  # parameters before the first block
    last: Shapes = field(hash=False)  # parameters after the last block
    qk_norm: bool = False
    rotary: bool = False  # queries and keys are rotated by row and column: models/embeddings.py
    window_tokens: tuple[int, ...] = ()  # tokens of a window, of each block that has windows
    copied_fraction: float = 0.0  # fraction of blocks with windows that cut rows and have to be copied

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


def count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def cut(shapes: Shapes, tp: int) -> Shapes:
    """Return the parameters of one of `tp` tensor-parallel ranks."""
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
    from models.vit import VisionTransformer  # imported here: torch takes seconds

    built = build_model(model, out_channels, in_channels - out_channels, grid_shape, True)
    assert isinstance(built, VisionTransformer)
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    windows = built.windows if model.attention_windows else []
    return Architecture(
        tokens=built.num_tokens,
        dim=built.dim,
        layers=len(built.blocks),
        heads=model.num_heads,
        in_features=built.patch_embedding.in_features,
        out_features=built.head.out_features,
        flops=built.flops(),
        block={
            name.removeprefix("blocks.0."): s for name, s in shapes.items() if name.startswith("blocks.0.")
        },
        first={name: s for name, s in shapes.items() if name.startswith(("patch_embedding.", "position."))},
        last={name: s for name, s in shapes.items() if name.startswith(("norm.", "head."))},
        qk_norm=model.qk_norm,
        rotary=model.position == "rotary",
        window_tokens=tuple(map(math.prod, windows)),
        copied_fraction=statistics.mean([columns < built.token_shape[1] for _, columns in windows] or [0]),
    )
