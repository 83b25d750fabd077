"""Fields in float16 beside an offset and a scale: half the bytes, and an error that is known.

stored = (value - offset) / scale, rounded to 11 significant bits. The scale is a power of two near the
standard deviation and the offset a multiple of it near the mean: both are exact in binary, what is decoded
twice is the same, and a value of zero stays exactly zero.
"""

import math
from dataclasses import dataclass

import numpy as np

from errors import DataError

RELATIVE, ABSOLUTE = 2.0**-11, 2.0**-25  # of a rounding to float16: of the number, and of small ones
FLOAT32 = 2.0**-23  # of what is decoded, which is rounded to float32
LARGEST_RMS = 1 / 200  # of the scale, over one field: more is no longer far below what weather models miss
STATEMENT = (
    "decoded values differ from the source's by at most 2^-11 |value - add_offset| + 2^-25 scale_factor "
    "+ 2^-23 |value|; every field is checked when it is written"
)


@dataclass(frozen=True)
class Packed:
    """value = stored * scale + offset."""

    scale: float
    offset: float

    def encode(self, values: np.ndarray) -> np.ndarray:
        """float32 -> float16; NaN stays. Overflows become infinite."""
        with np.errstate(over="ignore", invalid="ignore"):
            return ((values.astype(np.float64) - self.offset) / self.scale).astype(np.float16)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """float16 -> float32, as an archive reads it."""
        return (stored.astype(np.float64) * self.scale + self.offset).astype(np.float32)


def choose_packing(mean: float, deviation: float) -> Packed:
    """For values of this mean and standard deviation; 0 or NaN where they are not known."""
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        return Packed(1.0, 0.0)
    spread = deviation or abs(mean) / 1024 or 1.0
    scale = 2.0 ** round(math.log2(spread))
    return Packed(scale, round(mean / scale) * scale)


def largest_error(values: np.ndarray, stored: np.ndarray, packed: Packed) -> float:
    """The largest difference between a field (H, W) float32 and what will be read. DataError: it is too
    large, with a reason that ends in the way out.
    """
    finite = np.isfinite(values)
    if not finite.any():
        return 0.0
    if not finite.all():
        values, stored = values[finite], stored[finite]
    exact, found = values.astype(np.float64), packed.decode(stored).astype(np.float64)
    error = np.abs(found - exact)
    allowed = RELATIVE * np.abs(exact - packed.offset) + ABSOLUTE * packed.scale + FLOAT32 * np.abs(exact)
    way_out = f"in float16 of scale {packed.scale:g}: write it with --dtype float32"
    if not np.isfinite(found).all():
        raise DataError(f"its value {exact[~np.isfinite(found)][0]:g} is too large {way_out}")
    rms = float(np.sqrt(np.mean(error**2)))
    if (error > allowed).any() or rms > LARGEST_RMS * packed.scale + FLOAT32 * np.abs(exact).max():
        raise DataError(f"it would be off by {error.max():g} (rms {rms:g}) {way_out}")
    return float(error.max())
