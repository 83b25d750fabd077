"""Domain parallelism: the grid itself sharded by latitude and longitude, for convolutional models.

Every rank has the whole model and one tile of every field and activation; convolutions fetch their halos
(parallelisms/halo_exchange.py). All other layers of a grid model work cell by cell.

Gradients: a rank computes the loss of its own cells, a sum over its tile divided by the divisor of the
*whole* grid. The loss is the sum over the tiles, and the gradient of a parameter the sum over the ranks'
`.grad`. DDP and FSDP average instead: multiply the loss by the number of tiles.

Shapes: B batch, C channels, H' x W' the padded grid, h x w this rank's tile of it.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from errors import refuse
from models.unet import named_convolutions
from parallelisms.degrees import divisors
from parallelisms.halo_exchange import NO_RANK, HaloPadding

Tiles = tuple[int, int]  # rows and columns of ranks


def bounds(size: int, parts: int, multiple: int) -> tuple[int, ...]:
    """Return the offsets of `parts`, and the end: multiples of `multiple`, parts equal to within one of them.

    >>> bounds(736, 4, 16)  # 46 units of 16 rows: 12 + 11 + 12 + 11
    (0, 192, 368, 560, 736)
    """
    units = size // multiple
    return tuple(-(-units * part // parts) * multiple for part in range(parts + 1))


def choose_tiles(num_ranks: int, padded_shape: tuple[int, int], multiple: int) -> Tiles:
    """Return the rows and columns of tiles that minimise the largest tile, then the cells of halos.

    Raises ConfigError if the padded grid has no tile for each rank.
    """
    most = (padded_shape[0] // multiple, padded_shape[1] // multiple)
    valid = [
        (rows, num_ranks // rows)
        for rows in divisors(num_ranks)
        if rows <= most[0] and num_ranks // rows <= most[1]
    ]
    if not valid:
        reason = (
            f"so many ranks have no tiles of the {padded_shape[0]} x {padded_shape[1]} grid, in units of "
            f"{multiple} x {multiple} cells; at most {most[0]} x {most[1]}"
        )
        refuse("parallelism.context_parallel_degree", num_ranks, reason)

    def cost(tiles: Tiles) -> tuple[int, int]:
        height, width = (-(-n // parts) for n, parts in zip(most, tiles, strict=True))
        return height * width, width * (tiles[0] > 1) + height * (tiles[1] > 1)

    return min(valid, key=cost)


@dataclass(frozen=True)
class GridTiles:
    """The tile of the padded grid of each rank of a group; ranks in row-major order from the north."""

    row_bounds: tuple[int, ...]
    column_bounds: tuple[int, ...]
    ranks: tuple[int, ...]  # global ranks, row-major
    index: int  # of this rank in `ranks`
    group: dist.ProcessGroup | None  # None: this rank has the whole grid

    @property
    def tiles(self) -> Tiles:
        return len(self.row_bounds) - 1, len(self.column_bounds) - 1

    @property
    def num_shards(self) -> int:
        """Number of shards of a sample."""
        return len(self.ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """(h, w) of this rank's tile."""
        rows, columns = self._slices(self.index)
        return rows.stop - rows.start, columns.stop - columns.start

    def neighbors(self, dim: int, periodic: bool) -> tuple[int, int]:
        """Return the global ranks before and after this one in latitude (dim 0) or longitude (dim 1)."""
        count, here = self.tiles[dim], list(divmod(self.index, self.tiles[1]))

        def rank_at(index: int) -> int:
            if periodic and dim == 1 and count > 1:
                index %= count
            if not 0 <= index < count:
                return NO_RANK
            row, column = (index, here[1]) if dim == 0 else (here[0], index)
            return self.ranks[row * self.tiles[1] + column]

        return rank_at(here[dim] - 1), rank_at(here[dim] + 1)

    def cut_input(self, x: Tensor) -> Tensor:
        """x (B, C, H', W') -> this rank's tile (B, C, h, w); a view would keep all of x in memory."""
        padded = (self.row_bounds[-1], self.column_bounds[-1])
        assert x.shape[-2:] == padded, "pad with model.from_fields first"
        rows, columns = self._slices(self.index)
        return x[..., rows, columns].contiguous()

    def cut_output(self, x: Tensor) -> Tensor:
        """x (B, V, H', W') -> this rank's tile of outputs, targets, masks or weights (B, V, h, w)."""
        return self.cut_input(x)

    @torch.no_grad()
    def gather_output(self, tile: Tensor) -> Tensor:
        """Inverse of `cut_output` on every rank, for validation; without gradients.

        Tiles differ by a unit; all-gather needs one shape, so each is sent in the size of the largest.
        """
        if len(self.ranks) == 1:
            return tile
        sides = [max(b - a for a, b in pairwise(ends)) for ends in (self.row_bounds, self.column_bounds)]
        largest = tile.new_zeros(*tile.shape[:-2], *sides)
        largest[..., : tile.shape[-2], : tile.shape[-1]] = tile
        parts = [torch.empty_like(largest) for _ in self.ranks]
        dist.all_gather(parts, largest, group=self.group)
        whole = tile.new_empty(*tile.shape[:-2], self.row_bounds[-1], self.column_bounds[-1])
        for index, part in enumerate(parts):
            rows, columns = self._slices(index)
            whole[..., rows, columns] = part[..., : rows.stop - rows.start, : columns.stop - columns.start]
        return whole

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the tiles, in place; without gradients."""
        if len(self.ranks) > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def _slices(self, index: int) -> tuple[slice, slice]:
        row, column = divmod(index, self.tiles[1])
        return slice(*self.row_bounds[row : row + 2]), slice(*self.column_bounds[column : column + 2])


def build_tiles(mesh: DeviceMesh | None, tiles: Tiles, shape: tuple[int, int], multiple: int) -> GridTiles:
    """Distribute the padded grid of `shape` over the ranks of a mesh with one axis; None: one rank."""
    rows, columns = bounds(shape[0], tiles[0], multiple), bounds(shape[1], tiles[1], multiple)
    if mesh is None:
        return GridTiles(rows, columns, (dist.get_rank(),), 0, None)
    group = mesh.get_group()  # asked for its ranks: `mesh.mesh` is a tensor, which a dry run cannot read
    return GridTiles(rows, columns, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group), group)


def apply_domain_parallel(model: nn.Module, tiles: GridTiles) -> None:
    """Make `model` map this rank's tile to its tile; names and values of parameters stay.

    Call before compile and FSDP, which would hide the modules that it replaces.
    """
    assert tiles.group is not None
    for _, conv in named_convolutions(model):
        whole = conv.around
        lat, lon = tiles.neighbors(0, whole.periodic), tiles.neighbors(1, whole.periodic)
        conv.around = HaloPadding(whole, lat, lon, tiles.group.group_name)
