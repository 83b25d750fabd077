"""What a run costs: hours, energy and money, on machines that may be taken away, and how often to save.

Interruptions, by preemption or failure of a node, are a Poisson process of `rate` a second for the whole job.
One stops every device: the job starts again in `restart` seconds, which may be interrupted too, and repeats
what no checkpoint holds. Times are in seconds unless a name has hours; money is in dollars.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from command_line import text_table
from config import Checkpoint, Config
from planning.constants import FLOAT32
from planning.error_bands import band_of
from planning.hardware import Cluster
from planning.search import Plan
from planning.step_time import StepTime, step_time
from planning.workload import Workload
from training.due import Rollouts

HOUR = 3600.0
COST_ROWS = (  # of the table: title, field of Cost, unit, digits
    ("days", "hours", 24, 2),
    ("device-hours", "device_hours", 1, 0),
    ("kWh", "kwh", 1, 0),
    ("dollars", "dollars", 1, 0),
    ("of these lost", "dollars_lost", 1, 0),
    ("interruptions", "preemptions", 1, 1),
)
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
    def spot_devices(self) -> int:
        return self.cluster.devices - self.on_demand_devices

    @property
    def dollars_an_hour(self) -> float:
        """Price of all devices, whether they compute or wait."""
        return self.on_demand_devices * self.cluster.on_demand + self.spot_devices * self.cluster.spot

    @property
    def preemption_rate(self) -> float:
        """Spot nodes that are taken away, a second."""
        spot_nodes = self.cluster.nodes - self.on_demand_nodes
        return spot_nodes * self.cluster.spot_interruptions / HOUR

    @property
    def rate(self) -> float:
        """Interruptions of the job a second: a node that is taken away or fails takes the others with it."""
        return self.preemption_rate + self.cluster.nodes * self.cluster.failures / HOUR

    @property
    def watts(self) -> float:
        """Power of all devices with their part of their nodes and of the centre."""
        return self.cluster.devices * self.cluster.device.watts * self.cluster.pue


def fleets(cluster: Cluster) -> dict[str, Fleet]:
    """All on demand; one node on demand (rank 0 and the checkpoints) and spot; all spot."""
    nodes = cluster.nodes
    mixed = {f"1 on demand, {nodes - 1} spot": Fleet(cluster, 1)} if nodes > 1 else {}
    return {"on demand": Fleet(cluster, nodes)} | mixed | {"spot": Fleet(cluster, 0)}


# -- time


@dataclass(frozen=True)
class Saves:
    """Saves of a job, and the time to go on after a preemption."""

    interval: float  # work between two saves
    stall: float = 0.0  # that a save costs training
    write: float = 0.0  # from then until it can be resumed from; training goes on (an asynchronous save)
    restart: float = 0.0  # from a preemption to the next step


@dataclass(frozen=True)
class Time:
    """Expected, in seconds; wall = work + stalls + restarts + redone."""

    work: float
    stalls: float  # of saves, the first time each is reached
    restarts: float
    redone: float  # work and stalls that preemptions lost
    preemptions: float

    @property
    def wall(self) -> float:
        return self.work + self.stalls + self.restarts + self.redone


def expected_time(work: float, saves: Saves, rate: float) -> Time:
    """Expected time of `work` seconds of steps with saves; `rate` preemptions a second.

    A save follows every `saves.interval`, and the end.

    Getting through s seconds undisturbed is tried again e^(rate s) - 1 times on average, which takes
    (e^(rate s) - 1)/rate; the same holds for a restart (Daly 2006). Each preemption finds, with probability
    write/interval, the newest save unfinished and repeats another interval: `write` seconds on average. That
    last term is of first order in rate x interval, the others are exact.
    """
    whole, rest = divmod(work, saves.interval)
    last = 1 if rest > 1e-9 * work else 0
    segments = [(n, length) for n, length in ((int(whole), saves.interval), (last, rest)) if n]
    stalls = sum(number for number, _ in segments) * saves.stall
    if rate == 0.0 or not segments:
        return Time(work, stalls, 0.0, 0.0, 0.0)
    first = segments[0][1] + saves.stall
    if rate * max(first, saves.restart) > HOPELESS:
        return Time(work, stalls, math.inf, math.inf, math.inf)
    losses = sum(number * math.expm1(rate * (length + saves.stall)) for number, length in segments)
    unwritten = losses - math.expm1(rate * first)  # before the first save none can be unfinished
    redone = losses / rate - work - stalls + unwritten * saves.write
    restarts = losses * math.expm1(rate * saves.restart) / rate
    wall = work + stalls + restarts + redone
    return Time(work, stalls, restarts, redone, rate * wall)


def young_interval(stall: float, rate: float) -> float:
    """Work between saves that costs least, to first order: sqrt(2 C M), M = 1/rate (Young 1974)."""
    return math.sqrt(2 * stall / rate) if rate else math.inf


def daly_interval(stall: float, rate: float) -> float:
    """Best work between saves to higher order (Daly 2006, eq. 37), with x = C/(2 M):
    sqrt(2 C M) (1 + sqrt(x)/3 + x/9) - C.
    """
    if not rate:
        return math.inf
    x = stall * rate / 2
    if x >= 1:  # a save takes longer than two preemptions are apart
        return 1 / rate
    return young_interval(stall, rate) * (1 + math.sqrt(x) / 3 + x / 9) - stall


def best_interval(saves: Saves, rate: float) -> float:
    """Daly's, but no shorter than a save takes to write: one is written at a time."""
    return max(daly_interval(saves.stall, rate), saves.write)


