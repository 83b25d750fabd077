"""What a conversion reads and writes: fields of an archive, cut out or regridded, as a training store.

The work is cut into parts, a shard of dates of variables that lie together in the source; a part's objects
and its summary are a function of the source and the options alone, whoever does it and in whatever order.
Shapes: n dates, V variables, H latitudes, W longitudes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from archives.archive import Archive
from archives.float16 import Packed, choose_packing, largest_error
from archives.grid import Grid, area_weights
from archives.regrid import SparseRegridder
from archives.training_store import Field, TrainingStore
from conversion.moments import Moments
from datasets.selection import evenly_spaced
from errors import DataError

PART_BYTES = 2**31  # at most, of the shards that one worker fills at once
BLOCK_BYTES = 2**28  # about, of the fields that are read at once
SAMPLE_DATES = 16  # that offsets and scales are estimated from


@dataclass(frozen=True, eq=False)
class Window:
    """A part of a grid: `rows` and `columns` of it, in the order of the new grid."""

    grid: Grid
    rows: slice
    columns: np.ndarray

    def cut(self, fields: np.ndarray) -> np.ndarray:
        """(..., H, W) of the whole grid -> of the part."""
        return fields[..., self.rows, :][..., self.columns]


@dataclass(frozen=True, eq=False)
class Source:
    """An archive as it is to be stored. Can be pickled; each process opens the files itself."""

    archive: Archive
    variables: list[str]
    grid: Grid  # of what is written
    window: Window | None = None  # cut out of the archive's grid
    regridder: SparseRegridder | None = None
    key: str = field(default="")  # by which a process knows it again

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        """(n, V, H, W) float32 of the archive's dates start .. stop - 1, NaN where missing."""
        return self.fit(self.archive.read_block(start, stop, variables))

    def fit(self, fields: np.ndarray) -> np.ndarray:
        """(..., H, W) of the archive's grid -> of ours, float32."""
        if self.regridder:
            return self.regridder(fields)
        return self.window.cut(fields) if self.window else fields

    def rows_of(self, times: np.ndarray) -> np.ndarray:
        """(n,) where the archive has these dates. DataError: it has not all of them."""
        rows = np.searchsorted(self.archive.times, times).clip(max=len(self.archive.times) - 1)
        gone = times[self.archive.times[rows] != times]
        if len(gone):
            raise DataError(
                f"{self.archive.path!r} has no {gone[0]} any more, which the conversion was begun with; "
                "give it back, or remove TARGET and begin anew"
            )
        return rows


class Part(NamedTuple):
    """The shard `number` of some variables: the dates [start, stop) of the store are new."""

    number: int
    names: tuple[str, ...]
    start: int
    stop: int

    @property
    def name(self) -> str:
        """As the journal knows it."""
        return f"{self.number} {self.names[0]}"


