"""Arrays of files in normal form: a `Field` reads slices of one array as physical values.

float32, NaN where missing, latitude from north to south, longitude ascending, units of datasets/variables.py.
"""

import base64
import logging
import math
import multiprocessing
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from datasets.grid import FLOAT32_DEGREES, Grid, equal_spacing, is_periodic
from datasets.remote import describe_error
from datasets.variables import OFTEN_ZERO, UnitConversion
from errors import DataError

logger = logging.getLogger(__name__)
LAND_CLASSES = (1, 3, 4)  # NCAR's LSMASK: 0 ocean, 1 land, 2 lake, 3 small island, 4 ice shelf


@dataclass(frozen=True)
class Decoding:
    """Conversion of stored numbers to physical ones (CF 8.1): `fills` are missing, others scaled."""

    fills: tuple[float, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    unsigned: bool = False
    classes: tuple[int, ...] = ()  # 1 where the stored class is one of these, else 0

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Return physical values, float64 if they are scaled, to be rounded once; NaN where missing."""
        if self.classes:
            return np.isin(stored, self.classes).astype(np.float32)
        if self.unsigned:
            stored = stored.view(stored.dtype.str.replace("i", "u"))
        values = stored
        if self.scale != 1 or self.offset != 0:
            values = stored.astype(np.float64)
            values *= self.scale
            values += self.offset
        for fill in self.fills:
            missing = stored == np.asarray(fill, stored.dtype)
            if missing.any():
                fresh = values is not stored and values.dtype.kind == "f"
                values = values if fresh else values.astype(np.float32)
                values[missing] = np.nan
        return values


def find_decoding(array: str, variable: xr.Variable, conversion: UnitConversion) -> Decoding:
    """Return the decoding that the attributes of an array describe. Raises DataError."""
    if array == "LSMASK":
        return Decoding(classes=LAND_CLASSES)
    attrs, dtype = variable.attrs, variable.dtype
    unsigned = str(attrs.get("_Unsigned", "")).lower() == "true" and dtype.kind == "i"
    dtype = np.dtype(dtype.str.replace("i", "u")) if unsigned else dtype
    fills = {
        _fit_fill(_parse_fill(value), dtype)
        for key in ("_FillValue", "missing_value")
        for value in np.atleast_1d(attrs.get(key, [])).tolist()
    }
    scale, offset = (
        _single_number(attrs, key, default) for key, default in (("scale_factor", 1), ("add_offset", 0))
    )
    factor = conversion.factor
    return Decoding(
        tuple(fill for fill in fills if not math.isnan(fill)),
        scale * factor,
        offset * factor + conversion.offset,
        unsigned,
    )


def _parse_fill(value: Any) -> float:
    """Return a fill value as a number; xarray writes those of Zarr 3 as base64 of eight bytes."""
    return struct.unpack("<d", base64.b64decode(value))[0] if isinstance(value, str) else float(value)


def _fit_fill(value: float, dtype: np.dtype) -> float:
    """Return the fill value as a number of the stored type; a signed one may be written as unsigned."""
    if dtype.kind not in "iu" or math.isnan(value):
        return value
    info, bits = np.iinfo(dtype), 8 * dtype.itemsize
    for candidate in (value, value - 2**bits, value + 2**bits):
        if info.min <= candidate <= info.max and candidate == int(candidate):
            return candidate
    raise DataError(f"its _FillValue {value:g} does not fit its type {dtype.name}; correct the attribute")


def _single_number(attrs: Mapping[str, Any], key: str, default: float) -> float:
    values = np.atleast_1d(attrs.get(key, default))
    try:
        number = float(values[0]) if values.size == 1 else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"its {key} is {values.tolist()}, not one finite number; correct the attribute")
    return number


@dataclass(frozen=True, eq=False)
class Orientation:
    """The grid of a file and the steps that bring its rows and columns into the grid's order."""

    grid: Grid
    width: int  # columns of the file without a repeated last one
    rows: slice
    columns: slice
    shift: int
    region: tuple[slice, np.ndarray] | None = None  # rows and columns of the whole grid

    @property
    def is_identity(self) -> bool:
        """True if fields are stored as they are returned."""
        return (self.rows, self.columns, self.shift, self.region) == (slice(None), slice(None), 0, None)

    def apply(self, block: np.ndarray) -> np.ndarray:
        """Turn (..., H, W) of the file to (..., H, W) of the grid: north to south, longitudes ascending."""
        turned = block[..., self.rows, self.columns][..., : self.width]
        if self.region:
            turned = turned[..., self.region[0], :]
        turned = np.roll(turned, -self.shift, axis=-1) if self.shift else turned
        return turned[..., self.region[1]] if self.region else turned

    def crop(self, region: Sequence[float]) -> "Orientation":
        """Return the orientation of a part of the grid. Raises ConfigError."""
        grid, rows, columns = self.grid.crop(region)
        return replace(self, grid=grid, region=(rows, columns))


def find_orientation(latitude: np.ndarray, longitude: np.ndarray) -> Orientation:
    """Return the orientation of coordinates (H,), (W,); ValueError if they are not monotonic.

    Global longitudes are turned to 0..360 without a repeated last column. Regional longitudes stay as they
    are (-10..20), made continuous where they cross the end of the circle.
    """
    rows = slice(None) if latitude[0] > latitude[-1] else slice(None, None, -1)
    east = np.unwrap(np.asarray(longitude, np.float64), period=360)
    columns = slice(None, None, -1) if east[0] > east[-1] else slice(None)
    east, shift = equal_spacing(east[columns]), 0
    east = east[: len(east) - int(east[-1] - east[0] > 360 - FLOAT32_DEGREES)]
    if is_periodic(east):
        east = np.round(east, 9) % 360
        shift = int(np.argmin(east))
        east = np.roll(east, -shift)
    elif east[0] >= 180 and east[-1] >= 360:
        east = east - 360
    return Orientation(Grid(np.asarray(latitude, np.float64)[rows], east), len(east), rows, columns, shift)


@dataclass(frozen=True, eq=False)
class Field:
    """One array of a file: a variable, or several along its level (or channel) axis.

    `names` has one name for each position on that axis; `roles` names the array's dimensions, "" one that is
    dropped: its element at `selected` is read. `times` are the dates of the file, in its order, or None for a
    constant field. It can be pickled; each process opens the file itself.
    """

    path: str
    array: str
    raw: Any  # xr.Variable or zarr.Array: raw[slices] reads
    names: tuple[str, ...]
    roles: tuple[str, ...]
    times: np.ndarray | None  # datetime64[s]
    orientation: Orientation
    decoding: Decoding
    units: str = ""
    dims: tuple[str, ...] = ()
    chunks: tuple[int, ...] | None = None  # elements that are decoded together
    selected: Mapping[int, int] = field(default_factory=dict)  # number of a dimension -> position, default 0

    def chunk(self, role: str) -> int:
        """Return how many elements of an axis are decoded together."""
        return self.chunks[self.roles.index(role)] if self.chunks and role in self.roles else 1

    def size(self, role: str) -> int:
        """Return the size of an axis, 1 if there is none."""
        return self.raw.shape[self.roles.index(role)] if role in self.roles else 1

    def crop(self, region: Sequence[float]) -> "Field":
        """Return the field on the part of its grid that is in a region. Raises ConfigError."""
        return replace(self, orientation=self.orientation.crop(region))

    def read(self, axes: Sequence[str], slices: Mapping[str, slice]) -> np.ndarray:
        """Return (*axes, latitude, longitude) physical values: the slices of some axes, all of the others.

        Axes that the array lacks have size 1. Preliminary data (a second `expver`) fill what is missing in
        the final ones. Raises DataError naming the file and the date.
        """
        key = tuple(
            slices.get(role, slice(None)) if role else self.selected.get(i, 0)
            for i, role in enumerate(self.roles)
        )
        stored = self._fetch(key)
        values = self.decoding.decode(stored)
        for missing in self._missing_chunks(key, stored):
            values = values.astype(np.float32) if values is stored else values
            values[missing] = np.nan
        roles = [role for role in self.roles if role]
        if "cell" in roles:
            values = values.reshape(*values.shape[:-1], -1, self.orientation.width)
            roles = [*roles[:-1], "latitude", "longitude"]
        order = ("expver", *axes, "latitude", "longitude")
        block = values.transpose([roles.index(role) for role in order if role in roles])
        for position, role in enumerate(order):
            block = block if role in roles else np.expand_dims(block, position)
        merged = block[0]
        for version in block[1:]:
            merged = np.where(np.isnan(merged), version, merged)
        return self.orientation.apply(merged)

    def _fetch(self, key: tuple[int | slice, ...]) -> np.ndarray:
        try:
            return np.asarray(self.raw[key])
        except MemoryError:
            raise
        except Exception as error:  # every codec raises its own
            raise self.unreadable(error, self._find_damaged(key)) from None

    def unreadable(self, error: Exception, row: int | None) -> DataError:
        """Return the DataError for what a library raised over the values at a row of the time axis."""
        date = "" if row is None or self.times is None else f" at {self.times[row]}"
        fix = "restore the file, or leave the date out of data.train_period and data.validation_period"
        return DataError(f"{self.path}: {self.array}{date} cannot be read ({describe_error(error)}); {fix}")

    def _find_damaged(self, key: tuple[int | slice, ...]) -> int | None:
        """Return the first row of the time axis that cannot be read."""
        if "time" not in self.roles or self.times is None:
            return None
        axis = self.roles.index("time")
        for row in range(*key[axis].indices(len(self.times))):  # type: ignore[union-attr]
            try:
                np.asarray(self.raw[(*key[:axis], slice(row, row + 1), *key[axis + 1 :])])
            except Exception:  # the error that is reported
                return row
        return None

    def _missing_chunks(
        self, key: tuple[int | slice, ...], stored: np.ndarray
    ) -> Iterator[tuple[slice, ...]]:
        """Yield the parts of `stored` with chunks that are not in the Zarr store and read as its fill value.

        Of an array with shards, the shards: writers leave out chunks of fill values inside one. A fill value
        of NaN needs no test. Cloud, rain and masks may be left out where they are zero.
        """
        fill = getattr(self.raw, "fill_value", None)
        if fill is None or fill != fill or self.names[0].partition(":")[0] in OFTEN_ZERO:
            return
        chunks = self.raw.shards or self.raw.chunks  # files of the store
        spans = [
            each.indices(size)[:2] if isinstance(each, slice) else (each, each + 1)
            for each, size in zip(key, self.raw.shape, strict=True)
        ]
        parts = [list(_split_span(*span, chunk)) for span, chunk in zip(spans, chunks, strict=True)]
        dims = [i for i, each in enumerate(key) if isinstance(each, slice)]  # that `stored` has
        for chosen in product(*parts):
            inside = tuple(chosen[i][1] for i in dims)
            if stored[tuple(part.start for part in inside)] == fill and not self._has_chunk(
                [c for c, _ in chosen]
            ):
                row = next((chosen[i] for i in dims if self.roles[i] == "time"), None)
                warn_missing_chunk(self, spans[self.roles.index("time")][0] + row[1].start if row else None)
                yield inside

    def _has_chunk(self, chunk: Sequence[int]) -> bool:
        from zarr.core.sync import sync

        key = f"{self.raw.store_path.path}/{self.raw.metadata.encode_chunk_key(tuple(chunk))}".lstrip("/")
        return sync(self.raw.store_path.store.exists(key))


def _split_span(first: int, end: int, chunk: int) -> Iterator[tuple[int, slice]]:
    """Yield (number of a chunk, its slice of first..end) along one dim."""
    for number in range(first // chunk, -(-end // chunk)):
        yield number, slice(max(number * chunk, first) - first, min((number + 1) * chunk, end) - first)


_WARNED: set[tuple[str, str]] = set()  # (file, array) of this process, so that a warning is logged once


def warn_missing_chunk(field: Field, row: int | None) -> None:
    """Log once for an array that a chunk is not in the store."""
    if (field.path, field.array) in _WARNED or multiprocessing.parent_process() is not None:
        return
    _WARNED.add((field.path, field.array))
    first = "" if row is None or field.times is None else f", the first at {field.times[row]},"
    logger.warning(f"{field.path}: {field.array}: chunks{first} are not in the store: read as missing values")
