"""Explain out-of-memory errors: place, planned memory, and the cheapest changes that need less."""

import gc
import os
import re
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from config import Config
from datasets.selection import Selection
from errors import RunFailed
from jobs.heartbeat import activity
from jobs.log_setup import start_logging
from jobs.watchdog import Watchdog
from planning.constants import GIB
from planning.search import capacity, cheapest_changes
from planning.start_checks import plan_here

# Messages of allocators: CUDA's error has a class of its own, torch's on the host is a RuntimeError.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|out of memory|std::bad_alloc|Cannot allocate memory", re.IGNORECASE
)
# oneDNN gives this message for any reason, so an allocation is tried afterwards.
ONEDNN_FAILED = re.compile(r"could not (create|execute) a (primitive|memory)")
TRIAL_SIZE = 2**28  # bytes
TARGET = 0.9  # of the planned peak, which suggested changes must not exceed: the plan may have been too low
NUM_COMPONENTS = 3  # in a message
SENTENCES = 3  # of CUDA's message: what was asked for, the memory of the device, and what is free


@contextmanager
def run_with_watchdog(config: Config) -> Iterator[Watchdog]:
    """Start logging and the watchdog; raise RunFailed, with an explanation, for an allocator's error."""
    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    with Watchdog(config.dump_folder, config.comm) as watchdog:
        try:
            yield watchdog
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RunFailed) or not is_out_of_memory(error):
                raise
            rank = f"rank {os.environ.get('RANK', '0')} ({socket.gethostname()}, pid {os.getpid()})"
            where = f"{rank} in step {activity.step}, {activity.describe_phase()}"
            text = ". ".join(" ".join(str(error).split()).split(". ")[:SENTENCES])
            traceback.clear_frames(error.__traceback__)  # frees tensors, for the explanation takes memory
            gc.collect()
            # Data that are not open yet are not opened now, because that takes memory.
            plan = describe_plan(config, watchdog.selection)
            raise RunFailed(f"{where}: out of memory ({text}); {plan}") from None


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


def describe_plan(config: Config, selection: Selection | None) -> str:
    """Return the plan of this run here as text: the peak, its components, the cheapest changes."""
    if selection is None:
        return "the data were being opened"
    found = plan_here(config, selection, int(os.environ.get("WORLD_SIZE", "1")))
    if found is None:
        return "the planner does not know this model or GPU: plan.py --dry_run measures what a layout needs"
    made, cluster = found
    less = min(cluster.device.memory, round(TARGET * made.memory.peak) + cluster.device.reserved)
    room = replace(cluster, device=replace(cluster.device, memory=less))
    parts = sorted(made.memory.components.items(), key=lambda part: -part[1])[:NUM_COMPONENTS]
    named = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts)
    return (
        f"the planner expects a peak of {made.memory.peak / GIB:.2f} GiB a rank, in "
        f"{made.memory.peak_moment}: {named}; there are {capacity(cluster) / GIB:.2f} GiB; "
        f"{cheapest_changes(made.work, room, config)}"
    )
