"""Cost of a run: hours, energy and money, on machines that may be taken away, and how often to save.

Interruptions, by preemption or failure of a node, are a Poisson process of `rate` a second for the whole job.
One stops every device: the job starts again in `restart` seconds, which may be interrupted too, and repeats
what no checkpoint has. Times are in seconds unless a name has hours; money is in dollars.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from command_line import text_table
from config import Checkpoint, Config
from planning.constants import FLOAT32
from planning.hardware import Cluster
from planning.known_runs import band_of
from planning.search import Plan
from planning.step_time import StepTime, step_time
from planning.workload import Workload
from training.due import Rollouts

HOUR = 3600.0
COST_ROWS = (  # of the table: title, field of Cost, unit, digits
    ("days", "hours", 24, 2),
    ("dollars", "dollars", 1, 0),
    ("of these lost", "dollars_lost", 1, 0),
    ("interruptions", "preemptions", 1, 1),
    ("device-hours", "device_hours", 1, 0),
    ("kWh", "kwh", 1, 0),
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


def best_interval(saves: Saves, rate: float) -> float:
    """Best work between saves (Daly 2006, eq. 37), with x = C/(2 M): sqrt(2 C M) (1 + sqrt(x)/3 + x/9) - C.

    No shorter than a save takes to write: one is written at a time. Infinite where nothing is preempted.
    """
    if not rate:
        return math.inf
    x = saves.stall * rate / 2
    if x >= 1:  # a save takes longer than two preemptions are apart
        return max(1 / rate, saves.write)
    daly = math.sqrt(2 * saves.stall / rate) * (1 + math.sqrt(x) / 3 + x / 9) - saves.stall
    return max(daly, saves.write)


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
    best_interval_seconds: float  # between saves


def run_cost(stages: Sequence[tuple[float, Saves]], fleet: Fleet) -> Cost:
    """Cost of stages of a run, each with seconds of steps and its saves."""
    times = [expected_time(seconds, saves, fleet.rate) for seconds, saves in stages]
    work, hours = sum(seconds for seconds, _ in stages) / HOUR, sum(wall for wall, _ in times) / HOUR
    return Cost(
        hours=hours,
        device_hours=hours * fleet.cluster.devices,
        kwh=hours * fleet.watts / 1000,
        dollars=hours * fleet.dollars_an_hour,
        dollars_lost=(hours - work) * fleet.dollars_an_hour,
        preemptions=sum(number for _, number in times),
        best_interval_seconds=best_interval(stages[-1][1], fleet.rate),
    )


@dataclass(frozen=True)
class CostRange:
    """Costs of a run by fleet, as planned, and with steps as fast and as slow as known runs of its kind."""

    planned: dict[str, Cost]
    ends: tuple[dict[str, Cost], ...]  # empty: no run of its kind is known
    fleets: dict[str, Fleet]
    steps: int
    step_seconds: float  # as planned, of the longest rollouts
    saves: Saves  # of these
    checkpoint_bytes: int
    stored_bytes: int

    def table(self) -> str:
        """A column for each fleet; then how often the run saves."""
        best = [cost.best_interval_seconds for cost in self.planned.values()]
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
        return f"{table}\n  {self.saves_text()}"

    def between(self, fleet: str, name: str, unit: float = 1, digits: int = 0) -> str:
        """A figure of a run's cost, from the fastest to the slowest."""
        values = [getattr(costs[fleet], name) / unit for costs in self.ends or (self.planned,)]
        return " to ".join(dict.fromkeys(f"{value:,.{digits}f}" for value in values))

    def saves_text(self) -> str:
        """Interval and size of the saves."""
        saves = self.saves
        if not self.stored_bytes:
            return "saved never (checkpoint.enable = false): an interruption begins the run again"
        return (
            f"saved every {saves.interval / self.step_seconds:,.0f} steps ({saves.interval / HOUR:,.2f} h): "
            f"{format_size(self.checkpoint_bytes)} each, {format_size(self.stored_bytes)} kept, "
            f"{saves.stall:.2f} s of a stall, written in {saves.write:.1f} s"
        )

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: null."""
        values = {
            "steps": self.steps,
            "dollars_an_hour": {name: fleet.dollars_an_hour for name, fleet in self.fleets.items()},
            "cost": {"fleets": by_fleet(self.planned), "saves": asdict(self.saves)}
            | {"checkpoint_bytes": self.checkpoint_bytes, "stored_bytes": self.stored_bytes},
            "cost_band": [{"fleets": by_fleet(costs)} for costs in self.ends] or None,
        }
        return json.loads(json.dumps(values), parse_constant=lambda infinity: None)


def by_fleet(costs: dict[str, Cost]) -> dict[str, dict[str, float]]:
    return {name: asdict(cost) for name, cost in costs.items()}


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
    """Costs of `training.steps` steps within the error band of the plan's step.

    A save costs what the copy to the host takes; without asynchrony, what writing takes.
    """
    work, degrees, settings, steps = plan.work, plan.work.degrees, config.checkpoint, config.training.steps
    size = checkpoint_size(work)
    writers = work.fsdp_ranks * degrees.tp * degrees.pp  # replicas have the same
    write = size / min(cluster.nodes, writers) / cluster.storage
    stall = write if settings.async_mode == "disabled" else size / writers / cluster.host_link
    stages = [(number, time.total) for number, _, time in rollout_stages(config, plan, cluster)]
    restart, every = restart_minutes * 60, fleets(cluster)

    def costs(slower: float) -> tuple[dict[str, Cost], Saves]:
        """Of steps that take so many times as long as planned; without saves all is lost."""
        whole = sum(number * slower * seconds for number, seconds in stages)
        saves = [(whole, Saves(whole, restart=restart))]
        if settings.enable:
            lengths = [(number, slower * seconds) for number, seconds in stages]
            saves = [(n * s, Saves(settings.interval * s, stall, write, restart)) for n, s in lengths]
        longest = max((each for _, each in saves), key=lambda each: each.interval)
        return {name: run_cost(saves, fleet) for name, fleet in every.items()}, longest

    band, (planned, saves) = band_of(work, cluster), costs(1.0)
    ends = (costs(band.fastest)[0], costs(band.slowest)[0]) if band else ()
    stored = checkpoint_storage(size, settings, steps) if settings.enable else 0
    return CostRange(planned, ends, every, steps, plan.time.total, saves, size, stored)


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
