"""Reading batches: the codec alone, zarr-python, xarray in a DataLoader, the tutorial's h5py, and Rossby.

    .venv/bin/python benchmarks/loader.py [--rounds 3] [--quick] [words]

Two archives of simulated fields, 17 x 1024 x 2048 as float16 and 20 x 181 x 360 as float32, each with lz4 and
zstd (blosc, bit shuffle) and chunks of 1 and 24 dates, read at random dates with a warm page cache by two
threads or processes. GB/s are of decoded numbers as they are stored. All take turns, and a figure is the
median of the rounds; memory is what Rossby's reading adds to a process that does nothing else. Words choose
rows: "float16" "lz4" "1" is one of them. Needs no GPU; 8 GB below --scratch and 30 minutes without --quick,
which takes smaller archives.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import h5py
import numpy as np
import torch
import xarray as xr
import zarr
from numcodecs import Blosc
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from zarr.codecs import BloscCodec, BloscShuffle, Crc32cCodec

from benchmarks.results_file import record
from datasets.archive import open_archive
from datasets.field_dataset import FieldDataset
from datasets.loader import EvaluationSampler, build_loader
from tests.conftest import memory_kib

THREADS, BATCH, STARTING = 2, 4, 3
DIMS = ("time", "latitude", "longitude")


@dataclass(frozen=True)
class Shape:
    """Of an archive."""

    name: str
    variables: int
    grid: tuple[int, int]
    dtype: str
    dates: int

    @property
    def date_bytes(self) -> int:
        return self.variables * self.grid[0] * self.grid[1] * np.dtype(self.dtype).itemsize


LARGE = Shape("17 x 1024 x 2048 float16", 17, (1024, 2048), "f2", 24)
SMALL = Shape("20 x 181 x 360 float32", 20, (181, 360), "f4", 192)
QUICK = (
    Shape("4 x 512 x 1024 float16", 4, (512, 1024), "f2", 24),
    Shape("6 x 91 x 180", 6, (91, 180), "f4", 48),
)


Read = Callable[[np.ndarray], None]  # these dates, in this order
OneDate = Callable[[int], np.ndarray]


def weather(shape: Shape, date: int, variable: int) -> np.ndarray:
    """(H, W): waves that move, and noise of what an analysis resolves; near 0, as packed fields are."""
    y, x = (
        np.linspace(0, 2 * np.pi, n)[s] for n, s in zip(shape.grid, ((..., None), (None, ...)), strict=True)
    )
    noise = np.random.default_rng(1000 * variable + date).normal(size=shape.grid)
    waves = np.sin(3 * y + variable) * np.cos(5 * x + 0.3 * date) + 0.3 * np.sin(17 * x + 9 * y)
    return (waves + 0.01 * noise).astype(shape.dtype)


def names(shape: Shape) -> list[str]:
    return [f"temperature:{1000 - 10 * number}" for number in range(shape.variables)]


def write_zarr(path: Path, shape: Shape, codec: str, dates_a_chunk: int) -> None:
    """With a date a chunk as datasets.convert writes, in shards and with checksums; else as others do."""
    ours = {"rossby_training_store": 1, "complete": True}
    root = zarr.open_group(str(path), mode="w", zarr_format=3, attributes=ours)
    compressor = BloscCodec(cname=codec, clevel=5, shuffle=BloscShuffle.bitshuffle)  # type: ignore[arg-type]
    shards: dict[str, Any] = {"shards": (min(shape.dates, 24), *shape.grid)} if dates_a_chunk == 1 else {}
    for number, name in enumerate(names(shape)):
        array = root.create_array(
            name.replace(":", "_"),
            shape=(shape.dates, *shape.grid),
            chunks=(dates_a_chunk, *shape.grid),
            dtype=shape.dtype,
            compressors=[compressor, Crc32cCodec()] if dates_a_chunk == 1 else [compressor],
            fill_value=np.nan,
            dimension_names=DIMS,
            attributes={"variable": name},
            **shards,
        )
        for first in range(0, shape.dates, 24):
            array[first : first + 24] = np.stack(
                [weather(shape, d, number) for d in range(first, first + 24)]
            )
    for dim, values in zip(DIMS, coordinates(shape), strict=True):
        units: dict[str, Any] = {"units": "hours since 2000-01-01"} if dim == "time" else {}
        root.create_array(dim, data=values, dimension_names=(dim,), attributes=units)


def coordinates(shape: Shape) -> tuple[np.ndarray, ...]:
    height, width = shape.grid
    latitude = 90 - (np.arange(height) + 0.5) * 180 / height
    return 6 * np.arange(shape.dates), latitude, np.arange(width) * 360 / width


def write_hdf5(path: Path, shape: Shape) -> None:
    """The tutorial's: fields[time, channel, latitude, longitude], neither chunks nor a codec."""
    with h5py.File(path, "w") as file:
        size = (shape.dates, shape.variables, *shape.grid)
        fields = file.create_dataset("fields", size, dtype=shape.dtype)
        for date in range(shape.dates):
            fields[date] = np.stack([weather(shape, date, number) for number in range(shape.variables)])


