"""Seconds of a training step by class: what computes, what is sent in the open, what waits.

A block computes while the next one's parameters are gathered and the last one's gradients are reduced; only
what takes longer than the computation is exposed. Tensor parallelism's collectives, and those of attention,
stand between operations and are exposed whole, but for the ring's.
"""

from dataclasses import dataclass

from parallelisms.degrees import num_stages
from planning.architecture import count, cut, padded
from planning.calibration import Rates
from planning.compute import (
    Times,
    attention_time,
    block_seconds,
    end_seconds,
    field_seconds,
    slower_in_a_model,
    update_seconds,
)
from planning.hardware import Cluster
from planning.memory import stage_shapes, unit_bytes
from planning.network import Route, context_collectives, route, seconds, tensor_collectives
from planning.workload import Workload

OPERATORS = (22, 48)  # of a block, forward and backward, uncompiled
OPERATORS_COMPILED = (8, 20)
# "5 % and higher differences" between accelerators of a node (github.com/stas00/ml-engineering, "Not all
# accelerators are created equal"): the slowest, for which all wait, over the one that rates are of.
SPREAD = 1.05
# Collectives take 24 of an H100's 132 multiprocessors (a profile of FSDP's all-gather in
# forums.developer.nvidia.com/t/337991): what computes meanwhile takes longer on the rest. NCCL opens as many
# channels as its links can use: slower ones take fewer.
TAKEN = 24 / (132 - 24)
BUCKET = 25 * 2**20  # bytes of gradients that DDP reduces at once


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimiser step on the slowest rank; classes add up to `total`."""

    classes: dict[str, float]
    samples: int  # of the global batch
    communication: float  # seconds of all collectives of a rank, hidden or not

    @property
    def total(self) -> float:
        return sum(self.classes.values())

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(value for name, value in self.classes.items() if name.startswith("exposed"))

    @property
    def computation(self) -> float:
        waits = ("exposed", "bubble", "host", "stragglers")
        return sum(value for name, value in self.classes.items() if not name.startswith(waits))

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.total

    def mfu(self, work: Workload, peak: float) -> float:
        """Model FLOP/s over the dense bf16 peak of all devices."""
        return 3 * work.model.flops() * self.samples_per_second / (peak * work.degrees.world)


def step_time(work: Workload, cluster: Cluster) -> StepTime:
    rates = cluster.rates
    routes = {axis: route(cluster, work, axis) for axis in ("fsdp", "dp_replicate", "cp", "tp", "pp")}
    slower = slower_in_a_model(rates, work.dtype)
    forward, backward = (block_seconds(work, rates, backward) * slower for backward in (False, True))
    ends = (end_seconds(work, rates, backward) for backward in (False, True))
    passes, layers = work.passes, work.rank_layers
    total = Times()
    for times, number in ((forward, layers), (backward, layers), *((end, 1) for end in ends)):
        total.add(times * (number * passes))
    total["fields"] += (field_seconds(work, rates) + copy_seconds(work, cluster)) * work.accumulation
    inside, everything = inner_communication(work, rates, routes)
    total.add(inside * passes)
    in_block = [sum(forward.values()), sum(backward.values())]
    exposed, hidden = sharding_communication(work, routes, in_block[0], in_block[1])
    total.add(exposed)
    total["bubble"] += bubble(work, (in_block[0] + in_block[1]) * layers + sum(inside.values()))
    total["exposed pipeline"] += pipeline_sends(work, routes["pp"])
    total["host"] += host_seconds(work, rates, in_block) * passes * layers
    total["update"] += update_seconds(work, rates) + norm_seconds(routes)
    if not cluster.shared:
        ring = routes["fsdp" if work.uses_fsdp else "dp_replicate"].ring
        concealed = max(hidden - exposed["exposed data parallel"], 0.0)
        total["slowed by collectives"] += TAKEN * ring.bandwidth / cluster.inside.bandwidth * concealed
    usual = SPREAD if work.degrees.world > 1 and not cluster.shared else 1.0
    # All ranks wait for the one that computes longest; idle stages of a pipeline do, too.
    busy = sum(v for k, v in total.items() if not k.startswith(("exposed", "bubble", "host")))
    total["stragglers"] += (work.slowest * usual - 1) * busy
    total["bubble"] *= work.slowest * usual
    classes = {name: value for name, value in total.items() if value > 0}
    return StepTime(classes, work.global_batch, everything * passes + hidden)


def copy_seconds(work: Workload, cluster: Cluster) -> float:
    """Two states of each sample from the host to a device, on the stream that computes."""
    return 0.0 if cluster.shared else 8 * work.local_batch * work.field_values / cluster.host_link


def host_seconds(work: Workload, rates: Rates, in_block: list[float]) -> float:
    """A block takes at least as long as handing its operators to the device, one after the other."""
    operators = OPERATORS_COMPILED if work.compiled else OPERATORS
    return sum(max(n * rates.launch - t, 0.0) for n, t in zip(operators, in_block, strict=True))


def norm_seconds(routes: dict[str, Route]) -> float:
    """The gradient norm is summed over every axis that shards."""
    return sum(seconds("all-reduce", 8, on) for name, on in routes.items() if name != "dp_replicate")


# -- within a sample


def inner_communication(work: Workload, rates: Rates, routes: dict[str, Route]) -> tuple[Times, float]:
    """Of one micro-batch: exposed seconds by class, and seconds in all."""
    part = work.rank_layers / work.model.layers  # of the blocks
    again = 1.5 if work.ac_mode in ("full", "every_n_blocks") else 1.0  # recomputation communicates again
    found = Times()
    for name, axis, calls_of in (
        ("tensor", "tp", tensor_collectives),
        ("context", "cp", context_collectives),
    ):
        if getattr(work.degrees, axis) > 1:
            calls = calls_of(work).items()
            once_through = sum(number * seconds(call.kind, call.size, routes[axis]) for call, number in calls)
            found[f"exposed {name} parallel"] = again * part * once_through
    everything = sum(found.values())
    if work.method == "ring" and work.degrees.cp > 1:
        attending = sum(attention_time(work, rates, backward) for backward in (False, True))
        hiding = work.rank_layers * attending * (1 - 1 / work.degrees.cp)
        rest = found["exposed context parallel"] - hiding
        found["exposed context parallel"] = max(rest, 0.0)
    return found, everything


# -- parameters and gradients


def sharding_communication(
    work: Workload, routes: dict[str, Route], forward: float, backward: float
) -> tuple[Times, float]:
    """Of a step: exposed seconds of data parallelism, and seconds in all."""
    if not work.uses_fsdp:
        return replica_communication(work, routes["dp_replicate"], backward)
    fsdp, replicas, tp = routes["fsdp"], routes["dp_replicate"], work.degrees.tp
    block = padded(cut(work.model.block(), tp), work.fsdp_ranks)
    gather = seconds("all-gather", work.itemsize * block, fsdp)
    reduce = seconds("reduce-scatter", work.reduce_itemsize * block, fsdp)
    reduce += seconds("all-reduce", work.reduce_itemsize * block / work.fsdp_ranks, replicas)
    layers, passes = work.rank_layers, work.accumulation * work.micro_batches
    gathers = {"default": layers - 1, "always": layers, "never": 0}[work.reshard]
    in_forward = gather + (layers - 1) * max(gather - forward, 0.0)  # nothing hides the first
    again = gathers * max(gather - backward, 0.0)
    # The last micro-batch gathers and reduces on the same network; nothing hides the last reduction.
    both = (gather if gathers else 0.0) + reduce
    reducing = layers * max(both - backward, 0.0) + reduce
    exposed = passes * in_forward + (passes - 1) * again + reducing
    everything = passes * (layers + gathers) * gather + layers * reduce
    return Times({"exposed data parallel": exposed}), everything


def replica_communication(work: Workload, on: Route, backward: float) -> tuple[Times, float]:
    """DDP: buckets of gradients are reduced while backward goes on; nothing hides the last one.

    ZeRO-1 does the same and then gathers the updated weights, in the open.
    """
    if on.ranks == 1:
        return Times(), 0.0
    total = 4 * sum(n * count(unit) for unit, n in stage_shapes(work, first=True, last=True))
    buckets = max(round(total / BUCKET), 1)
    bucket = seconds("all-reduce", total / buckets, on)
    exposed = bucket + max((buckets - 1) * bucket - backward * work.rank_layers, 0.0)
    gathered = seconds("all-gather", total, on) if work.zero1 else 0.0
    return Times({"exposed data parallel": exposed + gathered}), buckets * bucket + gathered


# -- pipelines


def bubble(work: Workload, batch_seconds: float) -> float:
    """Seconds of an idle stage, of a step; `batch_seconds`: a micro-batch through a stage, and back.

    Idle for p - 1 micro-batches; interleaved stages are half as long; zero-bubble schedules fill all but the
    gradients of inputs, a third.
    """
    pp = work.degrees.pp
    if pp == 1:
        return 0.0
    idle = {"GPipe": 1.0, "1F1B": 1.0, "Interleaved1F1B": 0.5}.get(work.schedule, 1 / 6)
    return work.accumulation * (pp - 1) * batch_seconds * idle


def pipeline_sends(work: Workload, on: Route) -> float:
    """A micro-batch's way through all stages and back; the sends of others go beside computation."""
    hops = 2 * (num_stages(work.schedule, work.degrees.pp) - 1) if work.degrees.pp > 1 else 0
    return work.accumulation * hops * seconds("send", unit_bytes(work), on)
