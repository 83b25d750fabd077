"""Reading of batches against the codec and zarr-python, and training from a store against fields in memory.

    .venv/bin/python benchmarks/loader.py [words] [--rounds 3] [--quick]
    .venv/bin/python benchmarks/loader.py training [--rounds 3] [--steps 100]

The first: training stores of made-up fields, 17 x 1024 x 2048 as float16 and 20 x 181 x 360 as float32,
read at random dates with a warm page cache by two threads, with memory retained as train.py does: the codec
alone (lz4 of blosc, bit shuffle), zarr-python, zarr-beluga where it is installed, Rossby. zarr-beluga reads
the dates of an epoch in a known order, from a store of WeatherBench2's layout in float32 (it has no float16),
and gives samples, not batches. GB/s are of decoded numbers as Rossby stores them;
"processor": the share of the codec by the time of processors, which other programs disturb less; all take
turns, medians. Words choose rows: "float16", "180". 4 GB below --scratch, 20 minutes; --quick: small,
nothing recorded.

training: train.py on 20 x 180 x 360 float32 with validations, from the store by one reading thread, and
with fields that stay in memory once they are read; the model computes with one thread. It ends with 1 where
losses are not the same.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import tomli_w
import torch
import xarray as xr
import zarr
from numcodecs import Blosc

from benchmarks.results_file import in_turns, parse, record, require, table
from datasets.archive import TrainingStore, archive_of_dataset, open_archive
from datasets.convert import Conversion, Request
from datasets.field_dataset import FieldDataset
from datasets.loader import EvaluationSampler, Loader
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


def write_store(path: Path, shape: Shape) -> None:
    """Write the fields as datasets.convert does, in shards of 24 dates."""
    height, width = shape.grid
    times = np.datetime64("2000-01-01", "ns") + np.arange(shape.dates) * np.timedelta64(6, "h")
    places = 90 - (np.arange(height) + 0.5) * 180 / height, np.arange(width) * 360 / width
    coords = dict(zip(DIMS, (times, *places), strict=True))
    dtype = {"f2": "float16", "f4": "float32"}[shape.dtype]
    fields = {
        name: (DIMS, np.stack([weather(shape, date, number) for date in range(shape.dates)]).astype("f4"))
        for number, name in enumerate(shape.names)
    }
    source = archive_of_dataset("memory://loader", xr.Dataset(fields, coords))
    Conversion(Request(("memory://loader",), dtype=dtype), path, source).run()


def codec_alone(path: Path, shape: Shape) -> Read:
    """Decode chunks that are in memory by as many threads, into one piece of memory each."""
    root: Any = zarr.open_group(str(path), mode="r")
    packer = Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)
    arrays = [root[name.replace(":", "_")] for name in shape.names]
    packed = [[packer.encode(array[date]) for date in range(shape.dates)] for array in arrays]
    outs = [np.empty(shape.grid, shape.dtype) for _ in range(THREADS)]

    def decode(part: int, dates: np.ndarray) -> None:
        for date in dates:
            for chunks in packed[part::THREADS]:
                packer.decode(chunks[date], out=outs[part])

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
    loader = Loader(dataset, sampler, THREADS)

    def read(dates: np.ndarray) -> None:
        sampler.batches[:] = [part.tolist() for part in np.array_split(dates, len(dates) // BATCH)]
        for number, _ in enumerate(loader):
            if number == STARTING - 1:  # a start is not what is measured
                read.started = clocks()

    return read


def zarr_beluga(path: Path, shape: Shape) -> Read | None:
    """Read float32 of WeatherBench2's layout, one chunk a date, which suits it; None where it is absent."""
    try:
        import beluga  # type: ignore[reportMissingImports]  # pip install zarr-beluga
    except ImportError:
        return None
    target = path.with_name("weatherbench.zarr")
    height, width = shape.grid
    fields = np.stack(
        [[weather(shape, date, number) for number in range(shape.variables)] for date in range(shape.dates)]
    )
    coords = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(shape.dates) * np.timedelta64(6, "h"),
        "level": np.arange(shape.variables),
        "latitude": 90 - (np.arange(height) + 0.5) * 180 / height,
        "longitude": np.arange(width) * 360 / width,
    }
    ds = xr.Dataset({"temperature": (tuple(coords), fields.astype("f4"))}, coords)
    packer = Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)
    encoding = {"temperature": {"chunks": (1, *fields.shape[1:]), "compressors": [packer]}}
    ds.to_zarr(target, zarr_format=2, encoding=encoding, consolidated=True)
    options = {"variables": ["temperature"], "sched": {"decode_threads": THREADS}}
    reader = beluga.open_zarr_group(str(target.parent), target.name, **options)

    def read(dates: np.ndarray) -> None:
        for number, sample in enumerate(reader.stream(dates.tolist(), frames=1), 1):
            torch.from_dlpack(sample)
            if number == STARTING * BATCH:
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


