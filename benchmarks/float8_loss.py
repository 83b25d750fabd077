"""Whether float8 learns as bf16 does: loss curves of the demo's model, seed by seed.

    .venv/bin/python benchmarks/float8_loss.py [--steps 150] [--seeds 3]

Trains train_configs/demo.toml with half its batch in bf16 and in float8 by two recipes
(emulated without a GPU: the same roundings, none of the speed). Losses are means over the
last 20 steps up to a third, two thirds and the whole run. Ends with 1 when the mean over seeds of a recipe
lies farther from that of bf16 than bf16's seeds lie from each other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record

ROOT = Path(__file__).parent.parent
FLOAT8 = ["--float8.enable"]
KINDS = {
    "bf16": [],
    "float8 tensorwise": [*FLOAT8, "--float8.recipe=tensorwise"],
    "float8 rowwise": [*FLOAT8, "--float8.recipe=rowwise"],
}
FIXED = [
    "--training.mixed_precision_param=bfloat16",
    "--training.local_batch_size=8",
    "--validation.enable=false",
    "--checkpoint.enable=false",
    "--profiling.enable_profiling=false",
    "--metrics.enable_tensorboard=false",
    "--metrics.log_freq=1",
]
WINDOW = 20  # steps that a loss is a mean of
HEAD = f"{'':18} {'seed':>4} {'1/3':>9} {'2/3':>9} {'end':>9}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        for kind in KINDS:
            rows.append({"kind": kind, "seed": seed, "losses": losses(kind, seed, options.steps)})
            print(line(rows[-1]), flush=True)
    record("float8_loss", [{**row, "steps": options.steps} for row in rows], ("torchao",))
    table, within = judged(rows)
    print(f"\n{HEAD}\n" + "\n".join(table))
    return 0 if within else 1


def losses(kind: str, seed: int, steps: int) -> list[float]:
    """Of a run, a process of its own: means up to a third, two thirds and all of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = [f"--training.steps={steps}", f"--training.seed={seed}", f"--job.dump_folder={folder}/run"]
        command = [sys.executable, "train.py", *FIXED, *run, *KINDS[kind]]
        subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "NGPU": "1"}
        )
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    curve = [json.loads(text)["loss"] for text in lines]
    ends = [steps // 3, 2 * steps // 3, steps]
    return [statistics.mean(curve[max(end - WINDOW, 0) : end]) for end in ends]


def judged(rows: list[dict]) -> tuple[list[str], bool]:
    """The table, and whether float8's means lie within the spread of bf16's seeds everywhere."""
    curves = {kind: [row["losses"] for row in rows if row["kind"] == kind] for kind in KINDS}
    means = {
        kind: [statistics.mean(point) for point in zip(*found, strict=True)] for kind, found in curves.items()
    }
    spread = [max(point) - min(point) for point in zip(*curves["bf16"], strict=True)]
    table = [line(row) for row in rows]
    table += [line({"kind": kind, "seed": "mean", "losses": mean}) for kind, mean in means.items()]
    table.append(line({"kind": "bf16", "seed": "max - min", "losses": spread}))
    away = [
        abs(a - b) / s for mean in means.values() for a, b, s in zip(mean, means["bf16"], spread, strict=True)
    ]
    return [*table, f"farthest mean: {max(away):.2f} of bf16's spread"], max(away) <= 1


def line(row: dict) -> str:
    return f"{row['kind']:18} {row['seed']:>4} " + " ".join(f"{loss:9.6f}" for loss in row["losses"])


if __name__ == "__main__":
    sys.exit(main())
