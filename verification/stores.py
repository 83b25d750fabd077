"""Stores of forecasts and climatologies in WeatherBench2's schema: written while the model computes the next
forecasts, and those of any centre read back (HRES, Pangu, GraphCast, IFS ensemble, ...).

    forecast.zarr/                   (time, prediction_timedelta[, number][, level], latitude, longitude)
        geopotential/c/0/3/0/0/0     a chunk: one variable of one date (and member) at one lead, all levels
        forecast_status/c/0/0     status of each lead, for a date (and member) with all its leads

A chunk gets its name when it is complete, so that xarray can open the store at any time: a missing chunk is
NaN, and its status "not_computed". Metadata are consolidated. Shapes: n dates, B states, M members, L leads,
V variables, H latitudes, W longitudes.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import xarray as xr
import zarr
from dask import array as dask
from torch import Tensor
from zarr.codecs import BloscCodec

from datasets.fields import Field, NamedFields
from datasets.grid import Grid
from datasets.remote import NO_OPTIONS, Access
from datasets.source import FORECAST_ROLES, OpenFile, find_files, open_fields, open_files
from datasets.statistics import refuse_fills
from datasets.variables import STANDARD_NAMES, group_levels, split_name, units
from errors import DataError, refuse

# Attributes of coordinates by the CF conventions, which other tools use to find them.
COORDINATES = {
    "time": {"standard_name": "forecast_reference_time", "axis": "T"},
    "prediction_timedelta": {"standard_name": "forecast_period"},
    "number": {"standard_name": "realization", "units": "1"},
    "level": {"standard_name": "air_pressure", "units": "hPa", "axis": "Z", "positive": "down"},
    "latitude": {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"},
    "longitude": {"standard_name": "longitude", "units": "degrees_east", "axis": "X"},
}
# Variable of a forecast's store, (time, prediction_timedelta[, number]): the status of each forecast.
STATUS = "forecast_status"
NOT_COMPUTED, COMPUTED, DIVERGED, NO_ANALYSIS = range(4)
STATUS_FLAGS = {
    "long_name": "status of the forecast",
    # Attributes have no types in Zarr: read back, these are int64, and CF wants the type of the array.
    "flag_values": [NOT_COMPUTED, COMPUTED, DIVERGED, NO_ANALYSIS],
    "flag_meanings": "not_computed computed diverged no_initial_analysis",
}
COMPRESSOR = BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=4)  # WeatherBench2's
ATTRIBUTE = "rossby"  # attribute of a store that identifies its forecast
NUM_THREADS = 8  # per rank, to compress and write; numcodecs releases the interpreter lock
LEADS_IN_FLIGHT = 2  # leads of this rank on the device or being written; more would only use memory


def all_levels(variables: Sequence[str]) -> list[int]:
    """Return the levels of all variables, ascending (hPa), which all arrays of a store share."""
    levels = {level for rows in group_levels(variables).values() for level in rows}
    return sorted(level for level in levels if level is not None)


def create_store(
    path: str | Path,
    variables: Sequence[str],
    grid: Grid,
    axes: Mapping[str, np.ndarray],
    chunks: Mapping[str, int],
    attributes: Mapping[str, str],
    own_units: Mapping[str, str],
    has_status: bool = False,
) -> None:
    """Create Zarr with consolidated metadata: NaN arrays (*axes[, level], latitude, longitude), float32, and
    the status (*axes) of forecasts if `has_status`.

    axes: name -> coordinate; chunks: name of an axis -> how many of it are in a chunk, else all of them;
    own_units: of variables that the project does not know.
    """
    axes = {**axes, "level": np.array(all_levels(variables))}
    axes |= {"latitude": grid.latitude, "longitude": grid.longitude}
    coords = {name: (name, axis, COORDINATES.get(name, {})) for name, axis in axes.items() if len(axis)}
    store = xr.Dataset(coords=coords, attrs={"Conventions": "CF-1.11", **attributes})
    given = {split_name(name)[0]: text for name, text in own_units.items()}
    # -- a variable is an array of all its levels; dask writes no values, so the store is created at once
    encoding: dict[str, dict[str, Any]] = {}
    for name, rows in group_levels(variables).items():
        about = {"units": units(name) or given.get(name, "")}
        if name in STANDARD_NAMES:
            about["standard_name"] = STANDARD_NAMES[name]
        dims = [dim for dim in axes if dim != "level" or None not in rows]
        shape = [store.sizes[dim] for dim in dims]
        store[name] = dims, dask.full(shape, np.nan, dtype=np.float32, chunks=-1), about
        in_chunk = tuple(chunks.get(dim, store.sizes[dim]) for dim in dims)
        encoding[name] = {"chunks": in_chunk, "compressors": COMPRESSOR, "fill_value": np.nan}
    # -- the status, a chunk for each initial date: ranks write those of their dates at the same time
    if has_status:
        dims = [dim for dim in axes if dim not in ("level", "latitude", "longitude")]
        shape = [store.sizes[dim] for dim in dims]
        store[STATUS] = dims, dask.zeros(shape, dtype=np.int64, chunks=-1), STATUS_FLAGS
        in_chunk = tuple(store.sizes[dim] if dim == "prediction_timedelta" else 1 for dim in dims)
        encoding[STATUS] = {"chunks": in_chunk, "compressors": COMPRESSOR}
    with warnings.catch_warnings(action="ignore"):  # that Zarr 3 has no specification of them
        store.to_zarr(path, mode="w", zarr_format=3, compute=False, consolidated=True, encoding=encoding)


def open_own_store(path: Path, consolidated: bool = False) -> xr.Dataset:
    """Open a store that this project has written, lazily and without decoding; an empty Dataset if there is
    none, or if it cannot be read.
    """
    try:
        options: Any = {"chunks": None, "consolidated": consolidated, "decode_cf": False}
        return xr.open_zarr(path, **options)
    # Zarr's, of many files; of zstd a RuntimeError, where a coordinate is damaged.
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ExceptionGroup):
        return xr.Dataset()


def identity_of(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what identifies the forecast of a store, None if its attributes are not those of Rossby."""
    try:
        return dict(json.loads(attributes[ATTRIBUTE]))
    except (KeyError, ValueError, TypeError):
        return None


