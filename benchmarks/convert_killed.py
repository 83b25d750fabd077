"""A conversion that is killed at random moments and continued ends with the values of one that was not.

    .venv/bin/python benchmarks/convert_killed.py [--trials 20] [--seed 0] [--folder DIR]

Three ways in turn: begun, begun with two workers, appended to a store of the first half. Each trial starts
datasets.convert, kills its process (SIGKILL) at a moment drawn from all that it takes, runs the same command
again, and compares a digest of all values. Ends with 1 where one differs.
"""

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import xarray as xr

from benchmarks.results_file import record
from command_line import text_table
from datasets.archive import open_archive

ROOT = Path(__file__).parent.parent
DATES, HALF = 1600, 800  # two to four shards of 512 dates
WAYS = {"begun": (), "two workers": ("--workers", "2"), "appended": ()}


def write_sources(folder: Path) -> dict[str, Path]:
    """Two files of NetCDF, the first half of the dates and all of them."""
    rng = np.random.default_rng(0)
    coords = {
        "time": np.datetime64("2000-01-01", "ns") + np.arange(DATES) * np.timedelta64(6, "h"),
        "latitude": np.linspace(87.1875, -87.1875, 32),
        "longitude": np.arange(64) * 5.625,
    }
    names = ("t2m", "msl", "u10", "v10")
    fields = {name: (tuple(coords), rng.normal(280, 9, (DATES, 32, 64)).astype("f4")) for name in names}
    ds = xr.Dataset(fields, coords)
    found = {"all": folder / "all.nc", "half": folder / "half.nc"}
    ds.to_netcdf(found["all"], engine="h5netcdf")
    ds.isel(time=slice(HALF)).to_netcdf(found["half"], engine="h5netcdf")
    return found


def start(source: Path, target: Path, options: tuple[str, ...]) -> subprocess.Popen:
    command = [sys.executable, "-m", "datasets.convert", str(source), str(target), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)


def convert(source: Path, target: Path, options: tuple[str, ...]) -> float:
    """Seconds."""
    started = time.perf_counter()
    assert start(source, target, options).wait() == 0
    return time.perf_counter() - started


def digest(path: Path) -> str:
    """Digest of the values, dates and statistics of a store."""
    archive, found = open_archive(str(path)), hashlib.sha256()
    found.update(archive.times.tobytes())
    for name in archive.variables:
        found.update(archive.read_block(0, len(archive.times), [name]).tobytes())
        attributes = dict(archive.field_of(name).raw.attrs)
        found.update(repr([f"{attributes[key]:.10g}" for key in ("mean", "minimum", "maximum")]).encode())
    return found.hexdigest()


def parts_done(target: Path) -> str:
    """What a kill has left: how many parts are done, or that there is none yet, or no longer."""
    if (target / "conversion").exists():
        return f"{len(list((target / 'conversion').glob('[0-9a-f]*.json')))} parts done"
    return "complete" if (target / "zarr.json").exists() else "not begun"


class Trials:
    """The undisturbed conversion of each way, and trials against it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sources = folder, write_sources(folder)
        self.half = folder / "half.zarr"
        convert(self.sources["half"], self.half, ())
        self.wanted, self.seconds = {}, {}
        for way, options in WAYS.items():
            target = self.fresh(way)
            self.seconds[way] = convert(self.sources["all"], target, options)
            self.wanted[way] = digest(target)

    def fresh(self, way: str) -> Path:
        target = self.folder / "target.zarr"
        shutil.rmtree(target, ignore_errors=True)
        if way == "appended":
            shutil.copytree(self.half, target)
        return target

    def trial(self, way: str, part: float) -> dict:
        """Killed after this part of the time that the whole takes."""
        target = self.fresh(way)
        process = start(self.sources["all"], target, WAYS[way])
        time.sleep(part * self.seconds[way])
        process.kill()
        ended = process.wait() == 0
        left = "ended before" if ended else parts_done(target)
        convert(self.sources["all"], target, WAYS[way])
        same = digest(target) == self.wanted[way]
        return {"way": way, "killed_after_s": part * self.seconds[way], "left": left, "same_values": same}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        trials, draw = Trials(folder), random.Random(options.seed)
        ways = [list(WAYS)[i % len(WAYS)] for i in range(options.trials)]
        rows = [trials.trial(way, draw.uniform(0.1, 1.0)) for way in ways]
        one = trials.wanted["begun"] == trials.wanted["two workers"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record("convert_killed", rows, ("zarr", "numcodecs", "dask"))
    shown = [
        (r["way"], r["killed_after_s"], f"  {r['left']}", "yes" if r["same_values"] else "NO") for r in rows
    ]
    print(text_table("<14 >12.2f <20 <6", [("way", "killed at s", "  left", "same"), *shown]))
    same = sum(row["same_values"] for row in rows)
    print(f"{same} of {len(rows)} ended with equal values; two workers as one: {'yes' if one else 'NO'}")
    return 0 if same == len(rows) and one else 1


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
