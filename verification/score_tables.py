"""Scores as xarray Datasets in WeatherBench2's form: a data variable a variable, levels as a dimension."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from datasets.variables import group_levels, split_name, units


def by_variable(
    values: np.ndarray,
    dims: Sequence[str],
    variables: Sequence[str],
    coords: Mapping[str, Any],
    own_units: Mapping[str, str],
) -> xr.Dataset:
    """An array with a dimension "variable" -> a Dataset: "geopotential:500" is level 500 of "geopotential".

    Variables without a level have no dimension `level`; where variables have different levels the rest are
    NaN. Attribute `units` is the variable's, or its own where the project does not know it: own_units.
    """
    array = xr.DataArray(values, dims=list(dims), coords=dict(coords))
    found: list[xr.Dataset] = []
    for name, rows in group_levels(variables).items():
        if None in rows:
            field = array.isel(variable=rows[None])
        else:
            field = array.isel(variable=list(rows.values())).rename(variable="level")
            field = field.assign_coords(level=list(rows)).sortby("level")
        found.append(field.rename(name).to_dataset())
    merged = xr.merge(found, join="outer", compat="override", combine_attrs="drop")
    known = {split_name(name)[0]: text for name, text in own_units.items()}
    for name, field in merged.items():
        own = units(str(name)) or known.get(str(name), "")
        field.attrs["units"] = "m s-1" if "wind_vector" in str(name) else own
    return merged


# Metrics without units, and those in the square of their variable's.
PURE = (
    "acc",
    "acc_ratio_of_means",
    "spread_skill",
    "spread_skill_ratio",
    "unbiased_spread_skill_ratio",
    "num_dates",
)
SQUARES = ("mse", "variance", "anomaly_covariance", "forecast_anomaly_square", "truth_anomaly_square")


def power_of_units(metric: str) -> int:
    """To which power a metric has the units of its variable: "rmse" 1, "mse" 2, "acc" 0."""
    return 0 if metric in PURE else 2 if metric in SQUARES else 1


def lead_hours(scores: xr.Dataset) -> list[int]:
    """Leads of a Dataset of scores, in hours."""
    return [int(lead / np.timedelta64(1, "h")) for lead in scores["lead_time"].values]


def variable_names(scores: xr.Dataset) -> list[str]:
    """Variables with their levels, "geopotential:500", that have any score."""
    names = []
    for name, array in scores.data_vars.items():
        if "level" not in array.dims:
            names.append(str(name))
            continue
        finite = array.notnull().any(dim=[dim for dim in array.dims if dim != "level"])
        names += [f"{name}:{int(level)}" for level in array["level"].values[finite.values]]
    return names


def one_variable(scores: xr.Dataset, variable: str) -> xr.DataArray:
    """ "geopotential:500" of a Dataset, without dimension `level`. KeyError where it is not there."""
    name, level = split_name(variable)
    return scores[name] if level is None else scores[name].sel(level=level)


def units_of(scores: xr.Dataset, variable: str, metric: str = "") -> str:
    """Units of a variable, or of a metric of it: K, K2 of the mse; "" of a pure number."""
    own, power = str(scores[split_name(variable)[0]].attrs.get("units", "")), power_of_units(metric)
    return own if power == 1 else squared(own) if power == 2 else ""


def squared(units: str) -> str:
    """ "m s-1" -> "m2 s-2", "K" -> "K2"; pure numbers stay ("1")."""
    words = [re.fullmatch(r"(.*?[^\d-])(-?\d+)?", word) for word in units.split()]
    return " ".join(f"{word[1]}{2 * int(word[2] or 1)}" if word else "1" for word in words)


def times_metres(units: str) -> str:
    """Return "m3 s-2" for "m2 s-2", "K2 m" for "K2"."""
    words = [] if units == "1" else units.split()
    powers = [int(word[1:] or 1) for word in words if re.fullmatch(r"m\d*", word)]
    rest = [word for word in words if not re.fullmatch(r"m\d*", word)]
    return " ".join([f"m{powers[0] + 1}", *rest] if powers else [*rest, "m"])


def select(scores: xr.Dataset, metric: str, variable: str) -> xr.DataArray:
    """A score by `lead_time`: of the whole globe, or of the first region where that was not asked for.

    KeyError where there is no such score.
    """
    regions = scores["region"].values
    region = "global" if "global" in regions else regions[0]
    return one_variable(scores, variable).sel(metric=metric, region=region)


def dates_of_leads(num_dates: Sequence[int], lead_hours: Sequence[int]) -> str:
    """Return "47 initial dates", or "47 initial dates at 6 h, 7 at 240 h" where the leads differ."""
    first, last, fewest, most = num_dates[0], num_dates[-1], min(num_dates), max(num_dates)
    if fewest == most:
        return count_dates(first)
    between = f", {fewest} to {most} in between" if {fewest, most} != {first, last} else ""
    return f"{count_dates(first)} at {lead_hours[0]} h, {last} at {lead_hours[-1]} h{between}"


def count_dates(number: int) -> str:
    """Return "1 initial date" or "47 initial dates"."""
    return f"{number} initial date{'s' * (number != 1)}"
