"""The case study's figures, computed: a ViT of 48 layers on 1024 x 2048, 64 A100 (mission.md, section 2)."""

from datetime import datetime

from parallelisms.degrees import Degrees
from planning.architecture import Architecture, vit_architecture
from planning.clusters import Link, load_cluster
from planning.cost import HOUR, Fleet, data_storage, dollars
from planning.memory import FLOAT32, Memory, memory, scores_bytes
from planning.network import ring_all_reduce
from planning.scenario_table import Row, billions, gb, percent
from planning.search import capacity, plan
from planning.step_time import BUCKET
from planning.workload import Workload
from training.lr_schedules import peak_lr

GRID, CHANNELS = (1024, 2048), 17
STATES, EPOCHS = 350_000, 50
RATES = {1: 0.85, 8: 6.4, 64: 44.0}  # samples/s that the study measured, by GPUs
GRAVITY = 9.80665
HPA_AS_DECAMETRES = 10 * GRAVITY  # of geopotential, m2 s-2


def model(patch: tuple[int, int]) -> Architecture:
    return vit_architecture(GRID, patch, CHANNELS, CHANNELS, 1536, 48, 24)


ONE = Degrees()


def work(batch: int, degrees: Degrees = ONE, **changes: object) -> Workload:
    """`batch` samples a rank; 4,096 tokens, as the study's figures have it."""
    values = CHANNELS * GRID[0] * GRID[1]
    made = Workload(model((16, 32)), degrees, batch, batch * degrees.dp)
    return made.replace(field_values=values, input_values=values, **changes)


def case_study_rows() -> list[Row]:
    return [
        *data_rows(),
        *model_rows(),
        *memory_rows(),
        *speed_rows(),
        *network_rows(),
        *recipe_rows(),
        *cost_rows(),
        *outcome_rows(),
    ]


def data_rows() -> list[Row]:
    hours = {y: (datetime(y + 1, 1, 1) - datetime(1979, 1, 1)).total_seconds() / HOUR for y in (2018, 2019)}
    whole, half = (data_storage(STATES, CHANNELS, GRID, itemsize) / 1e12 for itemsize in (4, 2))
    return [
        Row("variables", "17", f"{4 + 12}", "(4) four named and twelve others; figures below take 17"),
        Row("1024 x 2048 cells", "about 0.25 deg", f"{360 / GRID[1]:.3f} deg", "1440 columns are 0.25"),
        Row("40 steps of 6 h", "10 days", f"{40 * 6 / 24:.0f} days"),
        Row(
            "hours of 1979-2019",
            "350,000",
            f"{hours[2019]:,.0f}",
            f"{hours[2018]:,.0f} without 2019; 350,000 below",
        ),
        Row("data in float32", "200 TB", f"{whole:.0f} TB", "(3)"),
        Row("  in float16", "-", f"{half:.0f} TB", "(3) before compression"),
    ]


def model_rows() -> list[Row]:
    big, shown = model((16, 16)), model((16, 32))
    quarter = vit_architecture((720, 1440), (16, 16), CHANNELS, CHANNELS, 1536, 48, 24)
    taken = f"(1) 16 x 32 give {shown.tokens:,}, taken below"
    return [
        Row("tokens of 16 x 16 patches", "4,096", f"{big.tokens:,}", taken),
        Row("  on 720 x 1440", "-", f"{quarter.tokens:,}", "(1)"),
        Row("parameters, d = 1536, 48 layers", "1.2 B", billions(big.parameters),
            f"(2) blocks alone {billions(big.layers * big.block_parameters)}"),
        Row("head size, 24 heads", "-", f"{big.head_dim}"),
        Row("d_ff", "6144", f"{big.mlp_dim}", "4 d"),
        Row("TFLOP a sample, 4,096 tokens", "-", f"{3 * shown.flops() / 1e12:.1f}",
            f"forward and backward; {3 * big.flops() / 1e12:.1f} at 8,192"),
        Row("fp32 weights and Adam", "12 GB", gb(3 * FLOAT32 * big.parameters), "(6) a checkpoint"),
    ]  # fmt: skip


