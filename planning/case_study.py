"""The case study's figures, computed: a ViT of 48 layers on 1024 x 2048, 64 A100 (mission.md, section 2).

Each function gives some rows of the table, "what | the study's figure | the computed one | remark".
"""

import math
from datetime import datetime

from parallelisms.degrees import Degrees
from planning.architecture import Architecture, vit_architecture
from planning.clusters import load_cluster
from planning.cost import HOUR, Fleet
from planning.hardware import Link
from planning.memory import FLOAT32, Memory, memory, scores_bytes
from planning.network import ring_all_reduce
from planning.search import capacity, plan
from planning.step_time import BUCKET
from planning.workload import Workload
from training.optimizers.lr_schedules import peak_lr

GRID, CHANNELS = (1024, 2048), 17
STATES, EPOCHS = 350_000, 50
RATES = {1: 0.85, 8: 6.4, 64: 44.0}  # samples/s that the study measured, by GPUs
EVERY7 = {
    "ac_mode": "every_n_blocks",
    "every_n": 7,
}  # as all three runs have it, with bf16 and FlashAttention
STEP_AT_64 = 3072 / RATES[64]  # seconds, of the study's global batch
HPA_AS_DECAMETRES = 10 * 9.80665  # of geopotential, m2 s-2


def vit(
    patch: tuple[int, int], dim: int = 1536, heads: int = 24, grid: tuple[int, int] = GRID
) -> Architecture:
    return vit_architecture(grid, patch, CHANNELS, CHANNELS, dim, 48, heads)


ONE, SHOWN = Degrees(), vit((16, 32))  # 4,096 tokens, as the study's figures have it


def task(
    local_batch: int, degrees: Degrees = ONE, model: Architecture = SHOWN, **changes: object
) -> Workload:
    """The study's forecast on its fields, `local_batch` samples a rank."""
    values = CHANNELS * math.prod(GRID)
    batch = local_batch * degrees.dp
    work = Workload(model, degrees, local_batch, batch, field_values=values, input_values=values)
    return work.replace(**changes)


def gb(value: float) -> str:
    """Bytes in GB, of 10^9, as the mission counts."""
    return f"{value / 1e9:,.1f} GB" if value < 1e11 else f"{value / 1e9:,.0f} GB"


def verdict(peak: float, room: float) -> str:
    return "fits" if peak <= room else "does not fit"


def case_study_rows() -> str:
    return "".join(
        rows()
        for rows in (data_rows, model_rows, memory_rows, speed_rows, network_rows, recipe_rows, cost_rows)
    )


def data_rows() -> str:
    hours = {y: (datetime(y + 1, 1, 1) - datetime(1979, 1, 1)).total_seconds() / HOUR for y in (2018, 2019)}
    values = STATES * CHANNELS * math.prod(GRID)
    return f"""
variables | 17 | {4 + 12} | (4) four named and twelve others; figures below take 17
1024 x 2048 cells | about 0.25 deg | {360 / GRID[1]:.3f} deg | 1440 columns are {360 / 1440:g}
40 steps of 6 h | 10 days | {40 * 6 / 24:.0f} days |
hours of 1979-2019 | 350,000 | {hours[2019]:,.0f} | {hours[2018]:,.0f} without 2019; 350,000 below
data in float32 | 200 TB | {4 * values / 1e12:.0f} TB | (3)
  in float16 | - | {2 * values / 1e12:.0f} TB | (3) before compression
  compressed | 35 TB | {2 * values / 1e12:.0f} TB | (15) so much are the raw float16 fields
"""


def model_rows() -> str:
    big = vit((16, 16))
    blocks = big.layers * big.block_parameters
    return f"""
tokens of 16 x 16 patches | 4,096 | {big.tokens:,} | (1) 16 x 32 give {SHOWN.tokens:,}, taken below
  on 720 x 1440 | - | {vit((16, 16), grid=(720, 1440)).tokens:,} | (1)
parameters, d = 1536, 48 layers | 1.2 B | {big.parameters / 1e9:.3g} B | (2) blocks alone {blocks / 1e9:.3g} B
head size, 24 heads | - | {big.head_dim} |
d_ff | 6144 | {big.mlp_dim} | 4 d
TFLOP a sample, 4,096 tokens | - | {3 * SHOWN.flops() / 1e12:.1f} |\
 forward and backward; {3 * big.flops() / 1e12:.1f} at 8,192
fp32 weights and Adam | 12 GB | {gb(3 * FLOAT32 * big.parameters)} | (6) a checkpoint
"""


