"""Seconds of a step: rollouts, states left on the host, unfused attention, stragglers, grouped keys."""

import dataclasses
import itertools
import statistics

import numpy as np
import pytest

from benchmarks.planner_published import LanguageModel
from datasets.grid import global_grid
from parallelisms.degrees import Degrees
from planning.architecture import Architecture, count
from planning.clusters import load_cluster
from planning.collectives import Collective
from planning.compute import (
    elementwise_passes,
    elementwise_time,
    exchange_units,
    float8_time,
    hardware_flops,
    rank_matrices,
    update_bytes,
)
from planning.dry_run import dry_run
from planning.hardware import ORDINARY
from planning.memory import field_bytes, memory, stored_bytes, unit_bytes
from planning.network import context_collectives, route
from planning.search import best_layouts, candidates, changes, changes_that_fit, check_device, fitting
from planning.step_time import gathers_backward, normal_maximum, spread, step_time
from planning.workload import Workload, workload_of
from training.config_checks import load_checked

MODEL = Architecture(4096, 1536, 48, 24, 6144, 8704, 8704)  # mission.md, section 2: the case study's ViT
VALUES = 17 * 1024 * 2048
WORK = Workload(MODEL, Degrees(dp_shard=64), 4, 1024, field_values=VALUES, input_values=VALUES)
A100 = load_cluster("a100x64")


# -- optimisers


def test_updates_by_hand():
    """Bytes of LAMB and SGD over AdamW's; Muon's products and gathers of 48 blocks of 12 D^2 weights."""
    update = {n: step_time(WORK.replace(optimizer=n), A100) for n in ("AdamW", "LAMB", "SGD", "LARS", "Muon")}
    assert update_bytes(WORK.replace(optimizer="LAMB")) / update_bytes(WORK) == pytest.approx(60 / 28)
    times = [update[name].classes["update"] for name in ("SGD", "LARS", "LAMB")]
    assert update["AdamW"].classes["update"] < times[0] and times == sorted(times)
    # (m, n) with m <= n: 2 (m^2 n + m^3 + m^2 n) FLOP, five times; D = m and n of 3, 1, 4 and 4 D.
    d = MODEL.dim
    flops = 5 * 48 * sum(2 * (2 * d**2 * n * d + d**3) for n in (3, 1, 4, 4))
    written = 5 * 48 * sum(2 * (2 + n) * d**2 for n in (3, 1, 4, 4))  # two of m x m, one of m x n
    rate = ORDINARY * A100.rates.matmul["bf16"]  # type: ignore[union-attr]
    more = update["Muon"].classes["update"] - update["AdamW"].classes["update"]
    assert more == pytest.approx(flops / rate + written / A100.rates.bandwidth, rel=0.02)
    gathers = update["Muon"].classes["exposed gathers of Muon"]
    ring = route(A100, WORK, "fsdp").ring
    sent = 63 / 64 * 2 * 48 * 12 * d**2 / ring.bandwidth
    assert gathers == pytest.approx(sent + 48 * 4 * 63 * ring.latency)
    few = WORK.replace(optimizer="Muon", zero1=True, degrees=Degrees(dp_replicate=64))
    assert "exposed gathers of Muon" not in step_time(few, A100).classes


# -- rollouts


@pytest.mark.parametrize("cluster", ["a100x64", "h100x64"])
@pytest.mark.parametrize("changes", [{}, {"ac_mode": "full"}, {"compiled": True}, {"local_batch": 1}])
def test_a_rollout_takes_its_steps(cluster, changes):
    """Four times forward and backward, and three forward passes for the states in between."""
    works = [WORK.replace(**changes), WORK.replace(**changes).rolled_out(4, 4)]
    once, four = (step_time(work, load_cluster(cluster)) for work in works)
    assert 4.5 < four.total / once.total < 5.2
    assert four.classes["update"] == pytest.approx(once.classes["update"])  # one update, whatever the rollout
    assert four.communication > once.communication
    assert four.mfu(works[1], 1e12) == pytest.approx(0.8 * once.mfu(works[0], 1e12), rel=0.07)


