"""Domain parallelism: the grid itself sharded by latitude and longitude, for convolutional models.

Every rank has the whole model and one tile of every field and activation; convolutions fetch their halos, the
rows and columns of neighbouring ranks around a tile. All other layers of a grid model work cell by cell.

Gradients: a rank computes the loss of its own cells, a sum over its tile divided by the divisor of the
*whole* grid. The loss is the sum over the tiles, and the gradient of a parameter the sum over the ranks'
`.grad`. DDP and FSDP average instead: multiply the loss by the number of tiles.

Shapes: B batch, C or D channels, H' x W' the padded grid, h x w this rank's tile of it.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, library, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # type: ignore[reportPrivateImportUsage]
)

from errors import refuse
from models.unet import GridPadding, named_convolutions
from parallelisms.degrees import divisors

NO_RANK = -1  # no neighbour: a pole, or the edge of a regional grid
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

    # The largest tile is what all ranks wait for, and its memory; halos are what they exchange.
    def cost(tiles: Tiles) -> tuple[int, int]:
        height, width = -(-most[0] // tiles[0]), -(-most[1] // tiles[1])
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
        padded = [torch.empty_like(largest) for _ in self.ranks]
        dist.all_gather(padded, largest, group=self.group)
        grid = tile.new_empty(*tile.shape[:-2], self.row_bounds[-1], self.column_bounds[-1])
        for index, cells in enumerate(padded):
            rows, columns = self._slices(index)
            grid[..., rows, columns] = cells[..., : rows.stop - rows.start, : columns.stop - columns.start]
        return grid

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


# -- halos


# A custom operator rather than an autograd.Function: compile does not break the graph, and fake tensors have
# its shapes, so that a dry run needs no neighbours.
@library.custom_op("rossby::swap_strips", mutates_args=())
def swap_strips(
    to_previous: Tensor, to_next: Tensor, previous: int, following: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """Send a strip to either neighbour of a line of ranks -> (strip from previous, strip from following).

    Contiguous strips, all to_next of one shape and all to_previous of one shape along the line: the received
    ones have the shapes of (to_next, to_previous), and are zeros from `NO_RANK`. `previous` and `following`
    are global ranks in the group; both may be the same rank. All ranks of a line call it together.
    """
    from_previous, from_next = torch.zeros_like(to_next), torch.zeros_like(to_previous)
    group = _resolve_process_group(group_name)  # type: ignore[reportArgumentType]
    # Sends to the following rank and receives from the previous rank come first: if both neighbours are the
    # same rank, NCCL, which has no tags, matches messages by this order.
    messages = [
        dist.P2POp(call, strip, peer, group, tag)
        for call, strip, peer, tag in (
            (dist.isend, to_next, following, 0),
            (dist.isend, to_previous, previous, 1),
            (dist.irecv, from_previous, previous, 0),
            (dist.irecv, from_next, following, 1),
        )
        if peer != NO_RANK and strip.numel()
    ]
    # Post all operations before waiting for any, so that no order of ranks can deadlock.
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return from_previous, from_next


@swap_strips.register_fake
def _(to_previous: Tensor, to_next: Tensor, *line: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(to_next), torch.empty_like(to_previous)


def _save_line(ctx, inputs: tuple, output: tuple) -> None:
    ctx.line = inputs[2:]


def _swap_gradients(ctx, from_previous: Tensor, from_next: Tensor) -> tuple:
    """Send the gradient of a strip to the rank that sent the strip: the same exchange again."""
    to_previous, to_next = swap_strips(from_previous.contiguous(), from_next.contiguous(), *ctx.line)
    return to_previous, to_next, None, None, None


swap_strips.register_autograd(_swap_gradients, setup_context=_save_line)


class HaloPadding(GridPadding):
    """x (B, D, h, w) -> (B, D, h + before + after, w + before + after): a tile with its surroundings.

    `lat_neighbors` are the (northern, southern), `lon_neighbors` the (western, eastern) global ranks, or
    NO_RANK; longitudes of a global grid with one column of ranks wrap around within the tile. Tiles must be
    at least as wide as the halo.
    """

    def __init__(
        self,
        padding: GridPadding,
        lat_neighbors: tuple[int, int],
        lon_neighbors: tuple[int, int],
        group_name: str,
    ) -> None:
        super().__init__(padding.before, padding.after, padding.periodic)
        self.lat_neighbors, self.lon_neighbors, self.group_name = lat_neighbors, lon_neighbors, group_name

    def beyond_longitudes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._from_neighbors(x, 3, self.lon_neighbors, super().beyond_longitudes(x))

    def beyond_latitudes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._from_neighbors(x, 2, self.lat_neighbors, super().beyond_latitudes(x))

    def _from_neighbors(
        self, x: Tensor, dim: int, neighbors: tuple[int, int], edges: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the two strips beyond `dim`: a neighbour's where there is one, else of `edges`."""
        if neighbors == (NO_RANK, NO_RANK):
            return edges
        # Strips are sent channels last, as the model stores its tensors: cat then copies without transposing.
        to_previous = x.narrow(dim, 0, self.after).movedim(1, -1).contiguous()
        to_next = x.narrow(dim, x.shape[dim] - self.before, self.before).movedim(1, -1).contiguous()
        received = swap_strips(to_previous, to_next, *neighbors, self.group_name)
        before, after = (
            strip.movedim(-1, 1) if peer != NO_RANK else edge
            for strip, peer, edge in zip(received, neighbors, edges, strict=True)
        )
        return before, after


def apply_domain_parallel(model: nn.Module, tiles: GridTiles) -> None:
    """Make `model` map this rank's tile to its tile; names and values of parameters stay.

    Call before compile and FSDP, which would hide the modules that it replaces.
    """
    assert tiles.group is not None
    for _, conv in named_convolutions(model):
        padding = conv.around
        latitudes, longitudes = tiles.neighbors(0, padding.periodic), tiles.neighbors(1, padding.periodic)
        conv.around = HaloPadding(padding, latitudes, longitudes, tiles.group.group_name)
