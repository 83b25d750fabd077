"""What a convolution reads beyond its tile: rows and columns of neighbouring ranks, forward and backward.

Shapes: B batch, D channels, h x w the tile of the grid on this rank, k cells of halo.
"""

import torch
import torch.distributed as dist
from torch import Tensor, library
from torch.distributed.distributed_c10d import (
    _resolve_process_group,  # type: ignore[reportPrivateImportUsage]
)

from models.unet import GridPadding

NOBODY = -1  # no neighbour: a pole, or the edge of a regional grid


# An operator of its own rather than an autograd.Function: compile keeps it whole (no graph break under
# fullgraph), and fake tensors know its shapes, so that a dry run needs no neighbours.
@library.custom_op("rossby::swap_strips", mutates_args=())
def swap_strips(
    to_previous: Tensor, to_next: Tensor, previous: int, next: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """Sends a strip to either neighbour of a line of ranks -> (strip from previous, strip from next).

    Contiguous strips, all to_next of one shape and all to_previous of one shape along the line: (from
    previous, from next) have those of (to_next, to_previous). Zeros come from `NOBODY`. `previous` and
    `next` are global ranks in the group; both may be the same rank. All ranks of a line call it together.
    """
    from_previous, from_next = torch.zeros_like(to_next), torch.zeros_like(to_previous)
    group = _resolve_process_group(group_name)  # type: ignore[reportArgumentType]
    # Sends to the next come first and so do receipts from the previous: where both neighbours are one rank,
    # NCCL, which has no tags, matches them by this order.
    messages = [
        dist.P2POp(call, strip, peer, group, tag)
        for call, strip, peer, tag in (
            (dist.isend, to_next, next, 0),
            (dist.isend, to_previous, previous, 1),
            (dist.irecv, from_previous, previous, 0),
            (dist.irecv, from_next, next, 1),
        )
        if peer != NOBODY and strip.numel()
    ]
    # All are posted before any is waited for: no order of the ranks can deadlock.
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    return from_previous, from_next


@swap_strips.register_fake
def _(
    to_previous: Tensor, to_next: Tensor, previous: int, next: int, group_name: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(to_next), torch.empty_like(to_previous)


def _keep_neighbours(ctx, inputs: tuple, output: tuple) -> None:
    ctx.neighbours = inputs[2:]


def _swap_back(ctx, from_previous: Tensor, from_next: Tensor) -> tuple:
    """The gradient of a strip goes back to where the strip came from: the same exchange again."""
    to_previous, to_next = swap_strips(from_previous.contiguous(), from_next.contiguous(), *ctx.neighbours)
    return to_previous, to_next, None, None, None


swap_strips.register_autograd(_swap_back, setup_context=_keep_neighbours)


class HaloPadding(GridPadding):
    """x (B, D, h, w) -> (B, D, h + before + after, w + before + after): a tile and what lies around it.

    `meridian` are the (northern, southern), `parallel` the (western, eastern) neighbours' global ranks, or
    `NOBODY`; on a globe with one column of ranks nobody stands in the west or east, and longitudes go on at
    the tile's own other end. Tiles must be at least as wide as the halo.
    """

    def __init__(
        self, whole: GridPadding, meridian: tuple[int, int], parallel: tuple[int, int], group_name: str
    ) -> None:
        super().__init__(whole.before, whole.after, whole.periodic)
        self.meridian, self.parallel, self.group_name = meridian, parallel, group_name

    def beyond_longitudes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._from_neighbours(x, 3, self.parallel, super().beyond_longitudes(x))

    def beyond_latitudes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._from_neighbours(x, 2, self.meridian, super().beyond_latitudes(x))

    def _from_neighbours(
        self, x: Tensor, dim: int, neighbours: tuple[int, int], own: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The two strips beyond `dim`: a neighbour's where there is one, else `own`."""
        if neighbours == (NOBODY, NOBODY):
            return own
        # Strips travel channels last, as the model keeps its tensors: cat then copies without transposing.
        to_previous = x.narrow(dim, 0, self.after).movedim(1, -1).contiguous()
        to_next = x.narrow(dim, x.shape[dim] - self.before, self.before).movedim(1, -1).contiguous()
        received = swap_strips(to_previous, to_next, *neighbours, self.group_name)
        before, after = (
            strip.movedim(-1, 1) if peer != NOBODY else edge
            for strip, peer, edge in zip(received, neighbours, own, strict=True)
        )
        return before, after
