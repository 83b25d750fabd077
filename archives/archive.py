"""Analyses (ERA5 and its like) on one grid, whatever file layout they came in.

`open_archive` looks at coordinates only. `Archive.read` takes a date's variables from wherever they lie: one
array for all levels, a file for each variable or each year. Values come as float32, NaN where missing,
latitude north to south and longitude ascending.
"""

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from archives.field_chunks import Task, Wanted, chunk_tasks, chunks_of
from archives.files import METADATA, StoredArray, file_lines, find_files, open_file
from archives.grid import Grid
from archives.layouts import stored_fields
from archives.storage_options import NO_OPTIONS, Access
from archives.stored_field import StoredField
from archives.variables import full_name, nearest_name, units
from errors import DataError

# Where a variable lies: the number of its time axis, the field, and the position on the field's level axis.
Location = tuple[int, StoredField, int]
# What one array gives to a block: the field, a slice of its levels, and pairs (row of the output, position in
# the slice).
Part = tuple[StoredField, slice, list[tuple[int, int]]]


class Group(NamedTuple):
    """Variables that are read together, because they lie on the same time axes."""

    outputs: tuple[int, ...]  # their rows in the output
    owners: np.ndarray  # (T,) which of their time axes has a date; -1: none
    rows: np.ndarray  # (T,) the row of the date on that axis
    parts: list[list[Part]]  # for each of the time axes