def measure(scratch: Path, shape: Shape, rounds: int) -> dict[str, Any]:
    path = scratch / "store.zarr"
    write_store(path, shape)
    readers = {
        "codec alone": codec_alone(path, shape),
        "zarr-python": zarr_python(path, shape),
        "zarr-beluga": zarr_beluga(path, shape),
        "rossby": rossby(path, shape),
    }
    readers = {name: reader for name, reader in readers.items() if reader}
    rng = np.random.default_rng(0)
    rates = {
        name: lambda read=read: rate(read, shape, rng.integers(0, shape.dates, 96))
        for name, read in readers.items()
    }
    by_reader = in_turns(rounds, rates)
    stored = sum(file.stat().st_size for file in path.glob("temperature*/**/*") if file.is_file())
    pairs = zip(by_reader["rossby"], by_reader["codec alone"], strict=True)
    row: dict[str, Any] = {"store": shape.name, "codec": "lz4"}
    row |= (medians := {name: float(np.median(values, axis=0)[0]) for name, values in by_reader.items()})
    row["of the codec"], row["processor"] = np.median([a / b for a, b in pairs], axis=0).tolist()
    row["x zarr"] = medians["rossby"] / medians["zarr-python"]
    return row | {"ratio": shape.dates * shape.date_bytes / stored}


def measure_readers(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    retain_memory(torch.device("cpu"))
    rows, words = [], {word for word in options.words if word != "read"}
    for shape in QUICK if options.quick else (LARGE, SMALL):
        if words <= {*shape.name.split()}:
            with tempfile.TemporaryDirectory(dir=options.scratch or None) as scratch:
                rows.append(measure(Path(scratch), shape, options.rounds))
            print(rows[-1], flush=True)
    if not options.quick:
        record("loader", rows, ("zarr", "numcodecs"))
    columns = {"store": "<26", "codec": ">6", "codec alone": ">12.2f"}
    columns |= {
        "zarr-python": ">12.2f",
        **({"zarr-beluga": ">12.2f"} if rows and "zarr-beluga" in rows[0] else {}),
        "rossby": ">8.2f",
        "of the codec": ">13.0%",
        "processor": ">10.0%",
        "x zarr": ">8.1f",
    }
    print(f"\nGB/s decoded\n{table(rows, **columns)}" if rows else "no row has these words")
    return 0


TRAINED = Shape("20 x 180 x 360 float32", 20, (180, 360), "f4", 192)
WAYS = {"from the store": "train", "from memory": "train_in_memory"}


def train_in_memory(argv: list[str]) -> int:
    """Train with each field in memory once it has been read."""
    import train

    fill, fields = TrainingStore.fill, dict[int, np.ndarray]()

    def fill_once(self: TrainingStore, date: int, variables: Sequence[str], out: np.ndarray) -> None:
        if date not in fields:
            fill(self, date, variables, out)
            fields[date] = out.copy()
        out[...] = fields[date]

    TrainingStore.fill = fill_once
    sys.argv[1:] = argv
    train.main()
    return 0


def measure_training(options: argparse.Namespace) -> int:
    require(options.steps, 41, "steps, of which those after 20 and the validations after the first count")
    with tempfile.TemporaryDirectory() as text:
        write_store(Path(text) / "store.zarr", TRAINED)
        config = Path(text) / "run.toml"
        LISTS["run"]["data"] |= {"path": f"{text}/store.zarr", "variables": TRAINED.names}
        config.write_text(tomli_w.dumps(LISTS["run"]))
        numbers = itertools.count()
        start = lambda way: run(config, Path(text, f"{next(numbers)}"), way, options.steps)  # noqa: E731
        ways = {name: partial(start, way) for name, way in WAYS.items()}
        by_way = in_turns(options.rounds, ways)
    store, memory = by_way.values()
    slower = statistics.median(a["seconds"] / b["seconds"] - 1 for a, b in zip(store, memory, strict=True))
    same = all(row["losses"] == store[0]["losses"] for row in store + memory)
    keys = ("step", "wait", "validation")
    medians = {way: {k: statistics.median(row[k] for row in by_way[way]) for k in keys} for way in WAYS}
    record("loader_training", [{"slower": slower, "same_losses": same, **medians}])
    rows = [{"fields": way} | values for way, values in medians.items()]
    print(table(rows, fields="<16", step=">12.4f", wait=">12.4f", validation=">12.4f"))
    same_text = "the same" if same else "NOT THE SAME"
    print(f"from the store a run takes {1 + slower:.3f} x the time from memory; losses are {same_text}")
    return 0 if same else 1


def run(config: Path, folder: Path, way: str, steps: int) -> dict[str, Any]:
    """Return the seconds of all steps but the first 20, and of the validations among them."""
    command = None if way == "train" else [sys.executable, __file__, way]
    job = Job(config, folder, "--training.steps", str(steps), command=command, NGPU="1")
    assert job.end(3600) == 0, job.output
    rows = records(folder)
    later = [row for row in rows if "step_seconds" in row and row["step"] > 20]
    seconds = [row["step_seconds"] for row in later]
    validations = [row["validation_seconds"] for row in rows if "validation_seconds" in row][1:]
    medians = {"step": statistics.median(seconds), "validation": statistics.median(validations)}
    medians["wait"] = statistics.median(row["data_seconds"] for row in later)
    return {"seconds": 10 * sum(seconds) + sum(validations), "losses": losses(folder), **medians}


def main() -> int:
    if sys.argv[1:2] == ["train_in_memory"]:
        return train_in_memory(sys.argv[2:])
    options = parse(__doc__, words=(), rounds=3, quick=False, scratch="", steps=100)
    return measure_training(options) if options.words == ["training"] else measure_readers(options)


if __name__ == "__main__":
    sys.exit(main())
