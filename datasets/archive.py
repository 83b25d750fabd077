"""Analyses (ERA5 and similar) on one grid, from any kind and number of files.

An array may contain all levels, or each variable or year may have its own file. An archive is no Dataset of
xarray, which joins files lazily through dask alone: six variables on 13 levels of 93,000 dates, a chunk each,
took 79 s and 6.8 GiB to open, and seconds for each field.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from datasets.fields import Field, NamedFields, places_of
from datasets.grid import Grid
from datasets.options import Region, parse_period
from datasets.remote import NO_OPTIONS, Access
from datasets.shards import ShardReader
from datasets.source import (
    ROLE_OF_NAME,
    TRAINING_STORE,
    NamedLayout,
    OpenFile,
    find_files,
    is_zarr,
    open_fields,
)
from datasets.variables import plain_units, split_name
from errors import DataError

logger = logging.getLogger(__name__)
BLOCK_BYTES = 2**28  # of fields that are read at once
COMPARED_DATES = 8  # of the dates that several files contain, and as many of the newest of them


class Archive(NamedFields):
    """Analyses on one grid: `times` (T,) datetime64[s], the sorted union of all files' dates, on which a
    variable may be NaN (`has` returns where), and names of variables. Can be pickled; processes open files
    themselves.
    """

    def __init__(
        self, path: str, fields: Sequence[Field], unreadable: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(path, fields, unreadable)
        self._static = places_of(field for field in fields if field.times is None)
        self.places = places_of(field for field in fields if field.times is not None)
        self.variables, self.static_variables = list(self.places), list(self._static)
        axes = {id(field.times): field.times for field in fields if field.times is not None}
        times = np.unique(np.concatenate([np.empty(0, "datetime64[s]"), *axes.values()]))
        self.times = times[~np.isnat(times)]
        if not len(self.times):
            names = ", ".join([*self._static, *self.unreadable][:6])
            raise DataError(f"cannot read {path!r}: no array has a time axis with dates, only {names}")
        numbers = {axis: number for number, axis in enumerate(axes)}  # an id is of one process
        self._axis_of = {field: numbers[id(field.times)] for field in fields if field.times is not None}
        self._located: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def __repr__(self) -> str:
        span = f"{len(self.times)} dates {self.times[0]} .. {self.times[-1]}"
        return f"Archive({self.path!r}: {span}, grid {self.grid.shape}, {len(self.variables)} variables)"

    def index(self, time: Any) -> int:
        """Return the position in `times` of a date. Raises DataError if it is missing."""
        date = np.datetime64(time, "s")
        i = int(np.searchsorted(self.times, date))
        if i < len(self.times) and self.times[i] == date:
            return i
        raise DataError(f"{self.path!r} has no analysis of {date}, only {self.times[0]} .. {self.times[-1]}")

    def find(self, name: str) -> list[tuple[Field, int]]:
        """Return where a variable with a time axis is. Raises DataError."""
        if name in self._static and name not in self.places:
            raise DataError(f"{self.path!r} has {name!r} without a time axis: list it under static variables")
        return super().find(name)

    def has(self, variables: Sequence[str]) -> np.ndarray:
        """Return which dates (T,) bool have all these variables in some file; values may still be NaN."""
        return np.all([self._locate(name)[0] >= 0 for name in variables], axis=0)

    def check(self, variables: Sequence[str], every_date: bool = False) -> None:
        """Raise DataError if files differ in a variable's units, or in its values on some or `every_date`;
        log a warning if some arrays of a variable cannot be read.
        """
        for name in variables:
            places = self.find(name)
            fields = [field for field, _ in places]
            if why := self.unreadable.get(split_name(name)[0]):
                logger.warning("%s: an array of %s is left out: %s", self.path, name, why)
            other = next((f for f in fields if plain_units(f.units) != plain_units(fields[0].units)), None)
            if other:
                units = " and ".join(f"{f.units!r} in {f.path}" for f in (fields[0], other))
                raise DataError(f"{self.path!r}: {name} has units {units}: convert one of them")
            dates = np.concatenate([field.times for field in fields if field.times is not None])
            unique, counts = np.unique(dates[~np.isnat(dates)], return_counts=True)
            repeated = unique[counts > 1]
            some = np.union1d(evenly_spaced(repeated, COMPARED_DATES), repeated[-COMPARED_DATES:])
            for date in repeated if every_date else some:
                values = [
                    (field.path, field.read_one(position, row))
                    for field, position in places
                    for row in np.flatnonzero(field.times == date).tolist()
                ]
                if any(not np.array_equal(values[0][1], again, equal_nan=True) for _, again in values):
                    files = " and ".join(sorted({path for path, _ in values})[:2])
                    reason = f"{name} has different values at {date} in {files}"
                    raise DataError(f"{self.path!r}: {reason}: remove one of them")

    def group_by_array(self, variables: Sequence[str]) -> list[list[str]]:
        """Return the variables in groups that are in one array of a file, each in the order given."""
        groups: dict[Field, list[str]] = {}
        for name in variables:
            groups.setdefault(self.find(name)[0][0], []).append(name)
        return list(groups.values())

    def read(self, i: int, variables: Sequence[str]) -> np.ndarray:
        """Return the variables (V, H, W) float32 at times[i], NaN where missing. Raises DataError."""
        return self.read_block(i, i + 1, variables)[0]

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        """Return the variables (n, V, H, W) float32 at times[start:stop]; each array is read once."""
        assert 0 <= start < stop <= len(self.times), f"{start} .. {stop - 1} of {len(self.times)} dates"
        out = np.full((stop - start, len(variables), *self.grid.shape), np.nan, np.float32)
        # Stretches of dates that are on consecutive rows of one array: levels to read, and where they go.
        stretches: dict[tuple[Field, int, int, int], list[tuple[int, int]]] = {}
        for output, name in enumerate(variables):
            owners, rows = (values[start:stop] for values in self._locate(name))
            breaks = np.flatnonzero((np.diff(owners) != 0) | ((np.diff(rows) != 1) & (owners[1:] >= 0))) + 1
            for dates in np.split(np.arange(stop - start), breaks):
                first = int(dates[0])
                if owners[first] >= 0:
                    field, position = self.places[name][owners[first]]
                    stretch = field, int(rows[first]), first, len(dates)
                    stretches.setdefault(stretch, []).append((position, output))
        for (field, row, first, count), pairs in stretches.items():
            field.fill(out[first : first + count], pairs, ("time",), {"time": slice(row, row + count)})
        return out

    def fill(self, date: int, variables: Sequence[str], out: np.ndarray) -> None:
        """Fill `out` (V, H, W) float32 with the variables at times[date], NaN where missing."""
        out[...] = self.read(date, variables)

    def read_static(self, name: str) -> np.ndarray:
        """Return a field without time (H, W) float32, or its first date's. DataError if files differ."""
        if name not in self._static:
            return self.read(int(np.argmax(self.has([name]))), [name])[0]
        (first, position), *more = self._static[name]
        values = first.read_one(position)
        for field, position in more[:: max(1, len(more) // COMPARED_DATES)]:
            if not np.array_equal(field.read_one(position), values, equal_nan=True):
                reason = f"{name} differs between {field.path} and {first.path}"
                raise DataError(f"{self.path!r}: {reason}: remove one of them")
        return values

    def _locate(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return for each date (T,) the first array of a variable with it (-1: none), and its row there."""
        fields = [field for field, _ in self.find(name)]
        key = tuple(self._axis_of[field] for field in fields)
        if key not in self._located:
            owners, rows = np.full(len(self.times), -1, np.int32), np.zeros(len(self.times), np.int32)
            for number, field in enumerate(fields):
                dates, first = np.unique(np.asarray(field.times), return_index=True)
                dates, first = dates[~np.isnat(dates)], first[~np.isnat(dates)]
                at = np.searchsorted(self.times, dates)
                free = owners[at] < 0
                owners[at[free]], rows[at[free]] = number, first[free]
            self._located[key] = owners, rows
        return self._located[key]


class TrainingStore(Archive):
    """A complete store of datasets.convert: threads read its fields, and it has moments of each date."""

    def __init__(self, path: str, fields: Sequence[Field], group: Any) -> None:
        super().__init__(path, fields)
        self.readers = {name: ShardReader(self.find(name)[0][0]) for name in self.variables}
        # (T, V, columns) float64 of datasets/statistics.py, in the order of `moment_names`.
        self.moments, self.moment_names = group["moments"][:], list(group["moments"].attrs["variables"])
        # Numbers that are subtracted from the variables before their moments are taken.
        self.shifts = dict(zip(self.moment_names, group["moments"].attrs["shifts"], strict=True))
        self.change_step = np.timedelta64(int(group["moments"].attrs["change_hours"] * 3600), "s")
        self.shard_dates = self.readers[self.variables[0]].dates_per_shard

    def rows(self, variables: Sequence[str]) -> np.ndarray:
        """Return the moments (T, V, columns) float64 of each date of some variables. Raises DataError."""
        return self.moments[:, [self.moment_names.index(name) for name in variables if self.find(name)]]

    def fill(self, date: int, variables: Sequence[str], out: np.ndarray) -> None:
        """Fill `out` (V, H, W) with the variables at times[date], on any thread: float32 with physical
        values, float16 with the stored numbers. Raises DataError.
        """
        for name, field in zip(variables, out, strict=True):
            if self.find(name):  # or it raises
                self.readers[name].fill(date, field)

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        """Return the variables (n, V, H, W) float32 at times[start:stop], NaN where missing."""
        out = np.empty((stop - start, len(variables), *self.grid.shape), np.float32)
        for date, fields in enumerate(out, start):
            self.fill(date, variables, fields)
        return out


def open_archive(
    path: str,
    selection: Mapping[str, str] | None = None,
    access: Access = NO_OPTIONS,
    region: Region = (),
    more_paths: Sequence[str] = (),
) -> Archive:
    """Open analyses: a Zarr store (folder or URL), a NetCDF, HDF5 or GRIB file, a folder or a glob of them.

    selection: name of a dimension that is no axis of analyses -> the label that is read. access: options of
    URLs. region: (north, west, south, east) in degrees, empty for the whole grid. more_paths: further sources
    on the same grid. Raises DataError, one line naming path and reason, for anything that cannot be read as
    analyses on one grid, and ConfigError.
    """
    fields, unreadable, path = [], {}, path.removeprefix("file://")
    if not (region or more_paths) and (store := find_store(path)):
        opened, unreadable = open_fields(path, selection, access)
        if all(ShardReader.can_read(field) for field in opened if field.times is not None):
            return TrainingStore(path, opened, store)
    for source in (path, *more_paths):
        found, reasons = read_all_fields(source, selection, access)
        for field in found:
            if region:
                whole = field.orientation
                grid, rows, columns = whole.grid.crop(region)
                part = replace(whole, grid=grid, rows=whole.rows[rows], columns=whole.columns[columns])
                field = replace(field, orientation=part)
            fields.append(field)
        unreadable |= reasons
    return Archive(" and ".join((path, *more_paths)), fields, unreadable)


def read_all_fields(
    path: str,
    selection: Mapping[str, str] | None = None,
    access: Access = NO_OPTIONS,
    left_out: dict[str, str] | None = None,
) -> tuple[list[Field], dict[str, str]]:
    """Return the fields of all files of a path, and why other arrays cannot be read. left_out: is given the
    reason for each of several files that cannot be read, which otherwise is an error.
    """
    fields, unreadable, files = [], {}, find_files(path)
    for name in files:
        try:
            found, reasons = open_fields(name, selection, access)
        except DataError as error:
            if left_out is None or len(files) == 1:
                raise
            left_out[name] = str(error)
            continue
        fields += found
        unreadable |= reasons
    return fields, unreadable


def sums_file(store: Path, variable: str, start: int) -> Path:
    """Return the file of the sums and moments of a variable over a shard of dates, there if the shard is."""
    return store / "sums" / f"{variable.replace(':', '_')}-{start}.npz"


def read_static_field(
    path: str,
    name: str,
    target: Grid,
    selection: Mapping[str, str] | None = None,
    access: Access = NO_OPTIONS,
) -> np.ndarray:
    """Return a field (H, W) float32 of a file, of the first date if it has any, conservatively regridded if
    it is not on the target grid. Raises DataError without it, or if its grid is outside.
    """
    fields, unreadable = read_all_fields(path, selection, access)
    own = [field for field in fields if name in field.names] or fields
    field, position = NamedFields(path, own, unreadable).find(name)[0]
    source, values = field.orientation.grid, field.read_one(position)
    if source.same_as(target):
        return values
    import torch  # which takes seconds

    from datasets.regrid import Regridder

    regridded = Regridder(source, target)(torch.from_numpy(values), field.is_class).numpy()
    if np.isnan(regridded).all():
        place = f"latitudes {target.latitude[0]:g} to {target.latitude[-1]:g}"
        raise DataError(f"{path!r} has no {name!r} on the grid of data.path, {place}")
    return regridded


def find_store(path: str) -> Any:
    """Return the zarr group of a complete training store with moments, None for any other path."""
    path = path.removeprefix("file://")
    if "://" in path or not is_zarr(path) or not (Path(path) / "moments").is_dir():
        return None
    group = zarr.open_group(path, mode="r")
    return group if TRAINING_STORE in group.attrs and group.attrs.get("complete") else None


def archive_of_dataset(name: str, dataset: xr.Dataset) -> Archive:
    """Return the analyses of a dataset in memory, with variables and coordinates as a file has them."""
    unreadable: dict[str, str] = {}
    fields = NamedLayout(OpenFile(name, dataset.variables, dataset.attrs), ROLE_OF_NAME, {}).open(unreadable)
    return Archive(name, fields, unreadable)


# -- series of dates (T,) datetime64[s], and indices into them


def is_inside(times: np.ndarray, key: str, period: Sequence[str]) -> np.ndarray:
    """Return which dates (T,) bool are in a period, all of them without one. Raises ConfigError."""
    span = parse_period(key, period)
    if not span:
        return np.ones(len(times), bool)
    first, last = (np.datetime64(end, "s") for end in span)
    return (times >= first) & (times <= last)


def consecutive(indices: np.ndarray) -> list[np.ndarray]:
    """Return the stretches of indices (n,) that follow one another without a gap, none of no index."""
    return np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1) if len(indices) else []


def usual_hours(times: np.ndarray) -> float:
    """Return the most common interval between dates. Raises DataError for a single date."""
    if len(times) < 2:
        raise DataError("it has one date: nothing to train on")
    steps, counts = np.unique(np.diff(times), return_counts=True)
    return float(steps[counts.argmax()] / np.timedelta64(1, "h"))


def find_gaps(times: np.ndarray) -> np.ndarray:
    """Return the dates that the usual interval would have between the first and the last."""
    step = np.timedelta64(round(usual_hours(times) * 3600), "s")
    wide = np.flatnonzero(np.diff(times) > step)
    return np.concatenate([times[:0], *(np.arange(times[i] + step, times[i + 1], step) for i in wide)])


def evenly_spaced(items: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` of the items (0: all), from the first to the last."""
    if not limit or len(items) <= limit:
        return items
    return items[np.linspace(0, len(items) - 1, limit).round().astype(int)]
