"""Reading of batches against the codec and other readers, of a run against fields in memory, of statistics.

    .venv/bin/python benchmarks/loader.py [words] [--rounds 3] [--quick]
    .venv/bin/python benchmarks/loader.py training [--rounds 3] [--steps 100]
    .venv/bin/python benchmarks/loader.py statistics [--dates 300]

The first: archives of simulated fields, 17 x 1024 x 2048 as float16 and 20 x 181 x 360 as float32, each with
lz4 and zstd (blosc, bit shuffle) and chunks of 1 and 24 dates, read at random dates with a warm page cache by
two threads or processes: the codec alone, zarr-python, xarray in a DataLoader, the tutorial's h5py, Rossby.
GB/s are of decoded numbers as they are stored; all take turns, medians; memory is what Rossby's reading adds.
Words choose rows: "float16" "lz4" "1". 8 GB below --scratch, 30 minutes; --quick: small, nothing recorded.

training: train.py on 20 x 180 x 360 float32 with validations, from the store by one reading thread, and from
memory (data.cache_gib). The model computes with one thread, so that a core is left for reading, as where a
GPU computes. statistics: of vit1b.toml's variables on 1024 x 2048 float16, by one rank and by four; then
train.py begins with vit1b.toml (and a small model) on four ranks over all these dates, with
comm.timeout_seconds 30, and has to have the same statistics. 2 GB of disk, 16 GB of memory, ten minutes.
"""

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
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

from benchmarks.results_file import parser_of, record, require
from command_line import text_table
from datasets.archive import open_archive
from datasets.field_dataset import FieldDataset
from datasets.grid import area_weights
from datasets.loader import EvaluationSampler, build_loader
from datasets.statistics import Source, Statistics, read_statistics
from datasets.variables import expand_levels
from tests.conftest import memory_kib
from tests.distributed import Ranks
from training.config_checks import load_checked
from training.shared_statistics import load_or_count

ROOT = Path(__file__).parent.parent
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
QUICK = (Shape("4 x 512 x 1024", 4, (512, 1024), "f2", 24), Shape("6 x 91 x 180", 6, (91, 180), "f4", 48))
Read = Callable[[np.ndarray], None]  # these dates, in this order
OneDate = Callable[[int], np.ndarray]


def weather(shape: Shape, date: int, variable: int) -> np.ndarray:
    """Return (H, W): waves that move, and noise; near 0, as packed fields are."""
    y, x = (np.linspace(0, 2 * np.pi, n) for n in shape.grid)
    y = y[:, None]
    noise = np.random.default_rng(1000 * variable + date).normal(size=shape.grid)
    waves = np.sin(3 * y + variable) * np.cos(5 * x + 0.3 * date) + 0.3 * np.sin(17 * x + 9 * y)
    return (waves + 0.01 * noise).astype(shape.dtype)


def names(shape: Shape) -> list[str]:
    return [f"temperature:{1000 - 10 * number}" for number in range(shape.variables)]


def write_zarr(path: Path, shape: Shape, codec: str, dates_a_chunk: int) -> None:
    """Write as datasets.convert does with a date a chunk: in shards, with checksums; else as others do."""
    ours = {"rossby_training_store": 1, "complete": True}
    root = zarr.open_group(str(path), mode="w", zarr_format=3, attributes=ours)
    codecs: list[Any] = [BloscCodec(cname=codec, clevel=5, shuffle=BloscShuffle.bitshuffle)]  # type: ignore[arg-type]
    about: dict[str, Any] = {"shape": (shape.dates, *shape.grid), "chunks": (dates_a_chunk, *shape.grid)}
    about |= {"dtype": shape.dtype, "fill_value": np.nan, "dimension_names": DIMS}
    if dates_a_chunk == 1:
        codecs, about["shards"] = [*codecs, Crc32cCodec()], (min(shape.dates, 24), *shape.grid)
    for number, name in enumerate(names(shape)):
        own: Any = {"variable": name}
        array = root.create_array(name.replace(":", "_"), compressors=codecs, attributes=own, **about)
        for first in range(0, shape.dates, 24):
            dates = range(first, min(first + 24, shape.dates))
            array[first : first + 24] = np.stack([weather(shape, date, number) for date in dates])
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
        how: Any = {"num_workers": THREADS, "multiprocessing_context": "spawn"}
        read.started = take_all(DataLoader(Slices(open, str(path), dates), BATCH, **how))

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
    row = {"store": shape.name, "codec": codec, "dates a chunk": dates_a_chunk, "memory_gib": memory}
    row |= {"GB/s": {name: statistics.median(rates) for name, rates in found.items()}}
    row |= {"of the codec": statistics.median(ours / codec for ours, codec in pairs)}
    return row | {"ratio": shape.dates * shape.date_bytes / stored}


