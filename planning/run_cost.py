"""What the run of a configuration costs on a cluster: planning/cost.py with the plan's figures."""

import math
from dataclasses import dataclass
from typing import Any

from config import Config
from planning.clusters import Cluster
from planning.cost import (
    HOUR,
    Cost,
    Saves,
    best_interval,
    checkpoint_storage,
    fleets,
    interval_of,
    run_cost,
    young_interval,
)
from planning.memory import FLOAT32
from planning.search import Plan


@dataclass(frozen=True)
class RunCost:
    """Of each fleet, with the configured interval of saves, and what saving takes."""

    costs: dict[str, Cost]
    saves: Saves
    step_seconds: float
    checkpoint_bytes: int
    stored_bytes: int


def costs_of(config: Config, plan: Plan, cluster: Cluster, restart_minutes: float) -> RunCost:
    """`training.steps` steps of the global batch. A save costs what the copy to the host takes; without
    asynchrony, what writing takes.
    """
    work, settings = plan.work, config.checkpoint
    size = round((FLOAT32 + work.state_itemsize + FLOAT32 * work.ema) * work.model.parameters)
    share = size / max(work.degrees.world // work.degrees.dp_replicate, 1)  # replicas hold the same
    written = (
        size
        / min(cluster.nodes, max(work.fsdp_ranks * work.degrees.tp * work.degrees.pp, 1))
        / cluster.storage
    )
    stall = written if settings.async_mode == "disabled" else share / cluster.host_link
    steps = settings.interval if settings.enable else config.training.steps  # without saves all is lost
    interval = interval_of(steps, plan.time.total, settings.interval_minutes * settings.enable)
    saves = Saves(interval, stall * settings.enable, written * settings.enable, restart_minutes * 60)
    samples = float(config.training.steps * work.global_batch)
    rate = plan.time.samples_per_second
    costs = {name: run_cost(samples, rate, fleet, saves) for name, fleet in fleets(cluster).items()}
    stored = checkpoint_storage(size, settings.keep_latest_k, config.training.steps, settings.interval)
    return RunCost(costs, saves, plan.time.total, size, stored if settings.enable else 0)


def cost_table(found: RunCost) -> str:
    """A line a fleet; then how often to save."""
    rows = [
        f"{'the run':<22}{'days':>8}{'device-hours':>14}{'kWh':>10}{'$':>12}{'preempted':>11}{'lost $':>10}"
        f"{'best save every':>24}"
    ]
    for name, cost in found.costs.items():
        best = best_interval(found.saves, cost.fleet.rate)
        often = "" if math.isinf(best) else f"{best / found.step_seconds:,.0f} steps, {best / 60:,.0f} min"
        rows.append(
            f"  {name:<20}{cost.hours / 24:>8.2f}{cost.device_hours:>14,.0f}{cost.kwh:>10,.0f}"
            f"{cost.dollars:>12,.0f}{cost.time.preemptions:>11.1f}{cost.dollars_lost:>10,.0f}{often:>24}"
        )
    saves = found.saves
    rows.append(
        f"  saved every {saves.interval / found.step_seconds:,.0f} steps ({saves.interval / HOUR:,.2f} h): "
        f"{found.checkpoint_bytes / 1e9:.1f} GB each, {found.stored_bytes / 1e9:.0f} GB kept, "
        f"{saves.stall:.2f} s of a stall, written in {saves.write:.1f} s"
    )
    return "\n".join(rows)


def costs_json(found: RunCost) -> dict[str, Any]:
    fleets_found = {
        name: {
            "hours": cost.hours,
            "device_hours": cost.device_hours,
            "kwh": cost.kwh,
            "dollars": cost.dollars,
            "dollars_lost": cost.dollars_lost,
            "preemptions": cost.time.preemptions,
            "young_seconds": finite(young_interval(found.saves.stall, cost.fleet.rate)),
            "best_interval_seconds": finite(best_interval(found.saves, cost.fleet.rate)),
        }
        for name, cost in found.costs.items()
    }
    return {
        "fleets": fleets_found,
        "interval_seconds": found.saves.interval,
        "stall_seconds": found.saves.stall,
        "checkpoint_bytes": found.checkpoint_bytes,
        "stored_bytes": found.stored_bytes,
    }


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(value) else value
