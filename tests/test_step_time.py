"""Seconds of a step, each term against a sum done by hand; the layouts that a search by them finds."""

import itertools
import tomllib
from dataclasses import replace

import pytest

from benchmarks.planner_published import RUNS, published_model
from config import Model
from parallelisms.degrees import Degrees
from planning.clusters import Link, load_cluster
from planning.constants import REACHED
from planning.memory import unit_bytes
from planning.search import best_layouts, candidates, changes, changes_that_fit, check_device, fitting
from planning.step_time import elementwise_seconds, normal_maximum, spread, step_time, update_bytes
from planning.workload import Architecture, Workload, architecture_of, count
from tests.started_jobs import ROOT


def vit(dim: int, heads: int, patch: tuple[int, int] = (16, 32)) -> Architecture:
    """Return a ViT of 48 blocks on 1024 x 2048: 4,096 tokens."""
    return architecture_of(Model("vit", patch, dim, 48, heads), (1024, 2048), 17, 17)


MODEL = vit(1536, 24)  # mission.md, section 2
VALUES = 17 * 1024 * 2048
WORK = Workload(MODEL, Degrees(dp_shard=64), 4, 1024, field_values=VALUES, input_values=VALUES)
A100 = load_cluster("a100x64")


def test_updates_by_hand():
    """Bytes of LAMB and SGD over AdamW's; Muon's products of 48 blocks of 12 D^2 weights."""
    update = {n: step_time(WORK.replace(optimizer=n), A100) for n in ("AdamW", "LAMB", "SGD", "LARS", "Muon")}
    assert update_bytes(WORK.replace(optimizer="LAMB")) / update_bytes(WORK) == pytest.approx(60 / 28)
    assert update_bytes(WORK.replace(optimizer="new")) == update_bytes(WORK)  # was a KeyError
    times = [update[name].classes["update"] for name in ("AdamW", "SGD", "LARS", "LAMB")]
    assert times == sorted(times)
    # (m, n) with m <= n: 2 (m^2 n + m^3 + m^2 n) FLOP, five times; D = m and n of 3, 1, 4 and 4 D.
    d = MODEL.dim
    flops = 5 * 48 * sum(2 * (2 * d**2 * n * d + d**3) for n in (3, 1, 4, 4))
    rate = REACHED * A100.device.matmul["bf16"]
    more = update["Muon"].classes["update"] - update["AdamW"].classes["update"]
    assert more == pytest.approx(flops / rate, rel=0.02)


def test_a_pipeline_waits_for_the_states_of_a_rollout():
    """A stage at a time, all others idle, as what they need is not there before."""
    work = WORK.replace(degrees=Degrees(pp=2, dp_shard=32), local_batch=32, global_batch=1024)
    once, four = (step_time(each, A100) for each in (work, work.replace(rollout_steps=4)))
    assert four.classes["bubble"] > 4 * once.classes["bubble"]
    larger = replace(A100, device=replace(A100.device, memory=2 * A100.device.memory))
    assert any(p.work.degrees.pp > 1 for p in best_layouts(work.replace(rollout_steps=4), larger, 100))


def test_states_on_the_host_cost_its_memory_and_the_link():
    """40 bytes a parameter of 1.386 B through 328 GB/s of each of 8 nodes, and shards over PCIe."""
    there, here = (step_time(WORK.replace(offload=on, global_batch=256), A100) for on in (True, False))
    assert there.classes["update"] == pytest.approx(40 * MODEL.parameters / 8 / 328e9, rel=0.03)
    # Nothing hides the first gather's copy, nor the last reduction's: a block's float32 shard each.
    copies = 2 * 4 * count(MODEL.block) / 64 / 25e9
    assert there.exposed - here.exposed == pytest.approx(copies, rel=0.05)


