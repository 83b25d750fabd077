"""Files of analyses: found, opened by xarray, and their coordinates.

Nothing is decoded: datasets/layouts.py finds what the arrays mean.
"""

import atexit
import glob
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from xarray.backends.file_manager import FILE_CACHE
from xarray.conventions import decode_cf_variable

from datasets.codecs import register_codecs
from datasets.options import SELECT
from datasets.remote import NO_OPTIONS, Access, describe_error, is_url, open_store
from errors import DataError, refuse

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
FORECAST_ROLES = {
    "lead": ("prediction_timedelta", "lead_time", "forecast_period", "step"),
    "number": ("number", "realization", "member", "ensemble"),
    "time": ("init_time", "initial_time", "forecast_reference_time"),
}
CLIMATOLOGY_ROLES = {"hour": ("hour",), "dayofyear": ("dayofyear",)}
# CF finds latitude and longitude by their units (4.1, 4.2), in any of six spellings.
DEGREES = {
    "latitude": re.compile(r"degrees?_?n(orth)?", re.IGNORECASE),
    "longitude": re.compile(r"degrees?_?e(ast)?", re.IGNORECASE),
}
HEIGHT = "heightaboveground"  # GRIB's axis of heights in m, which become a part of the name
GREGORIAN = np.datetime64("1582-10-15")  # the first day of that calendar; "standard" is Julian before it
EARLIEST_YEAR = 1678  # from which on pandas counts nanoseconds


def find_files(path: str) -> list[str]:
    """Return the files of a path: itself, or what a folder or a glob contains. Raises DataError."""
    path = path.removeprefix("file://")
    if is_url(path) or os.path.isfile(path) or is_zarr(path):
        return [path]
    try:
        if os.path.isdir(path):
            inside = [os.path.join(path, name) for name in sorted(os.listdir(path))]
            found = [name for name in inside if name.lower().endswith(DATA_FILES) or is_zarr(name)]
            reason = "the folder contains no Zarr, NetCDF, HDF5 or GRIB"
        else:
            found, reason = sorted(glob.glob(path)), "there is no such file or folder"
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {describe_error(error)}") from None
    if not found:
        raise DataError(f"cannot read {path!r}: {reason}")
    return found


def is_zarr(path: str) -> bool:
    """Return True for a local folder that is a Zarr store, of format 2 or 3."""
    return any(os.path.exists(os.path.join(path, name)) for name in (".zgroup", ".zmetadata", "zarr.json"))


