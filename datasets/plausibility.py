"""Values that are no weather: fill values that a file does not declare, infinities, other units than ours.

What cannot be meant is refused; what is only unlikely is counted and said once, with its first date.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from archives.variables import split_name, units
from errors import DataError

logger = logging.getLogger(__name__)
LARGEST = (
    1e15  # of anything in the units of analyses; NetCDF fills with 9.96921e36, others with 1e20 and 1e30
)
FILLS = (-9999.0, -999.0, 9999.0, -32767.0, -32768.0)  # customary ones that could be values
# Wide of what analyses hold on any level, in the units of archives/variables.py.
RANGES = {
    "geopotential": (-1.5e4, 6e5),
    "temperature": (150, 350),
    "u_component_of_wind": (-200, 200),
    "v_component_of_wind": (-200, 200),
    "specific_humidity": (-1e-3, 0.05),
    "vertical_velocity": (-50, 50),
    "relative_humidity": (-20, 200),
    "2m_temperature": (170, 340),
    "2m_dewpoint_temperature": (150, 320),
    "10m_u_component_of_wind": (-120, 120),
    "10m_v_component_of_wind": (-120, 120),
    "mean_sea_level_pressure": (8.5e4, 1.1e5),
    "surface_pressure": (4e4, 1.15e5),
    "total_column_water_vapour": (-1, 150),
    "sea_surface_temperature": (260, 320),
    "total_cloud_cover": (-0.01, 1.01),
}


def refuse_fills(field: np.ndarray, variables: Sequence[str], date: Any) -> None:
    """field (V, H, W). DataError naming variable, value and date: a fill value that is not declared."""
    for values, name in zip(field, variables, strict=True):
        fill = undeclared_fill(values, name)
        if fill is not None:
            count = np.count_nonzero(values == fill)
            what = f"{name} is {fill:g} in {count} cells at {date}: a missing value that nothing declares"
            raise DataError(f"data.path: {what}; give the variable the attribute _FillValue = {fill:g}")


def undeclared_fill(values: np.ndarray, name: str) -> float | None:
    """The value in a field (H, W) of this variable that can only stand for a missing one."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, high = finite.min(), finite.max()
    fill = next((v for v in (low, high) if abs(v) > LARGEST), None)
    least, most = RANGES.get(split_name(name)[0], (np.inf, -np.inf))
    for known in FILLS if fill is None else ():
        often = low <= known <= high and np.count_nonzero(finite == known) > 1
        fill = known if often and not least <= known <= most else fill
    return fill


class Plausibility:
    """Counts over many dates what is unlikely; `say` ends it."""

    def __init__(self, variables: Sequence[str]) -> None:
        self.variables, self.num_dates = list(variables), 0
        self.found: dict[tuple[str, str], tuple[int, np.datetime64]] = {}  # (variable, what) -> count, date
        self.missing: list[np.ndarray] = []  # cells without a value, (V,) a date
        self.dates: list[np.datetime64] = []

    def look(self, field: np.ndarray, valid: np.ndarray, date: np.datetime64) -> None:
        """field and valid (V, H, W). DataError: a fill value that is not declared."""
        refuse_fills(field, self.variables, date)
        self.missing.append((~valid).sum(axis=(1, 2)))
        self.dates.append(date)
        for values, name in zip(field, self.variables, strict=True):
            self._count(name, "infinite", int(np.isinf(values).sum()), date)
            low, high = RANGES.get(split_name(name)[0], (-np.inf, np.inf))
            with np.errstate(invalid="ignore"):
                outside = np.isfinite(values) & ((values < low) | (values > high))
            self._count(name, f"outside {low:g} to {high:g} {units(name)}", int(outside.sum()), date)

    def _count(self, name: str, what: str, count: int, date: np.datetime64) -> None:
        if count:
            before, first = self.found.get((name, what), (0, date))
            self.found[name, what] = before + count, first

    def say(self) -> None:
        """One line for each variable and kind."""
        for (name, what), (count, first) in self.found.items():
            hint = "; are its units others?" if what.startswith("outside") else "; counted as missing"
            logger.warning(f"data.path: {name}: {count} values {what}, the first at {first}{hint}")
        missing = np.array(self.missing)  # (n, V)
        for name, counts in zip(self.variables, missing.T, strict=True):
            other = np.flatnonzero(counts != np.bincount(counts).argmax())
            if len(other):
                first = f"the first at {self.dates[other[0]]}, {counts[other[0]]} cells"
                logger.warning(f"data.path: {name}: {len(other)} dates miss other values than most, {first}")
