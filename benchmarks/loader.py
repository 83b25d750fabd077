"""Reading of batches against the codec and other readers, and of a run against fields in memory.

    .venv/bin/python benchmarks/loader.py [words] [--rounds 3] [--quick]
    .venv/bin/python benchmarks/loader.py training [--rounds 3] [--steps 100]

The first: archives of simulated fields, 17 x 1024 x 2048 as float16 and 20 x 181 x 360 as float32, each with
lz4 and zstd (blosc, bit shuffle) and chunks of 1 and 24 dates, read at random dates with a warm page cache by
two threads or processes, with memory retained as train.py does: the codec alone, zarr-python, Rossby. GB/s
are of decoded numbers as they are stored; "processor": the share of the codec by the time of processors,
which other programs disturb less; all take turns, medians.
Words choose rows: "float16" "lz4" "1". 8 GB below --scratch, 30 minutes; --quick: small, nothing recorded.

training: train.py on 20 x 180 x 360 float32 with validations, from the store by one reading thread, and from
memory (data.cache_gib); the model computes with one thread. It ends with 1 where losses are not the same.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import tomli_w
import torch
import zarr
from numcodecs import Blosc
from zarr.codecs import BloscCodec, BloscShuffle, Crc32cCodec

from benchmarks.results_file import in_turns, parse, record, require, table
from datasets.archive import open_archive
from datasets.field_dataset import FieldDataset
from datasets.loader import EvaluationSampler, build_loader
from tests.started_jobs import Job, losses, records
from training.process_settings import retain_memory

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
THREADS, BATCH, STARTING = 2, 4, 3
DIMS = ("time", "latitude", "longitude")


@dataclass(frozen=True)
class Shape:
    name: str
    variables: int
    grid: tuple[int, int]
    dtype: str
    dates: int

    @property
    def names(self) -> list[str]:
        return [f"temperature:{1000 - 10 * number}" for number in range(self.variables)]

    @property
    def date_bytes(self) -> int:
        return self.variables * self.grid[0] * self.grid[1] * np.dtype(self.dtype).itemsize


LARGE = Shape("17 x 1024 x 2048 float16", 17, (1024, 2048), "f2", 24)
SMALL = Shape("20 x 181 x 360 float32", 20, (181, 360), "f4", 192)
QUICK = (Shape("4 x 512 x 1024", 4, (512, 1024), "f2", 24), Shape("6 x 91 x 180", 6, (91, 180), "f4", 48))
Read = Callable[[np.ndarray], None]  # these dates, in this order


def weather(shape: Shape, date: int, variable: int) -> np.ndarray:
    """Return (H, W): waves that move, and noise; near 0, as packed fields are."""
    y, x = (np.linspace(0, 2 * np.pi, n) for n in shape.grid)
    y = y[:, None]
    noise = np.random.default_rng(1000 * variable + date).normal(size=shape.grid)
    waves = np.sin(3 * y + variable) * np.cos(5 * x + 0.3 * date) + 0.3 * np.sin(17 * x + 9 * y)
    return (waves + 0.01 * noise).astype(shape.dtype)


def write_zarr(path: Path, shape: Shape, codec: str, dates_a_chunk: int) -> None:
    """Write as datasets.convert does with a date a chunk: in shards, with checksums; else as others do."""
    ours = {"rossby_training_store": 1, "complete": True}
    root = zarr.open_group(str(path), mode="w", zarr_format=3, attributes=ours)
    codecs: list[Any] = [BloscCodec(cname=codec, clevel=5, shuffle=BloscShuffle.bitshuffle)]  # type: ignore[arg-type]
    about: dict[str, Any] = {"shape": (shape.dates, *shape.grid), "chunks": (dates_a_chunk, *shape.grid)}
    about |= {"dtype": shape.dtype, "fill_value": np.nan, "dimension_names": DIMS}
    if dates_a_chunk == 1:
        codecs, about["shards"] = [*codecs, Crc32cCodec()], (min(shape.dates, 24), *shape.grid)
    for number, name in enumerate(shape.names):
        own: Any = {"variable": name}
        array = root.create_array(name.replace(":", "_"), compressors=codecs, attributes=own, **about)
        for first in range(0, shape.dates, 24):
            dates = range(first, min(first + 24, shape.dates))
            array[first : first + 24] = np.stack([weather(shape, date, number) for date in dates])
    height, width = shape.grid
    places = (90 - (np.arange(height) + 0.5) * 180 / height, np.arange(width) * 360 / width)
    for dim, values in zip(DIMS, (6 * np.arange(shape.dates), *places), strict=True):
        units: dict[str, Any] = {"units": "hours since 2000-01-01"} if dim == "time" else {}
        root.create_array(dim, data=values, dimension_names=(dim,), attributes=units)


def codec_alone(path: Path, shape: Shape, codec: str) -> Read:
    """Decode chunks that are in memory by as many threads, into one piece of memory each."""
    root: Any = zarr.open_group(str(path), mode="r")
    packer = Blosc(cname=codec, clevel=5, shuffle=Blosc.BITSHUFFLE)
    arrays = [root[name.replace(":", "_")] for name in shape.names]
    dates_a_chunk = arrays[0].chunks[0]
    firsts = range(0, shape.dates, dates_a_chunk)
    packed = [[packer.encode(array[first : first + dates_a_chunk]) for first in firsts] for array in arrays]
    outs = [np.empty((dates_a_chunk, *shape.grid), shape.dtype) for _ in range(THREADS)]

    def decode(part: int, dates: np.ndarray) -> None:
        for date in dates:
            for chunks in packed[part::THREADS]:
                packer.decode(chunks[date // dates_a_chunk], out=outs[part])

    def read(dates: np.ndarray) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(decode, range(THREADS), [dates] * THREADS))

    return read


def zarr_python(path: Path, shape: Shape) -> Read:
    root: Any = zarr.open_group(str(path), mode="r")
    arrays = [root[name.replace(":", "_")] for name in shape.names]

    def read(dates: np.ndarray) -> None:
        for date in dates:
            np.stack([array[int(date)] for array in arrays])

    return read


def rossby(path: Path, shape: Shape) -> Read:
    dataset = FieldDataset(open_archive(str(path)), shape.names, np.arange(shape.dates)[:, None])
    sampler = EvaluationSampler(shape.dates, BATCH, 0, 1)
    loader = build_loader(dataset, sampler, THREADS, 2)

    def read(dates: np.ndarray) -> None:
        sampler.batches[:] = [part.tolist() for part in np.array_split(dates, len(dates) // BATCH)]
        for number, _ in enumerate(loader):
            if number == STARTING - 1:  # a start is not what is measured
                read.started = clocks()

    return read


def clocks() -> np.ndarray:
    """Return the seconds of the wall's clock, and those that processors have spent on this process."""
    return np.array([time.perf_counter(), time.process_time()])