# -- cost


@dataclass(frozen=True)
class Cost:
    """Expected cost of one run on one fleet."""

    hours: float
    device_hours: float
    kwh: float  # an upper bound: devices that wait draw less than `watts`
    dollars: float
    dollars_lost: float  # of `dollars`, for everything but steps that count
    preemptions: float
    young_seconds: float  # between saves: Young's, and the best; infinite where nothing is preempted
    best_interval_seconds: float


def run_cost(stages: Sequence[tuple[float, Saves]], fleet: Fleet) -> Cost:
    """Cost of stages of a run, each with seconds of steps and its saves."""
    times = [expected_time(seconds, saves, fleet.rate) for seconds, saves in stages]
    seconds, saves = sum(each.work for each in times), stages[-1][1]
    hours, price = sum(each.wall for each in times) / HOUR, fleet.dollars_an_hour
    return Cost(
        hours,
        hours * fleet.cluster.devices,
        hours * fleet.watts / 1000,
        hours * price,
        (hours - seconds / HOUR) * price,
        sum(each.preemptions for each in times),
        young_interval(saves.stall, fleet.rate),
        best_interval(saves, fleet.rate),
    )


@dataclass(frozen=True)
class RunCost:
    """Cost on each fleet with the configured interval of saves, and the time and bytes of saving."""

    fleets: dict[str, Cost]
    interval_seconds: float  # in the longest rollouts
    stall_seconds: float
    write_seconds: float
    checkpoint_bytes: int
    stored_bytes: int

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: null."""
        return json.loads(json.dumps(dataclasses.asdict(self)), parse_constant=lambda infinity: None)


@dataclass(frozen=True)
class CostRange:
    """Costs of a run with steps as fast as planned, and as fast and as slow as known runs of its kind."""

    planned: RunCost
    ends: tuple[RunCost, RunCost] | None  # None: no run of its kind is known
    fleets: dict[str, Fleet]
    steps: int
    step_seconds: float  # as planned, of the longest rollouts
    staged: bool  # others are shorter

    def table(self) -> str:
        """A column for each fleet; then how often the run saves."""
        best = [cost.best_interval_seconds for cost in self.planned.fleets.values()]
        rows = [
            ("dollars an hour", *(f"{fleet.dollars_an_hour:,.2f}" for fleet in self.fleets.values())),
            *(
                (what, *(self.between(fleet, name, unit, digits) for fleet in self.fleets))
                for what, name, unit, digits in COST_ROWS
            ),
            ("best save every", *(interval_text(seconds, self.step_seconds) for seconds in best)),
        ]
        title = (f"the run of {self.steps:,} steps", *self.fleets)
        lines = ((f"  {what}", *values) for what, *values in rows)
        table = text_table("<26" + " >24" * len(self.fleets), [title, *lines])
        return f"{table}\n  {self.saves()}"

    def between(self, fleet: str, name: str, unit: float, digits: int) -> str:
        """A figure of a run's cost, from the fastest to the slowest."""
        values = [getattr(cost.fleets[fleet], name) / unit for cost in self.ends or (self.planned,)]
        return " to ".join(dict.fromkeys(f"{value:,.{digits}f}" for value in values))

    def saves(self) -> str:
        """Interval and size of the saves, as text."""
        cost = self.planned
        if not cost.stored_bytes:
            return "saved never (checkpoint.enable = false): an interruption begins the run again"
        return (
            f"saved every {cost.interval_seconds / self.step_seconds:,.0f} steps "
            f"({cost.interval_seconds / HOUR:,.2f} h{' in the longest rollouts' * self.staged}): "
            f"{format_size(cost.checkpoint_bytes)} each, {format_size(cost.stored_bytes)} kept, "
            f"{cost.stall_seconds:.2f} s of a stall, written in {cost.write_seconds:.1f} s"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "dollars_an_hour": {name: fleet.dollars_an_hour for name, fleet in self.fleets.items()},
            "cost": self.planned.as_json(),
            "cost_band": [end.as_json() for end in self.ends] if self.ends else None,
        }


