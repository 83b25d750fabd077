"""Scores as xarray Datasets in WeatherBench2's form: a data variable a variable, levels as a dimension."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from datasets.variables import split_name, units


def by_variable(
    values: np.ndarray, dims: Sequence[str], variables: Sequence[str], coords: Mapping[str, Any]
) -> xr.Dataset:
    """An array with a dimension "variable" -> a Dataset: "geopotential:500" is level 500 of "geopotential".

    Variables without a level have no dimension `level`; where variables have different levels the others are
    NaN. Attribute `units` is the variable's.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(variables):
        places.setdefault(split_name(name)[0], []).append(place)
    array = xr.DataArray(values, dims=list(dims), coords=dict(coords))
    found = [_one_variable(array, name, rows, variables) for name, rows in places.items()]
    merged = xr.merge(found, join="outer", compat="override", combine_attrs="drop")
    for name, rows in places.items():  # which the merge has dropped
        merged[name].attrs["units"] = wind_units(variables[rows[0]])
    return merged


def _one_variable(array: xr.DataArray, name: str, rows: list[int], variables: Sequence[str]) -> xr.Dataset:
    levels = [split_name(variables[row])[1] for row in rows]
    if levels == [None]:
        found = array.isel(variable=rows[0])
    else:
        order = np.argsort(np.asarray(levels, int))
        found = array.isel(variable=[rows[i] for i in order]).rename(variable="level")
        found = found.assign_coords(level=np.asarray(levels, int)[order])
    return found.rename(name).to_dataset()


def wind_units(variable: str) -> str:
    """Units of a variable, or of a wind vector."""
    return "m s-1" if "wind_vector" in variable else units(variable)


def lead_coordinate(leads: np.ndarray) -> np.ndarray:
    """Leads as WeatherBench2's lead_time: timedelta64[ns]."""
    return leads.astype("timedelta64[ns]")