def test_a_rollout_keeps_states_and_no_activations():
    four, five, pushed = WORK.rolled_out(4, 4), WORK.rolled_out(5, 5), WORK.rolled_out(4, 1)
    assert stored_bytes(four) == stored_bytes(WORK)
    patches = 2 * MODEL.tokens * MODEL.dim * MODEL.in_features
    assert hardware_flops(four) == 4 * hardware_flops(WORK) + 3 * (MODEL.flops() + patches)
    assert hardware_flops(pushed) == hardware_flops(WORK) + 3 * MODEL.flops()
    assert (four.sample_flops, pushed.sample_flops) == (12 * MODEL.flops(), 6 * MODEL.flops())
    # A start and four truths of float32, the states of four steps and a gradient, and token shards of an
    # input, a truth, weights and a gradient, for 4 samples.
    assert field_bytes(four) == pytest.approx(4 * 4 * (5 + 4 + 1 + 4) * VALUES)
    # One step more: another truth, another state.
    assert memory(five).peak - memory(four).peak == pytest.approx(4 * 4 * 2 * VALUES)


@pytest.mark.parametrize(
    "reshard", ["default", *(pytest.param(each, marks=pytest.mark.slow) for each in ("always", "never"))]
)
def test_a_rollout_gathers_and_reduces_each_time(monkeypatch, reshard):
    """What FSDP2 sends in 2 steps forward, 3 forward and back, counted on a fake process group."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    layers, steps = 3, 3
    options = ["--data.forcings=[]", "--data.static_variables=[]", "--model.dim=64", "--model.num_layers=3"]
    options += [f"--training.rollout_steps=[{steps}]", f"--parallelism.fsdp_reshard_after_forward={reshard}"]
    config = load_checked(options)
    found = dry_run(config, 4, global_grid((16, 32)), 7).calls
    block = max(call.size for call in found if call.kind == "reduce-scatter")
    work = workload_of(config, 4, (16, 32), 7)
    gathers = work.passes * (layers + gathers_backward(work)) + work.forecasts * gathers_backward(work)
    assert found[Collective("all-gather", "fsdp", block)] == gathers
    assert found[Collective("reduce-scatter", "fsdp", block)] == layers * steps == layers * work.reductions


def test_a_pipeline_waits_for_the_states_of_a_rollout():
    """A stage at a time, all others idle, as what they need is not there before."""
    work = WORK.replace(degrees=Degrees(pp=2, dp_shard=32), local_batch=32, global_batch=1024)
    once, four = (step_time(each, A100) for each in (work, work.rolled_out(4, 4)))
    assert four.classes["bubble"] > 4 * once.classes["bubble"]
    assert any(p.work.degrees.pp > 1 for p in best_layouts(work.rolled_out(4, 4), A100, 100))


# -- cpu_offload


def test_states_on_the_host_cost_its_memory_and_the_link():
    """40 bytes a parameter of 1.386 B through 328 GB/s of each of 8 nodes, and shards over PCIe."""
    there, here = (step_time(WORK.replace(offload=on, global_batch=256), A100) for on in (True, False))
    by_hand = 40 * MODEL.parameters / 8 / 328e9
    assert there.classes["update on the host"] == pytest.approx(by_hand, rel=0.03)  # and the norm's sum
    # Nothing hides the first gather's copy, nor the last reduction's: a block's float32 shard each.
    copies = 2 * 4 * MODEL.block_parameters / 64 / 25e9
    assert there.classes["exposed offload"] == pytest.approx(copies, rel=0.05)
    assert "update" not in there.classes and there.total > here.total


def test_offload_is_advised_last():
    """39 B on 8 A100: over many micro-batches the host's update is cheap, and still it is last."""
    cluster = load_cluster("a100x8")
    model = dataclasses.replace(MODEL, dim=8192, heads=64, mlp_dim=32768)
    large = WORK.replace(model=model, degrees=Degrees(dp_shard=8), local_batch=1, ac_mode="full")
    cheapest = min(fitting(changes(large, cluster)), key=lambda change: change[1].device_seconds)
    assert cheapest[0] == "parallelism.cpu_offload = true"
    found = changes_that_fit(large, cluster)
    assert [made.work.offload for _, made in found] == [False, False, True]
    assert [name.split(" = ")[0] for name, _ in found[:2]] == [
        "parallelism.tensor_parallel_degree",
        "16 devices",
    ]


