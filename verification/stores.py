"""Stores of forecasts and climatologies in WeatherBench2's schema. Forecasts are written while the model
computes the next ones.

    forecast.zarr/                   (time, prediction_timedelta[, number][, level], latitude, longitude)
        geopotential/c/0/3/0/0/0     a chunk: one variable of one date (and member) at one lead, all levels
        forecast_status/c/0/0     status of each lead, for a date (and member) with all its leads

A chunk gets its name when it is complete, so that xarray can open the store at any time: a missing chunk is
NaN, and its status "not_computed". Metadata are consolidated. Shapes: B states, V variables, H latitudes,
W longitudes.
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
from itertools import product
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import xarray as xr
import zarr
from torch import Tensor
from zarr.codecs import BloscCodec

from datasets.archive import Archive
from datasets.fields import Field
from datasets.grid import Grid
from datasets.variables import STANDARD_NAMES, group_levels, split_name, units
from errors import ConfigError

# Attributes of coordinates and stores by the CF conventions, which other tools use to find them.
CONVENTIONS = {"Conventions": "CF-1.11"}
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
    "flag_values": [NOT_COMPUTED, COMPUTED, DIVERGED, NO_ANALYSIS],
    "flag_meanings": "not_computed computed diverged no_initial_analysis",
}
COMPRESSOR = BloscCodec(cname="lz4", clevel=5, shuffle="shuffle", typesize=4)  # WeatherBench2's
ATTRIBUTE = "rossby"  # attribute of a store that identifies its forecast
NUM_THREADS = 8  # per rank, to compress and write; numcodecs releases the interpreter lock
LEADS_IN_FLIGHT = 2  # leads of this rank on the device or being written; more would only use memory


def all_levels(variables: Sequence[str]) -> list[int]:
    """Return the levels of all variables, ascending (hPa), which all arrays of a store share."""
    own = group_levels(variables).values()
    return sorted({level for levels in own for level in levels if level is not None})


def create_store(
    path: str | Path,
    variables: Sequence[str],
    grid: Grid,
    axes: Mapping[str, np.ndarray],
    chunks: Mapping[str, int],
    attributes: Mapping[str, str],
    own_units: Mapping[str, str],
) -> None:
    """Create Zarr with consolidated metadata: NaN arrays (*axes[, level], latitude, longitude), float32.

    axes: name -> coordinate; chunks: name of an axis -> how many of it are in a chunk, else all of them;
    own_units: of variables that the project does not know.
    """
    levels = all_levels(variables)
    values = {**axes, "level": levels, "latitude": grid.latitude, "longitude": grid.longitude}
    values = {name: own for name, own in values.items() if len(own)}
    coords = {name: (name, own, COORDINATES.get(name, {})) for name, own in values.items()}
    given = {split_name(name)[0]: text for name, text in own_units.items()}
    empty = xr.Dataset(coords=coords, attrs={**CONVENTIONS, **attributes})
    empty.to_zarr(path, mode="w", zarr_format=3, consolidated=False)
    for name, own in group_levels(variables).items():
        known = {"standard_name": STANDARD_NAMES[name]} if name in STANDARD_NAMES else {}
        about = {"units": units(name) or given.get(name, ""), **known}
        dims = [*axes, *["level"] * (None not in own), "latitude", "longitude"]
        create_array(path, name, {dim: empty.sizes[dim] for dim in dims}, chunks, "float32", np.nan, about)
    consolidate(path)


def create_array(
    path: str | Path,
    name: str,
    sizes: Mapping[str, int],
    chunks: Mapping[str, int],
    dtype: str,
    fill_value: float,
    attributes: Mapping[str, Any],
) -> None:
    """Create an array of fill values in a store. sizes: of its dimensions; chunks: as in `create_store`."""
    zarr.create_array(
        str(path),
        name=name,
        shape=tuple(sizes.values()),
        chunks=tuple(chunks.get(dim, size) for dim, size in sizes.items()),
        dtype=dtype,
        compressors=COMPRESSOR,
        fill_value=fill_value,
        zarr_format=3,
        dimension_names=list(sizes),
        attributes=dict(attributes),
    )


def consolidate(path: str | Path) -> None:
    """Copy the metadata of all arrays to the group's: programs then open a store without listing it."""
    with warnings.catch_warnings(action="ignore"):  # of folders that are no arrays, and of Zarr 3 as a whole
        zarr.consolidate_metadata(str(path), zarr_format=3)


