"""How ranks and nodes reach each other, and how fast: interfaces, axes of the mesh, pairs of nodes.

What is measured stands beside the figures of planning/clusters.toml. A slow link shows in one pair of nodes,
a slow node in all of its pairs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from jobs.rank_tree import RankTree
from jobs.verdicts import FAIL, PASS, WARN, Row, judged
from parallelisms.degrees import AXES
from parallelisms.mesh import Mesh
from planning.calibrate import Operation, rounds
from planning.hardware import Cluster
from planning.network import Route, route_of, seconds

SIZES = {"cpu": (2**12, 2**18, 2**22), "cuda": (2**12, 2**20, 2**26)}  # bytes: the first is all latency
REPETITIONS = 3
BUDGET = 3.0  # seconds of one measurement: a slow link is not waited for with large messages
SLOW, BROKEN = 0.5, 0.2  # of what is planned, or of the median: from there on it is said, and refused
LATE, LATE_SECONDS = 20.0, 5e-3  # a small message: times what is planned, and at least so long
FIX = "leave that node out (sbatch --exclude), or ask who runs the network; figures of yours: --clusters"
INSIDE = "see who else uses this host, and how its devices are joined (nvidia-smi topo -m)"
Edge = tuple[int, int]  # two nodes


@dataclass(frozen=True)
class Sample:
    """One collective on one axis as one rank saw it; `planned` is 0 where nobody knows the cluster."""

    axis: str
    kind: str  # as planning.network.seconds takes it
    group: int  # its lowest rank
    size: int  # bytes
    seconds: float
    planned: float


@dataclass(frozen=True)
class PairSample:
    """A message and one back at the same time, between two nodes, as one rank saw it."""

    nodes: Edge
    latency: float  # seconds of a small one
    rate: float  # bytes/s of the largest one, each way


# -- what is measured


def axis_samples(tree: RankTree, mesh: Mesh, order: Sequence[str], cluster: Cluster | None) -> list[Sample]:
    """All-reduce, all-gather and point-to-point on every axis of the mesh, all groups of it at once."""
    found: list[Sample] = []
    for axis in (axis for axis in AXES if getattr(mesh.degrees, axis) > 1):
        group, on = mesh.group(axis), cluster and route_of(cluster, mesh.degrees, order, axis)
        device = torch.device(mesh.grid.device_type)
        first = dist.get_process_group_ranks(group)[0]
        for kind, call in calls(group, device).items():
            for size, taken in timings(tree, call, device):
                found.append(Sample(axis, kind, first, size, taken, planned(kind, size, on)))
    return found


def planned(kind: str, size: int, on: Route | None) -> float:
    return seconds(kind, size, on) if on else 0.0


def calls(group: dist.ProcessGroup, device: torch.device) -> dict[str, Callable[[int], Callable[[], None]]]:
    """Kind -> what gives, for a size in bytes, the call that moves so much."""
    members, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    ahead, behind = members[(rank + 1) % len(members)], members[rank - 1]

    def numbers(size: int) -> torch.Tensor:
        return torch.zeros(size // 4, device=device)

    def reduce(size: int) -> Callable[[], None]:
        buffer = numbers(size)
        return lambda: wait(dist.all_reduce(buffer, group=group, async_op=True))

    def gather(size: int) -> Callable[[], None]:
        part = numbers(max(size // len(members), 4))
        whole = list(part.repeat(len(members)).chunk(len(members)))
        return lambda: wait(dist.all_gather(whole, part, group=group, async_op=True))

    def send(size: int) -> Callable[[], None]:
        return exchange(numbers(size), numbers(size), ahead, behind, group)

    return {"all-reduce": reduce, "all-gather": gather, "send": send}


def exchange(
    mine: torch.Tensor, theirs: torch.Tensor, to: int, of: int, group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Sends to one rank and receives from another at the same time."""

    def call() -> None:
        there = dist.P2POp(dist.isend, mine, to, group)
        back = dist.P2POp(dist.irecv, theirs, of, group)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()

    return call


def wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def timings(
    tree: RankTree, call: Callable[[int], Callable[[], None]], device: torch.device
) -> Iterator[tuple[int, float]]:
    """(bytes, seconds) from small to large; all ranks stop at the same size, once the next takes too long."""
    sizes = SIZES[device.type]
    for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
        operation = Operation("", "float32", (size,), call(size))
        rounds([operation], [1], (1, 1), device)
        taken = rounds([operation], [1], (REPETITIONS, REPETITIONS), device)[0].seconds
        yield size, taken
        slowest = tree.all_reduce(torch.tensor(taken), dist.ReduceOp.MAX).item()
        if slowest * following / size * (REPETITIONS + 1) > BUDGET:
            return


