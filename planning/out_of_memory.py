"""Errors of allocators explained: the place, the planned memory, and the cheapest changes that save some."""

import gc
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from config import Config
from datasets.selection import Selection
from errors import RunFailed, UserError
from jobs.heartbeat import activity
from jobs.log_setup import start_logging
from jobs.watchdog import Watchdog
from planning.hardware import Cluster
from planning.memory import GIB, Memory
from planning.search import capacity, changes_that_fit, fits, plan
from planning.this_machine import cluster_here, workload_here
from training.process_settings import host_memory

# What allocators say: CUDA's has a class of its own, torch's of the host raises a RuntimeError.
SAID = re.compile(r"can't allocate memory|out of memory|std::bad_alloc|Cannot allocate memory", re.IGNORECASE)
# oneDNN says no more, whatever the reason: then memory is tried.
PERHAPS = re.compile(r"could not (create|execute) a (primitive|memory)")
TRIED = 2**28  # bytes
ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SAVED = 0.9  # of the expected peak: what a change has to leave, where the planner sees room for all of it
LARGEST = 3  # components in a message


class OutOfMemory(RunFailed):
    """The message says where, how much, why, and what to change."""


@contextmanager
def watched_run(config: Config) -> Iterator[Watchdog]:
    """Start logging and the watchdog of a run; explain errors of allocators."""
    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    watchdog = Watchdog(config.dump_folder, config.comm)
    with watchdog, memory_explained(config, lambda: watchdog.selection):
        yield watchdog


@contextmanager
def memory_explained(config: Config, selection: Callable[[], Selection | None]) -> Iterator[None]:
    """OutOfMemory in place of what allocators raise. selection: what the run has opened so far; nothing is
    opened then, which would take memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RunFailed) or not is_out_of_memory(error):
            raise
        asked, used, doing = asked_for(error), memory_used(), doing_now()
        traceback.clear_frames(error.__traceback__)  # what their variables hold is room to explain in
        gc.collect()
        raise OutOfMemory(
            f"{doing}: out of memory{asked}, with {used}; {expected(config, selection())}"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or SAID.search(str(error)):
        return True
    return PERHAPS.search(str(error)) is not None and not is_room()


def is_room() -> bool:
    """On the host; memory that is not touched costs nothing."""
    try:
        torch.empty(TRIED, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


def asked_for(error: BaseException) -> str:
    """Text of the size that the error names, or nothing."""
    found = ASKED.search(str(error))
    return f", asked for {in_gib(float(found[1]) * UNITS[found[2].lower()])} more" if found else ""


def memory_used() -> str:
    """Text of the memory of this rank."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        used = in_gib(torch.cuda.memory_allocated())
        return f"{used} of its tensors on a device of {in_gib(total)}, {in_gib(free)} free"
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"{in_gib(pages * os.sysconf('SC_PAGE_SIZE'))} held by this process"


def doing_now() -> str:
    rank, phases = os.environ.get("RANK", "0"), "/".join(activity.phases[1:]) or activity.phases[0]
    return f"rank {rank} ({socket.gethostname()}, pid {os.getpid()}) in step {activity.step}, {phases}"


def expected(config: Config, selection: Selection | None) -> str:
    """Plan of this run on this machine, as text: the peak, its components, the cheapest changes."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if selection is None:
        return "the data were being opened"
    try:
        cluster = cluster_here("", (), world, host_memory())
        work = workload_here(config, selection, cluster, world)
    except UserError as error:
        return f"nothing is planned ({error}): plan.py --dry_run measures what each layout takes"
    if cluster is None:
        return "this GPU is not in planning/clusters.toml: plan.py --cluster NAME says what the run takes"
    made = plan(work, cluster)
    room = cluster if not fits(made, cluster) else with_room(cluster, SAVED * made.memory.peak)
    found = [f"{name} ({in_gib(less.memory.peak)})" for name, less in changes_that_fit(work, room)]
    advice = " or ".join(found) or "plan.py --layout auto looks for a layout that fits"
    return f"{components(made.memory)}; there are {in_gib(capacity(cluster))}. Change {advice}"


def with_room(cluster: Cluster, size: float) -> Cluster:
    """Return the machine with `size` bytes a device that a step may use."""
    device = replace(cluster.device, memory=round(size + cluster.device.reserved))
    return replace(cluster, device=device)


def components(memory: Memory) -> str:
    """The largest at the peak, and their sum."""
    parts = sorted(memory.components.items(), key=lambda part: -part[1])[:LARGEST]
    named = ", ".join(f"{name} {in_gib(size)}" for name, size in parts)
    return f"the planner expects a peak of {in_gib(memory.peak)} a rank, in {memory.peak_moment}: {named}"


def in_gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