# -- those that read: each takes dates in order, and gives the bytes that it has made of them


def codec_alone(path: Path, shape: Shape, codec: str) -> Read:
    """Chunks whose bytes are in memory, decoded by as many threads into one piece of memory each."""
    root: Any = zarr.open_group(str(path), mode="r")
    packer = Blosc(cname=codec, clevel=5, shuffle=Blosc.BITSHUFFLE)
    arrays = [root[name.replace(":", "_")] for name in names(shape)]
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
    arrays = [root[name.replace(":", "_")] for name in names(shape)]

    def read(dates: np.ndarray) -> None:
        for date in dates:
            np.stack([array[int(date)] for array in arrays])

    return read


class Slices(TorchDataset):
    """What `open` gives, a date at a time, opened in each process."""

    def __init__(self, open: Callable[[str], OneDate], path: str, dates: np.ndarray) -> None:
        self.open, self.path, self.dates, self.read = open, path, dates, None

    def __len__(self) -> int:
        return len(self.dates)

    def __getitem__(self, i: int) -> np.ndarray:
        self.read = self.read or self.open(self.path)
        return self.read(int(self.dates[i]))


def open_xarray(path: str) -> OneDate:
    stored = xr.open_zarr(path, chunks=None, mask_and_scale=False, consolidated=False)
    chosen = [name for name in stored.data_vars if stored[name].ndim == 3]
    return lambda date: np.stack([stored[name].isel(time=date).values for name in chosen])


def open_h5py(path: str) -> OneDate:
    fields: Any = h5py.File(path)["fields"]
    return lambda date: fields[date]


def by_processes(open: Callable[[str], OneDate], path: Path) -> Read:
    def read(dates: np.ndarray) -> None:
        loader = DataLoader(
            Slices(open, str(path), dates), BATCH, num_workers=THREADS, multiprocessing_context="spawn"
        )
        read.started = take_all(loader)

    return read


def take_all(loader: Iterable[Any]) -> float:
    """When its first batches had been taken: a start is not what is measured."""
    batches = iter(loader)
    for _ in range(STARTING):
        next(batches)
    started = time.perf_counter()
    for _ in batches:
        pass
    return started


def rossbys_loader(path: Path, shape: Shape) -> tuple[Any, list[list[int]]]:
    """Threads for a converted store, spawned processes for any other."""
    archive = open_archive(str(path))
    dataset = FieldDataset(archive, names(shape), np.arange(shape.dates)[:, None])
    sampler = EvaluationSampler(shape.dates, BATCH, 0, 1)
    return build_loader(dataset, sampler, THREADS, 2), sampler.batches


