"""What the arrays of a file mean: their axes, directions, packing and names, for every known layout.

A `StoredField` is one array whose axes are recognised. Reading gives (time, level, latitude, longitude),
north to south and eastwards. The layout is detected from the content; there are no options.
"""

import base64
import logging
import multiprocessing
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from datasets.files import StoredArray, StoredFile
from datasets.grid import FLOAT32_DEGREES, Grid, equal_spacing, is_periodic
from datasets.picks import position_of
from datasets.variables import OFTEN_ZERO, ON_LEVELS, SHORT_NAMES, full_name, join_name
from errors import DataError

logger = logging.getLogger(__name__)
# The lower-case names of coordinates. Other dimensions are read only where they have one element.
ROLES = {
    "time": ("time", "valid_time", "timestep", "dates"),
    "level": ("level", "pressure_level", "isobaricinhpa", "plev", "pressure", "lev", "isobaric"),
    "latitude": ("latitude", "lat", "nav_lat"),
    "longitude": ("longitude", "lon", "nav_lon"),
    "expver": ("expver",),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
AXES = ("time", "level", "expver", "latitude", "longitude")
# The channels of the NERSC tutorial's `fields`, in FourCastNet's order (Pathak et al. 2022).
FOURCASTNET = (
    "u10 v10 t2m sp msl t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 tcwv"
)
# NCAR's storm of January 1996 says p, t, u, v in every file. p is near 101,000 Pa also over the Rockies:
# reduced to mean sea level. The others stand beside u500 and v500 and are the fields at the ground.
STORM = {
    "p": "mean_sea_level_pressure",
    "t": "2m_temperature",
    "u": "10m_u_component_of_wind",
    "v": "10m_v_component_of_wind",
}
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


def _packing(name: str, array: StoredArray) -> Packing:
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
        except MemoryError:
            raise
        except Exception as error:  # every codec raises what it pleases
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            where = (
                f"{self.file.path}: {self.array}{self._first_damaged(selection)} cannot be read ({reason})"
            )
            fix = "restore the file, or leave the date out of data.train_period and data.validation_period"
            raise DataError(f"{where}; {fix}") from None

    def _first_damaged(self, selection: Any) -> str:
        if "time" not in self.roles or self.times is None:
            return ""
        axis = self.roles.index("time")
        for row in range(*selection[axis].indices(len(self.times))):
            try:
                self.file.fetch(self.array, (*selection[:axis], slice(row, row + 1), *selection[axis + 1 :]))
            except Exception:  # the one that the error is about
                return f" at {self.times[row]}"
        return ""

    def _holes(self, selection: Any, stored: np.ndarray) -> list[Any]:
        """Where a chunk is missing; said once for an array."""
        if self.packing.classes or self.names[0].partition(":")[0] in OFTEN_ZERO:
            return []
        holes = self.file.holes(self.array, selection, stored)
        if holes and self.array not in self.file.told and multiprocessing.parent_process() is None:
            self.file.told.add(self.array)
            where = f"{self.file.path}: {self.array}: chunks{self._date_of(holes[0], selection)}"
            logger.warning(f"{where} are not in the store: taken for missing values")
        return holes

    def _date_of(self, hole: Any, selection: Any) -> str:
        if "time" not in self.roles or self.times is None:
            return ""
        axis = self.roles.index("time")
        kept = [i for i, each in enumerate(selection) if isinstance(each, slice)]
        row = range(*selection[axis].indices(len(self.times)))[hole[kept.index(axis)].start]
        return f", the first at {self.times[row]},"


def _first_valid(block: np.ndarray) -> np.ndarray:
    """(n, k, E, H, W) -> (n, k, H, W). The CDS appends preliminary ERA5T as a second `expver`: one of both is
    NaN.
    """
    merged = block[:, :, 0]
    for version in range(1, block.shape[2]):
        merged = np.where(np.isnan(merged), block[:, :, version], merged)
    return merged


def decode_times(values: np.ndarray, attrs: dict[str, Any], reference: str = "") -> np.ndarray:
    """datetime64[s] from numbers and CF units ("hours since 1900-01-01"), or hours since `reference`.

    DataError without units, for calendars with other days, and for the Julian calendar before 1583.
    """
    if values.dtype.kind == "M":
        return values.astype("datetime64[s]")
    unit, _, start = (str(attrs.get("units", "")) or f"hours since {reference}").partition(" since ")
    match = re.match(r"\s*(\d+)[- ](\d+)[- ](\d+)(?:[T ]+(\d+):(\d+)(?::(\d+))?)?", start)
    if not match:
        raise DataError(f"its time has units {attrs.get('units')!r}, not 'hours since <date>'")
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups())
    calendar = attrs.get("calendar", "standard")
    if calendar not in ("standard", "gregorian", "proleptic_gregorian") or year < 1583:
        raise DataError(f"its time has calendar {calendar!r} from year {year}: not that of analyses")
    return np.datetime64(datetime(year, month, day, hour, minute, second), "s") + durations(values, unit)