def memory_rows() -> list[Row]:
    """Of one GPU, at the moment when a step needs most."""
    fp32 = memory(work(1, dtype="float32"))
    bf16 = memory(work(1))
    every7 = {"ac_mode": "every_n_blocks", "every_n": 7}
    one, four, eight = (memory(work(batch, **every7)) for batch in (1, 4, 8))
    room = capacity(load_cluster("a100x1"))
    number = model((16, 32)).parameters
    scores = scores_bytes(work(4, attention="math"))
    fits = "fits" if eight.peak <= room else "does not fit"
    activations = {name: kept(made) for name, made in (("one", one), ("four", four))}
    return [
        Row("fp32: parameters", "4.8 GB", gb(FLOAT32 * number), "(2)"),
        Row("  gradients", "4.8 GB", gb(FLOAT32 * number), "(2)"),
        Row("  Adam", "9.6 GB", gb(fp32.components["optimiser states"]), "(2)"),
        Row("  activations, batch 1", "52 GB", gb(kept(fp32)), "flash attention, one copy of each input"),
        Row("  in all", "71 GB", gb(fp32.peak), f"peak: {fp32.peak_moment}"),
        Row("bf16: parameters", "4.8 GB", gb(bf16.components["parameters"]), "float32 masters"),
        Row("  copies in bf16", "2.4 GB", gb(bf16.components["copies of weights"])),
        Row("  gradients", "2.4 GB", gb(FLOAT32 * number), "autocast leaves them in float32"),
        Row("  Adam", "9.6 GB", gb(bf16.components["optimiser states"])),
        Row("  activations, batch 1", "26 GB", gb(kept(bf16))),
        Row("  in all", "45 GB", gb(bf16.peak), "at the loss, when gradients are gone"),
        Row("every 7th layer, about sqrt(48)", "7", f"{48**0.5:.1f}"),
        Row("  activations, batch 1", "3.8 GB", gb(activations["one"]), "with those computed again"),
        Row("  activations, batch 4", "15 GB", gb(activations["four"])),
        Row("  in all, batch 4", "34 GB", gb(four.peak)),
        Row("  batch 8 of 80 GB", "fits", fits, f"{gb(eight.peak)} of {gb(room)}"),
        Row("scores of a layer, batch 4", "3.2 GB", gb(scores), "flash attention never makes them"),
    ]


def kept(made: Memory) -> float:
    """Of all blocks, with what is computed again at the peak."""
    parts = max(made.moments.values(), key=lambda m: m.get("activations", 0) + m.get("recomputed", 0))
    return parts.get("activations", 0.0) + parts.get("recomputed", 0.0)


def speed_rows() -> list[Row]:
    """What follows from the study's rates, and what the planner expects of the same GPUs."""
    total = STATES * EPOCHS
    days = {gpus: total / rate / 86_400 for gpus, rate in RATES.items()}
    layouts = {
        1: work(1),
        8: work(1, Degrees(dp_replicate=8)),
        64: work(12, Degrees(dp_shard=64), reshard="never", ac_mode="every_n_blocks", every_n=7),
    }
    layouts[64] = layouts[64].replace(global_batch=12 * 4 * 64)
    made = {gpus: plan(w, load_cluster(f"a100x{gpus}")) for gpus, w in layouts.items()}
    planned = {gpus: f"{p.time.samples_per_second:.2f}/s" for gpus, p in made.items()}
    own = made[64].time.samples_per_second
    base = made[1].time.samples_per_second
    return [
        Row("1 GPU", "0.85/s", planned[1], "13 % of the peak there: not bound by arithmetic"),
        Row("  50 epochs at 0.85/s", "238 days", f"{days[1]:.0f} days"),
        Row("8 GPUs, DDP", "6.4/s", planned[8]),
        Row("  efficiency at 6.4/s", "96 %", percent(RATES[8] / RATES[1] / 8), "(5)"),
        Row("  50 epochs at 6.4/s", "3.7 days", f"{days[8]:.1f} days", "(5)"),
        Row("64 GPUs, FSDP ZeRO-2, batch 12 x 4", "44/s", planned[64],
            f"{made[64].memory.peak / 1e9:.0f} GB a rank"),
        Row("  global batch", "3,072", f"{layouts[64].global_batch:,}"),
        Row("  efficiency at 44/s", "80 %", percent(RATES[64] / RATES[1] / 64),
            f"the planner's {percent(own / base / 64)}, checkpointing included"),
        Row("  50 epochs at 44/s", "110 hours", f"{days[64] * 24:.0f} hours",
            f"{total / own / HOUR:.0f} at the planner's rate"),
        Row("  goal", "under 7 days", f"{days[64]:.1f} days"),
    ]  # fmt: skip


