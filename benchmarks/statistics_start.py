"""The statistics of a large archive by one rank and by four, as vit1b.toml begins with them.

    .venv/bin/python benchmarks/statistics_start.py [--dates 300]

17 variables at 1024 x 2048, float16 in chunks of a date; eight dates are written, and linked to by the
others, so that the archive takes a gigabyte on the disk and a date costs its decoding. Needs no GPU, 2 GB of
disk and five minutes.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import zarr
from zarr.codecs import BloscCodec, BloscShuffle

from archives.archive import open_archive
from archives.grid import area_weights
from benchmarks.loader import DIMS, Shape, coordinates, names, weather
from benchmarks.results_file import record
from datasets.statistics import Source, Statistics
from tests.distributed import Ranks
from training.shared_statistics import load_or_count

WRITTEN = 8


def write_tiled(path: Path, shape: Shape) -> None:
    """Eight dates of waves and noise, again and again."""
    root = zarr.open_group(str(path), mode="w", zarr_format=3)
    compressor = BloscCodec(cname="lz4", clevel=5, shuffle=BloscShuffle.bitshuffle)  # type: ignore[arg-type]
    for number, name in enumerate(names(shape)):
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
    statistics = load_or_count([cache], Source(archive, archive.variables, dates, step, area))
    return statistics, time.monotonic() - started


def largest_difference(one: Statistics, other: Statistics) -> float:
    """Of the three moments, in parts of the standard deviation."""
    scale = np.array(other.std)
    pairs = ((one.mean, other.mean), (one.std, other.std), (one.change_std, other.change_std))
    return max(float((np.abs(a - b) / scale).max()) for a, b in pairs)


def main() -> None:
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
    difference = largest_difference(found[4], found[1])
    for row in rows:
        row["largest difference"] = difference
    record("statistics_start", rows)
    print(f"{os.cpu_count()} cores; moments of 4 ranks and of 1 differ by {difference:.1e} deviations\n")
    print(f"{'ranks':>5}{'dates':>7}{'GB':>8}{'seconds':>9}{'GB/s':>7}")
    for row in rows:
        rate = row["GB"] / row["seconds"]
        print(f"{row['ranks']:>5}{row['dates']:>7}{row['GB']:>8.1f}{row['seconds']:>9.1f}{rate:>7.2f}")


if __name__ == "__main__":
    main()