def rate(read: Any, shape: Shape, dates: np.ndarray) -> np.ndarray:
    """Return GB a second of either clock."""
    started = read.started = clocks()
    read(dates)
    seconds = clocks() - read.started
    counted = len(dates) - STARTING * BATCH * (started is not read.started)
    return counted * shape.date_bytes / seconds / 1e9


def measure(scratch: Path, shape: Shape, codec: str, dates_a_chunk: int, rounds: int) -> dict[str, Any]:
    path = scratch / "store.zarr"
    write_zarr(path, shape, codec, dates_a_chunk)
    readers = {
        "codec alone": codec_alone(path, shape, codec),
        "zarr-python": zarr_python(path, shape),
        "rossby": rossby(path, shape),
    }
    rng, few = np.random.default_rng(0), 24 if dates_a_chunk > 1 else 96
    draw = lambda: rng.integers(0, shape.dates, few)  # noqa: E731
    rates = {name: lambda read=read: rate(read, shape, draw()) for name, read in readers.items()}
    found = in_turns(rounds, rates)
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    pairs = zip(found["rossby"], found["codec alone"], strict=True)
    row = {"store": shape.name, "codec": codec, "dates a chunk": dates_a_chunk}
    row |= (medians := {name: float(np.median(rates, axis=0)[0]) for name, rates in found.items()})
    row["of the codec"], row["processor"] = np.median([a / b for a, b in pairs], axis=0).tolist()
    row["x zarr"] = medians["rossby"] / medians["zarr-python"]
    return row | {"ratio": shape.dates * shape.date_bytes / stored}


