"""Memory that a step frees is used again, and returned when a validation begins; limits of containers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from datasets.convert import WORKER_BYTES, most_workers
from jobs import machine

STEPS = """
import resource, sys, torch
from training.process_settings import retain_memory
if sys.argv[1] == "kept":
    retain_memory(torch.device("cpu"))
def step():
    activations = [torch.ones(10_000_000) for _ in range(4)]  # 40 MB each
    while activations:
        activations.pop()  # as backward does: the newest first
for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def number_from(program: str, how: str, local_ranks: int = 1) -> int:
    """Output of the program in its own process."""
    environment = os.environ | {"LOCAL_WORLD_SIZE": str(local_ranks)}
    command, folder = [sys.executable, "-c", program, how], Path(__file__).parent.parent
    return int(subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library has other settings")
def test_the_next_step_faults_no_pages_in() -> None:
    assert number_from(STEPS, "kept") < 100
    assert number_from(STEPS, "kept", local_ranks=10_000) > 3_900  # of 39,000: they have little memory each


LEFT = """
import sys, torch
from contextlib import nullcontext
from pathlib import Path
from training.process_settings import return_memory, retain_memory
def held() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
cpu = torch.device("cpu")
retain_memory(cpu)
before = held()
blocks = [torch.ones(10_000_000) for _ in range(8)]  # 40 MB each
del blocks[::2]  # gaps between blocks in use
with return_memory(cpu) if sys.argv[1] == "given back" else nullcontext():
    fields = [torch.ones(15_000_000) for _ in range(4)]  # 60 MB: none fits into the place of one of those
    del fields[:3]
    print(held() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library has no malloc_trim")
def test_a_validation_begins_without_what_steps_left() -> None:
    assert (
        number_from(LEFT, "given back") < number_from(LEFT, "kept") - 150_000
    )  # KiB, of 330,000 that nobody uses


GROUPS = {  # what /proc/self/cgroup says, files below /sys/fs/cgroup, MiB and cores
    "none": ("0::/\n", {}, None, None),
    "a container": ("0::/\n", {"memory.max": 2**29, "cpu.max": "150000 100000"}, 512, 2),
    "no limit": ("0::/a/b\n", {"a/b/memory.max": "max", "a/cpu.max": "max 100000"}, None, None),
    "a job's step": ("0::/job/step\n", {"job/memory.max": 2**30, "job/step/memory.max": 2**31}, 1024, None),
    "version 1": (
        "5:cpu,cpuacct:/job\n4:memory:/slurm/job\n",
        {
            "memory/slurm/job/memory.limit_in_bytes": 2**30,
            "memory/memory.limit_in_bytes": 2**63 - 4096,
            "cpu/job/cpu.cfs_quota_us": 100000,
            "cpu/job/cpu.cfs_period_us": 100000,
            "cpu/cpu.cfs_quota_us": -1,
            "cpu/cpu.cfs_period_us": 100000,
        },
        1024,
        1,
    ),
}


@pytest.mark.parametrize(("own", "files", "mebibytes", "cores"), GROUPS.values(), ids=GROUPS)
def test_a_limit_of_a_container_or_a_job_counts(tmp_path, monkeypatch, own, files, mebibytes, cores):
    """A first start made a worker for each core of the node, which the job's memory ended."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN", tmp_path / "own")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(machine.os, "sysconf", lambda _: 2**18)  # a page of 256 KiB, 64 GiB of them
    assert machine.memory() == (mebibytes * 2**20 if mebibytes else 2**36)
    assert machine.num_cores() == (cores or 64)
    assert most_workers() == (1 if mebibytes else min(cores or 64, 2**36 // WORKER_BYTES))