class Archive:
    """Analyses on one grid: `times` (T,) datetime64[s], sorted and unique, and the names of the variables.

    Where files cover different dates `times` is their union; a variable is NaN where it is absent, and `has`
    says where. Of repeated dates the first in the order of the files counts. `picks` says which element of
    other dimensions is read. Can be pickled; each process opens the files itself.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[StoredField],
        unreadable: dict[str, str] | None = None,
        picks: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.picks = path, dict(picks or {})
        self.unreadable = dict(unreadable or {})
        self.grid = _common_grid(path, fields, self.unreadable)
        self._axes: list[np.ndarray] = []
        self._locations: dict[str, list[Location]] = {}
        self._static: dict[str, tuple[StoredField, int]] = {}
        for field in fields:
            self._add(field)
        self.variables, self.static_variables = list(self._locations), list(self._static)
        self.times = np.unique(np.concatenate([np.empty(0, "datetime64[s]"), *self._axes]))
        self.times = self.times[~np.isnat(self.times)]
        if not len(self.times):
            raise DataError(
                f"cannot read {path!r}: nothing in it has a time axis with dates, only {self._content()}"
            )
        self._groups: dict[tuple[str, ...], list[Group]] = {}
        self.extra_dimensions = _extra_dimensions(fields)

    def _add(self, field: StoredField) -> None:
        if field.times is not None and not any(field.times is axis for axis in self._axes):
            self._axes.append(field.times)
        for position, name in enumerate(field.names):
            if field.times is None:
                self._static.setdefault(name, (field, position))
            else:
                axis = next(i for i, times in enumerate(self._axes) if times is field.times)
                self._locations.setdefault(name, []).append((axis, field, position))

    def __repr__(self) -> str:
        span = f"{len(self.times)} dates {self.times[0]} .. {self.times[-1]}"
        return f"Archive({self.path!r}: {span}, grid {self.grid.shape}, {len(self.variables)} variables)"

    def index(self, time: Any) -> int:
        """Position in `times` of a date (text, datetime or datetime64); DataError naming the nearest one
        present.
        """
        wanted = np.datetime64(time, "s")
        i = int(np.searchsorted(self.times, wanted))
        if i < len(self.times) and self.times[i] == wanted:
            return i
        nearest = self.times[np.argmin(np.abs(self.times - wanted))]
        span = f"{self.times[0]} .. {self.times[-1]}"
        raise DataError(f"{self.path!r} has no analysis of {wanted}; nearest: {nearest}; it has {span}")

    def has(self, variables: Sequence[str]) -> np.ndarray:
        """Which dates (T,) bool have all these variables in some file; values may still be NaN there."""
        return np.all([self._locate(axes)[0] >= 0 for axes in set(map(self._axes_of, variables))], axis=0)

    def files_state(self, variables: Sequence[str]) -> bytes:
        """A digest of names, sizes and times of change of all files that hold these variables; b"" where one
        of them is behind a URL.
        """
        states = self._file_lines(variables)
        picks = repr(sorted(self.picks.items())).encode()  # another member of the same files
        return hashlib.sha256(b"".join([*itertools.chain(*states), picks])).digest() if all(states) else b""

    def file_marks(self, variables: Sequence[str]) -> np.ndarray:
        """The same of each file with values of these variables, in eight bytes (n,), sorted."""
        lines = [line for lines in self._file_lines(variables) for line in lines]
        names = [line.rsplit(b" ", 2)[0].decode("utf-8", "surrogateescape") for line in lines]
        marks = [
            int.from_bytes(hashlib.blake2b(line, digest_size=8).digest())
            for line, name in zip(lines, names, strict=True)
            if os.path.basename(name) not in METADATA
        ]
        return np.sort(np.array(marks, np.uint64))

    def _file_lines(self, variables: Sequence[str]) -> list[list[bytes]]:
        found = {(field.file.path, field.array) for name in variables for _, field, _ in self._find(name)}
        return [file_lines(path, array) for path, array in sorted(found)]

    def units(self, name: str) -> str:
        """As the data say, else as they are known for the variable; "" for neither."""
        _, field, _ = self._find(name)[0]
        return str(field.file.arrays[field.array].attrs.get("units", "")) or units(name)

    def shown_units(self, name: str) -> str:
        """For people: ours of a variable that we know ("m2 s-2", not "m**2 s**-2"), else as the data say."""
        return units(name) or self.units(name)

    def time_chunk(self, variables: Sequence[str]) -> int:
        """How many dates are decoded together: reading fewer at once reads the same chunks again."""
        return max(field.chunk("time") for name in variables for _, field, _ in self._find(name))

    def array_of(self, name: str) -> StoredArray:
        """The array that holds the first dates of a variable: its type, chunks and attributes."""
        field = self._find(name)[0][1]
        return field.file.arrays[field.array]

    def file_of(self, i: int, name: str) -> str:
        """The file that a variable of times[i] is read from; "" where there is none."""
        owner = self._locate(self._axes_of(name))[0][i]
        return self._find(name)[owner][1].file.path if owner >= 0 else ""

    def stored_together(self, variables: Sequence[str], in_chunks: bool = False) -> list[list[str]]:
        """The variables in groups that lie in one array of a file, or even in its same chunks, each group in
        the order given: reading one of a group costs what all of it does, where chunks hold all levels.
        """
        groups: dict[tuple[StoredField, int], list[str]] = {}
        for name in variables:
            _, field, level = self._find(name)[0]
            groups.setdefault((field, level // field.chunk("level") if in_chunks else 0), []).append(name)
        return list(groups.values())

    def read(self, i: int, variables: Sequence[str]) -> np.ndarray:
        """The variables (V, H, W) float32 at times[i], NaN where missing; DataError for a name that is not
        there.
        """
        return self.read_block(i, i + 1, variables)[0]

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        """The variables (n, V, H, W) float32 at times[start:stop]: each array is read once for all dates and
        levels.
        """
        assert 0 <= start < stop <= len(self.times), f"{start} .. {stop - 1} of {len(self.times)} dates"
        out = np.empty((stop - start, len(variables), *self.grid.shape), np.float32)
        for task in self.reading(start, out, variables):
            task()
        return out

    def reading(self, start: int, out: np.ndarray, variables: Sequence[str]) -> Iterator[Task]:
        """What fills `out` (n, V, H, W) with the variables at the dates from `start` on, piece by piece.

        The pieces may run in any order, on any threads.
        """
        stop = start + len(out)
        for group in self._grouped(tuple(variables)):
            owners, rows = group.owners[start:stop], group.rows[start:stop]
            for a, b in _runs(owners, rows):
                if owners[a] < 0:
                    out[a:b, group.outputs] = np.nan
                    continue
                for part in group.parts[owners[a]]:
                    yield from _tasks(part, int(rows[a]), out[a:b])

    def by_threads(self, variables: Sequence[str]) -> bool:
        """Whether threads read all of these side by side: from chunks, past libraries that hold locks."""
        return all(chunks_of(field) for name in variables for _, field, _ in self._find(name))

    def float16_packing(self, variables: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Scales and offsets (V,) float32 of variables that are all stored as float16; None: they are not.

        Then `reading` fills an array of float16 with them as they are stored.
        """
        fields = [[field for _, field, _ in self._find(name)] for name in variables]
        stored = {field.file.arrays[field.array].dtype for each in fields for field in each}
        packings = [{(f.packing.scale, f.packing.offset, f.packing.fills) for f in each} for each in fields]
        if stored != {np.dtype("float16")} or any(len(each) > 1 for each in packings):
            return None
        scales, offsets, fills = zip(*(each.pop() for each in packings), strict=True)
        if any(fills):
            return None
        return np.array(scales, np.float32), np.array(offsets, np.float32)

    def read_static(self, name: str) -> np.ndarray:
        """A field without time (H, W) float32; of a variable with time the first date's. DataError if not
        there.
        """
        if name in self._static:
            return read_one(*self._static[name])
        return self.read(int(np.argmax(self.has([name]))), [name])[0]

    def _content(self) -> str:
        """What there is, for an error: the first few names and why others are not read."""
        names = [*self._locations, *self._static][:5]
        return (
            ", ".join([*names, *(f"{name} ({why})" for name, why in self.unreadable.items())][:6])
            or "no fields"
        )

    def _find(self, name: str) -> list[Location]:
        """Where a variable lies, or a DataError with the reason or the nearest name."""
        if name in self._locations:
            return self._locations[name]
        if name in self._static:
            raise DataError(f"{self.path!r} has {name!r} without a time axis: list it under static variables")
        why = self.unreadable.get(full_name(name).partition(":")[0])
        hint = f": {why}" if why else nearest_name(name, [*self.variables, *self.static_variables])
        raise DataError(f"{self.path!r} has no variable {name!r}{hint}")

    def _axes_of(self, name: str) -> tuple[int, ...]:
        """The time axes on which a variable lies; variables with the same ones are read together."""
        return tuple(axis for axis, _, _ in self._find(name))

    def _locate(self, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """For every date (T,): which of these time axes has it first (-1: none), and the row on that axis."""
        owners, rows = np.full(len(self.times), -1, np.int32), np.zeros(len(self.times), np.int32)
        for number, axis in enumerate(axes):
            dates, first = np.unique(self._axes[axis], return_index=True)
            dates, first = dates[~np.isnat(dates)], first[~np.isnat(dates)]
            at = np.searchsorted(self.times, dates)
            free = owners[at] < 0
            owners[at[free]], rows[at[free]] = number, first[free]
        return owners, rows

    def _grouped(self, names: tuple[str, ...]) -> list[Group]:
        """How to read these variables; found once, because a training reads the same ones all the time."""
        if names not in self._groups:
            outputs: dict[tuple[int, ...], list[int]] = {}
            for output, name in enumerate(names):
                outputs.setdefault(self._axes_of(name), []).append(output)
            self._groups[names] = [
                Group(tuple(own), *self._locate(axes), [self._parts(names, own, i) for i in range(len(axes))])
                for axes, own in outputs.items()
            ]
        return self._groups[names]

    def _parts(self, names: tuple[str, ...], outputs: Sequence[int], number: int) -> list[Part]:
        """How to read these output rows from the time axis of this number: each array's slices of levels."""
        wanted: dict[StoredField, list[tuple[int, int]]] = {}
        for output in outputs:
            _, field, position = self._locations[names[output]][number]
            wanted.setdefault(field, []).append((position, output))
        return [part for field, pairs in wanted.items() for part in _level_slices(field, pairs)]


def _tasks(part: Part, first: int, out: np.ndarray) -> Iterator[Task]:
    """What fills the part's rows of `out` (n, V, H, W) from `first` on, on the time axis of its array."""
    field, levels, pairs = part
    if array := chunks_of(field):
        yield from chunk_tasks(
            field,
            array,
            [
                Wanted(first + date, levels.start + position, fields[output])
                for date, fields in enumerate(out)
                for output, position in pairs
            ],
        )
    else:
        yield partial(_read_part, part, first, out)


def _read_part(part: Part, first: int, out: np.ndarray) -> None:
    field, levels, pairs = part
    block = field.read(slice(first, first + len(out)), levels)
    for output, position in pairs:
        out[:, output] = block[:, position]


def _level_slices(field: StoredField, pairs: list[tuple[int, int]]) -> Iterator[Part]:
    """Slices that cover the (position, output) pairs of a field without touching a chunk that none of them
    needs.
    """
    chunk, pairs = field.chunk("level"), sorted(pairs)
    while pairs:
        end = 1
        while end < len(pairs) and pairs[end][0] // chunk - pairs[end - 1][0] // chunk <= 1:
            end += 1
        near, pairs = pairs[:end], pairs[end:]
        first = near[0][0]
        yield field, slice(first, near[-1][0] + 1), [(output, position - first) for position, output in near]


def _runs(owners: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Stretches [a, b) that lie in one file on consecutive rows."""
    broken = (np.diff(owners) != 0) | ((np.diff(rows) != 1) & (owners[1:] >= 0))
    cuts = [0, *(np.flatnonzero(broken) + 1).tolist(), len(owners)]
    return zip(cuts[:-1], cuts[1:], strict=True)


def read_one(field: StoredField, position: int, row: int = 0) -> np.ndarray:
    """(H, W) float32: one level of a field, at one row of its time axis if it has one."""
    return field.read(slice(row, row + 1), slice(position, position + 1))[0, 0].astype(np.float32)


def _common_grid(path: str, fields: Sequence[StoredField], unreadable: dict[str, str]) -> Grid:
    """The grid of all fields, or a DataError naming two files that differ."""
    if not fields:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(unreadable.items())[:3])
        raise DataError(
            f"cannot read {path!r}: no variable in it has latitude and longitude{'; ' * bool(why)}{why}"
        )
    first = fields[0]
    for field in fields:
        if not field.orientation.grid.same_as(first.orientation.grid):
            files = [f"{f.file.path} {f.orientation.grid.shape}" for f in (first, field)]
            raise DataError(
                f"cannot read {path!r} as one archive: grids differ: {' and '.join(files)}; name one file"
            )
    return first.orientation.grid


def _extra_dimensions(fields: Sequence[StoredField]) -> dict[str, int]:
    """Name -> size of those that are no axis of analyses."""
    arrays = [(field.file.arrays[field.array], field.roles) for field in fields]
    extra = [(array, i) for array, roles in arrays for i, role in enumerate(roles) if not role]
    return {array.dims[i]: array.shape[i] for array, i in extra}


def all_fields(
    path: str, picks: Mapping[str, str] | None = None, access: Access = NO_OPTIONS
) -> tuple[list[StoredField], dict[str, str]]:
    """The fields of all files that a path stands for, and the arrays that cannot be read, with the reason."""
    fields, unreadable = [], {}
    for name in find_files(path):
        found, reasons = stored_fields(open_file(name, access), picks=picks)
        fields += found
        unreadable |= reasons
    return fields, unreadable


def open_archive(path: str, picks: Mapping[str, str] | None = None, access: Access = NO_OPTIONS) -> Archive:
    """Open analyses: a Zarr store (folder or fsspec URL), a NetCDF or HDF5 file, a folder or a glob of them.

    picks: name of a dimension that is no axis of analyses -> the label of what is read of it. access: how a
    URL is read. DataError, one line naming path and reason, for anything that cannot be read as analyses on
    one grid.
    """
    return Archive(path, *all_fields(path, picks, access), picks)
