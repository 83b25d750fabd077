"""The mission's own figures beside computed ones: plan.py --scenario case_study, tutorial, textbook or all.

What the sources give (sizes, prices, rates) goes in; every figure in the column "computed" comes out of the
planner's functions. The number in a remark, (1) to (9), is that of a contradiction listed in the mission.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

from errors import ConfigError
from parallelisms.degrees import Degrees
from planning.architecture import Architecture, vit_architecture
from planning.case_study import CHANNELS as CHANNELS_OF_CASE
from planning.case_study import GRID, RATES, case_study_rows
from planning.clusters import load_cluster
from planning.cost import HOUR, Fleet, Saves, checkpoint_storage, expected_time
from planning.memory import memory, scores_bytes, state_bytes
from planning.report import checkpointing, layout
from planning.scenario_table import Row, billions, gb, percent, table
from planning.search import Plan, best_layouts, capacity, plan
from planning.step_time import bubble
from planning.workload import Workload
from training.lr_schedules import peak_lr

ERA5 = (360, 720)  # the tutorial's grid
CHANNELS = 20
LLAMA_70B = Architecture(
    tokens=8192,
    dim=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    mlp_dim=28672,
    in_features=0,
    out_features=128_256,
    vocabulary=128_256,
    biases=False,
    qkv_bias=False,
    learned_position=False,
    gated=True,
    causal=True,
    rotary=True,
)
TEXTBOOK_RULES = ("fits on one GPU", "nearly fits", "far too large")
TEXTBOOK_LAYOUT = Degrees(pp=2, dp_shard=4, tp=8)


def scenario_tables(name: str) -> str:
    """The tables of `name`, or of "all". ConfigError for any other name."""
    scenarios: dict[str, Callable[[], list[Row]]] = {
        "case_study": case_study_rows,
        "tutorial": tutorial_rows,
        "textbook": textbook_rows,
        "geoscience": geoscience_rows,
    }
    if name != "all" and name not in scenarios:
        raise ConfigError(f"--scenario {name!r}: no such scenario; give one of {', '.join(scenarios)} or all")
    chosen = scenarios if name == "all" else {name: scenarios[name]}
    return "\n\n".join(table(title, rows()) for title, rows in chosen.items())


# -- the tutorial


def tutorial_model(dim: int, grid: tuple[int, int] = ERA5) -> Architecture:
    return vit_architecture(grid, (8, 8), CHANNELS, CHANNELS, dim, 12, 8, qkv_bias=False)


def tutorial_work(dim: int, batch: int, degrees: Degrees, **changes: object) -> Workload:
    """`batch`: samples of all ranks."""
    made = Workload(tutorial_model(dim), degrees, batch // degrees.dp, batch)
    return with_fields(made, CHANNELS * ERA5[0] * ERA5[1]).replace(**changes)


def tutorial_rows() -> list[Row]:
    small, large = tutorial_model(384), tutorial_model(1536)
    blocks = large.layers * large.block_parameters / (small.layers * small.block_parameters)
    rows = [
        Row("parameters, d = 384, 360 x 720", "23.8 M", f"{small.parameters / 1e6:.1f} M"),
        Row(
            "  the same at 64 x 128",
            "22.3 M",
            f"{tutorial_model(384, (64, 128)).parameters / 1e6:.1f} M",
            "fewer positions to learn",
        ),
        Row("larger model, d = 1536", "about 16 x", f"{large.parameters / small.parameters:.1f} x",
            f"of the blocks alone {blocks:.1f} x; {large.parameters / 1e6:.0f} M"),
        Row("head size", "48", f"{small.head_dim}", f"{large.head_dim} of the larger one, also 8 heads"),
        Row("tokens", "4,050", f"{small.tokens:,}"),
    ]  # fmt: skip
    for batch in (16, 64, 256, 1024):
        lr = peak_lr(5e-4, "sqrt", 16, batch, float("inf"))
        said = {16: "5e-4", 64: "1e-3", 256: "2e-3", 1024: "4e-3"}[batch]
        rows.append(Row(f"learning rate of bs{batch}_opt", said, f"{lr:.0e}".replace("e-0", "e-")))
    return [*rows, *tutorial_speed(), *tutorial_memory()]


def tutorial_speed() -> list[Row]:
    """Samples/s; what the tutorial's loader and optimiser cost is not in the model of a step."""
    one, node, four = (load_cluster(name) for name in ("a100-40x1", "a100-40x4", "a100-40x16"))
    rows = []
    for what, source, remark, changes in (
        ("as written", "8.8", "fp32; it waits for its data", {"dtype": "float32"}),
        ("8 workers", "12", "the same: no step's time, a loader's", {"dtype": "float32"}),
        ("fp16 or bf16", "37.5", "a step alone, data there", {}),
        ("compile, fused Adam", "42", "a step alone, data there", {"compiled": True}),
    ):
        made = plan(tutorial_work(384, 16, Degrees(), **changes), one)
        rows.append(Row(f"samples/s, batch 16: {what}", source, rate(made), remark))
    data = plan(tutorial_work(1536, 16, Degrees(dp_replicate=4), compiled=True), node)
    cut = plan(tutorial_work(1536, 64, Degrees(dp_replicate=4, tp=4), compiled=True), four)
    a_gpu = cut.time.samples_per_second / 4 / data.time.samples_per_second
    return [
        *rows,
        Row("large model, 4 GPUs, data parallel", "51", rate(data), "its batch is not said: 4 a GPU here"),
        Row("  16 GPUs, tensor parallel 4", "72", rate(cut), "it reduces 2 + 4 times a block, Rossby 2 + 2"),
        Row("  of the rate a GPU", "35 %", percent(a_gpu)),
        Row("u10 RMSE after 22k steps", "0.13", "-", "a score: measured there, not computable"),
    ]


