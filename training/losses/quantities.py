"""Quantities with a global mean that can be conserved: weighted sums of variables.

A quantity has the name of a variable, for that variable's own mean, or a name in `QUANTITIES`. The vertical
integral of a column of air is the trapezoidal rule over the predicted pressure levels, from the lowest to the
highest: hydrostatic, dp / g is the mass of a layer (Trenberth 1991, J. Climate 4, 707-722). Air below the
lowest or above the highest level is left out, and levels below the ground count as if they were air.
"""

from collections.abc import Sequence

import numpy as np

from datasets.variables import split_name

GRAVITY = 9.80665  # m s-2
# Name -> variable -> weight of a unit of it. The first variable is the one that is shifted. In Pa: the weight
# of the air without its vapour (Trenberth and Smith 2005); clouds are a hundredth of the vapour.
QUANTITIES: dict[str, dict[str, float]] = {
    "dry_mass": {"surface_pressure": 1.0, "total_column_water_vapour": -GRAVITY},
    "total_water": {},  # of specific humidity on the predicted levels: `terms_of`
}
HUMIDITY, PASCAL = "specific_humidity", 100.0  # a hPa


def terms_of(quantity: str, variables: Sequence[str]) -> dict[str, float]:
    """Return the weight of each variable in a quantity, the lowest level first; {} if there are too few."""
    if quantity != "total_water":
        return QUANTITIES.get(quantity, {quantity: 1.0})
    levels = sorted(level for name, level in map(split_name, variables) if name == HUMIDITY and level)
    if len(levels) < 2:
        return {}
    # The mass of air (kg m-2) of each of ascending pressure levels (hPa), trapezoidal.
    pressure = PASCAL * np.asarray(levels, np.float64)
    borders = np.concatenate([pressure[:1], (pressure[1:] + pressure[:-1]) / 2, pressure[-1:]])
    masses = zip(levels, (np.diff(borders) / GRAVITY).tolist(), strict=True)
    return {f"{HUMIDITY}:{level}": mass for level, mass in reversed(list(masses))}


def shifted_variable(quantity: str, variables: Sequence[str]) -> str:
    """Return the variable that is shifted to conserve a quantity."""
    return next(iter(terms_of(quantity, variables)))


def variables_of(quantities: Sequence[str], variables: Sequence[str]) -> list[str]:
    """Return the variables in the sums of the quantities, each once."""
    return list(dict.fromkeys(name for quantity in quantities for name in terms_of(quantity, variables)))


def coefficients(quantities: Sequence[str], change_std: dict[str, float]) -> np.ndarray:
    """Return the change (Q, n) float64 of each quantity with each of `variables_of`.

    Variables are in units of the deviation of their change over a step, `change_std`; quantities in such
    units of the variable that is shifted.
    """
    names = list(change_std)
    result = np.zeros((len(quantities), len(variables := variables_of(quantities, names))))
    for row, quantity in enumerate(quantities):
        terms, first = terms_of(quantity, names), shifted_variable(quantity, names)
        for name, weight in terms.items():
            scale = terms[first] * change_std[first]
            result[row, variables.index(name)] = weight * change_std[name] / scale
    return result