def file_states(path: str, array: str) -> list[bytes]:
    """Return name, size and modification time of each file of an array; none for a URL."""
    if is_url(path):
        return []
    names, root = [path], os.path.join(path, array)
    if os.path.isdir(path):
        names = [os.path.join(folder, name) for folder, _, inside in os.walk(root) for name in inside]
    lines = []
    for name in sorted(names):
        status, inside = os.stat(name), os.path.relpath(name, os.path.dirname(path))
        lines.append(f"{inside} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return lines


def find_engine(path: str) -> str:
    """Return xarray's engine for a file, from its first bytes. Raises DataError."""
    if is_url(path) or is_zarr(path):
        return "zarr"
    if not os.path.isfile(path):  # a pipe or a device, which may never end
        raise DataError(f"cannot read {path!r}: it is no regular file")
    with open(path, "rb") as file:
        start = file.read(8)
    engines = {b"\x89HDF": "h5netcdf", b"CDF\x01": "scipy", b"CDF\x02": "scipy", b"GRIB": "cfgrib"}
    if start[:4] == b"CDF\x05":
        fix = "write it as NetCDF 4, as with `nccopy -k nc4 FILE NEW`"
        raise DataError(f"cannot read {path!r}: it is NetCDF 3 in 64-bit data format (CDF-5); {fix}")
    if start[:4] not in engines:
        reason = (
            f"it is neither Zarr, NetCDF, HDF5 nor GRIB (it begins with {start!r})"
            if start
            else "it is empty"
        )
        raise DataError(f"cannot read {path!r}: {reason}")
    return engines[start[:4]]


@atexit.register
def _close_files() -> None:
    """Close NetCDF 4 files: h5netcdf 1.8 does so in __del__, with a TypeError when h5py is gone already."""
    for file in list(FILE_CACHE.values()):
        if type(file).__module__.startswith("h5netcdf"):
            file.close()


@dataclass(frozen=True)
class OpenFile:
    """Arrays and attributes of one file, without decoding."""

    path: str
    arrays: Mapping[str, xr.Variable]
    attrs: Mapping[str, Any]
    raw: Mapping[str, Any]  # what is read slice by slice: zarr's arrays, otherwise xarray's variables

    @classmethod
    def open(cls, path: str, access: Access = NO_OPTIONS) -> "list[OpenFile]":
        """Open a file by xarray; GRIB gives one for each kind of level. Raises what the libraries raise."""
        engine, options = find_engine(path), {"decode_cf": False, "chunks": None, "cache": False}
        if engine == "zarr":
            return [cls._open_zarr(path, access, options)]
        if engine == "cfgrib":
            return cls._open_grib(path)
        options |= {"phony_dims": "access"} if engine == "h5netcdf" else {}
        dataset = xr.open_dataset(path, engine=engine, **options)  # type: ignore[arg-type]
        return [cls._of_dataset(path, dataset)]

    @classmethod
    def _of_dataset(cls, path: str, dataset: xr.Dataset) -> "OpenFile":
        arrays = {str(name): variable for name, variable in dataset.variables.items()}
        return cls(path, arrays, dataset.attrs, arrays)

    @classmethod
    def _open_zarr(cls, path: str, access: Access, options: Mapping[str, Any]) -> "OpenFile":
        register_codecs()
        store = open_store(path, access) if is_url(path) else path
        with warnings.catch_warnings(action="ignore"):  # that its metadata are not consolidated
            backend = xr.backends.ZarrStore.open_group(store, mode="r")  # type: ignore[arg-type]
            dataset = xr.open_dataset(backend, **options)  # type: ignore[arg-type]
        group: Any = backend.zarr_group
        if not group.attrs.get("complete", True) and TRAINING_STORE in group.attrs:
            raise DataError("its conversion has not ended: run the same `python -m datasets.convert` again")
        # Sorted, because zarr lists arrays in the order in which metadata arrive, which varies by rank.
        arrays = {str(name): dataset.variables[name] for name in sorted(dataset.variables)}  # type: ignore[type-var]
        raw = {name: group[name] for name in arrays}
        for name, variable in arrays.items():
            # Zarr 2's fill value means "missing", as in xarray, except 0 for values that are not packed: many
            # writers set 0 by default, and every sea cell of a land mask would be NaN.
            packed = {"scale_factor", "add_offset"} & variable.attrs.keys()
            zero = variable.attrs.get("_FillValue") == 0
            if raw[name].metadata.zarr_format == 2 and zero and not packed:
                del variable.attrs["_FillValue"]
        return cls(path, arrays, dict(group.attrs), raw)

    @classmethod
    def _open_grib(cls, path: str) -> "list[OpenFile]":
        try:
            import cfgrib  # type: ignore[reportMissingImports]  # an extra
        except (ImportError, RuntimeError) as error:  # RuntimeError: eccodes finds no library
            raise DataError(f'it is GRIB ({describe_error(error)}): pip install -e ".[grib]"') from None
        options: dict[str, Any] = {"indexpath": "", "squeeze": False, "errors": "raise"}
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

        def num_dates(dataset: xr.Dataset) -> int:
            return math.prod(dataset.sizes[dim] for dim in options["time_dims"])

        most = max(map(num_dates, datasets), default=0)
        # Variables with a single date are constant if others have more dates.
        constant = {dim: 0 for dim in options["time_dims"]}
        datasets = [ds.isel(constant) if num_dates(ds) == 1 < most else ds for ds in datasets]
        return [cls._of_dataset(path, dataset) for dataset in datasets]

    def fetch(self, name: str) -> np.ndarray:
        """Return all values of a coordinate, unpacked (CF 8.1)."""
        return unpacked(self.arrays[name])

    def chunks(self, name: str) -> tuple[int, ...] | None:
        """Return the shape that is decoded together, if the array has chunks."""
        encoding = self.arrays[name].encoding
        return encoding.get("chunks") or encoding.get("chunksizes")

    def role(self, name: str, roles: Mapping[str, str]) -> str:
        """Return the role of a coordinate by its name, its standard_name or its units; "" for none."""
        attrs = self.arrays[name].attrs if name in self.arrays else {}
        standard_name, units = (str(attrs.get(key, "")) for key in ("standard_name", "units"))
        by_units = [role for role, pattern in DEGREES.items() if pattern.fullmatch(units.strip())]
        return roles.get(name.lower()) or (standard_name if standard_name in ROLES else "".join(by_units))

    def dim_roles(self, roles: Mapping[str, str]) -> dict[str, str]:
        """Return the role of each dimension, "" for none: its coordinate's, or that of another coordinate
        along it, as of latitude(y) and time(t).
        """
        role_of_dim = {
            str(dim): self.role(str(dim), roles) for array in self.arrays.values() for dim in array.dims
        }
        for name, array in self.arrays.items():
            dim, role = str(array.dims[0]) if array.ndim == 1 else "", self.role(name, roles)
            is_lead = dim.lower() in FORECAST_ROLES["lead"]  # valid_time(step) is of one run
            if role_of_dim.get(dim) == "" and role in ("latitude", "longitude", "time") and not is_lead:
                role_of_dim[dim] = role
        return role_of_dim


def unpacked(variable: xr.Variable) -> np.ndarray:
    """Return the values of a coordinate, with its scale_factor and add_offset applied."""
    values, attrs = np.asarray(variable.values), variable.attrs
    if not {"scale_factor", "add_offset"} & attrs.keys():
        return values
    return values * float(attrs.get("scale_factor", 1)) + float(attrs.get("add_offset", 0))


def find_coordinate(file: OpenFile, role: str, roles: Mapping[str, str]) -> str:
    """Return the name of the one-dimensional coordinate of a role. Raises DataError."""
    found = [name for name in file.arrays if file.role(name, roles) == role]
    for name in found:
        if file.arrays[name].ndim == 1:
            return name
    others = ", ".join(found or sorted(file.arrays)) or "nothing"
    raise DataError(f"it has no one-dimensional {role}, only {others}")


def dim_labels(file: OpenFile, dim: str, size: int) -> list[str]:
    """Return the labels along a dimension, dates as 2020-01-01T00:00:00; without a coordinate numbers from 0.

    A NetCDF 4 dimension without a coordinate reads as zeros, so repeated labels are ignored.
    """
    labels = []
    if dim in file.arrays and file.arrays[dim].ndim == 1:
        if " since " in str(file.arrays[dim].attrs.get("units", "")):
            return coordinate_times(file, dim).astype(str).tolist()
        values = file.fetch(dim).tolist()
        labels = [value.decode() if isinstance(value, bytes) else str(value) for value in values]
    return labels if labels and len(set(labels)) == len(labels) else [str(number) for number in range(size)]


def is_dates(variable: xr.Variable) -> bool:
    """Return True for datetimes, and for numbers with units such as "hours since 1900-01-01"."""
    return variable.dtype.kind == "M" or " since " in str(variable.attrs.get("units", ""))


def decode_times(variable: xr.Variable) -> np.ndarray:
    """Return datetime64[s], rounded, of CF times ("hours since 1900-01-01").

    Raises DataError without units and for calendars other than that of analyses.
    """
    if variable.dtype.kind == "M":
        return variable.values.astype("datetime64[s]")
    units, calendar = (str(variable.attrs.get(key, "")) for key in ("units", "calendar"))
    fix = 'write numbers in units such as "hours since 1900-01-01", in the standard calendar'
    if not units:
        raise DataError('its time has no units; give it the attribute units, as "hours since 1900-01-01"')
    if calendar.lower() not in ("", "standard", "gregorian", "proleptic_gregorian"):
        years = f"its time has the calendar {calendar!r}, of years that differ from those of analyses"
        raise DataError(f"{years}; convert it to the standard calendar (xarray's convert_calendar)")
    attrs = {"units": units, "calendar": calendar.lower() or "standard"}
    stored, numbers = np.asarray(variable.values), unpacked(variable)
    fills = [np.ravel(variable.attrs.get(key, [])) for key in ("_FillValue", "missing_value")]
    is_missing = np.isin(stored, [fill for each in fills if each.dtype.kind in "iuf" for fill in each])
    if is_missing.any():  # a fill value such as 9.97e36 days is not a date
        numbers = np.where(is_missing, np.append(numbers[~is_missing], 0)[0], numbers)
    try:
        times = _decode_numbers(numbers, attrs)
        if stored.dtype == np.float32:  # days since 1850 are off by minutes: round to a near whole hour
            after = _decode_numbers(np.nextafter(numbers.astype(np.float32), np.float32(np.inf)), attrs)
            hours = (times + np.timedelta64(30, "m")).astype("datetime64[h]").astype(times.dtype)
            times = np.where(np.abs(hours - times) < after - times, hours, times)
    except Exception:  # pandas and xarray raise their own
        reason = f"units {units!r} and calendar {attrs['calendar']!r}, which are not dates of analyses"
        raise DataError(f"its time has {reason}; {fix}") from None
    half = np.timedelta64(500_000_000, "ns")  # hours stored as float32 are off by seconds
    times = (times + half).astype("datetime64[s]")
    return np.where(is_missing, np.datetime64("NaT", "s"), times)


def _decode_numbers(numbers: np.ndarray, attrs: Mapping[str, str]) -> np.ndarray:
    """Return datetime64[ns] of numbers in the units and calendar of `attrs`. Raises what xarray raises."""
    early = re.fullmatch(r"(\w+) since (\d{1,4})-(\d{1,2})-(\d{1,2})(.*)", attrs["units"].strip())
    if early and 0 < int(early[2]) < EARLIEST_YEAR:
        # pandas cannot count from there: from 1970 on, after as many days as lie between.
        year, month, day = (int(early[i]) for i in (2, 3, 4))
        start = np.datetime64(f"{year:04d}-{month:02d}-{day:02d}")
        days = int((np.datetime64("1970-01-01") - start) / np.timedelta64(1, "D"))
        if attrs["calendar"] != "proleptic_gregorian" and start < GREGORIAN:
            if start > np.datetime64("1582-10-04"):
                raise ValueError("the calendar has no such day")
            before = year - (month < 3)
            days -= before // 100 - before // 400 - 2  # leap days of centuries
        days_of_unit = pd.Timedelta(1, unit=early[1].lower()) / pd.Timedelta(1, unit="day")  # type: ignore
        shift = np.round(days / days_of_unit).astype(np.int64)
        numbers = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64) - shift
        attrs = {**attrs, "units": f"{early[1]} since 1970-01-01{early[5]}"}
    coder = xr.coders.CFDatetimeCoder(use_cftime=False, time_unit="ns")
    dims = [f"dim_{i}" for i in range(numbers.ndim)]
    times = decode_cf_variable("time", xr.Variable(dims, numbers, attrs), decode_times=coder).values
    if times.dtype.kind != "M":
        raise ValueError("they are no dates")
    return times.astype("datetime64[ns]")


