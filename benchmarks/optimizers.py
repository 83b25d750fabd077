"""LAMB, LARS, SGD and Muon on 1, 2 and 4 ranks: what their papers say, collectives, time over fused AdamW.

    .venv/bin/python benchmarks/optimizers.py [--layouts all] [--ranks 1 2 4] [--dim 512]

Every layout of tests/parity.py in float32 (`--layouts few`: one a number of ranks) takes three steps of its
small model; weights are compared with the papers' formulas in float64 (tests/optimizer_references.py), from
this layout's own gradients: the largest relative difference of a tensor. Collectives are those of the
optimiser's last step, beside what AdamW has too: gradients that tensor parallelism has cut otherwise.
Seconds are of updates of two blocks of a ViT, sharded by FSDP2 over the ranks, one thread each, in turn with
AdamW's. Ends with 1 when a difference is above its tolerance or LAMB or LARS have another number of
all-reduces than 1 (0 on one rank).
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.results_file import record
from command_line import text_table
from tests.distributed import Ranks
from tests.optimizer_references import trained
from tests.parity import TABLE, Layout, SmallRun, difference
from tests.test_whole_matrices import NAMES, TOLERANCE, train

FEW = ("fsdp 2", "fsdp 2 x tp 2")
TIMED = ("AdamW", *NAMES)
REPETITIONS = 9


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", choices=("all", "few"), default="all")
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--dim", type=int, default=512)
    options = parser.parse_args()
    layouts = exact_layouts() if options.layouts == "all" else {n: TABLE[n] for n in FEW}
    layouts = {"one process": Layout(1), **layouts}
    rows, seconds = [], []
    for number in options.ranks:
        group = Ranks(number)
        for layout in [name for name, each in layouts.items() if each.ranks == number]:
            rows += [held(group, layout, layouts[layout], name) for name in NAMES]
        seconds += [{"ranks": number, **row} for row in group.run(timed, options.dim, timeout=500)[0]]
        group.stop()
    record("optimizers", rows + seconds)
    print(table(rows, seconds))
    return int(any(row["wrong"] for row in rows))


def exact_layouts() -> dict[str, Layout]:
    """Of at most four ranks, without what rounds otherwise; compiled ones have the same optimiser."""
    return {
        name: layout
        for name, layout in TABLE.items()
        if layout.ranks <= 4
        and not (layout.compile or layout.float8 or layout.model)
        and layout.dtype == layout.reduce == "float32"
        and layout.loss == "mse"
    }


def held(group: Ranks, where: str, layout: Layout, name: str) -> dict[str, Any]:
    """Against the papers' formulas."""
    found = group.run(train, layout, name)[0]
    expected = trained(name, found["before"], found["gradients"], decay=0.05)
    error, tensor = difference(found["after"], expected)
    calls = [number for call, number in found["collectives"].items() if call.kind == "all-reduce"]
    asked = int(name in ("LAMB", "LARS") and layout.ranks > 1)
    wrong = error > TOLERANCE[name] or (name != "Muon" and sum(calls) != asked)
    row = {"layout": where, "name": name, "error": error, "tensor": tensor, "all_reduces": sum(calls)}
    print(where, row, flush=True)
    return {**row, "wrong": wrong}


def timed(dim: int) -> list[dict[str, Any]]:
    """Seconds of the update of each optimiser, medians in turn, and over AdamW's."""
    shape = (("dim", dim), ("num_layers", 2), ("num_heads", 8))
    layout = replace(Layout(1), model=shape)
    runs = {name: SmallRun(layout, name=name, max_norm=0.0) for name in TIMED}
    found: dict[str, list[float]] = {name: [] for name in TIMED}
    for small in runs.values():
        for parameter in small.model.own_parameters().values():
            parameter.grad = torch.randn_like(parameter)
    for _ in range(REPETITIONS + 1):
        for name, small in runs.items():
            torch.distributed.barrier()
            begun = time.perf_counter()
            small.state.optimizer.step()
            torch.distributed.barrier()
            found[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    number = sum(p.numel() for p in runs["AdamW"].model.parameters.values())
    return [
        {"name": name, "parameters": number, "seconds": median, "over_adamw": median / medians["AdamW"]}
        for name, median in medians.items()
    ]


def table(rows: list[dict[str, Any]], seconds: list[dict[str, Any]]) -> str:
    """One line an optimiser and number of ranks."""
    cells: list[tuple] = [("optimiser", "ranks", "ms", "over AdamW")]
    cells += [(r["name"], r["ranks"], 1e3 * r["seconds"], r["over_adamw"]) for r in seconds]
    lines = [text_table("<12 >8 >10.1f >12.2f", cells), ""]
    for name in NAMES:
        mine = [row for row in rows if row["name"] == name]
        worst, sums = (
            max((row["error"] for row in mine), default=0.0),
            sorted({row["all_reduces"] for row in mine}),
        )
        lines.append(f"{name}: {len(mine)} layouts, largest difference {worst:.1e}, all-reduces {sums}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
