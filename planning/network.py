"""Seconds that collectives take on a two-level network: an alpha-beta model of rings, trees and exchanges.

`size` is that of the larger buffer of a call on one rank, in bytes (parallelisms/collectives.py).
"""

import math
from dataclasses import dataclass

from planning.hardware import Cluster, Link
from planning.workload import Workload


@dataclass(frozen=True)
class Route:
    """A group of ranks on the network: so many of them in each node, and the links they have there."""

    ranks: int
    per_node: int
    inside: Link
    between: Link  # the part of a node's network that this group has

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.per_node)

    @property
    def ring(self) -> Link:
        """The slowest link of a ring, which enters and leaves every node once; latency is a step's mean."""
        if self.nodes == 1:
            return self.inside
        crossing = self.nodes / self.ranks
        latency = crossing * self.between.latency + (1 - crossing) * self.inside.latency
        return Link(latency, min(self.inside.bandwidth, self.between.bandwidth))


def route(cluster: Cluster, work: Workload, axis: str) -> Route:
    """Where the ranks of a mesh axis stand, numbered in the order of `parallelism.axis_order`.

    "fsdp" is dp_shard and cp together. A node's network is divided among the groups that use it at once.
    """
    axes = ("dp_shard", "cp") if axis == "fsdp" else (axis,)
    order, degrees = work.axis_order, work.degrees
    ranks = math.prod(getattr(degrees, name) for name in axes)
    fastest = max(order.index(name) for name in axes)
    stride = math.prod(getattr(degrees, name) for name in order[fastest + 1 :])
    node = min(cluster.devices_per_node, degrees.world)
    per_node = min(max(node // stride, 1), ranks)
    between = Link(cluster.between.latency, cluster.between.bandwidth * per_node / node)
    return Route(ranks, per_node, cluster.inside, between)


def seconds(kind: str, size: float, on: Route) -> float:
    """Of one collective of `kind` (as planning/communication.py names them)."""
    if on.ranks == 1:
        return 0.0
    if kind == "all-reduce":
        return min(ring_all_reduce(on.ranks, on.ring, size), tree_all_reduce(on, size))
    if kind in ("all-gather", "reduce-scatter"):
        return ring_all_reduce(on.ranks, on.ring, size) / 2
    if kind == "all-to-all":
        return all_to_all(on, size)
    return on.ring.latency + size / on.ring.bandwidth  # a send to a neighbour, a broadcast in chunks


def ring_all_reduce(ranks: int, link: Link, size: float) -> float:
    """2 (n - 1) alpha + 2 (n - 1) / n S / B; the two halves are a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) * link.latency + 2 * (ranks - 1) / ranks * size / link.bandwidth


def tree_all_reduce(on: Route, size: float) -> float:
    """Up a binary tree of nodes and down again, chains inside them: few latencies, all bytes twice."""
    depth = math.ceil(math.log2(max(on.nodes, 1)))
    latency = depth * on.between.latency + (on.per_node - 1) * on.inside.latency
    return 2 * latency + 2 * size / on.ring.bandwidth


def all_to_all(on: Route, size: float) -> float:
    """Each rank keeps 1 / n, sends some inside its node, the rest over the group's part of the network."""
    steps = (on.ranks - on.per_node) * on.between.latency + (on.per_node - 1) * on.inside.latency
    inside = (on.per_node - 1) / on.ranks * size / on.inside.bandwidth
    outside = (on.ranks - on.per_node) / on.ranks * size * on.per_node / on.between.bandwidth
    return steps / on.ranks + max(inside, outside)