def rossby(path: Path, shape: Shape) -> Read:
    loader, batches = rossbys_loader(path, shape)

    def read(dates: np.ndarray) -> None:
        batches[:] = [part.tolist() for part in np.array_split(dates, len(dates) // BATCH)]
        read.started = take_all(loader)

    return read


def memory_added(path: Path, shape: Shape) -> float:
    """GiB that reading adds to this process, at most."""
    (loader, _), before = rossbys_loader(path, shape), memory_kib()
    return (max(memory_kib() for _ in loader) - before) / 2**20


def rate(read: Any, shape: Shape, dates: np.ndarray) -> float:
    """GB/s of decoded numbers."""
    started = read.started = time.perf_counter()
    read(dates)
    seconds = time.perf_counter() - read.started
    counted = len(dates) - STARTING * BATCH * (started is not read.started)
    return counted * shape.date_bytes / seconds / 1e9


def cases(shapes: tuple[Shape, ...]) -> Iterator[tuple[Shape, str, int]]:
    for shape in shapes:
        for codec in ("lz4", "zstd"):
            for dates_a_chunk in (1, 24):
                yield shape, codec, dates_a_chunk


def measure(scratch: Path, shape: Shape, codec: str, dates_a_chunk: int, rounds: int) -> dict[str, Any]:
    path, tutorial = scratch / "store.zarr", scratch / f"{shape.dtype}.h5"
    write_zarr(path, shape, codec, dates_a_chunk)
    if not tutorial.exists():
        write_hdf5(tutorial, shape)
    readers = {
        "codec alone": codec_alone(path, shape, codec),
        "zarr-python": zarr_python(path, shape),
        "xarray, DataLoader": by_processes(open_xarray, path),
        "h5py, DataLoader": by_processes(open_h5py, tutorial),
        "rossby": rossby(path, shape),
    }
    rng, found = np.random.default_rng(0), {name: [] for name in readers}
    for _ in range(rounds):
        for name, read in readers.items():
            few = 24 if dates_a_chunk > 1 else 96
            found[name].append(rate(read, shape, rng.integers(0, shape.dates, few)))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        memory = pool.submit(memory_added, path, shape).result()
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    pairs = zip(found["rossby"], found["codec alone"], strict=True)
    return {
        "store": shape.name,
        "codec": codec,
        "dates a chunk": dates_a_chunk,
        "ratio": shape.dates * shape.date_bytes / stored,
        "GB/s": {name: statistics.median(rates) for name, rates in found.items()},
        "of the codec": statistics.median(ours / codec for ours, codec in pairs),
        "memory_gib": memory,
    }


def table(rows: list[dict[str, Any]]) -> str:
    readers = list(rows[0]["GB/s"])
    head = f"{'store':26}{'codec':>6}{'dates':>6}" + "".join(f"{name:>20}" for name in readers)
    lines = [
        f"GB/s decoded, {THREADS} threads or processes",
        head + f"{'of the codec':>14}{'x zarr':>8}{'GiB':>6}",
    ]
    for row in rows:
        rates = row["GB/s"]
        line = f"{row['store']:26}{row['codec']:>6}{row['dates a chunk']:>6}"
        line += "".join(f"{rates[name]:>20.2f}" for name in readers)
        faster = rates["rossby"] / rates["zarr-python"]
        lines.append(f"{line}{row['of the codec']:>13.0%}{faster:>9.1f}{row['memory_gib']:>6.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", default=None, help="a folder with room for an archive")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape, codec, dates_a_chunk in cases(QUICK if options.quick else (LARGE, SMALL)):
        if not set(options.words) <= {*shape.name.split(), codec, str(dates_a_chunk)}:
            continue
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            rows.append(measure(Path(scratch), shape, codec, dates_a_chunk, options.rounds))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if not options.quick:
            record("loader", rows[-1:], ("zarr", "numcodecs", "xarray", "h5py"))
    print(f"\n{table(rows)}" if rows else "no row has these words")


if __name__ == "__main__":
    main()
