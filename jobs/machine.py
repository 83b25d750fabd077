"""What this process may use of its machine: a container, a job of Slurm or taskset may leave it less."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # Linux's control groups, and this process's


def memory() -> int:
    """Return the bytes of memory that this process may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # "max" is none
            with suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min(limits)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux
    limits = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    for folder in _groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # "max", or -1, is none
            with suppress(OSError, ValueError):
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                limits += [math.ceil(quota / period)] if quota > 0 else []
    return min(limits)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, from its own to the root."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)  # without controllers: version 2
            if not controllers or controller in controllers.split(","):
                root = GROUPS / controller if controllers else GROUPS
                yield from (root / parent for parent in (path.lstrip("/"), *Path(path.lstrip("/")).parents))
