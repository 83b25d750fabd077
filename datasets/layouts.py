"""Arrays of a file as fields in normal form; the layout is found from the content."""

import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from datasets.fields import Decoding, Field, find_decoding, find_orientation
from datasets.files import (
    ROLES,
    TRAINING_STORE,
    OpenFile,
    coordinate_times,
    decode_times,
    find_coordinate,
    select_elements,
)
from datasets.remote import NO_OPTIONS, Access, describe_error
from datasets.variables import (
    ON_LEVELS,
    SHORT_NAMES,
    full_name,
    join_name,
    plain_units,
    surface_or_level,
    unit_conversion,
)
from errors import ConfigError, DataError

HECTOPASCALS = {"": 1.0, "hPa": 1.0, "Pa": 0.01, "kPa": 10.0, "bar": 1000.0}
LABELLED = ("lead", "hour", "dayofyear")  # axes of forecasts and climatologies
NO_PRESSURES = re.compile("hybrid|sigma|model.?level|height|depth|altitude")
# NCAR's storm of January 1996 has p, t, u, v in every file. p is near 101,000 Pa even over the Rockies, so it
# is reduced to mean sea level. t, u, v are fields near the ground; u500 and v500 are stored with them.
STORM = {
    "p": "mean_sea_level_pressure",
    "t": "2m_temperature",
    "u": "10m_u_component_of_wind",
    "v": "10m_v_component_of_wind",
}
# The channels of the tutorial's `fields`, in FourCastNet's order (Pathak et al. 2022).
FOURCASTNET = (
    "u10 v10 t2m sp msl t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 tcwv"
)


def open_fields(
    path: str,
    selection: Mapping[str, str] | None = None,
    access: Access = NO_OPTIONS,
    more_roles: Mapping[str, Sequence[str]] | None = None,
) -> tuple[list[Field], dict[str, str]]:
    """Return the fields of one file, and for each array on a grid that cannot be read, the reason.

    selection: name of a dimension without a role -> the label that is read. more_roles: roles of dimensions
    of forecasts or climatologies -> lower-case names. Raises DataError, ConfigError (the selection).
    """
    roles = {name: role for each in (ROLES, more_roles or {}) for role in each for name in each[role]}
    selection, fields, unreadable = selection or {}, [], {}
    try:
        with np.errstate(invalid="ignore"):  # coordinates without numbers are refused in one line
            for file in OpenFile.open(path, access):
                if file.arrays.keys() == {"fields"} and file.arrays["fields"].ndim == 4:
                    fields += open_tutorial(file)
                elif {"data", "latitudes", "longitudes", "dates"} <= file.arrays.keys():
                    fields += open_anemoi(file, selection)
                else:
                    fields += _named_fields(file, roles, selection, unreadable)
    except ConfigError:
        raise
    except DataError as error:
        if str(error).startswith("cannot read"):
            raise
        raise DataError(f"cannot read {path!r}: {error}") from None
    except Exception as error:  # every library raises its own
        raise DataError(f"cannot read {path!r}: {describe_error(error)}") from None
    return fields, unreadable


def _named_fields(
    file: OpenFile, roles_of: Mapping[str, str], selection: Mapping[str, str], unreadable: dict[str, str]
) -> list[Field]:
    """Return the arrays with named dimensions; add the reasons for unreadable ones to `unreadable`."""
    north, east = (find_coordinate(file, role, roles_of) for role in ("latitude", "longitude"))
    _refuse_radians(file, north, east)
    orientation = find_orientation(file.fetch(north), file.fetch(east))
    fields, axes = [], dict[str, np.ndarray]()
    for name, variable in file.arrays.items():
        dims = [str(dim) for dim in variable.dims]
        roles = tuple(file.role(dim, roles_of) for dim in dims)
        if not {"latitude", "longitude"} <= set(roles) or variable.dtype.kind not in "fiub":
            continue
        level_dim, names = dims[roles.index("level")] if "level" in roles else None, (full_name(name),)
        try:
            time_name = find_time_coordinate(file, dims, roles, roles_of)
            if time_name and time_name not in axes:
                axes[time_name] = np.atleast_1d(coordinate_times(file, time_name))
            labelled = {role: dim for role, dim in zip(roles, dims, strict=True) if role in LABELLED}
            axes |= {d: axis_labels(file, d, role) for role, d in labelled.items() if d not in axes}
            names = _find_names(file, name, level_dim, roles_of)
            selected = select_elements(file, variable, roles, selection)
            units, conversion = unit_conversion(names[0], str(variable.attrs.get("units", "")))
            decoding = find_decoding(name, variable, conversion)
        except DataError as error:
            unreadable[names[0].partition(":")[0]] = str(error)
            continue
        labels = {role: axes[dim] for role, dim in labelled.items()}
        own = (orientation, decoding, units, tuple(dims), file.chunks(name), selected, labels)
        times = axes.get(time_name or "")
        fields.append(Field(file.path, name, file.raw[name], names, roles, times, *own))
    return fields


