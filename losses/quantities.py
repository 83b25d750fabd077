"""Quantities whose global mean can be kept: sums of variables, each times a number.

A quantity is known by the name of a variable, whose own mean is meant, or by a name in `QUANTITIES`.
"""

from collections.abc import Sequence

import numpy as np

GRAVITY = 9.80665  # m s-2
# Name -> variable -> what a unit of it counts. The first is the one that is corrected. In Pa: the weight of
# the air without its vapour (Trenberth and Smith 2005); clouds are a hundredth of the vapour.
QUANTITIES: dict[str, dict[str, float]] = {
    "dry_mass": {"surface_pressure": 1.0, "total_column_water_vapour": -GRAVITY},
}


def terms_of(quantity: str) -> dict[str, float]:
    """Variable -> what a unit of it counts."""
    return QUANTITIES.get(quantity, {quantity: 1.0})


def corrected(quantity: str) -> str:
    """The variable that is shifted to keep it."""
    return next(iter(terms_of(quantity)))


def variables_of(quantities: Sequence[str]) -> list[str]:
    """All that any of them is made of, each once."""
    return list(dict.fromkeys(name for quantity in quantities for name in terms_of(quantity)))


def coefficients(quantities: Sequence[str], change_std: dict[str, float]) -> np.ndarray:
    """(Q, n) float64: what 1 of each of `variables_of(quantities)`, as standard deviations of its change over
    a step, changes each quantity by; in such units of the variable that is corrected.
    """
    found = np.zeros((len(quantities), len(variables := variables_of(quantities))))
    for row, quantity in enumerate(quantities):
        terms, first = terms_of(quantity), corrected(quantity)
        for name, factor in terms.items():
            found[row, variables.index(name)] = factor * change_std[name] / (terms[first] * change_std[first])
    return found
