"""GRIB 1 and 2 files as arrays (time, level, latitude, longitude), by eccodes, which is an extra.

A file is a sequence of messages, a field each, in any order. They are listed once when the file is opened;
a read goes to the messages that it needs. Fields of one parameter and kind of level are one array.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np

from errors import DataError

INSTALL = "pip install -r requirements-extras.txt, or its line with eccodes"
PRESSURE, SURFACE = "isobaricInhPa", 0  # the kind of level that has a number, and the number of others
SINCE = "seconds since 1970-01-01"
AXES = ("latitude", "longitude")
SURFACE_NAMES = {"z": "geopotential_at_surface"}  # what has another meaning on levels
Key = tuple[int, int]  # a date (seconds since 1970) and a level


@dataclass(eq=False)
class GribArray:
    """The fields of one parameter: where the message of each date and level begins."""

    path: str
    units: str
    grid: tuple[np.ndarray, np.ndarray]  # latitude, longitude, in the order of the values
    offsets: dict[Key, int] = field(default_factory=dict)
    constant: bool = False  # it has one date, where others have more

    @cached_property
    def times(self) -> list[int]:
        return sorted({date for date, _ in self.offsets})

    @cached_property
    def levels(self) -> list[int]:
        return sorted({level for _, level in self.offsets})

    @property
    def axes(self) -> tuple[str, ...]:
        """Which of time and level it has."""
        kept = {"time": not self.constant, "level": self.levels != [SURFACE]}
        return tuple(name for name, there in kept.items() if there)

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = {"time": len(self.times), "level": len(self.levels)}
        return *(sizes[axis] for axis in self.axes), *(len(each) for each in self.grid)

    def __getitem__(self, selection: Any) -> np.ndarray:
        """Slices or positions of each dimension; NaN where there is no message."""
        parts = (slice(None),) * len(self.shape) if selection is ... else tuple(selection)
        wanted = dict(zip(self.axes, parts, strict=False))
        dates = _chosen(self.times, wanted.get("time", 0))
        levels = _chosen(self.levels, wanted.get("level", 0))
        out = np.full((len(dates), len(levels), *self.shape[-2:]), np.nan, np.float32)
        with open(self.path, "rb") as file:
            for i, j in np.ndindex(len(dates), len(levels)):
                offset = self.offsets.get((dates[i], levels[j]))
                if offset is not None:
                    out[i, j] = _values(file, offset, self.shape[-2:])
        kept = (isinstance(wanted.get(axis, 0), slice) for axis in ("time", "level"))
        first = tuple(slice(None) if each else 0 for each in kept)
        return out[(*first, *parts[len(self.axes) :])]


def _chosen(known: list[int], part: int | slice) -> list[int]:
    return known[part] if isinstance(part, slice) else [known[part]]


def open_grib(path: str) -> dict[str, Any]:
    """Name of an array -> its fields, and of its coordinates -> their values.

    DataError: eccodes is not there, a message is cut short, a grid has no rows and columns.
    """
    arrays: dict[str, GribArray] = {}
    try:
        for offset, message in _messages(path):
            _add(arrays, path, offset, message)
    except _eccodes().CodesInternalError as error:
        raise DataError(f"a GRIB message is damaged or cut short ({error})") from None
    if not arrays:
        raise DataError("no message in it is a field on latitudes and longitudes")
    most = max(len(array.times) for array in arrays.values())
    found: dict[str, Any] = dict(arrays)
    for name, array in arrays.items():
        array.constant = len(array.times) == 1 < most
        coordinates = {"time": array.times, "level": array.levels}
        found |= {f"{axis}_{name}": np.array(coordinates[axis]) for axis in array.axes}
    grid = next(iter(arrays.values())).grid
    return found | dict(zip(AXES, grid, strict=True))


def attributes_of(name: str, value: Any) -> dict[str, Any]:
    """As CF has them, by which an array's own axes are known."""
    if isinstance(value, GribArray):
        return {"units": value.units}
    if name.startswith("time_"):
        return {"units": SINCE, "standard_name": "time"}
    return {"units": "hPa", "standard_name": "level"} if name.startswith("level_") else {}


