"""Search over layouts of a job on a cluster: the fastest that fit, and changes with which a job fits."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from config import Config
from errors import refuse
from parallelisms.degrees import Degrees
from planning.clusters import Cluster
from planning.constants import GIB
from planning.memory import Memory, memory
from planning.step_time import StepTime, step_time
from planning.workload import SETTINGS, Workload

DEGREES = (1, 2, 4, 8, 16)  # of pipelines and of context parallelism
MAX_MICRO_BATCH = 64
# Minimum speed-up of a layout with one more technique: each technique is a risk, and the difference should be
# larger than the error of the plan.
SIMPLICITY = 0.02
Change = tuple[frozenset[str], Workload]  # what is changed, and the workload then


@dataclass(frozen=True)
class Plan:
    """A workload, what it needs and how long a step takes on a cluster."""

    work: Workload
    cluster: Cluster
    memory: Memory
    time: StepTime

    @property
    def fits(self) -> bool:
        """True if it fits on the device and, with cpu_offload, in the host memory shared by a node."""
        on_host = self.memory.host * min(self.cluster.devices_per_node, self.work.degrees.world)
        return self.memory.peak <= self.cluster.capacity and on_host <= self.cluster.host_memory

    @property
    def device_seconds(self) -> float:
        """Device-seconds of a step, which determine the price."""
        return self.time.total * self.work.degrees.world

    @property
    def score(self) -> float:
        """Seconds of a step, longer by SIMPLICITY for each technique besides DDP, or FSDP over all ranks."""
        d, w = self.work.degrees, self.work
        axes = [d.pp > 1, d.cp > 1, d.tp > 1, d.dp_shard * d.cp > 1, d.dp_replicate > 1 and d.dp_shard > 1]
        techniques = sum(axes) + (w.ac_mode != "none") + w.offload + (w.reshard != "default")
        return self.time.total * (1 + SIMPLICITY * techniques)


def plan(work: Workload, cluster: Cluster) -> Plan:
    return Plan(work, cluster, memory(work), step_time(work, cluster))


def check_device(work: Workload, cluster: Cluster) -> None:
    """ConfigError for what the device cannot do."""
    if work.float8 and "fp8" not in cluster.device.matmul:
        reason = f"the {cluster.device.name} does not multiply in float8; set it to false, or name an h100"
        refuse("float8.enable", True, reason)


def best_layouts(work: Workload, cluster: Cluster, number: int = 10) -> list[Plan]:
    """Return the fastest plans that fit, best first, one per layout with its best batch and checkpointing."""
    best: dict[Degrees, Plan] = {}
    for candidate in candidates(work, cluster):
        need = memory(candidate)
        if need.peak <= cluster.capacity:
            made = Plan(candidate, cluster, need, step_time(candidate, cluster))
            known = best.setdefault(candidate.degrees, made)
            best[candidate.degrees] = min(known, made, key=lambda p: p.score)
    return sorted(best.values(), key=lambda p: p.score)[:number]


def candidates(work: Workload, cluster: Cluster) -> Iterator[Workload]:
    """Every layout x mode of activation checkpointing x micro-batch that train.py would accept, compiled.

    Tensor parallelism stays inside a node; shards are over all ranks, or over a node or less with replicas.
    """
    modes = dict.fromkeys(["none", "selective", "full", work.ac_mode])
    work = work.replace(compiled=True, offload=False, zero1=False)
    world, node = cluster.devices, min(cluster.devices_per_node, cluster.devices)
    for pp, tp, cp in product(DEGREES, divisors(node), DEGREES):
        rest = world // (pp * tp * cp)
        for shard in sorted({1, max(node // (tp * cp), 1), max(rest, 1)}):
            degrees = Degrees(pp, rest // shard, shard, cp, tp)
            layout = work.replace(degrees=degrees, local_batch=1)
            if degrees.world != world or (pp > 1 and cp > 1) or not is_accepted(layout):
                continue
            samples = work.global_batch // degrees.dp  # of a rank, in a step
            batches = [n for n in divisors(samples) if n <= MAX_MICRO_BATCH]
            if pp > 1:  # fewer than twice as many as stages leave the pipeline idle for a third
                layout = layout.replace(local_batch=samples, schedule="1F1B")
                batches = [n for n in batches if samples // n >= pp][:3]
            for mode, batch in product(modes, batches):
                if pp > 1:
                    yield layout.replace(ac_mode=mode, pipeline_micro_batch=batch)
                    continue
                yield layout.replace(ac_mode=mode, local_batch=batch, reshard="default")
                if degrees.uses_fsdp:  # ZeRO-2: gathers are not repeated for accumulated micro-batches
                    yield layout.replace(ac_mode=mode, local_batch=batch, reshard="never")


def is_accepted(work: Workload) -> bool:
    """Return True if train.py accepts how heads, windows, blocks and batches are divided."""
    d, model = work.degrees, work.model
    cuts_windows = d.cp > 1 and work.method != "ulysses" and bool(model.window_tokens)
    is_divided = model.heads % (d.tp * d.cp) == 0 and work.global_batch % (work.local_batch * d.dp) == 0
    return is_divided and d.pp <= model.layers and not cuts_windows


def divisors(n: int) -> list[int]:
    return [k for k in range(1, min(n, 4096) + 1) if n % k == 0]


# -- what to change


def changes_that_fit(work: Workload, cluster: Cluster) -> list[Plan]:
    """Return the plans after each of the three cheapest changes with which the job fits.

    Tries single changes, then pairs if these are not enough. The cost is device-seconds per step; cpu_offload
    comes last, because its time depends on the host, for which the planner is least accurate.
    """
    peak = memory(work).peak
    tried = [(keys, less) for keys, less in changes(work, cluster) if memory(less).peak < peak]
    fitting_plans = fitting(tried, cluster)
    if len(fitting_plans) < 3:
        for keys, less in tried:
            pairs = [(keys | more, both) for more, both in changes(less, cluster) if more != keys]
            fitting_plans += fitting(pairs, cluster)
    fitting_plans.sort(key=lambda change: (change[1].work.offload, change[1].device_seconds, len(change[0])))
    cheapest: dict[frozenset[str], Plan] = {}  # one value of each key, or pair of keys
    for keys, made in fitting_plans:
        cheapest.setdefault(keys, made)
    return list(cheapest.values())[:3]


def speedups(made: Plan) -> list[Plan]:
    """Return the plans after single changes that fit on the same devices and make a step of the same samples
    faster, one per key, fastest first. More ranks per sample save memory, not time.
    """
    tried, d = [], made.work.degrees
    for keys, after in changes(made.work, made.cluster):
        new = after.degrees
        if new.world == d.world and new.tp <= d.tp and new.cp <= d.cp:
            tried.append((keys, after))
    faster: dict[frozenset[str], Plan] = {}
    for keys, changed in sorted(fitting(tried, made.cluster), key=lambda change: change[1].time.total):
        if changed.time.total < (1 - SIMPLICITY) * made.time.total:
            faster.setdefault(keys, changed)
    return list(faster.values())


def layout_options(work: Workload, config: Config, devices: int) -> str:
    """Return the options with which train.py takes this layout in place of that of `config` on so many
    devices. The global batch stays what it was.
    """
    d, shards = work.degrees, config.parallelism.data_parallel_shard_degree
    wanted = {
        "parallelism.data_parallel": "zero1" if work.zero1 else "auto",
        "parallelism.data_parallel_replicate_degree": d.dp_replicate,
        "parallelism.data_parallel_shard_degree": shards if shards == d.dp_shard else -1,  # -1: the rest
        "parallelism.tensor_parallel_degree": d.tp,
        "parallelism.context_parallel_degree": d.cp,
        "parallelism.pipeline_parallel_degree": d.pp,
    }
    wanted |= {key: getattr(work, name) for name, key in SETTINGS.items()}
    if config.training.global_batch_size != -1 or work.accumulation > 1:
        wanted["training.global_batch_size"] = work.global_batch
    # -- only what differs from the configuration, so that the command can be read
    words = [f"{d.world} devices"] * (d.world != devices)
    for key, value in wanted.items():
        if value != attrgetter(key)(config):
            words.append(f"--{key} {json.dumps(value) if isinstance(value, bool) else value}")
    return " ".join(words) or "as configured"


def cheapest_changes(work: Workload, cluster: Cluster, config: Config) -> str:
    """Return in one line what to change so that the job of `config` fits, with the peaks then."""
    words = [
        f"{layout_options(less.work, config, cluster.devices)} ({less.memory.peak / GIB:.2f} GiB)"
        for less in changes_that_fit(work, cluster)
    ]
    return f"change {' or '.join(words)}" if words else "plan.py --layout auto looks for a layout that fits"


def fitting(tried: Iterable[Change], cluster: Cluster) -> list[tuple[frozenset[str], Plan]]:
    """Return the plans that fit, each on as many devices of this machine as it takes."""
    plans = []
    for keys, work in tried:
        made = plan(work, cluster.with_devices(work.degrees.world))
        if made.fits:
            plans.append((keys, made))
    return plans


def changes(work: Workload, cluster: Cluster) -> Iterator[Change]:
    """Every single change that may save memory or time, of a step of the same samples."""
    d, samples = work.degrees, work.local_batch * work.accumulation
    settings: list[dict[str, Any]] = [{"compiled": True}, {"dtype": "bfloat16"}]
    settings += [{"ac_mode": mode} for mode in ("none", "selective", "full")]
    if work.dtype != "float32" and "fp8" in cluster.device.matmul:
        settings.append({"float8": True})
    if d.pp == 1:
        settings += [{"local_batch": batch} for batch in divisors(samples)]
    if work.uses_fsdp:
        settings.append({"reshard": "never"})
        if work.optimizer != "Muon":  # which refuses it
            settings.append({"offload": True})
    named = [(frozenset(setting), setting) for setting in settings]
    if d.dp_replicate > 1 and not work.zero1:  # which has replicas alone
        named.append((frozenset(["dp_replicate"]), {"degrees": Degrees(d.pp, 1, d.dp, d.cp, d.tp)}))
    # Layouts change along one axis, in exchange for shards: the number of ranks stays.
    for axis, n in product(() if work.zero1 else ("tp", "cp"), (1, 2, 4, 8)):
        layout = Degrees(**{**vars(d), axis: n, "dp_shard": d.dp_shard * getattr(d, axis) // n})
        if layout.world == d.world:
            named.append((frozenset([axis]), {"degrees": layout}))
    # With more devices each has fewer micro-batches of the same global batch.
    for factor in (2, 4, 8):
        replicas = factor if work.zero1 else 1
        more = Degrees(d.pp, d.dp_replicate * replicas, d.dp_shard * factor // replicas, d.cp, d.tp)
        named.append((frozenset(["devices"]), {"degrees": more}))
    for key, changed in named:
        after = work.replace(**changed)
        if after != work and is_accepted(after):
            yield key, after