def memory_rows() -> str:
    """Of one GPU, at the moment when a step needs most."""
    fp32, bf16 = memory(task(1, dtype="float32")), memory(task(1))
    one, four, eight = (memory(task(batch, **EVERY7)) for batch in (1, 4, 8))
    room = capacity(load_cluster("a100x1"))
    saved = (9.6e9 + 2.4e9) * 63 / 64  # of the study's own Adam and bf16 gradients
    weights = gb(FLOAT32 * SHOWN.parameters)
    return f"""
fp32: parameters | 4.8 GB | {weights} | (2)
  gradients | 4.8 GB | {weights} | (2)
  Adam | 9.6 GB | {gb(fp32.components["optimiser states"])} | (2)
  activations, batch 1 | 52 GB | {gb(kept(fp32))} | flash attention, one copy of each input
  in all | 71 GB | {gb(fp32.peak)} | peak: {fp32.peak_moment}
  71 GB on an 80 GB GPU | does not fit | {verdict(71e9, room)} |\
 (11) a second sample's 52 GB: {verdict(71e9 + 52e9, room)}
bf16: parameters | 4.8 GB | {gb(bf16.components["parameters"])} | float32 masters
  copies in bf16 | 2.4 GB | {gb(bf16.components["copies of weights"])} |
  gradients | 2.4 GB | {weights} | autocast leaves them in float32
  Adam | 9.6 GB | {gb(bf16.components["optimiser states"])} |
  activations, batch 1 | 26 GB | {gb(kept(bf16))} |
  in all | 45 GB | {gb(bf16.peak)} | at the loss, when gradients are gone
every 7th layer, about sqrt(48) | 7 | {48**0.5:.1f} |
  activations, batch 1 | 3.8 GB | {gb(kept(one))} | with those computed again
  activations, batch 4 | 15 GB | {gb(kept(four))} |
  in all, batch 4 | 34 GB | {gb(four.peak)} |
  batch 8 of 80 GB | fits | {verdict(eight.peak, room)} | {gb(eight.peak)} of {gb(room)}
sharded over 64: saved of Adam, gradients | 4.5 GB | {gb(saved)} | (12) 63/64 of 9.6 and 2.4 GB
scores of a layer, batch 4 | 3.2 GB | {gb(scores_bytes(task(4, attention="math")))} |\
 flash attention never makes them
"""


def kept(made: Memory) -> float:
    """Bytes of activations of all blocks, with those recomputed, at the moment that has most of them."""
    names = ("activations", "recomputed")
    return max(sum(moment.get(name, 0.0) for name in names) for moment in made.moments.values())


def speed_rows() -> str:
    """What follows from the study's rates, and what the planner expects of the same GPUs."""
    days = {gpus: STATES * EPOCHS / rate / 86_400 for gpus, rate in RATES.items()}
    one, node, all64 = (plan(work, load_cluster(f"a100x{work.degrees.world}")) for work in runs())
    base, own = one.time.samples_per_second, all64.time.samples_per_second
    mfu = RATES[1] * one.work.sample_flops / load_cluster("a100x1").device.peak["bf16"]
    return f"""
1 GPU, batch 8, checkpointed, bf16 | 0.85/s | {base:.2f}/s |\
 {mfu:.0%} of the peak there: not bound by arithmetic
  50 epochs at 0.85/s | 238 days | {days[1]:.0f} days |
8 GPUs, DDP | 6.4/s | {node.time.samples_per_second:.2f}/s |
  efficiency at 6.4/s | 96 % | {RATES[8] / RATES[1] / 8:.0%} | (5)
  50 epochs at 6.4/s | 3.7 days | {days[8]:.1f} days | (5)
64 GPUs, FSDP ZeRO-2, batch 12 x 4 | 44/s | {own:.2f}/s | {all64.memory.peak / 1e9:.0f} GB a rank
  global batch | 3,072 | {all64.work.global_batch:,} |
  efficiency at 44/s | 80 % | {RATES[64] / RATES[1] / 64:.0%} | (14) of the study's own rates
  of the same settings as planned | 80 % | {own / base / 64:.0%} | (14) {own:.0f} / (64 x {base:.2f})
  50 epochs at 44/s | 110 hours | {days[64] * 24:.0f} hours |\
 {STATES * EPOCHS / own / HOUR:.0f} at the planner's rate
  goal | under 7 days | {days[64]:.1f} days |
"""


def runs() -> list[Workload]:
    """The study's, as it describes them: one setting, on 1, 8 and 64 GPUs."""
    zero2 = task(12, Degrees(dp_shard=64), **EVERY7, reshard="never", global_batch=12 * 4 * 64)
    return [task(8, **EVERY7), task(8, Degrees(dp_replicate=8), **EVERY7), zero2]