def dims_of(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, GribArray):
        return (name,)
    return *(f"{axis}_{name}" for axis in value.axes), *AXES


def _eccodes() -> Any:
    try:
        import eccodes  # type: ignore[reportMissingImports]  # an extra
    except (ImportError, RuntimeError) as error:  # RuntimeError: the package is there, its library is not
        reason = " ".join(str(error).split())[:100]
        raise DataError(f"it is GRIB, which the package eccodes reads ({reason}): {INSTALL}") from None
    return eccodes


def _messages(path: str) -> Iterator[tuple[int, Any]]:
    """(where it begins, handle) of each message; handles live until the next."""
    eccodes = _eccodes()
    with open(path, "rb") as file:
        while True:
            message = eccodes.codes_grib_new_from_file(file, headers_only=True)
            if message is None:
                return
            try:
                yield eccodes.codes_get(message, "offset", ktype=int), message
            finally:
                eccodes.codes_release(message)


def _add(arrays: dict[str, GribArray], path: str, offset: int, message: Any) -> None:
    get = _eccodes().codes_get
    name, kind = get(message, "shortName"), get(message, "typeOfLevel")
    if get(message, "gridType") not in ("regular_ll", "regular_gg"):
        kind_of_grid = get(message, "gridType")
        raise DataError(f"{name} lies on a {kind_of_grid} grid; regrid it to latitudes and longitudes first")
    grid = _grid(message)
    pressure = kind == PRESSURE
    if not pressure and name in SURFACE_NAMES:
        name = SURFACE_NAMES[name]
    array = arrays.setdefault(name, GribArray(path, get(message, "units"), grid))
    if not all(np.array_equal(a, b) for a, b in zip(array.grid, grid, strict=True)):
        raise DataError(f"{name} lies on two grids in it")
    array.offsets.setdefault((_date(message), get(message, "level") if pressure else SURFACE), offset)


def _grid(message: Any) -> tuple[np.ndarray, np.ndarray]:
    """Latitudes and longitudes of rows and columns, as the values come."""
    eccodes = _eccodes()
    if eccodes.codes_get(message, "alternativeRowScanning") or eccodes.codes_get(
        message, "jPointsAreConsecutive"
    ):
        raise DataError("its rows do not lie one after the other: write it with scanning mode 0")
    latitude = np.sort(eccodes.codes_get_array(message, "distinctLatitudes"))
    longitude = eccodes.codes_get_array(message, "distinctLongitudes")
    if not eccodes.codes_get(message, "jScansPositively"):
        latitude = latitude[::-1]
    first = eccodes.codes_get(message, "longitudeOfFirstGridPointInDegrees")
    ascending = first + np.sort((longitude - first) % 360)
    return latitude, ascending[::-1] if eccodes.codes_get(message, "iScansNegatively") else ascending


def _date(message: Any) -> int:
    """The valid time, in seconds since 1970."""
    get = _eccodes().codes_get
    day, time = get(message, "validityDate", ktype=int), get(message, "validityTime", ktype=int)
    text = f"{day // 10000:04d}-{day // 100 % 100:02d}-{day % 100:02d}T{time // 100:02d}:{time % 100:02d}"
    return int(np.datetime64(text, "s").astype(np.int64))


def _values(file: BinaryIO, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """(H, W) of the message that begins there, NaN where its bitmap has holes."""
    eccodes = _eccodes()
    file.seek(offset)
    message = eccodes.codes_grib_new_from_file(file)
    try:
        eccodes.codes_set(message, "missingValue", 1e36)
        values = eccodes.codes_get_values(message).reshape(shape)
        return np.where(values == 1e36, np.nan, values)
    finally:
        eccodes.codes_release(message)
