"""What training, layouts, plans and forecasts ask of a model, whatever it is made of.

Shapes: B batch, C input channels, V predicted variables, H latitudes, W longitudes, T tokens.
"""

from torch import Tensor, nn


class WeatherModel(nn.Module):
    """Maps what `from_fields` makes of fields to what `to_fields` makes fields of."""

    grid_shape: tuple[int, int]  # (H, W)
    in_channels: int
    blocks: nn.ModuleDict  # in the order of execution: what is compiled, recomputed and sharded as one
    kinds_of_blocks = 1  # that are a compilation each

    def from_fields(self, fields: Tensor, with_zeros: bool = False) -> Tensor:
        """fields (B, C, H, W) -> what `forward` takes; with_zeros: what is padded counts for nothing."""
        raise NotImplementedError

    def to_fields(self, output: Tensor) -> Tensor:
        """What `forward` gives -> fields (B, V, H, W)."""
        raise NotImplementedError

    def initial_std(self, name: str) -> float | None:
        """Standard deviation a parameter starts with; None: norms start as the identity, biases at 0."""
        raise NotImplementedError

    def flops(self) -> int:
        """Floating-point operations of one sample's forward pass."""
        raise NotImplementedError

    def describe(self) -> str:
        """What a sample is to this model, in a word or two."""
        raise NotImplementedError

    def predict(self, fields: Tensor) -> Tensor:
        """fields (B, C, H, W) -> (B, V, H, W), for whoever has the whole model and the whole grid."""
        return self.to_fields(self(self.from_fields(fields)))


class TokenModel(WeatherModel):
    """Of tokens (B, T, ..): `patch_embedding` and `position` before a row of `blocks`, `norm` and `head`
    after it. Parts of blocks are named as in models/vit.py: by these names layouts cut them.
    """

    dim: int
    patch_embedding: nn.Linear
    position: nn.Module
    norm: nn.Module
    head: nn.Linear

    @property
    def num_tokens(self) -> int:
        """T"""
        raise NotImplementedError

    @property
    def attention_shape(self) -> tuple[int, int]:
        """What one call of the attention kernel sees of a sample: sequences, and tokens of each."""
        return 1, self.num_tokens

    def ends_in_blocks(self) -> tuple[float, float]:
        """What patch embedding and head cost, in blocks."""
        raise NotImplementedError


class GridModel(WeatherModel):
    """Of the grid itself (B, C, H', W'), or a tile of it, whose height and width are multiples of `multiple`;
    its convolutions are those of models/unet.py, which know what lies around a tile.
    """

    padded_shape: tuple[int, int]  # (H', W')
    multiple: int
