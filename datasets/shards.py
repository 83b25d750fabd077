"""Files of training stores: a chunk for each date, in shards of Zarr 3, with blosc and CRC-32C.

A field is one read of its file and one call of its codec, which releases Python's lock, into the memory of
the batch. zarr-python reads and writes the same files, but needs half a millisecond and copies for each
chunk: the demo's 92,000 fields would take a minute to write.
"""

import os
import resource
import struct
import threading
import warnings
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
from crc32c import crc32c
from numcodecs import Blosc, blosc  # type: ignore[reportAttributeAccessIssue]  # compiled
from numcodecs.compat import ensure_contiguous_ndarray
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec
from zarr.registry import register_codec

from datasets.fields import Field
from datasets.remote import is_url
from errors import DataError
from jobs.durable_files import replacing

ABSENT = 2**64 - 1  # offset of a chunk that a shard does not contain
# Of a process, which may open 1024 or more, on some systems 256.
MAX_OPEN_FILES = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) * 3 // 8
BLOSC_HEADER = struct.Struct("<4xI4xI")  # of blosc 1: decoded size and the chunk's size, in bytes
_THREAD = threading.local()  # memory for one chunk, which a thread reuses


def write_shard(path: Path, fields: np.ndarray, num_chunks: int) -> None:
    """Write fields (n, H, W), at most `num_chunks`, as a shard of Zarr 3's sharding codec, with its index at
    the end; none for a field without values. Raises OSError.
    """
    index, offset = np.full((num_chunks, 2), ABSENT, "<u8"), 0
    with replacing(path) as partial, partial.open("wb") as file:
        for number, field in enumerate(fields):
            if np.isnan(field).all():
                continue
            chunk = blosc.compress(np.ascontiguousarray(field), b"lz4", 5, blosc.BITSHUFFLE)
            offset += file.write(chunk) + file.write(struct.pack("<I", crc32c(chunk)))
            index[number] = offset - len(chunk) - 4, len(chunk) + 4
        file.write(index.tobytes())
        file.write(struct.pack("<I", crc32c(index.tobytes())))


@lru_cache(MAX_OPEN_FILES)
def _open(path: str) -> FileIO:
    """Return a file that stays open for its next chunk: opening it each time lowers the rate by a quarter."""
    return FileIO(path)


class ShardReader:
    """Reader of the fields of one array of a training store, for all threads of one process."""

    def __init__(self, field: Field) -> None:
        _open.cache_clear()  # the store may have been written again since
        array = field.raw
        self.field, self.shape, self.dtype = field, array.chunks[1:], array.dtype
        self.dates_per_shard, self.nbytes = array.shards[0], int(np.prod(array.chunks)) * array.dtype.itemsize
        self.folder = os.path.join(field.path, array.path)
        self.encode_key = array.metadata.encode_chunk_key
        self.shards: dict[int, tuple[str, list[tuple[int, int]]]] = {}  # paths, offsets and lengths of chunks

    @staticmethod
    def can_read(field: Field) -> bool:
        """Return True for an array as datasets.convert writes it."""
        array = field.raw
        if is_url(field.path) or not getattr(array, "shards", None) or field.times is None:
            return False
        sharding = array.metadata.codecs[0]
        codecs = list(sharding.codecs) if isinstance(sharding, ShardingCodec) else []
        is_layout = array.chunks == (1, *array.shape[1:]) == (1, *array.shards[1:]) and array.ndim == 3
        is_packed = codecs[::2] == [BytesCodec(endian="little"), Crc32cCodec()]
        is_packed = is_packed and isinstance(codecs[1], BloscCodec)
        is_plain = array.dtype == np.float16 or (field.decoding.scale, field.decoding.offset) == (1, 0)
        is_normal = bool(np.isnan(array.fill_value)) and not field.decoding.fills and is_plain
        return is_layout and is_packed and is_normal and field.orientation.is_identity

    def fill(self, row: int, out: np.ndarray) -> None:
        """Fill `out` (H, W) with the field at a row, NaN without a chunk of it: float32 with physical values,
        float16 with stored numbers. Raises DataError naming file and date.
        """
        shard, position = divmod(row, self.dates_per_shard)
        direct = out.dtype == self.dtype and out.flags.c_contiguous
        target = out if direct else np.empty(self.shape, self.dtype)
        try:
            # -- the places of its chunks, at the end of a shard
            if shard not in self.shards:
                file = _open(path := os.path.join(self.folder, self.encode_key((shard, 0, 0))))
                size = 16 * self.dates_per_shard + 4
                content = _read(file, max(0, os.fstat(file.fileno()).st_size - size), size)
                places = list(struct.iter_unpack("<QQ", _without_checksum(content)))
                self.shards[shard] = path, places  # type: ignore[assignment]
            path, places = self.shards[shard]
            file = _open(path)  # which a complete store has; an interrupted copy may lack it
            offset, length = places[position]
            # -- the chunk
            if offset != ABSENT:
                chunk = _without_checksum(_read(file, offset, length))
                if check_blosc_size(chunk) != self.nbytes:
                    raise ValueError(f"a chunk does not have {self.nbytes} bytes")
                blosc.decompress(chunk, target)
        except (MemoryError, DataError):
            raise
        except Exception as error:  # blosc, struct and the system raise their own
            raise self.field.unreadable(error, row) from None
        if offset == ABSENT:
            out.fill(np.nan)
        elif not direct:
            out[...] = target if out.dtype == np.float16 else self.field.decoding.decode(target)


def _read(file: FileIO, offset: int, length: int) -> memoryview:
    """Return bytes in memory that this thread reuses for its next read. Raises EOFError."""
    memory = getattr(_THREAD, "memory", None)
    if memory is None or len(memory) < length:
        size = min(length, os.fstat(file.fileno()).st_size) + length // 4
        memory = _THREAD.memory = memoryview(bytearray(size))
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


# -- codecs that refuse a truncated chunk: c-blosc reads beyond its end and returns the memory there, and
# numcodecs 0.16 and zarr 3.1 do not check


def check_blosc_size(chunk: Any) -> int:
    """Return the decoded size; RuntimeError, as blosc raises for other damage, unless all bytes are there."""
    content = memoryview(chunk)
    decoded, size = (
        BLOSC_HEADER.unpack_from(content) if content.nbytes >= BLOSC_HEADER.size else (0, BLOSC_HEADER.size)
    )
    if size != content.nbytes:
        raise RuntimeError(f"a blosc chunk has {content.nbytes} of {size} bytes")
    return decoded


class CheckedBlosc(Blosc):
    """Blosc of Zarr 2."""

    codec_id = "blosc"

    def decode(self, buf: Any, out: Any = None) -> Any:
        check_blosc_size(ensure_contiguous_ndarray(buf))
        return super().decode(buf, out)


class CheckedBloscCodec(BloscCodec):
    """Blosc of Zarr 3."""

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        check_blosc_size(chunk_bytes.as_numpy_array())
        return await super()._decode_single(chunk_bytes, chunk_spec)


def register_codecs() -> None:
    """Make zarr and numcodecs decode with the codecs of this module."""
    numcodecs.register_codec(CheckedBlosc)
    register_codec("blosc", CheckedBloscCodec)
    zarr.config.set({"codecs.blosc": f"{__name__}.{CheckedBloscCodec.__name__}"})
    warnings.filterwarnings("ignore", message="Object at .* is not recognized")  # a foreign folder in a store
