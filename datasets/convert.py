"""Convert analyses to a store for training: Zarr 3, a chunk for each date, float16 or float32.

    .venv/bin/python -m datasets.convert SOURCE TARGET
    .venv/bin/python -m datasets.convert era5/ era5.zarr --variables geopotential 2m_temperature --levels 500

If the command is killed, the same command continues. A worker needs about 3.5 GiB of memory at most.
Exit codes: 0, 1 an error of the disk or a lost worker, 2 bad input.
"""

from errors import DataError, RunFailed, end_when_interrupted, one_line_errors, refuse, without_secrets

if __name__ == "__main__":
    end_when_interrupted()  # before the imports, which take a second

import ctypes
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import dask.base
import numpy as np
import xarray as xr
import zarr
from dask import config as dask_config
from dask.delayed import delayed
from tqdm.dask import TqdmCallback
from zarr.codecs import BloscCodec, Crc32cCodec

from command_line import OneLineParser
from datasets.archive import Archive, open_archive
from datasets.dates import consecutive, evenly_spaced, is_inside
from datasets.fields import Decoding
from datasets.files import TRAINING_STORE, find_files
from datasets.grid import Grid, area_weights, global_grid, sum_moments
from datasets.options import check_region, check_selection, parse_selection
from datasets.remote import describe_error, is_url
from datasets.variables import expand_levels, named_by, split_name, units
from jobs.durable_files import write_durably

DONE = "conversion"  # folder in a store that is not complete: a file for each part that is written
SHARD_DATES, SHARD_BYTES, PART_BYTES = 512, 2**28, 2**30  # at most
SAMPLED_DATES = 16  # for scales and offsets of float16
LARGEST_RMS = 1 / 200  # largest RMS error of a float16 field, in units of the scale
AXES = ("time", "latitude", "longitude")
Part = tuple[int, int, list[str]]  # dates [start, stop) of some variables: at most a shard of each
# Zarr 3 does not specify consolidated metadata, and the folder of parts is no array.
warnings.filterwarnings("ignore", message="Consolidated metadata|Object at .* is not recognized")


def parse(argv: list[str]) -> Namespace:
    """Return the options of the command line. Raises ConfigError."""
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
    add("--scheduler", default="", metavar="tcp://HOST:PORT", help="of dask.distributed, instead of workers")
    add("--select", nargs="+", default=[], metavar="DIM=LABEL", help="as data.select")
    options = parser.parse_args(argv)
    check_region("--region", options.region)
    if options.workers < 1:
        refuse("--workers", options.workers, "one or more processes expected")
    return options


def choose_variables(archive: Archive, options: Namespace) -> list[str]:
    """Return the variables that are named, or all, on --levels where these are given. Raises ConfigError."""
    known, levels = archive.variables, options.levels
    for level in levels:
        if all(split_name(name)[1] != level for name in known):
            refuse("--levels", level, f"{archive.path!r} has no variable on this level; name another")
    chosen = options.variables or [n for n in known if not levels or split_name(n)[1] in (None, *levels)]
    found = [each for name in expand_levels(chosen, levels) for each in named_by([name], known) or [name]]
    return list(dict.fromkeys(found))


def choose_dates(archive: Archive, names: Sequence[str], period: Sequence[str]) -> np.ndarray:
    """Return the dates (n,) in a period on which the archive has one of the variables. Raises ConfigError."""
    chosen = is_inside(archive.times, "--period", period)
    chosen &= np.any([archive.has([name]) for name in names], axis=0)
    if not chosen.any():
        refuse("--period", list(period), f"no date of it is in {archive}; name another")
    return archive.times[chosen]


def parse_grid(text: str) -> Grid:
    """Return the global grid of "32x64"; an odd number of rows ("121x240") has points on the poles."""
    rows, columns = (int(part) if part.isdecimal() else 0 for part in f"{text}x".split("x")[:2])
    if text != f"{rows}x{columns}" or min(rows, columns) < 2:
        refuse("--grid", text, "number of latitudes x number of longitudes expected, as in 121x240")
    longitude = np.arange(columns) * 360 / columns
    return Grid(np.linspace(90, -90, rows), longitude) if rows % 2 else global_grid((rows, columns))


