"""Stores of forecasts and climatologies in WeatherBench2's schema, created empty."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.codecs import BloscCodec

from datasets.grid import Grid
from datasets.variables import STANDARD_NAMES, group_levels, split_name, units

# Attributes of coordinates and stores by the CF conventions, which other tools find them by.
CONVENTIONS = {"Conventions": "CF-1.11"}
COORDINATES = {
    "time": {"standard_name": "forecast_reference_time", "axis": "T"},
    "prediction_timedelta": {"standard_name": "forecast_period"},
    "number": {"standard_name": "realization", "units": "1"},
    "level": {"standard_name": "air_pressure", "units": "hPa", "axis": "Z", "positive": "down"},
    "latitude": {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"},
    "longitude": {"standard_name": "longitude", "units": "degrees_east", "axis": "X"},
}
# Variable of a forecast's store, (time, prediction_timedelta[, number]): what became of each forecast.
STATUS = "forecast_status"
NOT_COMPUTED, COMPUTED, DIVERGED, NO_ANALYSIS = range(4)
STATUS_FLAGS = {
    "long_name": "status of the forecast",
    "flag_values": [NOT_COMPUTED, COMPUTED, DIVERGED, NO_ANALYSIS],
    "flag_meanings": "not_computed computed diverged no_initial_analysis",
}
COMPRESSOR = BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=4)  # WeatherBench2's


def all_levels(variables: Sequence[str]) -> list[int]:
    """Return the levels of all variables, ascending (hPa): the arrays of a store have them in common."""
    own = group_levels(variables).values()
    return sorted({level for levels in own for level in levels if level is not None})


def create_store(
    path: str | Path,
    variables: Sequence[str],
    grid: Grid,
    axes: Mapping[str, np.ndarray],
    chunks: Mapping[str, int],
    attributes: Mapping[str, str],
    own_units: Mapping[str, str],
) -> None:
    """Create Zarr with consolidated metadata: NaN arrays (*axes[, level], latitude, longitude), float32.

    axes: name -> coordinate; chunks: name of an axis -> how many of it are in a chunk, else all of them;
    own_units: of variables that the project does not know.
    """
    levels = all_levels(variables)
    values = {**axes, "level": levels, "latitude": grid.latitude, "longitude": grid.longitude}
    values = {name: own for name, own in values.items() if len(own)}
    coords = {name: (name, own, COORDINATES.get(name, {})) for name, own in values.items()}
    given = {split_name(name)[0]: text for name, text in own_units.items()}
    empty = xr.Dataset(coords=coords, attrs={**CONVENTIONS, **attributes})
    empty.to_zarr(path, mode="w", zarr_format=3, consolidated=False)
    for name, own in group_levels(variables).items():
        known = {"standard_name": STANDARD_NAMES[name]} if name in STANDARD_NAMES else {}
        about = {"units": units(name) or given.get(name, ""), **known}
        dims = [*axes, *["level"] * (None not in own), "latitude", "longitude"]
        create_array(path, name, {dim: empty.sizes[dim] for dim in dims}, chunks, "float32", np.nan, about)
    consolidate(path)


def create_array(
    path: str | Path,
    name: str,
    sizes: Mapping[str, int],
    chunks: Mapping[str, int],
    dtype: str,
    fill_value: float,
    attributes: Mapping[str, Any],
) -> None:
    """Create an array of fill values in a store. sizes: of its dimensions; chunks: as in `create_store`."""
    zarr.create_array(
        str(path),
        name=name,
        shape=tuple(sizes.values()),
        chunks=tuple(chunks.get(dim, size) for dim, size in sizes.items()),
        dtype=dtype,
        compressors=COMPRESSOR,
        fill_value=fill_value,
        zarr_format=3,
        dimension_names=list(sizes),
        attributes=dict(attributes),
    )


def consolidate(path: str | Path) -> None:
    """Copy the metadata of all arrays to the group's: programs then open a store without listing it."""
    with warnings.catch_warnings(action="ignore"):  # of folders that are no arrays, and of Zarr 3 as a whole
        zarr.consolidate_metadata(str(path), zarr_format=3)
