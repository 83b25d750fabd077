"""Every layout against one process: losses, gradients, weights, and every collective against its formula.

    .venv/bin/python benchmarks/layout_parity.py [words that a row's name must contain]

Needs no GPU: ranks are gloo processes, at most 8 at once. Ends with 1 when a row is out of its tolerance or
a count or size is not what the formula says.
"""

import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


from benchmarks.results_file import record
from config import Parallelism
from models.registry import num_features
from parallelisms.collectives import Collective
from parallelisms.degrees import Degrees, resolve_degrees
from planning.architecture import Architecture, vit_architecture
from planning.workload import ITEMSIZE, Workload
from tests.collective_formulas import step_collectives
from tests.distributed import Ranks
from tests.parity import GLOBAL_BATCH, TABLE, Layout, Outcome, reference_of, three_steps


def main() -> int:
    words, groups, references, rows = sys.argv[1:], {}, {}, []
    for name, layout in TABLE.items():
        if not all(word in name for word in words):
            continue
        reference = reference_of(layout)
        if reference not in references:
            references[reference] = group_of(1, groups).run(three_steps, reference)[0]
        started = time.perf_counter()
        outcomes = group_of(layout.ranks, groups).run(three_steps, layout, timeout=300)
        rows.append(judge(name, layout, outcomes, references[reference], time.perf_counter() - started))
        print(line(rows[-1]), flush=True)
    for group in groups.values():
        group.stop()
    record("layout_parity", rows)
    bad = [row["layout"] for row in rows if not row["good"]]
    counted = sum(row["collectives"] == "equal" for row in rows)
    formulas = sum(row["collectives"] != "no formula" for row in rows)
    print(f"\n{HEAD}\n" + "\n".join(map(line, rows)))
    print(f"\n{len(rows)} layouts, {len(bad)} out of tolerance")
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
    return difference(Counter(outcome.collectives), expected)


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
    given = 3 * layout.history + 2 + layout.noise_dim
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


def difference(counted: Counter[Collective], expected: Counter[Collective]) -> str:
    if counted == expected:
        return "equal"
    more, fewer = counted - expected, expected - counted
    show = lambda calls: ", ".join(f"{n} x {c.kind} {c.axis} {c.size}" for c, n in calls.items())  # noqa: E731
    return f"differ: counted also [{show(more)}], not [{show(fewer)}]"


HEAD = (
    f"{'layout':<38}{'ranks':>6}{'loss':>9}{'norm':>9}{'grads':>9}{'weights':>9}{'calls':>7}"
    f"{'KiB':>9}{'param KiB':>11}  collectives"
)


def line(row: dict) -> str:
    errors = "".join(f"{row[what]:>9.1e}" for what in ("loss", "gradient norm", "gradients", "weights"))
    sizes = f"{row['calls']:>7}{row['bytes'] / 1024:>9.0f}{row['parameter_bytes'] / 1024:>11.1f}"
    verdict = "" if row["good"] else "   <-- OUT OF TOLERANCE"
    return f"{row['layout']:<38}{row['ranks']:>6}{errors}{sizes}  {row['collectives']}{verdict}"


if __name__ == "__main__":
    sys.exit(main())
