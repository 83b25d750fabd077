"""Convert analyses to a store for training: Zarr 3, a chunk for each date, float16 or float32.

    .venv/bin/python -m datasets.convert SOURCE TARGET
    .venv/bin/python -m datasets.convert era5/ era5.zarr --variables geopotential 2m_temperature --levels 500

If the command is killed, the same command continues; if SOURCE has got later dates, it appends them. A worker
needs about 3.5 GiB of memory at most. Exit codes: 0, 1 an error of the disk or a lost worker, 2 bad input.
"""

import ctypes
import fcntl
import json
import math
import os
import shutil
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dask.callbacks import Callback
from dask.delayed import delayed
from tqdm import tqdm
from zarr.codecs import BloscCodec, Crc32cCodec

from command_line import OneLineParser
from datasets.archive import Archive, open_archive
from datasets.dates import consecutive, is_inside
from datasets.fields import Decoding
from datasets.files import TRAINING_STORE, find_files
from datasets.grid import Grid, area_weights, global_grid
from datasets.options import check_region, check_selection, parse_selection
from datasets.remote import describe_error, is_url
from datasets.variables import expand_levels, named_by, split_name, units
from durable_files import append_whole
from errors import DataError, RunFailed, end_when_interrupted, one_line_errors, refuse, without_secrets

JOURNAL = "conversion.jsonl"  # while a conversion is not complete: a line for each part that is on the disk
SHARD_DATES, SHARD_BYTES, PART_BYTES, BLOCK_BYTES = 512, 2**28, 2**31, 2**28  # at most
SAMPLED_DATES = 16  # for scales and offsets of float16
LARGEST_RMS = 1 / 200  # error of a float16 field, in units of the scale
AXES = ("time", "latitude", "longitude")
SUMS, LARGEST = ("weight", "total", "squares", "missing_dates"), ("maximum", "largest_error")
OF_A_RUN = ("source", "period")  # that may differ when dates are appended
Part = tuple[int, int, list[str]]  # dates [start, stop) of some variables: at most a shard of each
Row = dict[str, Any]  # statistics of a variable
Done = Callable[[str, list[Row]], None]
# Zarr 3 does not specify consolidated metadata, and the journal is no array.
warnings.filterwarnings("ignore", message="Consolidated metadata|Object at .* is not recognized")


def parse(argv: list[str]) -> Namespace:
    """Return the options of the command line. Raises ConfigError."""
    parser = OneLineParser("datasets.convert", __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="file, folder, glob or URL, as data.path")
    add("target", metavar="TARGET", help="local folder, new or to be continued")
    add("--variables", nargs="+", default=[], metavar="NAME", help="default: all")
    add("--levels", nargs="+", type=int, default=[], metavar="HPA", help="of variables without a level")
    add("--static", nargs="*", metavar="NAME", help="constant fields; default: all")
    add("--period", nargs=2, default=[], metavar=("FIRST", "LAST"), help="dates, both included")
    add("--region", nargs=4, type=float, default=[], metavar=("NORTH", "WEST", "SOUTH", "EAST"))
    add("--grid", default="", metavar="HxW", help="regrid: 121x240 has rows on the poles, 32x64 has none")
    add("--method", choices=("conservative", "bilinear"), default="conservative", help="of regridding")
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
    known, levels, static = archive.variables, options.levels, options.static or []
    for level in levels:
        if all(split_name(name)[1] != level for name in known):
            refuse("--levels", level, f"{archive.path!r} has no variable on this level; name another")
    chosen = options.variables or [n for n in known if not levels or split_name(n)[1] in (None, *levels)]
    found = [each for name in expand_levels(chosen, levels) for each in named_by([name], known) or [name]]
    return [name for name in dict.fromkeys(found) if name not in static]


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
    """Raise ConfigError unless TARGET is a store of this module, or empty, and apart from SOURCE."""
    files = [] if is_url(source) else [source.removeprefix("file://"), *find_files(source)]
    for file in (Path(name).resolve() for name in files):
        if target.resolve().is_relative_to(file) or file.is_relative_to(target.resolve()):
            refuse("TARGET", str(target), f"it contains SOURCE {str(file)!r} or is inside it; name another")
    known = (target / JOURNAL).exists() or TRAINING_STORE in read_attributes(target)
    if target.exists() and not known and not (target.is_dir() and not any(target.iterdir())):
        refuse(
            "TARGET", str(target), "it exists and is no store of datasets.convert; name another or remove it"
        )


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
        reason = f"{str(folder)!r} cannot be written ({describe_error(error)})"
        raise RunFailed(f"TARGET {reason}; the same command continues when that is repaired") from None