def cut_into_parts(source: Source, store: TrainingStore, done: int, total: int) -> list[Part]:
    """All that is to be written for the dates [done, total), shard after shard."""
    shards = range(done // store.shard_dates, -(-total // store.shard_dates))
    together = source.archive.stored_together(store.variables)
    size = int(np.prod(store.shard_shape)) * store.fields()[0].dtype.itemsize
    most = max(1, PART_BYTES // size)
    groups = [tuple(part) for names in together for part in _evenly(names, most)]
    return [
        Part(n, names, max(done, n * store.shard_dates), min(total, (n + 1) * store.shard_dates))
        for n in shards
        for names in groups
    ]


def _evenly(names: list[str], most: int) -> Iterator[list[str]]:
    """The names in as few groups of at most `most` as there have to be, of about one size."""
    count = -(-len(names) // most)
    for group in np.array_split(np.arange(len(names)), count):
        yield [names[i] for i in group]


def memory_of(parts: Sequence[Part], store: TrainingStore) -> int:
    """Bytes that a worker takes at most: the shards that it fills, what is read, one shard being encoded."""
    field = store.fields()[0].dtype.itemsize * store.shard_shape[1] * store.shard_shape[2]
    dates = [len(part.names) * (part.stop - part.number * store.shard_dates) for part in parts]
    filled = max(dates, default=0) * field
    return filled + min(3 * BLOCK_BYTES, 6 * filled) + 2 * store.shard_dates * field


_SOURCES: dict[str, Source] = {}  # of this process: files stay open from one part to the next


def convert_part(source: Source, path: str, part: Part) -> dict[str, Any]:
    """Reads, packs and writes one part; returns its summary. DataError: it cannot be read or packed."""
    source = _SOURCES.setdefault(source.key, source)
    store = TrainingStore(Path(path))
    fields = {each.variable: each for each in store.fields()}
    first = part.number * store.shard_dates
    filled = {name: _begun(store, fields[name], part) for name in part.names}
    rows = source.rows_of(store.times[part.start : part.stop])
    summaries, area = [], area_weights(source.grid.latitude)
    for a, b in _blocks(rows, source, part.names):
        block = _read(source, int(rows[a]), int(rows[b - 1]) + 1, part.names)
        dates = source.archive.times[rows[a:b]]
        by_variable = dict(zip(part.names, block.swapaxes(0, 1), strict=True))
        errors = [
            _store(values, fields[name], filled[name][part.start - first + a :][: b - a], dates)
            for name, values in by_variable.items()
        ]
        moments = [Moments.of(values, area) for values in by_variable.values()]
        valid = np.isfinite(block).any(axis=(2, 3)).astype(int).tolist()
        summaries.append({"valid": valid, "error": errors, "moments": moments})
    for name in part.names:
        store.write_shard(name, part.number, filled[name])
    return _joined(summaries, part.names)


def _begun(store: TrainingStore, field: Field, part: Part) -> np.ndarray:
    """Room for the dates of a shard, as they are stored, with those that it has already."""
    first = part.number * store.shard_dates
    shard = np.empty((part.stop - first, *store.grid_shape), field.dtype)
    if part.start > first:
        shard[: part.start - first] = store.read_stored(field.variable, first, part.start)
    return shard


def _store(values: np.ndarray, field: Field, out: np.ndarray, dates: np.ndarray) -> float:
    """values (n, H, W) float32 into `out`, as they are stored; returns the largest error."""
    if field.packed is None:
        out[:] = values
        return 0.0
    out[:] = field.packed.encode(values)
    largest = 0.0
    for exact, stored, date in zip(values, out, dates, strict=True):
        try:
            largest = max(largest, largest_error(exact, stored, field.packed))
        except DataError as error:
            raise DataError(f"{field.variable} at {date}: {error}") from None
    return largest


def _blocks(rows: np.ndarray, source: Source, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Stretches [a, b) of the rows that follow each other in the archive, a few hundred MB each at most."""
    height, width = source.archive.grid.shape
    most = max(1, BLOCK_BYTES // (4 * height * width * len(names)))
    chunk = source.archive.time_chunk(names)
    most = max(most // chunk * chunk, min(most, chunk))  # whole chunks of the source, where they fit
    a = 0
    for b in range(1, len(rows) + 1):
        if b == len(rows) or rows[b] != rows[b - 1] + 1 or b - a == most:
            yield a, b
            a = b


def _read(source: Source, start: int, stop: int, names: Sequence[str]) -> np.ndarray:
    try:
        return source.read_block(start, stop, names)
    except DataError as error:
        what = str(error).partition("; restore the file")[0]
        fix = "restore the file, or leave the date out with --period; --check lists all that is wrong"
        raise DataError(f"{what}; {fix}") from None


def _joined(summaries: Sequence[dict[str, list]], names: Sequence[str]) -> dict[str, Any]:
    """Of the blocks of a part: `valid` (n, V), the largest error and the moments of each variable."""
    valid = [row for summary in summaries for row in summary["valid"]]
    errors = np.max([summary["error"] for summary in summaries], axis=0)
    moments = [reduce(Moments.merged, each) for each in zip(*(s["moments"] for s in summaries), strict=True)]
    plain = [each.plain() for each in moments]
    return {"variables": list(names), "valid": valid, "error": errors.tolist(), "moments": plain}


def estimate_packing(source: Source, rows: np.ndarray) -> dict[str, Packed]:
    """An offset and a scale for each variable, from some of the archive's dates (n,), evenly spaced."""
    moments, area = {name: Moments() for name in source.variables}, area_weights(source.grid.latitude)
    for row in evenly_spaced(rows, SAMPLE_DATES):
        for names in source.archive.stored_together(source.variables):
            block = _read(source, int(row), int(row) + 1, names)
            for name, values in zip(names, block.swapaxes(0, 1), strict=True):
                moments[name] = moments[name].merged(Moments.of(values, area))
    return {name: choose_packing(each.mean, each.deviation) for name, each in moments.items()}