def test_a_search_offers_no_pipeline_that_has_too_few_micro_batches():
    """train.py refuses one micro-batch for two stages."""
    work = WORK.replace(global_batch=4, local_batch=1, degrees=Degrees(dp_shard=4))
    pipelines = [c for c in candidates(work, load_cluster("a100x8").with_devices(4)) if c.degrees.pp > 1]
    assert pipelines and all(each.micro_batches >= each.degrees.pp for each in pipelines)


def test_the_hosts_memory_is_not_endless():
    """16 B a parameter of 30 B are 480 GB; a Perlmutter node has 256."""
    model = dataclasses.replace(MODEL, dim=7168, heads=56, mlp_dim=28672)
    work = WORK.replace(model=model, degrees=Degrees(dp_shard=4), local_batch=1, global_batch=4)
    assert all(not made.work.offload for _, made in changes_that_fit(work, load_cluster("a100-40x4")))


# -- unfused attention


def test_math_attention_moves_its_scores():
    """A head's forward: T^2 numbers are written after they are computed, then read with 2 T E others, and 24
    bytes a score between them.
    """
    device, tokens, size = A100.device, 8192, 64
    took = device.attention_seconds(1, 1, tokens, size, "bfloat16", False, "math")
    computing = 2 * tokens**2 * size / (ORDINARY * device.matmul["bf16"])
    moved = 2 * tokens**2 + 2 * (tokens**2 + 2 * tokens * size) + 24 * tokens**2
    assert took == pytest.approx(computing + moved / device.bandwidth)
    fused = device.attention_seconds(1, 1, tokens, size, "bfloat16", False, "sdpa")
    assert took > 5 * fused
    short = [device.attention_seconds(n, 12, 197, size, "bfloat16", True, "math") for n in (192, 384)]
    assert short[1] == pytest.approx(2 * short[0])  # all heads of a batch are launched at once
    both = step_time(WORK.replace(attention="math"), A100), step_time(WORK, A100)
    assert both[0].classes["attention"] > 3 * both[1].classes["attention"]


def test_math_attention_computes_what_a_mask_hides():
    reader = LanguageModel(4096, 1536, 48, 24, 6144, 0, 8704, vocabulary=8704)
    models = (reader, dataclasses.replace(reader, causal=True))
    works = [WORK.replace(attention="math", model=model) for model in models]
    times = [step_time(work, A100).classes["attention"] for work in works]
    assert times[0] == times[1]


# -- products, and what collectives move


def test_narrow_products_wait_for_their_outputs():
    """A product of 128 inputs writes as long as it computes; 8,192 cubed is as fast as an A100's measured one
    (257 TFLOP/s, thonking.ai/p/strangely-matrix-multiplications).
    """
    rates = [
        2 * 98304 * inputs * 4096 / A100.device.linear_seconds(98304, inputs, 4096, "bfloat16", False)
        for inputs in (128, 512, 8192)
    ]
    assert rates[0] < 0.5 * rates[2] and rates[1] < 0.8 * rates[2]
    measured = 2 * 8192**3 / A100.device.linear_seconds(8192, 8192, 8192, "bfloat16", False)
    assert measured == pytest.approx(257e12, rel=0.03)


def test_tensor_parallel_copies_what_it_exchanges():
    """Two gathers and two scatters a block and pass, of all tokens of tp ranks, read and written; one state
    is in order as it comes. Asynchronous products with a scatter, two: partial sums of all tokens are read at
    one rank and written at another, read there and added, for its tokens.
    """
    work = WORK.replace(degrees=Degrees(dp_shard=8, tp=8), local_batch=2)
    whole = 2 * MODEL.tokens * MODEL.dim * 2
    for backward in (False, True):
        assert exchange_units(work, backward) * unit_bytes(work) == pytest.approx(4 * 2 * whole)
        added = exchange_units(work.replace(async_tp=True), backward) * unit_bytes(work)
        assert added == pytest.approx(2 * (3 + 1 / 8) * whole)
        assert exchange_units(work.replace(async_tp=True, fused_casts=True), backward) == 0
        assert exchange_units(work.replace(local_batch=1), backward) == 0


