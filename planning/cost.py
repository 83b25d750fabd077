"""Cost of a run in hours and dollars, on machines that can be preempted, and what it reads and saves.

Interruptions, by preemption or failure of a node, are a Poisson process of `rate` a second for the whole job.
Each one stops every device. The job starts again in RESTART seconds, which may be interrupted too, and
repeats the steps since the last checkpoint. Times are in seconds unless a name has hours; money in dollars.
"""

import math
from dataclasses import dataclass

from config import Checkpoint, Config
from planning.clusters import Cluster
from planning.constants import FLOAT32
from planning.search import Plan
from planning.step_time import step_time
from planning.workload import Workload
from training.due import Rollouts

HOUR = 3600.0
RESTART = HOUR / 2  # from an interruption to the next step: a node that fails costs the textbook 30 minutes
HOPELESS = 300.0  # interruptions between two saves, above which the time counts as infinite (e^300)


@dataclass(frozen=True)
class Fleet:
    """All devices of a cluster, rented in one way."""

    dollars_an_hour: float  # of all devices, whether they compute or wait
    rate: float  # interruptions of the job a second: a node that is taken away or fails stops the others


def fleets(cluster: Cluster) -> dict[str, Fleet]:
    """Return the fleets by name: all devices on demand, and all spot."""
    failures = cluster.nodes * cluster.failures / HOUR
    taken_away = cluster.nodes * cluster.spot_interruptions / HOUR
    return {
        "on demand": Fleet(cluster.devices * cluster.on_demand, failures),
        "spot": Fleet(cluster.devices * cluster.spot, taken_away + failures),
    }


def expected_time(work: float, interval: float, rate: float, restart: float = RESTART) -> float:
    """Expected seconds until `work` seconds of steps are done, saved every `interval` of them and at the end.

    `rate`: interruptions per second. s seconds without interruption need e^(rate s) - 1 retries on average
    and take (e^(rate s) - 1)/rate in all; the same is true of a restart (Daly 2006).
    """
    if rate == 0.0:
        return work
    intervals, rest = divmod(work, interval)
    if rate * max(min(work, interval), restart) > HOPELESS:
        return math.inf
    tries = intervals * math.expm1(rate * interval) if intervals else 0.0
    return (tries + math.expm1(rate * rest)) * math.exp(rate * restart) / rate


Cost = dict[str, float]  # hours and dollars of one run on one fleet


@dataclass(frozen=True)
class Saves:
    """One save of a run, and how often saves cost least."""

    size: int  # bytes
    waits: float  # seconds that steps wait for it
    writing: float  # seconds until it is written
    best_interval: float  # seconds between two saves that cost a run on demand least; infinity: never


@dataclass(frozen=True)
class CostRange:
    """Costs of a run by fleet, as planned, and with steps as fast and as slow as known runs of its kind."""

    planned: dict[str, Cost]
    ends: list[dict[str, Cost]]  # empty: no run of its kind is known
    saves: Saves
    read_bytes: float  # a second, decoded in float32, at its fastest

    def between(self, fleet: str, name: str, unit: float = 1, digits: int = 0) -> str:
        """Return a figure of a run's cost as text, from the fastest to the slowest."""
        values = [costs[fleet][name] / unit for costs in self.ends or [self.planned]]
        texts = ("never ends" if math.isinf(value) else f"{value:,.{digits}f}" for value in values)
        return " to ".join(dict.fromkeys(texts))


def cost_range(config: Config, plan: Plan) -> CostRange:
    """Return costs of `training.steps` steps within the error band of the plan's step.

    A save costs the time of the copy to the host, or of writing if it is synchronous. Without saves an
    interruption loses everything.
    """
    work, cluster, settings = plan.work, plan.cluster, config.checkpoint
    every = fleets(cluster)
    # Steps wait for the copy to the host, or for the files if the save is synchronous.
    size, writers = checkpoint_size(work), work.fsdp_ranks * work.degrees.tp * work.degrees.pp
    writing = size / min(cluster.nodes, writers) / cluster.storage  # replicas have the same
    save = size / writers / cluster.host_link if settings.async_mode != "disabled" else writing
    saves = Saves(size, save, writing, best_interval(save, writing, every["on demand"].rate))
    steps = settings.interval if settings.enable else math.inf  # between two saves
    # -- stages of rollouts, with steps of different lengths; the plan is for the longest
    lengths, read_bytes, ranks = [], 0.0, work.degrees.world / work.degrees.dp
    for length, begin, end in Rollouts.of(config.training).stages():
        stage = work.replace(rollout_steps=length)
        time = plan.time if stage == work else step_time(stage, cluster)
        lengths.append((end - begin, time.total))
        # Each rank that shares a sample reads all of it.
        rate = FLOAT32 * work.field_values * stage.states_read * time.samples_per_second * ranks
        read_bytes = max(read_bytes, rate)

    def costs(slower: float) -> dict[str, Cost]:
        """Return the costs if steps take `slower` times as long as planned."""
        by_fleet = {}
        for name, fleet in every.items():
            hours = 0.0
            for number, seconds in lengths:  # of a stage, with its saves; and from one save to the next
                stage = number * slower * seconds + number / steps * save
                hours += expected_time(stage, steps * slower * seconds + save, fleet.rate) / HOUR
            by_fleet[name] = {"hours": hours, "dollars": hours * fleet.dollars_an_hour}
        return by_fleet

    band = plan.time.band
    ends = [costs(band.fastest), costs(band.slowest)] if band else []
    return CostRange(costs(1.0), ends, saves, read_bytes)


def best_interval(waits: float, writing: float, rate: float) -> float:
    """Return the seconds between two saves that cost a run least, with `rate` interruptions a second.

    Young 1974: sqrt(2 x cost of a save x time between failures); a save ends before the next begins.
    """
    return max(math.sqrt(2 * waits / rate), writing) if rate else math.inf


def checkpoint_size(work: Workload) -> int:
    """Bytes of one: weights, averaged weights, moments."""
    return round((FLOAT32 + work.state_itemsize + FLOAT32 * work.ema) * work.model.parameters)


def checkpoint_storage(checkpoint_bytes: int, settings: Checkpoint, steps: int) -> int:
    """Bytes of a run's checkpoints at their most: those kept, the best, and the one being written."""
    saved, limit = math.ceil(steps / settings.interval), settings.keep_latest_k
    return checkpoint_bytes * (min(limit + 1 + bool(settings.keep_best), saved) if limit else saved)
