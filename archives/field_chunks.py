"""Fields of a Zarr array by their chunks: which chunks hold what is wanted, and where it goes.

Shapes: H latitudes, W longitudes.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from archives.chunks import ChunkedArray, Index
from archives.stored_field import StoredField
from archives.variables import OFTEN_ZERO
from errors import DataError

Task = Callable[[], None]
PLAIN = ("time", "level", "latitude", "longitude")  # the order in which nearly all stores have them


class Wanted(NamedTuple):
    """One field: its row on the array's time axis, its position on the level axis, and where it goes."""

    row: int
    level: int
    out: np.ndarray  # (H, W) float32; or float16: as an array of that is stored


# Not for longer than the field itself, which holds a file open.
_KNOWN: WeakKeyDictionary[StoredField, ChunkedArray | None] = WeakKeyDictionary()


def chunks_of(field: StoredField) -> ChunkedArray | None:
    """The array of a field, where this module serves it; None: zarr-python, h5py or scipy do."""
    if field not in _KNOWN:
        _KNOWN[field] = _chunks_of(field)
    return _KNOWN[field]


def _chunks_of(field: StoredField) -> ChunkedArray | None:
    if field.file.kind != "zarr" or field.packing.classes or field.times is None:
        return None
    if field.roles != tuple(role for role in PLAIN if role in field.roles) or field.roles[-2:] != PLAIN[-2:]:
        return None
    array = field.file.chunked(field.array)
    turned = field.orientation.shift or field.orientation.columns != slice(None)
    return None if array and turned and array.chunks[-1] < array.shape[-1] else array


def chunk_tasks(field: StoredField, array: ChunkedArray, wanted: Sequence[Wanted]) -> list[Task]:
    """One task a chunk, in the order of the fields wanted; they may run in any order, on any threads."""
    by_chunk: dict[Index, list[tuple[Index, np.ndarray]]] = {}
    leading = [axis for axis in ("time", "level") if axis in field.roles]
    for one in wanted:
        place = [{"time": one.row, "level": one.level}[axis] for axis in leading]
        numbers = [i // n for i, n in zip(place, array.chunks, strict=False)]
        inside = tuple(i % n for i, n in zip(place, array.chunks, strict=False))
        for y in range(-(-array.shape[-2] // array.chunks[-2])):
            for x in range(-(-array.shape[-1] // array.chunks[-1])):
                by_chunk.setdefault((*numbers, y, x), []).append((inside, one.out))
    return [partial(_fill, field, array, chunk, places) for chunk, places in by_chunk.items()]


def _fill(
    field: StoredField, array: ChunkedArray, chunk: Index, places: Sequence[tuple[Index, np.ndarray]]
) -> None:
    """Decodes a chunk and puts what is wanted of it in its places. DataError: its bytes are damaged."""
    direct = _is_direct(field, array, places)
    decoded = places[0][1].reshape(array.chunks) if direct else _scratch(array)
    try:
        there = array.decode(chunk, decoded)
    except (MemoryError, DataError):  # behind a URL the reason is the store's, not the chunk's
        raise
    except Exception as error:  # every codec raises what it pleases
        raise field.unreadable(error, chunk[0] * array.chunks[0] + places[0][0][0]) from None
    if direct and there:
        return
    if not (there or array.fill is None or np.isnan(array.fill) or _may_be_left_out(field)):
        field.say_missing(chunk[0] * array.chunks[0] + places[0][0][0])
    rows, columns = (_span(number, size, whole) for number, size, whole in _last_dims(array, chunk))
    for inside, out in places:
        if there:
            part = decoded[(*inside, slice(0, len(rows)), slice(0, len(columns)))]
            values = part if _as_stored(array, out) else field.packing.decode(part)
        else:
            values = np.full((len(rows), len(columns)), _of_no_chunk(field, array, out), out.dtype)
        _put(field, values, rows, columns, out)


def _is_direct(field: StoredField, array: ChunkedArray, places: Sequence[tuple[Index, np.ndarray]]) -> bool:
    """Whether the chunk is the field, number by number."""
    out, turn, packing = places[0][1], field.orientation, field.packing
    if len(places) > 1 or out.nbytes != array.nbytes or out.dtype != array.dtype:
        return False
    plain = _as_stored(array, out) or (packing.scale, packing.offset, packing.fills) == (1.0, 0.0, ())
    straight = (turn.rows, turn.columns, turn.shift) == (slice(None), slice(None), 0)
    return out.shape == array.chunks[-2:] == array.shape[-2:] and plain and straight


def _put(field: StoredField, values: np.ndarray, rows: range, columns: range, out: np.ndarray) -> None:
    """Part of a field, at these rows and columns of the file, into `out`, which is north to south."""
    turn, (height, width) = field.orientation, out.shape
    if turn.rows != slice(None):
        rows, values = range(height - rows.stop, height - rows.start), values[::-1]
    if columns.start == 0 and columns.stop >= width:
        values = values[:, turn.columns][:, :width]
        values = np.roll(values, -turn.shift, axis=-1) if turn.shift else values
    out[rows.start : rows.stop, columns.start : columns.stop] = values[:, : width - columns.start]


def _as_stored(array: ChunkedArray, out: np.ndarray) -> bool:
    """Whether whoever asks unpacks by himself: fields in memory are float32 otherwise."""
    return out.dtype == np.float16 == array.dtype


def _of_no_chunk(field: StoredField, array: ChunkedArray, out: np.ndarray) -> float:
    """What a chunk that is not there holds: no values, but for what is nothing nearly everywhere."""
    if not _may_be_left_out(field):
        return np.nan
    fill = np.array([array.fill or 0], array.dtype)
    return float((fill if _as_stored(array, out) else field.packing.decode(fill))[0])


def _may_be_left_out(field: StoredField) -> bool:
    return field.names[0].partition(":")[0] in OFTEN_ZERO


def _last_dims(array: ChunkedArray, chunk: Index) -> zip:
    return zip(chunk[-2:], array.chunks[-2:], array.shape[-2:], strict=True)


def _span(number: int, size: int, whole: int) -> range:
    return range(number * size, min((number + 1) * size, whole))


_OWN = threading.local()


def _scratch(array: ChunkedArray) -> np.ndarray:
    """Memory of this thread, of the shape of a chunk."""
    kept = getattr(_OWN, "memory", None)
    if kept is None or kept.nbytes < array.nbytes:
        kept = _OWN.memory = np.empty(array.nbytes, np.uint8)
    return kept[: array.nbytes].view(array.dtype).reshape(array.chunks)