def test_offload_is_advised_last():
    """39 B on 8 A100: over many micro-batches the host's update is cheap, and still it is last."""
    cluster, model = load_cluster("a100x8"), vit(8192, 64)
    large = WORK.replace(model=model, degrees=Degrees(dp_shard=8), local_batch=1, ac_mode="full")
    cheapest = min(fitting(changes(large, cluster), cluster), key=lambda change: change[1].device_seconds)
    assert cheapest[0] == {"offload"}
    found = changes_that_fit(large, cluster)
    assert [made.work.offload for made in found] == [False, True]
    # The memory of a host is not endless: 16 B a parameter of 30 B are 480 GB; a Perlmutter node has 256.
    model = vit(7168, 56)
    work = WORK.replace(model=model, degrees=Degrees(dp_shard=4), local_batch=1, global_batch=4)
    assert all(not made.work.offload for made in changes_that_fit(work, load_cluster("a100-40x4")))


def test_a_search_offers_no_pipeline_that_has_too_few_micro_batches():
    """train.py refuses one micro-batch for two stages."""
    work = WORK.replace(global_batch=4, local_batch=1, degrees=Degrees(dp_shard=4))
    pipelines = [c for c in candidates(work, load_cluster("a100x8").with_devices(4)) if c.degrees.pp > 1]
    assert pipelines and all(each.micro_batches >= each.degrees.pp for each in pipelines)


def test_uncompiled_norms_are_cast_on_a_gpu():
    """Autocast takes them in float32: 16 and 18 units a block more; FSDP changes nothing in that."""
    rates = A100.device
    half = elementwise_seconds(WORK, rates, False)
    moved = (4 + 6 + 2 * 4 + 16) * unit_bytes(WORK) + (4 + 2) * count(MODEL.block)
    assert half == pytest.approx(moved / rates.bandwidth)
    fused = (8 + 2 * 4) * unit_bytes(WORK) + (4 + 2) * count(MODEL.block)
    compiled = elementwise_seconds(WORK.replace(compiled=True), rates, False)
    assert compiled == pytest.approx(fused / rates.bandwidth)


def test_hoppers_own_kernels_are_planned_but_for_flash_attention_2():
    def seconds(cluster: str) -> dict[str, float]:
        names, machine = ("sdpa", "flash", "cudnn", "auto"), load_cluster(cluster)
        return {n: step_time(WORK.replace(attention=n), machine).classes["attention"] for n in names}

    times = seconds("h100x64")
    assert times["flash"] > 1.2 * times["cudnn"] and times["sdpa"] == times["cudnn"] == times["auto"]
    assert len(set(seconds("a100x64").values())) == 1


def test_a_rank_of_more_stages_waits_less():
    work = WORK.replace(degrees=Degrees(pp=4, dp_shard=16), local_batch=64, global_batch=1024)
    names = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    fast = replace(A100, inside=Link(0, 1e18), between=Link(0, 1e18))
    first, second, third = (step_time(work.replace(schedule=n), fast).classes["bubble"] for n in names)
    assert (second, third) == (pytest.approx(first / 2), pytest.approx(first / 6))


def test_sends_of_a_pipeline_take_time():
    """A link a thousand times slower changed nothing. Each micro-batch is sent on and its gradient back."""
    work = WORK.replace(degrees=Degrees(pp=4, dp_shard=16), local_batch=64, global_batch=1024)
    slow = replace(A100, between=Link(0, A100.between.bandwidth / 1000))
    times = [step_time(work, cluster).classes for cluster in (A100, slow)]
    one = unit_bytes(work) * A100.devices_per_node / A100.between.bandwidth
    assert times[0]["exposed pipeline"] == pytest.approx(2 * 64 * one, rel=0.02)
    assert times[1]["exposed pipeline"] > 900 * times[0]["exposed pipeline"]


