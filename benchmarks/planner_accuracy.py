"""The planner's seconds against reality on this machine, of steps that one measured step anchors.

    .venv/bin/python benchmarks/planner_accuracy.py [--rounds 7]

Measures 14 configurations, interleaved, medians; each of them anchors the plans of the 13 others
(plan.py --anchor): 182 pairs. A step is train.py's, without reading data. The planner's bytes are counted by
layout_parity.py (what ranks send) and gpu.py (peaks, on a GPU).
Ends with 1 when fewer than 85 % of the pairs are within 10 %.
"""

import itertools
import statistics
import sys
import tomllib
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu import Case, Sizes, training_of
from benchmarks.random_run import RandomRun
from benchmarks.results_file import clock, in_turns, parse, record, table
from parallelisms.mesh import start_ranks
from planning.clusters import load_cluster, machine_known_as
from planning.step_time import step_time
from training.process_settings import retain_memory

GRID, CHANNELS = (64, 128), 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> int:
    options = parse(__doc__, rounds=7)
    retain_memory(DEVICE)  # as train.py does
    start_ranks(600)
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    cluster = load_cluster(f"{machine_known_as('cpu')}1" if DEVICE.type == "cpu" else "h200x1")

    def step_twice(run: RandomRun) -> float:
        run.step()  # warms caches up
        return clock(run.step)

    works, steps = {}, {}
    for dim, layers, heads, (height, width), batch, dtype, backend, mode in listed["steps"]:
        patch = (height, width)
        sizes = Sizes(GRID, (patch,), CHANNELS, dim, layers, (heads, heads), compiled=False)
        case = Case(patch, heads, mode=mode, batch=batch, backend=backend, dtype=dtype)
        shape = f"d {dim} x {layers}, {heads} heads, {sizes.tokens(patch)} tokens"
        what = f"{shape}, batch {batch}, {dtype}, {backend}, {mode}"
        works[what], steps[what] = case.workload(sizes), partial(step_twice, training_of(case, sizes, DEVICE))
    rows = []
    for what, seconds in in_turns(options.rounds, steps).items():
        planned, measured = step_time(works[what], cluster).total, statistics.median(seconds)
        row = {"kind": "time", "what": what, "planned": planned, "measured": measured}
        rows.append(row | {"ratio": planned / measured})
    record("planner_accuracy", rows)
    print(table(rows, "what", "planned", "measured", "ratio"))
    pairs = itertools.permutations((row["ratio"] for row in rows), 2)
    errors = sorted(abs(ratio / of_anchor - 1) for ratio, of_anchor in pairs)
    within, mean = sum(error <= 0.10 for error in errors), statistics.mean(errors)
    share = f"{within} of {len(errors)} pairs ({within / len(errors):.0%}) within 10 %"
    print(f"\neach step as the anchor of the others: {share}, mean error {mean:.1%}, worst {errors[-1]:.1%}")
    return 0 if within >= 0.85 * len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