def coordinate_times(file: OpenFile, name: str, at: Mapping[str, int] | None = None) -> np.ndarray:
    """Return the dates (T,) of a coordinate; NaT outside the range that ARCO-ERA5 declares valid.

    at: positions on its dimensions that are not the axis. Raises DataError.
    """
    if name not in file.arrays:
        raise DataError(f"its dimension {name!r} has no coordinate with dates")
    times = np.atleast_1d(decode_times(file.arrays[name].isel(at or {})))
    if "valid_time_start" in file.attrs and "valid_time_stop" in file.attrs:
        first, last = (np.datetime64(str(file.attrs[f"valid_time_{end}"])[:10]) for end in ("start", "stop"))
        is_valid = (times >= first) & (times < last + np.timedelta64(1, "D"))
        times = np.where(is_valid, times, np.datetime64("NaT", "s"))
    return times


def select_elements(
    file: OpenFile, variable: xr.Variable, roles: Sequence[str], selection: Mapping[str, str]
) -> dict[int, int]:
    """Return the positions that are read of the dimensions without a role: number of a dimension -> position.

    Raises DataError for dates as values, for a dimension of which no element is selected, and for a selected
    label that it lacks.
    """
    if " since " in str(variable.attrs.get("units", "")):
        raise DataError(f"its units are {variable.attrs['units']!r}: dates")
    positions = {}
    for axis, (dim, size) in enumerate(zip(map(str, variable.dims), variable.shape, strict=True)):
        if roles[axis]:
            continue
        labels, label = dim_labels(file, dim, size), selection.get(dim)
        if label is None and size > 1:
            what = f"it has a dimension {dim} of size {size}"
            fix = f"choose one with data.select = ['{dim}={labels[0]}']"
            if "time" not in roles:
                fix = f"if it has the dates, call it time and give it units; else {fix}"
            raise DataError(f"{what}; {fix}")
        if label is None or (size == 1 and dim.lower() == HEIGHT):  # the name has the height
            label = labels[0]
        position = find_label(labels, label)
        if position is None:
            raise DataError(f"its {dim} is {list_labels(labels)}, and data.select takes {label}")
        positions[axis] = position
    return positions


def find_label(labels: Sequence[str], label: str) -> int | None:
    """Return the position of a label, which may be written as another number is ("80" for "80.0")."""
    try:
        return [float(text) for text in labels].index(float(label))
    except ValueError:
        return labels.index(label) if label in labels else None


def list_labels(labels: Sequence[str]) -> str:
    """Return the first five labels and the last one as text."""
    return ", ".join(labels[:5]) + (f" ... {labels[-1]}" if len(labels) > 5 else "")


def check_labels(files: Sequence[OpenFile], selection: Mapping[str, str], roles: Mapping[str, str]) -> None:
    """Raise ConfigError for a selected label that a dimension has in none of the files."""
    for dim, label in selection.items():
        labels: list[str] = []
        for file in files:
            sizes = {array.sizes[dim] for array in file.arrays.values() if dim in array.dims}
            sizes -= {1} if dim.lower() == HEIGHT else set()
            if not file.role(dim, roles):
                labels += [label for size in sizes for label in dim_labels(file, dim, size)]
        if labels and find_label(labels, label) is None:
            choice = list_labels(list(dict.fromkeys(labels)))
            refuse(SELECT, [f"{dim}={label}"], f"{dim} has {choice}; take one of them")
