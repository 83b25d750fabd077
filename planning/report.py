"""Text and JSON of plan.py: the answer on one screen, then its terms, then the rest."""

import json
import math
from typing import Any

from command_line import text_table
from config import Config
from parallelisms.degrees import Degrees
from planning.clusters import Cluster
from planning.constants import GIB
from planning.cost import CostRange
from planning.memory import memory
from planning.search import (
    SIMPLICITY,
    Plan,
    best_layouts,
    changes_that_fit,
    is_accepted,
    layout_options,
    speedups,
)
from planning.step_time import step_time
from planning.workload import Workload

# Stored bytes over decoded ones: float32, blosc lz4 5 with byte shuffle, WeatherBench2's codec. Measured on
# ERA5's t, q, u and v over Europe: 0.59, 0.71, 0.76, 0.80.
COMPRESSION = 0.72


def answer(made: Plan, cost: CostRange, config: Config, searched: bool) -> str:
    """Return the main results: time, cost, speed, memory, layout, and the settings that help most.

    searched: the layout was found by --layout auto.
    """
    work, time, cluster = made.work, made.time, made.cluster
    peak, room = cluster.device.peak["bf16"], cluster.capacity / GIB
    saves, every = cost.saves, config.checkpoint.interval
    nodes = f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)}"
    rolled = f"; rolled out over {work.rollout_steps} steps" if work.rollout_steps > 1 else ""
    limits = " to ".join(f"{limit:,.3f}" for limit in time.limits or ())
    within = f", {limits} by its error band" if limits else ""
    # -- texts that the lines below put together: lengths, dollars, saves
    hours = cost.planned["on demand"]["hours"]
    unit, length = ("days", 24) if hours > 24 else ("hours", 1) if hours > 1 else ("minutes", 1 / 60)
    dollars = (f"{fleet}: {cost.between(fleet, 'dollars')}" for fleet in cost.planned)
    saved = "none (checkpoint.enable)"
    if config.checkpoint.enable:
        saved = f"every {every} steps = {every * time.total / 60:,.1f} min"
    if math.isfinite(best := saves.best_interval):
        saved += f"; least cost: every {max(round(best / time.total), 1)} = {best / 60:,.1f} min (Young 1974)"
    # -- a line for each question, in the order in which they are asked
    lines = {
        "job": f"{work.model.parameters / 1e6:,.0f} M parameters, {work.model.tokens} tokens, "
        f"{work.sample_flops / 1e12:,.1f} TFLOP a sample; "
        f"{cluster.name}: {cluster.devices} x {cluster.device.name} in {nodes}{rolled}",
        "layout": f"{layout(work)}; global batch {work.global_batch} = {work.local_batch} x "
        f"{work.degrees.dp} ranks x {work.accumulation}; {work.dtype}, checkpointing {work.ac_mode}",
        "time": f"{cost.between('on demand', 'hours', length, 2)} {unit} "
        f"for {config.training.steps:,} steps; {time.total:,.3f} s a step{within}",
        "dollars": f"{'; '.join(dollars)} "
        f"({cost.between('on demand', 'hours', 1 / cluster.devices)} device-hours "
        f"at {cluster.on_demand:.2f}, spot {cluster.spot:.2f})",
        "saves": f"{saves.size / 1e9:,.2f} GB, steps wait {saves.waits:,.2f} s, "
        f"written in {saves.writing:,.1f} s; {saved}",
        "speed": f"{time.samples_per_second:,.2f} samples/s, MFU {time.mfu(work, peak):.1%} "
        f"of {peak / 1e12:,.0f} TFLOP/s",
        "memory": f"{made.memory.peak / GIB:.2f} of {room:.2f} GiB of tensors a device: "
        f"{'fits' if made.fits else 'DOES NOT FIT'}",
    }
    # -- what a reader should doubt: a slow network inside blocks, figures that were not measured
    if work.degrees.tp * work.degrees.cp > cluster.devices_per_node:
        lines["warning"] = "a sample is shared by ranks of several nodes: their network slows every block"
    if cluster.assumed:
        keys = ", ".join(cluster.assumed)
        lines["assumed"] = (
            f"{keys}: not measured (planning/clusters.toml, which names sources, of prices too)"
        )
    head = [f"{name:<9}{text}" for name, text in lines.items()]
    # -- what to change next
    proposals = []
    if made.fits:  # the two settings that shorten a step most
        for changed in speedups(made)[:2]:
            gain, need = changed.time.total / time.total - 1, changed.memory.peak / GIB
            options = layout_options(changed.work, config, cluster.devices)
            proposals.append(
                f"next     {options}: {changed.time.total:.3f} s a step ({gain:+.1%}), {need:.2f} GiB"
            )
        more = "more devices would" if searched else "try --layout auto, or more devices"
        none = f"next     no single setting makes it {SIMPLICITY:.0%} faster; {more}"
        return "\n".join(head + (proposals or [none]))
    # The three cheapest changes with which the job fits.
    lack = made.memory.peak / GIB - room
    what = f"{lack:.2f} GiB a device are" if lack > 0 else "memory of the host is"
    head.append(f"next     {what} missing; the cheapest changes with which it fits:")
    for changed in changes_that_fit(work, cluster):
        more, need = changed.device_seconds / made.device_seconds - 1, changed.memory.peak / GIB
        options = layout_options(changed.work, config, cluster.devices)
        proposals.append(f"  {options}: {need:.2f} of {room:.2f} GiB, {more:+.1%} device time a step")
    none = "no layout has room for it" if searched else "try --layout auto"
    return "\n".join(head + (proposals or [f"  none of one or two settings; {none}"]))


