"""The planner's seconds against reality on this machine, of steps that were not calibrated.

    .venv/bin/python benchmarks/planner_accuracy.py [--rounds 7] [--seconds 40]

Calibrates on the shapes of two models (widths 256 and 512), measures 14 other configurations, interleaved,
medians, and calibrates again: shared machines change their speed in these minutes, and predictions are the
mean of both. A step is train.py's, without reading data. The planner's bytes are counted by
saved_activations.py (what a block keeps), layout_parity.py (what ranks send) and, on a GPU, gpu.py (peaks).
The last line is of plans without a calibration that one of the steps anchors (plan.py --anchor), each in
turn. Ends with 1 when fewer than 5 of 6 steps are within 10 %.
"""

import statistics
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu import Case, Sizes, training_of
from benchmarks.random_run import RandomRun
from benchmarks.results_file import clock, in_turns, parse, record, table
from parallelisms.mesh import start_ranks
from planning.architecture import vit_architecture
from planning.calibration import calibrate
from planning.clusters import load_cluster
from planning.step_time import step_time
from training.process_settings import retain_memory

GRID, CHANNELS = (64, 128), 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> int:
    options = parse(__doc__, rounds=7, seconds=40.0)
    retain_memory(DEVICE)  # as train.py does
    start_ranks(600)
    threads = torch.get_num_threads()
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    blocks = [
        (batch, vit_architecture((tokens, 1), (1, 1), 1, 1, dim, 1, heads, mlp_dim=mlp_dim))
        for batch, tokens, dim, heads, mlp_dim in listed["calibrated"]
    ]
    again = partial(calibrate, blocks, ("math", "sdpa"), DEVICE, threads, seconds=options.seconds)
    listed_rates, first = load_cluster("cpu1" if DEVICE.type == "cpu" else "h200x1"), again()

    def step_twice(run: RandomRun) -> float:
        run.step()  # warms caches up
        return clock(run.step)

    works, steps = {}, {}
    for dim, layers, heads, (height, width), batch, dtype, backend, mode in listed["unseen"]:
        patch = (height, width)
        sizes = Sizes(GRID, (patch,), CHANNELS, dim, layers, (heads, heads), compiled=False)
        case = Case(patch, heads, mode=mode, batch=batch, backend=backend, dtype=dtype)
        shape = f"d {dim} x {layers}, {heads} heads, {sizes.tokens(patch)} tokens"
        what = f"{shape}, batch {batch}, {dtype}, {backend}, {mode}"
        works[what], steps[what] = case.workload(sizes), partial(step_twice, training_of(case, sizes, DEVICE))
    rows, turns = [], in_turns(options.rounds, steps)
    clusters = [replace(listed_rates, measured=each) for each in (first, again())]
    for what, seconds in turns.items():
        measured = statistics.median(seconds)
        predicted = statistics.mean(step_time(works[what], each).total for each in clusters)
        row = {"kind": "time", "what": what, "predicted": predicted, "measured": measured}
        row["uncalibrated"] = step_time(works[what], listed_rates).total
        rows.append(row | {"error": predicted / measured - 1})
    record("planner_accuracy", rows)
    errors = sorted(abs(row["error"]) for row in rows)
    within, mean = sum(error <= 0.10 for error in errors), statistics.mean(errors)
    print(table(rows, what="<76", predicted=">12.4f", measured=">12.4f", error=">+9.1%"))
    ratios = [row["uncalibrated"] / row["measured"] for row in rows]
    anchored = [sum(abs(each / anchor - 1) <= 0.10 for each in ratios) for anchor in ratios]
    print(f"\n{within} of {len(rows)} within 10 %, mean error {mean:.1%}, worst {errors[-1]:.1%}")
    print(f"anchored: {statistics.median(anchored):.0f} within 10 % in the median, {max(anchored)} at best")
    return 0 if within >= 5 * len(rows) / 6 else 1


if __name__ == "__main__":
    sys.exit(main())
