"""Analyses (ERA5 and similar) on one grid, from any kind and number of files.

An array may contain all levels, or each variable or year may have its own file.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from datasets.dates import evenly_spaced
from datasets.fields import Field, NamedFields, level_tasks, places_of
from datasets.files import file_states, find_files
from datasets.layouts import open_fields
from datasets.options import Region
from datasets.remote import NO_OPTIONS, Access
from datasets.store_reader import Task, find_reader
from datasets.variables import plain_units, split_name
from errors import DataError

logger = logging.getLogger(__name__)
COMPARED_DATES = 8  # of the dates that several files contain, and as many of the newest of them


class Archive(NamedFields):
    """Analyses on one grid: `times` (T,) datetime64[s], sorted and unique, and the names of the variables.

    If files cover different dates, `times` is their union, and a variable is NaN on dates without it; `has`
    returns which. It can be pickled; each process opens the files itself.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[Field],
        unreadable: Mapping[str, str] | None = None,
        selection: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(path, fields, unreadable)
        self.selection = dict(selection or {})
        timed = [field for field in fields if field.times is not None]
        self.places = places_of(timed)
        self._static = places_of([field for field in fields if field.times is None])
        self.variables, self.static_variables = list(self.places), list(self._static)
        axes = {id(field.times): field.times for field in timed}
        numbers = {key: number for number, key in enumerate(axes)}
        self._axes = [times for times in axes.values() if times is not None]
        self._axis_of = {field: numbers[id(field.times)] for field in timed}
        times = np.unique(np.concatenate([np.empty(0, "datetime64[s]"), *self._axes]))
        self.times = times[~np.isnat(times)]
        if not len(self.times):
            names = ", ".join([*self._static, *self.unreadable][:6])
            raise DataError(f"cannot read {path!r}: no array has a time axis with dates, only {names}")
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

    def has(self, variables: Sequence[str]) -> np.ndarray:
        """Return which dates (T,) bool have all these variables in some file; values may still be NaN."""
        return np.all([self._locate(axes)[0] >= 0 for axes in set(map(self._axes_of, variables))], axis=0)

    def check(self, variables: Sequence[str], every_date: bool = False) -> None:
        """Raise DataError if files differ in a variable's units, or in its values on some or `every_date`;
        log a warning if some arrays of a variable cannot be read.
        """
        for name in variables:
            fields = self._fields(name)
            if why := self.unreadable.get(split_name(name)[0]):
                logger.warning("%s: an array of %s is left out: %s", self.path, name, why)
            other = next((f for f in fields if plain_units(f.units) != plain_units(fields[0].units)), None)
            if other:
                places = " and ".join(f"{f.units!r} in {f.path}" for f in (fields[0], other))
                raise DataError(f"{self.path!r}: {name} has units {places}: convert one of them")
            self._compare_repeats(name, every_date)

    def _compare_repeats(self, name: str, every_date: bool) -> None:
        places = self.find(name)
        dates = np.concatenate([self._axes[axis] for axis in self._axes_of(name)])
        unique, counts = np.unique(dates[~np.isnat(dates)], return_counts=True)
        repeated = unique[counts > 1]
        some = np.union1d(evenly_spaced(repeated, COMPARED_DATES), repeated[-COMPARED_DATES:])
        for date in repeated if every_date else some:
            found = [
                (field, field.read_one(position, row))
                for field, position in places
                for row in np.flatnonzero(field.times == date).tolist()
            ]
            if any(not np.array_equal(values, found[0][1], equal_nan=True) for _, values in found):
                files = " and ".join(sorted({field.path for field, _ in found})[:2])
                reason = f"{name} has different values at {date} in {files}"
                raise DataError(f"{self.path!r}: {reason}: remove one of them")

    def files_state(self, variables: Sequence[str]) -> bytes:
        """Return a digest of the files' names, sizes and modification times; b"" for URLs."""
        arrays = {(field.path, field.array) for name in variables for field in self._fields(name)}
        states = [file_states(path, array) for path, array in sorted(arrays)]
        parts = [line for lines in states for line in lines]
        # Another member or region of the same files counts as different data.
        parts.append(repr(sorted(self.selection.items())).encode())
        parts.append(np.concatenate([self.grid.latitude, self.grid.longitude]).tobytes())
        return hashlib.sha256(b"".join(parts)).digest() if all(states) else b""

    def time_chunk(self, variables: Sequence[str]) -> int:
        """Return the number of dates that are decoded together; to read fewer decodes chunks again."""
        return max(field.chunk("time") for name in variables for field in self._fields(name))

    def field_of(self, name: str) -> Field:
        """Return the array that has the first dates of a variable."""
        return self._fields(name)[0]

    def _fields(self, name: str) -> list[Field]:
        return [field for field, _ in self.find(name)]

    def group_by_array(self, variables: Sequence[str]) -> list[list[str]]:
        """Return the variables in groups that are in one array of a file, each in the order given."""
        groups: dict[Field, list[str]] = {}
        for name in variables:
            groups.setdefault(self.field_of(name), []).append(name)
        return list(groups.values())

    def read(self, i: int, variables: Sequence[str]) -> np.ndarray:
        """Return the variables (V, H, W) float32 at times[i], NaN where missing. Raises DataError."""
        return self.read_block(i, i + 1, variables)[0]

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        """Return the variables (n, V, H, W) float32 at times[start:stop]; each array is read once."""
        assert 0 <= start < stop <= len(self.times), f"{start} .. {stop - 1} of {len(self.times)} dates"
        out = np.full((stop - start, len(variables), *self.grid.shape), np.nan, np.float32)
        for task in self.tasks(start, out, variables):
            task()
        return out

    def tasks(self, start: int, out: np.ndarray, variables: Sequence[str]) -> Iterator[Task]:
        """Yield calls that fill `out` (n, V, H, W) from times[start] on, in any order, on any thread."""
        dates = slice(start, start + len(out))
        together: dict[tuple[int, ...], list[int]] = {}
        for output, name in enumerate(variables):
            together.setdefault(self._axes_of(name), []).append(output)
        for axes, outputs in together.items():
            owners, rows = (each[dates] for each in self._locate(axes))
            for a, b in _runs(owners, rows):
                if owners[a] < 0:
                    out[a:b, outputs] = np.nan
                    continue
                pairs: dict[Field, list[tuple[int, int]]] = {}  # positions on the level axis, rows of `out`
                for output in outputs:
                    field, position = self.places[variables[output]][owners[a]]
                    pairs.setdefault(field, []).append((position, output))
                for field, own in pairs.items():
                    yield from _field_tasks(field, own, int(rows[a]), out[a:b])

    def reads_by_threads(self, variables: Sequence[str]) -> bool:
        """Return True if all of these are in stores of datasets.convert, which threads read concurrently."""
        return all(find_reader(field) for name in variables for field in self._fields(name))

    def float16_packing(self, variables: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return scales and offsets (V,) float32 of variables that are all stored as float16, else None.

        Then `tasks` fill an array of float16 with the stored numbers.
        """
        fields = [self._fields(name) for name in variables]
        if any(len(each) > 1 or each[0].raw.dtype != np.float16 or each[0].decoding.fills for each in fields):
            return None
        packings = [(each[0].decoding.scale, each[0].decoding.offset) for each in fields]
        scales, offsets = np.array(packings, np.float32).T.copy()
        return scales, offsets

    def read_static(self, name: str) -> np.ndarray:
        """Return a field without time (H, W) float32; of a variable with time, the first date's.

        Raises DataError if files differ in it.
        """
        if name in self._static:
            (first, position), *more = self._static[name]
            values = first.read_one(position)
            for field, position in more[:: max(1, len(more) // COMPARED_DATES)]:
                if not np.array_equal(field.read_one(position), values, equal_nan=True):
                    reason = f"{name} differs between {field.path} and {first.path}"
                    raise DataError(f"{self.path!r}: {reason}: remove one of them")
            return values
        return self.read(int(np.argmax(self.has([name]))), [name])[0]

    def find(self, name: str) -> list[tuple[Field, int]]:
        """Return where a variable with a time axis is. Raises DataError."""
        if name in self._static and name not in self.places:
            raise DataError(f"{self.path!r} has {name!r} without a time axis: list it under static variables")
        return super().find(name)

    def _axes_of(self, name: str) -> tuple[int, ...]:
        """Return the time axes of a variable; variables with the same ones are read together."""
        return tuple(self._axis_of[field] for field in self._fields(name))

    def _locate(self, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return for every date (T,) the first of these axes that has it (-1: none), and the row there."""
        if axes not in self._located:
            owners, rows = np.full(len(self.times), -1, np.int32), np.zeros(len(self.times), np.int32)
            for number, axis in enumerate(axes):
                dates, first = np.unique(self._axes[axis], return_index=True)
                dates, first = dates[~np.isnat(dates)], first[~np.isnat(dates)]
                at = np.searchsorted(self.times, dates)
                free = owners[at] < 0
                owners[at[free]], rows[at[free]] = number, first[free]
            self._located[axes] = owners, rows
        return self._located[axes]


def _field_tasks(field: Field, pairs: list[tuple[int, int]], first: int, out: np.ndarray) -> Iterator[Task]:
    """Yield calls that fill `out` (n, V, H, W) from row `first` of the field's time axis on.

    pairs: positions on the level axis and rows of `out`; chunks of levels that none needs are not read.
    """
    if reader := find_reader(field):
        for date, fields in enumerate(out):
            yield from (partial(reader.fill, first + date, fields[output]) for _, output in pairs)
        return
    yield from level_tasks(field, pairs, ("time",), {"time": slice(first, first + len(out))}, out)


def _runs(owners: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield stretches [a, b) that are in one file on consecutive rows."""
    broken = (np.diff(owners) != 0) | ((np.diff(rows) != 1) & (owners[1:] >= 0))
    cuts = [0, *(np.flatnonzero(broken) + 1).tolist(), len(owners)]
    return zip(cuts[:-1], cuts[1:], strict=True)


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
    fields, unreadable = [], {}
    for source in (path, *more_paths):
        found, reasons = read_all_fields(source, selection, access)
        if region:
            found = [replace(field, orientation=field.orientation.crop(region)) for field in found]
        fields += found
        unreadable |= reasons
    return Archive(" and ".join((path, *more_paths)), fields, unreadable, selection)


def read_all_fields(
    path: str,
    selection: Mapping[str, str] | None = None,
    access: Access = NO_OPTIONS,
    left_out: dict[str, str] | None = None,
) -> tuple[list[Field], dict[str, str]]:
    """Return the fields of all files that a path means, and why other arrays cannot be read.

    left_out: is given the reason for each of several files that cannot be read, which otherwise is an error.
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
