"""Halos of convolutions: rows and columns of neighbouring ranks around a tile, forward and backward.

Shapes: B batch, D channels, h x w the tile of the grid on this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor, library
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # type: ignore[reportPrivateImportUsage]
)

from models.unet import GridPadding

NO_RANK = -1  # no neighbour: a pole, or the edge of a regional grid


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
        whole: GridPadding,
        lat_neighbors: tuple[int, int],
        lon_neighbors: tuple[int, int],
        group_name: str,
    ) -> None:
        super().__init__(whole.before, whole.after, whole.periodic)
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