# -- values


def choose_packing(mean: float, deviation: float) -> Decoding:
    """Return a scale that is a power of two near the deviation, and an offset near the mean."""
    if not (math.isfinite(mean) and math.isfinite(deviation)):
        return Decoding()
    scale = 2.0 ** round(math.log2(deviation or abs(mean) / 1024 or 1.0))
    return Decoding(scale=scale, offset=round(mean / scale) * scale)


def check_packing(values: np.ndarray, packing: Decoding) -> float:
    """Return the largest error of a field (H, W) in float16. Raises DataError if it is too large.

    It is at most 2^-11 |value - add_offset| + 2^-25 scale_factor + 2^-23 |value|.
    """
    exact = values[np.isfinite(values)].astype(np.float64)
    with np.errstate(over="ignore"):
        stored = ((exact - packing.offset) / packing.scale).astype(np.float16)  # as xarray packs
    error = np.abs(packing.decode(stored).astype(np.float32) - exact)
    rounding = 2.0**-23 * np.abs(exact)  # of the decoded float32
    allowed = 2.0**-11 * np.abs(exact - packing.offset) + 2.0**-25 * packing.scale + rounding
    rms = np.sqrt(np.square(error).sum() / max(1, error.size))
    if (error > allowed).any() or rms > LARGEST_RMS * packing.scale + rounding.max(initial=0):
        reason = f"its error in float16 of scale {packing.scale:g} is {error.max():g} (RMS {rms:g})"
        raise DataError(f"{reason}, which is too large; convert with --dtype float32")
    return float(error.max(initial=0))


def summarize(name: str, values: np.ndarray, area: np.ndarray, error: float = 0.0) -> Row:
    """Return the statistics of a field (H, W); area: weights (H, 1), error: the largest of float16."""
    finite = np.isfinite(values)
    weights, exact = area * finite, np.where(finite, values, 0).astype(np.float64)
    sums = [float((weights * power).sum()) for power in (1, exact, exact**2)]
    low, high = values.min(where=finite, initial=np.inf), values.max(where=finite, initial=-np.inf)
    row = dict(zip(SUMS, [*sums, int(not finite.any())], strict=True))
    return {"variable": name, **row, "minimum": float(low), "maximum": float(high), "largest_error": error}


