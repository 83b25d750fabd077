"""Analyses as a lazy xarray Dataset in normal form."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from datasets.archive import Archive, open_archive
from datasets.dates import consecutive
from datasets.variables import group_levels, join_name, units

ATTRIBUTES = {
    "level": {"units": "hPa", "standard_name": "air_pressure"},
    "latitude": {"units": "degrees_north", "standard_name": "latitude"},
    "longitude": {"units": "degrees_east", "standard_name": "longitude"},
}


def open_dataset(path: str, *args: Any, **options: Any) -> xr.Dataset:
    """Open analyses as a lazy Dataset; arguments as `datasets.archive.open_archive` has them.

    Names are WeatherBench2's, dims (time[, level], latitude, longitude), latitude from north to south,
    longitude ascending, units those of datasets/variables.py, values float32 with NaN where missing. A
    variable that is on some of the levels only has a variable for each ("geopotential:500"). Raises DataError
    and ConfigError.
    """
    archive = open_archive(path, *args, **options)
    groups = group_levels(archive.variables)
    level_sets = [sorted(filter(None, own)) for own in groups.values() if None not in own]
    levels = max(level_sets, key=len, default=[])
    coordinates = {"level": levels, "latitude": archive.grid.latitude, "longitude": archive.grid.longitude}
    coords: dict[str, Any] = {"time": archive.times.astype("datetime64[ns]")}
    coords |= {name: (name, values, ATTRIBUTES[name]) for name, values in coordinates.items() if len(values)}
    arrays: dict[str, Any] = {}
    for base, own in groups.items():
        if None not in own and set(own) == set(levels):
            arrays[base] = _lazy(archive, [join_name(base, level) for level in levels], True)
        else:
            arrays |= {
                name: _lazy(archive, [name], False) for name in (join_name(base, each) for each in own)
            }
    for name in archive.static_variables:
        arrays[name] = ("latitude", "longitude"), archive.read_static(name), {"units": units(name)}
    return xr.Dataset(arrays, coords)


def _lazy(archive: Archive, names: Sequence[str], has_level: bool) -> xr.Variable:
    dims = ("time", *["level"] * has_level, "latitude", "longitude")
    array = indexing.LazilyIndexedArray(_LazyArray(archive, names, has_level))
    return xr.Variable(dims, array, {"units": archive.units(names[0])})


class _LazyArray(BackendArray):
    """Variables of an archive as an array (time[, level], latitude, longitude) that xarray reads in parts."""

    def __init__(self, archive: Archive, names: Sequence[str], has_level: bool) -> None:
        self.archive, self.names, self.has_level = archive, list(names), has_level
        self.shape = (len(archive.times), *[len(names)] * has_level, *archive.grid.shape)
        self.dtype = np.dtype("float32")

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        support = indexing.IndexingSupport.BASIC
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)  # type: ignore[return-value]

    def _read(self, key: tuple[int | slice, ...]) -> np.ndarray:
        """Read the dates and levels of ints and slices; latitudes and longitudes are cut from them."""
        dates = np.atleast_1d(np.arange(len(self.archive.times))[key[0]])
        names = np.atleast_1d(np.array(self.names)[key[1]] if self.has_level else self.names).tolist()
        block = np.empty((len(dates), len(names), *self.archive.grid.shape), np.float32)
        first = 0
        for run in consecutive(dates) if len(dates) else ():
            stop = first + len(run)
            block[first:stop] = self.archive.read_block(int(run[0]), int(run[-1]) + 1, names)
            first = stop
        axes = (key[0], key[1] if self.has_level else 0)
        return block[(*(slice(None) if isinstance(axis, slice) else 0 for axis in axes), *key[-2:])]
