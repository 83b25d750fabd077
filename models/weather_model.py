"""The interface of all models to training, parallelism, planning and forecasts.

Shapes: B batch, C input channels, V predicted variables, H latitudes, W longitudes, T tokens, D width.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.noise import branch_factors


class WeatherModel(nn.Module):
    """A model between `from_fields`, which prepares its input, and `to_fields`, which restores fields."""

    grid_shape: tuple[int, int]  # (H, W)
    in_channels: int
    blocks: nn.ModuleDict  # in order of execution: the units of compile, recomputation and sharding
    kinds_of_blocks = 1  # number of different blocks, each of which is compiled once
    variable_dim = 1  # dim of the output that has the variables

    def from_fields(self, fields: Tensor, with_zeros: bool = False) -> Tensor:
        """fields (B, C, H, W) -> the input of `forward`; with_zeros: pad with zeros, for weights."""
        raise NotImplementedError

    def to_fields(self, output: Tensor) -> Tensor:
        """The output of `forward` -> fields (B, V, H, W)."""
        raise NotImplementedError

    def initial_std(self, name: str) -> float | None:
        """Initial standard deviation of a parameter; None: norms start as the identity, biases at 0."""
        raise NotImplementedError

    def flops(self) -> int:
        """Floating-point operations of one sample's forward pass."""
        raise NotImplementedError

    def predict(self, fields: Tensor, *keys: Tensor) -> Tensor:
        """fields (B, C, H, W) -> (B, V, H, W), on one rank; keys (B,): of the samples in training."""
        return self.to_fields(self(self.from_fields(fields), *keys))


class TokenModel(WeatherModel):
    """A model of tokens (B, T, ..): `patch_embedding`, `position`, `blocks`, `norm` and `head`.

    Parallelism shards the parts of a block by their names in models/vit.py.
    """

    variable_dim = 2
    dim: int
    num_tokens: int
    windows: Sequence[tuple[int, int]] = ()  # rows and columns of tokens that each block attends in, or all
    patch_embedding: nn.Linear
    position: nn.Module
    norm: nn.Module
    head: nn.Linear
    checkpoint_every = 0  # number of blocks that the backward pass recomputes together; 0: none
    first_block = 0  # index of the first of `blocks` in the whole model
    drop_rate = 0.0  # times the index of a block: the fraction of samples that lose a branch in training

    def ends_in_blocks(self) -> tuple[float, float]:
        """FLOPs of patch embedding and head, in units of a block."""
        raise NotImplementedError


class GridModel(WeatherModel):
    """A model of the grid itself (B, C, H', W') or a tile of it, with sides that are multiples of `multiple`.

    Its convolutions are those of models/unet.py, which fetch what surrounds a tile.
    """

    padded_shape: tuple[int, int]  # (H', W')
    multiple: int


def run_blocks(model: Any, tokens: Tensor, keys: Tensor | None) -> Tensor:
    """Run the blocks of a TokenModel, or of a stage of one, in order on tokens (B, T, D).

    keys (B,): of the samples, for stochastic depth in training; None: no branch is dropped.
    """
    blocks, every_n = list(model.blocks.values()), model.checkpoint_every
    factors: Sequence[Tensor | None] = [None] * len(blocks)
    if keys is not None:
        indices = range(model.first_block, model.first_block + len(blocks))
        factors = branch_factors(keys, indices, model.drop_rate).unbind()

    def run(tokens: Tensor, start: int, end: int) -> Tensor:
        for block, factor in zip(blocks[start:end], factors[start:end], strict=True):
            tokens = block(tokens) if factor is None else block(tokens, factor)
        return tokens

    if not every_n:
        return run(tokens, 0, len(blocks))
    for start in range(0, len(blocks), every_n):
        tokens = checkpoint(run, tokens, start, start + every_n, use_reentrant=False)  # type: ignore[reportAssignmentType]
    return tokens
