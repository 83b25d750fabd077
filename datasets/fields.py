"""Arrays of files in normal form: a `Field` reads slices of one array as physical values.

float32, NaN where missing, latitude from north to south, longitude ascending, units of datasets/variables.py.
"""

import base64
import dataclasses
import logging
import math
import multiprocessing
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, product
from typing import Any

import numpy as np
import xarray as xr
from zarr.core.sync import sync

from datasets.grid import FLOAT32_DEGREES, Grid, equal_spacing, is_periodic
from datasets.remote import describe_error
from datasets.variables import OFTEN_ZERO, UnitConversion, full_name, nearest_name, units, usual_range
from errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoding:
    """Conversion of stored numbers to physical ones (CF 8.1): `fills` are missing, others scaled."""

    fills: tuple[float, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    unsigned: bool = False

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Return physical values, float64 if they are scaled, to be rounded once; NaN where missing."""
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


def find_decoding(variable: xr.Variable, conversion: UnitConversion) -> Decoding:
    """Return the decoding that the attributes of an array describe. Raises DataError."""
    attrs, dtype = variable.attrs, variable.dtype
    unsigned = str(attrs.get("_Unsigned", "")).lower() == "true" and dtype.kind == "i"
    dtype = np.dtype(dtype.str.replace("i", "u")) if unsigned else dtype
    fills = set()
    stored = [np.ravel(attrs.get(key, [])).tolist() for key in ("_FillValue", "missing_value")]
    for value in chain(*stored):
        try:
            fill = float(value)
        except ValueError:
            try:  # xarray writes those of Zarr 3 as base64 of eight bytes
                fill = struct.unpack("<d", base64.b64decode(value))[0]
            except (ValueError, struct.error):
                raise DataError(f"its fill value {value!r} is no number; correct the attribute") from None
        if math.isnan(fill):
            continue
        if dtype.kind in "iu":  # one of a signed type may be written as unsigned, and the reverse
            info, bits = np.iinfo(dtype), 8 * dtype.itemsize
            integers = [n for n in (fill, fill - 2**bits, fill + 2**bits) if info.min <= n <= info.max]
            if not integers or integers[0] != int(integers[0]):
                reason = f"its _FillValue {fill:g} does not fit its type {dtype.name}"
                raise DataError(f"{reason}; correct the attribute")
            fill = integers[0]
        fills.add(fill)
    packing = {"scale_factor": 1.0, "add_offset": 0.0}
    for key in packing:
        values = np.atleast_1d(attrs.get(key, packing[key]))
        if values.size != 1 or values.dtype.kind not in "iuf" or not np.isfinite(values[0]):
            raise DataError(f"its {key} is {values.tolist()}, not one finite number; correct the attribute")
        packing[key] = float(values[0])
    scale, factor = packing["scale_factor"] * conversion.factor, conversion.factor
    return Decoding(tuple(fills), scale, packing["add_offset"] * factor + conversion.offset, unsigned)


@dataclass(frozen=True, eq=False)
class Orientation:
    """The grid of a file, and the positions of its rows and columns in the file."""

    grid: Grid
    shape: tuple[int, int]  # of the file
    rows: np.ndarray  # (H,) from north to south
    columns: np.ndarray  # (W,), longitudes ascending
    repeated: tuple[int, int] | None = None  # columns of the file 360 degrees apart; the first is read

    @cached_property
    def is_identity(self) -> bool:
        """True if fields are stored as they are returned."""
        places = zip((self.rows, self.columns), self.shape, strict=True)
        return all(np.array_equal(place, np.arange(size)) for place, size in places)


def find_orientation(latitude: np.ndarray, longitude: np.ndarray) -> Orientation:
    """Return the orientation of coordinates (H,), (W,); ValueError if they are not monotonic.

    Global longitudes are turned to 0..360 without a repeated last column. Regional longitudes stay as they
    are (-10..20), made continuous where they cross the end of the circle.
    """
    shape = len(latitude), len(longitude)
    rows, columns = map(np.arange, shape)
    rows = rows if latitude[0] > latitude[-1] else rows[::-1]
    east = np.unwrap(np.asarray(longitude, np.float64), period=360)
    columns = columns[::-1] if east[0] > east[-1] else columns
    east = equal_spacing(east[columns])
    # -- a globe: without a column that is there twice (0 and 360), from the first column east of Greenwich on
    repeated = None
    if east[-1] - east[0] > 360 - FLOAT32_DEGREES:
        repeated = int(columns[0]), int(columns[-1])
        east, columns = east[:-1], columns[:-1]
    if is_periodic(east):
        east = np.round(east, 9) % 360
        shift = int(np.argmin(east))
        east, columns = np.roll(east, -shift), np.roll(columns, -shift)
    elif east[0] >= 180 and east[-1] >= 360:
        east = east - 360
    return Orientation(Grid(np.asarray(latitude, np.float64)[rows], east), shape, rows, columns, repeated)


@dataclass(frozen=True, eq=False)
class Field:
    """One array of a file: a variable, or several along its level (or channel) axis.

    `names` has one name for each position on that axis, "" where it is left out. `roles` has the role of each
    dimension, "" for a dropped one, of which the element at `selected` is read. `times` are the dates in the
    order of the file, None for a constant field. It can be pickled; each process opens the file itself.
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
    # Number of a dropped dimension -> position; labels of axes of forecasts and climatologies.
    selected: Mapping[int, int] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    versions: tuple[int, ...] = (0,)  # positions on the axis `expver`: the final data first, then preliminary
    is_class: bool = False  # numbers of classes, which have no mean

    def chunk(self, role: str) -> int:
        """Return the number of elements of an axis that are decoded together."""
        encoding = getattr(self.raw, "encoding", {})  # of xarray's variables
        chunks = self.raw.chunks or encoding.get("chunks") or encoding.get("chunksizes")
        return chunks[self.roles.index(role)] if chunks and role in self.roles else 1

    def size(self, role: str) -> int:
        """Return the size of an axis, 1 if there is none."""
        return self.raw.shape[self.roles.index(role)] if role in self.roles else 1

    def fill(
        self,
        out: np.ndarray,
        rows: Sequence[tuple[int, int]],
        axes: Sequence[str],
        slices: Mapping[str, slice],
    ) -> None:
        """Fill `out` (*axes, V, H, W) with levels, by pairs (position on the level axis, row of V). Levels of
        the same or the next chunk are read together. Raises DataError.
        """
        pairs = np.array(sorted(rows))
        breaks = np.flatnonzero(np.diff(pairs[:, 0] // self.chunk("level")) > 1) + 1
        for near in np.split(pairs, breaks):
            lowest, highest = near[0, 0], near[-1, 0]
            block = self.read((*axes, "level"), {**slices, "level": slice(lowest, highest + 1)})
            for level, row in near.tolist():
                out[..., row, :, :] = block[..., level - lowest, :, :]

    def read(self, axes: Sequence[str], slices: Mapping[str, slice]) -> np.ndarray:
        """Return (*axes, latitude, longitude) physical values: the slices of some axes, all of the others.

        Axes that the array lacks have size 1. Preliminary data (a second `expver`) fill what is missing in
        the final ones. Raises DataError naming the file and the date, also if a column that is repeated after
        360 degrees has other values.
        """
        key = tuple(
            slices.get(role, slice(None)) if role else self.selected[i] for i, role in enumerate(self.roles)
        )
        stored = self._fetch(key)
        values = self.decoding.decode(stored)
        # -- NaN in chunks that are not in a Zarr store, which read as the fill value. Only whole shards are
        # looked for: writers omit chunks of fill values inside one, and of cloud, rain and masks of 0.
        fill, name = getattr(self.raw, "fill_value", None), next(filter(None, self.names))
        if fill is not None and fill == fill and name.partition(":")[0] not in OFTEN_ZERO:
            (low, high), integer = usual_range(name), np.dtype(self.raw.dtype).kind in "iu"
            is_packed = integer and self.decoding != Decoding(self.decoding.fills)
            # Zarr 3 omits chunks of a packed number that is the fill value.
            is_value = is_packed and low <= self.decoding.decode(np.asarray(fill)[None])[0] <= high
            files = self.raw.shards or self.raw.chunks  # sizes of what a file of the store has
            spans = [
                at.indices(size)[:2] if isinstance(at, slice) else (at, at + 1)
                for at, size in zip(key, self.raw.shape, strict=True)
            ]
            dims = [i for i, at in enumerate(key) if isinstance(at, slice)]  # that `stored` has
            numbers = [range(a // size, -(-b // size)) for (a, b), size in zip(spans, files, strict=True)]
            for chunk in product(*numbers):
                # Asking the store costs a request: only where the first value is the fill value.
                first = [max(chunk[i] * files[i] - spans[i][0], 0) for i in dims]
                if stored[tuple(first)] != fill:
                    continue
                file = f"{self.raw.store_path.path}/{self.raw.metadata.encode_chunk_key(chunk)}".lstrip("/")
                if sync(self.raw.store_path.store.exists(file)):
                    continue
                meaning = "its fill value" if is_value else "missing values"
                _warn_missing_chunk(self.path, self.array, meaning)
                if not is_value:
                    ends = [(chunk[i] + 1) * files[i] - spans[i][0] for i in dims]
                    values = values.astype(np.float32) if values is stored else values
                    values[tuple(map(slice, first, ends))] = np.nan
        # -- axes in the order of the project, final data before preliminary
        roles = [role for role in self.roles if role]
        if "cell" in roles:
            values = values.reshape(*values.shape[:-1], -1, self.orientation.shape[1])
            roles = [*roles[:-1], "latitude", "longitude"]
        order = ("expver", *axes, "latitude", "longitude")
        block = xr.Variable(roles, values).set_dims(order).values
        merged = block[self.versions[0]]
        for version in self.versions[1:]:
            merged = np.where(np.isnan(merged), block[version], merged)
        # -- a globe's last column again at 360 degrees: a copy, or something is wrong with the file
        if self.orientation.repeated:
            first, again = (merged[..., column].astype(np.float64) for column in self.orientation.repeated)
            values, scale = first[np.isfinite(first)], abs(self.decoding.scale)
            # Scaled integers may differ by one; GRIB packs 16 bits of the range of a field.
            is_packed = np.dtype(self.raw.dtype).kind in "iu" and scale != 1
            bound = max(1.01 * scale * is_packed, 1e-4 * float(np.ptp(values)) if values.size else 0.0)
            if not np.allclose(first, again, rtol=1e-6, atol=bound, equal_nan=True):
                most = np.nanmax(np.abs(first - again), initial=0)
                what = f"its first column and the one 360 degrees further differ (by up to {most:g})"
                raise DataError(f"{self.path}: {self.array}: {what}; remove the wrong one from the file")
        place = self.orientation
        return merged if place.is_identity else merged.take(place.rows, -2).take(place.columns, -1)

    def read_one(self, position: int, row: int = 0) -> np.ndarray:
        """Return (H, W) float32: one level, at one row of the time axis if there is one."""
        slices = {"time": slice(row, row + 1), "level": slice(position, position + 1)}
        return self.read(("time", "level"), slices)[0, 0].astype(np.float32)

    def _fetch(self, key: tuple[int | slice, ...]) -> np.ndarray:
        try:
            return np.asarray(self.raw[key])
        except MemoryError:
            raise
        except Exception as error:  # every codec raises its own
            axis = self.roles.index("time") if "time" in self.roles else None
            rows = slice(0) if axis is None else key[axis]
            if axis is not None and isinstance(rows, slice) and "://" not in self.path:  # a network's may end
                every = range(self.raw.shape[axis])[rows]
                for row in every if len(every) > 1 else ():  # raises of the one date that cannot be read
                    self._fetch((*key[:axis], slice(row, row + 1), *key[axis + 1 :]))
            raise self.unreadable(error, rows) from None

    def unreadable(self, error: Exception, rows: int | slice) -> DataError:
        """Return the DataError for an error of a library while reading rows of the time axis."""
        dates = np.atleast_1d(self.times[rows]) if self.times is not None else []
        date = " to ".join(str(date) for date in dict.fromkeys([*dates[:1], *dates[-1:]]))
        fix = "restore the file, or leave the date out of data.train_period and data.validation_period"
        at = f"{self.array} at {date}" if date else self.array
        return DataError(f"{self.path}: {at} cannot be read ({describe_error(error)}); {fix}")


@cache
def _warn_missing_chunk(path: str, array: str, meaning: str) -> None:
    """Log once per array, not in each worker of a conversion, that chunks are not in the store."""
    if multiprocessing.parent_process() is None:
        logger.warning(f"{path}: {array}: chunks are not in the store: read as {meaning}")


class NamedFields:
    """Fields of files on one grid, read by name; analyses, forecasts and climatologies differ in axes."""

    def __init__(
        self, path: str, fields: Sequence[Field], unreadable: Mapping[str, str] | None = None
    ) -> None:
        """unreadable: name of an array -> why it is none of the fields. Raises DataError if grids differ."""
        self.path, self.unreadable, self.fields = path, dict(unreadable or {}), tuple(fields)
        if not fields:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.unreadable.items())[:3])
            reasons = reasons or "no variable in it has latitude and longitude"
            raise DataError(f"cannot read {path!r}: {reasons}")
        self.grid = fields[0].orientation.grid
        if other := next((f for f in fields if not f.orientation.grid.same_as(self.grid)), None):
            files = " and ".join(f"{f.path} {f.orientation.grid.shape}" for f in (fields[0], other))
            raise DataError(f"cannot read {path!r} as one archive: grids differ: {files}; name one file")
        self.places = places_of(fields)
        self.variables = self.names = list(self.places)
        dims = [(field, i) for field in fields for i, role in enumerate(field.roles) if not role]
        self.extra_dimensions = {field.dims[i]: field.raw.shape[i] for field, i in dims}

    def find(self, name: str) -> list[tuple[Field, int]]:
        """Return where a variable is. Raises DataError with the reason or the nearest name."""
        if name not in self.places:
            why = self.unreadable.get(full_name(name).partition(":")[0])
            hint = f": {why}" if why else nearest_name(name, self.names)
            raise DataError(f"{self.path!r} has no variable {name!r}{hint}")
        return self.places[name]

    def is_class(self, name: str) -> bool:
        """Return True for a variable of numbered classes."""
        return any(field.is_class for field in self.fields if name in field.names)

    def units(self, name: str) -> str:
        """Return the units of what is read: ours of a known variable, else those of the data, "" for none."""
        return next((field.units for field, _ in self.find(name)), "") or units(name)

    def read_fields(
        self, variables: Sequence[str], axes: Sequence[str], slices: Mapping[str, slice]
    ) -> np.ndarray:
        """Return (*axes, V, H, W) float32, NaN where missing: the slices of some axes, all of the others. An
        axis that no field has is of size 1. Raises DataError.
        """
        rows: dict[Field, list[tuple[int, int]]] = {}
        for row, name in enumerate(variables):
            field, position = self.find(name)[0]
            rows.setdefault(field, []).append((position, row))
        sizes = []
        for axis in axes:
            size = max(field.size(axis) for field in rows)
            sizes.append(max(1, len(range(size)[slices.get(axis, slice(None))])))
        out = np.empty((*sizes, len(variables), *self.grid.shape), np.float32)
        for field, pairs in rows.items():
            field.fill(out, pairs, axes, slices)
        return out


def places_of(fields: Iterable[Field]) -> dict[str, list[tuple[Field, int]]]:
    """Return where each variable is: fields, and positions on their level axes."""
    places: dict[str, list[tuple[Field, int]]] = {}
    for field in fields:
        for position, name in enumerate(field.names):
            if name:
                places.setdefault(name, []).append((field, position))
    return places
