"""Convert analyses to a store for training: Zarr 3, a chunk for each date, float16 or float32.

    .venv/bin/python -m datasets.convert SOURCE TARGET
    .venv/bin/python -m datasets.convert era5/ era5.zarr --variables geopotential 2m_temperature --levels 500
    .venv/bin/python -m datasets.convert --job.config_file train_configs/F.toml --section.key value

The last one writes what this configuration reads, in float32, as its first start does. If the command is
killed, the same command continues; if the source has later dates since, it appends them. A worker needs
about 3.5 GiB of memory at most. Exit codes: 0, 1 an error of the disk or a lost worker, 2 bad input.
"""

from errors import DataError, RunFailed, one_line_errors, print_message, refuse, without_secrets
from jobs.signals import end_at_signals, end_with_parent

if __name__ == "__main__":
    end_at_signals()  # before the imports, which take a second

import errno
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask.base
import numpy as np
import zarr
from dask import config as dask_config
from dask.delayed import delayed
from tqdm.dask import TqdmCallback
from zarr.codecs import BloscCodec, Crc32cCodec

from command_line import OneLineParser, start
from config import RANDOM, SIMULATED, Data, in_project
from datasets.archive import (
    Archive,
    TrainingStore,
    archive_of_dataset,
    consecutive,
    evenly_spaced,
    is_inside,
    open_archive,
    read_static_field,
    sums_file,
    usual_hours,
)
from datasets.channels import Channels
from datasets.fields import Decoding
from datasets.grid import Grid, area_weights, global_grid, sum_moments
from datasets.options import check_data, check_region, check_selection, parse_selection
from datasets.remote import NO_OPTIONS, Access, describe_error, is_url
from datasets.shards import write_shard
from datasets.source import TRAINING_STORE, find_files
from datasets.statistics import CHANGE, IMPLAUSIBLE, LARGEST, MISSING, NUM_COLUMNS, STATE, refuse_fills
from datasets.variables import expand_levels, split_name, units, usual_range
from jobs import machine
from jobs.durable_files import replacing

logger = logging.getLogger(__name__)
VERSION = 2  # of the layout of a store
SIMULATED_PATH = "outputs/stores/simulated.zarr"
SHARD_DATES, SHARD_BYTES, PART_BYTES = 512, 2**28, 2**30  # at most
SAMPLED_DATES = 16  # for scales and offsets of float16
COMPARED_DATES = 64  # of an array, on which a source whose files have changed is compared with its store
LARGEST_RMS = 1 / 200  # largest RMS error of a float16 field, in units of the scale
LARGEST_FIRST_START = 100 * 2**30  # bytes that a first start converts; more takes hours
WORKER_BYTES = 7 * 2**29  # of memory that a worker needs
SINGLE_PROCESS = 2**31  # bytes that are converted without workers, which take seconds to start
AXES = ("time", "latitude", "longitude")
OTHER_NAMES = {*AXES, "moments", "sums"}  # in a store, besides its variables
# Zarr 3 does not specify consolidated metadata, and the folder of sums is no array.
warnings.filterwarnings("ignore", message="Consolidated metadata|Object at .* is not recognized")


