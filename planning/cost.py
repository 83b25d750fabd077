"""Cost of a run: hours, energy and money, on machines that may be taken away.

Interruptions, by preemption or failure of a node, are a Poisson process of `rate` a second for the whole job.
One stops every device: the job starts again in `restart` seconds, which may be interrupted too, and repeats
what no checkpoint has. Times are in seconds unless a name has hours; money is in dollars.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from config import Checkpoint, Config
from planning.constants import FLOAT32
from planning.hardware import Cluster
from planning.known_runs import band_of
from planning.search import Plan
from planning.step_time import StepTime, step_time
from planning.workload import Workload
from training.due import Rollouts

HOUR = 3600.0
HOPELESS = 300.0  # preemptions between two saves: e^300 seconds are not a time


@dataclass(frozen=True)
class Fleet:
    """A cluster of which some nodes are on demand and the others spot."""

    cluster: Cluster
    on_demand_nodes: int

    @property
    def on_demand_devices(self) -> int:
        return min(self.on_demand_nodes * self.cluster.devices_per_node, self.cluster.devices)

    @property
    def dollars_an_hour(self) -> float:
        """Price of all devices, whether they compute or wait."""
        spot = self.cluster.devices - self.on_demand_devices
        return self.on_demand_devices * self.cluster.on_demand + spot * self.cluster.spot

    @property
    def rate(self) -> float:
        """Interruptions of the job a second: a node that is taken away or fails takes the others with it."""
        spot = (self.cluster.nodes - self.on_demand_nodes) * self.cluster.spot_interruptions
        return (spot + self.cluster.nodes * self.cluster.failures) / HOUR

    @property
    def watts(self) -> float:
        """Power of all devices with their part of their nodes and of the centre."""
        return self.cluster.devices * self.cluster.device.watts * self.cluster.pue


def fleets(cluster: Cluster) -> dict[str, Fleet]:
    """All on demand; one node on demand (rank 0 and the checkpoints) and spot; all spot."""
    nodes = cluster.nodes
    mixed = {f"1 on demand, {nodes - 1} spot": Fleet(cluster, 1)} if nodes > 1 else {}
    return {"on demand": Fleet(cluster, nodes)} | mixed | {"spot": Fleet(cluster, 0)}


@dataclass(frozen=True)
class Saves:
    """Saves of a job, and the time to go on after a preemption."""

    interval: float  # work between two saves
    stall: float = 0.0  # that a save costs training
    write: float = 0.0  # from then until it can be resumed from; training goes on (an asynchronous save)
    restart: float = 0.0  # from a preemption to the next step


def expected_time(work: float, saves: Saves, rate: float) -> tuple[float, float]:
    """Expected seconds until `work` seconds of steps with saves are done, and preemptions until then.

    A save follows every `saves.interval`, and the end; `rate` preemptions a second.

    Getting through s seconds undisturbed is tried again e^(rate s) - 1 times on average, which takes
    (e^(rate s) - 1)/rate; the same is true of a restart (Daly 2006). Each preemption finds, with probability
    write/interval, the newest save unfinished and repeats another interval: `write` seconds on average. That
    last term is of first order in rate x interval, the others are exact.
    """
    whole, rest = divmod(work, saves.interval)
    last = 1 if rest > 1e-9 * work else 0
    segments = [(n, length) for n, length in ((int(whole), saves.interval), (last, rest)) if n]
    if rate == 0.0 or not segments:
        return work + sum(number for number, _ in segments) * saves.stall, 0.0
    first = segments[0][1] + saves.stall
    if rate * max(first, saves.restart) > HOPELESS:
        return math.inf, math.inf
    losses = sum(number * math.expm1(rate * (length + saves.stall)) for number, length in segments)
    unwritten = losses - math.expm1(rate * first)  # before the first save none can be unfinished
    wall = losses * (1 + math.expm1(rate * saves.restart)) / rate + unwritten * saves.write
    return wall, rate * wall


# -- cost


@dataclass(frozen=True)
class Cost:
    """Expected cost of one run on one fleet."""

    hours: float
    kwh: float  # an upper bound: devices that wait draw less than `watts`
    dollars: float
    dollars_lost: float  # of `dollars`, for everything but steps that count
    preemptions: float


def run_cost(stages: Sequence[tuple[float, Saves]], fleet: Fleet) -> Cost:
    """Cost of stages of a run, each with seconds of steps and its saves."""
    times = [expected_time(seconds, saves, fleet.rate) for seconds, saves in stages]
    work, hours = sum(seconds for seconds, _ in stages) / HOUR, sum(wall for wall, _ in times) / HOUR
    return Cost(
        hours=hours,
        kwh=hours * fleet.watts / 1000,
        dollars=hours * fleet.dollars_an_hour,
        dollars_lost=(hours - work) * fleet.dollars_an_hour,
        preemptions=sum(number for _, number in times),
    )


@dataclass(frozen=True)
class CostRange:
    """Costs of a run by fleet, as planned, and with steps as fast and as slow as known runs of its kind."""

    planned: dict[str, Cost]
    ends: list[dict[str, Cost]]  # empty: no run of its kind is known
    dollars_an_hour: dict[str, float]
    steps: int
    checkpoint_bytes: int
    stored_bytes: int

    def between(self, fleet: str, name: str, unit: float = 1, digits: int = 0) -> str:
        """Return a figure of a run's cost as text, from the fastest to the slowest."""
        values = [getattr(costs[fleet], name) / unit for costs in self.ends or [self.planned]]
        return " to ".join(dict.fromkeys(f"{value:,.{digits}f}" for value in values))

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: null."""
        values = asdict(self)
        planned, ends = values.pop("planned"), [{"fleets": costs} for costs in values.pop("ends")]
        sizes = {key: values.pop(key) for key in ("checkpoint_bytes", "stored_bytes")}
        values |= {"cost": {"fleets": planned, **sizes}, "cost_band": ends or None}
        return json.loads(json.dumps(values), parse_constant=lambda infinity: None)


def cost_range(config: Config, plan: Plan, cluster: Cluster, restart_minutes: float) -> CostRange:
    """Return costs of `training.steps` steps within the error band of the plan's step.

    A save costs what the copy to the host takes; without asynchrony, what writing takes.
    """
    work, settings, every = plan.work, config.checkpoint, fleets(cluster)
    size = checkpoint_size(work)
    writers = work.fsdp_ranks * work.degrees.tp * work.degrees.pp  # replicas have the same
    write = size / min(cluster.nodes, writers) / cluster.storage
    stall = write if settings.async_mode == "disabled" else size / writers / cluster.host_link
    stages = [(number, time.total) for number, _, time in rollout_stages(config, plan, cluster)]
    restart = restart_minutes * 60

    def costs(slower: float) -> dict[str, Cost]:
        """Costs of steps that take so many times as long as planned; without saves all is lost."""
        lengths = [
            (number * slower * seconds, settings.interval * slower * seconds) for number, seconds in stages
        ]
        saves = [(whole, Saves(interval, stall, write, restart)) for whole, interval in lengths]
        if not settings.enable:
            whole = sum(whole for whole, _ in lengths)
            saves = [(whole, Saves(whole, restart=restart))]
        return {name: run_cost(saves, fleet) for name, fleet in every.items()}

    band, steps = band_of(work, cluster), config.training.steps
    ends = [costs(band.fastest), costs(band.slowest)] if band else []
    stored = checkpoint_storage(size, settings, steps) if settings.enable else 0
    prices = {name: fleet.dollars_an_hour for name, fleet in every.items()}
    return CostRange(costs(1.0), ends, prices, steps, size, stored)


def rollout_stages(config: Config, plan: Plan, cluster: Cluster) -> list[tuple[int, Workload, StepTime]]:
    """Return steps, work and time of each stage of rollouts; the plan is for the longest of them."""
    rollouts, stages = Rollouts.of(config.training), []
    for length, begin, end in rollouts.stages():
        work = plan.work.rolled_out(length, rollouts.with_gradients(length))
        stages.append((end - begin, work, plan.time if work == plan.work else step_time(work, cluster)))
    return stages


def checkpoint_size(work: Workload) -> int:
    """Bytes of one: weights, averaged weights, moments."""
    return round((FLOAT32 + work.state_itemsize + FLOAT32 * work.ema) * work.model.parameters)


def checkpoint_storage(checkpoint_bytes: int, settings: Checkpoint, steps: int) -> int:
    """Bytes of a run's checkpoints at their most: those kept, the best, and the one being written."""
    saved, limit = math.ceil(steps / settings.interval), settings.keep_latest_k
    return checkpoint_bytes * (min(limit + 1 + bool(settings.keep_best), saved) if limit else saved)
