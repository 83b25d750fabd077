"""Chunks of a Zarr array, straight from the bytes of a store into the memory that they are wanted in.

zarr-python serves every array there can be, at some milliseconds and copies a chunk; training reads millions
of them. Here a chunk is what the store holds of it and one call of its codec, which lets other threads run.
Arrays with other codecs, orders or byte orders than stores of analyses have are left to zarr-python.
"""

import math
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numcodecs
import numpy as np
import zarr.codecs as codecs
from numcodecs import blosc  # type: ignore[reportAttributeAccessIssue]  # compiled
from numcodecs.abc import Codec

from archives.stores import WholeBlosc, check_whole

Index = tuple[int, ...]  # of a chunk: its number along each dim
ABSENT = 2**64 - 1  # offset and size of a chunk that a shard does not hold
UNPACKED_AT = slice(4, 8)  # of blosc's header: the size of what was packed
KEPT_INDEXES = 1024  # of shards, 16 bytes a chunk
KEPT_FILES = 128  # open, of each store: the system gives a process 1024


class Done(NamedTuple):
    """What threads of this process have done."""

    reading: float = 0.0  # seconds, from the store
    decoding: float = 0.0  # seconds
    bytes: int = 0  # decoded
    asked: int = 0  # objects that a disk cache was asked for
    kept: int = 0  # those that it had


class Work:
    """Adds it up."""

    def __init__(self) -> None:
        self.done, self.lock = Done(), threading.Lock()

    def add(self, done: Done) -> None:
        with self.lock:
            self.done = Done(*map(add, self.done, done))  # type: ignore[reportArgumentType]  # ints stay ints

    def take(self) -> Done:
        """Since it was asked last."""
        with self.lock:
            taken, self.done = self.done, Done()
        return taken


work = Work()


class Objects(Protocol):
    """The files or objects of a store, read from many threads."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> Any | None:
        """Bytes of one, as a buffer; a negative start counts from the end; None: there is none. A buffer is
        good until the thread reads the next.
        """


class OpenFile:
    """Closed with the last reference to it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.number).st_size

    def __del__(self) -> None:
        if hasattr(self, "number"):  # it was opened
            os.close(self.number)