@dataclass(frozen=True)
class Request:
    """What a store has: of which sources, which variables and dates, in which form. It can be pickled."""

    source: tuple[str, ...]  # several are one archive
    variables: tuple[str, ...] = ()  # with levels; (): all
    levels: tuple[int, ...] = ()
    static_variables: tuple[str, ...] | None = None  # None: all
    static_path: str = ""
    period: tuple[tuple[str, ...], ...] = ()  # (): all dates
    region: tuple[float, ...] = ()
    select: tuple[str, ...] = ()
    access: Access = NO_OPTIONS
    grid: str = ""
    dtype: str = "float16"
    step_hours: int = 0  # of the changes in the moments; 0: between two dates
    from_config: bool = False

    @classmethod
    def of(cls, data: Data) -> "Request":
        """Return what a configuration reads. Raises ConfigError."""
        periods = (data.train_period, data.validation_period, data.test_period)
        path = str(simulated_store(data)) if data.path == SIMULATED else data.path
        return cls(
            source=(path, *data.more_paths),
            variables=tuple(Channels.of(data).variables),
            static_variables=tuple(data.static_variables),
            static_path=data.static_path,
            period=tuple(period for period in periods if period) if data.train_period else (),
            region=tuple(data.region),
            select=tuple(data.select),
            access=Access.of(data.storage_options, data.path),
            dtype="float32",
            step_hours=data.step_hours,
            from_config=True,
        )

    def open(self, elsewhere: Collection[str] = ()) -> Archive:
        """Open the sources; `select` may name dimensions of `elsewhere`. Raises ConfigError, DataError."""
        selection, (path, *more_paths) = parse_selection(self.select), self.source
        archive = open_archive(path, selection, self.access, () if self.grid else self.region, more_paths)
        here = {name: label for name, label in selection.items() if name not in elsewhere}
        check_selection(here, archive.extra_dimensions, archive.path)
        return archive

    def key(self, option: str) -> str:
        """Return the name of an option for messages: of the command line, or of the configuration."""
        names = {"SOURCE": "data.path", "--period": "data.train_period"}
        names |= dict.fromkeys(("TARGET", "--dtype", "--grid"), "data.store_path")
        return names.get(option, f"data.{option.removeprefix('--')}") if self.from_config else option

    def identity(self) -> dict[str, Any]:
        """Return what may not differ when a store is continued, as JSON has it; without secrets."""
        source, static_path = (
            [without_secrets(path if not path or is_url(path) else os.path.abspath(path)) for path in paths]
            for paths in (self.source, [self.static_path])
        )
        values = vars(self) | {"source": source, "static_path": static_path[0]}
        left_out = ("access", "levels", "from_config")
        return json.loads(json.dumps({k: v for k, v in values.items() if k not in left_out}))

    def check_store(self, target: Path, variables: Sequence[str] = ()) -> dict[str, Any]:
        """Return the attributes of a store, {} if there is none. Raises ConfigError if TARGET is something
        else, or was begun with other options. variables: with levels, if they are known.
        """
        key, attributes = self.key("TARGET"), read_attributes(target)
        if TRAINING_STORE in attributes and attributes[TRAINING_STORE] != VERSION:
            refuse(key, str(target), "it was written by an earlier version; remove it, or name another")
        if "options" not in attributes or TRAINING_STORE not in attributes:
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                refuse(key, str(target), "it exists and is no store of datasets.convert; name another")
            return {}
        for name, value in (self.identity() | {"variables": list(variables)}).items():
            known = attributes["options"].get(name, value)
            if value != known and (variables or name != "variables"):
                option = self.key("SOURCE" if name == "source" else f"--{name}")
                fix = f"use that, remove it, or name another {key}"
                reason = f"{str(target)!r} was begun with {name} {known!r}; {fix}"
                refuse(option, value, reason)
        return attributes


def read_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a Zarr 3 group, {} if there is none."""
    with suppress(OSError, ValueError):
        return json.loads((path / "zarr.json").read_text()).get("attributes", {})
    return {}


def store_of(data: Data) -> Path:
    """Return the folder of the training store of a configuration, by default a digest of what is asked."""
    request = Request.of(data)
    digest = hashlib.sha256(json.dumps(request.identity()).encode()).hexdigest()[:12]
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(request.source[0]).stem)
    return Path(data.store_path or in_project(f"outputs/stores/{name or 'data'}-{digest}.zarr"))


def open_source(data: Data, elsewhere: Collection[str] = ()) -> Archive:
    """Open what data.path and data.more_paths name: noise, simulated weather, which is written on first use,
    or files. elsewhere: as of `Request.open`. Raises ConfigError or DataError.
    """
    if data.path == RANDOM:
        from datasets.simulated import RandomFields  # torch takes seconds

        return RandomFields(data)
    path = data.path.removeprefix("file://")
    if data.path == SIMULATED:
        write_simulated(simulated_store(data))
    elif not is_url(path) and not os.path.exists(path) and not glob.glob(path):
        fix = "name your analyses, or take --data.path random for a trial without data"
        refuse("data.path", data.path, f"there is no such file or folder; {fix}")
    return Request.of(data).open(elsewhere)


@contextmanager
def lock(target: Path, request: Request) -> Iterator[None]:
    """Keep other processes from writing a store; a first start waits. Raises ConfigError, RunFailed."""
    key, place = request.key("TARGET"), str(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = (target.parent / f".{target.name}.lock").open("w")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # can be repaired: no bad input
            raise RunFailed(f"{key} {place!r} cannot be written ({error.strerror}); make room") from None
        reason = f"it cannot be written to ({error.strerror}); name another"
        refuse(key, place, reason + " with data.store_path" * request.from_config)
    # -- of several runs that start on the same source the first converts it, and the others wait and read
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not request.from_config:
                refuse(key, place, "another process is writing it; wait for its end")
            print_message(f"{target}: another run is converting it: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # of a file system without locks
            logger.warning("%s: cannot be locked (%s); let no other run write there", target, error)
        try:
            yield
        except OSError as error:
            reason = f"{place!r} cannot be written ({describe_error(error)})"
            raise RunFailed(f"{key} {reason}; the same command continues when that is repaired") from None


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise DataError for an error of the system while a source is read: it is not the disk of the store."""
    try:
        yield
    except OSError as error:
        reason = f"{describe_error(error)}; the same command continues when that is repaired"
        raise DataError(f"cannot read {path!r}: {reason}") from None


