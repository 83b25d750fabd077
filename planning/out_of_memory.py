"""Explain a lack of memory: where, how much was planned, and the cheapest changes that need less."""

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
from planning.constants import GIB
from planning.search import capacity, change_text, changes_that_fit, fits, plan
from planning.start_checks import cluster_here, workload_here
from training.process_settings import host_memory

# Messages of allocators: CUDA's error has a class of its own, torch's on the host is a RuntimeError.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|out of memory|std::bad_alloc|Cannot allocate memory", re.IGNORECASE
)
# oneDNN gives this message for any reason, so an allocation is tried afterwards.
ONEDNN_FAILED = re.compile(r"could not (create|execute) a (primitive|memory)")
TRIAL_SIZE = 2**28  # bytes
REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
TARGET = 0.9  # of the planned peak, for suggested changes where the planner expected the step to fit
NUM_COMPONENTS = 3  # in a message


class OutOfMemory(RunFailed):
    """The message says where, how much, why, and what to change."""


@contextmanager
def run_with_watchdog(config: Config) -> Iterator[Watchdog]:
    """Start logging and the watchdog; explain a lack of memory."""
    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    watchdog = Watchdog(config.dump_folder, config.comm)
    with watchdog, explain_out_of_memory(config, lambda: watchdog.selection):
        yield watchdog


@contextmanager
def explain_out_of_memory(config: Config, selection: Callable[[], Selection | None]) -> Iterator[None]:
    """Raise OutOfMemory in place of an allocator's error.

    selection: returns the data that the run has opened. None are opened here, since that takes memory.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RunFailed) or not is_out_of_memory(error):
            raise
        requested, used, where = requested_size(error), memory_used(), current_activity()
        traceback.clear_frames(error.__traceback__)  # frees tensors, for the explanation takes memory
        gc.collect()
        raise OutOfMemory(
            f"{where}: out of memory{requested}, with {used}; {planned(config, selection())}"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or OUT_OF_MEMORY.search(str(error)):
        return True
    if not ONEDNN_FAILED.search(str(error)):
        return False
    try:
        torch.empty(TRIAL_SIZE, dtype=torch.uint8)  # never written to: it takes no memory
    except RuntimeError:
        return True
    return False


def requested_size(error: BaseException) -> str:
    """Return the size in the error's message as text, empty if there is none."""
    found = REQUESTED.search(str(error))
    return f", asked for {found[1]} {found[2]} more" if found else ""


def memory_used() -> str:
    """Return this rank's memory as text."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        used = in_gib(torch.cuda.memory_allocated())
        return f"{used} of its tensors on a device of {in_gib(total)}, {in_gib(free)} free"
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return f"{in_gib(pages * os.sysconf('SC_PAGE_SIZE'))} used by this process"


def current_activity() -> str:
    """Return rank, host, process, step and phase as text."""
    rank, phases = os.environ.get("RANK", "0"), "/".join(activity.phases[1:]) or activity.phases[0]
    return f"rank {rank} ({socket.gethostname()}, pid {os.getpid()}) in step {activity.step}, {phases}"


def planned(config: Config, selection: Selection | None) -> str:
    """Return the plan of this run here as text: the peak, its components, the cheapest changes."""
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
    room = cluster
    if fits(made, cluster):  # then the plan was too low: suggest what needs clearly less
        size = round(TARGET * made.memory.peak + cluster.device.reserved)
        room = replace(cluster, device=replace(cluster.device, memory=size))
    found = [
        f"{change_text(name, less.work, config)} ({in_gib(less.memory.peak)})"
        for name, less in changes_that_fit(work, room)
    ]
    advice = " or ".join(found) or "plan.py --layout auto looks for a layout that fits"
    parts = sorted(made.memory.components.items(), key=lambda part: -part[1])[:NUM_COMPONENTS]
    named = ", ".join(f"{name} {in_gib(size)}" for name, size in parts)
    return (
        f"the planner expects a peak of {in_gib(made.memory.peak)} a rank, in {made.memory.peak_moment}: "
        f"{named}; there are {in_gib(capacity(cluster))}. Change {advice}"
    )


def in_gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
