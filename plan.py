"""Memory, time, communication and cost of a run, before the cluster is booked; no GPU is needed.

    .venv/bin/python plan.py --job.config_file train_configs/vit1b.toml --cluster a100x64
    .venv/bin/python plan.py --job.config_file train_configs/vit1b.toml --cluster a100x64 --layout auto

--cluster NAME        a machine of planning/clusters.toml and how many of its devices: a100x64, h100x8, cpu2
--clusters FILE       your own machines, in the same form; may be repeated
--layout auto         search layouts (pipelines by 1F1B and without context parallelism, the configured
                      method of it), modes of checkpointing and micro-batches; print the ten best
--anchor RUN          the folder of a run on this kind of machine: its measured steps correct the planned
                      times of layouts of the same kind. Without it, the newest such run in outputs/;
                      "none": no run
--dry_run             build the layout on fake ranks (as many as --cluster has, or --world_size N) and run one
                      step without memory
--story               also print memory by technique, and 1 device, a node and all devices next to each other
--json                print one JSON object instead of tables

--job.dump_folder RUN alone plans the run in that folder, by its config.toml. Days and dollars are ranges:
from the fastest to the slowest known run of the same kind, over its plan.
Configuration keys set model, layout and batch. Exit codes: 0 it fits, 1 it does not, 2 bad input.
"""

import argparse
import sys

from jobs.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()

from command_line import answer_early, load_config, split_options, start

OPTIONS = dict(
    cluster="",
    clusters=[],
    layout="configured",
    anchor="",
    dry_run=False,
    json=False,
    story=False,
    world_size=1,
)
if __name__ == "__main__":
    answer_early(__doc__, None, OPTIONS)  # the check needs the cluster, which is read later

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from config import Config
from datasets.channels import Channels
from datasets.options import COPIES_AHEAD
from errors import ConfigError, one_line_errors, refuse
from parallelisms.degrees import resolve_degrees
from planning.clusters import Cluster, load_cluster, newest_run, run_record
from planning.cost import cost_range
from planning.report import answer, as_json, data_line, layouts_table, story, tables
from planning.search import best_layouts, check_device, divisors, layout_options, plan
from planning.step_time import step_time
from planning.workload import Workload, workload_of
from training.config_checks import check

if TYPE_CHECKING:
    from datasets.grid import Grid

MOST_RANKS = 4096
FARTHEST = 2.0  # between measured and planned seconds of an anchor: beyond, something else differs


def main() -> None:
    with one_line_errors():
        options, rest = split_options(sys.argv[1:], OPTIONS)
        if not 1 <= options.world_size <= MOST_RANKS:
            raise ConfigError(f"--world_size {options.world_size}: give 1 to {MOST_RANKS} ranks")
        if options.layout not in ("configured", "auto"):
            raise ConfigError(f"--layout {options.layout}: give configured or auto")
        cluster = load_cluster(options.cluster, options.clusters) if options.cluster else None
        world = cluster.devices if cluster else options.world_size
        os.environ["WORLD_SIZE"] = str(world)  # what the degrees are checked against
        config = start(rest, __doc__, check if options.layout != "auto" else None)
        # -- one rank built and stepped on fake tensors, or closed forms for a cluster
        if options.dry_run:
            from planning.dry_run import dry_run  # imported here: torch takes seconds

            started = time.perf_counter()
            result = dry_run(config, world, grid_of(config), len(Channels.of(config.data).variables))
            written = "; blocks run as they are written, not compiled" if config.compile.enable else ""
            seconds = time.perf_counter() - started
            print(f"{result.table()}\n\nno rank was started{written}; {seconds:.0f} s")
        elif not cluster:
            raise ConfigError("plan.py: give a cluster: --cluster a100x64 (or --dry_run)")
        else:
            sys.exit(make_plan(config, cluster, options))


