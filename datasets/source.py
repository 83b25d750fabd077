"""Files of analyses, forecasts and climatologies: found, opened by xarray, and read as fields in normal form.

The layout is found from the content: names of arrays, and names, standard_name and units of coordinates.
"""

import atexit
import glob
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from xarray.backends.file_manager import FILE_CACHE
from xarray.conventions import decode_cf_variable

from datasets.fields import Decoding, Field, find_decoding, find_orientation
from datasets.options import SELECT
from datasets.remote import NO_OPTIONS, Access, describe_error, is_url, open_store
from datasets.shards import register_codecs
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
from errors import ConfigError, DataError, refuse

DATA_FILES = tuple(".nc .nc4 .cdf .netcdf .h5 .hdf5 .he5 .grib .grib1 .grib2 .grb .grb2".split())
TRAINING_STORE = "rossby_training_store"  # attribute of the stores that datasets.convert writes
# Lower-case names of dimensions. Other dimensions are read if they have one element or one is selected.
ROLES = {
    "time": ("time", "valid_time", "date", "dates"),
    "level": ("level", "pressure_level", "isobaricinhpa", "plev", "pressure", "lev", "isobaric"),
    "latitude": ("latitude", "lat", "nav_lat"),
    "longitude": ("longitude", "lon", "nav_lon"),
    "expver": ("expver",),
}
ROLE_OF_NAME = {name: role for role, names in ROLES.items() for name in names}
FORECAST_ROLES = {
    "lead": ("prediction_timedelta", "lead_time", "forecast_period", "step"),
    "number": ("number", "realization", "member", "ensemble"),
    "time": ("init_time", "initial_time", "forecast_reference_time"),
}
CLIMATOLOGY_ROLES = {"hour": ("hour",), "dayofyear": ("dayofyear",)}
LABELLED = ("lead", "hour", "dayofyear")  # axes of forecasts and climatologies
START = "forecast_reference_time"  # CF's standard_name of the dates from which forecasts start
# CF finds latitude and longitude by their units (4.1, 4.2), in any of six spellings.
DEGREES = {
    "latitude": re.compile(r"degrees?_?n(orth)?", re.IGNORECASE),
    "longitude": re.compile(r"degrees?_?e(ast)?", re.IGNORECASE),
}
HECTOPASCALS = {"": 1.0, "hPa": 1.0, "Pa": 0.01, "kPa": 10.0, "bar": 1000.0}
NO_PRESSURES = re.compile("hybrid|sigma|model.?level|height|depth|altitude")
HEIGHT = "heightaboveground"  # GRIB's axis of heights in m, which become a part of the name
GREGORIAN = (1582, 10, 15)  # the first day of that calendar; "standard" is Julian before it
EARLIEST, LATEST = np.datetime64("1678-01-01"), np.datetime64("2262-01-01")  # dates of analyses
# The channels of the NERSC tutorial's `fields`, in FourCastNet's order (Pathak et al. 2022).
FOURCASTNET = (
    "u10 v10 t2m sp msl t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 tcwv"
)


def find_files(path: str) -> list[str]:
    """Return the files of a path: itself, or what a folder or a glob contains. Raises DataError."""
    path = path.removeprefix("file://")
    if is_url(path) or os.path.isfile(path) or is_zarr(path):
        return [path]
    try:
        if os.path.isdir(path):
            inside = [os.path.join(path, name) for name in sorted(os.listdir(path))]
            files = [name for name in inside if name.lower().endswith(DATA_FILES) or is_zarr(name)]
            reason = "the folder contains no Zarr, NetCDF, HDF5 or GRIB"
        else:
            files, reason = sorted(glob.glob(path)), "there is no such file or folder"
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {describe_error(error)}") from None
    if not files:
        raise DataError(f"cannot read {path!r}: {reason}")
    return files


def is_zarr(path: str) -> bool:
    """Return True for a local folder that is a Zarr store, of format 2 or 3."""
    return any(os.path.exists(os.path.join(path, name)) for name in (".zgroup", ".zmetadata", "zarr.json"))


@atexit.register
def _close_files() -> None:
    """Close NetCDF 4 files: h5netcdf 1.8 does so in __del__, with a TypeError when h5py is gone already."""
    for file in list(FILE_CACHE.values()):
        if type(file).__module__.startswith("h5netcdf"):
            file.close()