def test_the_slowest_of_many_is_slower():
    """Expected maxima of n normal numbers, by Tippett; a node of 8 differs by 5 % on average."""
    for number, known in {8: 1.4236, 100: 2.5076, 1000: 3.2414}.items():
        assert normal_maximum(number) == pytest.approx(known, rel=0.01)
    spreads = [spread(n) for n in (1, 2, 8, 64, 512, 4096)]
    assert spreads[0] == 1.0 and spreads[2] == pytest.approx(1.05)
    assert [f"{s - 1:.1%}" for s in spreads[3:5]] == ["6.6%", "7.8%"]  # docs/planning.md
    assert all(more > less for less, more in itertools.pairwise(spreads)) and spreads[-1] < 1.10


def test_float8_needs_a_device_that_has_it():
    with pytest.raises(ValueError, match="float8.enable = True: the a100 does not multiply in float8"):
        check_device(WORK.replace(float8=True), A100)
    check_device(WORK.replace(float8=True), load_cluster("h100x64"))


# -- decisions

LLAMA_70B = published_model("llama3-70b", 8192, tomllib.loads(RUNS.read_text(encoding="utf-8"))["models"])
LLAMA = Workload(LLAMA_70B, Degrees(dp_shard=64), 1, 128, compiled=True)
VALUES_45M = 256 * 256 * 20
VIT_45M = architecture_of(Model("vit", (8, 8), 512, 12, 8), (256, 256), 20, 20)
DDP = Workload(VIT_45M, Degrees(dp_shard=4), 16, 64, field_values=VALUES_45M, input_values=VALUES_45M)
FINE = {"degrees": Degrees(dp_shard=16, cp=4), "global_batch": 16}


def wide(dim: int, heads: int, patch: tuple[int, int] = (16, 16), **changes: object) -> Workload:
    """A compiled ViT on 64 GPUs."""
    work = WORK.replace(model=vit(dim, heads, patch), local_batch=1, global_batch=256, compiled=True)
    return work.replace(**changes)


# Job, cluster, the work, whose layout is only where the search starts; what splits a sample, or if states are
# sharded.
DECISIONS = [
    ("45 M, 4 GPUs", "a100x4", DDP, "DDP"),
    ("1.4 B, 64 GPUs", "a100x64", wide(1536, 24), "DDP"),
    ("5.5 B, 64 GPUs", "a100x64", wide(3072, 24), "FSDP"),
    ("30 B, 64 GPUs", "a100-8hdrx64", wide(7168, 56), "FSDP"),
    ("131,072 tokens, batch 16", "a100x64", wide(1536, 24, (4, 4), **FINE), "context"),
    ("Llama-3-70B, 64 GPUs", "a100-8hdrx64", LLAMA, "tensor"),
]


@pytest.mark.parametrize(("job", "cluster", "work", "kind"), DECISIONS, ids=[row[0] for row in DECISIONS])
def test_the_decision_table_is_what_the_search_finds(job: str, cluster: str, work: Workload, kind: str):
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {job} |")]
    degrees = best_layouts(work, load_cluster(cluster), number=1)[0].work.degrees
    axes = (("cp", "context"), ("tp", "tensor"), ("pp", "pipeline"), ("dp_shard", "FSDP"))
    split = [name for axis, name in axes if getattr(degrees, axis) > 1] or ["DDP"]
    assert split[0] == kind and f"| {kind} |" in row and (degrees.tp == 1 or degrees.pp == 1)


def test_the_layout_of_the_textbook_is_among_the_best():
    """Within a fifth of the best where each GPU has its own link between nodes, and the allocator needs
    nothing: with its 15 % selective checkpointing lacks 1 GiB.
    """
    cluster, textbook = load_cluster("a100-8hdrx64"), Degrees(pp=2, dp_shard=4, tp=8)
    found = best_layouts(LLAMA, replace(cluster, device=replace(cluster.device, reserved=0)), number=99)
    (made,) = [p for p in found if p.work.degrees == textbook]
    assert made.time.total < 1.2 * found[0].time.total