def table(rows: list[dict[str, Any]]) -> str:
    readers = list(rows[0]["GB/s"])
    lines: list[tuple] = [("store", "codec", "dates", *readers, "of the codec", "x zarr", "GiB")]
    for row in rows:
        rates = row["GB/s"]
        own = (row["of the codec"], rates["rossby"] / rates["zarr-python"], row["memory_gib"])
        lines.append((row["store"], row["codec"], row["dates a chunk"], *rates.values(), *own))
    text = text_table(f"<26 >6 >6 {'>20.2f ' * len(readers)}>14.0% >8.1f >6.2f", lines)
    return f"GB/s decoded, {THREADS} threads or processes\n{text}"


def measure_readers(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    rows, words = [], {word for word in options.words if word != "read"}
    for shape in QUICK if options.quick else (LARGE, SMALL):
        for codec, dates in (("lz4", 1), ("lz4", 24), ("zstd", 1), ("zstd", 24)):
            if words <= {*shape.name.split(), codec, str(dates)}:
                with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
                    rows.append(measure(Path(scratch), shape, codec, dates, options.rounds))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    if not options.quick:
        record("loader", rows, ("zarr", "numcodecs", "xarray", "h5py"))
    print(f"\n{table(rows)}" if rows else "no row has these words")
    return 0


# -- a run from the store, and from memory


TRAINED = Shape("20 x 180 x 360 float32", 20, (180, 360), "f4", 192)
CONFIG = """
[data]
path = "{path}"
variables = {variables}
train_period = ["2000-01-01", "2000-02-10"]
validation_period = ["2000-02-11", "2000-02-14"]
num_workers = 1
statistics_dates = 32
[model]
patch_size = [12, 12]
dim = 192
num_layers = 4
num_heads = 4
[training]
local_batch_size = 2
[metrics]
log_freq = 10
enable_tensorboard = false
[checkpoint]
enable = false
[validation]
interval = 20
lead_hours = [6, 12]
plots = false
"""
WAYS = {"from the store": "0", "from memory": "8"}  # data.cache_gib


def measure_training(options: argparse.Namespace) -> int:
    """Compare the seconds of steps and validations together, without the start; runs take turns."""
    require(options.steps, 41, "steps, of which those after 20 and the validations after the first count")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as text:
        write_zarr(Path(text) / "store.zarr", TRAINED, "lz4", 1)
        config = Path(text) / "run.toml"
        config.write_text(CONFIG.format(path=f"{text}/store.zarr", variables=json.dumps(names(TRAINED))))
        for number in range(options.rounds):
            for way, cache in WAYS.items():
                found[way].append(run(config, f"{text}/{number}-{cache}", cache, options.steps))
    store, memory = found.values()
    slower = statistics.median(a["seconds"] / b["seconds"] - 1 for a, b in zip(store, memory, strict=True))
    same = all(each["losses"] == store[0]["losses"] for each in store + memory)
    keys = ("step", "wait", "validation")
    medians = {way: {k: statistics.median(each[k] for each in found[way]) for k in keys} for way in WAYS}
    record("loader_training", [{"slower": slower, "same_losses": same, **medians}])
    rows = [(way, *(1e3 * each[key] for key in keys)) for way, each in medians.items()]
    head = ("fields", "ms a step", "ms waited", "ms a validation")
    print(text_table("<16 >12.1f >12.1f >17.1f", [head, *rows]))
    print(f"from the store is {slower:+.1%} slower; losses are {'the same' if same else 'NOT THE SAME'}")
    return 0 if same else 1


def run(config: Path, folder: str, cache_gib: str, steps: int) -> dict[str, Any]:
    """Return the seconds of all steps but the first 20, and of the validations among them."""
    command = [sys.executable, "train.py", "--job.config_file", str(config), "--job.dump_folder", folder]
    command += ["--data.cache_gib", cache_gib, "--training.steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    later = [each for each in records if "step_seconds" in each and each["step"] > 20]
    taken = [each["step_seconds"] for each in later]
    validations = [each["validation_seconds"] for each in records if "validation_seconds" in each][1:]
    medians = {"step": statistics.median(taken), "validation": statistics.median(validations)}
    medians["wait"] = statistics.median(each["data_seconds"] for each in later)
    losses = [each["loss"] for each in records if "loss" in each]
    return {"seconds": 10 * sum(taken) + sum(validations), "losses": losses, **medians}


# -- large archives that are quickly written: eight dates, and links to them


WRITTEN = 8
# name -> mean and standard deviation, in its own units; what is not listed has those of a wind
SCALES = {
    "geopotential": (6e4, 3e3),
    "temperature": (260.0, 15.0),
    "specific_humidity": (5e-3, 1e-3),
    "2m_temperature": (280.0, 15.0),
    "mean_sea_level_pressure": (1.01e5, 1e3),
}


def write_tiled(
    path: Path,
    variables: Iterable[str],
    levels: list[int],
    grid: tuple[int, int],
    hours: list[int],
    dtype: str,
) -> None:
    """Write analyses in WeatherBench2's layout at these hours after 2000-01-01, all levels in a chunk.

    float32, or packed as float16. 721 rows have the poles, 1,024 have none; from north to south.
    """
    root, half = zarr.open_group(str(path), mode="w", zarr_format=2), 0 if grid[0] % 2 else 90 / grid[0]
    latitude, dates = np.linspace(90 - half, half - 90, grid[0]), len(hours)
    for number, name in enumerate(variables):
        # As in WeatherBench2: surface variables have their height in their names, or none.
        surface = name.startswith(("2m_", "10m_", "mean_sea", "total_", "surface_"))
        factors = np.ones(()) if surface else 1 + 0.01 * np.arange(len(levels))  # equal levels would compress
        dims = [dim for dim in ("time", "level", "latitude", "longitude") if not (surface and dim == "level")]
        shape = (*factors.shape, *grid)
        attributes: dict[str, Any] = {"_ARRAY_DIMENSIONS": dims}
        mean, deviation = SCALES.get(name, (3.0, 8.0))
        attributes |= {"scale_factor": deviation, "add_offset": mean} if dtype == "f2" else {}
        about: dict[str, Any] = {"shape": (dates, *shape), "chunks": (1, *shape), "dtype": dtype}
        compressor = Blosc("lz4", clevel=5, shuffle=Blosc.SHUFFLE)
        root.create_array(name, compressors=[compressor], attributes=attributes, **about)
        array: Any = root[name]
        for date in range(min(WRITTEN, dates)):
            # South differs from north: a field that is upside down would be seen.
            field = 2 * np.linspace(0, 1, grid[0])[:, None]
            field = field + 0.3 * weather(Shape("", 1, grid, "f4", 1), date, number)
            field = field if dtype == "f2" else mean + deviation * field
            array[date] = field * factors[..., None, None]
        rest = ".0" * (len(shape))
        for date in range(WRITTEN, dates):
            (path / name / f"{date}{rest}").symlink_to(path / name / f"{date % WRITTEN}{rest}")
    axes = {"time": np.array(hours), "level": np.array(levels), "latitude": latitude}
    for name, numbers in (axes | {"longitude": np.arange(grid[1]) * 360 / grid[1]}).items():
        units: Any = {"units": "hours since 2000-01-01"} if name == "time" else {}
        root.create_array(name, data=numbers, attributes={"_ARRAY_DIMENSIONS": [name], **units})


# -- statistics by one rank and by four


VIT1B = ROOT / "train_configs/vit1b.toml"
SMALL_RUN = """
    --model.dim 64 --model.num_layers 1 --model.num_heads 2 --model.mlp_dim 128 --training.steps 1
    --training.local_batch_size 1 --training.global_batch_size -1 --training.mixed_precision_param float32
    --checkpoint.enable false --validation.enable false --comm.timeout_seconds 30 --data.statistics_dates 0
    --data.num_workers 1 --data.train_period ["2000-01-01","2000-12-31"] --data.validation_period []
""".split()


def measure_statistics(options: argparse.Namespace) -> int:
    data = load_checked(["--job.config_file", str(VIT1B)]).data
    names, hours = expand_levels(data.variables, data.levels), [6 * n for n in range(options.dates)]
    rows, found, answers = [], {}, {}
    with tempfile.TemporaryDirectory() as text:
        path, grid = f"{text}/era5.zarr", options.grid
        write_tiled(Path(path), data.variables, list(data.levels), grid, hours, "f2")
        for ranks in (1, 4):
            group, cache = Ranks(ranks), Path(text) / f"run-{ranks}" / "statistics.npz"
            found[ranks], seconds = group.run(count, path, names, cache, timeout=1800)[0]
            group.stop()
            gigabytes = 4 * len(names) * grid[0] * grid[1] * options.dates / 1e9  # as float32
            rows.append({"ranks": ranks, "dates": options.dates, "seconds": seconds, "GB": gigabytes})
        command = [sys.executable, "-m", "jobs.torchrun", "--nproc-per-node", "4", "train.py"]
        command += ["--job.config_file", str(VIT1B), "--job.dump_folder", f"{text}/start"]
        command += ["--data.path", path, *SMALL_RUN, *options.more.split()]
        own: Any = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd=ROOT, check=False, **own)
        answers = read_statistics(Path(text) / "start/statistics.npz") if not done.returncode else None
    if answers is None:
        print((done.stdout + done.stderr)[-2000:], file=sys.stderr)
    difference = largest_difference(found[4], found[1])
    of_start = largest_difference(answers, found[1]) if answers else None
    shown = len(re.findall(r"statistics: +[0-9]+%", done.stdout + done.stderr))
    start = {"ended": answers is not None, "progress": shown, "largest difference": of_start}
    record("statistics_start", [row | {"largest difference": difference, "start": start} for row in rows])
    lines = [(r["ranks"], r["dates"], r["GB"], r["seconds"], r["GB"] / r["seconds"]) for r in rows]
    print(text_table(">5 >7 >8.1f >9.1f >7.2f", [("ranks", "dates", "GB", "seconds", "GB/s"), *lines]))
    print(
        f"moments of 4 ranks and of 1 differ by {difference:.1e} deviations; vit1b.toml on 4 ranks, progress"
    )
    end = "ended well" if answers else "FAILED"
    print(f"shown {shown} times, {end}: its moments differ by {of_start}")
    return 0 if answers else 1


def count(path: str, names: list[str], cache: Path) -> tuple[Statistics, float]:
    """Count on each rank; return the statistics and the seconds."""
    archive, step = open_archive(path), np.timedelta64(6 * 3600, "s")
    dates, area = np.arange(len(archive.times)), area_weights(archive.grid.latitude)
    started = time.monotonic()
    statistics = load_or_count(cache, Source(archive, names, dates, step, area))
    return statistics, time.monotonic() - started


def largest_difference(one: Statistics, other: Statistics) -> float:
    """Return the largest of the three moments' differences, in parts of the standard deviation."""
    scale = np.array(other.std)
    pairs = ((one.mean, other.mean), (one.std, other.std), (one.change_std, other.change_std))
    return max(float((np.abs(a - b) / scale).max()) for a, b in pairs)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("words", nargs="*", help="training, statistics, or words of rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", default=None, help="a folder with room for an archive")
    parser.add_argument("--steps", type=int, default=100, help="training")
    parser.add_argument("--dates", type=int, default=300, help="statistics")
    parser.add_argument("--grid", type=int, nargs=2, default=(1024, 2048), help="statistics")
    parser.add_argument("--more", default="", help="statistics: options of train.py")
    options = parser.parse_args()
    commands = {"training": measure_training, "statistics": measure_statistics}
    return commands.get(" ".join(options.words), measure_readers)(options)


if __name__ == "__main__":
    sys.exit(main())
