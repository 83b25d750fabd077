"""Every layout against one process: losses, gradients, weights, and every collective against its formula.

    .venv/bin/python benchmarks/layout_parity.py [words that a row's name must contain]
    .venv/bin/python benchmarks/layout_parity.py --optimizers all [--ranks 1 2 4]
    .venv/bin/python benchmarks/layout_parity.py --reshard

Needs no GPU: ranks are gloo processes, at most 8 at once. Ends with 1 when a row is out of its tolerance or
a count or size is not what the formula says.

--optimizers: LAMB, LARS, SGD and Muon on every layout of tests/parity.py in float32 (`few`: one a number of
ranks): three steps of its small model, compared with the papers' formulas in float64 from this layout's own
gradients. Ends with 1 when a difference is above its tolerance, or LAMB or LARS have another number of
all-reduces than 1.

--reshard: eight kinds of layouts, saved and loaded by every other: 64 cells. A cell is right when every
tensor (weights, moments, averages, progress), gathered, has the bits of the run that saved, and the next two
losses are those of the run that was not stopped. Ends with 1 when a cell is wrong.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pandas as pd

from benchmarks.results_file import parse, record, table
from parallelisms.degrees import resolve_degrees
from planning.workload import workload_of
from tests import parity
from tests.collective_formulas import step_collectives
from tests.distributed import Ranks
from tests.optimizer_references import trained
from tests.parity import TABLE, Layout, Outcome
from tests.resharding import KINDS, differences, load, save, tolerance
from tests.test_optimizers import NAMES, TOLERANCE, train

COLUMNS = ("layout", "ranks", "loss", "gradient norm", "gradients", "weights", "calls", "KiB")
COLUMNS += ("parameter KiB", "collectives", "verdict")


def compare_layouts(words: list[str]) -> int:
    chosen = {name: layout for name, layout in TABLE.items() if all(word in name for word in words)}
    groups = {n: Ranks(n) for n in {1, *(layout.ranks for layout in chosen.values())}}
    references, rows = {}, []
    for name, layout in chosen.items():
        reference = parity.reference_of(layout)
        if reference not in references:
            references[reference] = groups[1].run(parity.three_steps, reference)[0]
        outcomes = groups[layout.ranks].run(parity.three_steps, layout, timeout=300)
        errors = outcomes[0].errors(references[reference])
        good = all(error <= layout.tolerance(what) for what, error in errors.items())
        good &= all(outcome.losses == outcomes[0].losses for outcome in outcomes)
        counted = [compare_collectives(layout, outcome, rank) for rank, outcome in enumerate(outcomes)]
        collectives = next((text for text in counted if text != "equal"), "equal")
        good &= not collectives.startswith("differ")
        calls = Counter(outcomes[0].collectives)
        row = {"layout": name, "ranks": layout.ranks, **errors, "collectives": collectives}
        row |= {"calls": sum(calls.values()), "parameter KiB": outcomes[0].parameter_bytes / 1024}
        row |= {"KiB": sum(call.size * number for call, number in calls.items()) / 1024}
        rows.append(row | {"good": good, "verdict": "" if good else "<-- OUT OF TOLERANCE"})
        print({key: rows[-1][key] for key in COLUMNS}, flush=True)
    for group in groups.values():
        group.stop()
    record("layout_parity", rows)
    bad = [row["layout"] for row in rows if not row["good"]]
    equal = sum(row["collectives"] == "equal" for row in rows)
    formulas = sum(row["collectives"] != "no formula" for row in rows)
    print(f"\n{table(rows, *COLUMNS)}\n\n{len(rows)} layouts, {len(bad)} out of tolerance")
    print(f"collectives equal to their formulas in {equal} of the {formulas} that have one")
    return 1 if bad else 0


def compare_collectives(layout: Layout, outcome: Outcome, rank: int) -> str:
    """Return "equal", "no formula", or how what was counted on a rank differs from the formula.

    There is no closed form of what repeats collectives or adds some of its own. Those of the U-Net's halos
    are counted in tests/test_domain_parallel.py.
    """
    config = parity.config_of(layout, 0)
    parallelism, degrees = config.parallelism, resolve_degrees(layout.ranks, config.parallelism)
    if layout.conserve or layout.lora or layout.unet or layout.float8 or layout.compile or layout.rollout > 1:
        return "no formula"
    if layout.activation_checkpoint != "none" and degrees.cp * degrees.tp > 1:
        return "no formula"
    plain = degrees.world == degrees.pp * degrees.dp_shard and layout.loss == "mse"
    if degrees.pp > 1 and not (plain and parallelism.pipeline_parallel_schedule in ("GPipe", "1F1B")):
        return "no formula"
    batch = parity.GLOBAL_BATCH
    sizes = {"local_batch_size": batch // (degrees.dp * layout.accumulation), "global_batch_size": batch}
    config = replace(config, training=replace(config.training, **sizes))
    work = workload_of(config, layout.ranks, layout.grid, len(parity.VARIABLES))
    expected, counted = step_collectives(work, rank, layout.loss), Counter(outcome.collectives)
    if counted == expected:
        return "equal"
    show = lambda calls: ", ".join(f"{n} x {c.kind} {c.axis} {c.size}" for c, n in calls.items())  # noqa: E731
    return f"differ: counted also [{show(counted - expected)}], not [{show(expected - counted)}]"


def compare_optimizers(options: argparse.Namespace) -> int:
    plain = {n: row for n, row in TABLE.items() if not (row.compile or row.float8 or row.model)}
    alike = [n for n, row in plain.items() if row.dtype == row.reduce == "float32" and row.loss == "mse"]
    names = ["fsdp 2", "fsdp 2 x tp 2"] if options.optimizers == "few" else alike
    layouts = {"one process": Layout(1)} | {name: TABLE[name] for name in names if TABLE[name].ranks <= 4}
    rows = []
    for number in options.ranks:
        group = Ranks(number)
        for where, layout in layouts.items():
            for name in NAMES if layout.ranks == number else ():
                outcome = group.run(train, layout, name)[0]
                expected = trained(name, outcome["before"], outcome["gradients"], decay=0.05)
                error, tensor = parity.difference(outcome["after"], expected)
                sums = sum(n for call, n in outcome["collectives"].items() if call.kind == "all-reduce")
                row = {"layout": where, "name": name, "error": error, "tensor": tensor, "all_reduces": sums}
                asked = int(name in ("LAMB", "LARS") and number > 1)
                rows.append(row | {"wrong": error > TOLERANCE[name] or (name != "Muon" and sums != asked)})
                print(row, flush=True)
        group.stop()
    record("optimizers", rows)
    for name in NAMES:
        own = [row for row in rows if row["name"] == name]
        worst, sums = max(row["error"] for row in own), sorted({row["all_reduces"] for row in own})
        print(f"{name}: {len(own)} layouts, largest difference {worst:.1e}, all-reduces {sums}")
    return int(any(row["wrong"] for row in rows))


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
                row |= {"loss": error, "tolerance": limit, "good": not wrong and error <= limit}
                rows.append(row)
                print(row, flush=True)
    for group in groups.values():
        group.stop()
    record("reshard_matrix", rows)
    frame, seconds = pd.DataFrame(rows), time.perf_counter() - started
    print("next losses, relative difference; saved by (down), loaded by (across)")
    print(frame.pivot(index="saved", columns="loaded", values="loss").to_string(float_format="%.1e"))
    print(frame[~frame.good].to_string() if not frame.good.all() else "")
    same = frame.loss[frame.tolerance == 1e-5].max()
    unequal = f"{frame.unequal.sum()} of {frame.tensors.sum()} tensors with other bits"
    print(f"{len(rows)} cells, {(~frame.good).sum()} wrong; {unequal}")
    print(f"next losses within {same:.1e} in the same precision; {seconds:.0f} s")
    return int(not frame.good.all())


if __name__ == "__main__":
    options = parse(__doc__, words=(), optimizers="", ranks=(1, 2, 4), reshard=False)
    if options.reshard:
        sys.exit(compare_resharded())
    sys.exit(compare_optimizers(options) if options.optimizers else compare_layouts(options.words))
