"""Parts of benchmarks/gpu.sh: the loader that feeds a GPU, and what a save costs the steps after it.

.venv/bin/python benchmarks/gpu_data.py loader|save [--rehearse]
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from benchmarks.gpu_session import Session, Sizes, start_part

LOADED_BATCHES, BATCH = 12, 4


def loader(session: Session) -> None:
    """GB/s into the device's memory, beside one process that reads and does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        session.attempt("loader", partial(time_loader, session, Path(folder)))


def time_loader(session: Session, folder: Path) -> None:
    from datasets.archive import open_archive
    from datasets.loader import FieldDataset, TrainLoader, TrainSampler

    sizes = session.sizes
    archive = open_archive(write_store(folder / "fields.zarr", sizes))
    samples = np.stack([np.arange(sizes.dates - 1), np.arange(1, sizes.dates)], axis=1)
    dataset = FieldDataset(archive, archive.variables, samples)
    alone = [dataset.__getitems__([i])[0].nbytes / timed for i, timed in read_alone(dataset)]
    session.add("reading in one process", statistics.median(alone) / 1e9, "GB/s")
    sampler = TrainSampler(len(dataset), 0, BATCH, 1, 0, 1)
    batches = TrainLoader(dataset, sampler, sizes.workers, pin=session.device.type == "cuda").iterate(0)
    for _ in range(max(sizes.workers, 1)):
        next(batches)  # until all workers are there
    started, size = time.perf_counter(), 0
    for _ in range(LOADED_BATCHES):
        fields, _ = next(batches)
        size += fields.to(session.device, non_blocking=True).nbytes
    if session.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    samples_per_second = LOADED_BATCHES * BATCH / seconds
    session.add(f"loader, {sizes.workers} workers", size / seconds / 1e9, "GB/s")
    session.add("samples that the loader gives", samples_per_second, "samples/s")


def read_alone(dataset) -> Iterator[tuple[int, float]]:
    for i in range(min(len(dataset), 6)):
        started = time.perf_counter()
        dataset.__getitems__([i])
        yield i, time.perf_counter() - started


def write_store(path: Path, sizes: Sizes) -> str:
    """Fields as WeatherBench2 stores them, a date a chunk, without compression."""
    import xarray as xr

    height, width = sizes.grid
    step = 180 / height
    times = np.datetime64("2020-01-01T00", "ns") + np.arange(sizes.dates) * np.timedelta64(6, "h")
    values = np.random.default_rng(0).standard_normal((sizes.dates, height, width), dtype=np.float32)
    axes = ("time", "latitude", "longitude")
    names = [f"field_{i}" for i in range(sizes.variables)]
    coords = {
        "time": times,
        "latitude": np.arange(90 - step / 2, -90, -step),
        "longitude": np.arange(width) * 360 / width,
    }
    dataset = xr.Dataset({name: (axes, values) for name in names}, coords)
    encoding = {name: {"chunks": (1, height, width), "compressors": None} for name in names}
    dataset.to_zarr(path, zarr_format=2, encoding=encoding, consolidated=True)
    return str(path)


def save(session: Session) -> None:
    """Excess of ten steps after a save, by mode: benchmarks/checkpoint_stall.py in few rounds."""
    from benchmarks.checkpoint_stall import STEPS, Training, floor, measure

    session.start_ranks()
    training = Training(session.sizes.stall_dim, session.device)
    for _ in range(3):
        training.step()
    folder = Path(tempfile.mkdtemp())
    try:
        seconds = measure(training, folder, 1 if session.rehearse else 2, session.device)
    finally:
        shutil.rmtree(folder)
    copy, size = floor(training)
    base = seconds.pop("")
    for mode, times in seconds.items():
        excess = statistics.median(t - b for t, b in zip(times, base, strict=True))
        about = {"mode": mode, "bytes": size, "step_seconds": statistics.median(base) / STEPS}
        session.add(f"excess of ten steps after a save, {mode}", excess, "s", **about)
    session.add(f"one copy of these {size / 2**20:.0f} MiB", copy, "s")


if __name__ == "__main__":
    start_part(__doc__, {"loader": loader, "save": save}, sys.argv[1:])
