"""Closed forms, derived in the docs, that tests and benchmarks hold the program against."""

from models.unet import UNet
from parallelisms.domain_parallel import GridTiles
from parallelisms.halo_exchange import NO_RANK


def stated_units(
    mode: str,
    mlp_ratio: float = 4.0,
    *,
    every_n_blocks: int = 1,
    qk_norm: bool = False,
    scores: float = 0.0,
    float8: bool = False,
) -> float:
    """Units of T d that one block keeps between its forward and its backward pass; derived in the docs.

    mlp_ratio: MLP hidden width / width d. scores: T / head size for the "math" kernel, which keeps T x T
    numbers a head; 0 for the others. Left out: statistics of the norms (4 numbers a token) and the
    log-sum-exp (1 a token and head).
    """
    tokens, norm, qkv, attention, projection = 1.0, 1.0, 3.0, 1.0, 1.0
    if mode == "full":
        return tokens
    if mode == "every_n_blocks":
        return tokens / every_n_blocks
    if mode == "selective":
        down = 1.0 if float8 else 0.0
        return tokens + qkv + scores + attention + projection + mlp_ratio + down
    if mode == "none":
        normed = 3.0 if qk_norm else 0.0  # q, k, and the output once more, in the order of heads
        middle = tokens  # the residual stream between attention and MLP
        before = tokens + norm + qkv + normed + scores + attention
        return before + middle + norm + 2 * mlp_ratio  # before and after GELU
    raise ValueError(
        f'activation_checkpoint.mode = "{mode}": what a block keeps is known for the other modes'
    )


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