def layout(work: Workload) -> str:
    """Return the layout in short form: "dp_shard 8 x tp 4"."""
    text = " x ".join(f"{axis} {n}" for axis, n in vars(work.degrees).items() if n > 1) or "one rank"
    if work.degrees.pp > 1:
        text += f" ({work.schedule}, {work.micro_batches} micro-batches of {work.micro_batch})"
    return text + (", zero1" if work.zero1 else "") + (", cpu_offload" if work.offload else "")


# -- tables


def tables(made: Plan) -> str:
    """Return the components of memory at the peak, and the classes of a step, the largest first."""
    need, time = made.memory, made.time
    least = 0.005 * GIB if need.peak >= GIB else 0.0
    rows: list[tuple[object, ...]] = [("memory of a rank", "GiB", f"   at the peak: {need.peak_moment}")]
    for name, size in sorted(need.components.items(), key=lambda item: -item[1]):
        if size > least:
            rows.append((f"  {name}", size / GIB))
    of_memory = text_table("<36 >10.2f <0", [*rows, ("  peak", need.peak / GIB)])
    # -- the step: classes add up to the total; communication that nothing hides is among them
    classes = sorted(time.classes.items(), key=lambda item: -item[1])
    rows = [("a step", "s", "fraction")]
    rows += [(f"  {name}", value, value / time.total) for name, value in classes]
    of_step = text_table("<36 >10.3f >9.1%", [*rows, ("  total", time.total)])
    sent, computed = time.exposed + time.hidden, sum(time.computing.values())
    ratio = f"{sent / computed:.1%} of the computation" if computed else ""
    communication = f"communication: {time.exposed:.3f} s exposed, {time.hidden:.3f} hidden, {ratio}"
    if band := time.band:
        known = f"band: of {band.runs} published runs ({time.kind}) 90 % took {band.fastest:.2f} to "
        known += f"{band.slowest:.2f} times their planned time, median {band.median:.2f}"
    else:
        fix = "" if made.cluster.anchor else "; train 20 steps with --data.path random, and use --anchor"
        known = f"no run of this kind is known ({time.kind}){fix}"
    return f"{of_memory}\n\n{of_step}\n  {communication}\n  {known}"


def data_line(read_bytes: float, cluster: Cluster) -> str:
    """Return a line with the required and the available read rate. read_bytes: decoded bytes per second."""
    stored = COMPRESSION * read_bytes / cluster.nodes
    text = f"data to be read: {stored / 1e9:,.2f} GB/s a node in float32, half in float16, "
    text += f"of {cluster.storage / 1e9:,.2f}"
    return text + (": TOO SLOW, steps wait for their data" if stored > cluster.storage else "")


def layouts_table(plans: list[Plan]) -> str:
    """Return a line a layout, the best first; steps of overlapping bands may take as long as each other."""
    columns = ("layout", "batch", "accum", "checkpointing", "GiB")
    rows: list[tuple[object, ...]] = [("", "", *columns, "step s", "band s", "MFU", "exposed")]
    for number, plan in enumerate(plans, 1):
        work, time = plan.work, plan.time
        around = "-".join(f"{limit:.1f}" for limit in time.limits or ()) or "?"
        batch = (work.micro_batch, work.accumulation, work.ac_mode, plan.memory.peak / GIB)
        mfu = time.mfu(work, plan.cluster.device.peak["bf16"])
        rows.append((number, "", layout(work), *batch, time.total, around, mfu, time.exposed / time.total))
    return text_table(">3 <1 <44 >6 >6 >16 >8.1f >9.3f >13 >7.1% >8.1%", rows)


