"""Every layout that users have, converted, compared with its source, described, and trained on.

    .venv/bin/python benchmarks/convert_layouts.py [--steps 20] [--folder DIR] [words]

Words choose rows by their names. A row: an archive (synthetic ones of tests/sample_archives.py, and the real
ones of ../shared/data where they are there) is converted to float16 and its fields are compared with the
source's; the [data] section of datasets.describe is a configuration that train.py runs for some steps of a
tiny ViT.
Ends with 1 where a field is further off than the store states, or a run does not end well.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from archives.archive import Archive, open_archive
from archives.training_store import TrainingStore
from benchmarks.results_file import record
from conversion.description import data_section
from datasets.convert import main as convert
from tests import sample_archives as samples
from text_tables import text_table

ROOT = Path(__file__).parent.parent
REAL = {
    "gfs_winds 1 degree": "gfs_winds_2026/gfs_winds_20260324-20260419_1deg.nc",
    "gfs_winds 2.8125 degrees": "gfs_winds_2026/gfs_winds_20260324-20260419_2.8125deg.nc",
    "gfs_winds 5.625 degrees": "gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc",
    "storm_1996": "storm_1996",
    "era5_europe_2020": "era5_europe_2020",
}
MODEL = """
[model]
patch_size = {patch}
dim = 16
num_layers = 2
num_heads = 2
[lr_scheduler]
warmup_steps = 5
[training]
local_batch_size = 1
[metrics]
log_freq = 1
enable_tensorboard = false
[validation]
enable = false
"""


def sources() -> dict[str, Callable[[Path], str]]:
    """Name of a row -> what writes its archive into a folder, or only says where it lies."""
    written = [
        *samples.EXACT,
        samples.cds_old,
        samples.packed_zarr,
        samples.tutorial,
        samples.anemoi,
    ]
    if importlib.util.find_spec("eccodes"):
        written.append(samples.grib)
    found = {each.__name__: lambda folder, each=each: each(folder, samples.analyses()) for each in written}
    data = ROOT / "../shared/data"
    return found | {
        name: lambda folder, path=path: str(data / path)
        for name, path in REAL.items()
        if (data / path).exists()
    }


def patch_of(shape: tuple[int, int]) -> list[int]:
    """The smallest divisors that make at most 64 tokens of it."""
    rows, columns = (
        min(n for n in range(1, size + 1) if size % n == 0 and size // n <= 16) for size in shape
    )
    return [rows, columns]


def largest_excess(source: Archive, target: Archive, store: TrainingStore) -> float:
    """The largest error over what the store's attributes allow, of all variables and dates."""
    worst = 0.0
    for field in store.fields():
        assert field.packed
        exact = source.read_block(0, len(source.times), [field.variable]).astype(np.float64)
        found = target.read_block(0, len(target.times), [field.variable])
        assert (np.isnan(exact) == np.isnan(found)).all(), field.variable
        allowed = 2.0**-11 * np.abs(exact - field.packed.offset) + 2.0**-25 * field.packed.scale
        allowed += 2.0**-23 * np.abs(exact)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.abs(found - exact) / allowed
        worst = max(worst, float(np.nanmax(ratio[allowed > 0], initial=0)))
    return worst


def train(config: Path, steps: int) -> list[float]:
    """The losses of a run."""
    command = [sys.executable, "train.py", "--job.config_file", str(config), "--training.steps", str(steps)]
    command += ["--job.dump_folder", str(config.with_suffix(""))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return []
    lines = (config.with_suffix("") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


def row(name: str, write: Callable[[Path], str], folder: Path, steps: int) -> dict:
    (folder / "in").mkdir(parents=True)
    path, target = write(folder / "in"), folder / "store.zarr"
    with contextlib.redirect_stdout(io.StringIO()):
        convert([path, str(target)])
    source, found = open_archive(path), open_archive(str(target))
    same = sorted(source.variables) == sorted(found.variables) and (source.times == found.times).all()
    excess = largest_excess(source, found, TrainingStore(target))
    config = folder / "run.toml"
    model = MODEL.format(patch=patch_of(found.grid.shape))
    config.write_text(data_section(found, str(target), ()) + model)
    losses = train(config, steps)
    good = bool(same and excess <= 1 and len(losses) == steps and all(map(math.isfinite, losses)))
    return {
        "source": name,
        "dates": len(found.times),
        "variables": len(found.variables),
        "grid": list(found.grid.shape),
        "error_over_stated": excess,
        "steps": len(losses),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "good": good,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        chosen = {
            n: w for n, w in sources().items() if not options.words or any(x in n for x in options.words)
        }
        rows = [row(n, w, folder / str(i), options.steps) for i, (n, w) in enumerate(chosen.items())]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record("convert_layouts", rows, ("zarr", "numcodecs", "dask"))
    head = ("source", "dates", "variables", "error/stated", "steps", "first loss", "last loss", "  good")
    keys = ("source", "dates", "variables", "error_over_stated", "steps", "first_loss", "last_loss")
    shown = [(*(r[key] for key in keys), "  yes" if r["good"] else "  NO") for r in rows]
    print(text_table("<30 >6d >10d >13.3f >6d >11.4f >11.4f <6", [head, *shown]))
    return 0 if all(r["good"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
