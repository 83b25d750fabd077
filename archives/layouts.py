"""What the arrays of a file mean: their axes, directions, packing and names, for every known layout.

A `StoredField` is one array whose axes are recognised. Reading gives (time, level, latitude, longitude),
north to south and eastwards. The layout is detected from the content; there are no options.
"""

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from archives.files import StoredArray, StoredFile
from archives.picks import position_of
from archives.stored_field import AXES, Packing, StoredField, orientation, packing_of
from archives.variables import ON_LEVELS, SHORT_NAMES, full_name, join_name
from errors import DataError

TRAINING_STORE = "rossby_training_store"  # the attribute of archives/training_store.py's format
# The lower-case names of coordinates. Other dimensions are read only where they have one element.
ROLES = {
    "time": ("time", "valid_time", "timestep", "dates"),
    "level": ("level", "pressure_level", "isobaricinhpa", "plev", "pressure", "lev", "isobaric"),
    "latitude": ("latitude", "lat", "nav_lat"),
    "longitude": ("longitude", "lon", "nav_lon"),
    "expver": ("expver",),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
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


# "1900-01-01 00:00:0.0 -6:00", as CF 4.4 writes it; what stands behind and is not understood is refused.
REFERENCE = (
    r"(\d+)[- ](\d+)[- ](\d+)(?:[T ]+(\d+)(?::(\d+)(?::(\d+)(?:\.\d*)?)?)?)?"
    r"(?:\s*(?:Z|UTC|GMT|([+-]?)\s*(\d{1,2}):?(\d{2})?))?"
)


def decode_times(values: np.ndarray, attrs: dict[str, Any], reference: str = "") -> np.ndarray:
    """datetime64[s] from numbers and CF units ("hours since 1900-01-01"), or hours since `reference`.

    DataError without units, for calendars with other days, and for the Julian calendar before 1583.
    """
    if values.dtype.kind == "M":
        return values.astype("datetime64[s]")
    unit, _, start = (str(attrs.get("units", "")) or f"hours since {reference}").partition(" since ")
    match = re.fullmatch(REFERENCE, start.strip())
    if not match:
        raise DataError(f"its time has units {attrs.get('units')!r}, not 'hours since <date>'")
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    calendar = attrs.get("calendar", "standard")
    if calendar not in ("standard", "gregorian", "proleptic_gregorian") or year < 1583:
        raise DataError(f"its time has calendar {calendar!r} from year {year}: not that of analyses")
    sign, hours, minutes = match.groups()[6:]
    offset = (60 * int(hours or 0) + int(minutes or 0)) * (-1 if sign == "-" else 1)  # from UTC
    since = np.datetime64(datetime(year, month, day, hour, minute, second), "s")
    return since - np.timedelta64(60 * offset, "s") + durations(values, unit)


def durations(values: np.ndarray, unit: str) -> np.ndarray:
    """timedelta64[s] of numbers of a unit of time ("hours", "hour", "h"); DataError for other units."""
    try:
        scale = pd.Timedelta(1, unit=unit.strip().lower()).total_seconds()
    except ValueError:
        raise DataError(f"its time has units {unit!r}, not those of a time such as 'hours'") from None
    whole = values.dtype.kind in "iu" and scale >= 1  # of any size: nothing is rounded
    seconds = values.astype(np.int64) * int(scale) if whole else np.round(values * scale)
    with np.errstate(invalid="ignore"):  # what is no number becomes NaT
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
        with np.errstate(invalid="ignore"):  # coordinates without numbers are refused, in one line
            return _fields_of(file, more_roles or {}, picks or {})
    except (ValueError, OSError, KeyError, RuntimeError) as error:  # the last three: coordinates cut short
        raise DataError(f"cannot read {file.path!r}: {' '.join(str(error).split())}") from error


def _fields_of(
    file: StoredFile, more_roles: Mapping[str, str], picks: Mapping[str, str]
) -> tuple[list[StoredField], dict[str, str]]:
    """By what the file has inside."""
    if not file.attrs.get("complete", True) and TRAINING_STORE in file.attrs:
        raise DataError(
            "its conversion has not ended; run the same command again: python -m datasets.convert ..."
        )
    if "fields" in file.arrays and file.arrays["fields"].dims == ("",) * 4:
        return _tutorial_fields(file), {}
    if "cell" in file.arrays.get("data", _NOTHING).dims and "variables" in file.attrs:
        return _anemoi_fields(file, picks), {}
    return _named_fields(file, more_roles, picks)


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


def _refuse_radians(file: StoredFile, north: str, east: str) -> None:
    """DataError: the units of a coordinate say radians, or the globe is 3.14 high and 6.28 wide."""
    values = [file.fetch(name) for name in (north, east)]
    spans = [
        float(np.ptp(v)) * len(v) / max(len(v) - 1, 1) for v in values
    ]  # with the half cells at the ends
    global_ones = abs(spans[0] / np.pi - 1) < 0.03 and abs(spans[1] / (2 * np.pi) - 1) < 0.03
    said = any(
        str(file.arrays[name].attrs.get("units", "")).lower().startswith("rad") for name in (north, east)
    )
    if said or global_ones:
        shown = f"{north} from {values[0].min():.4g} to {values[0].max():.4g}"
        raise DataError(f"its {shown} is in radians: write latitudes and longitudes in degrees")


def _named_fields(
    file: StoredFile, more_roles: Mapping[str, str], picks: Mapping[str, str]
) -> tuple[list[StoredField], dict[str, str]]:
    """The general case: arrays whose dimensions have names (Zarr, NetCDF)."""
    north, east = _coordinate(file, "latitude"), _coordinate(file, "longitude")
    _refuse_radians(file, north, east)
    turned = orientation(file.fetch(north), file.fetch(east))
    fields, unreadable, times = [], {}, {}
    for name, array in file.arrays.items():
        roles = tuple(coordinate_role(file, dim, more_roles) for dim in array.dims)
        if not {"latitude", "longitude"} <= set(roles) or array.dtype.kind not in "fiub":
            continue
        if " since " in str(array.attrs.get("units", "")):
            unreadable[full_name(name).partition(":")[0]] = f"its units are {array.attrs['units']!r}: dates"
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
        own = (times.get(clock), turned, packing_of(name, array), picked)
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
    if TRAINING_STORE in file.attrs and "variable" in file.arrays[name].attrs:
        return (str(file.arrays[name].attrs["variable"]),)
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
