"""What the run of a configuration costs on a cluster: planning/cost.py with the plan's figures."""

import math
from dataclasses import dataclass
from typing import Any

from config import Config
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
from planning.hardware import Cluster
from planning.memory import FLOAT32
from planning.search import Plan
from text_tables import text_table


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
    work, degrees, settings, steps = plan.work, plan.work.degrees, config.checkpoint, config.training.steps
    size = round((FLOAT32 + work.state_itemsize + FLOAT32 * work.ema) * work.model.parameters)
    writers = work.fsdp_ranks * degrees.tp * degrees.pp  # replicas hold the same
    saves = Saves(steps * plan.time.total, restart=restart_minutes * 60)  # without saves all is lost
    if settings.enable:
        interval = interval_of(settings.interval, plan.time.total, settings.interval_minutes)
        written = size / min(cluster.nodes, writers) / cluster.storage
        copied = size / writers / cluster.host_link
        stall = written if settings.async_mode == "disabled" else copied
        saves = Saves(interval, stall, written, restart_minutes * 60)
    samples, rate = float(steps * work.global_batch), plan.time.samples_per_second
    costs = {name: run_cost(samples, rate, fleet, saves) for name, fleet in fleets(cluster).items()}
    stored = checkpoint_storage(size, settings.keep_latest_k, steps, settings.interval)
    return RunCost(costs, saves, plan.time.total, size, stored if settings.enable else 0)


def cost_table(found: RunCost) -> str:
    """A line a fleet; then how often to save."""
    saves, step = found.saves, found.step_seconds
    heads = ("the run", "days", "device-hours", "kWh", "$", "preempted", "lost $", "best save every")
    rows: list[tuple[object, ...]] = [heads]
    for name, cost in found.costs.items():
        best = best_interval(saves, cost.fleet.rate)
        often = "" if math.isinf(best) else f"{best / step:,.0f} steps, {best / 60:,.0f} min"
        run = (cost.hours / 24, cost.device_hours, cost.kwh, cost.dollars)
        rows.append((f"  {name}", *run, cost.time.preemptions, cost.dollars_lost, often))
    return (
        f"{text_table('<22 >8.2f >14,.0f >10,.0f >12,.0f >11.1f >10,.0f >24', rows)}\n"
        f"  saved every {saves.interval / step:,.0f} steps ({saves.interval / HOUR:,.2f} h): "
        f"{found.checkpoint_bytes / 1e9:.1f} GB each, {found.stored_bytes / 1e9:.0f} GB kept, "
        f"{saves.stall:.2f} s of a stall, written in {saves.write:.1f} s"
    )


def costs_json(found: RunCost) -> dict[str, Any]:
    return {
        "fleets": {name: cost_json(cost, found.saves) for name, cost in found.costs.items()},
        "interval_seconds": found.saves.interval,
        "stall_seconds": found.saves.stall,
        "checkpoint_bytes": found.checkpoint_bytes,
        "stored_bytes": found.stored_bytes,
    }


def cost_json(cost: Cost, saves: Saves) -> dict[str, float | None]:
    values = {
        **{name: getattr(cost, name) for name in ("hours", "device_hours", "kwh", "dollars", "dollars_lost")},
        "preemptions": cost.time.preemptions,
        "young_seconds": young_interval(saves.stall, cost.fleet.rate),
        "best_interval_seconds": best_interval(saves, cost.fleet.rate),
    }
    return {name: None if math.isinf(value) else value for name, value in values.items()}  # JSON's infinity
