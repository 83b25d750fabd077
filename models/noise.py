"""Gaussian noise that a model is given beside the state: what the members of its ensemble differ by.

Noise is a function of int64 keys, hashed where the dates are, on the device: a generator would have to be
seeded by the host, which would wait for the device, and draws other numbers on a GPU than on a CPU.

Shapes: B states, M members of an ensemble, N channels, H latitudes, W longitudes, h x w blocks of the grid.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

# Points of the grid along each side of a block: white noise on the corners of half of the channels' blocks
# is as fine as a patch, that of the other half as wide as a weather system.
FINE, COARSE = 4, 16
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64, which torch has: products wrap round
FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
BITS = 24  # of a uniform number: those of float32


def hashed(keys: Tensor, number: Tensor | int) -> Tensor:
    """int64, of the shape that both have together: element `number` of each key's stream of random bits,
    which is a key in its turn. SplitMix64 (Steele, Lea and Flood 2014).
    """
    offset = (number + 1) * GOLDEN
    x = keys + ((offset + 2**63) % 2**64 - 2**63 if isinstance(offset, int) else offset)
    for shift, factor in FACTORS:
        x = (x ^ shifted(x, shift)) * factor
    return x ^ shifted(x, 31)


def shifted(bits: Tensor, places: int) -> Tensor:
    """To the right, with zeros from the left: of int64, `>>` repeats the sign."""
    return (bits >> places) & (2 ** (64 - places) - 1)


def noise_keys(seed: int, step: int, times: Tensor, members: Tensor) -> Tensor:
    """(B,): keys of forecasts from dates `times` (B,), seconds since 1970, of `members` (B,), counted from 0.

    step: of the training, from 1 on, so that each has noise of its own; 0 for forecasts.
    """
    return hashed(hashed(hashed(torch.full_like(times, seed), step), times), members)


def keys_of_members(seed: int, step: int, times: Tensor, num_members: int) -> Tensor:
    """(B M,): the same of all members of each date (B,), which stand beside each other."""
    members = torch.arange(num_members, device=times.device).repeat(len(times))
    return noise_keys(seed, step, times.repeat_interleave(num_members), members)


def normal_numbers(keys: Tensor, count: int) -> Tensor:
    """(B, count) float32 of mean 0 and variance 1, by Box and Muller's transform; a function of each key."""
    bits = hashed(keys[:, None], torch.arange(count, device=keys.device))
    above_zero = (shifted(bits, 64 - BITS) + 1).float() * 2.0**-BITS  # (0, 1]
    angle = (bits & (2**BITS - 1)).float() * (2 * math.pi * 2.0**-BITS)
    return (-2 * above_zero.log()).sqrt() * angle.cos()


class BlockNoise(nn.Module):
    """White noise in the centres of blocks of `size` points, linear between them, of variance 1."""

    rows: Tensor
    columns: Tensor
    weight_of_rows: Tensor
    weight_of_columns: Tensor

    def __init__(self, num_channels: int, grid_shape: tuple[int, int], size: int, periodic: bool) -> None:
        super().__init__()
        self.shape = (num_channels, *(math.ceil(points / size) for points in grid_shape))  # (N, h, w)
        for name, points, blocks, round in zip(
            ("rows", "columns"), grid_shape, self.shape[1:], (False, periodic), strict=True
        ):
            indices, weights = between(points, blocks, round)
            self.register_buffer(name, torch.from_numpy(indices), persistent=False)  # (2, points)
            weight = torch.tensor(weights, dtype=torch.float32)
            self.register_buffer(f"weight_of_{name}", weight, persistent=False)  # (2, points)

    def draw(self, keys: Tensor) -> Tensor:
        """keys (B,) -> (B, N, H, W)."""
        values = normal_numbers(keys, math.prod(self.shape)).unflatten(1, self.shape)  # (B, N, h, w)
        # By indices, not by products with matrices: these would round as TF32 on a GPU.
        (first, second), weights = self.rows, self.weight_of_rows[..., None]
        values = values[..., first, :] * weights[0] + values[..., second, :] * weights[1]  # (B, N, H, w)
        (first, second), weights = self.columns, self.weight_of_columns
        return values[..., first] * weights[0] + values[..., second] * weights[1]


def between(points: int, blocks: int, periodic: bool) -> tuple[np.ndarray, np.ndarray]:
    """For each point the two nearest blocks (2, points), and what each counts (2, points): the linear
    weights, over the root of the sum of their squares. Beyond the last block's centre it counts alone.
    """
    position = (np.arange(points) + 0.5) * blocks / points - 0.5
    first = np.floor(position).astype(np.int64)
    pair, part = np.stack([first, first + 1]), position - first
    pair = pair % blocks if periodic else pair.clip(0, blocks - 1)
    weights = np.stack([1 - part, part])
    alone = pair[0] == pair[1]
    return pair, weights / np.where(alone, 1.0, np.sqrt(np.square(weights).sum(axis=0)))


def parts(num_channels: int) -> list[tuple[int, bool, int]]:
    """Points along a block's side, whether a forecast keeps it, and channels: half of them fine, half coarse,
    half of either new at each step.
    """
    fine, coarse = num_channels - num_channels // 2, num_channels // 2
    counts = [
        (FINE, fine - fine // 2),
        (FINE, fine // 2),
        (COARSE, coarse // 2),
        (COARSE, coarse - coarse // 2),
    ]
    found = [(size, number % 2 == 1, count) for number, (size, count) in enumerate(counts)]
    return [part for part in found if part[-1]]


def noise_names(num_channels: int) -> list[str]:
    """Of the channels, in their order."""
    return [
        f"noise {number} over {size} points, {'kept' if kept else 'of a step'}"
        for size, kept, count in parts(num_channels)
        for number in range(count)
    ]


class NoiseFields(nn.Module):
    """Channels of Gaussian noise of mean 0 and variance 1 at every point.

    White in time it could say how wrong a step is, but not that a model errs alike in all steps of a
    forecast: the spread of members that only such noise tells apart grows as the root of the lead, errors
    grow faster. Half of the channels are therefore the same in all steps: the far end of stochastic physics,
    whose noise decorrelates in hours to weeks (SPPT; Leutbecher et al. 2017).
    """

    def __init__(self, num_channels: int, grid_shape: tuple[int, int], periodic: bool) -> None:
        """periodic: the longitudes go all round."""
        super().__init__()
        self.num_channels, self.parts = num_channels, parts(num_channels)
        blocks = [BlockNoise(count, grid_shape, size, periodic) for size, _, count in self.parts]
        self.blocks = nn.ModuleList(blocks)

    def draw(self, keys: Tensor, times: Tensor) -> Tensor:
        """Keys of forecasts (B,) and dates of their states (B,), seconds since 1970 -> (B, N, H, W)."""
        of_step, found = hashed(keys, times), []
        for number, (block, (_, kept, _)) in enumerate(zip(self.blocks, self.parts, strict=True)):
            assert isinstance(block, BlockNoise)
            found.append(block.draw(hashed(keys if kept else of_step, number)))
        return torch.cat(found, dim=1)