def measure_readers(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    retain_memory(torch.device("cpu"))
    rows, words = [], {word for word in options.words if word != "read"}
    for shape in QUICK if options.quick else (LARGE, SMALL):
        for codec, dates in (("lz4", 1), ("lz4", 24), ("zstd", 1), ("zstd", 24)):
            if words <= {*shape.name.split(), codec, str(dates)}:
                with tempfile.TemporaryDirectory(dir=options.scratch or None) as scratch:
                    rows.append(measure(Path(scratch), shape, codec, dates, options.rounds))
                print(rows[-1], flush=True)
    if not options.quick:
        record("loader", rows, ("zarr", "numcodecs"))
    columns = {"store": "<26", "codec": ">6", "dates a chunk": ">14", "codec alone": ">12.2f"}
    columns |= {
        "zarr-python": ">12.2f",
        "rossby": ">8.2f",
        "of the codec": ">13.0%",
        "processor": ">10.0%",
        "x zarr": ">8.1f",
    }
    print(f"\nGB/s decoded\n{table(rows, **columns)}" if rows else "no row has these words")
    return 0


TRAINED = Shape("20 x 180 x 360 float32", 20, (180, 360), "f4", 192)
WAYS = {"from the store": "0", "from memory": "8"}  # data.cache_gib


def measure_training(options: argparse.Namespace) -> int:
    require(options.steps, 41, "steps, of which those after 20 and the validations after the first count")
    with tempfile.TemporaryDirectory() as text:
        write_zarr(Path(text) / "store.zarr", TRAINED, "lz4", 1)
        config = Path(text) / "run.toml"
        LISTS["run"]["data"] |= {"path": f"{text}/store.zarr", "variables": TRAINED.names}
        config.write_text(tomli_w.dumps(LISTS["run"]))
        numbers = itertools.count()
        start = lambda cache: run(config, Path(text, f"{next(numbers)}"), cache, options.steps)  # noqa: E731
        ways = {way: partial(start, cache) for way, cache in WAYS.items()}
        found = in_turns(options.rounds, ways)
    store, memory = found.values()
    slower = statistics.median(a["seconds"] / b["seconds"] - 1 for a, b in zip(store, memory, strict=True))
    same = all(each["losses"] == store[0]["losses"] for each in store + memory)
    keys = ("step", "wait", "validation")
    medians = {way: {k: statistics.median(each[k] for each in found[way]) for k in keys} for way in WAYS}
    record("loader_training", [{"slower": slower, "same_losses": same, **medians}])
    rows = [{"fields": way} | each for way, each in medians.items()]
    print(table(rows, fields="<16", step=">12.4f", wait=">12.4f", validation=">12.4f"))
    print(f"from the store is {slower:+.1%} slower; losses are {'the same' if same else 'NOT THE SAME'}")
    return 0 if same else 1


def run(config: Path, folder: Path, cache_gib: str, steps: int) -> dict[str, Any]:
    """Return the seconds of all steps but the first 20, and of the validations among them."""
    job = Job(config, folder, "--data.cache_gib", cache_gib, "--training.steps", str(steps), NGPU="1")
    assert job.end(3600) == 0, job.output
    rows = records(folder)
    later = [each for each in rows if "step_seconds" in each and each["step"] > 20]
    taken = [each["step_seconds"] for each in later]
    validations = [each["validation_seconds"] for each in rows if "validation_seconds" in each][1:]
    medians = {"step": statistics.median(taken), "validation": statistics.median(validations)}
    medians["wait"] = statistics.median(each["data_seconds"] for each in later)
    return {"seconds": 10 * sum(taken) + sum(validations), "losses": losses(folder), **medians}


def main() -> int:
    options = parse(__doc__, words=(), rounds=3, quick=False, scratch="", steps=100)
    return measure_training(options) if options.words == ["training"] else measure_readers(options)


if __name__ == "__main__":
    sys.exit(main())
