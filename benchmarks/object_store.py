"""What a slow and failing object store costs a training loop that reads ahead.

    .venv/bin/python benchmarks/object_store.py [--steps 60]

A training store of 7 variables at 32 x 64 is served by a real S3 server on this machine (moto's), at once
and with 50 ms of latency and 10 % of failing requests; a step takes 0.4 s and does nothing, as if a GPU
computed it. Batches have to be those of the local folder, to the bit. Needs s3fs and moto
(requirements-extras.txt), no GPU, and two minutes.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from archives.archive import Archive, open_archive
from archives.storage_options import Access
from benchmarks.loader import Shape, names, write_zarr
from benchmarks.results_file import record
from datasets.field_dataset import FieldDataset
from datasets.loader import TrainLoader, TrainSampler
from tests.s3_server import S3Server

SHAPE = Shape("7 x 32 x 64 float32", 7, (32, 64), "f4", 192)
STEP_SECONDS, BATCH, THREADS, AHEAD = 0.4, 4, 16, 4
CASES = {"at once": (0.0, 0.0), "50 ms": (0.05, 0.0), "50 ms, 10 % fail": (0.05, 0.1)}


def batches(archive: Archive, steps: int, seconds: float) -> tuple[list[torch.Tensor], float]:
    """The batches of some steps, and how long a step waited for one, but for the first two."""
    samples = np.stack([np.arange(SHAPE.dates - 1), np.arange(1, SHAPE.dates)], axis=1)
    dataset = FieldDataset(archive, names(SHAPE), samples)
    loader = TrainLoader(dataset, TrainSampler(len(samples), 0, BATCH, 1, 0, 1), THREADS, AHEAD, pin=False)
    found, waited, iterator = [], [], loader.iterate(0)
    for _ in range(steps):
        started = time.perf_counter()
        found.append(next(iterator)[0].clone())
        waited.append(time.perf_counter() - started)
        time.sleep(seconds)
    return found, float(np.mean(waited[2:]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    steps, rows = parser.parse_args().steps, []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text) / "store.zarr"
        write_zarr(folder, SHAPE, "lz4", 1)
        local, _ = batches(open_archive(str(folder)), steps, 0.0)
        with S3Server({"bucket/store.zarr": folder}) as server:
            for name, (latency, error_rate) in CASES.items():
                server.set(latency=latency, error_rate=0.0)
                archive = open_archive("s3://bucket/store.zarr", access=Access(server.options))
                server.set(error_rate=error_rate)
                found, waited = batches(archive, steps, STEP_SECONDS)
                same = all(torch.equal(ours, theirs) for ours, theirs in zip(found, local, strict=True))
                rows.append(
                    {"store": name, "waited": waited, "of a step": waited / STEP_SECONDS, "same": same}
                )
    record("object_store", rows, ("s3fs", "moto"))
    print(f"\n{'store':20}{'wait a step':>14}{'of a step':>11}  batches of the local folder")
    for row in rows:
        wait = f"{1e3 * row['waited']:.1f} ms"
        print(f"{row['store']:20}{wait:>14}{row['of a step']:>11.1%}  {'yes' if row['same'] else 'NO'}")
    return int(not all(row["same"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