def network_rows() -> str:
    size, step, cluster = 2.4e9, 1 / RATES[1], load_cluster("a100x64")
    between = Link(50e-6, 25e9)
    node, all64 = ring_all_reduce(8, Link(10e-6, 600e9), size), ring_all_reduce(64, between, size)
    last = ring_all_reduce(64, between, BUCKET)
    return f"""
ring, n = 8, 10 us, 600 GB/s, 2.4 GB | 7.0 ms | {node * 1e3:.2f} ms |
  n = 64, 50 us, 25 GB/s | 195 ms | {all64 * 1e3:.0f} ms |
  a sample at 0.85/s | 1.18 s | {step:.2f} s | (10) the study takes it for a step
  a step of batch 8 | 1.18 s | {8 * step:.1f} s | (10) eight samples
  the ring's part of a step | 16.5 % | {all64 / (8 * step):.1%} | (10) {all64 / step:.1%} of {step:.2f} s
  backward | 0.9 s | {step * backward_fraction():.2f} s | its part of a step in the model
  efficiency if nothing is hidden | 83 % | {1 - all64 / step:.0%} | of {step:.2f} s
  hidden by backward | 80 % | {1 - last / all64:.0%} | all but the last bucket of 25 MiB
NVLink | 600 GB/s | {cluster.inside.bandwidth / 1e9:.0f} GB/s | both directions there; a ring's rate here
between nodes | 25 GB/s | {cluster.between.bandwidth / 1e9:.0f} GB/s |
"""


def backward_fraction() -> float:
    """Of matrix products and attention: two products of three, and 2.5 of 3.5 of flash attention's FLOPs."""
    attention = SHOWN.layers * SHOWN.attention_flops()
    products = SHOWN.flops() - attention
    return (2 * products + 2.5 * attention) / (3 * products + 3.5 * attention)


def recipe_rows() -> str:
    steps = STATES * EPOCHS / 3072

    def lr(batch: int, ceiling: float = 1.0) -> str:
        return f"{peak_lr(3e-4, 'linear', 8, batch, ceiling):.4g}"

    return f"""
learning rate, batch 8 | 3e-4 | {lr(8)} | linear
learning rate, batch 64 | 2.4e-3 | {lr(64)} | linear
learning rate, batch 3,072 | 0.1152 | {lr(3072)} | linear
learning rate, batch 3,072 | 0.01 | {lr(3072, 0.01)} | capped
2,000 warm-up steps | 5-10 % | {2000 / steps:.0%} | (9) of {steps:,.0f} steps
critical batch | 256, 4,096 | - | two sources, two numbers: measured, not computable
"""


def score_rows() -> str:
    """Geopotential has no "hPa": read as decametres, in geopotential and in geopotential metres."""
    errors = {"CNN": 3.45, "ViT": 3.21, "ECMWF": 3.12}
    return "".join(
        f'z500 at day 5: {name} | {error} "hPa" | {error * HPA_AS_DECAMETRES:.0f} m2 s-2 |'
        f" (8) as decametres, {10 * error:.1f} gpm\n"
        for name, error in errors.items()
    )


def cost_rows() -> str:
    """The study's bill: what preemptions waste is priced as if all nodes were spot. Then its outcome."""
    cluster = load_cluster("a100x64")
    fleet, hours = Fleet(cluster, on_demand_nodes=1), round(STATES * EPOCHS / RATES[64] / HOUR)
    on_demand = hours * cluster.devices * cluster.on_demand
    node = hours * fleet.on_demand_devices * cluster.on_demand
    spot = hours * fleet.spot_devices * cluster.spot
    lost, preemptions = 2 * 45 / 60 * cluster.devices * cluster.spot, hours * HOUR * fleet.preemption_rate
    return f"""
on demand, 110 h x 64 x $3.50 | $24,640 | ${on_demand:,.0f} |
one node on demand | $3,080 | ${node:,.0f} |
7 spot nodes at $1.23 | $7,577 | ${spot:,.0f} |
two preemptions of 45 min | $118 | ${lost:,.0f} | {preemptions:.1f} expected in {hours} h
  in all | $10,775 | ${node + spot + lost:,.0f} |
  cheaper than on demand | 7 x | {on_demand / (node + spot + lost):.1f} x |\
 (13) "$37,000 to $5,400" is {37_000 / 5_400:.1f} x
  a year of a run a day | $900,000 | ${365 * on_demand / 1e6:.1f} M | (13) 365 x ${on_demand:,.0f}
500 steps between checkpoints | 35 min | {500 * STEP_AT_64 / HOUR:.1f} h | (7)
{score_rows()}profiling | 2 hours | - | measured there, not computable
"""