def durations(values: np.ndarray, unit: str) -> np.ndarray:
    """timedelta64[s] of numbers of a unit of time ("hours", "hour", "h"); DataError for other units."""
    try:
        scale = pd.Timedelta(1, unit=unit.strip().lower()).total_seconds()
    except ValueError:
        raise DataError(f"its time has units {unit!r}, not those of a time such as 'hours'") from None
    whole = values.dtype.kind in "iu" and scale >= 1  # of any size: nothing is rounded
    seconds = values.astype(np.int64) * int(scale) if whole else np.round(values * scale)
    return seconds.astype(np.int64).astype("timedelta64[s]")


def stored_fields(
    file: StoredFile, more_roles: Mapping[str, str] | None = None, picks: Mapping[str, str] | None = None
) -> tuple[list[StoredField], dict[str, str]]:
    """All fields of a file, and for each array that has latitudes but cannot be read, the reason.

    more_roles: lower-case name of a dimension -> its role, where a file has other axes than analyses have.
    picks: name of a dimension without a role -> the label of what is read of it.
    DataError where the file has no latitude or longitude, or a coordinate that makes no sense.
    """
    try:
        if "fields" in file.arrays and file.arrays["fields"].dims == ("",) * 4:
            return _tutorial_fields(file), {}
        if "cell" in file.arrays.get("data", _NOTHING).dims and "variables" in file.attrs:
            return _anemoi_fields(file, picks or {}), {}
        return _named_fields(file, more_roles or {}, picks or {})
    except (ValueError, OSError, KeyError, RuntimeError) as error:  # the last three: coordinates cut short
        raise DataError(f"cannot read {file.path!r}: {' '.join(str(error).split())}") from error


_NOTHING = StoredArray((), (), np.dtype("f4"), {}, None)


def coordinate_role(file: StoredFile, dim: str, more_roles: Mapping[str, str] | None = None) -> str:
    """The role of a dimension, by its name or by the standard_name of its coordinate; "" for none."""
    standard = file.arrays.get(dim, _NOTHING).attrs.get("standard_name", "")
    known = ROLE_OF | dict(more_roles or {})
    return known.get(dim.lower()) or (standard if standard in AXES else "")


def _coordinate(file: StoredFile, role: str) -> str:
    """The name of the one-dimensional coordinate with a role, or a DataError that says what there is."""
    found = [name for name in file.arrays if coordinate_role(file, name) == role]
    for name in found:
        if len(file.arrays[name].shape) == 1:
            return name
    shapes = [f"{name} of shape {file.arrays[name].shape}" for name in found]
    raise DataError(
        f"it has no one-dimensional {role}, only {', '.join(shapes or sorted(file.arrays)) or 'nothing'}"
    )


def _named_fields(
    file: StoredFile, more_roles: Mapping[str, str], picks: Mapping[str, str]
) -> tuple[list[StoredField], dict[str, str]]:
    """The general case: arrays whose dimensions have names (Zarr, NetCDF)."""
    north, east = _coordinate(file, "latitude"), _coordinate(file, "longitude")
    turned = orientation(file.fetch(north), file.fetch(east))
    fields, unreadable, times = [], {}, {}
    for name, array in file.arrays.items():
        roles = tuple(coordinate_role(file, dim, more_roles) for dim in array.dims)
        if not {"latitude", "longitude"} <= set(roles) or array.dtype.kind not in "fiub":
            continue
        extra = [i for i, role in enumerate(roles) if not role]
        picked = {i: _picked(file, array, i, picks) for i in extra if array.dims[i] in picks}
        odd = [i for i in extra if array.shape[i] > 1 and i not in picked]
        if odd:
            unreadable[full_name(name).partition(":")[0]] = _in_the_way(file, array, odd[0])
            continue
        clock = array.dims[roles.index("time")] if "time" in roles else None
        if clock and clock not in times:
            times[clock] = coordinate_times(file, clock)
        names = _names(file, name, array.dims[roles.index("level")] if "level" in roles else None)
        own = (times.get(clock), turned, _packing(name, array), picked)
        fields.append(StoredField(file, name, names, roles, *own))
    return fields, unreadable


def _picked(file: StoredFile, array: StoredArray, dim: int, picks: Mapping[str, str]) -> int:
    name = array.dims[dim]
    return position_of(name, picks[name], _labels(file, name), array.shape[dim])


def _in_the_way(file: StoredFile, array: StoredArray, dim: int) -> str:
    """Why an array cannot be read, and the option that helps."""
    name, size = array.dims[dim], array.shape[dim]
    first = (_labels(file, name) or ["0"])[0]
    return f"it has a dimension {name} of size {size}; choose one with data.select = ['{name}={first}']"


def _labels(file: StoredFile, dim: str) -> list[str] | None:
    """The labels along a dimension, dates as 2020-01-01T00:00:00; None where it has no coordinate: NetCDF 4
    then stores zeros.
    """
    if dim not in file.arrays or len(file.arrays[dim].shape) != 1:
        return None
    if " since " in str(file.arrays[dim].attrs.get("units", "")):
        return coordinate_times(file, dim).astype(str).tolist()
    values = file.fetch(dim).tolist()
    labels = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    return labels if len(set(labels)) == len(labels) else None


