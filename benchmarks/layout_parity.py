"""Every layout against one process: losses, gradients, weights, and every collective against its formula.

    .venv/bin/python benchmarks/layout_parity.py [words that a row's name must contain]
    .venv/bin/python benchmarks/layout_parity.py --optimizers all [--ranks 1 2 4] [--dim 512]

Needs no GPU: ranks are gloo processes, at most 8 at once. Ends with 1 when a row is out of its tolerance or
a count or size is not what the formula says.

--optimizers: LAMB, LARS, SGD and Muon on every layout of tests/parity.py in float32 (`few`: one a number of
ranks): three steps of its small model, compared with the papers' formulas in float64 from this layout's own
gradients, the largest relative difference of a tensor. Collectives are those of the optimiser's last step.
Seconds are of updates of two blocks of a ViT, sharded by FSDP2 over the ranks, one thread each, in turn
with AdamW's. Ends with 1 when a difference is above its tolerance, or LAMB or LARS have another number of
all-reduces than 1 (0 on one rank).
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.results_file import parser_of, record
from command_line import text_table
from config import Parallelism
from models.registry import num_features
from parallelisms.collectives import Collective
from parallelisms.degrees import Degrees, resolve_degrees
from planning.architecture import Architecture, vit_architecture
from planning.workload import ITEMSIZE, Workload
from tests.collective_formulas import step_collectives
from tests.distributed import Ranks
from tests.optimizer_references import trained
from tests.parity import (
    GLOBAL_BATCH,
    TABLE,
    Layout,
    Outcome,
    SmallRun,
    difference,
    reference_of,
    three_steps,
)
from tests.test_whole_matrices import NAMES, TOLERANCE, train


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--optimizers", choices=("all", "few"))
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--dim", type=int, default=512)
    options = parser.parse_args()
    return compare_optimizers(options) if options.optimizers else compare_layouts(options.words)


def compare_layouts(words: list[str]) -> int:
    groups, references, rows = {}, {}, []
    for name, layout in TABLE.items():
        if not all(word in name for word in words):
            continue
        reference = reference_of(layout)
        if reference not in references:
            references[reference] = group_of(1, groups).run(three_steps, reference)[0]
        started = time.perf_counter()
        outcomes = group_of(layout.ranks, groups).run(three_steps, layout, timeout=300)
        rows.append(judge(name, layout, outcomes, references[reference], time.perf_counter() - started))
        print(table(rows[-1:]).splitlines()[1], flush=True)
    for group in groups.values():
        group.stop()
    record("layout_parity", rows)
    bad = [row["layout"] for row in rows if not row["good"]]
    counted = sum(row["collectives"] == "equal" for row in rows)
    formulas = sum(row["collectives"] != "no formula" for row in rows)
    print(f"\n{table(rows)}\n\n{len(rows)} layouts, {len(bad)} out of tolerance")
    print(f"collectives equal to their formulas in {counted} of the {formulas} that have one")
    return 1 if bad else 0


def group_of(world: int, groups: dict[int, Ranks]) -> Ranks:
    if world not in groups:
        groups[world] = Ranks(world)
    return groups[world]


def judge(name: str, layout: Layout, outcomes: list[Outcome], reference: Outcome, seconds: float) -> dict:
    errors = outcomes[0].errors(reference)
    within = all(error <= layout.tolerance(what) for what, error in errors.items())
    agreed = all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    counted = [compare(layout, outcome, rank) for rank, outcome in enumerate(outcomes)]
    verdict = next((text for text in counted if text != "equal"), "equal")
    calls = Counter(outcomes[0].collectives)
    return {
        "layout": name,
        "ranks": layout.ranks,
        **errors,
        "collectives": verdict,
        "calls": sum(calls.values()),
        "bytes": sum(call.size * number for call, number in calls.items()),
        "parameter_bytes": outcomes[0].parameter_bytes,
        "seconds": seconds,
        "good": within and agreed and not verdict.startswith("differ"),
    }


def compare(layout: Layout, outcome: Outcome, rank: int) -> str:
    """ "equal", "no formula", or how what was counted on a rank differs from the formula."""
    parallelism = Parallelism(**layout.parallelism)
    degrees = resolve_degrees(layout.ranks, parallelism)
    if not has_formula(layout, degrees, parallelism.pipeline_parallel_schedule):
        return "no formula"
    expected = step_collectives(layout_workload(layout), rank, layout.loss)
    return describe(Counter(outcome.collectives), expected)


def layout_workload(layout: Layout) -> Workload:
    """What the planner is told of a row of tests/parity.py."""
    parallelism = Parallelism(**layout.parallelism)
    degrees = resolve_degrees(layout.ranks, parallelism)
    return Workload(
        model=architecture(layout),
        degrees=degrees,
        local_batch=GLOBAL_BATCH // (degrees.dp * layout.accumulation),
        global_batch=GLOBAL_BATCH,
        dtype=layout.dtype,
        reduce_itemsize=ITEMSIZE[layout.reduce],
        reshard=parallelism.fsdp_reshard_after_forward,
        method=parallelism.context_parallel_method,
        schedule=parallelism.pipeline_parallel_schedule,
        pipeline_micro_batch=parallelism.pipeline_parallel_microbatch_size,
        members=layout.members,
    )


def architecture(layout: Layout) -> Architecture:
    """Of the model that tests/parity.py builds."""
    options = dict(layout.model)
    learned = options.get("position", "learned") == "learned"
    bias, norm = options.get("qkv_bias", True), options.get("qk_norm", False)
    given = 3 * layout.history + 3 * layout.boundary + layout.roles + 2 + layout.noise_dim
    shape = (given, 3, 32, 4, 4)  # channels in and out, width, blocks, heads
    found = vit_architecture(
        layout.grid, (4, 4), *shape, qkv_bias=bias, qk_norm=norm, learned_position=learned
    )
    return replace(found, features=num_features(options.get("conditions", ())))


def has_formula(layout: Layout, degrees: Degrees, schedule: str) -> bool:
    """Whether the collectives of a layout have a closed form here.

    Not those of the U-Net (its halos are counted in tests/test_domain_parallel.py), of float8, compile and
    rollouts, of recomputation that repeats them, of spectral losses, of pipelines that are interleaved,
    combined with more than FSDP or with a loss that communicates, of conserved global means, of adapters, and
    of conditions with tensor parallelism.
    """
    if layout.conserve or layout.lora or (degrees.tp > 1 and "conditions" in dict(layout.model)):
        return False
    if layout.unet or layout.float8 or layout.compile or layout.rollout > 1:
        return False
    if (layout.activation_checkpoint != "none" or layout.spectral) and degrees.cp * degrees.tp > 1:
        return False
    plain = degrees.world == degrees.pp * degrees.dp_shard and layout.loss == "mse"
    return degrees.pp == 1 or (plain and schedule in ("GPipe", "1F1B"))


def describe(counted: Counter[Collective], expected: Counter[Collective]) -> str:
    if counted == expected:
        return "equal"
    more, fewer = counted - expected, expected - counted
    show = lambda calls: ", ".join(f"{n} x {c.kind} {c.axis} {c.size}" for c, n in calls.items())  # noqa: E731
    return f"differ: counted also [{show(more)}], not [{show(fewer)}]"


def table(rows: list[dict]) -> str:
    errors = ("loss", "gradient norm", "gradients", "weights")
    lines: list[tuple] = [
        ("layout", "ranks", "loss", "norm", "grads", "weights", "calls", "KiB", "param KiB")
    ]
    for row in rows:
        sizes = (row["calls"], row["bytes"] / 1024, row["parameter_bytes"] / 1024)
        verdict = f"  {row['collectives']}" + ("" if row["good"] else "   <-- OUT OF TOLERANCE")
        lines.append((row["layout"], row["ranks"], *(row[what] for what in errors), *sizes, verdict))
    return text_table("<38 >6 >9.1e >9.1e >9.1e >9.1e >7 >9.0f >11.1f <12", lines)


# -- optimisers


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
    lines = [(r["name"], r["ranks"], 1e3 * r["seconds"], r["over_adamw"]) for r in seconds]
    print(text_table("<12 >8 >10.1f >12.2f", [("optimiser", "ranks", "ms", "over AdamW"), *lines]) + "\n")
    for name in NAMES:
        mine = [row for row in rows if row["name"] == name]
        worst, sums = max(row["error"] for row in mine), sorted({row["all_reduces"] for row in mine})
        print(f"{name}: {len(mine)} layouts, largest difference {worst:.1e}, all-reduces {sums}")
    return int(any(row["wrong"] for row in rows))


def exact_layouts() -> dict[str, Layout]:
    """Return layouts of at most four ranks that round as one process; compiled ones add nothing."""
    plain = {n: each for n, each in TABLE.items() if not (each.compile or each.float8 or each.model)}
    alike = {n: each for n, each in plain.items() if each.dtype == each.reduce == "float32"}
    return {name: each for name, each in alike.items() if each.ranks <= 4 and each.loss == "mse"}


def check(group: Ranks, where: str, layout: Layout, name: str) -> dict[str, Any]:
    """Compare three steps with the papers' formulas."""
    found = group.run(train, layout, name)[0]
    expected = trained(name, found["before"], found["gradients"], decay=0.05)
    error, tensor = difference(found["after"], expected)
    calls = sum(number for call, number in found["collectives"].items() if call.kind == "all-reduce")
    asked = int(name in ("LAMB", "LARS") and layout.ranks > 1)
    row = {"layout": where, "name": name, "error": error, "tensor": tensor, "all_reduces": calls}
    print(row, flush=True)
    return {**row, "wrong": error > TOLERANCE[name] or (name != "Muon" and calls != asked)}


def time_updates(dim: int) -> list[dict[str, Any]]:
    """Return seconds of the update of each optimiser, medians in turn, and over AdamW's."""
    layout = replace(Layout(1), model=(("dim", dim), ("num_layers", 2), ("num_heads", 8)))
    runs = {name: SmallRun(layout, name=name, max_norm=0.0) for name in ("AdamW", *NAMES)}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for small in runs.values():
        for parameter in small.model.own_parameters().values():
            parameter.grad = torch.randn_like(parameter)
    for _ in range(10):  # the first of which warms up
        for name, small in runs.items():
            torch.distributed.barrier()
            begun = time.perf_counter()
            small.state.optimizer.step()
            torch.distributed.barrier()
            found[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    number = sum(p.numel() for p in runs["AdamW"].model.parameters.values())
    over = {name: median / medians["AdamW"] for name, median in medians.items()}
    return [{"name": n, "parameters": number, "seconds": medians[n], "over_adamw": over[n]} for n in medians]


if __name__ == "__main__":
    sys.exit(main())