def tutorial_memory() -> list[Row]:
    """Batch 16, at which 8.8 to 42 samples/s were measured."""
    room = capacity(load_cluster("a100-40x1"))
    whole = memory(tutorial_work(1536, 16, Degrees())).peak
    cut = memory(tutorial_work(1536, 16, Degrees(tp=4))).peak
    verdict = "fits" if whole <= room else "does not fit"
    return [
        Row("large model on one GPU", "54 GB", gb(whole), "torch's share; the source counts the process"),
        Row("  on 40 GB", "out of memory", verdict, f"{gb(room)} can be used"),
        Row("  tensor parallel 4", "38 GB", gb(cut), "there each rank keeps the whole residual stream"),
    ]


def rate(made: Plan) -> str:
    return f"{made.time.samples_per_second:.0f}"


# -- the textbook


def textbook_rows() -> list[Row]:
    return [*states_rows(), *rule_rows(), *llama_rows(), *habits_rows()]


def states_rows() -> list[Row]:
    """16-bit weights and gradients, 8 B of Adam: 12 B a parameter; Rossby keeps float32 masters: 16."""
    size = 7e9
    parts = {"weights": 2 * size, "gradients": 2 * size, "Adam": 8 * size}
    bytes_each = {"weights": "14 GB", "gradients": "14 GB", "Adam": "56 GB"}
    rows = [Row(f"7 B parameters: {name}", bytes_each[name], gb(value)) for name, value in parts.items()]
    own = gb(16 * size)
    return [*rows, Row("  together", "84 GB", gb(sum(parts.values())), f"with float32 weights {own}")]


@dataclass(frozen=True)
class Decision:
    """A row of the decision table in docs/planning.md; `kind` is what `--layout auto` has to find."""

    job: str
    rule: str  # what the textbook calls it
    kind: str
    work: Workload
    cluster: str


def decisions() -> list[Decision]:
    """Micro-batches and layouts of the workloads are only where the search starts."""
    small = Architecture(1024, 512, 12, 8, 2048, 1280, 1280)
    ddp = Workload(small, Degrees(dp_shard=4), 16, 64)
    return [
        Decision("45 M, 4 GPUs", "fits on one GPU", "DDP", with_fields(ddp, 256 * 256 * 20), "a100x4"),
        Decision("1.4 B, 64 GPUs", "fits on one GPU", "DDP", case_study(1536, 24), "a100x64"),
        Decision("5.5 B, 64 GPUs", "nearly fits", "FSDP", case_study(3072, 24), "a100x64"),
        Decision("30 B, 64 GPUs", "too large", "tensor", case_study(7168, 56), "a100-8hdrx64"),
        Decision("131,072 tokens, batch 16", "field too large", "context", fine_patches(), "a100x64"),
        Decision("Llama-3-70B, 64 GPUs", "far too large", "3D", llama(1), "a100-8hdrx64"),
    ]


def case_study(dim: int, heads: int, patch: tuple[int, int] = (16, 16), batch: int = 256) -> Workload:
    """The case study's task with 48 blocks of another width, compiled, on 64 GPUs."""
    shape = vit_architecture(GRID, patch, CHANNELS_OF_CASE, CHANNELS_OF_CASE, dim, 48, heads)
    made = Workload(shape, Degrees(dp_shard=64), 1, batch, compiled=True)
    return with_fields(made, CHANNELS_OF_CASE * GRID[0] * GRID[1])


def fine_patches() -> Workload:
    """4 x 4 cells a patch: 131,072 tokens, and fewer samples than GPUs."""
    return case_study(1536, 24, (4, 4), batch=16).replace(degrees=Degrees(dp_shard=16, cp=4))


def llama(batch: int) -> Workload:
    return Workload(LLAMA_70B, Degrees(dp_shard=64), batch, 128, compiled=True)


