"""The mission's own figures beside computed ones: plan.py --scenario case_study, tutorial, textbook or all.

What the sources give (sizes, prices, rates) goes in; every figure in the column "computed" comes out of the
planner's functions. The number in a remark, (1) to (15), is that of a contradiction listed in the mission.
"""

import inspect
import math
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from command_line import text_table
from errors import ConfigError
from optimizers.lr_schedules import peak_lr
from parallelisms.degrees import Degrees
from planning.architecture import Architecture, vit_architecture
from planning.case_study import STEP_AT_64, case_study_rows, gb, task, verdict, vit
from planning.clusters import load_cluster
from planning.cost import HOUR, Fleet, Saves, checkpoint_storage, expected_time
from planning.memory import memory, scores_bytes, state_bytes, stored_bytes
from planning.report import checkpointing, layout
from planning.search import best_layouts, capacity, plan
from planning.step_time import bubble
from planning.workload import Workload

REMARK = 34  # characters of a line of remarks
ERA5, CHANNELS = (360, 720), 20  # the tutorial's
LLAMA = {"biases": False, "qkv_bias": False, "learned_position": False}
LLAMA |= {"gated": True, "causal": True, "rotary": True}
# Tokens, D, layers, heads, M; no patches, a head that chooses among the words, heads of keys and values.
LLAMA_70B = Architecture(8192, 8192, 80, 64, 28672, 0, 128_256, 8, vocabulary=128_256, **LLAMA)
TEXTBOOK_LAYOUT = Degrees(pp=2, dp_shard=4, tp=8)


def scenario_tables(name: str) -> str:
    """The tables of `name`, or of "all". ConfigError for any other name."""
    scenarios: dict[str, Callable[[], str]] = {
        "case_study": case_study_rows,
        "tutorial": tutorial_rows,
        "textbook": textbook_rows,
        "geoscience": geoscience_rows,
    }
    if name != "all" and name not in scenarios:
        raise ConfigError(f"--scenario {name!r}: no such scenario; give one of {', '.join(scenarios)} or all")
    chosen = scenarios if name == "all" else {name: scenarios[name]}
    return "\n\n".join(scenario_table(title, rows()) for title, rows in chosen.items())


def scenario_table(title: str, text: str) -> str:
    """One scenario as a table whose remarks are wrapped."""
    lines = [(title, "source", "computed", "", "remark"), ("-" * 110,)]
    for what, source, computed, remark in cells(text):
        first, *more = textwrap.wrap(remark, REMARK) or [""]
        lines.append((what, source, computed, "", first))
        lines += [("", "", "", "", rest) for rest in more]
    return text_table(f"<41 >16 >18 <1 <{REMARK}", lines)


def cells(text: str) -> list[tuple[str, ...]]:
    """(what, the source's figure, the computed one, remark) of lines that have | between them."""
    lines = [line.split("|") for line in text.splitlines() if line]
    return [(what.rstrip(), *(cell.strip() for cell in rest)) for what, *rest in lines]


# -- the tutorial


def tutorial_model(dim: int, grid: tuple[int, int] = ERA5) -> Architecture:
    return vit_architecture(grid, (8, 8), CHANNELS, CHANNELS, dim, 12, 8, qkv_bias=False)


