"""Quantities with a global mean that can be conserved: sums of variables, each times a number.

A quantity has the name of a variable, for its own mean, or a name in `QUANTITIES`. Of
columns of air the vertical integral is the trapezoidal rule over the pressure levels that are predicted, from
the lowest to the highest: hydrostatic, dp / g is the mass of a layer (Trenberth 1991, J. Climate 4, 707-722).
What lies below the lowest level or above the highest counts nothing, and levels below the ground count as if
they were air.
"""

from collections.abc import Sequence

import numpy as np

from datasets.variables import split_name

GRAVITY = 9.80665  # m s-2
HEAT = 1004.709  # J kg-1 K-1: of dry air at constant pressure; this and the next as the IFS has them
VAPORIZATION = 2.5008e6  # J kg-1
# Name -> variable -> what a unit of it counts. The first is the one that is corrected. In Pa: the weight of
# the air without its vapour (Trenberth and Smith 2005); clouds are a hundredth of the vapour.
QUANTITIES: dict[str, dict[str, float]] = {
    "dry_mass": {"surface_pressure": 1.0, "total_column_water_vapour": -GRAVITY},
    "total_water": {},  # of specific humidity on the levels that there are: `layers`
    "energy": {},  # c_p T + L q + (u2 + v2) / 2 of these: enthalpy has a column's potential energy in it
}
NEEDS = {"total_water": "specific_humidity", "energy": "temperature, u_ and v_component_of_wind"}
HUMIDITY, TEMPERATURE, PASCAL = "specific_humidity", "temperature", 100.0  # a hPa
WINDS = ("u_component_of_wind", "v_component_of_wind")


def layers(levels: Sequence[int]) -> np.ndarray:
    """(n,) kg m-2: mass of air that each of ascending pressure levels (hPa) stands for, trapezoidal."""
    pressure = PASCAL * np.asarray(levels, np.float64)
    borders = np.concatenate([pressure[:1], (pressure[1:] + pressure[:-1]) / 2, pressure[-1:]])
    return np.diff(borders) / GRAVITY


def masses_of(variables: Sequence[str], *names: str) -> dict[int, float]:
    """Level -> kg m-2, of the levels on which all of `names` are predicted, the lowest first, where most is;
    empty where they are less than two.
    """
    levels = sorted(set.intersection(*(levels_of(name, variables) for name in names)))
    if len(levels) < 2:
        return {}
    return dict(reversed(list(zip(levels, layers(levels).tolist(), strict=True))))


def levels_of(wanted: str, variables: Sequence[str]) -> set[int]:
    return {level for name, level in map(split_name, variables) if name == wanted and level}


def terms_of(quantity: str, variables: Sequence[str]) -> dict[str, float]:
    """Variable -> what a unit of it counts, of those that are predicted; empty: they are too few."""
    if quantity == "total_water":
        return {f"{HUMIDITY}:{level}": mass for level, mass in masses_of(variables, HUMIDITY).items()}
    if quantity != "energy":
        return QUANTITIES.get(quantity, {quantity: 1.0})
    masses, moist = masses_of(variables, TEMPERATURE, *WINDS), levels_of(HUMIDITY, variables)
    heat = {f"{TEMPERATURE}:{level}": HEAT * mass for level, mass in masses.items()}
    return heat | {f"{HUMIDITY}:{level}": VAPORIZATION * masses[level] for level in masses if level in moist}


def squares_of(quantity: str, variables: Sequence[str]) -> dict[str, float]:
    """Variable -> what half its square counts: the kinetic part of energy."""
    if quantity != "energy":
        return {}
    masses = masses_of(variables, TEMPERATURE, *WINDS)
    return {f"{wind}:{level}": mass for level, mass in masses.items() for wind in WINDS}


def corrected(quantity: str, variables: Sequence[str]) -> str:
    """The variable that is shifted to keep it."""
    return next(iter(terms_of(quantity, variables)))


def variables_of(quantities: Sequence[str], variables: Sequence[str]) -> list[str]:
    """All that any of them is a sum of, each once; `squares_of` not counted."""
    return list(dict.fromkeys(name for each in quantities for name in terms_of(each, variables)))


def coefficients(quantities: Sequence[str], change_std: dict[str, float]) -> np.ndarray:
    """(Q, n) float64: what 1 of each of `variables_of`, as standard deviations of its change over a
    step, changes each quantity by; in such units of the variable that is corrected.
    """
    there = list(change_std)
    found = np.zeros((len(quantities), len(variables := variables_of(quantities, there))))
    for row, quantity in enumerate(quantities):
        terms, first = terms_of(quantity, there), corrected(quantity, there)
        for name, factor in terms.items():
            found[row, variables.index(name)] = factor * change_std[name] / (terms[first] * change_std[first])
    return found
