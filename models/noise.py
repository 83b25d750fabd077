"""Random numbers of samples: Gaussian noise as input channels, which is the difference between the members of
an ensemble, the branches that stochastic depth drops, and how samples are turned.

Numbers are a hash of int64 keys on the device. A generator would have to be seeded by the host, which would
wait for the device, and would draw different numbers on a GPU and on a CPU.

Shapes: B states, M members of an ensemble, N channels, H latitudes, W longitudes, h x w blocks of the grid.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

# Points of the grid along each side of a block: half of the channels are as fine as a patch, the others as
# wide as a weather system.
FINE, COARSE = 4, 16
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64, the integer type of torch: products wrap around
FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
BITS = 24  # of a uniform number: those of float32
UNIT = 2**BITS  # of the factors of branches


def hash64(keys: Tensor, number: Tensor | int) -> Tensor:
    """Return element `number` of each key's stream of random int64, itself a key; shapes are broadcast.

    SplitMix64 (Steele, Lea and Flood 2014).
    """
    offset = (number + 1) * GOLDEN
    x = keys + ((offset + 2**63) % 2**64 - 2**63 if isinstance(offset, int) else offset)
    for shift, factor in FACTORS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros: `>>` of int64 would fill with the sign bit."""
    return (bits >> places) & (2 ** (64 - places) - 1)


def noise_keys(seed: int, step: int, times: Tensor, members: Tensor) -> Tensor:
    """Return keys (B,) of forecasts from dates `times` (B,), seconds since 1970, of `members` (B,) from 0 on.

    step: number of the training step, from 1 on, so that each step has different noise; 0 for forecasts.
    """
    return hash64(hash64(hash64(torch.full_like(times, seed), step), times), members)


def keys_of_members(seed: int, step: int, times: Tensor, num_members: int) -> Tensor:
    """Return keys (B M,) of all members of each date (B,), members of a date in sequence."""
    members = torch.arange(num_members, device=times.device).repeat(len(times))
    return noise_keys(seed, step, times.repeat_interleave(num_members), members)


def branch_factors(keys: Tensor, blocks: range, rate: float) -> Tensor:
    """Return the factors (L, 2, B, 1, 1), int64 in units of 1 / UNIT, of the two branches of L blocks.

    keys (B,): one of each sample; blocks: indices of these blocks in the model; rate x index: fraction of
    the samples that lose a branch. Integers, because FSDP rounds floating-point arguments of a block to the
    dtype of its parameters, and the mean would not be 1.
    """
    index = torch.arange(blocks.start, blocks.stop, device=keys.device)[:, None]
    streams = 2 * index + torch.arange(2, device=keys.device)  # (L, 2)
    bits = _shift_right(hash64(keys, streams[..., None]), 64 - BITS)  # (L, 2, B)
    rates = rate * index[..., None].double()
    is_kept = bits >= (rates * 2**BITS).round()
    return torch.where(is_kept, (UNIT / (1 - rates)).round().long(), 0)[..., None, None]


def uniform_integers(keys: Tensor, limit: int) -> Tensor:
    """Return int64 from 0 to `limit` - 1, one of each key (B,); limit: at most 2^BITS."""
    return _shift_right(keys, 64 - BITS) * limit >> BITS