def find_time_coordinate(
    file: OpenFile, dims: Sequence[str], roles: Sequence[str], roles_of: Mapping[str, str]
) -> str | None:
    """Return the name of the dates of an array: of its axis, or of the single initial date of forecasts; None
    for a constant field. Raises DataError.
    """
    if "time" in roles or "lead" not in roles:
        return dims[roles.index("time")] if "time" in roles else None
    for name, variable in file.arrays.items():
        if variable.shape == () and file.role(name, roles_of) == "time" and name.lower() != "valid_time":
            return name
    raise DataError("it has no initial date")


def axis_labels(file: OpenFile, dim: str, role: str) -> np.ndarray:
    """Return the labels of an axis of forecasts or climatologies: leads as timedelta64[s], from timedeltas or
    numbers with units (hours without any); hours and days as numbers. Raises DataError.

    Without a coordinate hours count from 0, days from 1.
    """
    if role != "lead":
        size = next(a.sizes[dim] for a in file.arrays.values() if dim in a.dims)
        return np.asarray(file.fetch(dim) if dim in file.arrays else np.arange(size) + (role != "hour"), int)
    if dim not in file.arrays:
        raise DataError(f"its dimension {dim!r} has no coordinate with lead times")
    values, unit = file.fetch(dim), str(file.arrays[dim].attrs.get("units", "hours"))
    if values.dtype.kind == "m":
        return values.astype("timedelta64[s]")
    try:
        seconds = pd.Timedelta(1, unit=unit.strip().lower()).total_seconds()  # type: ignore[arg-type]
    except ValueError:
        raise DataError(f"its {dim!r} has units {unit!r}, not 'hours'") from None
    return np.round(values * seconds).astype(np.int64).astype("timedelta64[s]")


def _refuse_radians(file: OpenFile, north: str, east: str) -> None:
    """Raise DataError if the units are radians, or the globe is 3.14 high and 6.28 wide."""
    values = [file.fetch(name) for name in (north, east)]
    # With the half cells at the ends.
    spans = [float(np.ptp(v)) * len(v) / max(len(v) - 1, 1) for v in values]
    is_globe = abs(spans[0] / np.pi - 1) < 0.03 and abs(spans[1] / (2 * np.pi) - 1) < 0.03
    units = [str(file.arrays[name].attrs.get("units", "")).lower() for name in (north, east)]
    if is_globe or any(each.startswith("rad") for each in units):
        span = f"{north} from {values[0].min():.4g} to {values[0].max():.4g}"
        raise DataError(f"its {span} is in radians: write latitudes and longitudes in degrees")


