"""Over which ranks a first run is laid out, what a rank holds, and how long the run takes: by planning/."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from archives.grid import global_grid
from config import Config
from config_checks import check
from errors import ConfigError
from first_steps.choices import Choices, Situation, config_of
from models.registry import MODELS
from planning.cost import RunCost, costs_of, run_seconds
from planning.error_bands import band_of
from planning.hardware import Cluster
from planning.memory import GIB
from planning.report import describe, layout, memory_table, time_table
from planning.search import Plan, best_layouts, capacity, changes_that_fit, fits, plan
from planning.workload import COPIES_AHEAD, Workload, workload_of

RESTART_MINUTES = 30.0  # after an interruption: as plan.py


@dataclass(frozen=True)
class Planned:
    """A configuration's keys, with its layout, and what is known of it before it runs."""

    choices: Choices
    config: Config
    plan: Plan | None  # None: planning/ has no closed forms of the model, or does not know the GPU
    cluster: Cluster | None
    cost: RunCost | None = None
    dry_bytes: int = 0  # of a rank at the peak of its step, by a dry run, where there is no plan

    def tables(self) -> str:
        """What the run needs."""
        if not self.plan or not self.cluster:
            dry = f"; a dry run says {self.dry_bytes / GIB:.2f} GiB a rank" if self.dry_bytes else ""
            return f"plan: no closed forms for this model or GPU: its time is not planned{dry}"
        made, cluster = self.plan, self.cluster
        tables = [describe(made.work, cluster), memory_table(made.memory, cluster)]
        tables.append(time_table(made.work, made.time, cluster))
        cost = [self.cost.table(made.time.total)] if self.cost and not cluster.shared else []
        return "\n\n".join([*tables, *cost])

    def time_line(self) -> str:
        if not self.plan or not self.cluster:
            return "not planned: planning/ has no closed forms of it; the log says it from its first steps on"
        step, whole = self.plan.time.total, run_seconds(self.config, self.plan, self.cluster)
        band = band_of(self.plan.work, self.cluster)
        around = "the rates of an unmeasured CPU"
        if band:
            around = "{:.3g} to {:.3g} by its error band".format(*band.around(step))
        return f"{duration(whole)} by the planner: {step:.3g} s a step, {around}; not measured"

    def memory_line(self) -> str:
        if self.plan:
            return f"{self.plan.memory.peak / GIB:.2f} GiB a rank by the planner"
        return f"{self.dry_bytes / GIB:.2f} GiB a rank by a dry run" if self.dry_bytes else "not planned"


def duration(seconds: float) -> str:
    """In the unit that reads best."""
    for unit, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def lay_out(case: Situation, choices: Choices, base: Config | None = None) -> Planned:
    """The keys with those of a layout that fits: the fastest of many devices. ConfigError: none does."""
    cluster, known = case.answers.cluster, MODELS[config_of(choices, sections(base)).model.name]
    if cluster is None or not known.planned:
        return unplanned(case, choices, base)
    config = config_of(choices, sections(base))
    with as_ranks(cluster.devices):
        shape, number = case.answers.shape, len(case.answers.variables)
        work = workload_of(config, cluster.devices, shape, number)
        work = work.replace(copies_ahead=0 if cluster.shared else COPIES_AHEAD)
        made = plan(work, cluster) if cluster.shared else fastest(work, cluster)
        if not fits(made, cluster):
            raise ConfigError(too_large(made, cluster))
        choices = choices if cluster.shared else joined(choices, layout_keys(made.work, base or Config()))
        config = config_of(choices, sections(base))
        check(config)
    return Planned(choices, config, made, cluster, costs_of(config, made, cluster, RESTART_MINUTES))


def sections(config: Config | None) -> dict[str, Any] | None:
    return vars(config) if config else None


def unplanned(case: Situation, choices: Choices, base: Config | None) -> Planned:
    """A model without closed forms shards over all ranks; one step of it is tried without memory."""
    from planning.dry_run import dry_run  # here: it takes a second

    config = config_of(choices, sections(base))
    with as_ranks(case.devices):
        check(config)
    grid = case.answers.found.archive.grid
    grid = global_grid(case.answers.shape) if case.answers.is_coarser else grid
    peak = dry_run(config, case.devices, grid, len(case.answers.variables)).peak.get("Total", 0)
    if case.answers.cluster and peak > capacity(case.answers.cluster):
        needs = f"{peak / GIB:.2f} GiB a rank of {capacity(case.answers.cluster) / GIB:.2f}"
        raise ConfigError(f"no layout fits: {needs}; name a coarser --resolution, or other --hardware")
    return Planned(choices, config, None, case.answers.cluster, dry_bytes=peak)


@contextmanager
def as_ranks(world: int) -> Iterator[None]:
    """Layouts are checked against the ranks that the environment names."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(world)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]
        os.environ |= {"WORLD_SIZE": before} if before else {}


def fastest(work: Workload, cluster: Cluster) -> Plan:
    """That fits, of replicas and shards alone where one of these does: a first run needs no more, and what
    plan.py --layout auto finds beyond it is often less than its error. Where none fits, as configured.
    """
    found = best_layouts(work, cluster, number=10_000)
    simple = [made for made in found if not made.work.degrees.splits_model]
    return (simple or found or [plan(work, cluster)])[0]


def too_large(made: Plan, cluster: Cluster) -> str:
    """Why nothing fits, and what would."""
    changes = [name for name, _ in changes_that_fit(made.work, cluster)]
    would = f"it would with {' or '.join(changes)}; " if changes else ""
    room = f"{made.memory.peak / GIB:.2f} of {capacity(cluster) / GIB:.2f} GiB a rank"
    instead = "name other --hardware, or a coarser --resolution"
    return f"no layout fits {cluster.devices} x {cluster.name}: {room}; {would}{instead}"


def layout_keys(work: Workload, base: Config) -> Choices:
    """What plan.py --layout auto proposes, as keys; those that `base` has already are left out."""
    d, why = work.degrees, f"the fastest layout that fits: {layout(work)}"
    named = {
        "data_parallel_replicate_degree": d.dp_replicate,
        "tensor_parallel_degree": d.tp,
        "context_parallel_degree": d.cp,
        "pipeline_parallel_degree": d.pp,
        "fsdp_reshard_after_forward": work.reshard,
        **({"pipeline_parallel_microbatch_size": work.pipeline_micro_batch} if d.pp > 1 else {}),
    }
    other = {key: value for key, value in named.items() if value != getattr(base.parallelism, key)}
    keys = {key: (value, "of the same layout" if n else why) for n, (key, value) in enumerate(other.items())}
    local = (work.local_batch, f"samples of a rank at once, of {work.global_batch // d.dp} in a step")
    made: Choices = {"parallelism": keys, "training": {"local_batch_size": local}}
    if work.ac_mode != base.activation_checkpoint.mode:
        made["activation_checkpoint"] = {
            "mode": (work.ac_mode, "recomputed, or it would not fit or be slower")
        }
    return made


def joined(choices: Choices, more: Choices) -> Choices:
    found = {section: dict(keys) for section, keys in choices.items()}
    for section, keys in more.items():
        found[section] = found.get(section, {}) | keys
    return {section: keys for section, keys in found.items() if keys}