def test_what_is_gathered_in_float8_is_cast_by_the_rank_of_its_tokens():
    """Published runs of torchao's Float8ColwiseParallel and Rowwise: inputs of q, k, v and of the MLP, and
    gradients of the projection's and the MLP's outputs, are cast before they are gathered.
    """
    work = WORK.replace(degrees=Degrees(dp_shard=8, tp=8), float8=True, compiled=True)

    class Gathers(Workload):
        @property
        def gathered_itemsize(self) -> int:
            return 1

    gathers = Gathers(**{f.name: getattr(work, f.name) for f in dataclasses.fields(work)})
    once = {False: ("attention.qkv", "mlp.up"), True: ("attention.projection", "mlp.down")}
    for backward, names in once.items():
        for name in ("attention.qkv", "attention.projection", "mlp.up", "mlp.down"):
            here, there = (float8_time(each, A100.device, name, backward) for each in (work, gathers))
            transposed = sum(rank_matrices(MODEL, 8)[name]) * backward
            cast = 2.5 * rank_matrices(MODEL, 8)[name][backward]
            less = (cast / 8 if name in names else cast) + transposed
            assert there / here == pytest.approx(less / (cast + transposed))


def test_asynchronous_tensor_parallel_exposes_its_first_part():
    work = WORK.replace(degrees=Degrees(dp_shard=32, tp=2), local_batch=8)
    plain, overlapped = (step_time(work.replace(async_tp=on), A100) for on in (False, True))
    name = "exposed tensor parallel"
    assert overlapped.classes[name] == pytest.approx(plain.classes[name] / 2)
    assert overlapped.total < plain.total


@pytest.mark.parametrize(("method", "units"), [("ulysses", (22, 22)), ("all_gather", (20, 20))])
def test_context_parallel_puts_its_exchanges_in_order(method, units):
    """ulysses: q, k, v stacked, by rank, by token, the output twice; all_gather: keys and values of all."""
    work = WORK.replace(degrees=Degrees(dp_shard=16, cp=4), method=method)
    assert tuple(exchange_units(work, backward) for backward in (False, True)) == units


def test_the_ring_adds_up_in_float32():
    """parallelisms/ring_attention.py, operator by operator, a value of each tensor and a part of the keys:
    scaled sum 8 bytes, scaled part 2 + 4, their sum 12; backward: of q 10, of k and v zeros 8, parts 12, sums
    24.
    """
    work = WORK.replace(degrees=Degrees(dp_shard=16, cp=4), method="ring")
    assert [exchange_units(work, backward) * 2 / 4 for backward in (False, True)] == [26, 54]


def test_a_rank_of_more_stages_waits_less():
    work = WORK.replace(degrees=Degrees(pp=4, dp_shard=16), local_batch=64, global_batch=1024)
    bubbles = {
        schedule: step_time(work.replace(schedule=schedule), A100).classes["bubble"]
        for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    }
    assert bubbles["Interleaved1F1B"] == pytest.approx(bubbles["1F1B"] / 2)
    assert bubbles["InterleavedZeroBubble"] == pytest.approx(bubbles["1F1B"] / 6)


def test_uncompiled_norms_are_cast_on_a_gpu():
    """Autocast takes them in float32: 16 and 18 units a block more; FSDP changes nothing in that."""
    rates = A100.device
    half, single = (elementwise_time(WORK.replace(dtype=d), rates, False) for d in ("bfloat16", "float32"))
    moved = sum(units for _, units in elementwise_passes(WORK, False)) * unit_bytes(WORK)
    cast = (4 + 2) * count(MODEL.block())
    assert half == pytest.approx((moved + cast + 16 * unit_bytes(WORK)) / rates.bandwidth, rel=1e-3)
    assert not WORK.replace(compiled=True).casts_norms and single > 0


# -- attention by its kernel


def test_hoppers_own_kernels_are_planned_but_for_flash_attention_2():
    work = WORK.replace(compiled=True)
    h100 = load_cluster("h100x64")
    times = {
        name: step_time(work.replace(attention=name), h100).classes["attention"]
        for name in ("sdpa", "flash", "cudnn", "flash3", "auto")
    }
    assert times["flash"] > 1.2 * times["cudnn"]
    assert times["sdpa"] == times["cudnn"] == times["flash3"] == times["auto"]
    a100 = {step_time(work.replace(attention=name), A100).classes["attention"] for name in times}
    assert len(a100) == 1