def identity_of(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what identifies the forecast of a store, None if its attributes are not those of Rossby."""
    try:
        return dict(json.loads(attributes[ATTRIBUTE]))
    except (KeyError, ValueError, TypeError):
        return None


def state_of_files(fields: Sequence[Field], rows: Mapping[str, int] | None = None) -> str:
    """Return a digest of the names, sizes and modification times of the files of some arrays, of Zarr stores
    only those with these rows of axes (role -> row). A URL has another state at each call.
    """
    digest = hashlib.sha256()
    arrays = {(source.path, source.array): source for source in fields}
    for (path, _), source in sorted(arrays.items()):
        names = [path]
        if "://" in path:
            return uuid4().hex
        if os.path.isdir(path):
            chunks, numbers = source.raw.shards or source.raw.chunks, []
            for role, size, chunk in zip(source.roles, source.raw.shape, chunks, strict=True):
                row = (rows or {}).get(role)
                numbers.append(range(-(-size // chunk)) if row is None else [row // chunk])
            folder = os.path.join(path, source.raw.store_path.path)
            keys = map(source.raw.metadata.encode_chunk_key, product(*numbers))
            names = [os.path.join(folder, key) for key in keys]
        for name in names:
            try:
                status = os.stat(name)
                digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
            except FileNotFoundError:  # a chunk that is not written yet
                digest.update(f"{name}\n".encode())
    return digest.hexdigest()


def state_of_analyses(archive: Archive, variables: Sequence[str], time: np.datetime64) -> str:
    """Return a digest of the state of the files with the analyses of a date."""
    sources = {source for name in variables for source, _ in archive.find(name)}
    states = [
        state_of_files([source], {"time": int(row)})
        for source in sources
        for row in np.flatnonzero(source.times == time)
    ]
    return hashlib.sha256("".join(sorted(states)).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class StoreIndex:
    """Content of a store. leads: hours after the initial date."""

    variables: Sequence[str]
    grid: Grid
    dates: np.ndarray  # (n,) datetime64[s], initial dates, ascending
    leads: Sequence[int]
    num_members: int = 1
    units: Mapping[str, str] = field(default_factory=dict)  # of each variable


class ForecastStore:
    """A store on disk that rank 0 creates; then every rank writes chunks of its own."""

    def __init__(self, path: Path, index: StoreIndex) -> None:
        self.path, self.index = path, index
        self.arrays, self.levels = group_levels(index.variables), all_levels(index.variables)
        self.opened: dict[str, zarr.Array] = {}

    def create(self, about: dict[str, Any]) -> None:
        """Create the store, or continue an existing one. Raises ConfigError if it has another forecast."""
        if self.path.exists():
            # Every byte of the store would be the same, or it is refused.
            with self._open() as forecasts:
                stored = identity_of(forecasts.attrs)
            if stored is None:
                raise self._error("exists, and is not a forecast of Rossby, or damaged")
            for key, value in json.loads(json.dumps(about)).items():
                if stored.get(key) != value:
                    there, here = f"{stored.get(key)!s:.60}", f"{value!s:.60}"
                    raise self._error(f"contains another forecast: {key} is {there} there and {here} here")
            for leftover in self.path.glob("*/**/*.partial"):  # zarr's, of a run that was killed
                leftover.unlink()
            return
        unfinished = self.path.with_name(self.path.name + ".incomplete")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        index = self.index
        leads = np.asarray(index.leads).astype("timedelta64[h]").astype("timedelta64[ns]")
        axes = {"time": index.dates.astype("datetime64[ns]"), "prediction_timedelta": leads}
        axes |= {"number": np.arange(index.num_members)} if index.num_members > 1 else {}
        chunks, content = dict.fromkeys(axes, 1), {ATTRIBUTE: json.dumps(about)}
        create_store(unfinished, index.variables, index.grid, axes, chunks, content, index.units)
        sizes = {name: len(axis) for name, axis in axes.items()}
        chunks["prediction_timedelta"] = len(leads)
        # Attributes have no types in Zarr: read back, flag_values are int64, and CF wants one type for both.
        create_array(unfinished, STATUS, sizes, chunks, "int64", NOT_COMPUTED, STATUS_FLAGS)
        consolidate(unfinished)
        os.replace(unfinished, self.path)

    def _open(self) -> xr.Dataset:
        """Open what is stored. Raises ConfigError if it cannot be opened."""
        try:
            return xr.open_zarr(self.path, chunks=None, consolidated=False, decode_cf=False)
        except (OSError, ValueError, KeyError, TypeError, ExceptionGroup):  # zarr's, of many files
            raise self._error("exists, and is not a forecast of Rossby, or damaged") from None

    def _error(self, reason: str) -> ConfigError:
        fix = "remove it, or name another forecast.path"
        return ConfigError(f"forecast.path = '{self.path}': {reason}; {fix}")

    # -- status --------------------------------------------------------------------------------------

    def status(self) -> np.ndarray:
        """Return the status (n, L, M) of each date, lead and member. Raises ConfigError if there is none."""
        with self._open() as forecasts:
            if STATUS not in forecasts:
                raise self._error(f"it has no {STATUS}")
            found = forecasts[STATUS].values
        return found.reshape(len(self.index.dates), len(self.index.leads), self.index.num_members)

    def finish(self, date: int, member: int, status: np.ndarray) -> None:
        """Write the status (L,) of a date and member that has all its leads."""
        at = (date, slice(None), member) if self.index.num_members > 1 else (date, slice(None))
        self._array(STATUS)[at] = status

    def _array(self, name: str) -> zarr.Array:
        if name not in self.opened:
            self.opened[name] = cast(zarr.Array, zarr.open_array(str(self.path), path=name, mode="r+"))
        return self.opened[name]

    # -- chunks --------------------------------------------------------------------------------------

    def write_chunks(self, name: str, pairs: Sequence[tuple[int, int]], lead: int, fields: Tensor) -> None:
        """Write one array at the lead numbered `lead`; fields (B, V, H, W) of B pairs (date, member)."""
        channel_of = self.arrays[name]  # by level
        values = fields[:, list(channel_of.values())].cpu().numpy()
        if None in channel_of:
            values = values[:, 0]
        elif list(channel_of) != self.levels:  # NaN where the array has none
            own, shape = values, (len(values), len(self.levels), *values.shape[2:])
            values = np.full(shape, np.nan, np.float32)
            values[:, [self.levels.index(cast(int, level)) for level in channel_of]] = own
        for (date, member), value in zip(pairs, values, strict=True):
            at = (date, lead, member) if self.index.num_members > 1 else (date, lead)
            self._array(name)[at] = value


class ForecastWriter:
    """Writer of fields from the device, in one thread per array, while the model computes."""

    def __init__(self, store: ForecastStore) -> None:
        self.store, self.pool = store, ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="forecast-writer")
        self.in_flight: deque[list[Future]] = deque()  # of each lead that may not be written yet

    def write(self, pairs: Sequence[tuple[int, int]], lead: int, fields: Tensor) -> None:
        """Start to write fields (B, V, H, W) at a lead, of B pairs (date, member); do not change them after.

        Waits while LEADS_IN_FLIGHT are being written. Raises OSError of an earlier lead.
        """
        self.wait(LEADS_IN_FLIGHT - 1)
        submit, names = self.pool.submit, self.store.arrays
        self.in_flight.append([submit(self.store.write_chunks, n, pairs, lead, fields) for n in names])

    def wait(self, at_most: int = 0) -> None:
        """Wait until at most `at_most` leads are in flight. Raises OSError if one could not be written."""
        while len(self.in_flight) > at_most:
            for future in self.in_flight.popleft():
                future.result()

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