def pair_samples(tree: RankTree, nodes: int, ranks: int, device: torch.device) -> list[PairSample]:
    """Between nodes of `ranks` ranks, each with its like there; a node has one partner at a time."""
    node, local = divmod(tree.rank, ranks)
    found: list[PairSample] = []
    for pairs in pair_rounds(nodes):
        nodes_of = next((pair for pair in pairs if node in pair), (node, node))
        partner = sum(nodes_of) - node

        def call(size: int, other: int = partner * ranks + local) -> Callable[[], None]:
            if other == tree.rank:
                return lambda: None
            mine, theirs = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)
            return exchange(mine, theirs, other, other)

        taken = dict(timings(tree, call, device))
        if partner != node:
            largest = max(taken)
            found.append(PairSample(nodes_of, taken[min(taken)], largest / taken[largest]))
    return found


def pair_rounds(nodes: int) -> list[list[Edge]]:
    """Neighbours round a ring, and nodes half a ring apart, in rounds in which no node stands twice."""
    ring = [(i, (i + 1) % nodes) for i in range(nodes)]
    across = [(i, (i + nodes // 2) % nodes) for i in range(nodes)]
    left = list(dict.fromkeys((min(pair), max(pair)) for pair in ring + across if pair[0] != pair[1]))
    found: list[list[Edge]] = []
    while left:
        busy: set[int] = set()
        found.append([])
        for pair in list(left):
            if not busy & set(pair):
                busy |= set(pair)
                found[-1].append(pair)
                left.remove(pair)
    return found


# -- what is said of it


def axis_rows(samples: Sequence[Sample], limit: float, fix: str) -> list[Row]:
    """One a mesh axis, of its slowest group at the largest size: slow below `limit` of what is planned."""
    return [_axis_row(axis, samples, limit, fix) for axis in dict.fromkeys(each.axis for each in samples)]


def _axis_row(axis: str, samples: Sequence[Sample], limit: float, fix: str) -> Row:
    parts, worst = [], math.inf
    for kind in dict.fromkeys(each.kind for each in samples):
        own = [each for each in samples if (each.axis, each.kind) == (axis, kind)]
        largest = max(each.size for each in own)
        slowest = max((each for each in own if each.size == largest), key=lambda each: each.seconds)
        figure = f"{kind} {largest / slowest.seconds / 1e9:.3g} GB/s"
        if slowest.planned:
            worst = min(worst, slowest.planned / slowest.seconds)
            figure += f" of {largest / slowest.planned / 1e9:.3g} planned"
        parts.append(figure + slow_group(own, largest))
    return judged(f"links, {axis}", worst < limit, ", ".join(parts), fix, WARN)


def slow_group(samples: Sequence[Sample], size: int) -> str:
    """Of one axis and kind: the group that is much slower than the others."""
    taken = {group: 0.0 for group in sorted({each.group for each in samples})}
    for each in samples:
        if each.size == size:
            taken[each.group] = max(taken[each.group], each.seconds)
    slowest = max(taken, key=lambda group: taken[group])
    is_slow = len(taken) > 2 and median(taken.values()) < SLOW * taken[slowest]
    return f" (slowest: the group of rank {slowest})" if is_slow else ""


def pairs_row(samples: Sequence[PairSample], places: Sequence[str], cluster: Cluster | None) -> Row:
    """Of all pairs of nodes: the slow node, where all that it has are slow; else the slow link.

    The rate of a pair is that of all its ranks together, as clusters.toml has it of a node.
    """
    rates: dict[Edge, float] = dict.fromkeys((each.nodes for each in samples), 0.0)
    latencies = dict(rates)
    for each in samples:
        rates[each.nodes] += each.rate / 2  # both ends have measured it
        latencies[each.nodes] = max(latencies[each.nodes], each.latency)
    usual = median(rates.values())
    known = cluster.between if cluster else None
    expected = max(usual, known.bandwidth) if known else usual
    late = {pair for pair, taken in latencies.items() if is_late(taken, known.latency if known else 0.0)}
    slow = {pair for pair, rate in rates.items() if rate < SLOW * expected} | late
    span = f"{min(rates.values()) / 1e9:.3g} to {max(rates.values()) / 1e9:.3g} GB/s"
    about = f"{len(rates)} pair(s), {span}" + (f" of {known.bandwidth / 1e9:.3g} planned" if known else "")
    about += f", small messages {1e6 * max(latencies.values()):,.0f} us"
    if not slow:
        return Row("links, nodes", PASS, about)
    broken = any(rates[pair] < BROKEN * expected for pair in slow)
    named = "; ".join(blamed(slow, rates, places)[:4])
    return Row("links, nodes", FAIL if broken else WARN, f"{about}; {named}", FIX)


def is_late(taken: float, expected: float) -> bool:
    return taken > max(LATE * expected, LATE_SECONDS)


def blamed(slow: set[Edge], rates: dict[Edge, float], places: Sequence[str]) -> list[str]:
    """Nodes whose pairs are all slow while others have good ones, then links that these do not explain."""
    good = {node for pair in rates.keys() - slow for node in pair}
    nodes = {node for pair in slow for node in pair} - good if good else set()
    links = [pair for pair in sorted(slow) if not nodes & set(pair)]
    found = [f"slow node: {places[node]}" for node in sorted(nodes)]
    return found + [f"slow link: {places[a]} - {places[b]}, {rates[a, b] / 1e9:.3g} GB/s" for a, b in links]