# -- values


def choose_packing(mean: float, deviation: float) -> Decoding:
    """Return a scale that is a power of two near the deviation, and an offset near the mean."""
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        return Decoding()
    scale = 2.0 ** round(math.log2(deviation or abs(mean) / 1024 or 1.0))
    return Decoding(scale=scale, offset=round(mean / scale) * scale)


def check_packing(field: np.ndarray, packing: Decoding, place: str) -> None:
    """Raise DataError naming the place if the error of a field (H, W) in float16 is too large.

    At most 2^-11 |value - add_offset| + 2^-25 scale_factor + 2^-23 |value| are allowed, and a root mean
    square of 1/200 of the scale.
    """
    exact = field[np.isfinite(field)].astype(np.float64)
    error = np.abs(packing.decode(pack(exact, packing)).astype(np.float32) - exact)
    rms = np.sqrt(np.square(error).sum() / max(1, error.size))
    rounding = 2.0**-23 * np.abs(exact)  # of the decoded float32
    allowed = 2.0**-11 * np.abs(exact - packing.offset) + 2.0**-25 * packing.scale + rounding
    if (error > allowed).any() or rms > LARGEST_RMS * packing.scale + rounding.max(initial=0):
        reason = f"its error in float16 of scale {packing.scale:g} is {error.max():g} (RMS {rms:g})"
        raise DataError(f"{place}: {reason}, which is too large; convert with --dtype float32")


def pack(fields: np.ndarray, packing: Decoding) -> np.ndarray:
    """Return fields as float16."""
    with np.errstate(over="ignore", invalid="ignore"):
        return ((fields.astype(np.float64) - packing.offset) / packing.scale).astype(np.float16)


def array_name(variable: str) -> str:
    """Return "geopotential_500" for "geopotential:500"."""
    return variable.replace(":", "_")