# -- opening a file, without decoding


@dataclass(frozen=True)
class OpenFile:
    """Arrays and attributes of one file, as xarray opens it with decode_cf=False."""

    path: str
    arrays: Mapping[Any, xr.Variable]
    attrs: Mapping[str, Any]
    group: Any = None  # of Zarr, whose arrays are read slice by slice; otherwise xarray's variables are

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dimensions."""
        return {str(dim): size for array in self.arrays.values() for dim, size in array.sizes.items()}

    def fetch(self, name: str) -> np.ndarray:
        """Return all values of a coordinate, unpacked (CF 8.1)."""
        return _unpack(self.arrays[name])

    def attribute(self, name: str, key: str) -> str:
        """Return an attribute of an array as text, "" without the array or the attribute."""
        return str(self.arrays[name].attrs.get(key, "")) if name in self.arrays else ""

    def role(self, name: str, roles: Mapping[str, str]) -> str:
        """Return the role of a coordinate by its name, its standard_name or its units; "" for none."""
        standard_name, units = (self.attribute(name, key) for key in ("standard_name", "units"))
        by_units = [role for role, pattern in DEGREES.items() if pattern.fullmatch(units.strip())]
        return roles.get(name.lower()) or (standard_name if standard_name in ROLES else "".join(by_units))


def open_files(path: str, access: Access = NO_OPTIONS) -> list[OpenFile]:
    """Open one file by xarray; GRIB gives one result for each kind of level. Raises what libraries raise."""
    if is_url(path) or is_zarr(path):
        register_codecs()
        store = open_store(path, access) if is_url(path) else path
        with warnings.catch_warnings(action="ignore"):  # that its metadata are not consolidated
            backend: Any = xr.backends.ZarrStore.open_group(store, mode="r")  # type: ignore[arg-type]
            dataset = xr.open_dataset(backend, decode_cf=False, chunks=None, cache=False)
        group: Any = backend.zarr_group
        if not group.attrs.get("complete", True) and TRAINING_STORE in group.attrs:
            raise DataError("its conversion has not ended: run the same `python -m datasets.convert` again")
        # Sorted, because zarr lists arrays in the order in which metadata arrive, which varies by rank.
        arrays = {name: dataset.variables[name] for name in sorted(map(str, dataset.variables))}
        for variable in arrays.values():
            # Zarr 2's fill value means "missing", as in xarray, except 0 for values that are not packed: many
            # writers set 0 by default, and every sea cell of a land mask would be NaN.
            packed = {"scale_factor", "add_offset"} & variable.attrs.keys()
            zero = variable.attrs.get("_FillValue") == 0
            if group.metadata.zarr_format == 2 and zero and not packed:
                del variable.attrs["_FillValue"]
        return [OpenFile(path, arrays, dict(group.attrs), group)]

    # -- NetCDF and HDF5, by the first bytes
    if not os.path.isfile(path):  # a pipe or a device, which may never end
        raise DataError(f"cannot read {path!r}: it is no regular file")
    with open(path, "rb") as file:
        start = file.read(8)
    engine = {b"\x89HDF": "h5netcdf", b"CDF\x01": "scipy", b"CDF\x02": "scipy"}.get(start[:4])
    if engine:
        options: Any = {"phony_dims": "access"} if engine == "h5netcdf" else {}
        dataset = xr.open_dataset(path, engine=engine, decode_cf=False, chunks=None, cache=False, **options)
        return [OpenFile(path, dataset.variables, dataset.attrs)]
    if start[:4] != b"GRIB":
        kinds = f"neither Zarr, NetCDF, HDF5 nor GRIB (it begins with {start!r})"
        raise DataError(f"cannot read {path!r}: it is {kinds if start else 'empty'}")

    # -- GRIB
    try:
        import cfgrib  # type: ignore[reportMissingImports]  # an extra
    except (ImportError, RuntimeError) as error:  # RuntimeError: eccodes finds no library
        raise DataError(f'it is GRIB ({describe_error(error)}): pip install -e ".[grib]"') from None
    options = {"indexpath": "", "squeeze": False, "errors": "raise"}
    options |= {"time_dims": ("valid_time",), "extra_coords": {"step": "valid_time"}}
    try:
        try:
            datasets = cfgrib.open_datasets(path, backend_kwargs=options, decode_cf=False, cache=False)
        except ValueError as error:
            if "'step' cannot be indexed by dimension 'valid_time'" not in str(error):
                raise
            # A date has several steps, of which the last message would be read: they get an axis, from
            # which data.select chooses.
            options |= {"time_dims": ("time", "step"), "extra_coords": {}}
            datasets = cfgrib.open_datasets(path, backend_kwargs=options, decode_cf=False, cache=False)
    except Exception as error:  # eccodes has a class for each kind of damage
        raise DataError(f"a GRIB message is damaged or cut short ({describe_error(error)})") from None
    # Variables with a single date are constant if others have more dates.
    num_dates = [math.prod(dataset.sizes[dim] for dim in options["time_dims"]) for dataset in datasets]
    first = dict.fromkeys(options["time_dims"], 0)
    for number, count in enumerate(num_dates):
        if count == 1 < max(num_dates):
            datasets[number] = datasets[number].isel(first)
    return [OpenFile(path, dataset.variables, dataset.attrs) for dataset in datasets]


# -- coordinates


def _unpack(variable: xr.Variable) -> np.ndarray:
    values, attrs = np.asarray(variable.values), variable.attrs
    if not {"scale_factor", "add_offset"} & attrs.keys():
        return values
    return values * float(attrs.get("scale_factor", 1)) + float(attrs.get("add_offset", 0))


def _is_dates(variable: xr.Variable) -> bool:
    """Return True for datetimes, and for numbers with units such as "hours since 1900-01-01"."""
    return variable.dtype.kind == "M" or " since " in str(variable.attrs.get("units", ""))


def decode_times(variable: xr.Variable) -> np.ndarray:
    """Return datetime64[s], rounded, of CF times. Raises DataError without units and for other calendars."""
    if variable.dtype.kind == "M":
        return variable.values.astype("datetime64[s]")
    units, calendar = (str(variable.attrs.get(key, "")) for key in ("units", "calendar"))
    if not units:
        raise DataError('its time has no units; give it the attribute units, as "hours since 1900-01-01"')
    if calendar.lower() not in ("", "standard", "gregorian", "proleptic_gregorian"):
        years = f"its time has the calendar {calendar!r}, of years that differ from those of analyses"
        raise DataError(f"{years}; convert it to the standard calendar (xarray's convert_calendar)")
    # -- numbers, without fill values: 9.97e36 days is not a date
    stored, numbers = np.asarray(variable.values), _unpack(variable)
    fills = [np.ravel(variable.attrs.get(key, [])) for key in ("_FillValue", "missing_value")]
    is_missing = np.isin(stored, [fill for some in fills if some.dtype.kind in "iuf" for fill in some])
    is_missing |= numbers != numbers
    if is_missing.any():
        numbers = np.where(is_missing, np.append(numbers[~is_missing], 0)[0], numbers)
    # -- dates, in microseconds, which reach back to the year 1 for whole numbers, of which parts are added
    coder = xr.coders.CFDatetimeCoder(use_cftime=False, time_unit="us")
    attrs = {"units": units, "calendar": "proleptic_gregorian"}

    def decode(numbers: np.ndarray) -> np.ndarray:
        whole = np.floor(numbers).astype(np.int64)
        coordinate = xr.Variable([f"dim_{i}" for i in range(1 + whole.ndim)], [whole, whole + 1], attrs)
        with warnings.catch_warnings(action="ignore"):  # of years with fewer than four digits
            times = decode_cf_variable("time", coordinate, decode_times=coder).values
        if times.dtype.kind != "M":
            raise ValueError("they are no dates")
        times, after = times.astype("datetime64[us]")
        part = np.round((numbers - whole) * (after - times).astype(np.int64))
        return times + part.astype("timedelta64[us]")

    try:
        times = decode(numbers)
        if stored.dtype == np.float32:  # days since 1850 are off by minutes: round to a near whole hour
            after = decode(np.nextafter(numbers.astype(np.float32), np.float32(np.inf)))
            hours = (times + np.timedelta64(30, "m")).astype("datetime64[h]").astype(times.dtype)
            times = np.where(np.abs(hours - times) < after - times, hours, times)
        start = re.search(r" since (\d{1,4})-(\d{1,2})-(\d{1,2})", units)
        if start and calendar.lower() != "proleptic_gregorian":
            year, month, day = map(int, start.groups())
            if (1582, 10, 4) < (year, month, day) < GREGORIAN:
                raise ValueError("the calendar has no such day")
            if (year, month, day) < GREGORIAN:  # leap days of centuries
                before = year - (month < 3)
                times = times + np.timedelta64(before // 100 - before // 400 - 2, "D")
        if not ((times > EARLIEST) & (times < LATEST)).all():
            raise ValueError("years of no analyses")
    except Exception:  # pandas and xarray raise their own
        reason = f"units {units!r} and calendar {calendar or 'standard'!r}, which are not dates of analyses"
        fix = 'write numbers in units such as "hours since 1900-01-01", in the standard calendar'
        raise DataError(f"its time has {reason}; {fix}") from None
    half = np.timedelta64(500_000, "us")  # hours stored as float32 are off by seconds
    return np.where(is_missing, np.datetime64("NaT", "s"), (times + half).astype("datetime64[s]"))


def _dim_labels(file: OpenFile, dim: str) -> list[str]:
    """Return the labels along a dimension, dates as 2020-01-01T00:00:00; without a coordinate, or if labels
    repeat (zeros, of NetCDF 4 without a coordinate), numbers from 0.
    """
    labels = []
    if dim in file.arrays and file.arrays[dim].ndim == 1:
        if " since " in file.attribute(dim, "units"):
            return decode_times(file.arrays[dim]).astype(str).tolist()
        values = file.fetch(dim).tolist()
        labels = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    is_labelled = labels and len(set(labels)) == len(labels)
    return labels if is_labelled else [str(number) for number in range(file.sizes[dim])]


def _find_label(labels: Sequence[str], label: str) -> int | None:
    """Return the position of a label, which may be written as another number is ("80" for "80.0")."""
    try:
        return [float(text) for text in labels].index(float(label))
    except ValueError:
        return labels.index(label) if label in labels else None


def _list_labels(labels: Sequence[str]) -> str:
    return ", ".join(labels[:5]) + (f" ... {labels[-1]}" if len(labels) > 5 else "")


def read_levels(file: OpenFile, name: str) -> tuple[list[int | None], dict[str, str]]:
    """Return pressure levels in whole hPa, None for others, and these with the reason. Raises DataError."""
    if name not in file.arrays:
        raise DataError(f"its dimension {name!r} has no coordinate with pressures")
    values = np.atleast_1d(file.fetch(name)).astype(np.float64)
    units = plain_units(file.attribute(name, "units"))
    described = " ".join(file.attribute(name, key) for key in ("standard_name", "long_name")).lower()
    if not units and (match := NO_PRESSURES.search(described)):
        raise DataError(f"its {name!r} is {described.strip()!r}, of {match[0]}: take pressure levels, in hPa")
    if units not in HECTOPASCALS:
        raise DataError(f"its {name!r} has units {units!r}, which are no pressure: write levels in hPa")
    values = values * (HECTOPASCALS[units] if units or not values.max() > 1100 else 0.01)
    is_named = (np.abs(values - np.round(values)) <= 1e-3) & (values >= 0.5)
    if not (is_named.any() and np.isfinite(values).all()):
        raise DataError(f"its {name!r} has levels that are not whole hPa: {values.tolist()}")
    reason = "names have whole hPa: the level is left out"
    unnamed = {f"{value:g}": reason for value in values[~is_named]}
    return [int(np.round(v)) if ok else None for v, ok in zip(values, is_named, strict=True)], unnamed


# -- the fields of a file


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
    roles = ROLE_OF_NAME | {name: role for role, names in (more_roles or {}).items() for name in names}
    selection, fields, unreadable = selection or {}, [], {}
    try:
        with np.errstate(invalid="ignore"):  # coordinates without numbers are refused below
            files = open_files(path, access)
            # -- a label must be somewhere in the file: another array may have other ones along the same
            # dimension
            for dim, label in selection.items():
                smallest = 2 if dim.lower() == HEIGHT else 1  # a single height is no choice
                these = [file for file in files if file.sizes.get(dim, 0) >= smallest]
                these = [file for file in these if not file.role(dim, roles)]
                labels = [text for file in these for text in _dim_labels(file, dim)]
                if labels and _find_label(labels, label) is None:
                    choice = _list_labels(list(dict.fromkeys(labels)))
                    refuse(SELECT, [f"{dim}={label}"], f"{dim} has {choice}; take one of them")
            # -- by layout: the tutorial's and anemoi's have one array of all variables
            for file in files:
                if file.arrays.keys() == {"fields"} and file.arrays["fields"].ndim == 4:
                    fields.append(_open_tutorial(file))
                elif {"data", "latitudes", "longitudes", "dates"} <= file.arrays.keys():
                    fields.append(_open_anemoi(file, selection))
                else:
                    fields += NamedLayout(file, roles, selection).open(unreadable)
    except ConfigError:
        raise
    except DataError as error:
        if str(error).startswith("cannot read"):
            raise
        raise DataError(f"cannot read {path!r}: {error}") from None
    except Exception as error:  # every library raises its own
        fix = "; the file is incomplete: copy it again" if "truncated" in str(error) else ""
        raise DataError(f"cannot read {path!r}: {describe_error(error)}{fix}") from None
    return fields, unreadable


def select_elements(
    file: OpenFile, variable: xr.Variable, roles: Sequence[str], selection: Mapping[str, str]
) -> dict[int, int]:
    """Return the positions that are read of the dimensions without a role (number -> position). Raises
    DataError for dates as values, a dimension without a selected element, or without the label.
    """
    if " since " in str(variable.attrs.get("units", "")):
        raise DataError(f"its units are {variable.attrs['units']!r}: dates")
    positions = {}
    for axis, (dim, size) in enumerate(zip(map(str, variable.dims), variable.shape, strict=True)):
        if roles[axis]:
            continue
        labels, label = _dim_labels(file, dim), selection.get(dim)
        if label is None and size > 1:
            fix = f"choose one with data.select = ['{dim}={labels[0]}']"
            if "time" not in roles:
                fix = f"if it has the dates, call it time and give it units; else {fix}"
            raise DataError(f"it has a dimension {dim} of size {size}; {fix}")
        if label is None or (size == 1 and dim.lower() == HEIGHT):  # the name has the height
            label = labels[0]
        position = _find_label(labels, label)
        if position is None:
            raise DataError(f"its {dim} is {_list_labels(labels)}, and data.select takes {label}")
        positions[axis] = position
    return positions


class NamedLayout:
    """The coordinates of a file whose dimensions have names, of which roles are known, and its arrays."""

    def __init__(self, file: OpenFile, roles_of: Mapping[str, str], selection: Mapping[str, str]) -> None:
        """Raises DataError without latitude and longitude in degrees."""
        self.file, self.selection, arrays = file, selection, file.arrays
        role_of_name = {name: file.role(name, roles_of) for name in arrays}
        coordinates = dict[str, str]()
        for role in ("latitude", "longitude"):
            names = [name for name in arrays if role_of_name[name] == role]
            one_dimensional = [name for name in names if arrays[name].ndim == 1]
            if not one_dimensional:
                candidates = ", ".join(names or sorted(arrays)) or "nothing"
                raise DataError(f"it has no one-dimensional {role}, only {candidates}")
            coordinates[role] = one_dimensional[0]
        north, east = coordinates["latitude"], coordinates["longitude"]
        latitude, longitude = file.fetch(north), file.fetch(east)
        # The globe is 3.14 high and 6.28 wide in radians, with the half cells at the ends.
        high, wide = (float(np.ptp(v)) * len(v) / max(len(v) - 1, 1) for v in (latitude, longitude))
        is_globe = abs(high / np.pi - 1) < 0.03 and abs(wide / (2 * np.pi) - 1) < 0.03
        if is_globe or any(file.attribute(name, "units").lower().startswith("rad") for name in (north, east)):
            span = f"{north} from {latitude.min():.4g} to {latitude.max():.4g}"
            raise DataError(f"its {span} is in radians: write latitudes and longitudes in degrees")
        self.orientation = find_orientation(latitude, longitude)

        # A dimension has the role of its coordinate, or of another coordinate along it, as of latitude(y) and
        # time(t); valid_time(step) is of one run.
        self.role_of_dim = {dim: file.role(dim, roles_of) for dim in file.sizes}
        for name, role in role_of_name.items():
            dim = str(arrays[name].dims[0]) if arrays[name].ndim == 1 else ""
            is_lead = dim.lower() in FORECAST_ROLES["lead"]
            if self.role_of_dim.get(dim) == "" and role in ("latitude", "longitude", "time") and not is_lead:
                self.role_of_dim[dim] = role

        times = [name for name, role in role_of_name.items() if role == "time"]
        scalars = [name for name, array in arrays.items() if array.shape == ()]
        self.dates = [name for name in times if _is_dates(arrays[name])]
        self.starts = [name for name in scalars if name in times and name.lower() != "valid_time"]
        leads = [name for name in arrays if name.lower() in FORECAST_ROLES["lead"]]
        leads += [name for name in arrays if file.attribute(name, "standard_name") == "forecast_period"]
        self.leads = [name for name in dict.fromkeys(leads) if arrays[name].dtype.kind in "fium"]
        self.single_levels = [name for name in scalars if role_of_name[name] == "level"]
        self.known_times: dict[str, np.ndarray] = {}  # by coordinate and positions: arrays share their dates

    def open(self, unreadable: dict[str, str]) -> list[Field]:
        """Return the fields of the arrays; add the reasons for unreadable ones to `unreadable`."""
        fields, file, labels = [], self.file, dict[str, np.ndarray]()
        for name, variable in file.arrays.items():
            dims = [str(dim) for dim in variable.dims]
            roles = [self.role_of_dim[dim] for dim in dims]
            if not {"latitude", "longitude"} <= set(roles) or variable.dtype.kind not in "fiub":
                continue
            if "time" not in roles:  # any name, if it is the only one with dates
                dated = [
                    i for i, dim in enumerate(dims) if dim in file.arrays and _is_dates(file.arrays[dim])
                ]
                if len(dated) == 1 and not roles[dated[0]]:
                    axis = dims[dated[0]]
                    words = {axis.lower(), file.attribute(axis, "standard_name")}
                    roles[dated[0]] = "" if words & {START, *FORECAST_ROLES["time"]} else "time"
            # -- what the array contains; what cannot be read is an error only if it is asked for later
            names, reasons = (full_name(name),), {}
            try:
                selected = select_elements(file, variable, roles, self.selection)
                at = {dims[i]: position for i, position in selected.items()}
                times = self.find_times(dims, roles, at)
                labelled = {role: dim for role, dim in zip(roles, dims, strict=True) if role in LABELLED}
                # -- leads are timedelta64[s], of timedeltas or numbers, by default hours; hours and days are
                # numbers, without a coordinate from 0 and 1
                for role, dim in labelled.items():
                    if dim in labels:
                        continue
                    if role == "lead" and dim not in file.arrays:
                        raise DataError(f"its dimension {dim!r} has no coordinate with lead times")
                    first = int(role != "hour")
                    values = file.fetch(dim) if dim in file.arrays else first + np.arange(file.sizes[dim])
                    unit = file.attribute(dim, "units").strip().lower() or "hours"
                    if role != "lead":
                        values = np.asarray(values, int)
                    elif values.dtype.kind != "m":
                        try:
                            seconds = pd.Timedelta(1, unit=unit).total_seconds()  # type: ignore[arg-type]
                        except ValueError:
                            raise DataError(f"its {dim!r} has units {unit!r}, not 'hours'") from None
                        values = np.round(values * seconds).astype(np.int64)
                    labels[dim] = values if role != "lead" else values.astype("timedelta64[s]")
                levels = None
                if "level" in roles:
                    levels, reasons = read_levels(file, dims[roles.index("level")])
                names = self.find_names(name, levels, at)
                full = next(filter(None, names))
                units, conversion = unit_conversion(full, file.attribute(name, "units"))
                decoding = find_decoding(variable, conversion)
            except DataError as error:
                unreadable[names[0].partition(":")[0]] = str(error)
                continue
            unreadable |= {f"{full.partition(':')[0]}:{level}": reason for level, reason in reasons.items()}
            # Of ERA5T and ERA5 in one file the final version, the smaller number, is read where it has a
            # value.
            expver = dims[roles.index("expver")] if "expver" in roles else ""
            versions = file.fetch(expver) if expver in file.arrays else np.zeros(1)
            field = Field(
                path=file.path,
                array=name,
                raw=file.group[name] if file.group is not None else variable,
                names=names,
                roles=tuple(roles),
                times=times,
                orientation=self.orientation,
                decoding=decoding,
                units=units,
                dims=tuple(dims),
                selected=selected,
                labels={role: labels[dim] for role, dim in labelled.items()},
                versions=tuple(np.argsort(versions, kind="stable").tolist()),
                is_class=is_class(full, variable.attrs),
            )
            fields.append(field)
        return fields

    def read_times(self, name: str, at: Mapping[str, int]) -> np.ndarray:
        """Return the dates (T,) of a coordinate, NaT where ARCO-ERA5 has none yet. Raises DataError."""
        key, file = f"{name} at {at}", self.file
        if key in self.known_times:
            return self.known_times[key]
        if name not in file.arrays:
            raise DataError(f"its dimension {name!r} has no coordinate with dates")
        times = np.atleast_1d(decode_times(file.arrays[name].isel(at, missing_dims="ignore")))
        if "valid_time_start" in file.attrs and "valid_time_stop" in file.attrs:
            first, last = (
                np.datetime64(str(file.attrs[f"valid_time_{end}"])[:10]) for end in ("start", "stop")
            )
            is_valid = (times >= first) & (times < last + np.timedelta64(1, "D"))
            times = np.where(is_valid, times, np.datetime64("NaT", "s"))
        self.known_times[key] = times
        return times

    def find_times(self, dims: Sequence[str], roles: Sequence[str], at: Mapping[str, int]) -> Any:
        """Return the dates (T,) of an array: of its time axis, or the initial date of forecasts; None for a
        constant field. at: positions on dimensions that are no axis. DataError if two coordinates differ.
        """
        if "time" not in roles:
            if "lead" in roles and not self.starts:
                raise DataError("it has no initial date")
            return self.read_times(self.starts[0], at) if "lead" in roles else None
        axis, arrays = dims[roles.index("time")], self.file.arrays
        if "lead" in roles:
            return self.read_times(axis, at)
        # Analyses. cfgrib writes forecasts with the start in `time`, the date in `valid_time`, and the lead.
        along = {name: {*map(str, arrays[name].dims)} for name in (*self.dates, *self.leads)}
        alternatives = [name for name in self.dates if name != axis and {axis} <= along[name] <= {axis, *at}]
        candidates = [axis, *alternatives] if axis in arrays or not alternatives else alternatives
        standard_names = {name: self.file.attribute(name, "standard_name") for name in candidates}
        named = [n for n in candidates if standard_names[n] == "time" or n == axis == "valid_time"]
        if not named and self.file.attribute(axis, "standard_name") == START:
            named = alternatives
        first, *rest = named or candidates
        for name in rest:
            if not np.array_equal(self.read_times(name, at), self.read_times(first, at)):
                why = f"{first!r} and {name!r} are different dates of the same fields"
                fix = "give the one with the dates of validity the standard_name 'time'"
                raise DataError(f"its {why}; {fix}")
        # What is read of a dimension of leads has no date on the axis of starts.
        for name in (name for name in self.leads if along[name] <= {*at}):
            lead = np.nan_to_num(arrays[name].isel(at, missing_dims="ignore").values.astype(np.float64))
            if first == axis and lead.any() and (name in at or first not in named):
                why = f"its {axis!r} has the starts of forecasts, whose {name!r} is {lead:g}"
                fix = "give the file a coordinate valid_time, with the standard_name 'time'"
                raise DataError(f"{why}: {fix}")
        return self.read_times(first, at)

    def find_names(
        self, name: str, levels: Sequence[int | None] | None, at: Mapping[str, int]
    ) -> tuple[str, ...]:
        """Return the names of an array, one for each level, "" for none; `at` as of `find_times`."""
        file, attrs = self.file, self.file.arrays[name].attrs
        if TRAINING_STORE in file.attrs and "variable" in attrs:
            return (str(attrs["variable"]),)
        on_levels = SHORT_NAMES.get(name, SHORT_NAMES.get(name.lower(), name))
        full = full_name(name) if levels is None else on_levels
        if levels is None and self.single_levels and full in ON_LEVELS:
            levels, _ = read_levels(file, self.single_levels[0])
        if levels is not None:
            return tuple(join_name(full, level) if level else "" for level in levels)
        keys = ("long_name", "standard_name", "GRIB_typeOfLevel", "coordinates")
        full = surface_or_level(name, [*file.arrays], " ".join(file.attribute(name, key) for key in keys))
        surface = file.attribute(name, "GRIB_typeOfLevel")
        if full not in ON_LEVELS or not surface or surface.startswith("isobaric"):
            return (full,)
        # GRIB has a variable on many kinds of surfaces: they are not the one on pressure levels.
        for height in (other for other in file.arrays if other.lower() == surface.lower() == HEIGHT):
            value = file.arrays[height].isel(at, missing_dims="ignore").values
            if value.ndim == 0:
                return (f"{float(value):g}m_{full}",)
        return (f"{full}_at_" + re.sub("([A-Z])", r"_\1", surface).lower(),)


def _open_tutorial(file: OpenFile) -> Field:
    """Return the field of a yearly file of the NERSC tutorial: fields[time, channel, latitude, longitude],
    without coordinates.

    Times are 6-hourly from 1 January of the year in the file's name. Twenty channels are FourCastNet's. Rows
    are evenly spaced as in ERA5 without its last row (90, 90 - 180/H, ...); an odd number of rows reaches
    both poles.
    """
    year = re.search(r"(\d{4})\.\w+$", file.path)
    if not year:
        raise DataError("its name does not end in the year (2016.h5), and it has no dates inside")
    num_times, num_channels, num_rows, num_columns = file.arrays["fields"].shape
    labels = FOURCASTNET.split() if num_channels == 20 else [f"channel_{i}" for i in range(num_channels)]
    latitude = 90 - np.arange(num_rows) * 180 / (num_rows - num_rows % 2)
    return Field(
        path=file.path,
        array="fields",
        raw=file.group["fields"] if file.group is not None else file.arrays["fields"],
        names=tuple(surface_or_level(label, labels) for label in labels),
        roles=("time", "level", "latitude", "longitude"),
        times=np.datetime64(f"{year[1]}-01-01", "s") + 6 * np.arange(num_times) * np.timedelta64(3600, "s"),
        orientation=find_orientation(latitude, np.arange(num_columns) * 360 / num_columns),
        decoding=Decoding(),
    )


def _open_anemoi(file: OpenFile, selection: Mapping[str, str]) -> Field:
    """Return the field of a Zarr of anemoi-datasets, data(time, variable, ensemble, cell), of a grid."""
    data, labels = file.arrays["data"], file.attrs["variables"]
    shape = tuple(file.attrs.get("field_shape", ()))
    if len(shape) != 2:
        raise DataError(f"its data have field_shape {shape}: not rows and columns of a grid")
    roles = ("time", "level", "", "cell")
    selected = select_elements(file, data, roles, selection)
    latitude, longitude = (file.fetch(name).reshape(shape) for name in ("latitudes", "longitudes"))
    # Reduced and unstructured grids have lists of cells as well; a regular one is rows of one latitude.
    turned = (longitude - longitude[:1] + 180) % 360 - 180
    if max(np.ptp(latitude, axis=1).max(), np.abs(turned).max()) > 1e-3:
        raise DataError("its cells are no rows of one latitude and columns of one longitude: regrid them")
    return Field(
        path=file.path,
        array="data",
        raw=file.group["data"] if file.group is not None else data,
        names=tuple(surface_or_level(label, labels) for label in labels),
        roles=roles,
        times=decode_times(file.arrays["dates"]),
        orientation=find_orientation(latitude[:, 0], longitude[0]),
        decoding=Decoding(),
        dims=tuple(map(str, data.dims)),
        selected=selected,
    )
