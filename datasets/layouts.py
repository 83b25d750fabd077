"""Arrays of a file as fields in normal form; the layout is found from the content."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from datasets.fields import Decoding, Field, find_decoding, find_orientation
from datasets.files import (
    FORECAST_ROLES,
    HEIGHT,
    ROLES,
    TRAINING_STORE,
    OpenFile,
    check_labels,
    coordinate_times,
    decode_times,
    find_coordinate,
    is_dates,
    select_elements,
)
from datasets.remote import NO_OPTIONS, Access, describe_error
from datasets.variables import (
    ON_LEVELS,
    SHORT_NAMES,
    full_name,
    is_class,
    join_name,
    plain_units,
    surface_or_level,
    unit_conversion,
)
from errors import ConfigError, DataError

HECTOPASCALS = {"": 1.0, "hPa": 1.0, "Pa": 0.01, "kPa": 10.0, "bar": 1000.0}
START = "forecast_reference_time"  # CF's standard_name of the dates from which forecasts start
LABELLED = ("lead", "hour", "dayofyear")  # axes of forecasts and climatologies
NO_PRESSURES = re.compile("hybrid|sigma|model.?level|height|depth|altitude")
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
            files = OpenFile.open(path, access)
            check_labels(files, selection, roles)
            for file in files:
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


def dataset_fields(path: str, dataset: xr.Dataset) -> tuple[list[Field], dict[str, str]]:
    """Return the fields of a dataset in memory, and the reasons for unreadable arrays. Raises DataError."""
    unreadable: dict[str, str] = {}
    arrays = {str(name): variable for name, variable in dataset.variables.items()}
    roles = {name: role for role, names in ROLES.items() for name in names}
    return _named_fields(OpenFile(path, arrays, dataset.attrs, arrays), roles, {}, unreadable), unreadable


def _named_fields(
    file: OpenFile, roles_of: Mapping[str, str], selection: Mapping[str, str], unreadable: dict[str, str]
) -> list[Field]:
    """Return the arrays with named dimensions; add the reasons for unreadable ones to `unreadable`."""
    north, east = (find_coordinate(file, role, roles_of) for role in ("latitude", "longitude"))
    _refuse_radians(file, north, east)
    orientation = find_orientation(file.fetch(north), file.fetch(east))
    fields, axes, role_of_dim = [], dict[str, np.ndarray](), file.dim_roles(roles_of)
    coordinates = find_coordinates(file, roles_of)
    for name, variable in file.arrays.items():
        dims = [str(dim) for dim in variable.dims]
        roles = [role_of_dim[dim] for dim in dims]
        if not {"latitude", "longitude"} <= set(roles) or variable.dtype.kind not in "fiub":
            continue
        if "time" not in roles:  # any name, if it is the only one with dates
            dated = [i for i, dim in enumerate(dims) if dim in file.arrays and is_dates(file.arrays[dim])]
            if len(dated) == 1 and not roles[dated[0]]:
                axis = dims[dated[0]]
                names = {axis.lower(), str(file.arrays[axis].attrs.get("standard_name"))}
                roles[dated[0]] = "" if names & {START, *FORECAST_ROLES["time"]} else "time"
        level_dim, names = dims[roles.index("level")] if "level" in roles else None, (full_name(name),)
        try:
            selected = select_elements(file, variable, roles, selection)
            at = {dims[i]: position for i, position in selected.items()}
            times = find_times(file, coordinates, dims, roles, at, axes)
            labelled = {role: dim for role, dim in zip(roles, dims, strict=True) if role in LABELLED}
            axes |= {d: axis_labels(file, d, role) for role, d in labelled.items() if d not in axes}
            levels, reasons = read_levels(file, level_dim) if level_dim else (None, {})
            names = _find_names(file, name, levels, coordinates.levels, at)
            full = next(filter(None, names))
            units, conversion = unit_conversion(full, str(variable.attrs.get("units", "")))
            decoding = find_decoding(variable, conversion)
        except DataError as error:
            unreadable[names[0].partition(":")[0]] = str(error)
            continue
        unreadable |= {f"{full.partition(':')[0]}:{level}": reason for level, reason in reasons.items()}
        expver = dims[roles.index("expver")] if "expver" in roles else ""
        versions = file.fetch(expver) if expver in file.arrays else np.zeros(1)
        field = Field(
            path=file.path,
            array=name,
            raw=file.raw[name],
            names=names,
            roles=tuple(roles),
            times=times,
            orientation=orientation,
            decoding=decoding,
            units=units,
            dims=tuple(dims),
            chunks=file.chunks(name),
            selected=selected,
            labels={role: axes[dim] for role, dim in labelled.items()},
            versions=tuple(np.argsort(versions, kind="stable").tolist()),
            is_class=is_class(full, variable.attrs),
        )
        fields.append(field)
    return fields


class Coordinates(NamedTuple):
    """Names of coordinates of a file that are not of the grid."""

    dates: list[str]
    starts: list[str]  # initial dates without an axis
    leads: list[str]
    levels: list[str]  # without an axis


def find_coordinates(file: OpenFile, roles_of: Mapping[str, str]) -> Coordinates:
    """Return the coordinates of a file that tell dates and levels of its fields."""
    times = [name for name in file.arrays if file.role(name, roles_of) == "time"]
    scalars = [name for name, array in file.arrays.items() if array.shape == ()]
    leads = [
        name
        for name, array in file.arrays.items()
        if name.lower() in FORECAST_ROLES["lead"] or array.attrs.get("standard_name") == "forecast_period"
        if array.dtype.kind in "fium"
    ]
    return Coordinates(
        dates=[name for name in times if is_dates(file.arrays[name])],
        starts=[name for name in scalars if name in times and name.lower() != "valid_time"],
        leads=leads,
        levels=[name for name in scalars if file.role(name, roles_of) == "level"],
    )


def find_times(
    file: OpenFile,
    coordinates: Coordinates,
    dims: Sequence[str],
    roles: Sequence[str],
    at: Mapping[str, int],
    known: dict[str, np.ndarray],
) -> np.ndarray | None:
    """Return the dates (T,) of an array: of its time axis, or the single initial date of forecasts; None for
    a constant field. Raises DataError, too, where it is not clear which of two coordinates has the dates.

    at: positions on dimensions that are no axis. known: dates that arrays of this file share, by coordinate.
    """

    def read(name: str) -> np.ndarray:
        positions = {dim: i for dim, i in at.items() if name in file.arrays and dim in file.arrays[name].dims}
        key = f"{name} at {positions}"
        if key not in known:
            known[key] = coordinate_times(file, name, positions)
        return known[key]

    def standard_name(name: str) -> str:
        return str(file.arrays[name].attrs.get("standard_name", "")) if name in file.arrays else ""

    if "time" not in roles:
        if "lead" in roles and not coordinates.starts:
            raise DataError("it has no initial date")
        return read(coordinates.starts[0]) if "lead" in roles else None
    axis = dims[roles.index("time")]
    if "lead" in roles:
        return read(axis)
    # Analyses. cfgrib writes forecasts with the start in `time`, the date in `valid_time`, and the lead.
    along = {name: {*map(str, file.arrays[name].dims)} for name in (*coordinates.dates, *coordinates.leads)}
    others = [name for name in coordinates.dates if name != axis and {axis} <= along[name] <= {axis, *at}]
    candidates = [axis, *others] if axis in file.arrays or not others else others
    named = [name for name in candidates if standard_name(name) == "time" or name == axis == "valid_time"]
    if not named and standard_name(axis) == START:
        named = others
    first, *rest = named or candidates
    for name in rest:
        if not np.array_equal(read(name), read(first)):
            why = f"{first!r} and {name!r} are different dates of the same fields"
            raise DataError(f"its {why}; give the one with the dates of validity the standard_name 'time'")
    # What is read of a dimension of leads has no date on the axis of starts.
    for name in (name for name in coordinates.leads if along[name] <= {*at}):
        lead = np.nan_to_num(file.arrays[name].isel(at, missing_dims="ignore").values.astype(np.float64))
        if first == axis and lead.any() and (name in at or first not in named):
            why = f"its {axis!r} has the starts of forecasts, whose {name!r} is {lead:g}"
            raise DataError(f"{why}: give the file a coordinate valid_time, with the standard_name 'time'")
    return read(first)


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
    file: OpenFile,
    name: str,
    levels: Sequence[int | None] | None,
    scalars: Sequence[str],
    at: Mapping[str, int],
) -> tuple[str, ...]:
    """Return the names of an array, one for each level, "" for one without a name.

    scalars: coordinates of one level. at: positions on dimensions that are no axis.
    """
    attrs = file.arrays[name].attrs
    if TRAINING_STORE in file.attrs and "variable" in attrs:
        return (str(attrs["variable"]),)
    full = full_name(name) if levels is None else SHORT_NAMES.get(name, SHORT_NAMES.get(name.lower(), name))
    if levels is None and scalars and full in ON_LEVELS:
        levels, reasons = read_levels(file, scalars[0])
    if levels is not None:
        return tuple(join_name(full, level) if level else "" for level in levels)
    keys = ("long_name", "standard_name", "GRIB_typeOfLevel", "coordinates")
    full = surface_or_level(name, [*file.arrays], " ".join(str(attrs.get(key, "")) for key in keys))
    surface = str(attrs.get("GRIB_typeOfLevel", ""))
    if full not in ON_LEVELS or not surface or surface.startswith("isobaric"):
        return (full,)
    # GRIB has a variable on many kinds of surfaces: they are not the one on pressure levels.
    for height in (name for name in file.arrays if name.lower() == surface.lower() == HEIGHT):
        value = file.arrays[height].isel(at, missing_dims="ignore").values
        if value.ndim == 0:
            return (f"{float(value):g}m_{full}",)
    return (f"{full}_at_" + re.sub("([A-Z])", r"_\1", surface).lower(),)


def read_levels(file: OpenFile, name: str) -> tuple[list[int | None], dict[str, str]]:
    """Return pressure levels as whole hPa, None for others, and for these the reason by their hPa. Raises
    DataError if it has no pressures, or none in whole hPa.
    """
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
    is_named = (np.abs(values - np.round(values)) <= 1e-3) & (values >= 0.5)
    if not (is_named.any() and np.isfinite(values).all()):
        raise DataError(f"its {name!r} has levels that are not whole hPa: {values.tolist()}")
    reason = "names have whole hPa: the level is left out"
    unnamed = {f"{value:g}": reason for value in values[~is_named]}
    return [int(np.round(v)) if ok else None for v, ok in zip(values, is_named, strict=True)], unnamed


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
