"""The machine that this process runs on, in the planner's terms: free memory, cluster, work of a step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from config import Config
from datasets.selection import Selection
from planning.clusters import load_cluster, machine_known_as
from planning.hardware import Cluster
from planning.start_checks import local_ranks
from planning.workload import COPIES_AHEAD, Workload, workload_of

CGROUPS = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path | None = None) -> int:
    """Return the bytes that this process may still take: free on the host, and within its control groups.

    A control group counts cached files as used; the kernel gives those up first. cgroup: this process's own
    one.
    """
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) * 1024]
    own = cgroup or CGROUPS / Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].strip("/")
    for group in (own, *own.parents):
        limit = group / "memory.max"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(numbers.get("inactive_file", 0))
            free.append(int(text) - used)
    return max(min(free), 0)


def cluster_here(name: str, files: Sequence[str], world_size: int, memory: int) -> Cluster | None:
    """Return the cluster of a run here; None for a GPU that is not in the file. ConfigError: an unknown name.

    memory: bytes of the host that its ranks share where they have no GPUs.
    """
    on_gpu, local = torch.cuda.is_available(), local_ranks()[1]
    name = name or (machine_known_as(torch.cuda.get_device_name(), files) or "" if on_gpu else "cpu")
    if not name:
        return None
    found = load_cluster(name, files).with_devices(local)
    if found.shared:
        found = replace(found, device=replace(found.device, memory=memory // local), host_memory=memory)
    return replace(found, devices_per_node=local, devices=world_size)


def workload_here(config: Config, selection: Selection, cluster: Cluster | None, world_size: int) -> Workload:
    """Return the work of a step. ConfigError: the planner knows no closed form."""
    work = workload_of(config, world_size, selection.archive.grid.shape, len(selection.variables))
    return work.replace(copies_ahead=COPIES_AHEAD if cluster and not cluster.shared else 0)