def story(work: Workload, cluster: Cluster, steps: int) -> str:
    """Return how a job grows: memory of one sample by technique, then one device, a node and all devices,
    each with its fastest layout, and what sharing samples by tensor parallelism would take.
    """
    one = work.replace(degrees=Degrees(), local_batch=1, global_batch=1, compiled=False, float8=False)
    one = one.replace(zero1=False, offload=False)
    ladder: dict[str, dict[str, Any]] = {
        "float32, plain attention": {"dtype": "float32", "attention": "math", "ac_mode": "none"},
        "bfloat16": {"dtype": "bfloat16"},
        "an attention kernel": {"attention": "flash"},
        "selective checkpointing": {"ac_mode": "selective"},
        "full checkpointing": {"ac_mode": "full"},
    }
    rows: list[tuple[object, ...]] = [("one sample on one device, each with those above", "GiB")]
    for name, setting in ladder.items():
        one = one.replace(**setting)
        rows.append((f"  {name}", memory(one).peak / GIB))
    # -- from one device to all: what scaling costs in efficiency and dollars
    tables = [text_table("<50 >10.2f", rows)]

    rows, single = [], 0.0
    for number in sorted({1, min(cluster.devices_per_node, cluster.devices), cluster.devices}):
        machine = cluster.with_devices(number)
        best = next(iter(best_layouts(work, machine, 1)), None)
        if best is None:
            rows.append((f"  {number}: no layout fits",))
            continue
        rate = best.time.samples_per_second / number
        single, days = single or rate, steps * best.time.total / 86_400
        price = days * 24 * number * cluster.on_demand
        rows.append((f"  {number}: {layout(best.work)}", rate * number, rate / single, days, price))
    head = ("devices, fastest layout", "samples/s", "efficiency", "days", "dollars")
    tables.append(text_table("<50 >10,.2f >11.0% >10,.2f >12,.0f", [head, *rows]))

    # -- what tensor parallelism would cost
    d, rows = work.degrees, []
    before = step_time(work, cluster).total
    for tp in (2, 4, 8):
        # The same samples at once: each of the tp ranks has a part of tp times as many.
        shards = Degrees(d.pp, d.dp_replicate, d.dp_shard // tp, d.cp, tp)
        shared = work.replace(degrees=shards, local_batch=work.local_batch * tp)
        if shards.world == d.world and is_accepted(shared):
            change = step_time(shared, cluster).total / before - 1
            rows.append((f"  over {tp} ranks", memory(shared).peak / GIB, f"{change:+.0%}"))
    head = ("the layout as configured, with tensor parallelism", "GiB", "step")
    tables += [text_table("<50 >10.2f >10", [head, *rows])] if rows else []
    return "\n\n".join(tables)


def as_json(plan: Plan, cost: CostRange, steps: int) -> dict[str, Any]:
    """Everything in base units: bytes, seconds, dollars; null for infinity. steps: of the run."""
    work, time, cluster = plan.work, plan.time, plan.cluster
    values = {
        "degrees": vars(work.degrees),
        "local_batch_size": work.local_batch,
        "global_batch_size": work.global_batch,
        "accumulation": work.accumulation,
        "activation_checkpoint": work.ac_mode,
        "parameters": work.model.parameters,
        "model_flops_per_sample": work.sample_flops,
        "memory": {"peak": plan.memory.peak, "moment": plan.memory.peak_moment, **plan.memory.components},
        "capacity": cluster.capacity,
        "fits": plan.fits,
        "step_seconds": time.total,
        "step_seconds_band": time.limits,
        "error_kind": time.kind,
        "classes": time.classes,
        "hidden_seconds": time.hidden,
        "samples_per_second": time.samples_per_second,
        "read_bytes_per_second": cost.read_bytes,
        "storage_bytes_per_second": cluster.nodes * cluster.storage,
        "mfu": time.mfu(work, cluster.device.peak["bf16"]),
        "steps": steps,
        "cost": {"fleets": cost.planned},
        "cost_band": [{"fleets": costs} for costs in cost.ends] or None,
        "saves": vars(cost.saves),
    }
    return json.loads(json.dumps(values), parse_constant=lambda infinity: None)
