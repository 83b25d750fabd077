"""The U-Net of single-GPU weather models: fields in, fields out, plain PyTorch without knowledge of ranks.

Shapes: B batch, C input channels, V predicted variables, H latitudes, W longitudes of the user's grid,
H' x W' the grid padded to whole cells of the coarsest level, h x w that grid or any tile of it, D channels.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Model
from errors import ConfigError
from models.embeddings import crop_grid, pad_grid, padded_shape
from models.vit import NORM_EPS, LayerNorm
from models.weather_model import GridModel


class GridPadding(nn.Module):
    """x (B, D, h, w) -> (B, D, h + before + after, w + before + after): x and its surroundings.

    Longitudes of a global grid wrap around; beyond a pole, and around a regional grid (not `periodic`), the
    edge is repeated. Domain parallelism fetches the neighbours' rows and columns instead.
    """

    def __init__(self, before: int, after: int, periodic: bool) -> None:
        super().__init__()
        self.before, self.after, self.periodic = before, after, periodic

    def forward(self, x: Tensor) -> Tensor:
        if self.before == self.after == 0:
            return x
        # Columns first, so that rows are padded at their full width, including the corners.
        west, east = self.beyond_longitudes(x)
        x = torch.cat([west, x, east], dim=3)  # (B, D, h, w + before + after)
        north, south = self.beyond_latitudes(x)
        return torch.cat([north, x, south], dim=2)  # (B, D, h + before + after, w + before + after)

    def beyond_longitudes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns before the first one, `before` wide, and after the last, `after` wide."""
        if self.periodic:
            return x.narrow(3, x.shape[3] - self.before, self.before), x.narrow(3, 0, self.after)
        return self._repeated_edges(x, dim=3)

    def beyond_latitudes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows before the first one, `before` high, and after the last, `after` high."""
        return self._repeated_edges(x, dim=2)

    def _repeated_edges(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
        return first.repeat_interleave(self.before, dim), last.repeat_interleave(self.after, dim)


class GridConv2d(nn.Conv2d):
    """x (B, D, h, w) -> (B, D', h/stride, w/stride), the convolution of all grid models.

    Output (i, j) reads inputs from stride i - before to stride i + kernel - 1 - before; an odd row of
    padding goes before. `padding` of nn.Conv2d stays 0: `around` provides it.
    """

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int, periodic: bool) -> None:
        super().__init__(inputs, outputs, kernel_size, stride)
        halo = kernel_size - stride
        assert halo >= 0, f"kernel {kernel_size}, stride {stride}: some inputs would be read by no output"
        self.around = GridPadding((halo + 1) // 2, halo // 2, periodic)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.around(x))

    @property
    def fan_in(self) -> int:
        """Number of values in the sum of one output."""
        return self.in_channels * self.kernel_size[0] * self.kernel_size[1]


class ChannelNorm(LayerNorm):
    """x (B, D, h, w) -> the same shape, normalised over the channels of each cell.

    Not GroupNorm: its mean over the grid would need two all-reduced sums per norm on a sharded grid, would
    include padded rows, and would give the poles far more weight than their area. ConvNeXt (Liu et al. 2022,
    table 2) measured no loss. The norm removes the amplitude of a cell, so it is used on branches only.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ConvBlock(nn.Module):
    """x (B, D, h, w) -> (B, D', h, w): two 3 x 3 convolutions, norm and GELU before each, plus a shortcut.

    The shortcut preserves amplitudes, which a norm per cell removes: without it no layer could distinguish a
    storm from the same pattern at half the strength.
    """

    def __init__(self, inputs: int, outputs: int, periodic: bool) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(inputs, eps=NORM_EPS)
        self.conv1 = GridConv2d(inputs, outputs, 3, 1, periodic)
        self.norm2 = ChannelNorm(outputs, eps=NORM_EPS)
        self.conv2 = GridConv2d(outputs, outputs, 3, 1, periodic)
        self.shortcut = GridConv2d(inputs, outputs, 1, 1, periodic) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv1(F.gelu(self.norm1(x)))  # (B, D', h, w)
        return self.shortcut(x) + self.conv2(F.gelu(self.norm2(branch)))


class UNet(GridModel):
    """Padded fields (B, C, H', W'), or a tile of them, -> (B, V, H', W') or the same tile.

    The grid is halved and the channels doubled `levels` times, from `width` at full resolution; on the way up
    each level reads the one below and the skip connection. A tile's height and width are multiples of
    `multiple` = 2^levels. Raises ConfigError for grids too small to be padded.
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
        width, levels = model.width, model.levels
        self.grid_shape, self.levels, self.periodic = grid_shape, levels, periodic
        self.in_channels, self.out_channels = in_channels, out_channels
        self.multiple = 2**levels
        self.padded_shape = padded_shape(grid_shape, (self.multiple, self.multiple))
        rows, columns = grid_shape
        if periodic and self.padded_shape[1] > 2 * columns:
            raise ConfigError(
                f"model.levels = {levels} on a grid of {rows} x {columns}: {2**levels} columns make one cell "
                f"of the coarsest level; take levels <= {(2 * columns).bit_length() - 1}"
            )
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem = GridConv2d(in_channels, width, 3, 1, periodic)
        # One dict in order of execution, as in models/vit.py.
        blocks = {f"encoder{level}": ConvBlock(d, d, periodic) for level, d in enumerate(widths[:-1])}
        blocks["middle"] = ConvBlock(widths[-1], widths[-1], periodic)
        for level in reversed(range(levels)):  # 2 D channels from below, D over the skip connection
            blocks[f"decoder{level}"] = ConvBlock(3 * widths[level], widths[level], periodic)
        self.blocks = nn.ModuleDict(blocks)
        self.kinds_of_blocks = len(blocks)  # each level has other shapes
        # 2 x 2 with stride 2: a coarse cell reads its own four cells, symmetric in latitude, and no others.
        self.down = nn.ModuleDict(
            {str(level): GridConv2d(d, 2 * d, 2, 2, periodic) for level, d in enumerate(widths[:-1])}
        )
        self.head = GridConv2d(width, out_channels, 1, 1, periodic)
        # Computed by name before modules are wrapped and sharded, which changes their shapes.
        self._fan_in = {f"{name}.weight": conv.fan_in for name, conv in named_convolutions(self)}

    def from_fields(self, fields: Tensor, with_zeros: bool = False) -> Tensor:
        """fields (B, C, H, W) -> (B, C, H', W'), with padding; tiles are cut out of that."""
        return pad_grid(fields, self.padded_shape, self.periodic, with_zeros)

    def to_fields(self, output: Tensor) -> Tensor:
        """Output of `forward`, whole (B, V, H', W'), -> fields (B, V, H, W)."""
        return crop_grid(output, self.grid_shape)

    def forward(self, x: Tensor) -> Tensor:
        assert not (x.shape[2] % self.multiple or x.shape[3] % self.multiple), "pad with from_fields first"
        # Channels last: norms over channels then read memory in order, and tensor-core kernels need it.
        x = self.stem(x.contiguous(memory_format=torch.channels_last))  # (B, D, h, w)
        skips = []
        for level in range(self.levels):
            x = self.blocks[f"encoder{level}"](x)
            skips.append(x)
            x = self.down[str(level)](x)  # (B, 2 D, h/2, w/2)
        x = self.blocks["middle"](x)
        for level in reversed(range(self.levels)):
            # Nearest, then the block's 3 x 3: a transposed convolution draws checkerboards (Odena 2016).
            x = F.interpolate(x, scale_factor=2, mode="nearest")  # (B, 2 D, 2 h, 2 w)
            x = self.blocks[f"decoder{level}"](torch.cat([x, skips.pop()], dim=1))  # (B, D, 2 h, 2 w)
        return self.head(x)  # (B, V, h, w)

    def initial_std(self, name: str) -> float | None:
        """Initial standard deviation of a parameter; None: norms start as the identity, biases at 0.

        Convolutions preserve the variance of their input. The head starts small, as in models/vit.py, so that
        the first forecast is near persistence, or near the mean.
        """
        if name.endswith("bias") or "norm" in name:
            return None
        return 0.02 if name == "head.weight" else self._fan_in[name] ** -0.5

    def flops(self) -> int:
        """Floating-point operations of one sample's forward pass: two for every weight of every output."""
        cells = self.padded_shape[0] * self.padded_shape[1]
        return sum(
            2 * conv.fan_in * conv.out_channels * cells // (coarsening * conv.stride[0]) ** 2
            for conv, coarsening in self.convolutions()
        )

    def convolutions(self) -> Iterator[tuple[GridConv2d, int]]:
        """Yield every convolution, with the side of its input cells in cells of the grid."""
        yield self.stem, 1
        for level in range(self.levels):
            yield self.down[str(level)], 2**level  # type: ignore[reportReturnType]
        for name, block in self.blocks.items():
            level = (
                self.levels if name == "middle" else int(name.removeprefix("encoder").removeprefix("decoder"))
            )
            yield from ((conv, 2**level) for _, conv in named_convolutions(block))
        yield self.head, 1


def named_convolutions(module: nn.Module) -> Iterator[tuple[str, GridConv2d]]:
    return ((name, conv) for name, conv in module.named_modules() if isinstance(conv, GridConv2d))