def coordinate_times(file: StoredFile, name: str) -> np.ndarray:
    """The time coordinate `name`; NaT outside the range that ARCO-ERA5 says is filled (its axis goes on)."""
    if name not in file.arrays:
        raise DataError(f"its dimension {name!r} has no coordinate with dates")
    start = file.fetch("reftime") if "reftime" in file.arrays else np.array(b"")
    reference = b"".join(np.atleast_1d(start).tolist()).decode()
    times = decode_times(file.fetch(name), file.arrays[name].attrs, reference)
    if "valid_time_start" in file.attrs and "valid_time_stop" in file.attrs:
        first, last = (np.datetime64(str(file.attrs[f"valid_time_{end}"])[:10]) for end in ("start", "stop"))
        times = np.where((times >= first) & (times < last + 1), times, np.datetime64("NaT"))
    return times


def _names(file: StoredFile, name: str, level_dim: str | None) -> tuple[str, ...]:
    """WeatherBench2 names of an array, one a level; a scalar level coordinate counts as a level."""
    scalar = next(
        (each for each, a in file.arrays.items() if coordinate_role(file, each) == "level" and a.shape == ()),
        None,
    )
    if "reftime" in file.arrays and name in STORM and not level_dim:
        digits = re.search(r"\d+", os.path.basename(file.path))
        return (join_name(SHORT_NAMES[name], int(digits[0])) if digits else STORM[name],)
    if name == "LSMASK":
        return ("land_sea_mask",)
    full = SHORT_NAMES.get(name, name) if level_dim else full_name(name)
    if level_dim or (scalar and full in ON_LEVELS):
        return tuple(join_name(full, level) for level in _levels(file, level_dim or str(scalar)))
    # z without a level is the surface's: CDS single levels, and most files of static fields.
    return ("geopotential_at_surface" if name == "z" else full,)


def _levels(file: StoredFile, name: str) -> list[int]:
    """Pressure levels as whole hPa, from hPa, millibars or Pa."""
    if name not in file.arrays:
        raise DataError(f"its dimension {name!r} has no coordinate with pressures")
    values = np.atleast_1d(file.fetch(name)).astype(np.float64)
    unit = str(file.arrays[name].attrs.get("units", "")).lower()
    if unit in ("pa", "pascal", "pascals") or (not unit and values.max() > 1100):
        values = values / 100
    if np.abs(values - np.round(values)).max() > 1e-3 or values.min() < 0.5:
        raise DataError(f"its {name!r} has levels that are not whole hPa: {values.tolist()}")
    return [int(value) for value in np.round(values)]


def _channel_name(text: str) -> str:
    return "geopotential_at_surface" if text == "z" else full_name(text)


def _tutorial_fields(file: StoredFile) -> list[StoredField]:
    """The NERSC tutorial's yearly HDF5: fields[time, channel, latitude, longitude] and no coordinates at all.

    Times are 6-hourly from 1 January of the year in the file's name. Twenty channels are FourCastNet's. Rows
    are assumed evenly spaced, as in ERA5 without its last row: 90, 90 - 180/H, ...; an odd number of rows
    reaches both poles.
    """
    array, year = file.arrays["fields"], re.search(r"(\d{4})\.\w+$", file.path)
    if not year:
        raise DataError("its name does not end in the year (2016.h5), and it has no dates inside")
    num_times, num_channels, num_rows, num_columns = array.shape
    times = np.datetime64(f"{year[1]}-01-01", "s") + 6 * np.arange(num_times) * np.timedelta64(3600, "s")
    labels = FOURCASTNET.split() if num_channels == 20 else [f"channel_{i}" for i in range(num_channels)]
    latitude = 90 - np.arange(num_rows) * 180 / (num_rows - num_rows % 2)
    turned = orientation(latitude, np.arange(num_columns) * 360 / num_columns)
    names, roles = tuple(_channel_name(label) for label in labels), ("time", "level", "latitude", "longitude")
    return [StoredField(file, "fields", names, roles, times, turned, Packing())]


def _anemoi_fields(file: StoredFile, picks: Mapping[str, str]) -> list[StoredField]:
    """anemoi-datasets: data(time, variable, ensemble, cell), its cells a regular grid row by row."""
    shape = tuple(file.attrs.get("field_shape", ()))
    array = file.arrays["data"]
    if len(shape) != 2:
        raise DataError(f"its data have field_shape {shape}: not rows and columns of a grid")
    picked = {2: _picked(file, array, 2, picks)} if array.dims[2] in picks else {}
    if array.shape[2] > 1 and not picked:
        raise DataError(_in_the_way(file, array, 2))
    latitude, longitude = (file.fetch(name).reshape(shape) for name in ("latitudes", "longitudes"))
    turned = orientation(latitude[:, 0], longitude[0])
    names = tuple(_channel_name(name) for name in file.attrs["variables"])
    times = decode_times(file.fetch("dates"), file.arrays["dates"].attrs)
    roles = ("time", "level", "", "cell")
    return [StoredField(file, "data", names, roles, times, turned, Packing(), picked)]
