"""One array of a file as fields on a grid: packing, orientation, and reading by dates and levels."""

import base64
import logging
import multiprocessing
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archives.files import StoredArray, StoredFile
from archives.grid import FLOAT32_DEGREES, Grid, equal_spacing, is_periodic
from archives.variables import OFTEN_ZERO
from errors import DataError

logger = logging.getLogger(__name__)
AXES = ("time", "level", "expver", "latitude", "longitude")
LAND_CLASSES = (1, 3, 4)  # NCAR's LSMASK: 0 ocean, 1 land, 2 lake, 3 small island, 4 ice shelf


@dataclass(frozen=True)
class Packing:
    """How stored numbers become physical ones (CF 8.1): `fills` are missing, the others scaled."""

    fills: tuple[float, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    classes: tuple[int, ...] = ()  # land is where the stored class is one of these

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Physical values, NaN where missing; packed ones in float64, to be rounded only once."""
        if self.classes:
            return np.isin(stored, self.classes).astype(np.float32)
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


def packing_of(name: str, array: StoredArray) -> Packing:
    if name == "LSMASK":
        return Packing(classes=LAND_CLASSES)
    texts = [np.atleast_1d(array.attrs.get(key, [])) for key in ("_FillValue", "missing_value")]
    fills = {_number(value) for value in [value for text in texts for value in text.tolist()]}
    fits = tuple(fill for fill in fills if not np.isnan(fill) and _fits(fill, array.dtype))
    return Packing(fits, float(array.attrs.get("scale_factor", 1)), float(array.attrs.get("add_offset", 0)))


def _number(value: Any) -> float:
    """A fill value as a number; xarray writes those of Zarr 3 as base64 of eight bytes."""
    return struct.unpack("<d", base64.b64decode(value))[0] if isinstance(value, str) else float(value)


def _fits(value: float, dtype: np.dtype) -> bool:
    if dtype.kind in "iu":
        return np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    return dtype.kind == "f"


@dataclass(frozen=True, eq=False)
class Orientation:
    """The grid of a file, and how its rows and columns are brought into the grid's order."""

    grid: Grid
    rows: slice
    columns: slice
    shift: int

    def apply(self, block: np.ndarray) -> np.ndarray:
        """(..., H, W) in the file's order -> (..., H, W) north to south, longitudes ascending."""
        turned = block[..., self.rows, self.columns][..., : self.grid.shape[1]]
        return np.roll(turned, -self.shift, axis=-1) if self.shift else turned


def orientation(latitude: np.ndarray, longitude: np.ndarray) -> Orientation:
    """From coordinates (H,), (W,). Global longitudes turn to 0..360, without a repeated last column.

    Regional longitudes stay as they are (-10..20), made continuous where they cross the end of the circle.
    DataError for coordinates that are not monotonic.
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
    return Orientation(Grid(np.asarray(latitude, np.float64)[rows], east), rows, columns, shift)


@dataclass(frozen=True, eq=False)
class StoredField:
    """One array of a file: a variable, or several along its level (or channel) axis.

    `names` has one name a position on that axis; `roles` names the array's dimensions, "" one to be dropped,
    whose element at `picked` is read; `times` is the file's time coordinate (datetime64[s], in the file's
    order) or None for a static field.
    """

    file: StoredFile
    array: str
    names: tuple[str, ...]
    roles: tuple[str, ...]
    times: np.ndarray | None
    orientation: Orientation
    packing: Packing
    picked: Mapping[int, int] = field(default_factory=dict)  # number of a dimension -> position, otherwise 0

    def chunk(self, role: str) -> int:
        """How many elements of an axis are stored, and therefore decoded, together."""
        chunks = self.file.arrays[self.array].chunks
        return chunks[self.roles.index(role)] if chunks and role in self.roles else 1

    def read(self, rows: slice, levels: slice) -> np.ndarray:
        """(n, k, H, W): these rows of the file's time axis, these positions on its level axis, physical
        values.
        """
        return _first_valid(self.block(AXES, {"time": rows, "level": levels}))

    def block(self, axes: Sequence[str], wanted: Mapping[str, slice]) -> np.ndarray:
        """The `axes` in this order, latitude and longitude last, of size 1 where the array lacks one: the
        slices wanted of it, all of the other axes.
        """
        selection = tuple(
            wanted.get(role, slice(None)) if role else self.picked.get(i, 0)
            for i, role in enumerate(self.roles)
        )
        stored = self._fetch(selection)
        values = self.packing.decode(stored)
        for hole in self._holes(selection, stored):
            values = values.astype(np.float32) if values is stored else values
            values[hole] = np.nan
        roles = [role for role in self.roles if role]
        if "cell" in roles:
            shape = (*values.shape[:-1], *self.orientation.grid.shape)
            values, roles = values.reshape(shape), [*roles[:-1], "latitude", "longitude"]
        block = values.transpose([roles.index(axis) for axis in axes if axis in roles])
        for position, axis in enumerate(axes):
            if axis not in roles:
                block = np.expand_dims(block, position)
        return self.orientation.apply(block)

    def _fetch(self, selection: Any) -> np.ndarray:
        """DataError: the bytes are damaged, or not there; which of the dates it is, is looked for."""
        try:
            return self.file.fetch(self.array, selection)
        except (MemoryError, DataError):  # the latter: of a URL, said already
            raise
        except Exception as error:  # every codec raises what it pleases
            raise self.unreadable(error, self._first_damaged(selection)) from None

    def unreadable(self, error: Exception, row: int | None) -> DataError:
        """For an error that a library raised over the values at a row of the time axis."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        date = "" if row is None or self.times is None else f" at {self.times[row]}"
        fix = "restore the file, or leave the date out of data.train_period and data.validation_period"
        return DataError(f"{self.file.path}: {self.array}{date} cannot be read ({reason}); {fix}")

    def _first_damaged(self, selection: Any) -> int | None:
        if "time" not in self.roles or self.times is None:
            return None
        axis = self.roles.index("time")
        for row in range(*selection[axis].indices(len(self.times))):
            try:
                self.file.fetch(self.array, (*selection[:axis], slice(row, row + 1), *selection[axis + 1 :]))
            except Exception:  # the one that the error is about
                return row
        return None

    def _holes(self, selection: Any, stored: np.ndarray) -> list[Any]:
        """Where a chunk is missing; said once for an array."""
        if self.packing.classes or self.names[0].partition(":")[0] in OFTEN_ZERO:
            return []
        holes = self.file.holes(self.array, selection, stored)
        if holes:
            self.say_missing(self._row_of(holes[0], selection))
        return holes

    def say_missing(self, row: int | None) -> None:
        """That the store does not have a chunk, at a row of the time axis; said once for an array."""
        if self.array in self.file.told or multiprocessing.parent_process() is not None:
            return
        self.file.told.add(self.array)
        first = "" if row is None or self.times is None else f", the first at {self.times[row]},"
        where = f"{self.file.path}: {self.array}: chunks{first} are not in the store"
        logger.warning(f"{where}: taken for missing values")

    def _row_of(self, hole: Any, selection: Any) -> int | None:
        if "time" not in self.roles or self.times is None:
            return None
        axis = self.roles.index("time")
        kept = [i for i, each in enumerate(selection) if isinstance(each, slice)]
        return range(*selection[axis].indices(len(self.times)))[hole[kept.index(axis)].start]


def _first_valid(block: np.ndarray) -> np.ndarray:
    """(n, k, E, H, W) -> (n, k, H, W). The CDS appends preliminary ERA5T as a second `expver`: one of both is
    NaN.
    """
    merged = block[:, :, 0]
    for version in range(1, block.shape[2]):
        merged = np.where(np.isnan(merged), block[:, :, version], merged)
    return merged
