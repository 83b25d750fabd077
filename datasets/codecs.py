"""Blosc codecs that refuse a chunk that was cut short.

c-blosc reads beyond the end of a truncated buffer and returns what is in memory there, as numcodecs 0.16 and
zarr 3.1 pass it on: the registries of both are given these instead.
"""

import warnings
from typing import Any

import numcodecs
import zarr
from numcodecs import Blosc
from numcodecs.compat import ensure_contiguous_ndarray
from zarr.codecs import BloscCodec
from zarr.registry import register_codec

HEADER, SIZE_AT = 16, slice(12, 16)  # blosc 1: the last four bytes of its header are the chunk's size


def check_blosc_size(chunk: Any) -> None:
    """Raise RuntimeError, as blosc does for other damage, unless all bytes of the chunk are there."""
    content = memoryview(chunk).cast("B")
    size = int.from_bytes(content[SIZE_AT], "little")
    if len(content) < HEADER or size != len(content):
        raise RuntimeError(f"a blosc chunk has {len(content)} of {size} bytes")


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
