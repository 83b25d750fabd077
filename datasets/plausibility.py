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
Findings = dict[tuple[str, str], tuple[int, np.datetime64]]  # (variable, what) -> values, first date
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
        refuse_fill(values[np.isfinite(values)], name, date)


def refuse_fill(finite: np.ndarray, name: str, date: Any) -> None:
    """The same of one variable's values that are numbers."""
    fill = undeclared_fill(finite, name)
    if fill is not None:
        count = np.count_nonzero(finite == fill)
        what = f"{name} is {fill:g} in {count} cells at {date}: a missing value that nothing declares"
        raise DataError(f"data.path: {what}; give the variable the attribute _FillValue = {fill:g}")


def undeclared_fill(finite: np.ndarray, name: str) -> float | None:
    """The one of a variable's values that are numbers which can only stand for a missing one."""
    if not finite.size:
        return None
    low, high = finite.min(), finite.max()
    fill = next((v for v in (low, high) if abs(v) > LARGEST), None)
    least, most = RANGES.get(split_name(name)[0], (np.inf, -np.inf))
    for known in FILLS if fill is None else ():
        if low <= known <= high and not least <= known <= most and np.count_nonzero(finite == known) > 1:
            fill = known
    return fill


def unlikely(values: np.ndarray, finite: np.ndarray, name: str) -> dict[str, int]:
    """What -> how many values are it. finite: those of `values` that are numbers."""
    found = {"infinite": int(np.isinf(values).sum()) if finite.size < values.size else 0}
    low, high = RANGES.get(split_name(name)[0], (-np.inf, np.inf))
    if finite.size and not (low <= finite.min() and finite.max() <= high):
        outside = int(((finite < low) | (finite > high)).sum())
        found[f"outside {low:g} to {high:g} {units(name)}"] = outside
    return {what: count for what, count in found.items() if count}


def say_findings(found: Findings) -> None:
    """One line for each variable and kind."""
    for (name, what), (count, first) in found.items():
        hint = "; are its units others?" if what.startswith("outside") else "; counted as missing"
        logger.warning(f"data.path: {name}: {count} values {what}, the first at {first}{hint}")


def say_missing(variables: Sequence[str], dates: np.ndarray, missing: np.ndarray) -> None:
    """A line for each variable that has not the same number of cells `missing` (n, V) on all `dates` (n,)."""
    for name, counts in zip(variables, missing.T, strict=True):
        other = np.flatnonzero(counts != np.bincount(counts).argmax())
        if len(other):
            first = f"the first at {dates[other[0]]}, {counts[other[0]]} cells"
            logger.warning(f"data.path: {name}: {len(other)} dates miss other values than most, {first}")