def with_fields(work: Workload, values: int) -> Workload:
    return work.replace(field_values=values, input_values=values)


def kind(degrees: Degrees) -> str:
    """What splits a sample or, where nothing does, whether states are sharded."""
    if degrees.splits_model:
        names = {"3D": degrees.tp > 1 and degrees.pp > 1, "context": degrees.cp > 1, "tensor": degrees.tp > 1}
        return next((name for name, here in names.items() if here), "pipeline")
    return "FSDP" if degrees.dp_shard > 1 else "DDP"


def rule_rows() -> list[Row]:
    rows = []
    for decision in decisions():
        best = best_layouts(decision.work, load_cluster(decision.cluster), number=1)[0].work
        said = decision.kind if decision.rule in TEXTBOOK_RULES else "-"
        chosen = f"{layout(best).split(' (')[0]}, checkpointing {checkpointing(best)}"
        rows.append(Row(f"{decision.rule}: {decision.job}", said, kind(best.degrees), chosen))
    return rows


def llama_rows() -> list[Row]:
    """The layout that the chapter names among all that fit; a link for each GPU of a node, or one for all."""
    number = LLAMA_70B.parameters
    states = sum(state_bytes(Workload(LLAMA_70B, TEXTBOOK_LAYOUT, 32, 128)).values())
    rows = [
        Row("Llama-3-70B on 64 A100: states", "840 GB", gb(12 * number), f"{billions(number)} x 12 B"),
        Row("  tp 8 x pp 2 x dp 4: of a rank", "-", gb(states), "with float32 weights and gradients"),
    ]
    for name in ("a100-8hdrx64", "a100x64"):
        cluster = load_cluster(name)
        found = best_layouts(llama(1), cluster, number=99)
        place = next(i for i, p in enumerate(found, 1) if p.work.degrees == TEXTBOOK_LAYOUT)
        slower = found[place - 1].time.total / found[0].time.total - 1
        best = layout(found[0].work).split(" (")[0]
        link = cluster.between.bandwidth / 1e9
        what, computed = f"  its place, {link:.0f} GB/s a node", f"{place} of {len(found)}"
        rows.append(Row(what, "the layout", computed, f"{slower:+.0%} time; first: {best}"))
    work = Workload(LLAMA_70B, TEXTBOOK_LAYOUT, 32, 128)
    share = bubble(work, 1.0) / (bubble(work, 1.0) + work.micro_batches)
    return [*rows, Row("  its bubble, 32 micro-batches", "-", percent(share), "(p - 1)/(m + p - 1)")]


def habits_rows() -> list[Row]:
    """Defaults of fp16's scaler, checkpoints kept, and what a failed node costs."""
    from torch.amp.grad_scaler import GradScaler  # here: torch takes a second

    scaler = {name: p.default for name, p in inspect.signature(GradScaler).parameters.items()}
    kept = checkpoint_storage(12 * LLAMA_70B.parameters, 5, 100_000, 1000)
    fleet, interval = Fleet(load_cluster("a100x64"), 1), 1000 * 3072 / RATES[64]
    lost = expected_time(30 * 86_400, Saves(interval, restart=1800), fleet.rate)
    each = (lost.restarts + lost.redone) / lost.preemptions / HOUR
    scores = scores_bytes(Workload(LLAMA_70B, Degrees(), 1, 1, attention="math"))
    return [
        Row("fp16: first scale", "2^16", f"2^{math.log2(scaler['init_scale']):.0f}"),
        Row("  after good steps", "2,000", f"{scaler['growth_interval']:,}"),
        Row("  times", "x 2", f"x {scaler['growth_factor']:g}"),
        Row("  after an overflow", "x 0.5", f"x {scaler['backoff_factor']:g}"),
        Row("checkpointing every sqrt(L)", "sqrt(L)", f"every {round(LLAMA_70B.layers**0.5)}", "80 blocks"),
        Row("flash attention, Llama-3-70B", "-", gb(scores), "a block's scores, which it never keeps"),
        Row("checkpoints kept, every 1,000 steps", "5", gb(kept), "of 70 B, with the one being written"),
        Row("a node lost", "30 min", f"{each:.1f} h", "30 min and half of 1,000 of the case study's steps"),
        Row("GPU utilisation", "over 90 %", "-", "measured while training, not computable"),
    ]


# -- the geoscience guide


def geoscience_rows() -> list[Row]:
    grid, levels = (721, 1440), 5 * 13
    state = 73 * grid[0] * grid[1] * 4
    return [
        Row("channels", "65", f"{levels}", "5 variables x 13 levels"),
        Row("  with 8 surface variables", "73", f"{levels + 8}"),
        Row("a state in fp32", "303 MB", f"{state / 1e6:.0f} MB", "73 channels on 721 x 1440"),
        Row("  k steps of a rollout", "k x", "k x", "activations: plan.py --rollout_steps k"),
    ]
