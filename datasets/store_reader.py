"""Fast reading of the stores of datasets.convert: a chunk for each date, in shards, blosc and CRC-32C.

A field is one read of its file and one call of its codec, which releases Python's lock, into the memory of
the batch; zarr-python needs some milliseconds and copies for each chunk.
"""

import os
import resource
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from io import FileIO
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from crc32c import crc32c
from numcodecs import blosc  # type: ignore[reportAttributeAccessIssue]  # compiled
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

from datasets.codecs import check_blosc_size
from datasets.fields import Field
from datasets.remote import is_url
from errors import DataError

Task = Callable[[], None]
ABSENT = 2**64 - 1  # offset of a chunk that a shard does not contain
# Of a process, which may open 1024 or more, on some systems 256.
MAX_OPEN_FILES = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) * 3 // 8


@lru_cache(MAX_OPEN_FILES)
def _open(path: str) -> FileIO:
    """Return a file that stays open for its next chunk: opening it each time lowers the rate by a quarter.

    It is closed with the last reference to it.
    """
    return FileIO(path)


_THREAD = threading.local()


class StoreReader:
    """Reader of the fields of one array, for all threads of one process."""

    def __init__(self, field: Field) -> None:
        array = field.raw
        self.field, self.shape, self.dtype = field, array.chunks[1:], array.dtype
        self.dates_per_shard, self.nbytes = array.shards[0], int(np.prod(array.chunks)) * array.dtype.itemsize
        self.folder = os.path.join(field.path, array.path)
        self.encode_key = array.metadata.encode_chunk_key
        is_plain = self.dtype == np.float16 or (field.decoding.scale, field.decoding.offset) == (1, 0)
        self.as_stored = is_plain and field.orientation.is_identity
        self.shards: dict[int, tuple[str, list[tuple[int, int]]]] = {}  # paths, offsets and lengths of chunks

    def fill(self, row: int, out: np.ndarray) -> None:
        """Fill `out` (H, W) with the field at a row of the time axis; NaN if the store has no chunk for it.

        float32 gets physical values, float16 the stored numbers. Raises DataError naming file and date.
        """
        shard, position = divmod(row, self.dates_per_shard)
        direct = self.as_stored and out.dtype == self.dtype and out.flags.c_contiguous
        target = out if direct else np.empty(self.shape, self.dtype)
        try:
            found = self._decode(shard, position, target)
        except (MemoryError, DataError):
            raise
        except Exception as error:  # blosc, struct and the system raise their own
            raise self.field.unreadable(error, row) from None
        if not found:
            out.fill(np.nan)  # zarr writes no chunk for a field without values
        elif not direct:
            values = target if out.dtype == np.float16 else self.field.decoding.decode(target)
            out[...] = self.field.orientation.apply(values)

    def _decode(self, shard: int, position: int, target: np.ndarray) -> bool:
        """Decode a chunk into `target`; False if there is none."""
        try:
            path, places = self.shards.get(shard) or self._open_shard(shard)
            file = _open(path)
        except FileNotFoundError:
            return False
        offset, length = places[position]
        if offset == ABSENT:
            return False
        chunk = _without_checksum(_read(file, offset, length))
        if check_blosc_size(chunk) != self.nbytes:
            raise ValueError(f"a chunk does not have {self.nbytes} bytes")
        blosc.decompress(chunk, target)
        return True

    def _open_shard(self, shard: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the path of a shard, and offset and length of each of its chunks, from its end."""
        file = _open(path := os.path.join(self.folder, self.encode_key((shard, 0, 0))))
        size = 16 * self.dates_per_shard + 4
        content = _read(file, max(0, os.fstat(file.fileno()).st_size - size), size)
        places = list(struct.iter_unpack("<QQ", _without_checksum(content)))
        self.shards[shard] = path, places  # type: ignore[assignment]
        return self.shards[shard]


def _read(file: FileIO, offset: int, length: int) -> memoryview:
    """Return bytes in memory that this thread reuses for its next read. Raises EOFError."""
    memory = getattr(_THREAD, "memory", None)
    if memory is None or len(memory) < length:
        memory = _THREAD.memory = memoryview(
            bytearray(min(length, os.fstat(file.fileno()).st_size) + length // 4)
        )
    done = 0
    while done < length and (count := os.preadv(file.fileno(), [memory[done:length]], offset + done)):
        done += count
    if done < length:
        raise EOFError(f"{done} of {length} bytes are there")
    return memory[:length]


def _without_checksum(content: memoryview) -> memoryview:
    if len(content) < 4 or crc32c(content[:-4]) != struct.unpack("<I", content[-4:])[0]:
        raise ValueError("the checksum does not match")
    return content[:-4]


_READERS: WeakKeyDictionary[Field, StoreReader | None] = WeakKeyDictionary()


def find_reader(field: Field) -> StoreReader | None:
    """Return the fast reader of a field, None if its array is not one that datasets.convert writes."""
    if field not in _READERS:
        _open.cache_clear()  # the store may have been written again since
        _READERS[field] = StoreReader(field) if _is_ours(field) else None
    return _READERS[field]


def _is_ours(field: Field) -> bool:
    array: Any = field.raw
    is_local = not is_url(field.path) and field.times is not None and not field.decoding.fills
    if not (is_local and getattr(array, "shards", None)):
        return False
    sharding = array.metadata.codecs[0]
    inner = [type(codec) for codec in sharding.codecs] if isinstance(sharding, ShardingCodec) else []
    blosc_types = [each for each in inner[1:2] if issubclass(each, BloscCodec)]
    layout = array.chunks == (1, *array.shape[1:]) == (1, *array.shards[1:])
    return bool(blosc_types) and inner[::2] == [BytesCodec, Crc32cCodec] and layout and array.ndim == 3
