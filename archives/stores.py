"""Zarr stores in WeatherBench2's schema, made empty and filled later: what is not written yet is NaN.

And the codecs that every store is read with, which importing this enters into Zarr's registries: a blosc
chunk that was cut short is refused, where the library reads past its end and gives what lies there.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import xarray as xr
import zarr
from numcodecs import Blosc
from numcodecs.compat import ensure_contiguous_ndarray
from zarr.codecs import BloscCodec
from zarr.registry import register_codec

from archives.grid import Grid
from archives.variables import group_levels, split_name, units

COMPRESSOR = Blosc(cname="lz4", clevel=5, shuffle=Blosc.SHUFFLE)  # WeatherBench2's


def all_levels(variables: Sequence[str]) -> list[int]:
    """Of all variables, ascending (hPa): the arrays of a store have them in common, as in WeatherBench2."""
    own = group_levels(variables).values()
    return sorted({level for levels in own for level in levels if level is not None})


def create_store(
    path: str | Path,
    variables: Sequence[str],
    grid: Grid,
    axes: Mapping[str, np.ndarray],
    chunks: Mapping[str, int],
    attributes: Mapping[str, str],
    own_units: Mapping[str, str] | None = None,
) -> None:
    """Zarr 2 with consolidated metadata: float32 arrays (*axes[, level], latitude, longitude).

    axes: name -> coordinate; chunks: name of an axis -> how many of it lie in a chunk, whole ones otherwise;
    own_units: of variables that the project does not know.
    """
    levels = all_levels(variables)
    coords = {
        **axes,
        **({"level": ("level", levels, {"units": "hPa"})} if levels else {}),
        "latitude": ("latitude", grid.latitude, {"units": "degrees_north"}),
        "longitude": ("longitude", grid.longitude, {"units": "degrees_east"}),
    }
    given = {split_name(name)[0]: text for name, text in (own_units or {}).items()}
    empty = xr.Dataset(coords=coords, attrs=dict(attributes))
    empty.to_zarr(path, mode="w", zarr_format=2, consolidated=False)
    for name, own in group_levels(variables).items():
        dims = [*axes, *["level"] * (None not in own), "latitude", "longitude"]
        zarr.create_array(
            str(path),
            name=name,
            shape=tuple(empty.sizes[dim] for dim in dims),
            chunks=tuple(chunks.get(dim, empty.sizes[dim]) for dim in dims),
            dtype="float32",
            compressors=COMPRESSOR,
            fill_value=np.nan,
            zarr_format=2,
            attributes={"_ARRAY_DIMENSIONS": dims, "units": units(name) or given.get(name, "")},
        )
    zarr.consolidate_metadata(str(path), zarr_format=2)


# -- chunks that are whole

HEADER, SIZE_AT = 16, slice(12, 16)  # blosc 1: the last four bytes of its header are the chunk's size


def check_whole(chunk: Any) -> None:
    """RuntimeError, as blosc raises for other damage: these are not the bytes that the header speaks of."""
    content = memoryview(chunk).cast("B")
    written = int.from_bytes(content[SIZE_AT], "little")
    if len(content) < HEADER or written != len(content):
        raise RuntimeError(f"a blosc chunk of {len(content)} bytes, of which {written} were written")


class WholeBlosc(Blosc):
    """Of format 2."""

    codec_id = "blosc"

    def decode(self, buf: Any, out: Any = None) -> Any:
        check_whole(ensure_contiguous_ndarray(buf))
        return super().decode(buf, out)


class WholeBloscCodec(BloscCodec):
    """Of format 3."""

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        check_whole(chunk_bytes.as_numpy_array())
        return await super()._decode_single(chunk_bytes, chunk_spec)


numcodecs.register_codec(WholeBlosc)
# A folder in a store that is none: what is missing is said by who needs it.
warnings.filterwarnings("ignore", message="Object at .* is not recognized")
register_codec("blosc", WholeBloscCodec)
zarr.config.set({"codecs.blosc": f"{__name__}.{WholeBloscCodec.__name__}"})  # of the two, this one