class LocalObjects:
    """Files below a folder, some of them kept open, into memory that each thread keeps.

    Opening one for every chunk lets other threads run three times more than reading does, and each time this
    one has to wait for its turn: a quarter of the rate of chunks of 260 kB.
    """

    def __init__(self, root: str) -> None:
        self.root, self.own, self.lock = root, threading.local(), threading.Lock()
        self.files: OrderedDict[str, OpenFile] = OrderedDict()

    def read(self, key: str, start: int = 0, length: int | None = None) -> memoryview | None:
        """Raises OSError."""
        try:
            file = self._open(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        start = max(0, start + file.size) if start < 0 else start
        there = max(0, file.size - start)  # a damaged index may ask for anything
        return self._fill(file, start, there if length is None else min(length, there))

    def _open(self, key: str) -> OpenFile:
        with self.lock:
            if key in self.files:
                self.files.move_to_end(key)
                return self.files[key]
        file = OpenFile(f"{self.root}/{key}")
        with self.lock:
            self.files[key] = file
            if len(self.files) > KEPT_FILES:  # closed when the last thread has read from it
                self.files.popitem(last=False)
        return file

    def _fill(self, file: OpenFile, start: int, length: int) -> memoryview:
        kept = getattr(self.own, "memory", None)
        if kept is None or len(kept) < length:
            kept = self.own.memory = memoryview(bytearray(length + length // 4))
        done = 0
        while done < length and (count := os.preadv(file.number, [kept[done:length]], start + done)):
            done += count
        return kept[:done]  # shorter where the file is: its codec says so

    def __reduce__(self) -> Any:
        return LocalObjects, (self.root,)


@dataclass(frozen=True)
class Inner:
    """How a shard is divided."""

    chunks: Index  # shape of an inner chunk
    counts: Index  # of them, along each dim; () until the shard's shape is known
    index_at_end: bool
    index_has_checksum: bool

    @property
    def index_bytes(self) -> int:
        return 16 * math.prod(self.counts) + 4 * self.index_has_checksum


class ChunkedArray:
    """One array of a store, read chunk by chunk; `chunks` is the shape of what is decoded together."""

    def __init__(
        self, array: Any, objects: Objects, codec: Codec | None, inner: Inner | None, has_checksum: bool
    ) -> None:
        """has_checksum: whether the last four bytes of a chunk are one of those before them."""
        self.objects, self.codec, self.prefix, self.metadata = objects, codec, array.path, array.metadata
        self.has_checksum = has_checksum
        self.shape, self.dtype, self.fill = tuple(array.shape), array.dtype, array.fill_value
        self.chunks = inner.chunks if inner else tuple(array.chunks)
        self.inner = inner
        if inner:
            counts = tuple(whole // part for whole, part in zip(array.shards, inner.chunks, strict=True))
            self.inner = replace(inner, counts=counts)
        self.nbytes = math.prod(self.chunks) * self.dtype.itemsize
        self.indexes: OrderedDict[Index, np.ndarray | None] = OrderedDict()
        self.lock = threading.Lock()

    def decode(self, chunk: Index, out: np.ndarray) -> bool:
        """Fills `out`, contiguous, of the chunk's shape and dtype; False where the store has no such chunk.

        Whatever a codec raises on damaged bytes, and OSError.
        """
        started = time.perf_counter()
        content = self._content(chunk)
        if content is None:
            return False
        read = time.perf_counter()
        content = without_checksum(content, "chunk") if self.has_checksum else content
        flat: Any = out.reshape(-1).view(np.uint8)
        codec: Any = self.codec
        decoded: Any = content
        if isinstance(codec, numcodecs.Blosc):  # straight into place, if it is as long as it should be
            size = int.from_bytes(content[UNPACKED_AT], "little")
            if size == self.nbytes:
                check_whole(content)
                decoded = blosc.decompress(content, flat)  # what codec.decode does after 10 us
        else:
            decoded = codec.decode(content) if codec else content
            size = memoryview(decoded).nbytes
        if size != self.nbytes:
            raise ValueError(f"a chunk of {size} bytes, where {self.nbytes} are due")
        if decoded is not flat:
            flat[:] = np.frombuffer(decoded, np.uint8)
        work.add(Done(read - started, time.perf_counter() - read, self.nbytes))
        return True

    def _content(self, chunk: Index) -> Any | None:
        if not self.inner:
            return self.objects.read(self._key(chunk))
        shard = tuple(i // n for i, n in zip(chunk, self.inner.counts, strict=True))
        index = self._index(shard)
        if index is None:
            return None
        inside = tuple(i % n for i, n in zip(chunk, self.inner.counts, strict=True))
        offset, length = (int(each) for each in index[inside])
        return None if offset == ABSENT else self.objects.read(self._key(shard), offset, length)

    def _key(self, chunk: Index) -> str:
        return f"{self.prefix}/{self.metadata.encode_chunk_key(chunk)}"

    def _index(self, shard: Index) -> np.ndarray | None:
        """(*counts, 2): offset and size of a shard's chunks."""
        with self.lock:
            if shard in self.indexes:
                self.indexes.move_to_end(shard)
                return self.indexes[shard]
        found = self._read_index(shard)
        with self.lock:
            self.indexes[shard] = found
            while len(self.indexes) > KEPT_INDEXES:
                self.indexes.popitem(last=False)
        return found

    def _read_index(self, shard: Index) -> np.ndarray | None:
        assert self.inner
        size = self.inner.index_bytes
        start = -size if self.inner.index_at_end else 0
        content = self.objects.read(self._key(shard), start, size)
        if content is None:
            return None
        if len(content) != size:
            raise ValueError(f"a shard's index of {len(content)} bytes, where {size} are due")
        if self.inner.index_has_checksum:
            content = without_checksum(content, "shard's index")
        return np.frombuffer(bytes(content), "<u8").reshape(*self.inner.counts, 2)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock", "indexes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock(), indexes=OrderedDict())


def without_checksum(content: Any, what: str) -> Any:
    """The bytes before the CRC-32C at their end. ValueError: they are not those that were written."""
    if len(content) < 4 or google_crc32c.value(bytes(content[:-4])) != struct.unpack("<I", content[-4:])[0]:
        raise ValueError(f"a {what} with another checksum than its own")
    return content[:-4]


def chunked(array: Any, objects: Objects) -> ChunkedArray | None:
    """A Zarr array as chunks; None where it is stored in a way that only zarr-python reads."""
    if not array.dtype.isnative or array.dtype.hasobject or not array.ndim:
        return None
    found = _format2(array.metadata) if array.metadata.zarr_format == 2 else _format3(array.metadata.codecs)
    return ChunkedArray(array, objects, *found) if found else None


Decoder = tuple[Codec | None, Inner | None, bool]  # of a chunk, of a shard, whether a chunk has a checksum


def _format2(metadata: Any) -> Decoder | None:
    if metadata.order != "C" or metadata.filters:
        return None
    compressor = metadata.compressor
    known = (numcodecs.Blosc, numcodecs.Zstd, numcodecs.LZ4, numcodecs.Zlib, numcodecs.GZip)
    if compressor is None or isinstance(compressor, known):
        return compressor, None, False
    return None


def _format3(chain: Sequence[Any], inner: Inner | None = None) -> Decoder | None:
    """bytes, then perhaps one compressor, a checksum; and these in shards."""
    if len(chain) == 1 and isinstance(chain[0], codecs.ShardingCodec) and not inner:
        return _sharded(chain[0])
    has_checksum = bool(chain) and isinstance(chain[-1], codecs.Crc32cCodec)
    first, *compressors = chain[: len(chain) - has_checksum] or [None]
    if not isinstance(first, codecs.BytesCodec) or len(compressors) > 1:
        return None
    if not compressors:
        return None, inner, has_checksum
    for known, make in _COMPRESSORS.items():
        if isinstance(compressors[0], known):
            return make(), inner, has_checksum
    return None


_COMPRESSORS = {
    codecs.BloscCodec: WholeBlosc,
    codecs.ZstdCodec: numcodecs.Zstd,
    codecs.GzipCodec: numcodecs.GZip,
}


def _sharded(codec: codecs.ShardingCodec) -> Decoder | None:
    checksum = len(codec.index_codecs) == 2 and isinstance(codec.index_codecs[1], codecs.Crc32cCodec)
    if not isinstance(codec.index_codecs[0], codecs.BytesCodec) or len(codec.index_codecs) > 1 + checksum:
        return None
    chunks = tuple(codec.chunk_shape)
    at_end = str(getattr(codec.index_location, "value", codec.index_location)) == "end"
    return _format3(codec.codecs, Inner(chunks, (), at_end, checksum))