def merge(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each variable, with its mean and standard deviation; NaN without a value."""
    merged: dict[str, Row] = {}
    for row in rows:
        name = row["variable"]
        one = merged.get(name, row)
        pairs = {key: (one[key], row[key]) for key in (*SUMS, "minimum", *LARGEST)}
        joined = {key: sum(pair) if key in SUMS else max(pair) for key, pair in pairs.items()}
        joined["minimum"] = min(pairs["minimum"])
        merged[name] = {"variable": name, **joined} if name in merged else dict(row)
    for row in merged.values():
        weight = row["weight"] or math.nan
        row["mean"] = row["total"] / weight
        variance = row["squares"] / weight - row["mean"] ** 2
        row["standard_deviation"] = math.sqrt(variance) if not variance < 0 else 0.0
    return list(merged.values())


def split_blocks(archive: Archive, names: Sequence[str], rows: np.ndarray) -> Iterator[slice]:
    """Yield slices of rows (n,) of archive.times that are consecutive and fit into BLOCK_BYTES."""
    most = max(1, BLOCK_BYTES // (4 * len(names) * math.prod(archive.grid.shape)))
    chunk = archive.time_chunk(names)
    most = most // chunk * chunk or most  # whole chunks of the source, where they fit
    start = 0
    for run in consecutive(rows):
        stop = start + len(run)
        for i in range(start, stop, most):
            yield slice(i, min(i + most, stop))
        start = stop


def find_packing(array: Any) -> Decoding | None:
    """Return the scale and offset of an array of float16, None for float32."""
    if array.dtype != np.float16:
        return None
    return Decoding(scale=array.attrs["scale_factor"], offset=array.attrs["add_offset"])


def array_name(variable: str) -> str:
    """Return "geopotential_500" for "geopotential:500"."""
    return variable.replace(":", "_")


def encoding_of(variable: xr.Variable) -> dict[str, Any]:
    """Return the chunks and codecs of an array; a shard has a power of two of dates."""
    if variable.ndim == 1:
        return {"chunks": (2**16,)} if variable.dims == ("time",) else {"_FillValue": None}
    shape, size = variable.shape[-2:], variable.dtype.itemsize
    codecs = [BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=size), Crc32cCodec()]
    dates = min(SHARD_DATES, 1 << (max(1, SHARD_BYTES // (size * math.prod(shape))).bit_length() - 1))
    chunks = {"chunks": (1, *shape), "shards": (dates, *shape)} if variable.ndim == 3 else {"chunks": shape}
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
            self.regridder = Regridder(self.archive.grid, self.grid, method=options.method)

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
        """Write the dates that the store lacks. Raises ConfigError, DataError, RunFailed."""
        if "options" not in read_attributes(self.target):
            self.create()
        group, complete = self.group, self.group.attrs["complete"]
        if "complete_dates" not in group.attrs:
            refuse("TARGET", str(self.target), "it is of an earlier version; convert to another folder")
        self.check_options(group, complete)
        before = group["time"][: group.attrs["complete_dates"]].astype("datetime64[s]")
        new = self.times[~np.isin(self.times, before)]
        if len(before) and len(new) and new[0] < before[-1]:
            reason = f"{str(self.target)!r} lacks its date {new[0]} and has {before[-1]}"
            refuse("SOURCE", self.options.source, f"{reason}: only later dates are appended; use --period")
        if complete and len(new):
            empty = {"minimum": math.inf, "maximum": -math.inf}  # of a variable without any value
            rows = [empty | dict(group[array_name(name)].attrs) for name in self.names]
            self.append_to_journal("before", rows)
        if not complete or len(new):
            group.update_attributes({"complete": False, "options": self.fixed_options()})
            self.write(np.concatenate([before, new]), len(before))
        print(f"{self.target}: complete, {len(before) + len(new)} dates of {len(self.names)} variables")

    def fixed_options(self) -> dict[str, Any]:
        """Return the options that may not differ when a conversion is continued."""
        source = self.options.source if is_url(self.options.source) else os.path.abspath(self.options.source)
        found = vars(self.options) | {"variables": self.names, "source": without_secrets(source)}
        return {key: found[key] for key in found if key not in ("target", "levels", "workers", "scheduler")}

    def check_options(self, group: Any, complete: bool) -> None:
        """Raise ConfigError for options or a grid with which the store was not begun."""
        for name, value in self.fixed_options().items():
            known = group.attrs["options"].get(name)
            if value != known and not (complete and name in OF_A_RUN):
                fix = f"{str(self.target)!r} was begun with {known!r}; use that, or another TARGET"
                refuse("SOURCE" if name == "source" else f"--{name}", value, fix)
        if not Grid(group["latitude"][:], group["longitude"][:]).same_as(self.grid):
            refuse("SOURCE", self.options.source, f"its grid is not that of {str(self.target)!r}; use --grid")

    def create(self) -> None:
        """Write a store without dates, after removal of what a killed attempt has left."""
        for path in self.target.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.target / JOURNAL).touch()
        dataset = xr.Dataset(attrs={TRAINING_STORE: 1, "complete": False, "complete_dates": 0})
        since = {"units": "seconds since 1970-01-01", "calendar": "proleptic_gregorian"}
        dataset["time"] = "time", np.empty(0, np.int64), since | {"standard_name": "time"}
        for name, unit in (("latitude", "degrees_north"), ("longitude", "degrees_east")):
            dataset[name] = name, getattr(self.grid, name), {"units": unit, "standard_name": name}
        packings = self.estimate_packings() if self.options.dtype == "float16" else {}
        empty = np.empty((0, *self.grid.shape), self.options.dtype)
        for name in self.names:
            attributes = {"variable": name, "units": self.archive.units(name), **packings.get(name, {})}
            dataset[array_name(name)] = AXES, empty, attributes
        static = self.options.static
        for name in self.archive.static_variables if static is None else static:
            field = self.fit(self.archive.read_static(name))
            dataset[array_name(name)] = AXES[1:], field, {"variable": name, "units": units(name)}
        encoding = {str(name): encoding_of(variable) for name, variable in dataset.variables.items()}
        dataset.to_zarr(self.target, mode="a", zarr_format=3, consolidated=False, encoding=encoding)
        self.group.update_attributes({"options": self.fixed_options()})

    def estimate_packings(self) -> dict[str, dict[str, float]]:
        """Return the scale and offset of each variable, from dates that are evenly spaced."""
        area, rows = area_weights(self.grid.latitude)[:, None], []
        for i in np.unique(np.linspace(0, len(self.times) - 1, SAMPLED_DATES).round().astype(int)):
            for names in self.archive.group_by_array(self.names):
                fields = self.fit(self.archive.read(self.archive.index(self.times[i]), names))
                rows += [summarize(name, field, area) for name, field in zip(names, fields, strict=True)]
        found = {
            row["variable"]: choose_packing(row["mean"], row["standard_deviation"]) for row in merge(rows)
        }
        return {name: {"scale_factor": each.scale, "add_offset": each.offset} for name, each in found.items()}

    def write(self, times: np.ndarray, start: int) -> None:
        """Write times[start:], the parts that are not in the journal, and the statistics of all dates."""
        group = self.group
        for leftover in self.target.rglob("*.partial"):  # of zarr, when a process is killed
            leftover.unlink()
        for name in ("time", *map(array_name, self.names)):
            group[name].resize((len(times), *group[name].shape[1:]))
        group["time"][start:] = times[start:].astype(np.int64)
        parts, done = self.plan_parts(times, start), read_journal(self.target / JOURNAL)
        pending = {key: part for key, part in parts.items() if key not in done}
        with tqdm(total=len(parts), initial=len(parts) - len(pending), unit="part", disable=None) as progress:

            def save(key: str, rows: list[Row]) -> None:
                self.append_to_journal(key, rows)
                done[key] = rows
                progress.update()

            run_parts(self.write_part, pending, self.options, save)
        self.finish([row for key in ("before", *parts) for row in done.get(key, [])])

    def append_to_journal(self, part: str, rows: Sequence[Row]) -> None:
        """Note that a part is on the disk."""
        append_whole(self.target / JOURNAL, json.dumps({"part": part, "rows": rows}) + "\n")

    def plan_parts(self, times: np.ndarray, start: int) -> dict[str, Part]:
        """Return the parts of times[start:]: a shard of variables that the source stores together."""
        shards = self.group[array_name(self.names[0])].shards
        dates, most = shards[0], max(1, PART_BYTES // (4 * math.prod(shards)))
        together = self.archive.group_by_array(self.names)
        groups = [names[i : i + most] for names in together for i in range(0, len(names), most)]
        cuts = [start, *range((start // dates + 1) * dates, len(times), dates), len(times)]
        parts = [(a, b, names) for a, b in zip(cuts[:-1], cuts[1:], strict=True) for names in groups]
        return {f"{times[a]} {times[b - 1]} {' '.join(names)}": (a, b, names) for a, b, names in parts}

    def write_part(self, part: Part) -> list[Row]:
        """Read, check and write a part; return the statistics of its variables. Raises DataError."""
        start, stop, names = part
        group, area, statistics = self.group, area_weights(self.grid.latitude)[:, None], []
        rows = np.array(
            [self.archive.index(time) for time in group["time"][start:stop].astype("datetime64[s]")]
        )
        packings = [find_packing(group[array_name(name)]) for name in names]
        values = np.empty((len(names), len(rows), *self.grid.shape), np.float32)
        for block in split_blocks(self.archive, names, rows):
            fields = self.fit(self.archive.read_block(rows[block][0], rows[block][-1] + 1, names))
            values[:, block] = fields.swapaxes(0, 1)
            for date, row in enumerate(rows[block]):
                for field, name, packing in zip(fields[date], names, packings, strict=True):
                    try:
                        error = check_packing(field, packing) if packing else 0.0
                    except DataError as problem:
                        raise DataError(f"{name} at {self.archive.times[row]}: {problem}") from None
                    statistics.append(summarize(name, field, area, error))
        dataset = xr.Dataset({array_name(name): (AXES, values[v]) for v, name in enumerate(names)})
        dataset.to_zarr(self.target, region={"time": slice(start, stop)}, zarr_format=3, consolidated=False)
        return merge(statistics)

    def finish(self, rows: Sequence[Row]) -> None:
        """Write the statistics of all dates, and that the store is complete."""
        group = self.group
        for row in merge(rows):
            numbers = {key: value for key, value in row.items() if key == "variable" or math.isfinite(value)}
            group[array_name(row["variable"])].update_attributes(numbers)
        sources = [*group.attrs.get("sources", []), self.fixed_options()["source"]]
        dates = {"complete_dates": group["time"].shape[0], "sources": list(dict.fromkeys(sources))}
        group.update_attributes({"complete": True, **dates})
        zarr.consolidate_metadata(group.store)
        (self.target / JOURNAL).unlink()


def read_journal(path: Path) -> dict[str, list[Row]]:
    """Return the statistics of the parts that are done; a line that was cut short does not count."""
    whole, _, rest = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    if rest:
        path.write_text(whole + "\n" * bool(whole))
    return {line["part"]: line["rows"] for line in map(json.loads, whole.splitlines())}


# -- processes


class _Report(Callback):
    """Calls `done(key, rows)` in this process for each task of dask that has ended."""

    def __init__(self, done: Done) -> None:
        super().__init__()
        self.done = done

    def _posttask(self, key: Any, result: Any, *_: Any) -> None:
        self.done(key, result)


def run_parts(
    work: Callable[[Part], list[Row]], parts: Mapping[str, Part], options: Namespace, done: Done
) -> None:
    """Run work(part) for each part by dask: in this process, in workers, or on a cluster.

    Raises what the work raises, RunFailed if a worker is lost, ConfigError if no scheduler answers.
    """
    tasks = [delayed(work, pure=False)(part, dask_key_name=key) for key, part in parts.items()]
    if options.scheduler:
        return _run_on_cluster(tasks, options.scheduler, done)
    # Processes, not threads: HDF5 has one lock for all of a process, and packing needs Python's.
    scheduler = "processes" if options.workers > 1 else "synchronous"
    ending: Any = {"multiprocessing.initializer": partial(_end_with, os.getpid())}
    try:
        with _Report(done), dask_config.set(ending):
            dask.base.compute(*tasks, scheduler=scheduler, num_workers=options.workers, chunksize=1)
    except BrokenProcessPool:
        reason = "a worker was killed, perhaps because memory ran out: use fewer --workers"
        raise RunFailed(f"{reason}; the same command continues") from None


def _end_with(parent: int) -> None:
    """Make a worker end with its parent, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _run_on_cluster(tasks: Sequence[Any], address: str, done: Done) -> None:
    try:
        import distributed  # type: ignore[reportMissingImports]  # an extra

        client = distributed.Client(address, timeout=20)
    except ImportError:
        refuse("--scheduler", address, 'needs the package distributed: pip install -e ".[distributed]"')
    except (OSError, ValueError) as error:
        refuse("--scheduler", address, f"no scheduler answers ({describe_error(error)}); start one")
    with client:
        for future, rows in distributed.as_completed(client.compute(list(tasks)), with_results=True):
            done(future.key, rows)


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
    end_when_interrupted()
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
