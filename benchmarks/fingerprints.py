"""What it costs to compare the weights that replicas hold alike, over the steps between two comparisons.

    .venv/bin/python benchmarks/fingerprints.py        # needs a minute

Two ranks of DDP (all weights are compared) and of tensor parallelism (norms and biases alone) train the model
of the demo; steps and comparisons alternate in one run, medians. Rows: benchmarks/results/fingerprints.jsonl.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.results_file import record
from command_line import text_table
from config import Training
from tests.distributed import Ranks
from tests.parity import Layout, SmallRun, replicate, tp
from training.fingerprints import Fingerprints

ROUNDS = 15
MODEL = (("dim", 192), ("num_layers", 4), ("num_heads", 4), ("mlp_dim", 768), ("patch_size", (4, 4)))
GRID = (32, 64)
LAYOUTS: dict[str, dict[str, Any]] = {"2 replicas": replicate(2), "tp 2": tp(2)}


def measure(layout: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds of a step, seconds of a comparison (medians), bytes of weights of this rank."""
    run = SmallRun(Layout(2, layout, grid=GRID, model=MODEL))
    fingerprints = Fingerprints(run.model, interval=1)
    steps, comparisons = [], []
    for number in range(ROUNDS):
        began = time.perf_counter()
        run.step(number % 3)
        stepped = time.perf_counter()
        fingerprints.compare(number, saves=True)
        steps.append(stepped - began)
        comparisons.append(time.perf_counter() - stepped)
    size = sum(p.numel() * p.element_size() for part in fingerprints.parts.values() for p in part.values())
    return statistics.median(steps), statistics.median(comparisons), size


def main() -> None:
    interval = Training().fingerprint_steps
    ranks, rows, found = Ranks(2), [], []
    try:
        for name, layout in LAYOUTS.items():
            step, comparison, size = ranks.run(measure, layout, timeout=300)[0]
            share = comparison / (interval * step)
            found.append(
                {"layout": name, "step": step, "comparison": comparison, "bytes": size, "share": share}
            )
            rows.append((name, size / 1e6, 1e3 * step, 1e3 * comparison, share))
    finally:
        ranks.stop()
    record("fingerprints", found)
    heads = ("layout", "MB", "step ms", "comparison ms", f"of {interval} steps")
    print(text_table("<12 >8.1f >10.1f >15.2f >14.4%", [heads, *rows]))


if __name__ == "__main__":
    main()