def network_rows() -> list[Row]:
    inside, between = Link(10e-6, 600e9), Link(50e-6, 25e9)
    size, step = 2.4e9, 1 / RATES[1]
    node, all64 = ring_all_reduce(8, inside, size), ring_all_reduce(64, between, size)
    own = load_cluster("a100x64")
    last = ring_all_reduce(64, between, BUCKET)
    return [
        Row("ring, n = 8, 10 us, 600 GB/s, 2.4 GB", "7.0 ms", f"{node * 1e3:.2f} ms"),
        Row("  n = 64, 50 us, 25 GB/s", "195 ms", f"{all64 * 1e3:.0f} ms"),
        Row("  a step at 0.85/s", "1.18 s", f"{step:.2f} s"),
        Row("  backward", "0.9 s", f"{step * backward_share():.2f} s", "its share of a step in the model"),
        Row("  efficiency if nothing is hidden", "83 %", percent(1 - all64 / step), "of 1.18 s"),
        Row("  hidden by backward", "80 %", percent(1 - last / all64), "all but the last bucket of 25 MiB"),
        Row("NVLink", "600 GB/s", f"{own.inside.bandwidth / 1e9:.0f} GB/s",
            "both directions there; a ring's rate here"),
        Row("between nodes", "25 GB/s", f"{own.between.bandwidth / 1e9:.0f} GB/s"),
    ]  # fmt: skip


def backward_share() -> float:
    """Of matrix products and attention: two products of three, and 2.5 of 3.5 of flash attention's FLOPs."""
    shown = model((16, 32))
    attention = shown.layers * shown.attention_flops()
    products = shown.flops() - attention
    return (2 * products + 2.5 * attention) / (3 * products + 3.5 * attention)


def recipe_rows() -> list[Row]:
    steps = STATES * EPOCHS / 3072
    rows = []
    for batch, said, ceiling in (
        (8, "3e-4", 1),
        (64, "2.4e-3", 1),
        (3072, "0.1152", 1),
        (3072, "0.01", 0.01),
    ):
        lr = peak_lr(3e-4, "linear", 8, batch, ceiling)
        remark = "capped" if ceiling < 1 else "linear"
        rows.append(Row(f"learning rate, batch {batch:,}", said, f"{lr:.4g}", remark))
    return [
        *rows,
        Row("2,000 warm-up steps", "5-10 %", percent(2000 / steps), f"(9) of {steps:,.0f} steps"),
        Row("critical batch", "256, 4,096", "-", "two sources, two numbers: measured, not computable"),
    ]


def cost_rows() -> list[Row]:
    cluster = load_cluster("a100x64")
    mixed, hours = Fleet(cluster, 1), round(STATES * EPOCHS / RATES[64] / HOUR)
    demand = dollars(hours, cluster.devices, cluster.on_demand)
    node = dollars(hours, mixed.on_demand_devices, cluster.on_demand)
    spot = dollars(hours, mixed.spot_devices, cluster.spot)
    lost = dollars(2 * 45 / 60, cluster.devices, cluster.spot)
    expected = dollars(hours * mixed.rate * HOUR, 1, 1)
    saved = 500 * 3072 / RATES[64] / HOUR
    return [
        Row("on demand, 110 h x 64 x $3.50", "$24,640", f"${demand:,.0f}"),
        Row("one node on demand", "$3,080", f"${node:,.0f}"),
        Row("7 spot nodes at $1.23", "$7,577", f"${spot:,.0f}"),
        Row("two preemptions of 45 min", "$118", f"${lost:,.0f}", f"{expected:.1f} expected in {hours} h"),
        Row("  in all", "$10,775", f"${node + spot + lost:,.0f}"),
        Row("500 steps between checkpoints", "35 min", f"{saved:.1f} h", "(7)"),
    ]


def outcome_rows() -> list[Row]:
    rows = []
    for name, value in (("CNN", 3.45), ("ViT", 3.21), ("ECMWF", 3.12)):
        geopotential = f"{value * HPA_AS_DECAMETRES:.0f} m2 s-2"
        rows.append(Row(f"z500 at day 5: {name}", f'{value} "hPa"', geopotential, "(8) read as decametres"))
    return [
        *rows,
        Row("profiling", "2 hours", "-", "measured there, not computable"),
    ]