def check_target(target: Path, source: str) -> None:
    """Raise ConfigError unless TARGET is a store of this module, or empty, and not inside SOURCE."""
    files = [] if is_url(source) else [source.removeprefix("file://"), *find_files(source)]
    for file in files:
        if target.resolve().is_relative_to(Path(file).resolve()):
            refuse("TARGET", str(target), f"it is inside SOURCE {file!r}; name another")
    known = (target / DONE).exists() or TRAINING_STORE in read_attributes(target)
    if not known and target.exists() and (not target.is_dir() or any(target.iterdir())):
        refuse("TARGET", str(target), "it exists and is no store of datasets.convert; name another")


def read_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a Zarr 3 group, {} if there is none."""
    with suppress(OSError, ValueError):
        return json.loads((path / "zarr.json").read_text()).get("attributes", {})
    return {}


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Create a folder and refuse a second writer. Raises ConfigError, RunFailed (the disk)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        refuse("TARGET", str(folder), "another process is writing it; wait for its end")
    except OSError as error:
        if not os.access(folder, os.W_OK):
            refuse("TARGET", str(folder), f"it cannot be written to ({error.strerror}); name another")
        reason = f"{str(folder)!r} cannot be written ({describe_error(error)})"
        raise RunFailed(f"TARGET {reason}; the same command continues when that is repaired") from None


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
    with np.errstate(over="ignore"):
        stored = ((exact - packing.offset) / packing.scale).astype(np.float16)  # as xarray packs
    error = np.abs(packing.decode(stored).astype(np.float32) - exact)
    rms = np.sqrt(np.square(error).sum() / max(1, error.size))
    rounding = 2.0**-23 * np.abs(exact)  # of the decoded float32
    allowed = 2.0**-11 * np.abs(exact - packing.offset) + 2.0**-25 * packing.scale + rounding
    if (error > allowed).any() or rms > LARGEST_RMS * packing.scale + rounding.max(initial=0):
        reason = f"its error in float16 of scale {packing.scale:g} is {error.max():g} (RMS {rms:g})"
        raise DataError(f"{place}: {reason}, which is too large; convert with --dtype float32")


def array_name(variable: str) -> str:
    """Return "geopotential_500" for "geopotential:500"."""
    return variable.replace(":", "_")


def encoding_of(variable: xr.Variable, shard_dates: int) -> dict[str, Any]:
    """Return the chunks and codecs of an array."""
    if variable.ndim == 1:
        return {"chunks": (2**16,)} if variable.dims == ("time",) else {"_FillValue": None}
    shape, size = variable.shape[-2:], variable.dtype.itemsize
    codecs = [BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=size), Crc32cCodec()]
    sharded = {"chunks": (1, *shape), "shards": (shard_dates, *shape)}
    chunks = sharded if variable.ndim == 3 else {"chunks": shape}
    return {**chunks, "compressors": codecs, "fill_value": np.nan, "_FillValue": None}


class Conversion:
    """Variables and dates of a source, and the store to which they are written. It can be pickled."""

    def __init__(self, options: Namespace) -> None:
        """Open the source. Raises ConfigError, DataError."""
        self.options, self.target, region = options, Path(options.target).absolute(), tuple(options.region)
        selection = parse_selection(options.select)
        self.archive = open_archive(options.source, selection, region=() if options.grid else region)
        check_selection(selection, self.archive.extra_dimensions, options.source)
        self.names = choose_variables(self.archive, options)
        self.archive.check(self.names)
        self.times = choose_dates(self.archive, self.names, options.period)
        self.grid, self.regridder = self.archive.grid, None
        if options.grid:
            from datasets.regrid import Regridder  # torch takes seconds

            whole = parse_grid(options.grid)
            self.grid = whole.crop(region, "--region")[0] if region else whole
            self.regridder = Regridder(self.archive.grid, self.grid)
        # Of a field as it is read or as it is written.
        self.largest_field = 4 * max(math.prod(grid.shape) for grid in (self.archive.grid, self.grid))

    @property
    def group(self) -> Any:
        """The arrays of the store."""
        return zarr.open_group(self.target, mode="r+", use_consolidated=False)

    def fit(self, fields: np.ndarray) -> np.ndarray:
        """Return fields (..., H, W) of the archive on the grid of the store."""
        if self.regridder is None:
            return fields
        import torch

        # Field by field: the regridder works in float64.
        flat = torch.from_numpy(fields).reshape(-1, *fields.shape[-2:])
        regridded = np.stack([self.regridder(field).numpy() for field in flat])
        return regridded.reshape(*fields.shape[:-2], *self.grid.shape)

    def run(self) -> None:
        """Write the parts that the store lacks. Raises ConfigError, DataError, RunFailed."""
        if "options" not in read_attributes(self.target):
            self.create()
        group = self.group
        self.check_options(group)
        times = group["time"][:].astype("datetime64[s]")
        if not group.attrs["complete"]:
            if len(lost := times[~np.isin(times, self.times)]):
                reason = f"it no longer has {lost[0]}, with which {str(self.target)!r} was begun"
                refuse("SOURCE", self.options.source, f"{reason}; convert to another TARGET")
            self.write()
        print(f"{self.target}: complete, {len(times)} dates of {len(self.names)} variables")
        if len(absent := np.setdiff1d(self.times, times)):
            fix = "convert them with --period to another TARGET, which data.more_paths joins to this one"
            print(f"SOURCE has {len(absent)} other dates, the first {absent[0]}: {fix}")

    def fixed_options(self) -> dict[str, Any]:
        """Return the options that may not differ when a conversion is continued."""
        source = self.options.source if is_url(self.options.source) else os.path.abspath(self.options.source)
        found = vars(self.options) | {"variables": self.names, "source": without_secrets(source)}
        return {key: found[key] for key in found if key not in ("target", "levels", "workers", "scheduler")}

    def check_options(self, group: Any) -> None:
        """Raise ConfigError if options or grid differ from those with which the store was begun."""
        for name, value in self.fixed_options().items():
            known = group.attrs["options"].get(name)
            if value != known:
                fix = f"{str(self.target)!r} was begun with {known!r}; use that, or another TARGET"
                refuse("SOURCE" if name == "source" else f"--{name}", value, fix)
        if not Grid(group["latitude"][:], group["longitude"][:]).same_as(self.grid):
            refuse("SOURCE", self.options.source, f"its grid is not that of {str(self.target)!r}; use --grid")

    def create(self) -> None:
        """Create a store without values, after removing the files of a killed attempt."""
        for path in self.target.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.target / DONE).mkdir()
        dataset = xr.Dataset(attrs={TRAINING_STORE: 1, "complete": False})
        since = {"units": "seconds since 1970-01-01", "calendar": "proleptic_gregorian"}
        dataset["time"] = "time", np.empty(0, np.int64), since | {"standard_name": "time"}
        for name, unit in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
            dataset[name] = name, getattr(self.grid, name), {"units": unit, "standard_name": name}
        packings = self.estimate_packings() if self.options.dtype == "float16" else {}
        empty = np.empty((0, *self.grid.shape), self.options.dtype)
        for name in self.names:
            attributes = {"variable": name, "units": self.archive.units(name), **packings.get(name, {})}
            dataset[array_name(name)] = AXES, empty, attributes
        for name in self.archive.static_variables:
            field = self.fit(self.archive.read_static(name))
            dataset[array_name(name)] = AXES[1:], field, {"variable": name, "units": units(name)}
        size = np.dtype(self.options.dtype).itemsize * math.prod(self.grid.shape)
        dates = max(1, min(SHARD_DATES, SHARD_BYTES // size, PART_BYTES // self.largest_field))
        shard_dates = 1 << (dates.bit_length() - 1)  # a power of two
        arrays = dataset.variables.items()
        encoding = {str(name): encoding_of(variable, shard_dates) for name, variable in arrays}
        dataset.to_zarr(self.target, mode="a", zarr_format=3, consolidated=False, encoding=encoding)
        group = self.group
        for name in ("time", *map(array_name, self.names)):
            group[name].resize((len(self.times), *group[name].shape[1:]))
        group["time"][:] = self.times.astype(np.int64)
        group.update_attributes({"options": self.fixed_options()})

    def estimate_packings(self) -> dict[str, dict[str, float]]:
        """Return the scale and offset of each variable, from dates that are evenly spaced."""
        area, packings = area_weights(self.grid.latitude), {}
        dates = [self.archive.index(time) for time in evenly_spaced(self.times, SAMPLED_DATES)]
        for names in self.archive.group_by_array(self.names):
            fields = (self.fit(self.archive.read(date, names)) for date in dates)
            sums = [[sum_moments(field, 0.0, area) for field in each] for each in fields]
            with np.errstate(invalid="ignore"):  # for a variable without any value
                weight, total, squares = np.sum(sums, axis=0).T
                mean = total / weight
                deviation = np.sqrt((squares / weight - mean**2).clip(min=0))
            for name, *moments in zip(names, mean, deviation, strict=True):
                packing = choose_packing(*map(float, moments))
                packings[name] = {"scale_factor": packing.scale, "add_offset": packing.offset}
        return packings

    def write(self) -> None:
        """Write the missing parts, then mark the store as complete."""
        for leftover in self.target.rglob("*.partial"):  # of zarr, when a process is killed
            leftover.unlink()
        pending = [part for part in self.plan_parts() if not self.mark_of(part).exists()]
        run_parts([delayed(self.write_part)(part) for part in pending], self.options)
        group = self.group
        group.update_attributes({"complete": True})
        zarr.consolidate_metadata(group.store)
        shutil.rmtree(self.target / DONE)

    def mark_of(self, part: Part) -> Path:
        """Return the file that exists when a part is on the disk."""
        start, stop, names = part
        key = f"{start} {stop} {' '.join(names)}"
        return self.target / DONE / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def plan_parts(self) -> list[Part]:
        """Return the parts: one shard of dates of the variables that the source stores together."""
        first = self.group[array_name(self.names[0])]
        count, dates = first.shape[0], first.shards[0]
        most = max(1, PART_BYTES // (dates * self.largest_field))
        together = self.archive.group_by_array(self.names)
        groups = [names[i : i + most] for names in together for i in range(0, len(names), most)]
        return [(a, min(a + dates, count), names) for a in range(0, count, dates) for names in groups]

    def write_part(self, part: Part) -> None:
        """Read, check and write a part. Raises DataError."""
        start, stop, names = part
        dataset, group = xr.Dataset(), self.group
        times = group["time"][start:stop].astype("datetime64[s]")
        runs = consecutive(np.searchsorted(self.archive.times, times))
        fields = [self.fit(self.archive.read_block(run[0], run[-1] + 1, names)) for run in runs]
        values = np.concatenate(fields) if len(fields) > 1 else fields[0]
        for v, name in enumerate(names):
            attributes = group[array_name(name)].attrs
            if "scale_factor" in attributes:
                packing = Decoding(scale=attributes["scale_factor"], offset=attributes["add_offset"])
                for time, field in zip(times, values[:, v], strict=True):
                    check_packing(field, packing, f"{name} at {time}")
            dataset[array_name(name)] = AXES, values[:, v]
        dataset.to_zarr(self.target, region={"time": slice(start, stop)}, zarr_format=3, consolidated=False)
        write_durably(self.mark_of(part), "")


# -- processes


def run_parts(tasks: Sequence[Any], options: Namespace) -> None:
    """Run tasks of dask: in this process, in workers, or on a cluster.

    Raises what a task raises, RunFailed if a worker is lost, ConfigError if no scheduler answers.
    """
    # Processes, not threads: HDF5 has one lock per process, and packing needs Python's lock.
    scheduler = None if options.scheduler else "processes" if options.workers > 1 else "synchronous"
    ending: Any = {"multiprocessing.initializer": partial(_end_with, os.getpid())}
    try:
        with ExitStack() as stack:
            if options.scheduler:
                stack.enter_context(connect(options.scheduler))  # dask's scheduler from here on
            stack.enter_context(dask_config.set(ending))
            stack.enter_context(TqdmCallback(desc="conversion", unit="task", disable=None))
            dask.base.compute(*tasks, scheduler=scheduler, num_workers=options.workers, chunksize=1)
    except BrokenProcessPool:
        reason = "a worker was killed, perhaps because memory ran out: use fewer --workers"
        raise RunFailed(f"{reason}; the same command continues") from None


def _end_with(parent: int) -> None:
    """Make a worker end with its parent, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def connect(address: str) -> Any:
    """Return a client of dask.distributed. Raises ConfigError."""
    try:
        import distributed  # type: ignore[reportMissingImports]  # an extra

        return distributed.Client(address, timeout=20)
    except ImportError:
        refuse("--scheduler", address, 'needs the package distributed: pip install -e ".[distributed]"')
    except (OSError, ValueError) as error:
        refuse("--scheduler", address, f"no scheduler answers ({describe_error(error)}); start one")


def main(argv: list[str]) -> int:
    """Convert; return the exit code. Raises ConfigError, DataError, RunFailed."""
    options = parse(argv)
    if is_url(options.target):
        refuse("TARGET", options.target, "a local folder expected; upload the store when it is complete")
    check_target(Path(options.target), options.source)
    conversion = Conversion(options)
    with lock(conversion.target):
        conversion.run()
    return 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
