"""Collectives within a sample, in closed form, and the seconds that any takes on a two-level network: an
alpha-beta model of rings, trees and exchanges.

benchmarks/layout_parity.py compares every number with what the recorder of planning/dry_run.py counts.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from parallelisms.degrees import AXES, Degrees
from planning.clusters import Cluster, Link
from planning.constants import FLOAT32
from planning.workload import Workload


@dataclass(frozen=True)
class Collective:
    """A kind of collective along an axis. `size`: bytes of the larger buffer of a call on one rank, which an
    all-gather gives and a reduce-scatter takes.
    """

    kind: str
    axis: str
    size: int


Calls = Counter[Collective]  # how many of each


def sample_collectives(work: Workload) -> tuple[Calls, Calls]:
    """Collectives of a micro-batch along tp and cp, forward and backward.

    tp: two gathers and two reduce-scatters a block each. The ends exchange tokens for width: where a backend
    has no all-to-all (gloo) that is a gather of the whole. cp by ulysses: two exchanges a block and pass;
    all_gather: one gather, one reduce-scatter; ring: forward passes keys and values on cp - 1 times, backward
    again, and their gradients cp times, home. Recomputation repeats those of the forward pass.
    """
    degrees, depth = work.degrees, work.model.layers
    values = work.states_at_once * work.rank_tokens  # a value of each token
    forward: Calls = Counter()
    backward: Calls = Counter()
    if degrees.tp > 1:
        gather, scatter, end_gather, end_scatter = (
            Collective(kind, "tp", values * degrees.tp * features * work.itemsize)
            for features in (work.model.dim, work.model.out_features)
            for kind in ("all-gather", "reduce-scatter")
        )
        forward.update({gather: 2 + 2 * depth, scatter: 2 * depth, end_scatter: 1})
        backward.update({gather: 2 + 2 * depth, scatter: 2 * depth, end_gather: 1})
        if work.ac_mode != "none":  # but for the last reduce-scatter of a segment
            backward.update({gather: 2 * depth, scatter: 2 * depth - math.ceil(depth / work.segment)})
    if degrees.cp > 1:
        queries = values * work.model.dim
        keys = values * (work.model.qkv_features - work.model.dim)  # and values
        exchanges: Calls = Counter()
        if work.method == "ulysses":
            for size in (queries + keys, queries):
                exchanges[Collective("all-to-all", "cp", size * work.itemsize)] = depth
            backward += exchanges
        elif work.method == "all_gather":
            size = degrees.cp * keys * work.itemsize
            exchanges[Collective("all-gather", "cp", size)] = depth
            backward[Collective("reduce-scatter", "cp", size)] = depth
        else:
            exchanges[Collective("send", "cp", keys * work.itemsize)] = (degrees.cp - 1) * depth
            backward += exchanges
            backward[Collective("send", "cp", keys * work.reduce_itemsize)] += degrees.cp * depth
        if work.ac_mode != "none" and (work.ac_mode != "selective" or work.method != "ring"):
            backward += exchanges  # "selective" keeps what the ring received
        forward += exchanges
    return forward, backward


def rollout_collectives(work: Workload) -> Calls:
    """Collectives along tp and cp of a step of a rollout that is forecast first and then goes back.

    The output is gathered; the gradient of the window is summed over the ranks of the sample, and over tp
    that of the patches.
    """
    samples, tp, cp = work.states_at_once, work.degrees.tp, work.degrees.cp
    tokens, window = work.rank_tokens * tp, FLOAT32 * samples * work.history * work.field_values
    patches = samples * tokens * work.model.in_features * (work.itemsize if work.uses_fsdp else FLOAT32)
    output = samples * tokens * work.model.out_features * work.itemsize
    calls: Calls = Counter()
    if tp > 1:
        calls[Collective("all-gather", "tp", output)] = 1
        for size in (window, patches):
            calls[Collective("all-reduce", "tp", size)] += 1
    if cp > 1:
        calls[Collective("all-gather", "cp", cp * output)] = 1
        calls[Collective("all-reduce", "cp", window)] = 1
    return calls


# -- how long they take


@dataclass(frozen=True)
class Route:
    """A group of ranks on the network: so many of them in each node, and the links they have there."""

    ranks: int
    per_node: int
    inside: Link
    between: Link  # the part of a node's network that this group has

    @property
    def ring(self) -> Link:
        """The slowest link of a ring, which enters and leaves every node once; latency is a step's mean."""
        nodes = math.ceil(self.ranks / self.per_node)
        if nodes == 1:
            return self.inside
        crossing = nodes / self.ranks
        latency = crossing * self.between.latency + (1 - crossing) * self.inside.latency
        return Link(latency, min(self.inside.bandwidth, self.between.bandwidth))


def route(cluster: Cluster, degrees: Degrees, axis: str) -> Route:
    """Return the route of a mesh axis, numbered in the order of AXES; "fsdp" is dp_shard and cp together.

    A node's network is divided among the groups that use it at once.
    """
    axes = ("dp_shard", "cp") if axis == "fsdp" else (axis,)
    ranks = math.prod(getattr(degrees, name) for name in axes)
    fastest = max(AXES.index(name) for name in axes)
    stride = math.prod(getattr(degrees, name) for name in AXES[fastest + 1 :])
    node = min(cluster.devices_per_node, degrees.world)
    per_node = min(max(node // stride, 1), ranks)
    between = Link(cluster.between.latency, cluster.between.bandwidth * per_node / node)
    return Route(ranks, per_node, cluster.inside, between)


def seconds(kind: str, size: float, on: Route) -> float:
    """Return the seconds of one collective."""
    if on.ranks == 1:
        return 0.0
    if kind in ("all-reduce", "all-gather", "reduce-scatter"):
        # 2 (n - 1) alpha + 2 (n - 1) / n S / B; the two halves are a reduce-scatter and an all-gather
        steps = 2 * (on.ranks - 1)
        both = steps * on.ring.latency + steps / on.ranks * size / on.ring.bandwidth
        return both if kind == "all-reduce" else both / 2
    if kind == "all-to-all":
        # Each rank keeps 1 / n, sends some inside its node, the rest over the group's part of the network.
        outside, inside = on.ranks - on.per_node, on.per_node - 1  # ranks to send to
        latency = (outside * on.between.latency + inside * on.inside.latency) / on.ranks
        sent = max(inside / on.inside.bandwidth, outside * on.per_node / on.between.bandwidth)
        return latency + sent * size / on.ranks
    return on.ring.latency + size / on.ring.bandwidth  # a send to a neighbour, a broadcast in chunks


def axis_seconds(calls: Calls, routes: dict[str, Route]) -> dict[str, float]:
    """Return the seconds of all calls along each axis."""
    times = defaultdict(float)
    for call, number in calls.items():
        times[call.axis] += number * seconds(call.kind, call.size, routes[call.axis])
    return times
