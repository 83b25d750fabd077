"""The statistics of a large archive by one rank and by four, as vit1b.toml begins with them; and its start.

    .venv/bin/python benchmarks/statistics_start.py [--dates 300]

Its 17 variables at 1024 x 2048, float16 in chunks of a date; eight dates are written, and linked to by the
others, so that the archive takes a gigabyte on the disk and a date costs its decoding. Then train.py begins
with vit1b.toml on four ranks, over all these dates, with comm.timeout_seconds 30 (and a small model, which
alone is not vit1b's): it has to end well, to show progress, and to have the same statistics. Needs no GPU,
2 GB of disk, 16 GB of memory and ten minutes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BloscShuffle

from benchmarks.loader import DIMS, Shape, coordinates, weather
from benchmarks.results_file import record
from datasets.archive import open_archive
from datasets.grid import area_weights
from datasets.statistics import Source, Statistics, read_statistics
from datasets.variables import expand_levels
from tests.distributed import Ranks
from training.config_checks import load_checked
from training.shared_statistics import load_or_count

ROOT = Path(__file__).parent.parent
WRITTEN = 8
VIT1B = load_checked(["--job.config_file", str(ROOT / "train_configs/vit1b.toml")]).data
VARIABLES = expand_levels(VIT1B.variables, VIT1B.levels)
SMALL = {
    "model": {"dim": 64, "num_layers": 1, "num_heads": 2, "mlp_dim": 128},
    "training": {
        "steps": 1,
        "local_batch_size": 1,
        "global_batch_size": -1,
        "mixed_precision_param": "float32",
    },
    "checkpoint": {"enable": False},
    "validation": {"enable": False},
    "comm": {"timeout_seconds": 30},
    "data": {
        "statistics_dates": 0,
        "num_workers": 1,
        "train_period": ["2000-01-01", "2000-12-31"],
        "validation_period": [],
    },
}


def write_tiled(path: Path, shape: Shape) -> None:
    """Eight dates of waves and noise, again and again."""
    root = zarr.open_group(str(path), mode="w", zarr_format=3)
    compressor = BloscCodec(cname="lz4", clevel=5, shuffle=BloscShuffle.bitshuffle)  # type: ignore[arg-type]
    for number, name in enumerate(VARIABLES):
        attributes: dict[str, Any] = {"variable": name, "scale_factor": 8.0, "add_offset": 260.0}
        array = root.create_array(
            name.replace(":", "_"),
            shape=(shape.dates, *shape.grid),
            chunks=(1, *shape.grid),
            dtype=shape.dtype,
            compressors=[compressor],
            fill_value=np.nan,
            dimension_names=DIMS,
            attributes=attributes,
        )
        for date in range(WRITTEN):
            array[date] = weather(shape, date, number)
        chunks = path / array.path / "c"
        for date in range(WRITTEN, shape.dates):
            (chunks / str(date)).symlink_to(chunks / str(date % WRITTEN), target_is_directory=True)
    for dim, values in zip(DIMS, coordinates(shape), strict=True):
        units: dict[str, Any] = {"units": "hours since 2000-01-01"} if dim == "time" else {}
        root.create_array(dim, data=values, dimension_names=(dim,), attributes=units)


def count(path: str, cache: Path) -> tuple[Statistics, float]:
    """On each rank."""
    archive, step = open_archive(path), np.timedelta64(6 * 3600, "s")
    dates, area = np.arange(len(archive.times)), area_weights(archive.grid.latitude)
    started = time.monotonic()
    statistics = load_or_count(cache, Source(archive, VARIABLES, dates, step, area))
    return statistics, time.monotonic() - started


def start_training(path: Path, folder: Path) -> tuple[str, Statistics | None]:
    """What train.py says on four ranks, and the statistics it leaves."""
    command = [sys.executable, "-m", "jobs.torchrun", "--nproc-per-node", "4", "train.py"]
    command += ["--job.config_file", "train_configs/vit1b.toml", "--job.dump_folder", str(folder)]
    command += ["--data.path", str(path)]
    for section, keys in SMALL.items():
        for key, value in keys.items():
            command += [f"--{section}.{key}", json.dumps(value) if isinstance(value, list) else str(value)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        print(said[-2000:], file=sys.stderr)
    return said, read_statistics(folder / "statistics.npz") if done.returncode == 0 else None


def largest_difference(one: Statistics, other: Statistics) -> float:
    """Of the three moments, in parts of the standard deviation."""
    scale = np.array(other.std)
    pairs = ((one.mean, other.mean), (one.std, other.std), (one.change_std, other.change_std))
    return max(float((np.abs(a - b) / scale).max()) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dates", type=int, default=300)
    options = parser.parse_args()
    shape = Shape("17 x 1024 x 2048 float16", 17, (1024, 2048), "f2", options.dates)
    rows, found = [], {}
    with tempfile.TemporaryDirectory() as text:
        path = Path(text) / "era5.zarr"
        write_tiled(path, shape)
        for ranks in (1, 4):
            group = Ranks(ranks)
            answers = group.run(
                count, str(path), Path(text) / f"run-{ranks}" / "statistics.npz", timeout=1800
            )
            group.stop()
            found[ranks], seconds = answers[0]
            gigabytes = 2 * shape.dates * shape.date_bytes / 1e9  # as float32
            rows.append({"ranks": ranks, "dates": shape.dates, "seconds": seconds, "GB": gigabytes})
        said, of_start = start_training(path, Path(text) / "start")
    difference = largest_difference(found[4], found[1])
    start = {
        "ended": of_start is not None,
        "progress": len(re.findall(r"statistics: +[0-9]+%", said)),
        "largest difference": largest_difference(of_start, found[1]) if of_start else None,
    }
    for row in rows:
        row |= {"largest difference": difference, "start": start}
    record("statistics_start", rows)
    print(f"{os.cpu_count()} cores; moments of 4 ranks and of 1 differ by {difference:.1e} deviations")
    print(
        f"vit1b.toml on 4 ranks, comm.timeout_seconds 30: {'ended well' if start['ended'] else 'FAILED'}, "
        f"progress shown {start['progress']} times, its moments differ by {start['largest difference']}\n"
    )
    print(f"{'ranks':>5}{'dates':>7}{'GB':>8}{'seconds':>9}{'GB/s':>7}")
    for row in rows:
        rate = row["GB"] / row["seconds"]
        print(f"{row['ranks']:>5}{row['dates']:>7}{row['GB']:>8.1f}{row['seconds']:>9.1f}{rate:>7.2f}")
    return 0 if start["ended"] else 1


if __name__ == "__main__":
    sys.exit(main())
