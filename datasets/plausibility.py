"""Implausible values: fill values that a file does not declare, infinities, values in other units.

Impossible values are refused; unlikely ones are counted and logged once, with their first date.
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from datasets.variables import CONVERSIONS, UnitConversion, units, usual_range
from errors import DataError

logger = logging.getLogger(__name__)
# Of anything in the units of analyses; NetCDF fills with 9.96921e36, others with 1e20 and 1e30.
LARGEST = 1e15
FILLS = (-9999.0, -999.0, -999.9, 9999.0, -32767.0, -32768.0)  # customary ones that could be values


def refuse_fills(fields: np.ndarray, variables: Sequence[str], date: Any, path: str) -> None:
    """Raise DataError naming path, variable, value and date if fields (V, H, W) have an undeclared fill."""
    for values, name in zip(fields, variables, strict=True):
        fill = undeclared_fill(values[np.isfinite(values)], name)
        if fill is not None:
            count = np.count_nonzero(values == fill)
            what = f"{name} is {fill:g} in {count} cells at {date}: a missing value that is not declared"
            raise DataError(f"{path!r}: {what}; give the variable the attribute _FillValue = {fill:g}")


def undeclared_fill(finite: np.ndarray, name: str) -> float | None:
    """Return a finite value that can only be an undeclared fill value, None if there is none: a value beyond
    all variables, or a customary fill value outside the range of a known variable.
    """
    if not finite.size:
        return None
    low, high = finite.min(), finite.max()
    if max(abs(low), abs(high)) > LARGEST:
        return low if abs(low) > LARGEST else high
    least, most = usual_range(name)
    known = [v for v in fills_of(name) if low <= v <= high and not least <= v <= most]
    return next((value for value in known if np.count_nonzero(finite == value) > 1), None)


@cache
def fills_of(name: str) -> list[float]:
    """Return customary fills of a variable, unchanged and with its units converted (-9999 degC in K)."""
    conversions = [UnitConversion(), *(c for (_, ours), c in CONVERSIONS.items() if ours == units(name))]
    return [float(np.float32(fill * c.factor + c.offset)) for c in conversions for fill in FILLS]


def implausible_kinds(name: str) -> tuple[str, str]:
    """Return the names of infinite values and of those outside the usual range: "outside 170 to 340 K"."""
    low, high = usual_range(name)
    return "infinite", f"outside {low:g} to {high:g} {units(name)}"


def log_implausible(variables: Sequence[str], dates: np.ndarray, counts: np.ndarray) -> None:
    """Log a line for each variable and kind of implausible values with counts (n, V, 2) on dates (n,)."""
    for name, columns in zip(variables, np.moveaxis(counts, 0, 2), strict=True):
        for kind, column in zip(implausible_kinds(name), columns, strict=True):
            if column.any():
                first = f"the first at {dates[np.flatnonzero(column)[0]]}"
                logger.warning(f"data.path: {name}: {int(column.sum())} values {kind}, {first}")


def check_static(static: dict[str, np.ndarray], path: str) -> None:
    """Log the fraction of missing cells of constant fields (H, W), which are set to the mean of the others.
    Raises DataError for infinite values, undeclared fill values and a field without a value.
    """
    for name, field in static.items():
        refuse_fills(field[None], [name], "all dates", path)
        if np.isinf(field).any():
            number = np.isinf(field).sum()
            raise DataError(f"{path!r}: {name} is infinite in {number} cells; give them a value, or NaN")
        missing = np.isnan(field).mean()
        if missing == 1:
            raise DataError(f"{path!r}: {name} is missing in all cells; leave it out, or give it values")
        if missing:
            logger.warning("%s: %.1f %% of its cells are missing and get the mean", name, 100 * missing)