def _find_names(
    file: OpenFile, name: str, level_dim: str | None, roles: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the names of an array, one for each level; a scalar level coordinate is a level."""
    scalars = [each for each, a in file.arrays.items() if a.shape == () and file.role(each, roles) == "level"]
    if TRAINING_STORE in file.attrs and "variable" in file.arrays[name].attrs:
        return (str(file.arrays[name].attrs["variable"]),)
    if "reftime" in file.arrays and name in STORM and not level_dim:
        digits = re.search(r"\d+", os.path.basename(file.path))
        return (join_name(SHORT_NAMES[name], int(digits[0])) if digits else STORM[name],)
    if name == "LSMASK":
        return ("land_sea_mask",)
    full = SHORT_NAMES.get(name, SHORT_NAMES.get(name.lower(), name)) if level_dim else full_name(name)
    if level_dim or (scalars and full in ON_LEVELS):
        return tuple(join_name(full, level) for level in _read_levels(file, level_dim or scalars[0]))
    attrs = file.arrays[name].attrs
    described = " ".join(
        str(attrs.get(key, "")) for key in ("long_name", "standard_name", "GRIB_typeOfLevel")
    )
    return (surface_or_level(name, [*file.arrays], described),)


def _read_levels(file: OpenFile, name: str) -> list[int]:
    """Return pressure levels as whole hPa."""
    if name not in file.arrays:
        raise DataError(f"its dimension {name!r} has no coordinate with pressures")
    values, attrs = np.atleast_1d(file.fetch(name)).astype(np.float64), file.arrays[name].attrs
    units = plain_units(str(attrs.get("units", "")))
    described = f"{attrs.get('standard_name', '')} {attrs.get('long_name', '')}".lower()
    if not units and (found := NO_PRESSURES.search(described)):
        raise DataError(f"its {name!r} is {described.strip()!r}, of {found[0]}: take pressure levels, in hPa")
    if units not in HECTOPASCALS:
        raise DataError(f"its {name!r} has units {units!r}, which are no pressure: write levels in hPa")
    values = values * (HECTOPASCALS[units] if units or not values.max() > 1100 else 0.01)
    if not (np.abs(values - np.round(values)).max() <= 1e-3 and values.min() >= 0.5):
        raise DataError(f"its {name!r} has levels that are not whole hPa: {values.tolist()}")
    return [int(value) for value in np.round(values)]


# -- layouts without named axes: the HDF5 of the NERSC tutorial, and the Zarr of anemoi-datasets


def open_tutorial(file: OpenFile) -> list[Field]:
    """Return the field of a yearly file: fields[time, channel, latitude, longitude], without coordinates.

    Times are 6-hourly from 1 January of the year in the file's name. Twenty channels are FourCastNet's. Rows
    are evenly spaced as in ERA5 without its last row (90, 90 - 180/H, ...); an odd number of rows reaches
    both poles.
    """
    year = re.search(r"(\d{4})\.\w+$", file.path)
    if not year:
        raise DataError("its name does not end in the year (2016.h5), and it has no dates inside")
    num_times, num_channels, num_rows, num_columns = file.arrays["fields"].shape
    times = np.datetime64(f"{year[1]}-01-01", "s") + 6 * np.arange(num_times) * np.timedelta64(3600, "s")
    labels = FOURCASTNET.split() if num_channels == 20 else [f"channel_{i}" for i in range(num_channels)]
    latitude = 90 - np.arange(num_rows) * 180 / (num_rows - num_rows % 2)
    orientation = find_orientation(latitude, np.arange(num_columns) * 360 / num_columns)
    names = tuple(surface_or_level(label, labels) for label in labels)
    roles = ("time", "level", "latitude", "longitude")
    own = (orientation, Decoding(), "", roles, file.chunks("fields"))
    return [Field(file.path, "fields", file.raw["fields"], names, roles, times, *own)]


def open_anemoi(file: OpenFile, selection: Mapping[str, str]) -> list[Field]:
    """Return the field data(time, variable, ensemble, cell); its cells are a regular grid row by row."""
    shape, data = tuple(file.attrs.get("field_shape", ())), file.arrays["data"]
    if len(shape) != 2:
        raise DataError(f"its data have field_shape {shape}: not rows and columns of a grid")
    roles = ("time", "level", "", "cell")
    selected = select_elements(file, data, roles, selection)
    latitude, longitude = (file.fetch(name).reshape(shape) for name in ("latitudes", "longitudes"))
    turned = (longitude - longitude[:1] + 180) % 360 - 180
    if max(np.ptp(latitude, axis=1).max(), np.abs(turned).max()) > 1e-3:
        raise DataError("its cells are no rows of one latitude and columns of one longitude: regrid them")
    orientation = find_orientation(latitude[:, 0], longitude[0])
    labels, times = file.attrs["variables"], decode_times(file.arrays["dates"])
    names = tuple(surface_or_level(label, labels) for label in labels)
    own = (orientation, Decoding(), "", tuple(map(str, data.dims)), file.chunks("data"), selected)
    return [Field(file.path, "data", file.raw["data"], names, roles, times, *own)]
