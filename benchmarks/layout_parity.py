"""Every layout against one process: losses, gradients, weights, and every collective against its formula.

    .venv/bin/python benchmarks/layout_parity.py [words that a row's name must contain]
    .venv/bin/python benchmarks/layout_parity.py --optimizers all [--ranks 1 2 4] [--dim 512]
    .venv/bin/python benchmarks/layout_parity.py --reshard

Needs no GPU: ranks are gloo processes, at most 8 at once. Ends with 1 when a row is out of its tolerance or
a count or size is not what the formula says.

--optimizers: LAMB, LARS, SGD and Muon on every layout of tests/parity.py in float32 (`few`: one a number of
ranks): three steps of its small model, compared with the papers' formulas in float64 from this layout's own
gradients. Seconds are of updates of two blocks of a ViT, sharded by FSDP2, in turn with AdamW's. Ends with 1
when a difference is above its tolerance, or LAMB or LARS have another number of all-reduces than 1.

--reshard: eight kinds of layouts, saved and loaded by every other: 64 cells. A cell is right when every
tensor (weights, moments, averages, progress), gathered, has the bits of the run that saved, and the next two
losses are those of the run that was not stopped. Ends with 1 when a cell is wrong.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.results_file import clock, in_turns, parse, record, table
from parallelisms.degrees import resolve_degrees
from planning.workload import Workload, workload_of
from tests import parity
from tests.collective_formulas import step_collectives
from tests.distributed import Ranks
from tests.optimizer_references import trained
from tests.parity import (
    GLOBAL_BATCH,
    TABLE,
    VARIABLES,
    Layout,
    Outcome,
    SmallRun,
    config_of,
    reference_of,
    three_steps,
)
from tests.resharding import KINDS, differences, load, save, tolerance
from tests.test_whole_matrices import NAMES, TOLERANCE, train

COLUMNS = {"layout": "<38", "ranks": ">6", "loss": ">9.1e", "gradient_norm": ">15.1e", "gradients": ">11.1e"}
COLUMNS |= {"weights": ">9.1e", "calls": ">7", "KiB": ">9.0f", "parameter_KiB": ">15.1f"}
COLUMNS |= {"collectives": "<22", "verdict": "<22"}


def main() -> int:
    options = parse(__doc__, words=(), optimizers="", ranks=(1, 2, 4), dim=512, reshard=False)
    if options.reshard:
        return compare_resharded()
    return compare_optimizers(options) if options.optimizers else compare_layouts(options.words)


def compare_layouts(words: list[str]) -> int:
    chosen = {name: each for name, each in TABLE.items() if all(word in name for word in words)}
    groups = {n: Ranks(n) for n in {1, *(each.ranks for each in chosen.values())}}
    references, rows = {}, []
    for name, layout in chosen.items():
        reference = reference_of(layout)
        if reference not in references:
            references[reference] = groups[1].run(three_steps, reference)[0]
        outcomes = groups[layout.ranks].run(three_steps, layout, timeout=300)
        rows.append(judge(name, layout, outcomes, references[reference]))
        print(table(rows[-1:], **COLUMNS).splitlines()[1], flush=True)
    for group in groups.values():
        group.stop()
    record("layout_parity", rows)
    bad = [row["layout"] for row in rows if not row["good"]]
    counted = sum(row["collectives"] == "equal" for row in rows)
    formulas = sum(row["collectives"] != "no formula" for row in rows)
    print(f"\n{table(rows, **COLUMNS)}\n\n{len(rows)} layouts, {len(bad)} out of tolerance")
    print(f"collectives equal to their formulas in {counted} of the {formulas} that have one")
    return 1 if bad else 0


def judge(name: str, layout: Layout, outcomes: list[Outcome], reference: Outcome) -> dict:
    errors = outcomes[0].errors(reference)
    within = all(error <= layout.tolerance(what) for what, error in errors.items())
    agreed = all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    counted = [compare(layout, outcome, rank) for rank, outcome in enumerate(outcomes)]
    verdict = next((text for text in counted if text != "equal"), "equal")
    calls, good = Counter(outcomes[0].collectives), within and agreed and not verdict.startswith("differ")
    return {
        "layout": name,
        "ranks": layout.ranks,
        **errors,
        "collectives": verdict,
        "calls": sum(calls.values()),
        "KiB": sum(call.size * number for call, number in calls.items()) / 1024,
        "parameter KiB": outcomes[0].parameter_bytes / 1024,
        "good": good,
        "verdict": "" if good else "<-- OUT OF TOLERANCE",
    }


def compare(layout: Layout, outcome: Outcome, rank: int) -> str:
    """ "equal", "no formula", or how what was counted on a rank differs from the formula."""
    if not has_formula(layout):
        return "no formula"
    expected = step_collectives(layout_workload(layout), rank, layout.loss)
    counted = Counter(outcome.collectives)
    if counted == expected:
        return "equal"
    show = lambda calls: ", ".join(f"{n} x {c.kind} {c.axis} {c.size}" for c, n in calls.items())  # noqa: E731
    return f"differ: counted also [{show(counted - expected)}], not [{show(expected - counted)}]"


def layout_workload(layout: Layout) -> Workload:
    config = config_of(layout, 0)
    degrees = resolve_degrees(layout.ranks, config.parallelism)
    sizes = {"local_batch_size": GLOBAL_BATCH // (degrees.dp * layout.accumulation)}
    training = replace(config.training, **sizes, global_batch_size=GLOBAL_BATCH)
    config = replace(config, training=training)
    return workload_of(config, layout.ranks, layout.grid, len(VARIABLES))


def has_formula(layout: Layout) -> bool:
    """Return whether there is a closed form: not of what repeats collectives or adds some of its own.

    Those of the U-Net's halos are counted in tests/test_domain_parallel.py.
    """
    parallelism = config_of(layout, 0).parallelism
    degrees = resolve_degrees(layout.ranks, parallelism)
    if layout.conserve or layout.lora:
        return False
    if layout.unet or layout.float8 or layout.compile or layout.rollout > 1:
        return False
    if layout.activation_checkpoint != "none" and degrees.cp * degrees.tp > 1:
        return False
    plain = degrees.world == degrees.pp * degrees.dp_shard and layout.loss == "mse"
    return degrees.pp == 1 or (plain and parallelism.pipeline_parallel_schedule in ("GPipe", "1F1B"))


def compare_optimizers(options: argparse.Namespace) -> int:
    few = {name: TABLE[name] for name in ("fsdp 2", "fsdp 2 x tp 2")}
    layouts = {"one process": Layout(1), **(few if options.optimizers == "few" else exact_layouts())}
    rows, seconds = [], []
    for number in options.ranks:
        group = Ranks(number)
        for where in [name for name, each in layouts.items() if each.ranks == number]:
            rows += [check(group, where, layouts[where], name) for name in NAMES]
        seconds += [{"ranks": number, **row} for row in group.run(time_updates, options.dim, timeout=500)[0]]
        group.stop()
    record("optimizers", rows + seconds)
    print(table(seconds, name="<12", ranks=">8", seconds=">10.4f", over_adamw=">12.2f") + "\n")
    for name in NAMES:
        mine = [row for row in rows if row["name"] == name]
        worst, sums = max(row["error"] for row in mine), sorted({row["all_reduces"] for row in mine})
        print(f"{name}: {len(mine)} layouts, largest difference {worst:.1e}, all-reduces {sums}")
    return int(any(row["wrong"] for row in rows))


def exact_layouts() -> dict[str, Layout]:
    plain = {n: each for n, each in TABLE.items() if not (each.compile or each.float8 or each.model)}
    alike = {n: each for n, each in plain.items() if each.dtype == each.reduce == "float32"}
    return {name: each for name, each in alike.items() if each.ranks <= 4 and each.loss == "mse"}


def check(group: Ranks, where: str, layout: Layout, name: str) -> dict[str, Any]:
    found = group.run(train, layout, name)[0]
    expected = trained(name, found["before"], found["gradients"], decay=0.05)
    error, tensor = parity.difference(found["after"], expected)
    calls = sum(number for call, number in found["collectives"].items() if call.kind == "all-reduce")
    asked = int(name in ("LAMB", "LARS") and layout.ranks > 1)
    row = {"layout": where, "name": name, "error": error, "tensor": tensor, "all_reduces": calls}
    print(row, flush=True)
    return {**row, "wrong": error > TOLERANCE[name] or (name != "Muon" and calls != asked)}


def time_updates(dim: int) -> list[dict[str, Any]]:
    layout = replace(Layout(1), model=(("dim", dim), ("num_layers", 2), ("num_heads", 8)))
    runs = {name: SmallRun(layout, name=name, max_norm=0.0) for name in ("AdamW", *NAMES)}
    for small in runs.values():
        for parameter in small.model.optimized_parameters().values():
            parameter.grad = torch.randn_like(parameter)

    def update(small: SmallRun) -> float:
        torch.distributed.barrier()
        return clock(lambda: (small.state.optimizer.step(), torch.distributed.barrier()))

    found = in_turns(9, {name: partial(update, small) for name, small in runs.items()}, warm_up=1)
    medians = {name: statistics.median(times) for name, times in found.items()}
    number = sum(p.numel() for p in runs["AdamW"].model.parameters.values())
    over = {name: median / medians["AdamW"] for name, median in medians.items()}
    return [{"name": n, "parameters": number, "seconds": medians[n], "over_adamw": over[n]} for n in medians]


def compare_resharded() -> int:
    started, groups = time.perf_counter(), {n: Ranks(n) for n in sorted({k.ranks for k in KINDS.values()})}
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        saved = {}
        for name, kind in KINDS.items():
            path = Path(folder) / name.replace(" ", "-")
            saved[name] = (path, *groups[kind.ranks].run(save, kind, path, "async_with_pinned_mem")[0])
        for target, kind in KINDS.items():
            for source, (path, tensors, losses) in saved.items():
                loaded, next_losses = groups[kind.ranks].run(load, kind, path)[0]
                wrong = differences(tensors, loaded)
                error = max(abs(a / b - 1) for a, b in zip(next_losses, losses, strict=True))
                limit = tolerance(KINDS[source], kind)
                row = {"saved": source, "loaded": target, "tensors": len(tensors), "unequal": len(wrong)}
                good = not wrong and error <= limit
                rows.append(row | {"loss": error, "tolerance": limit, "good": good})
                print(rows[-1], flush=True)
    for group in groups.values():
        group.stop()
    record("reshard_matrix", rows)
    numbers = {target: f"{number}" for number, target in enumerate(KINDS, start=1)}
    cells: dict[str, dict] = {name: {"saved": f"{numbers[name]} {name}"} for name in KINDS}
    for row in rows:
        mark = "" if row["good"] else "!"
        cells[row["saved"]][numbers[row["loaded"]]] = f"{row['loss']:.1e}{mark}"
    print("next losses, relative difference; saved by (down), loaded by (across); !: wrong")
    print(table(cells.values(), saved="<32", **dict.fromkeys(numbers.values(), ">10")))
    bad, seconds = sum(not row["good"] for row in rows), time.perf_counter() - started
    unequal, tensors = (sum(row[key] for row in rows) for key in ("unequal", "tensors"))
    same = max(row["loss"] for row in rows if row["tolerance"] == 1e-5)
    print(f"\n{len(rows)} cells, {bad} wrong; {unequal} of {tensors} tensors with other bits")
    print(f"next losses within {same:.1e} in the same precision; {seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
