"""Training on the loader against training on fields in memory: what reading costs a run.

    .venv/bin/python benchmarks/loader_training.py [--rounds 3] [--steps 100]

train.py, as users start it, on 20 x 180 x 360 float32 (lz4, a chunk a date), with validation every 20 steps:
once from the store by one reading thread, once from memory (data.cache_gib). The model computes with one
thread, so that a core is left for reading, as on a machine whose GPU computes. Runs take turns; compared are
the seconds of steps and validations together, without the start. Needs no GPU, two cores and six minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.loader import Shape, names, write_zarr
from benchmarks.results_file import record
from command_line import text_table

ROOT = Path(__file__).parent.parent
SHAPE = Shape("20 x 180 x 360 float32", 20, (180, 360), "f4", 192)
EVERY = 20  # steps
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


def run(config: Path, cache_gib: str, steps: int) -> dict[str, Any]:
    """Seconds of all steps but the first logged ones, and of the validations among them."""
    folder = config.parent / "run"
    command = [sys.executable, "train.py", "--job.config_file", str(config), "--job.dump_folder", str(folder)]
    command += ["--data.cache_gib", cache_gib, "--training.steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    taken = [each["step_seconds"] for each in records if "step_seconds" in each and each["step"] > EVERY]
    validations = [each["validation_seconds"] for each in records if "validation_seconds" in each]
    decoding = [each["data_seconds"] for each in records if "data_seconds" in each and each["step"] > EVERY]
    return {
        "seconds": 10 * sum(taken) + sum(validations[1:]),
        "step": statistics.median(taken),
        "wait": statistics.median(decoding),
        "validation": statistics.median(validations[1:]),
        "losses": [each["loss"] for each in records if "loss" in each],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as text:
        write_zarr(Path(text) / "store.zarr", SHAPE, "lz4", 1)
        config = Path(text) / "run.toml"
        config.write_text(CONFIG.format(path=Path(text) / "store.zarr", variables=json.dumps(names(SHAPE))))
        for _ in range(options.rounds):
            for way, cache in WAYS.items():
                found[way].append(run(config, cache, options.steps))
    store, memory = found.values()
    slower = statistics.median(a["seconds"] / b["seconds"] - 1 for a, b in zip(store, memory, strict=True))
    same = all(each["losses"] == store[0]["losses"] for each in store + memory)
    medians = {
        way: {key: statistics.median(each[key] for each in runs) for key in ("step", "wait", "validation")}
        for way, runs in found.items()
    }
    record("loader_training", [{"slower": slower, "same_losses": same, **medians}])
    rows = [(way, *(1e3 * each[key] for key in each)) for way, each in medians.items()]
    head = ("fields", "ms a step", "ms waited", "ms a validation")
    print(text_table("<16 >12.1f >12.1f >17.1f", [head, *rows]))
    print(f"from the store is {slower:+.1%} slower; losses are {'the same' if same else 'NOT THE SAME'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
