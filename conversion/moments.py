"""Mean, spread and range of a variable's fields. Sums over dates are exact, so that they are the same in any
order: a store that was appended to has the bytes of one that was written at once.

Shapes: n dates, H latitudes, W longitudes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Weighted by area; of cells that have a value. Without any the weight is 0, and nothing else counts."""

    weight: Fraction = Fraction(0)  # of all cells and dates
    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)
    minimum: float = 0.0
    maximum: float = 0.0

    @classmethod
    def of(cls, values: np.ndarray, area: np.ndarray) -> Self:
        """values (n, H, W), NaN where missing; area (H,)."""
        valid = np.isfinite(values)
        finite = values if valid.all() else values[valid]
        if not finite.size:
            return cls()
        exact = np.where(valid, values, 0).astype(np.float64)
        rows = valid.sum(axis=2), exact.sum(axis=2), np.square(exact).sum(axis=2)  # (n, H) each
        of_dates = [(area * each).sum(axis=1).tolist() for each in rows]
        weight, total, squares = (sum(map(Fraction, sums), Fraction(0)) for sums in of_dates)
        return cls(weight, total, squares, float(finite.min()), float(finite.max()))

    @classmethod
    def read(cls, plain: Sequence[Any]) -> Self:
        """The inverse of `plain`."""
        weight, total, squares, minimum, maximum = plain
        return cls(Fraction(weight), Fraction(total), Fraction(squares), minimum, maximum)

    def plain(self) -> list[Any]:
        """For JSON: sums as fractions in text."""
        return [str(self.weight), str(self.total), str(self.squares), self.minimum, self.maximum]

    def merged(self, other: Self) -> Self:
        """Of both."""
        if not self.weight or not other.weight:
            return self if self.weight else other
        return type(self)(
            self.weight + other.weight,
            self.total + other.total,
            self.squares + other.squares,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    @property
    def mean(self) -> float:
        """NaN without a value."""
        return float(self.total / self.weight) if self.weight else math.nan

    @property
    def deviation(self) -> float:
        """NaN without a value."""
        if not self.weight:
            return math.nan
        return math.sqrt(max(Fraction(0), self.squares / self.weight - (self.total / self.weight) ** 2))
