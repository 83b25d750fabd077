"""Reading of batches into the memory of a device, against the codec alone.

    .venv/bin/python benchmarks/loader.py [--rounds 3] [--quick]

Training stores of made-up fields, 17 x 1024 x 2048 as float16 and 20 x 181 x 360 as float32, read at random
dates with a warm page cache by two threads, with memory retained as train.py does: the codec alone (lz4 of
blosc, bit shuffle) and Rossby. GB/s are of decoded numbers as Rossby stores them; both take turns, medians.
4 GB below --scratch, ten minutes; --quick: small, nothing recorded.
"""

import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import xarray as xr
import zarr
from numcodecs import Blosc

from benchmarks.results_file import clock, in_turns, parse, record, table
from datasets.archive import archive_of_dataset, open_archive
from datasets.convert import Conversion, Request
from datasets.loader import FieldDataset, Loader, evaluation_batches
from training.process_settings import retain_memory

BATCH = 4  # dates
DIMS = ("time", "latitude", "longitude")


@dataclass(frozen=True)
class Shape:
    variables: int
    grid: tuple[int, int]
    dtype: str
    dates: int

    @property
    def name(self) -> str:
        return f"{self.variables} x {self.grid[0]} x {self.grid[1]} {self.dtype}"

    @property
    def date_bytes(self) -> int:
        return self.variables * self.grid[0] * self.grid[1] * np.dtype(self.dtype).itemsize


LARGE, SMALL = Shape(17, (1024, 2048), "float16", 24), Shape(20, (181, 360), "float32", 192)
QUICK = Shape(4, (512, 1024), "float16", 24), Shape(6, (91, 180), "float32", 48)


def weather(shape: Shape, date: int, variable: int) -> np.ndarray:
    """Return (H, W): waves that move, and noise; near 0, as packed fields are."""
    y, x = (np.linspace(0, 2 * np.pi, n) for n in shape.grid)
    y = y[:, None]
    noise = np.random.default_rng(1000 * variable + date).normal(size=shape.grid)
    waves = np.sin(3 * y + variable) * np.cos(5 * x + 0.3 * date) + 0.3 * np.sin(17 * x + 9 * y)
    return (waves + 0.01 * noise).astype(shape.dtype)


def measure(
    path: Path, shape: Shape, threads: int, device: torch.device, rounds: int, dates: int = 96
) -> dict[str, list[float]]:
    """Return GB/s of the codec alone and of Rossby, round by round, of so many dates.

    Fields are written to `path` as datasets.convert does, in shards of 24 dates.
    """
    height, width = shape.grid
    times = np.datetime64("2000-01-01", "ns") + np.arange(shape.dates) * np.timedelta64(6, "h")
    places = 90 - (np.arange(height) + 0.5) * 180 / height, np.arange(width) * 360 / width
    names = [f"temperature:{1000 - 10 * number}" for number in range(shape.variables)]
    fields = {
        name: (DIMS, np.stack([weather(shape, date, number) for date in range(shape.dates)]).astype("f4"))
        for number, name in enumerate(names)
    }
    coords = dict(zip(DIMS, (times, *places), strict=True))
    source = archive_of_dataset("memory://loader", xr.Dataset(fields, coords))
    Conversion(Request(("memory://loader",), dtype=shape.dtype), path, source).run()
    rng = np.random.default_rng(0)

    # The codec alone decodes chunks that are in memory by as many threads, into one piece of memory each.
    root: Any = zarr.open_group(str(path), mode="r")
    packer = Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)
    packed = [[packer.encode(root[name.replace(":", "_")][i]) for i in range(shape.dates)] for name in names]
    outs = [np.empty(shape.grid, shape.dtype) for _ in range(threads)]

    def decode(part: int, chosen: np.ndarray) -> None:
        for date in chosen:
            for chunks in packed[part::threads]:
                packer.decode(chunks[date], out=outs[part])

    def codec_alone() -> float:
        chosen = rng.integers(0, shape.dates, dates)
        with ThreadPoolExecutor(threads) as pool:
            seconds = clock(lambda: list(pool.map(decode, range(threads), [chosen] * threads)))
        return dates * shape.date_bytes / seconds / 1e9

    dataset = FieldDataset(open_archive(str(path)), names, np.arange(shape.dates)[:, None])
    sampler = evaluation_batches(shape.dates, BATCH, 0, 1)
    loader, starting = Loader(dataset, sampler, threads, pin=device.type == "cuda"), max(threads, 3)

    def rossby() -> float:
        chosen = rng.integers(0, shape.dates, dates)
        sampler[:] = [part.tolist() for part in np.array_split(chosen, dates // BATCH)]
        batches = (fields.to(device, non_blocking=True) for fields, _ in loader)
        for _ in range(starting):  # a start is not what is measured
            next(batches)
        seconds = clock(lambda: [None for _ in batches])
        return (dates - starting * BATCH) * shape.date_bytes / seconds / 1e9

    return in_turns(rounds, {"codec alone": codec_alone, "rossby": rossby})


def main() -> int:
    options, rows = parse(__doc__, rounds=3, quick=False, scratch=""), []
    torch.set_num_threads(1)
    retain_memory(torch.device("cpu"))
    for shape in QUICK if options.quick else (LARGE, SMALL):
        with tempfile.TemporaryDirectory(dir=options.scratch or None) as scratch:
            rates = measure(Path(scratch) / "store.zarr", shape, 2, torch.device("cpu"), options.rounds)
        row: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
        shares = [ours / codec for codec, ours in zip(*rates.values(), strict=True)]
        rows.append({"store": shape.name, "codec": "lz4"} | row | {"of the codec": statistics.median(shares)})
        print(rows[-1], flush=True)
    if not options.quick:
        record("loader", rows, ("zarr", "numcodecs"))
    print(f"\nGB/s decoded\n{table(rows, 'store', 'codec alone', 'rossby', 'of the codec')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