def state_of_files(source: NamedFields, variables: Sequence[str], time: np.datetime64 | None = None) -> str:
    """Return a digest of the names, sizes and modification times of the files with some variables, of Zarr
    stores only those with a date if one is given. A URL has another state at each call.
    """
    digest = hashlib.sha256()
    arrays = {(array.path, array.array): array for name in variables for array, _ in source.find(name)}
    for (path, _), array in sorted(arrays.items()):
        rows = [] if time is None else np.flatnonzero(array.times == time).tolist()
        if time is not None and not rows:
            continue
        if "://" in path:
            return uuid4().hex
        names = [path]
        # Of a Zarr store the files of the chunks: the folder's own time changes with any of them.
        if os.path.isdir(path):
            numbers = []  # of chunks, by dimension
            sizes = array.raw.shards or array.raw.chunks
            for role, length, size in zip(array.roles, array.raw.shape, sizes, strict=True):
                has_date = rows and role == "time"
                numbers.append([row // size for row in rows] if has_date else range(-(-length // size)))
            folder = os.path.join(path, array.raw.store_path.path)
            keys = map(array.raw.metadata.encode_chunk_key, product(*numbers))
            names = [os.path.join(folder, key) for key in keys]
        for name in names:
            try:
                status = os.stat(name)
                digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
            except FileNotFoundError:  # a chunk that is not written yet
                digest.update(f"{name}\n".encode())
    return digest.hexdigest()


@dataclass(eq=False)
class ForecastStore:
    """A store on disk that rank 0 creates; then every rank writes chunks of its own, in one thread per array,
    while the model computes.
    """

    path: Path
    variables: Sequence[str]
    grid: Grid
    dates: np.ndarray  # (n,) datetime64[s], initial dates, ascending
    leads: Sequence[int]  # hours after the initial date
    num_members: int = 1
    units: Mapping[str, str] = field(default_factory=dict)  # of each variable

    def __post_init__(self) -> None:
        self.arrays, self.levels = group_levels(self.variables), all_levels(self.variables)
        self.pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="forecast-writer")
        self.in_flight: deque[list[Future]] = deque()  # of each lead that may not be written yet

    @cached_property
    def group(self) -> Any:
        """The store, opened for writing when it is first used."""
        return zarr.open_group(str(self.path), mode="r+")

    def create(self, about: dict[str, Any]) -> None:
        """Create the store, or continue an existing one. Raises ConfigError if it has another forecast."""
        key, fix = "forecast.path", "remove it, or name another forecast.path"
        if not self.path.exists():
            unfinished = self.path.with_name(self.path.name + ".incomplete")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            leads = np.asarray(self.leads).astype("timedelta64[h]").astype("timedelta64[ns]")
            axes = {"time": self.dates.astype("datetime64[ns]"), "prediction_timedelta": leads}
            axes |= {"number": np.arange(self.num_members)} if self.num_members > 1 else {}
            attributes, chunks = {ATTRIBUTE: json.dumps(about)}, dict.fromkeys(axes, 1)
            create_store(
                unfinished, self.variables, self.grid, axes, chunks, attributes, self.units, has_status=True
            )
            os.replace(unfinished, self.path)
            return
        # -- every byte of the store would be the same, or it is refused: what is written here by the arrays'
        # own metadata is read elsewhere by the consolidated copy of them
        forecasts, copy = open_own_store(self.path), open_own_store(self.path, consolidated=True)
        stored = identity_of(forecasts.attrs)
        # As text, in which the fill value NaN equals itself.
        metadata = [{n: str(v.to_dict(False)) for n, v in s.variables.items()} for s in (forecasts, copy)]
        if stored is None or metadata[0] != metadata[1]:
            refuse(key, str(self.path), f"exists, and is not a forecast of Rossby, or damaged; {fix}")
        for name, value in json.loads(json.dumps(about)).items():
            if stored.get(name) != value:
                difference = f"{name} is {stored.get(name)!s:.60} there and {value!s:.60} here"
                refuse(key, str(self.path), f"contains another forecast: {difference}; {fix}")
        for leftover in self.path.glob("*/**/*.partial"):  # zarr's, of a run that was killed
            leftover.unlink()

    def status(self) -> np.ndarray:
        """Return the status (n, L, M) of each date, lead and member."""
        return self.group[STATUS][:].reshape(len(self.dates), len(self.leads), self.num_members)

    def finish(self, date: int, member: int, status: np.ndarray) -> None:
        """Write the status (L,) of a date and member that has all its leads."""
        self.group[STATUS][(date, slice(None), member)[: self.group[STATUS].ndim]] = status

    def write(self, pairs: Sequence[tuple[int, int]], lead: int, fields: Tensor) -> None:
        """Start to write fields (B, V, H, W) at a lead, of B pairs (date, member); do not change them after.

        Waits while LEADS_IN_FLIGHT are being written. Raises OSError of an earlier lead.
        """
        self.wait(LEADS_IN_FLIGHT - 1)
        tasks = [self.pool.submit(self.write_chunks, name, pairs, lead, fields) for name in self.arrays]
        self.in_flight.append(tasks)

    def wait(self, at_most: int = 0) -> None:
        """Wait until at most `at_most` leads are in flight. Raises OSError if one could not be written."""
        while len(self.in_flight) > at_most:
            for future in self.in_flight.popleft():
                future.result()

    def write_chunks(self, name: str, pairs: Sequence[tuple[int, int]], lead: int, fields: Tensor) -> None:
        """Write one array at the lead numbered `lead`; fields (B, V, H, W) of B pairs (date, member)."""
        rows = self.arrays[name]  # by level
        values = fields[:, list(rows.values())].cpu().numpy()
        if None in rows:
            values = values[:, 0]
        elif list(rows) != self.levels:  # NaN where the array has none
            of_levels, shape = values, (len(values), len(self.levels), *values.shape[2:])
            values = np.full(shape, np.nan, np.float32)
            values[:, [self.levels.index(cast(int, level)) for level in rows]] = of_levels
        array, num_axes = self.group[name], 3 if self.num_members > 1 else 2
        for (date, member), value in zip(pairs, values, strict=True):
            array[(date, lead, member)[:num_axes]] = value


class StoredForecast(NamedFields):
    """Forecasts of one store, of any centre.

    Names, order of dimensions, direction of latitude and levels, and units of the lead are found from the
    content, by the code that reads analyses (datasets/fields.py).
    """

    def __init__(
        self, fields: Sequence[Field], unreadable: dict[str, str], path: str, file: OpenFile
    ) -> None:
        """file: of these fields. Raises DataError for axes that forecasts cannot have."""
        super().__init__(path, fields, unreadable)
        self.times, self.leads = np.asarray(fields[0].times), fields[0].labels["lead"]  # (n,), (L,) in s
        for name, axis in (("time", self.times), ("lead time", self.leads)):
            if not (np.diff(axis) > np.timedelta64(0, "s")).all():
                raise DataError(f"cannot read {path!r} as forecasts: its {name} does not ascend, or repeats")
        self.num_members = max(field.size("number") for field in fields)  # 1: not an ensemble
        if other := next((field for field in fields if field.size("number") != self.num_members), None):
            reason = f"{other.names[0]} has {other.size('number')} members, others have {self.num_members}"
            raise DataError(f"cannot read {path!r} as forecasts: {reason}; write it for all of them")
        # Initial dates and leads that are stored, and decoded, together.
        self.block = max(field.chunk("time") for field in fields), max(f.chunk("lead") for f in fields)
        # -- of a forecast of Rossby's: the status (n, L), the worst of the members. It fills cells that the
        # initial analysis lacks, and is not scored there, as in train.py. None: all are computed.
        self.checkpoint, self.status = str((identity_of(file.attrs) or {}).get("checkpoint", "")), None
        if STATUS in file.arrays:
            members = np.asarray(file.fetch(STATUS), int)  # (n, L[, M])
            members = members.reshape(*members.shape[:2], -1)
            self.status = np.where((members == NOT_COMPUTED).any(-1), NOT_COMPUTED, members.max(-1))

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W), or (n, k, M, V, H, W), float32. Raises DataError for a missing variable."""
        fields = self.read_fields(variables, ("time", "lead", "number"), {"time": dates, "lead": leads})
        if self.status is None:  # ours may blow up
            for time, of_date in zip(self.times[dates], fields, strict=True):
                of_variables = of_date.reshape(-1, *of_date.shape[-3:]).swapaxes(0, 1)
                refuse_fills(of_variables, variables, time, self.path)
        return fields if self.num_members > 1 else fields[:, :, 0]

    def state(self, time: np.datetime64) -> str:
        """Return a text that changes when the values of the forecasts from a date may have changed."""
        status = "" if self.status is None else self.status[self.times == time].tolist()
        return f"{state_of_files(self, self.variables, time)} {status}"


def open_forecast(
    path: str, picks: Mapping[str, str] | None = None, access: Access = NO_OPTIONS
) -> StoredForecast:
    """Open forecasts in a Zarr store (folder or fsspec URL) or a NetCDF file.

    picks: name of a dimension that is not an axis of forecasts -> label to read. access: options for URLs.
    Raises DataError, one line with path and reason, if there are no forecasts.
    """
    files = find_files(path)
    if len(files) > 1:
        raise DataError(f"{path!r} has {len(files)} files: name one store of forecasts, such as {files[0]!r}")
    opened, unreadable = open_fields(files[0], picks, access, FORECAST_ROLES)
    fields = [field for field in opened if "lead" in field.roles]
    if not fields:
        why = "".join(f"; {name}: {reason}" for name, reason in list(unreadable.items())[:3])
        axes = "a lead time (prediction_timedelta) and latitude and longitude"
        raise DataError(f"cannot read {path!r} as forecasts: no variable has {axes}{why}")
    file = open_files(files[0], access)[0]
    # Scored as if by initial date, a perfect forecast stored by valid time has large errors.
    by_both = [name for name in FORECAST_ROLES["time"] if name in file.arrays and file.arrays[name].ndim > 1]
    axis = next((f.dims[f.roles.index("time")] for f in fields if f.dims and "time" in f.roles), "")
    if by_both or axis.lower() == "valid_time":
        fix = "store them by initial date and lead, as with xarray's `ds.sel(valid_time=init_time + lead)`"
        raise DataError(f"cannot read {path!r} as forecasts: its dates {axis!r} are valid times; {fix}")
    return StoredForecast(fields, unreadable, path, file)