class BlockNoise(nn.Module):
    """White noise in the centres of blocks of `size` points, linear between them, of variance 1."""

    rows: Tensor
    columns: Tensor
    weight_of_rows: Tensor
    weight_of_columns: Tensor

    def __init__(self, num_channels: int, grid_shape: tuple[int, int], size: int, periodic: bool) -> None:
        super().__init__()
        self.shape = (num_channels, *(math.ceil(points / size) for points in grid_shape))  # (N, h, w)
        sides = zip(("rows", "columns"), grid_shape, self.shape[1:], (False, periodic), strict=True)
        for name, points, blocks, wraps in sides:
            indices, weights = between(points, blocks, wraps)  # (2, points) each
            weight = torch.tensor(weights, dtype=torch.float32)
            self.register_buffer(name, torch.from_numpy(indices), persistent=False)
            self.register_buffer(f"weight_of_{name}", weight, persistent=False)

    def draw(self, keys: Tensor) -> Tensor:
        """keys (B,) -> (B, N, H, W)."""
        # -- numbers of mean 0 and variance 1, by the transform of Box and Muller
        bits = hash64(keys[:, None], torch.arange(math.prod(self.shape), device=keys.device))
        above_zero = (_shift_right(bits, 64 - BITS) + 1).float() * 2.0**-BITS  # (0, 1]
        angle = (bits & (2**BITS - 1)).float() * (2 * math.pi * 2.0**-BITS)
        values = ((-2 * above_zero.log()).sqrt() * angle.cos()).unflatten(1, self.shape)  # (B, N, h, w)
        # -- linear between the centres
        # Indexing, not matrix products, which would round to TF32 on a GPU.
        (first, second), weights = self.rows, self.weight_of_rows[..., None]
        values = values[..., first, :] * weights[0] + values[..., second, :] * weights[1]  # (B, N, H, w)
        (first, second), weights = self.columns, self.weight_of_columns
        return values[..., first] * weights[0] + values[..., second] * weights[1]


def between(points: int, blocks: int, periodic: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the two nearest blocks of each point (2, points) and their weights (2, points).

    The weights are the linear ones, over the root of the sum of their squares. Points beyond the centre of
    the last block have that block twice, with weights of sum 1.
    """
    position = (np.arange(points) + 0.5) * blocks / points - 0.5
    first = np.floor(position).astype(np.int64)
    pair, part = np.stack([first, first + 1]), position - first
    pair = pair % blocks if periodic else pair.clip(0, blocks - 1)
    weights = np.stack([1 - part, part])
    is_single = pair[0] == pair[1]
    return pair, weights / np.where(is_single, 1.0, np.sqrt(np.square(weights).sum(axis=0)))


def noise_parts(num_channels: int) -> list[tuple[int, bool, int]]:
    """Return block size, constancy over the steps of a forecast, and number of channels of each kind.

    Half of the channels are fine and half coarse; half of either is new at each step.
    """
    fine, coarse = num_channels - num_channels // 2, num_channels // 2
    parts = [
        (FINE, False, fine - fine // 2),
        (FINE, True, fine // 2),
        (COARSE, False, coarse // 2),
        (COARSE, True, coarse - coarse // 2),
    ]
    return [part for part in parts if part[-1]]


def noise_names(num_channels: int) -> list[str]:
    """Return the names of the channels, in order."""
    return [
        f"noise {number} over {size} points, {'kept' if constant else 'of a step'}"
        for size, constant, count in noise_parts(num_channels)
        for number in range(count)
    ]


class NoiseFields(nn.Module):
    """Channels of Gaussian noise of mean 0 and variance 1 at every point.

    Noise that is white in time describes the error of a step, but not errors that are common to all steps of
    a forecast: the spread would grow as the root of the lead time, errors grow faster. Half of the channels
    are therefore constant over a forecast, the limit of stochastic physics with noise that decorrelates in
    hours to weeks (SPPT; Leutbecher et al. 2017).
    """

    def __init__(self, num_channels: int, grid_shape: tuple[int, int], periodic: bool) -> None:
        """periodic: the longitudes wrap around."""
        super().__init__()
        self.num_channels, self.parts = num_channels, noise_parts(num_channels)
        blocks = [BlockNoise(count, grid_shape, size, periodic) for size, _, count in self.parts]
        self.blocks = nn.ModuleList(blocks)

    def draw(self, keys: Tensor, times: Tensor) -> Tensor:
        """Keys of forecasts (B,) and dates of their states (B,), seconds since 1970 -> (B, N, H, W)."""
        keys_of_step, fields = hash64(keys, times), []
        for number, (block, (_, constant, _)) in enumerate(zip(self.blocks, self.parts, strict=True)):
            assert isinstance(block, BlockNoise)
            fields.append(block.draw(hash64(keys if constant else keys_of_step, number)))
        return torch.cat(fields, dim=1)
