"""Domain parallelism: the grid itself split over ranks, by latitude and longitude, for convolutional models.

Every rank holds the whole model and one tile of every field and activation; convolutions fetch what they
read beyond it (parallelisms/halo_exchange.py). Nothing else of a grid model looks at other cells.

The convention of gradients: a rank computes the loss of its own cells, a sum over its tile divided by what
the *whole* grid divides by. The loss is the sum of those over the tiles, and the gradient of a parameter the
sum over the ranks' `.grad`, which the caller takes (all ranks must run backward, as it exchanges halos).
DDP and FSDP average where a sum is due: multiply the loss by the number of tiles.

Shapes: B batch, C channels, H' x W' the padded grid, h x w this rank's tile of it.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from errors import ConfigError
from models.unet import named_convolutions
from parallelisms.halo_exchange import NOBODY, HaloPadding

Model = TypeVar("Model", bound=nn.Module)


def bounds(size: int, parts: int, multiple: int) -> tuple[int, ...]:
    """Where each of `parts` begins, and the end: multiples of `multiple`, parts equal to within one of them.

    >>> bounds(736, 4, 16)  # 46 units of 16 rows: 12 + 11 + 12 + 11
    (0, 192, 368, 560, 736)
    """
    units = size // multiple
    return tuple(-(-units * part // parts) * multiple for part in range(parts + 1))


def check_tiles(tiles: tuple[int, int], padded_shape: tuple[int, int], multiple: int, num_ranks: int) -> None:
    """ConfigError where `num_ranks` ranks cannot each take a tile of (rows, columns) of the padded grid."""
    most = (padded_shape[0] // multiple, padded_shape[1] // multiple)
    valid = [
        [rows, num_ranks // rows]
        for rows in range(1, num_ranks + 1)
        if num_ranks % rows == 0 and rows <= most[0] and num_ranks // rows <= most[1]
    ]
    if list(tiles) not in valid:
        raise ConfigError(
            f"parallelism.domain_parallel_tiles = {list(tiles)}: {num_ranks} rank(s) each take a tile of the "
            f"{padded_shape[0]} x {padded_shape[1]} grid, in whole units of {multiple} x {multiple} cells; "
            f"valid: {', '.join(map(str, valid)) or f'no layout of {num_ranks} ranks'}"
        )


@dataclass(frozen=True)
class GridTiles:
    """Which tile of the padded grid each rank of a group holds; ranks in row-major order from the north."""

    row_bounds: tuple[int, ...]
    column_bounds: tuple[int, ...]
    ranks: tuple[int, ...]  # global ranks, row-major
    index: int  # of this rank in `ranks`
    group: dist.ProcessGroup | None  # None: this rank has the whole grid

    @property
    def tiles(self) -> tuple[int, int]:
        """(rows, columns) of ranks."""
        return len(self.row_bounds) - 1, len(self.column_bounds) - 1

    @property
    def num_shards(self) -> int:
        """Of a sample."""
        return len(self.ranks)

    @property
    def position(self) -> tuple[int, int]:
        """(row, column) of this rank."""
        return divmod(self.index, self.tiles[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(h, w) of this rank's tile."""
        rows, columns = self._slices(self.index)
        return rows.stop - rows.start, columns.stop - columns.start

    def neighbours(self, dim: int, periodic: bool) -> tuple[int, int]:
        """Global ranks before and after this one in latitude (dim 0) or longitude (dim 1), or NOBODY."""
        count, here = self.tiles[dim], self.position[dim]
        around = periodic and dim == 1 and count > 1

        def rank_at(index: int) -> int:
            if not (around or 0 <= index < count):
                return NOBODY
            row, column = (index, self.position[1]) if dim == 0 else (self.position[0], index % count)
            return self.ranks[row * self.tiles[1] + column]

        return rank_at(here - 1), rank_at(here + 1)

    def cut_input(self, x: Tensor) -> Tensor:
        """x (B, C, H', W') -> this rank's tile (B, C, h, w); a view of it would keep all of x."""
        assert x.shape[-2:] == (self.row_bounds[-1], self.column_bounds[-1]), (
            "pad with model.from_fields first"
        )
        rows, columns = self._slices(self.index)
        return x[..., rows, columns].contiguous()

    def cut_output(self, x: Tensor) -> Tensor:
        """x (B, V, H', W') -> this rank's tile: outputs, targets, masks and weights (B, V, h, w) alike."""
        return self.cut_input(x)

    @torch.no_grad()
    def gather_output(self, tile: Tensor) -> Tensor:
        """The inverse of `cut_output` on every rank, for validation; without gradients.

        Tiles differ by a unit; all-gather wants one shape, so each travels in the size of the largest.
        """
        if len(self.ranks) == 1:
            return tile
        height, width = (
            max(b - a for a, b in pairwise(ends)) for ends in (self.row_bounds, self.column_bounds)
        )
        largest = tile.new_zeros(*tile.shape[:-2], height, width)
        largest[..., : tile.shape[-2], : tile.shape[-1]] = tile
        parts = [torch.empty_like(largest) for _ in self.ranks]
        dist.all_gather(parts, largest, group=self.group)
        whole = tile.new_empty(*tile.shape[:-2], self.row_bounds[-1], self.column_bounds[-1])
        for index, part in enumerate(parts):
            rows, columns = self._slices(index)
            whole[..., rows, columns] = part[..., : rows.stop - rows.start, : columns.stop - columns.start]
        return whole

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """The sum of `value` over the tiles, in place; without gradients."""
        if len(self.ranks) == 1:
            return value
        dist.all_reduce(value, group=self.group)
        return value

    def _slices(self, index: int) -> tuple[slice, slice]:
        row, column = divmod(index, self.tiles[1])
        return slice(*self.row_bounds[row : row + 2]), slice(*self.column_bounds[column : column + 2])


def build_tiles(
    mesh: DeviceMesh | None, tiles: tuple[int, int], shape: tuple[int, int], multiple: int
) -> GridTiles:
    """Deals the padded grid of `shape` out to the ranks of a mesh with one axis, as (rows, columns) of tiles.

    None is the mesh of a rank that has the whole grid.

    ConfigError, with the valid ones, for tiles that the ranks or the grid do not allow.
    """
    check_tiles(tiles, shape, multiple, mesh.size() if mesh else 1)
    rows, columns = bounds(shape[0], tiles[0], multiple), bounds(shape[1], tiles[1], multiple)
    if mesh is None:
        return GridTiles(rows, columns, (dist.get_rank(),), 0, None)
    group = mesh.get_group()  # asked for its ranks: `mesh.mesh` is a tensor, which a dry run cannot read
    return GridTiles(rows, columns, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group)


def apply_domain_parallel(model: Model, tiles: GridTiles) -> Model:
    """From now on `model` maps this rank's tile to its tile; names and values of parameters stay.

    To be applied before compile and FSDP, which would hide the modules it replaces.
    """
    assert tiles.group is not None
    group_name = tiles.group.group_name
    for _, conv in named_convolutions(model):
        around = conv.around
        meridian, parallel = tiles.neighbours(0, around.periodic), tiles.neighbours(1, around.periodic)
        conv.around = HaloPadding(around, meridian, parallel, group_name)
    return model