def tutorial_work(dim: int, batch: int, degrees: Degrees, **changes: object) -> Workload:
    """`batch`: samples of all ranks."""
    values, model = CHANNELS * math.prod(ERA5), tutorial_model(dim)
    work = Workload(model, degrees, batch // degrees.dp, batch, field_values=values, input_values=values)
    return work.replace(**changes)


def tutorial_rows() -> str:
    small, large = tutorial_model(384), tutorial_model(1536)
    blocks = large.layers * large.block_parameters / (small.layers * small.block_parameters)

    def lr(batch: int) -> str:
        return f"{peak_lr(5e-4, 'sqrt', 16, batch, float('inf')):.0e}".replace("e-0", "e-")

    return f"""
parameters, d = 384, 360 x 720 | 23.8 M | {small.parameters / 1e6:.1f} M |
  the same at 64 x 128 | 22.3 M | {tutorial_model(384, (64, 128)).parameters / 1e6:.1f} M |\
 fewer positions to learn
larger model, d = 1536 | about 16 x | {large.parameters / small.parameters:.1f} x |\
 of the blocks alone {blocks:.1f} x; {large.parameters / 1e6:.0f} M
head size | 48 | {small.head_dim} | {large.head_dim} of the larger one, also 8 heads
tokens | 4,050 | {small.tokens:,} |
learning rate of bs16_opt | 5e-4 | {lr(16)} |
learning rate of bs64_opt | 1e-3 | {lr(64)} |
learning rate of bs256_opt | 2e-3 | {lr(256)} |
learning rate of bs1024_opt | 4e-3 | {lr(1024)} |
{tutorial_speed()}{tutorial_memory()}"""


def tutorial_speed() -> str:
    """Samples/s; what the tutorial's loader and optimiser cost is not in the model of a step."""

    def rate(dim: int, batch: int, degrees: Degrees, machine: str = "a100-40", **changes: object) -> float:
        cluster = load_cluster(f"{machine}x{degrees.world}")
        return plan(tutorial_work(dim, batch, degrees, **changes), cluster).time.samples_per_second

    fp32 = rate(384, 16, Degrees(), dtype="float32")
    data = rate(1536, 64, Degrees(dp_replicate=4), compiled=True, machine="a100-80")
    tensor = rate(1536, 64, Degrees(dp_replicate=4, tp=4), compiled=True)
    return f"""
samples/s, batch 16: as written | 8.8 | {fp32:.0f} | fp32; it waits for its data
samples/s, batch 16: 8 workers | 12 | {fp32:.0f} | the same: no step's time, a loader's
samples/s, batch 16: fp16 or bf16 | 37.5 | {rate(384, 16, Degrees()):.0f} | a step alone, data there
samples/s, batch 16: compile, fused Adam | 42 | {rate(384, 16, Degrees(), compiled=True):.0f} |\
 a step alone, data there
large model, 4 GPUs of 80 GB, batch 64 | 51 | {data:.0f} | data parallel; its epochs read data, too
  16 GPUs, tensor parallel 4 | 72 | {tensor:.0f} | it reduces 2 + 4 times a block, Rossby 2 + 2
  of the rate a GPU | 35 % | {tensor / 4 / data:.0%} |
u10 RMSE after 22k steps | 0.13 | - | a score: measured there, not computable
"""


def tutorial_memory() -> str:
    """Batch 16, at which 8.8 to 42 samples/s were measured."""
    room = capacity(load_cluster("a100-40x1"))
    whole, tensor = (memory(tutorial_work(1536, 16, Degrees(tp=tp))).peak for tp in (1, 4))
    return f"""
large model on one GPU | 54 GB | {gb(whole)} | torch's part; the source counts the process
  on 40 GB | out of memory | {verdict(whole, room)} | {gb(room)} can be used
  tensor parallel 4 | 38 GB | {gb(tensor)} | there each rank keeps the whole residual stream
"""


# -- the textbook


def textbook_rows() -> str:
    return states_rows() + rule_rows() + llama_rows() + habits_rows()


def states_rows() -> str:
    """16-bit weights and gradients, 8 B of Adam: 12 B a parameter; Rossby keeps float32 masters: 16."""
    size = 7e9
    return f"""
7 B parameters: weights | 14 GB | {gb(2 * size)} |
7 B parameters: gradients | 14 GB | {gb(2 * size)} |
7 B parameters: Adam | 56 GB | {gb(8 * size)} |
  together | 84 GB | {gb(12 * size)} | with float32 weights {gb(16 * size)}
"""


class Decision(NamedTuple):
    """A row of the decision table in docs/planning.md."""

    situation: str
    job: str
    source: str  # what the textbook takes; "-" where it names none
    kind: str  # what `--layout auto` has to find
    work: Workload  # its layout and micro-batch are only where the search starts
    cluster: str


def decisions() -> list[Decision]:
    small, values = Architecture(1024, 512, 12, 8, 2048, 1280, 1280), 256 * 256 * 20
    ddp = Workload(small, Degrees(dp_shard=4), 16, 64, field_values=values, input_values=values)
    fine = wide(1536, 24, (4, 4)).replace(degrees=Degrees(dp_shard=16, cp=4), global_batch=16)
    return [
        Decision("fits on one GPU", "45 M, 4 GPUs", "DDP", "DDP", ddp, "a100x4"),
        Decision("fits on one GPU", "1.4 B, 64 GPUs", "DDP", "DDP", wide(1536, 24), "a100x64"),
        Decision("nearly fits", "5.5 B, 64 GPUs", "FSDP", "FSDP", wide(3072, 24), "a100x64"),
        Decision("too large", "30 B, 64 GPUs", "-", "FSDP", wide(7168, 56), "a100-8hdrx64"),
        Decision("field too large", "131,072 tokens, batch 16", "-", "context", fine, "a100x64"),
        Decision("far too large", "Llama-3-70B, 64 GPUs", "3D", "context", llama(), "a100-8hdrx64"),
    ]


def wide(dim: int, heads: int, patch: tuple[int, int] = (16, 16)) -> Workload:
    """The case study's task with 48 blocks of another width, compiled, on 64 GPUs."""
    return task(1, Degrees(dp_shard=64), vit(patch, dim, heads), compiled=True, global_batch=256)


def llama() -> Workload:
    return Workload(LLAMA_70B, Degrees(dp_shard=64), 1, 128, compiled=True)


def kind(degrees: Degrees) -> str:
    """What splits a sample or, where nothing does, whether states are sharded."""
    if degrees.tp > 1 and degrees.pp > 1:
        return "3D"
    for axis, name in (("cp", "context"), ("tp", "tensor"), ("pp", "pipeline"), ("dp_shard", "FSDP")):
        if getattr(degrees, axis) > 1:
            return name
    return "DDP"


def rule_rows() -> str:
    rows = ""
    for made in decisions():
        best = best_layouts(made.work, load_cluster(made.cluster), number=1)[0].work
        chosen = f"{layout(best).split(' (')[0]}, checkpointing {checkpointing(best)}"
        rows += f"{made.situation}: {made.job} | {made.source} | {kind(best.degrees)} | {chosen}\n"
    return rows


def llama_rows() -> str:
    """The layout that the chapter names among all that fit; a link for each GPU of a node, or one for all."""
    work = Workload(LLAMA_70B, TEXTBOOK_LAYOUT, 32, 128)
    number, states, idle = LLAMA_70B.parameters, sum(state_bytes(work).values()), bubble(work, 1.0)
    return f"""
Llama-3-70B on 64 A100: states | 840 GB | {gb(12 * number)} | {number / 1e9:.3g} B x 12 B
  tp 8 x pp 2 x dp 4: of a rank | - | {gb(states)} | with float32 weights and gradients
{rank_of_textbook_layout("a100-8hdrx64")}
{rank_of_textbook_layout("a100x64")}
  its bubble, 32 micro-batches | - | {idle / (idle + work.micro_batches):.0%} | (p - 1)/(m + p - 1)
"""


def rank_of_textbook_layout(name: str) -> str:
    cluster = load_cluster(name)
    found = best_layouts(llama(), cluster, number=99)
    rank = next(i for i, p in enumerate(found, 1) if p.work.degrees == TEXTBOOK_LAYOUT)
    slower = found[rank - 1].time.total / found[0].time.total - 1
    best = layout(found[0].work).split(" (")[0]
    what = f"  its rank, {cluster.between.bandwidth / 1e9:.0f} GB/s a node"
    return f"{what} | the layout | {rank} of {len(found)} | {slower:+.0%} time; first: {best}"


def habits_rows() -> str:
    """Defaults of fp16's scaler, checkpoints kept, and what a failed node costs."""
    from torch.amp.grad_scaler import GradScaler  # here: torch takes a second

    scaler = {name: p.default for name, p in inspect.signature(GradScaler).parameters.items()}
    kept = checkpoint_storage(12 * LLAMA_70B.parameters, 5, 100_000, 1000)
    fleet = Fleet(load_cluster("a100x64"), on_demand_nodes=1)
    lost = expected_time(30 * 86_400, Saves(1000 * STEP_AT_64, restart=1800), fleet.rate)
    each = (lost.restarts + lost.redone) / lost.preemptions / HOUR
    scores = scores_bytes(Workload(LLAMA_70B, Degrees(), 1, 1, attention="math"))
    return f"""
fp16: first scale | 2^16 | 2^{math.log2(scaler["init_scale"]):.0f} |
  after good steps | 2,000 | {scaler["growth_interval"]:,} |
  times | x 2 | x {scaler["growth_factor"]:g} |
  after an overflow | x 0.5 | x {scaler["backoff_factor"]:g} |
checkpointing every sqrt(L) | sqrt(L) | every {round(LLAMA_70B.layers**0.5)} | {LLAMA_70B.layers} blocks
flash attention, Llama-3-70B | - | {gb(scores)} | a block's scores, which it never keeps
checkpoints kept, every 1,000 steps | 5 | {gb(kept)} | of 70 B, with the one being written
a node lost | 30 min | {each:.1f} h | 30 min and half of 1,000 of the case study's steps
GPU utilisation | over 90 % | - | measured while training, not computable
"""


# -- the geoscience guide


def geoscience_rows() -> str:
    once, four = task(1), task(1).rolled_out(4, 4)
    kept = stored_bytes(four) / stored_bytes(once)
    took = [plan(work, load_cluster("a100x1")).time.total for work in (once, four)]
    return f"""
channels | 65 | {5 * 13} | 5 variables x 13 levels
  with 8 surface variables | 73 | {5 * 13 + 8} |
a state in fp32 | 303 MB | {73 * 721 * 1440 * 4 / 1e6:.0f} MB | 73 channels on 721 x 1440
  activations, rollout of 4 steps | 4 x | {kept:g} x | training.rollout_steps keeps states, not activations
  its time | - | {took[1] / took[0]:.1f} x |
"""
