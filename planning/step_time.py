"""Seconds of a training step by class: computation, exposed communication, waits.

A block computes while the next one's parameters are gathered and the last one's gradients are reduced; only
what takes longer than the computation is exposed. Collectives of tensor and context parallelism are between
operations and exposed whole, except the ring's.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import NormalDist

from planning.architecture import count, cut, padded
from planning.calibration import Rates
from planning.compute import (
    Times,
    attention_seconds,
    block_seconds,
    end_seconds,
    field_seconds,
    slower_in_a_model,
    update_bytes,
    update_seconds,
)
from planning.constants import BUCKET, CLIP_BYTES, DISPATCH, FLOAT32, NCCL_SLOWDOWN, NODE, SPREAD
from planning.hardware import Cluster
from planning.memory import shard_parameters, stage_shapes
from planning.network import Route, context_collectives, route, seconds, tensor_collectives
from planning.workload import Workload


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimiser step on the slowest rank, by class; all classes add up to `total`."""

    computing: dict[str, float]
    communicating: dict[str, float]  # exposed
    waiting: dict[str, float]
    samples: int  # of the global batch
    hidden: float = 0.0  # seconds of collectives of parameters and gradients, while others compute

    @property
    def classes(self) -> dict[str, float]:
        """Name -> seconds of the classes that take any."""
        every = self.computing | self.communicating | self.waiting
        return {name: seconds for name, seconds in every.items() if seconds > 0}

    @property
    def total(self) -> float:
        return sum(self.classes.values())

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.communicating.values())

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    def mfu(self, work: Workload, peak: float) -> float:
        """Model FLOP/s over the dense bf16 peak of all devices."""
        return work.sample_flops * self.samples_per_second / (peak * work.degrees.world)


def step_time(work: Workload, cluster: Cluster) -> StepTime:
    rates, through = cluster.rates, work.passes + work.forecasts / 2  # half of a pass is forward
    axes = ("fsdp", "dp_replicate", "cp", "tp", "pp")
    routes = {axis: route(cluster, work.degrees, axis) for axis in axes}
    slower = slower_in_a_model(rates, work.dtype)
    blocks = [block_seconds(work, rates, backward) for backward in (False, True)]
    in_block = [slower * sum(times.values()) for times in blocks]
    inside = inner_communication(work, rates, routes)
    sharding, in_all = sharding_communication(work, cluster, routes, in_block)
    hidden = max(in_all - sharding, 0.0)
    slowest = 1.0 if cluster.shared else spread(work.degrees.world)
    computing = computing_seconds(work, rates, blocks, slower) | {
        "update": update_term(work, cluster),
        "slowed by collectives": slowed_seconds(work, cluster, routes, hidden),
    }
    communicating = {name: through * value for name, value in inside.items()} | {
        "exposed data parallel": sharding,
        "exposed gathers of Muon": muon_gathers(work, routes),
    }
    waiting = {
        # Stages wait for the slowest rank of the one before, and all ranks for the one that computes longest.
        "bubble": slowest * bubble(work, in_block, sum(inside.values())),
        "dispatch": dispatch_seconds(work, cluster, sum(in_block)),
        "stragglers": (slowest - 1) * sum(computing.values()),
    }
    factor = cluster.anchor.factor(work) if cluster.anchor else 1.0
    computing, communicating, waiting = (
        {name: factor * value for name, value in each.items()} for each in (computing, communicating, waiting)
    )
    return StepTime(computing, communicating, waiting, work.global_batch, factor * hidden)


def computing_seconds(work: Workload, rates: Rates, blocks: list[Times], slower: float) -> Times:
    """Seconds of all passes by class of kernel. `blocks`: those of one block, forward and backward."""
    ends = [end_seconds(work, rates, backward) for backward in (False, True)]
    total = defaultdict(float)
    for parts, number in ((blocks, slower * work.rank_layers), (ends, 1)):
        for times, passes in zip(parts, (work.passes + work.forecasts, work.passes), strict=True):
            for name, value in times.items():
                total[name] += number * passes * value
    total["fields"] = field_seconds(work, rates) * work.accumulation
    return total


def update_term(work: Workload, cluster: Cluster) -> float:
    """Seconds of the update, with cpu_offload through the host's memory, which the ranks of a node share."""
    if not work.offload:
        return update_seconds(work, cluster.rates)
    ranks = min(cluster.devices_per_node, work.degrees.world)
    return (update_bytes(work) + CLIP_BYTES * shard_parameters(work)) * ranks / cluster.host_bandwidth


def slowed_seconds(work: Workload, cluster: Cluster, routes: dict[str, Route], hidden: float) -> float:
    """Seconds that computation is longer for `hidden` seconds of collectives at the same time."""
    ring = routes["fsdp" if work.uses_fsdp else "dp_replicate"].ring
    return 0.0 if cluster.shared else NCCL_SLOWDOWN * ring.bandwidth / cluster.inside.bandwidth * hidden


def spread(devices: int) -> float:
    """Ratio of the slowest of `devices` to the one that rates are of, in time.

    Speeds are normally distributed: the slowest of n is z(n) deviations below the mean, the fastest of a
    node z(8) above it, and a node's difference is 2 z(8) deviations.
    """
    if devices == 1:
        return 1.0
    return 1 + SPREAD * (normal_maximum(devices) + normal_maximum(NODE)) / (2 * normal_maximum(NODE))


