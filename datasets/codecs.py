"""Blosc codecs that refuse a truncated chunk.

c-blosc reads beyond the end of a truncated buffer and returns the memory there, and numcodecs 0.16 and
zarr 3.1 do not check. These codecs replace theirs in the registries of both.
"""

import struct
import warnings
from typing import Any

import numcodecs
import zarr
from numcodecs import Blosc
from numcodecs.compat import ensure_contiguous_ndarray
from zarr.codecs import BloscCodec
from zarr.registry import register_codec

HEADER = struct.Struct("<4xI4xI")  # of blosc 1: decoded size and the chunk's size, in bytes


def check_blosc_size(chunk: Any) -> int:
    """Return the decoded size; RuntimeError, as blosc raises for other damage, unless all bytes are there."""
    content = memoryview(chunk)
    decoded, size = HEADER.unpack_from(content) if content.nbytes >= HEADER.size else (0, HEADER.size)
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