class Conversion:
    """Variables and dates of analyses, and the store to which they are written. It can be pickled."""

    def __init__(self, request: Request, target: Path, archive: Archive) -> None:
        """archive: of the request's sources. Raises ConfigError, DataError."""
        self.request, self.target, self.archive = request, target.absolute(), archive
        for source in filter(None, request.source):
            local = [] if is_url(source) else [source.removeprefix("file://"), *find_files(source)]
            for file in local:
                if target.resolve().is_relative_to(Path(file).resolve()):
                    reason = f"it is inside {request.key('SOURCE')} {file!r}; name another"
                    refuse(request.key("TARGET"), str(target), reason)

        # Variables: those that are named, or all, on the levels where these are given.
        known, levels, chosen = archive.variables, request.levels, list(request.variables)
        for level in levels:
            if all(split_name(name)[1] != level for name in known):
                refuse("--levels", level, f"{archive.path!r} has no variable on this level; name another")
        chosen = chosen or [name for name in known if not levels or split_name(name)[1] in (None, *levels)]
        self.names = []  # whole names, or all levels of one
        for name in expand_levels(chosen, levels):
            named = [other for other in known if name in (other, other.partition(":")[0])] or [name]
            self.names += [other for other in named if other not in self.names]
        self.static = [name for name in archive.static_variables if name not in self.names]
        if request.static_variables is not None:  # a mask of land is drawn in maps
            extra = {"land_sea_mask"} & {*self.static} - {*request.static_variables}
            self.static = [*request.static_variables, *extra]
        name_of_array = dict.fromkeys(OTHER_NAMES, "another array of a store")
        for name in (*self.names, *self.static):
            if other := name_of_array.get(array_name(name)):
                reason = f"its array {array_name(name)} would be that of {other}; leave one of them out"
                refuse(request.key("--variables"), name, reason)
            name_of_array[array_name(name)] = name

        # Dates in the periods: with all variables of a configuration, with one of the command line's.
        key = request.key("--period")
        inside = [is_inside(archive.times, key, period) for period in request.period]
        chosen_dates = np.any(inside, axis=0) if inside else np.ones(len(archive.times), bool)
        has = [archive.has([name]) for name in self.names]
        chosen_dates &= np.all(has, axis=0) if request.from_config else np.any(has, axis=0)
        if not chosen_dates.any():
            period = list(request.period[0]) if request.period else []
            refuse(key, period, f"no date of it is in {archive}; name another")
        self.times = archive.times[chosen_dates]

        self.grid, self.regridder = archive.grid, None
        if request.grid:
            from datasets.regrid import Regridder  # torch takes seconds

            size = re.fullmatch(r"(\d+)x(\d+)", request.grid)
            if not size or min(int(size[1]), int(size[2])) < 2:
                reason = "number of latitudes x number of longitudes expected, as in 121x240"
                refuse("--grid", request.grid, reason)
            globe = global_grid((int(size[1]), int(size[2])), poles=int(size[1]) % 2 == 1)
            self.grid = globe.crop(request.region, "--region")[0] if request.region else globe
            self.regridder = Regridder(archive.grid, self.grid)
        # Of a field as it is read or as it is written.
        self.largest_field = 4 * max(math.prod(grid.shape) for grid in (archive.grid, self.grid))
        self.num_bytes = len(self.times) * len(self.names) * math.prod(self.grid.shape)
        self.num_bytes *= np.dtype(request.dtype).itemsize

    @property
    def group(self) -> Any:
        """The arrays of the store."""
        return zarr.open_group(self.target, mode="r+", use_consolidated=False)

    def read(self, times: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Return fields (n, V, H, W) float32 of the source at ascending times, on the grid of the store, NaN
        where it lacks them. Raises DataError.
        """
        fields = np.full((len(times), len(names), *self.grid.shape), np.nan, np.float32)
        rows = np.flatnonzero(np.isin(times, self.archive.times))
        places = np.searchsorted(self.archive.times, times[rows])
        for near in consecutive(places):
            with reading(self.archive.path):
                block = self.archive.read_block(int(near[0]), int(near[-1]) + 1, names)
            here = rows[np.isin(places, near)]
            for v, name in enumerate(names):
                fields[here, v] = self.fit(block[:, v], name)
        return fields

    def fit(self, fields: np.ndarray, name: str) -> np.ndarray:
        """Return fields (n, H, W) of a variable of the archive on the grid of the store."""
        if self.regridder is None:
            return fields
        import torch

        # Field by field: the regridder works in float64.
        is_class = self.archive.is_class(name)
        tensors = torch.from_numpy(np.ascontiguousarray(fields))
        return np.stack([self.regridder(field, is_class).numpy() for field in tensors])

    def packing(self, name: str) -> Decoding | None:
        """Return how a variable is packed as float16, None for float32."""
        attributes = self.group[array_name(name)].attrs
        if "scale_factor" not in attributes:
            return None
        return Decoding(scale=attributes["scale_factor"], offset=attributes["add_offset"])

    def static_fields(self) -> dict[str, np.ndarray]:
        """Return the constant fields (H, W) of the store. Raises DataError."""
        fields, request, path = {}, self.request, self.request.static_path
        with reading(path or self.archive.path):
            for name in self.static:
                if path and name in (request.static_variables or ()):
                    selection = parse_selection(request.select)
                    fields[name] = read_static_field(path, name, self.grid, selection, request.access)
                else:
                    fields[name] = self.fit(self.archive.read_static(name)[None], name)[0]
        return fields

    def states(self) -> dict[str, str]:
        """Return the states of the source's files by array; {} for URLs and analyses in memory."""
        path, names, states = self.request.static_path, {*self.names, *self.static}, dict[str, str]()
        fields = [field for field in self.archive.fields if names.intersection(field.names)]
        with reading(path or self.archive.path):
            arrays = sorted({(field.path, field.array) for field in fields if not is_url(field.path)})
            if arrays and path and not is_url(path):
                arrays += [(file, "") for file in find_files(path)]
            # -- a digest of the names, sizes and modification times of the files of an array
            for file, array in arrays:
                files, digest = [Path(file)], hashlib.sha256()
                if files[0].is_dir():
                    found = (inside for inside in (files[0] / array).rglob("*") if inside.is_file())
                    files = sorted(found, key=str)
                for inside in files:
                    status, name = inside.stat(), os.path.relpath(inside, os.path.dirname(file))
                    line = f"{name} {status.st_size} {status.st_mtime_ns}\n"
                    digest.update(line.encode("utf-8", "surrogateescape"))
                states[f"{file} {array}"] = digest.hexdigest()[:16]
        return states

    def run(self, workers: int = 1, scheduler: str = "") -> None:
        """Write what the store lacks. Raises ConfigError, DataError, RunFailed."""
        if not self.request.check_store(self.target, self.names):
            self.create()
        # -- the store is that of this grid
        group, key = self.group, self.request.key("SOURCE")
        if not Grid(group["latitude"][:], group["longitude"][:]).same_as(self.grid):
            refuse(key, self.archive.path, f"its grid is not that of {str(self.target)!r}; use --grid")

        # Values that are written already are those of the source; later dates are appended.
        times, states = group["time"][: group.attrs["dates"]].astype("datetime64[s]"), self.states()
        known = group.attrs["states"]
        if not states or states != known:
            # -- arrays whose files have changed; none are known of URLs
            changed = {name for name, value in states.items() if value != known.get(name)}
            shards = [sums.stem.rsplit("-", 1) for sums in (self.target / "sums").glob("*.npz")]
            size = self.group[array_name(self.names[0])].shards[0]
            fix = f"remove {str(self.target)!r} to convert them, or name another {self.request.key('TARGET')}"
            reason = f"is not what it was when it was converted; {fix}"
            for name in self.names:
                packing, array = self.packing(name), self.group[array_name(name)]
                starts = sorted(int(start) for stem, start in shards if stem == array_name(name))
                rows = np.array([r for a in starts for r in range(a, min(a + size, len(times)))], int)
                rows = rows[np.isin(times[rows], self.archive.times)]
                fields = {f"{field.path} {field.array}": field for field, _ in self.archive.find(name)}
                # A changed file may have other values on some dates only: compare more of those it has.
                dates = [np.asarray(fields[place].times) for place in fields.keys() & changed]
                if changed:
                    rows = rows[np.isin(times[rows], np.concatenate([times[:0], *dates]))]
                for row in evenly_spaced(rows, COMPARED_DATES if changed else SAMPLED_DATES).tolist():
                    field = self.read(times[row : row + 1], [name])[0, 0]
                    field = field if packing is None else pack(field, packing)
                    if not np.array_equal(field, array[row], equal_nan=True):
                        raise DataError(f"{self.archive.path!r}: {name} at {times[row]} {reason}")
            for name, field in self.static_fields().items():
                if not np.array_equal(field, self.group[array_name(name)][:], equal_nan=True):
                    raise DataError(f"{self.archive.path!r}: {name} {reason}")
            group.update_attributes({"states": states})
        written = times if group.attrs["complete"] else times[: group.attrs.get("written", 0)]
        lost = np.setdiff1d(times, self.times)
        if len(missing := np.setdiff1d(lost, written)):
            reason = f"it no longer has {missing[0]}, with which {str(self.target)!r} was begun"
            refuse(key, self.archive.path, f"{reason}; convert to another TARGET")
        if len(lost):
            logger.info("%s: %d dates are no longer in the source: %s", self.target, len(lost), lost[0])
        # -- dates are appended only: training counts samples by position, which must not move
        later = np.setdiff1d(self.times, times)
        if len(later) and later[0] < times[-1]:
            reason = f"it has {later[0]} now, which {str(self.target)!r} lacks before its end"
            refuse(key, self.archive.path, f"{reason}; remove that folder, or name another TARGET")
        if len(later):
            shard = group[array_name(self.names[0])].shards[0]
            group.update_attributes({"complete": False, "written": len(written)})
            if len(times) % shard:  # the last shard is written again
                for name in self.names:
                    sums_file(self.target, name, len(times) // shard * shard).unlink(missing_ok=True)
            times = np.concatenate([times, later])
            for name in ("time", *map(array_name, self.names)):
                group[name].resize((len(times), *group[name].shape[1:]))
            group["time"][:] = times.astype(np.int64)
            group.update_attributes({"dates": len(times)})  # last: a kill before leaves the old number
        if not group.attrs["complete"]:
            self.write(times, workers, scheduler)

    def create(self) -> None:
        """Create a store without values: under another name, so that a kill leaves nothing in TARGET."""
        new, dtype = self.target.with_name(f".{self.target.name}.new"), np.dtype(self.request.dtype)
        shape, size = self.grid.shape, dtype.itemsize * math.prod(self.grid.shape)
        # A shard is the unit that a process writes at once: limited by files, memory and the largest source
        # field.
        dates = max(1, min(SHARD_DATES, SHARD_BYTES // size, PART_BYTES // self.largest_field))
        shard_dates = 1 << (dates.bit_length() - 1)  # a power of two
        packings = self.estimate_packings() if dtype == np.float16 else {}
        hours = self.request.step_hours or (usual_hours(self.times) if len(self.times) > 1 else 6)
        attributes = {
            TRAINING_STORE: VERSION,
            "complete": False,
            "dates": len(self.times),
            "options": self.request.identity() | {"variables": self.names},
            "states": self.states(),
            "change_seconds": round(3600 * hours),
        }
        # -- arrays: a chunk is a field of one date, because training reads single dates in random order
        group = zarr.create_group(new, overwrite=True, attributes=attributes)
        sizes = {"time": len(self.times), "latitude": shape[0], "longitude": shape[1]}

        def add(name: str, dims: Sequence[str], dtype: np.dtype, about: dict[str, Any]) -> zarr.Array:
            blosc = BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=dtype.itemsize)
            return group.create_array(
                name,
                shape=[sizes[dim] for dim in dims],
                dtype=dtype,
                chunks=(2**16,) if len(dims) == 1 else (1, *shape)[-len(dims) :],
                shards=(shard_dates, *shape) if len(dims) == 3 else None,
                compressors=[blosc, Crc32cCodec()],
                fill_value=np.nan if len(dims) > 1 else 0,
                dimension_names=dims,
                attributes=about,
            )

        seconds, calendar = self.times.astype(np.int64), {"calendar": "proleptic_gregorian"}
        for name, values, about in (
            ("time", seconds, {"units": "seconds since 1970-01-01"} | calendar),
            ("latitude", self.grid.latitude, {"units": "degrees_north"}),
            ("longitude", self.grid.longitude, {"units": "degrees_east"}),
        ):
            add(name, [name], values.dtype, about | {"standard_name": name})[:] = values
        for name in self.names:
            about = {"variable": name, "units": self.archive.units(name), **packings.get(name, {})}
            add(array_name(name), AXES, dtype, about)
        for name, field in self.static_fields().items():
            about = {"variable": name, "units": units(name)}
            add(array_name(name), AXES[1:], field.dtype, about)[:] = field
        # -- where its moments will be written; the store is there from here on
        (new / "sums").mkdir()
        os.replace(new, self.target)

    def estimate_packings(self) -> dict[str, dict[str, float]]:
        """Return the scale and offset of each variable, from dates that are evenly spaced."""
        area, packings = area_weights(self.grid.latitude), {}
        dates = evenly_spaced(self.times, SAMPLED_DATES)
        for names in self.archive.group_by_array(self.names):
            sums = np.zeros((len(names), 3))
            for date in range(len(dates)):
                sums += sum_moments(self.read(dates[date : date + 1], names)[0], 0.0, area)
            with np.errstate(invalid="ignore"):  # for a variable without any value
                mean = sums[:, 1] / sums[:, 0]
                deviation = np.sqrt((sums[:, 2] / sums[:, 0] - mean**2).clip(min=0))
            for name, *moments in zip(names, mean.tolist(), deviation.tolist(), strict=True):
                packing = choose_packing(*moments)
                packings[name] = {"scale_factor": packing.scale, "add_offset": packing.offset}
        return packings

    def write(self, times: np.ndarray, workers: int, scheduler: str) -> None:
        """Write the missing parts and the moments of all dates, then mark the store as complete.

        Raises what a part raises, RunFailed if a worker is lost, ConfigError if no scheduler answers.
        """
        group, count = self.group, len(times)
        shard = group[array_name(self.names[0])].shards[0]
        together = self.archive.group_by_array(self.names)
        if "shifts" not in group.attrs:  # moments are taken around the first field, where it has values
            shifts = {}
            for names in together:
                for name, field in zip(names, self.read(times[:1], names)[0], strict=True):
                    if packing := self.packing(name):
                        field = packing.decode(pack(field, packing)).astype(np.float32)
                    valid = np.isfinite(field)[None]
                    total = np.where(valid, field, 0).sum(axis=(1, 2), dtype=np.float64)
                    shifts[name] = float(total[0] / max(valid.sum(), 1))
            group.update_attributes({"shifts": shifts})

        # The variables that the source stores together, as many as fit into memory.
        most = max(1, PART_BYTES // (shard * self.largest_field))
        groups = [names[i : i + most] for names in together for i in range(0, len(names), most)]
        tasks = []
        for first in range(0, count, shard):
            for names in groups:
                if not all(sums_file(self.target, name, first).exists() for name in names):
                    tasks.append(delayed(self.write_part)((first, min(first + shard, count), names)))
        # Processes, not threads: HDF5 has one lock per process, and packing needs Python's lock.
        kind = None if scheduler else "processes" if workers > 1 else "synchronous"
        ending: Any = {"multiprocessing.initializer": partial(_start_worker, os.getpid())}
        with ExitStack() as stack:
            if scheduler:
                try:
                    import distributed  # type: ignore[reportMissingImports]  # an extra

                    # dask's scheduler from here on
                    stack.enter_context(distributed.Client(scheduler, timeout=20))
                except ImportError:
                    fix = 'needs the package distributed: pip install -e ".[distributed]"'
                    refuse("--scheduler", scheduler, fix)
                except (OSError, ValueError) as error:
                    reason = f"no scheduler answers ({describe_error(error)}); start one"
                    refuse("--scheduler", scheduler, reason)
            stack.enter_context(dask_config.set(ending))
            stack.enter_context(TqdmCallback(desc="conversion", unit="task", disable=None))
            try:
                dask.base.compute(*tasks, scheduler=kind, num_workers=workers, chunksize=1)
            except BrokenProcessPool:
                reason = "a worker was killed, perhaps because memory ran out: use fewer --workers"
                raise RunFailed(f"{reason}; the same command continues") from None

        # -- the moments of all dates, in one array
        moments = np.empty((count, len(self.names), NUM_COLUMNS))
        for v, name in enumerate(self.names):
            for first in range(0, count, shard):
                with np.load(sums_file(self.target, name, first)) as stored:
                    moments[first : first + shard, v] = stored["rows"]
        about = {
            "variables": self.names,
            "shifts": [group.attrs["shifts"][name] for name in self.names],
            "change_hours": group.attrs["change_seconds"] / 3600,
            "columns": "missing infinite implausible weight first second change_weight change_first "
            "change_second: cells, and area-weighted sums around the shift",
        }
        group.create_array(
            "moments",
            data=moments,
            chunks=(min(count, 4096), *moments.shape[1:]),
            dimension_names=("time", "variable", "column"),
            attributes=about,
            overwrite=True,
        )
        group.update_attributes({"complete": True})
        zarr.consolidate_metadata(group.store)

    def write_part(self, part: tuple[int, int, list[str]]) -> None:
        """Check and write dates [start, stop) of variables, within a shard, and their moments and sums."""
        start, stop, names = part
        group, area = self.group, area_weights(self.grid.latitude)
        all_times = group["time"][:].astype("datetime64[s]")
        step, times = np.timedelta64(group.attrs["change_seconds"], "s"), all_times[start:stop]
        # With the dates before the part that lie a step before one of its dates.
        earlier = np.flatnonzero(np.isin(all_times[:start], times - step))
        rows = np.append(earlier, np.arange(start, stop))
        values = self.read(all_times[rows], names)  # (n, V, H, W)
        lost = np.flatnonzero(~np.isin(all_times[rows], self.archive.times))  # which the store has
        _, now, before = np.intersect1d(times, all_times[rows] + step, return_indices=True)
        # -- values as they are stored; moments and sums are those of what training will read
        for v, name in enumerate(names):
            array, packing, fields = group[array_name(name)], self.packing(name), values[:, v]
            stored = fields if packing is None else pack(fields, packing)
            for i in lost.tolist():
                stored[i] = array[int(rows[i])]
            if packing is not None:
                for date, field in zip(times, fields[len(earlier) :], strict=True):
                    check_packing(field, packing, f"{name} at {date}")
                fields = packing.decode(stored).astype(np.float32)
            ours, columns = fields[len(earlier) :], np.zeros((stop - start, NUM_COLUMNS))
            # Near the mean: without it squares of 5e4 m2 s-2 would lose seven of the sixteen digits.
            shift, (low, high) = group.attrs["shifts"][name], usual_range(name)
            total, count = np.zeros(self.grid.shape), np.zeros(self.grid.shape, np.int32)
            slab = max(1, 2**24 // math.prod(self.grid.shape))  # fields at once: float64 takes memory
            # -- moments of states, sums by cell, and moments of the change over a step
            for a in range(0, len(ours), slab):
                block, dates, rows = ours[a : a + slab], times[a : a + slab], columns[a : a + slab]
                valid, is_infinite = np.isfinite(block), np.isinf(block)
                is_odd = ((block < low) | (block > high)) & valid
                if is_odd.any() or np.abs(block, where=valid, out=np.zeros_like(block)).max() > LARGEST:
                    for date, field in zip(dates, block, strict=True):
                        refuse_fills(field[None], [name], date, self.archive.path)
                rows[:, MISSING] = (~valid).sum(axis=(1, 2))
                odd = is_infinite.sum(axis=(1, 2)), is_odd.sum(axis=(1, 2))
                rows[:, IMPLAUSIBLE], rows[:, STATE] = np.stack(odd, 1), sum_moments(block, shift, area)
                total += np.where(valid, block, 0).sum(axis=0, dtype=np.float64)
                count += valid.sum(axis=0, dtype=np.int32)
            for a in range(0, len(now), slab):
                later = now[a : a + slab]
                columns[later, CHANGE] = sum_moments(ours[later], fields[before[a : a + slab]], area)
            # -- the shard, then the file that says so: a kill between the two writes the shard again
            shard = array.shards[0]
            key = array.metadata.encode_chunk_key((start // shard, 0, 0))
            write_shard(self.target / array_name(name) / key, stored[len(earlier) :], shard)
            with replacing(sums_file(self.target, name, start)) as file:  # the mark that the part is written
                np.savez(file, rows=columns, total=total, count=count)


# -- processes


def most_workers() -> int:
    """Return the number of workers that the cores and the memory of this process suffice for."""
    return max(1, min(machine.num_cores(), machine.memory() // WORKER_BYTES))


def _start_worker(parent: int) -> None:
    """Make a worker end with its parent, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)


# -- the first start of a run


def check_first_start(data: Data, size: int = 0) -> None:
    """Raise ConfigError with the command for sources that no start converts: by several ranks, too large."""
    fix = "convert it first, with the configuration and options of this run: "
    fix += ".venv/bin/python -m datasets.convert --job.config_file FILE"
    if int(os.environ.get("NNODES", "1")) > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        reason = f"it is no training store, and several processes have started; {fix}"
        refuse("data.path", data.path, reason)
    if size > LARGEST_FIRST_START:
        refuse("data.path", data.path, f"it is no training store, and has {size / 2**30:.0f} GiB; {fix}")


def simulated_store(data: Data) -> Path:
    """Return the store of simulated weather; data.store_path names it unless only a part is trained on."""
    is_whole = not (data.more_paths or data.region)
    return Path((data.store_path if is_whole else "") or in_project(SIMULATED_PATH))


def write_simulated(target: Path) -> None:
    """Write simulated weather as a training store, unless it is there; processes may call it at once. Raises
    ConfigError if there is something else, or a record of other parameters.
    """
    from datasets import simulated  # torch takes seconds

    numbers = [simulated.VERSION, simulated.NUM_YEARS, simulated.NUM_DAYS, asdict(simulated.DEFAULTS)]
    source = f"memory://simulated-{hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]}"
    request = Request((source,), dtype="float32", step_hours=6, from_config=True)
    if request.check_store(target).get("complete"):  # also on a disk that is only read
        return
    with lock(target, request):
        if not request.check_store(target).get("complete"):
            begin = time.perf_counter()
            dataset = simulated.simulate(simulated.NUM_YEARS, simulated.NUM_DAYS, 0, simulated.DEFAULTS)
            Conversion(request, target, archive_of_dataset(source, dataset)).run()
            seconds = time.perf_counter() - begin
            logger.info("simulated %d years in %.1f s: %s", simulated.NUM_YEARS, seconds, target)


# -- the command


def main(argv: list[str]) -> int:
    """Convert; return the exit code. Raises ConfigError, DataError, RunFailed."""
    if any(word.split("=")[0] == "--job.config_file" for word in argv):
        data = start(argv, __doc__, lambda config: check_data(config.data)).data
        request, archive, target = Request.of(data), open_source(data), store_of(data)
        if isinstance(archive, TrainingStore):  # of which a run takes all
            print(f"{archive.path}: complete, {archive}")
            return 0
        options = Namespace(workers=most_workers(), scheduler="")
    else:
        parser = OneLineParser("datasets.convert", __doc__)
        add = parser.add_argument
        add("source", metavar="SOURCE", help="file, folder, glob or URL, as data.path")
        add("target", metavar="TARGET", help="local folder, new or to be continued")
        add("--variables", nargs="+", default=[], metavar="NAME", help="default: all")
        add("--levels", nargs="+", type=int, default=[], metavar="HPA", help="of variables without a level")
        add("--period", nargs=2, default=[], metavar=("FIRST", "LAST"), help="dates, both included")
        add("--region", nargs=4, type=float, default=[], metavar=("NORTH", "WEST", "SOUTH", "EAST"))
        add("--grid", default="", metavar="HxW", help="regrid: 121x240 has rows on the poles, 32x64 has none")
        add("--dtype", choices=("float16", "float32"), default="float16", help="default: float16")
        add("--workers", type=int, default=1, metavar="N", help="processes of this machine")
        add("--scheduler", default="", metavar="tcp://HOST:PORT", help="of dask.distributed, for workers")
        add("--select", nargs="+", default=[], metavar="DIM=LABEL", help="as data.select")
        add("--storage_options", nargs="+", default=[], metavar="NAME=VALUE", help="as data.storage_options")
        options = parser.parse_args(argv)
        check_region("--region", options.region)
        if options.workers < 1:
            refuse("--workers", options.workers, "one or more processes expected")
        if is_url(options.target):
            reason = "a local folder expected; upload the store when it is complete"
            refuse("TARGET", options.target, reason)
        # -- what the store will be, which it keeps as its identity
        request = Request(
            source=(options.source,),
            variables=tuple(options.variables),
            levels=tuple(options.levels),
            period=(tuple(options.period),) if options.period else (),
            region=tuple(options.region),
            select=tuple(options.select),
            access=Access.of(options.storage_options, options.source),
            grid=options.grid,
            dtype=options.dtype,
        )
        target = Path(options.target)
        request.check_store(target)
        archive = request.open()
    # -- the same conversion for both; a store that is there already is continued, or is complete
    conversion = Conversion(request, target, archive)
    archive.check(conversion.names)
    with lock(target, request):
        conversion.run(options.workers, options.scheduler)
    dates = conversion.group["time"].shape[0]
    print(f"{target}: complete, {dates} dates of {len(conversion.names)} variables")
    return 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