def make_plan(config: Config, cluster: Cluster, options: argparse.Namespace) -> int:
    """Print the plan; return 1 if the job does not fit, else 0."""
    if config.lora.rank:
        reason = "adapters are not in the planner's closed forms; use --dry_run"
        refuse("lora.rank", config.lora.rank, f"{reason}, or set it to 0 for an upper limit")
    cluster, anchor = anchored(cluster, options.anchor)
    training = config.training
    if options.layout == "auto":
        # The largest local batch, at most the configured one, that divides the samples of a rank; the search
        # tries the others. A check refuses other settings that are not valid.
        batch = training.global_batch_size
        if batch < 1 and batch != -1:
            check(config)
        dp = resolve_degrees(cluster.devices, config.parallelism).dp
        samples = training.local_batch_size if batch == -1 else max(batch // dp, 1)
        local = max(n for n in divisors(samples) if n <= training.local_batch_size)
        training = dataclasses.replace(training, local_batch_size=local, global_batch_size=-1)
        check(dataclasses.replace(config, training=training))
    ahead = 0 if cluster.shared else COPIES_AHEAD  # a CPU uses the batch in place
    work = job(config, cluster.devices).replace(local_batch=training.local_batch_size, copies_ahead=ahead)
    check_device(work, cluster)
    plans = best_layouts(work, cluster) if options.layout == "auto" else []
    if not plans and work.global_batch % (work.local_batch * work.degrees.dp):
        reason = f"no layout of {cluster.devices} devices can share it"
        raise ConfigError(f"training.global_batch_size = {work.global_batch}: {reason}; take a multiple")
    made = plans[0] if plans else plan(work, cluster)
    cost = cost_range(config, made)
    if options.json:
        print(json.dumps(as_json(made, cost, training.steps), indent=1))
        return 0 if made.fits else 1
    blocks = [answer(made, cost, config, bool(plans))]
    if plans:
        best = layout_options(made.work, config, cluster.devices)
        blocks.append(f"{layouts_table(plans)}\nto train so: {best}")
    elif options.layout == "auto":
        blocks.insert(0, "no layout fits; as configured:")
    blocks.append(tables(made))
    if options.story:
        blocks.append(story(work, cluster, config.training.steps))
    blocks += [anchor] if anchor else []
    print("\n\n".join(blocks + [data_line(cost.read_bytes, cluster)]))
    return 0 if made.fits else 1


def anchored(cluster: Cluster, run: str) -> tuple[Cluster, str]:
    """Return the cluster with a measured run as its anchor, and a line about the run, which may be no anchor.

    run: of --anchor; "": the newest on the same device. ConfigError where --anchor names another device, or
    steps that take twice or half as long as planned; devices that ranks share (a CPU) differ as much.
    """
    folder = Path(run) if run else newest_run(cluster)
    if folder is None or run == "none":
        return cluster, ""
    try:
        record = run_record(folder)
        if record.device not in cluster.known_as:
            raise ConfigError(f"--anchor {folder}: was trained on {record.device!r}, no {cluster.name}")
        # The ratio of measured to planned carries over to other layouts, unless it is so large that one is
        # wrong.
        work = job(load_config(["--job.config_file", str(folder / "config.toml")]), record.ranks)
        planned = step_time(work, cluster.with_devices(record.ranks)).total
        factor = record.seconds / planned
        times = f"{record.seconds:,.3f} s a step measured, {planned:,.3f} planned"
        if not cluster.shared and not 1 / FARTHEST < factor < FARTHEST:
            reason = "look for the difference in its trace, or name another run, or none"
            raise ConfigError(f"--anchor {folder}: {times}: {reason}")
    except ConfigError as error:
        if run:
            raise
        return cluster, f"no anchor; {str(error).removeprefix('--anchor ')}"
    line = f"anchor {folder}: {times}; {work.kind} layouts x {factor:.3f}"
    return dataclasses.replace(cluster, anchor=work.kind, anchor_factor=factor), line


def job(config: Config, world: int) -> Workload:
    return workload_of(config, world, grid_of(config).shape, len(Channels.of(config.data).variables))


def grid_of(config: Config) -> "Grid":
    """Return the global grid of shape data.grid_shape; without that key, the grid of the data."""
    from datasets.grid import global_grid
    from datasets.selection import open_selection

    if all(config.data.grid_shape):
        return global_grid(config.data.grid_shape)
    return open_selection(config.data, config.model.patch_size, ()).archive.grid


if __name__ == "__main__":
    main()
