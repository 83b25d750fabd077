"""Closed forms with which tests compare the program."""

from models.unet import UNet
from parallelisms.domain_parallel import NO_RANK, GridTiles


def halo_traffic(model: UNet, tiles: GridTiles, batch_size: int, itemsize: int) -> tuple[int, int]:
    """(messages, bytes) that this rank sends in one forward pass.

    With m neighbours in latitude and p in longitude (0 to 2), every 3 x 3 convolution (the stem and two a
    block: 4 levels + 3 of them) sends p messages of B D h values and m of B D (w + 2), where D are the
    channels it reads and h x w is its tile at its own resolution. Others send nothing. Backward sends the
    same again, without the stem's where the fields need no gradient. `itemsize` is that of the activations;
    under autocast the stem still reads, and sends, what it is given.
    """
    m = sum(peer != NO_RANK for peer in tiles.neighbors(0, model.periodic))
    p = sum(peer != NO_RANK for peer in tiles.neighbors(1, model.periodic))
    channels = [(c.in_channels, f) for c, f in model.convolutions() if c.kernel_size[0] == 3]
    (h, w), messages = tiles.shape, (m + p) * len(channels)
    return messages, itemsize * batch_size * sum(d * (p * h // f + m * (w // f + 2)) for d, f in channels)
