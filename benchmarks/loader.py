"""Reading of batches against the codec alone and zarr-python.

    .venv/bin/python benchmarks/loader.py [words] [--rounds 3] [--quick]

Training stores of made-up fields, 17 x 1024 x 2048 as float16 and 20 x 181 x 360 as float32, read at random
dates with a warm page cache by two threads, with memory retained as train.py does: the codec alone (lz4 of
blosc, bit shuffle), zarr-python, Rossby. GB/s are of decoded numbers as Rossby stores them; "processor": the
share of the codec by the time of processors, which other programs disturb less; all take turns, medians.
Words choose rows: "float16", "180". 4 GB below --scratch, 20 minutes; --quick: small, nothing recorded.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import xarray as xr
import zarr
from numcodecs import Blosc

from benchmarks.results_file import in_turns, parse, record, table
from datasets.archive import archive_of_dataset, open_archive
from datasets.convert import Conversion, Request
from datasets.field_dataset import FieldDataset
from datasets.loader import EvaluationSampler, Loader
from training.process_settings import retain_memory

THREADS, BATCH, STARTING, DATES = 2, 4, 3, 96  # threads; dates of a batch; batches of a start; dates read
DIMS = ("time", "latitude", "longitude")
Read = Callable[[np.ndarray], np.ndarray]  # these dates, in this order -> GB/s of either clock


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


LARGE = Shape("17 x 1024 x 2048 float16", 17, (1024, 2048), "f2", 24)
SMALL = Shape("20 x 181 x 360 float32", 20, (181, 360), "f4", 192)
QUICK = (Shape("4 x 512 x 1024", 4, (512, 1024), "f2", 24), Shape("6 x 91 x 180", 6, (91, 180), "f4", 48))


def weather(shape: Shape, date: int, variable: int) -> np.ndarray:
    """Return (H, W): waves that move, and noise; near 0, as packed fields are."""
    y, x = (np.linspace(0, 2 * np.pi, n) for n in shape.grid)
    y = y[:, None]
    noise = np.random.default_rng(1000 * variable + date).normal(size=shape.grid)
    waves = np.sin(3 * y + variable) * np.cos(5 * x + 0.3 * date) + 0.3 * np.sin(17 * x + 9 * y)
    return (waves + 0.01 * noise).astype(shape.dtype)


def readers(path: Path, shape: Shape) -> dict[str, Read]:
    """Write the fields as datasets.convert does, in shards of 24 dates, and return ways to read them."""
    height, width = shape.grid
    times = np.datetime64("2000-01-01", "ns") + np.arange(shape.dates) * np.timedelta64(6, "h")
    places = 90 - (np.arange(height) + 0.5) * 180 / height, np.arange(width) * 360 / width
    coords = dict(zip(DIMS, (times, *places), strict=True))
    fields = {
        name: (DIMS, np.stack([weather(shape, date, number) for date in range(shape.dates)]).astype("f4"))
        for number, name in enumerate(shape.names)
    }
    source = archive_of_dataset("memory://loader", xr.Dataset(fields, coords))
    dtype = {"f2": "float16", "f4": "float32"}[shape.dtype]
    Conversion(Request(("memory://loader",), dtype=dtype), path, source).run()

    def clocks() -> np.ndarray:
        """Return the seconds of the wall's clock, and those that processors have spent on this process."""
        return np.array([time.perf_counter(), time.process_time()])

    def rate(number: int, started: np.ndarray) -> np.ndarray:
        date_bytes = shape.variables * height * width * np.dtype(shape.dtype).itemsize
        return number * date_bytes / (clocks() - started) / 1e9

    # The codec alone decodes chunks that are in memory by as many threads, into one piece of memory each.
    root: Any = zarr.open_group(str(path), mode="r")
    packer = Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)
    arrays = [root[name.replace(":", "_")] for name in shape.names]
    packed = [[packer.encode(array[date]) for date in range(shape.dates)] for array in arrays]
    outs = [np.empty(shape.grid, shape.dtype) for _ in range(THREADS)]

    def decode(part: int, dates: np.ndarray) -> None:
        for date in dates:
            for chunks in packed[part::THREADS]:
                packer.decode(chunks[date], out=outs[part])

    def codec_alone(dates: np.ndarray) -> np.ndarray:
        started = clocks()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(decode, range(THREADS), [dates] * THREADS))
        return rate(len(dates), started)

    def zarr_python(dates: np.ndarray) -> np.ndarray:
        started = clocks()
        for date in dates:
            np.stack([array[int(date)] for array in arrays])
        return rate(len(dates), started)

    dataset = FieldDataset(open_archive(str(path)), shape.names, np.arange(shape.dates)[:, None])
    sampler = EvaluationSampler(shape.dates, BATCH, 0, 1)
    loader = Loader(dataset, sampler, THREADS)

    def rossby(dates: np.ndarray) -> np.ndarray:
        sampler.batches[:] = [part.tolist() for part in np.array_split(dates, len(dates) // BATCH)]
        started = clocks()
        for number, _ in enumerate(loader, 1):
            if number == STARTING:  # a start is not what is measured
                started = clocks()
        return rate(len(dates) - STARTING * BATCH, started)

    return {"codec alone": codec_alone, "zarr-python": zarr_python, "rossby": rossby}


def main() -> int:
    options = parse(__doc__, words=(), rounds=3, quick=False, scratch="")
    torch.set_num_threads(1)
    retain_memory(torch.device("cpu"))
    rows = []
    for shape in QUICK if options.quick else (LARGE, SMALL):
        if not {*options.words} - {"read"} <= {*shape.name.split()}:
            continue
        with tempfile.TemporaryDirectory(dir=options.scratch or None) as scratch:
            path, rng = Path(scratch) / "store.zarr", np.random.default_rng(0)
            draw = partial(rng.integers, 0, shape.dates, DATES)
            ways = {name: lambda read=read: read(draw()) for name, read in readers(path, shape).items()}  # noqa: B023
            rates = in_turns(options.rounds, ways)
        pairs = zip(rates["rossby"], rates["codec alone"], strict=True)
        medians = {name: statistics.median(values[0] for values in both) for name, both in rates.items()}
        row: dict[str, Any] = {"store": shape.name, "codec": "lz4"} | medians
        row["of the codec"], row["processor"] = np.median([a / b for a, b in pairs], axis=0).tolist()
        row["x zarr"] = medians["rossby"] / medians["zarr-python"]
        rows.append(row)
        print(rows[-1], flush=True)
    if not options.quick:
        record("loader", rows, ("zarr", "numcodecs"))
    columns = ("store", "codec alone", "zarr-python", "rossby", "of the codec", "processor", "x zarr")
    print(f"\nGB/s decoded\n{table(rows, *columns)}" if rows else "no row has these words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