def format_size(size: float) -> str:
    """Return bytes as text, in MB or GB."""
    if size < 1e9:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:.1f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"


def interval_text(seconds: float, step_seconds: float) -> str:
    """Work between saves; "-" where nothing is lost that a save could keep, or nothing is saved."""
    if math.isinf(seconds) or seconds <= 0:
        return "-"
    return f"{max(seconds / step_seconds, 1):,.0f} steps, {max(seconds, step_seconds) / 60:,.0f} min"


def cost_range(config: Config, plan: Plan, cluster: Cluster, restart_minutes: float) -> CostRange:
    """Costs of `training.steps` steps within the error band of the plan's step."""
    band, settings = band_of(plan.work, cluster), (config, plan, cluster, restart_minutes)
    ends = (costs_of(*settings, band.fastest), costs_of(*settings, band.slowest)) if band else None
    run = config.training.steps, plan.time.total, len(config.training.rollout_steps) > 1
    return CostRange(costs_of(*settings), ends, fleets(cluster), *run)


def costs_of(
    config: Config, plan: Plan, cluster: Cluster, restart_minutes: float, slower: float = 1.0
) -> RunCost:
    """Costs of `training.steps` steps that take `slower` times as long as planned.

    A save costs what the copy to the host takes; without asynchrony, what writing takes.
    """
    work, degrees, settings = plan.work, plan.work.degrees, config.checkpoint
    steps, restart = config.training.steps, restart_minutes * 60
    stages = [(number, slower * time.total) for number, _, time in rollout_stages(config, plan, cluster)]
    whole = sum(number * step for number, step in stages)
    size = checkpoint_size(work)
    writers = work.fsdp_ranks * degrees.tp * degrees.pp  # replicas hold the same
    saves, stored = [(whole, Saves(whole, restart=restart))], 0  # without saves all is lost
    if settings.enable:
        written = size / min(cluster.nodes, writers) / cluster.storage
        stall = written if settings.async_mode == "disabled" else size / writers / cluster.host_link
        saves = [(n * step, Saves(settings.interval * step, stall, written, restart)) for n, step in stages]
        stored = checkpoint_storage(size, settings, steps)
    costs = {name: run_cost(saves, fleet) for name, fleet in fleets(cluster).items()}
    longest = max((each for _, each in saves), key=lambda each: each.interval)
    return RunCost(costs, longest.interval, longest.stall, longest.write, size, stored)


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