def normal_maximum(number: int) -> float:
    """Expected largest of `number` standard normal numbers (Blom 1958), within 1 %."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def dispatch_seconds(work: Workload, cluster: Cluster, in_block: float) -> float:
    """Uncompiled, a block of DTensors takes as long as Python does; a CPU computes it at the same time."""
    if work.compiled or cluster.shared:
        return 0.0
    used = ["tensor"] * (work.degrees.tp > 1) + [work.method] * (work.degrees.cp > 1)
    late = max([DISPATCH[name] for name in used], default=0.0) - in_block
    return max(late, 0.0) * (work.passes + work.forecasts) * work.rank_layers


def muon_gathers(work: Workload, routes: dict[str, Route]) -> float:
    """Every matrix of a block, whole on every rank, in the precision of its products."""
    total = 0.0
    for size in (work.itemsize * math.prod(shape) for shape in work.model.matrices):
        over_fsdp = seconds("all-gather", size / work.degrees.tp, routes["fsdp"]) * work.uses_fsdp
        total += over_fsdp + seconds("all-gather", size, routes["tp"])
    return work.rank_layers * total * (work.optimizer == "Muon")


# -- communication


def inner_communication(work: Workload, rates: Rates, routes: dict[str, Route]) -> dict[str, float]:
    """Exposed seconds of one micro-batch by class."""
    again = 1.5 if work.ac_mode in ("full", "every_n_blocks") else 1.0  # which communicates forward again
    part = again * work.rank_layers / work.model.layers
    tensor, context = (
        part * sum(number * seconds(call.kind, call.size, routes[axis]) for call, number in calls.items())
        for axis, calls in (("tp", tensor_collectives(work)), ("cp", context_collectives(work)))
    )
    hiding = 0.0
    if work.method == "ring":
        attending = sum(attention_seconds(work, rates, backward) for backward in (False, True))
        hiding = work.rank_layers * attending * (1 - 1 / work.degrees.cp)
    return {
        "exposed tensor parallel": tensor,
        "exposed context parallel": max(context - hiding, 0.0),
    }


def sharding_communication(
    work: Workload, cluster: Cluster, routes: dict[str, Route], in_block: list[float]
) -> tuple[float, float]:
    """Exposed seconds of data parallelism in a step, and seconds in all. `in_block`: seconds that a block
    computes, forward and backward.

    Gradients are reduced and scattered in every pass, and all-reduced over replicas (HSDP) in the last. Those
    of a pipeline are reduced after the last micro-batch of a batch, when nothing is left to hide it.
    cpu_offload copies a rank's shard to the device before each gather, and its gradients back.
    """
    if not work.uses_fsdp:
        return replica_communication(work, routes["dp_replicate"], in_block[1])
    (forward, backward), layers = in_block, work.rank_layers
    block = padded(cut(work.model.block, work.degrees.tp), work.fsdp_ranks)
    shard = block / work.fsdp_ranks
    gather = seconds("all-gather", work.itemsize * block, routes["fsdp"])
    scatter = seconds("reduce-scatter", work.reduce_itemsize * block, routes["fsdp"])
    all_reduce = seconds("all-reduce", work.reduce_itemsize * shard, routes["dp_replicate"])
    forwards = work.reductions if work.stays_gathered else work.passes + work.forecasts * work.gathers_again
    gathers = forwards + work.passes * work.gathers_again
    total = layers * (gathers * gather + work.reductions * scatter + all_reduce)
    copy = FLOAT32 * shard / cluster.host_link * work.offload
    gather, scatter = gather + copy, scatter + copy
    again = gather * work.gathers_again  # in the backward pass, on the same network as reductions
    exposed = forwards * (gather + (layers - 1) * max(gather - forward, 0.0))  # nothing hides the first
    if work.reduces_last:
        exposed += work.passes * layers * max(again - backward, 0.0)
        return exposed + work.reductions * layers * (scatter + all_reduce), total
    exposed += layers * max(again + scatter + all_reduce - backward, 0.0) + scatter + all_reduce
    exposed += (work.reductions - 1) * layers * max(again + scatter - backward, 0.0)
    return exposed, total


def replica_communication(work: Workload, on: Route, backward: float) -> tuple[float, float]:
    """DDP: buckets of gradients are reduced while backward goes on; nothing hides the last one.

    ZeRO-1 does the same and then gathers the updated weights, exposed.
    """
    if on.ranks == 1:
        return 0.0, 0.0
    size = FLOAT32 * sum(n * count(unit) for unit, n in stage_shapes(work, first=True, last=True))
    buckets = max(round(size / BUCKET), 1)
    bucket = seconds("all-reduce", size / buckets, on)
    exposed = bucket + max((buckets - 1) * bucket - backward * work.rank_layers, 0.0)
    gathered = seconds("all-gather", size, on) * work.zero1
    return exposed + gathered, buckets * bucket + gathered


def bubble(work: Workload, in_block: list[float], inside: float) -> float:
    """Seconds of an idle stage in a step. `inside`: communication of a micro-batch within a sample.

    Idle for p - 1 micro-batches of one of a rank's stages; zero-bubble schedules fill all but the gradients
    of inputs, a third. The forecasts of a rollout pass one stage at a time.
    """
    waiting, layers = work.degrees.pp - 1, work.rank_layers
    idle = (1 / 3 if "ZeroBubble" in work.schedule else 1.0) / work.stages_of_rank
    training = work.accumulation * work.gradient_steps * (sum(in_block) * layers + inside) * idle
    return waiting * (training + work.forecasts * in_block[0] * layers)