def test_attention_on_a_cpu_takes_as_long_in_bfloat16_as_in_float32():
    """torch's kernel computes the softmax in float32 in either; on a GPU, bfloat16 is faster."""
    seconds = {}
    for name in ("cpu1", "a100x1"):
        rates = load_cluster(name).rates
        shape = (4, 8, 512, 48, "float32"), (4, 8, 512, 48, "bfloat16")
        seconds[name] = [rates.attention_seconds(*each, False, "sdpa") for each in shape]
    assert seconds["cpu1"][0] == seconds["cpu1"][1]
    assert seconds["a100x1"][0] == pytest.approx(2 * seconds["a100x1"][1], rel=0.01)


# -- stragglers


def test_the_slowest_of_many_is_slower():
    """Expected maxima of n normal numbers: 0.5642, 1.4236, 2.5076, 3.2414 for 2, 8, 100, 1000 (Tippett)."""
    for number, known in {8: 1.4236, 100: 2.5076, 1000: 3.2414}.items():
        assert normal_maximum(number) == pytest.approx(known, rel=0.01)
    spreads = [spread(n) for n in (1, 2, 8, 64, 512, 4096)]
    assert spreads[0] == 1.0 and spreads[2] == pytest.approx(1.05)
    assert [f"{s - 1:.1%}" for s in spreads[3:5]] == ["6.6%", "7.8%"]  # docs/planning.md
    assert all(more > less for less, more in itertools.pairwise(spreads)) and spreads[-1] < 1.10


def test_spreads_are_those_of_simulated_devices():
    """A node of 8 differs by 5 % on average: slowest of 512 over the fastest of a node, of many tries."""
    generator = np.random.default_rng(0)
    deviation = 0.05 / 2.847  # the expected range of 8 normal numbers (Tippett)
    tries = 1 + deviation * generator.standard_normal((2000, 512))
    fastest = tries[:, :8].min(axis=1)
    assert statistics.mean(tries.max(axis=1) - fastest) == pytest.approx(spread(512) - 1, rel=0.05)


# -- grouped keys


@pytest.mark.parametrize("method", ["ulysses", "all_gather", "ring"])
def test_grouped_keys_send_less(method):
    """8 heads of keys for 32 of queries: a quarter of the bytes of k and v."""
    model = LanguageModel(8192, 4096, 32, 32, 14336, 0, 0, kv_heads=8)
    work = Workload(model, Degrees(dp_shard=2, cp=4), 1, 2, method=method)
    whole = work.replace(model=dataclasses.replace(model, kv_heads=0))
    grouped, all_heads = (sum(c.size * n for c, n in context_collectives(w).items()) for w in (work, whole))
    # Ulysses sends q, k, v one way and the output back: 1 + 2/4 + 1 of 4.
    assert grouped / all_heads == pytest.approx(2.5 / 4 if method == "ulysses" else 1 / 4)


def test_every_rank_of_ulysses_needs_a_head_of_keys():
    model = LanguageModel(8192, 4096, 32, 32, 14336, 0, 0, kv_heads=2)
    (two, eight) = (Workload(model, Degrees(cp=cp), 1, 1) for cp in (2, 8))
    sizes = [max(c.size for c in context_collectives(w)) * w.degrees.cp for w in (two, eight)]
    assert sizes[0] == 8192 * 2 * 4096 * (1 + 2 * 2 / 32) and sizes[1] == 8192 * 2 * 4096 * (1 + 2 * 8 / 32)


# -- devices


def test_float8_needs_a_device_that_has_it():
    with pytest.raises(ValueError, match="float8.enable = True: the a100 does not multiply in float8"):
        check_device(WORK.replace(float8=True), A100)
    check_device(WORK.replace(float8=True), load_cluster("h100x64"))


# -- Python


def test_uncompiled_tensor_parallelism_takes_as_long_as_python_does():
    """On a GPU: a block takes 20 ms with DTensor's dispatch, however small (benchmarks/gpu.sh)."""
    work, h100 = WORK.replace(degrees=Degrees(tp=4), local_batch=1, global_batch=1), load_cluster("h100x4")
    found, compiled = (step_time(work.replace(compiled=c), h100) for c in (False, True))
    assert found.total > 0.020 * work.rank_layers > 5 * compiled.total
