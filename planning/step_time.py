"""Seconds of a training step by class: computation, exposed communication, waits.

A block computes while the next one's parameters are gathered and the last one's gradients are reduced; only
what takes longer than the computation is exposed. Tensor parallelism's collectives, and those of attention,
stand between operations and are exposed whole, but for the ring's.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist

from planning.architecture import count, cut, padded
from planning.calibration import Rates
from planning.compute import (
    Times,
    attention_time,
    block_seconds,
    end_seconds,
    field_seconds,
    host_update_seconds,
    linear_times,
    slower_in_a_model,
    update_seconds,
)
from planning.hardware import Cluster
from planning.memory import FLOAT32, stage_shapes, unit_bytes
from planning.network import Route, context_collectives, route, seconds, tensor_collectives
from planning.workload import Workload

OPERATORS = (22, 48)  # of a block, forward and backward, uncompiled
OPERATORS_COMPILED = (8, 20)
# Seconds that Python takes for a block forward and backward, uncompiled, with DTensor's dispatch: ranks of
# vit1b on the host of an H100, collectives answered at once (benchmarks/gpu.sh, ranks). FSDP's hide there.
DISPATCH = {"tensor": 0.020, "ulysses": 0.013, "ring": 0.011, "all_gather": 0.011}
# "5 % and higher differences" between accelerators of a node (github.com/stas00/ml-engineering, "Not all
# accelerators are created equal"): the slowest of 8, for which all wait, over the fastest: rates are its.
SPREAD, NODE = 0.05, 8
# Collectives take 24 of an H100's 132 multiprocessors (a profile of FSDP's all-gather in
# forums.developer.nvidia.com/t/337991): what computes meanwhile takes longer on the rest. NCCL opens as many
# channels as its links can use: slower ones take fewer.
NCCL_SLOWDOWN = 24 / (132 - 24)
BUCKET = 25 * 2**20  # bytes of gradients that DDP reduces at once


class Kind(Enum):
    COMPUTES = "computes"
    EXPOSED = "communication that nothing hides"
    WAITS = "waits"


@dataclass(frozen=True)
class Term:
    """A part of a step, in seconds."""

    name: str
    seconds: float
    kind: Kind = Kind.COMPUTES


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimiser step on the slowest rank; terms add up to `total`."""

    terms: tuple[Term, ...]
    samples: int  # of the global batch
    communication: float  # seconds of all collectives of a rank, hidden or not

    @property
    def classes(self) -> dict[str, float]:
        """Name -> seconds of the terms that take any."""
        return {term.name: term.seconds for term in self.terms if term.seconds > 0}

    def of_kind(self, kind: Kind) -> float:
        return sum(term.seconds for term in self.terms if term.kind == kind)

    @property
    def total(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return self.of_kind(Kind.EXPOSED)

    @property
    def computation(self) -> float:
        return self.of_kind(Kind.COMPUTES)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    def mfu(self, work: Workload, peak: float) -> float:
        """Model FLOP/s over the dense bf16 peak of all devices."""
        return work.sample_flops * self.samples_per_second / (peak * work.degrees.world)


def step_time(work: Workload, cluster: Cluster) -> StepTime:
    rates, through = cluster.rates, work.passes + work.forecasts / 2  # half of a pass is forward
    routes = {axis: route(cluster, work, axis) for axis in ("fsdp", "dp_replicate", "cp", "tp", "pp")}
    slower = slower_in_a_model(rates, work.dtype)
    blocks = [block_seconds(work, rates, backward) * slower for backward in (False, True)]
    in_block = [sum(times.values()) for times in blocks]
    computing = computing_seconds(work, rates, blocks)
    inside, inside_all = inner_communication(work, rates, routes)
    sharding, sharding_all = sharding_communication(work, cluster, routes, in_block)
    hidden = max(sharding_all - sharding.get("exposed data parallel", 0.0), 0.0)
    slowest = work.slowest * (1.0 if cluster.shared else spread(work.degrees.world))
    idle = bubble(work, in_block, sum(inside.values()))
    copies = exposed_copies(work, cluster, sum(computing.values()))
    terms = [
        *(Term(name, value) for name, value in computing.items()),
        Term("exposed copies from the host", copies, Kind.EXPOSED),
        *(Term(name, through * value, Kind.EXPOSED) for name, value in inside.items()),
        *(Term(name, value, Kind.EXPOSED) for name, value in sharding.items()),
        Term("bubble", slowest * idle, Kind.WAITS),  # stages wait for the slowest rank of the one before
        Term("exposed rollout", rollout_communication(work, routes), Kind.EXPOSED),
        Term("exposed pipeline", pipeline_sends(work, routes["pp"]), Kind.EXPOSED),
        Term("host", host_seconds(work, cluster, in_block), Kind.WAITS),
        update_term(work, cluster, routes),
        Term("exposed gathers of Muon", muon_gathers(work, routes), Kind.EXPOSED),
        Term("slowed by collectives", slowed_seconds(work, cluster, routes, hidden)),
    ]
    # All ranks wait for the one that computes longest.
    busy = sum(term.seconds for term in terms if term.kind == Kind.COMPUTES)
    terms.append(Term("stragglers", (slowest - 1) * busy, Kind.WAITS))
    if cluster.anchor:
        factor = cluster.anchor.factor(work)
        terms = [replace(term, seconds=factor * term.seconds) for term in terms]
    return StepTime(tuple(terms), work.global_batch, inside_all * through + sharding_all)


def computing_seconds(work: Workload, rates: Rates, blocks: list[Times]) -> Times:
    """Seconds of all passes by class of kernel. `blocks`: those of one block, forward and backward."""
    ends = [end_seconds(work, rates, backward) for backward in (False, True)]
    total = Times()
    for parts, number in ((blocks, work.rank_layers), (ends, 1)):
        for times, passes in zip(parts, (work.passes + work.forecasts, work.passes), strict=True):
            total.add(times * (number * passes))
    total["fields"] += field_seconds(work, rates) * work.accumulation
    return total


def exposed_copies(work: Workload, cluster: Cluster, computing: float) -> float:
    """Seconds that states come later from the host than the micro-batch before them is computed."""
    if cluster.shared:
        return 0.0
    states = FLOAT32 * work.states_read * work.local_batch * work.field_values
    return max(work.accumulation * states / cluster.host_link - computing, 0.0)


def update_term(work: Workload, cluster: Cluster, routes: dict[str, Route]) -> Term:
    if work.offload:
        return Term("update on the host", host_update_seconds(work, cluster) + norm_seconds(work, routes))
    return Term("update", update_seconds(work, cluster.rates) + norm_seconds(work, routes))


def slowed_seconds(work: Workload, cluster: Cluster, routes: dict[str, Route], hidden: float) -> float:
    """Seconds that computation is longer for `hidden` seconds of collectives at the same time."""
    if cluster.shared:
        return 0.0
    ring = routes["fsdp" if work.uses_fsdp else "dp_replicate"].ring
    return NCCL_SLOWDOWN * ring.bandwidth / cluster.inside.bandwidth * hidden


def spread(devices: int) -> float:
    """Ratio of the slowest of `devices` to the one that rates are of, in time.

    Speeds are normally distributed: the slowest of n lies z(n) deviations below the mean, the fastest of a
    node z(8) above it, and a node's difference is 2 z(8) deviations.
    """
    if devices == 1:
        return 1.0
    return 1 + SPREAD * (normal_maximum(devices) + normal_maximum(NODE)) / (2 * normal_maximum(NODE))


def normal_maximum(number: int) -> float:
    """Expected largest of `number` standard normal numbers (Blom 1958), within 1 %."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def host_seconds(work: Workload, cluster: Cluster, in_block: list[float]) -> float:
    """A block takes at least as long as handing its operators to the device, one after the other."""
    operators = OPERATORS_COMPILED if work.compiled else OPERATORS
    late = sum(max(n * cluster.rates.launch - t, 0.0) for n, t in zip(operators, in_block, strict=True))
    if not work.compiled and not cluster.shared:  # whose processors compute the block, too
        used = ["tensor"] * (work.degrees.tp > 1) + [work.method] * (work.degrees.cp > 1)
        late = max(late, max((DISPATCH[name] for name in used), default=0.0) - sum(in_block))
    return late * (work.passes + work.forecasts) * work.rank_layers


def norm_seconds(work: Workload, routes: dict[str, Route]) -> float:
    """The gradient norm is summed over every axis that shards; LAMB and LARS sum two norms of each parameter
    over all ranks, 16 bytes.
    """
    norm = sum(seconds("all-reduce", 8, on) for name, on in routes.items() if name != "dp_replicate")
    if work.optimizer not in ("LAMB", "LARS"):
        return norm
    ends = len(work.model.first()) + len(work.model.last())
    size = 16 * (work.model.layers * len(work.model.block()) + ends)
    return norm + sum(seconds("all-reduce", size, on) for on in routes.values())


def muon_gathers(work: Workload, routes: dict[str, Route]) -> float:
    """Every matrix of a block, whole on every rank, in the precision of its products."""
    if work.optimizer != "Muon":
        return 0.0
    itemsize, total = min(work.itemsize, FLOAT32), 0.0
    shapes = [shape for shape in work.model.block().values() if len(shape) == 2]
    for size in (itemsize * math.prod(shape) for shape in shapes):
        over_fsdp = seconds("all-gather", size / work.degrees.tp, routes["fsdp"]) if work.uses_fsdp else 0.0
        total += over_fsdp + seconds("all-gather", size, routes["tp"])
    return work.rank_layers * total


# -- within a sample


def inner_communication(
    work: Workload, rates: Rates, routes: dict[str, Route]
) -> tuple[dict[str, float], float]:
    """Exposed seconds of one micro-batch by class, and seconds in all."""
    part = work.rank_layers / work.model.layers  # of the blocks
    # Recomputation communicates again: all of the forward, or its gathers.
    again = {"full": 1.5, "every_n_blocks": 1.5, "every_second_product": 1.25}.get(work.ac_mode, 1.0)
    found: dict[str, float] = {}
    for name, axis, calls_of in (
        ("tensor", "tp", tensor_collectives),
        ("context", "cp", context_collectives),
    ):
        if getattr(work.degrees, axis) > 1:
            calls = calls_of(work).items()
            once_through = sum(number * seconds(call.kind, call.size, routes[axis]) for call, number in calls)
            found[f"exposed {name} parallel"] = again * part * once_through
    everything = sum(found.values())
    if work.async_tp and work.degrees.tp > 1:  # products start with the first of tp parts
        products = sum(linear_times(work, rates, backward)["matmul"] for backward in (False, True))
        first = found["exposed tensor parallel"] / work.degrees.tp
        rest = found["exposed tensor parallel"] - first - work.rank_layers * products
        found["exposed tensor parallel"] = first + max(rest, 0.0)
    if work.method == "ring" and work.degrees.cp > 1:
        attending = sum(attention_time(work, rates, backward) for backward in (False, True))
        hiding = work.rank_layers * attending * (1 - 1 / work.degrees.cp)
        rest = found["exposed context parallel"] - hiding
        found["exposed context parallel"] = max(rest, 0.0)
    return found, everything


def rollout_communication(work: Workload, routes: dict[str, Route]) -> float:
    """Outputs of a forecast are gathered for the next step's input, and gradients of its windows summed, by
    all ranks that share a sample.
    """
    if work.rollout_steps == 1:
        return 0.0
    state = FLOAT32 * work.local_batch * work.members * work.field_values
    gather, reduce = (
        sum(seconds(kind, size, routes[axis]) for axis in ("cp", "tp", "pp"))
        for kind, size in (("all-gather", state), ("all-reduce", work.history * state))
    )
    gathers, sums = work.rollout_steps - 1, work.gradient_steps - 1
    return work.accumulation * (gathers * gather + sums * reduce)


# -- parameters and gradients


def sharding_communication(
    work: Workload, cluster: Cluster, routes: dict[str, Route], in_block: list[float]
) -> tuple[dict[str, float], float]:
    """Exposed seconds of data parallelism in a step, and seconds in all. `in_block`: seconds that a block
    computes, forward and backward.

    cpu_offload copies a rank's shard to the device before each gather, and its gradients back: what is
    exposed beyond the collectives is that link's.
    """
    if not work.uses_fsdp:
        return replica_communication(work, routes["dp_replicate"], in_block[1])
    block = padded(cut(work.model.block(), work.degrees.tp), work.fsdp_ranks)
    gather = seconds("all-gather", work.itemsize * block, routes["fsdp"])
    scatter = seconds("reduce-scatter", work.reduce_itemsize * block, routes["fsdp"])
    shard = block / work.fsdp_ranks
    all_reduce = seconds("all-reduce", work.reduce_itemsize * shard, routes["dp_replicate"])
    exposed = exposed_sharding(work, gather, scatter, all_reduce, in_block)
    found = {"exposed data parallel": exposed}
    if work.offload:
        copy = FLOAT32 * shard / cluster.host_link
        offloaded = exposed_sharding(work, gather + copy, scatter + copy, all_reduce, in_block)
        found["exposed offload"] = offloaded - exposed
    again = gathers_backward(work)
    forwards = work.reductions if work.stays_gathered else work.passes
    gathers = forwards * work.rank_layers + (work.passes + work.forecasts) * again
    return found, gathers * gather + work.rank_layers * (work.reductions * scatter + all_reduce)


def gathers_backward(work: Workload) -> int:
    """Blocks that each pass gathers again in its backward."""
    if work.stays_gathered:
        return 0
    return {"default": work.rank_layers - 1, "always": work.rank_layers, "never": 0}[work.reshard]


def exposed_sharding(
    work: Workload, gather: float, scatter: float, all_reduce: float, in_block: list[float]
) -> float:
    """Seconds that nothing hides of a step's gathers and reductions, given those of a block.

    Gradients are reduced and scattered in every pass, and all-reduced over replicas (HSDP) in the last. Those
    of a pipeline are reduced after the last micro-batch of a batch, when nothing is left to hide it.
    """
    forward, backward = in_block
    layers, again = work.rank_layers, gathers_backward(work)
    in_forward = gather + (layers - 1) * max(gather - forward, 0.0)  # nothing hides the first
    if work.reduces_last:
        through = work.reductions if work.stays_gathered else work.passes
        gathered = through * in_forward + work.passes * again * max(gather - backward, 0.0)
        return gathered + work.reductions * layers * (scatter + all_reduce)
    # A pass gathers and reduces on the same network; nothing hides the last reduction of a step.
    both = (gather if again else 0.0) + scatter
    reducing = layers * max(both + all_reduce - backward, 0.0) + scatter + all_reduce
    reducing += (work.reductions - 1) * layers * max(both - backward, 0.0)
    forwards, rest = work.passes + work.forecasts * (again > 0), work.passes - work.reductions
    return forwards * in_forward + rest * again * max(gather - backward, 0.0) + reducing


def replica_communication(work: Workload, on: Route, backward: float) -> tuple[dict[str, float], float]:
    """DDP: buckets of gradients are reduced while backward goes on; nothing hides the last one.

    ZeRO-1 does the same and then gathers the updated weights, in the open.
    """
    if on.ranks == 1:
        return {}, 0.0
    total = 4 * sum(n * count(unit) for unit, n in stage_shapes(work, first=True, last=True))
    buckets = max(round(total / BUCKET), 1)
    bucket = seconds("all-reduce", total / buckets, on)
    exposed = bucket + max((buckets - 1) * bucket - backward * work.rank_layers, 0.0)
    gathered = seconds("all-gather", total, on) if work.zero1 else 0.0
    return {"exposed data parallel": exposed + gathered}, buckets * bucket + gathered


# -- pipelines


def bubble(work: Workload, in_block: list[float], inside: float) -> float:
    """Seconds of an idle stage in a step. `inside`: communication of a micro-batch within a sample.

    Idle for p - 1 micro-batches of one of a rank's stages; zero-bubble schedules fill all but the gradients
    of inputs, a third. The forecasts of a rollout pass one stage at a time.
    """
    pp, layers = work.degrees.pp, work.rank_layers
    if pp == 1:
        return 0.0
    idle = (1 / 3 if "ZeroBubble" in work.schedule else 1.0) / work.stages_of_rank
    micro_batch = (in_block[0] + in_block[1]) * layers + inside
    training = work.accumulation * work.gradient_steps * (pp - 1) * micro_batch * idle
    return training + (pp - 1) * work.forecasts * in_block[0] * layers


def pipeline_sends(work: Workload, on: Route) -> float:
    """Sends of a micro-batch through all stages and back; those of the others are hidden."""
    hops = 2 * (work.stages_of_rank * work.degrees.pp - 1) if work.degrees.pp > 1 else 0
    return work.accumulation * work.gradient_steps * hops * seconds("send", unit_bytes(work), on)
