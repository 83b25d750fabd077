"""What a host has for a run: software, devices, memory, /dev/shm, cores, open files, clock, speed."""

import hashlib
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from config import PROJECT, Config
from jobs.host_memory import host_memory
from jobs.start_checks import check_machine, local_ranks
from jobs.verdicts import FAIL, WARN, Row, attempt, judged
from parallelisms.degrees import SMALLEST_PROCESS, num_ranks
from planning.calibrate import Operation, rounds, tensors

SHM = Path("/dev/shm")
NCCL_SHM = 2**25  # bytes of /dev/shm a rank: its buffers to one neighbour in shared memory, "size 33030528"
LEAST_SHM = 2**26  # bytes: what a container has where nobody said --shm-size
FILES, FILES_A_RANK = 512, 4  # open ones of a host: its data and groups; of rank 0's for each rank of the job
CLOCK_SECONDS = 1.0  # that the clocks of two hosts may differ, the way of a message included
OTHERS = 0.1  # of a GPU's memory, above which somebody else uses it
SLOW = {"cpu": 2.0, "cuda": 1.25}  # times slower than the median: cores are shared, GPUs are not
PRODUCT = {"cpu": 512, "cuda": 8192}  # size of the square matrices that are multiplied
REPETITIONS = (5, 5)
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Facts:
    """What is compared between hosts."""

    software: dict[str, str]
    clock: float  # seconds since 1970, when all were asked


def host_rows(config: Config, shared: int) -> list[Row]:
    """Checks of this host alone; `shared`: bytes that loader processes keep in /dev/shm."""
    _, refused = attempt("devices", check_machine, config)
    number = local_ranks()[1]
    return [
        requirements_row(),
        *(refused or [devices_row(), *gpu_memory_rows()]),
        memory_row(number),
        shm_row(SHM, shared, NCCL_SHM * number if torch.cuda.is_available() and number > 1 else 0),
        cores_row(number, config.data.num_workers),
        files_row(num_ranks()),
    ]


# -- software


def requirements_row() -> Row:
    """Installed versions against those of requirements.txt."""
    lines = (PROJECT / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    other = [text for name, wanted in pins.items() if (text := _differs(name, wanted))]
    have = software()
    found = ", ".join(f"{name} {have[name]}" for name in ("Python", "torch", "CUDA", "NCCL", "driver"))
    if other:
        found += f"; other than tested: {', '.join(other)}"
    fix = "python -m pip install -r requirements.txt, or leave .venv to run_train.sh"
    return judged("versions", bool(other), found, fix, WARN)


def _differs(name: str, wanted: str) -> str:
    """Of a package: empty where it is the wanted one, whatever its build ("2.13.0+cpu")."""
    try:
        have = version(name.partition("[")[0])
    except PackageNotFoundError:
        return f"{name} is missing"
    return "" if have.partition("+")[0] == wanted.partition("+")[0] else f"{name} {have}, not {wanted}"


def software() -> dict[str, str]:
    """What has to be the same on all hosts."""
    on_gpu = torch.cuda.is_available()
    return {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",  # type: ignore[attr-defined]
        "driver": driver_version() if on_gpu else "none",
        "devices": torch.cuda.get_device_name() if on_gpu else "none",
        "Rossby": sources_digest(PROJECT),
    }


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def sources_digest(project: Path) -> str:
    """Of the program's text: a node whose copy was not updated has another."""
    files = sorted([*project.glob("*.py"), *project.glob("[!.]*/*.py")])
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def alike_row(hosts: Sequence[str], facts: Sequence[Facts]) -> Row:
    """All hosts against the first."""
    first = facts[0].software
    other = [
        f"{host} has {name} {value}, {hosts[0]} has {first[name]}"
        for host, each in zip(hosts, facts, strict=True)
        for name, value in each.software.items()
        if value != first[name]
    ]
    found = "; ".join(other[:4]) or f"the same on {len(hosts)} node(s), Rossby {first['Rossby']}"
    return judged("alike", bool(other), found, "install the same everywhere, or leave these nodes out")


def clocks_row(hosts: Sequence[str], facts: Sequence[Facts]) -> Row:
    """Asked at the same moment, but for the seconds of a message."""
    usual = median(each.clock for each in facts)
    off = {host: each.clock - usual for host, each in zip(hosts, facts, strict=True)}
    host, worst = max(off.items(), key=lambda item: abs(item[1]))
    bad = abs(worst) > CLOCK_SECONDS
    found = f"{host}: {worst:+.1f} s beside the median" if bad else f"within {abs(worst):.2f} s"
    fix = "start its time service (chronyd), or training.max_wall_time and logs are off by as much"
    return judged("clocks", bad, found, fix, WARN)


# -- devices and memory


def devices_row() -> Row:
    number = torch.cuda.device_count()
    if not number:
        return Row("devices", "pass", f"no GPU: gloo on {len(os.sched_getaffinity(0))} cores")
    names = sorted({torch.cuda.get_device_name(gpu) for gpu in range(number)})
    return Row("devices", "pass", f"{number} x {', '.join(names)}")


def gpu_memory_rows() -> list[Row]:
    """Whether a GPU is somebody else's already."""
    gpus = range(torch.cuda.device_count())
    used = {gpu: 1 - free / total for gpu in gpus for free, total in [torch.cuda.mem_get_info(gpu)]}
    busy = [f"GPU {gpu} {part:.0%}" for gpu, part in used.items() if part > OTHERS]
    found = f"in use by others: {', '.join(busy)}" if busy else "free"
    row = judged("GPU memory", bool(busy), found, "nvidia-smi names the processes; end them")
    return [row] if used else []


def memory_row(ranks: int) -> Row:
    """Of the host: what is free of what it has, or of what its container or job may take."""
    total, free = host_memory(), available_memory()
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free for {ranks} rank(s)"
    if free < ranks * SMALLEST_PROCESS:
        return Row("memory", FAIL, found, "ask for more (--mem=0 takes a node's), or start fewer ranks")
    fix = "find out who has it (another job, a full /dev/shm, the job's own limit)"
    return judged("memory", free < total / 2, found, fix, WARN)


def available_memory() -> int:
    """Bytes that may still be taken, before the kernel or the job's control group says no."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    return free if limit == "max" else min(free, int(limit))


def shm_row(folder: Path, loaders: int, nccl: int) -> Row:
    """Room in /dev/shm for batches of loader processes, which otherwise go through pipes, and for NCCL, which
    otherwise ends the run.
    """
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {free / 2**20:,.0f} MiB free, {(loaders + nccl) / 2**20:,.0f} needed"
    fix = f"mount -o remount,size=8G {folder}, or --shm-size=8g for a container"
    if free < nccl:
        return Row("/dev/shm", FAIL, found, fix)
    if loaders and free < loaders + nccl:
        fix += "; or fewer data.num_workers: batches go through pipes, slower"
    return judged("/dev/shm", free < max(loaders + nccl, LEAST_SHM), found, fix, WARN)


def cores_row(ranks: int, readers: int) -> Row:
    cores, wanted = len(os.sched_getaffinity(0)), ranks * (1 + readers)
    found = f"{cores} for {ranks} rank(s) with {readers} reader(s) each"
    fix = "more of --cpus-per-task (and srun has to be told: SRUN_CPUS_PER_TASK), or lower data.num_workers"
    return judged("cores", cores < wanted, found, fix, WARN)


def files_row(ranks: int) -> Row:
    """Open files that a process may have: rank 0's host keeps connections with all."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES + FILES_A_RANK * ranks
    found = f"{limit} a process, {wanted} needed"
    fix = f"ulimit -n {wanted} before the start" if wanted <= most else "raise nofile in limits.conf"
    return judged("open files", limit < wanted, found, fix)


# -- speed


def device_speed(device: torch.device) -> float:
    """FLOP/s of a product of square matrices, bfloat16 on a GPU, all ranks at once."""
    size, dtype = PRODUCT[device.type], "float32" if device.type == "cpu" else "bfloat16"
    left, right = tensors([(size, size), (size, size)], dtype, device)
    product = Operation("", dtype, (size, size, size), lambda: left @ right)
    rounds([product], [1], (2, 2), device)
    return 2 * size**3 / rounds([product], [10], REPETITIONS, device)[0].seconds


def speed_row(names: Sequence[str], speeds: Sequence[float], device_type: str) -> Row:
    """All ranks against their median: everybody waits for the slowest."""
    usual = median(speeds)
    slow = [
        f"{name} {usual / speed:.1f} times"
        for name, speed in zip(names, speeds, strict=True)
        if speed * SLOW[device_type] < usual
    ]
    found = f"{min(speeds) / 1e12:.3g} to {max(speeds) / 1e12:.3g} TFLOP/s over {len(speeds)} rank(s)"
    if slow:
        found += f"; slower than the median: {', '.join(slow[:4])}"
    return judged("speed", bool(slow), found, "leave that node out (sbatch --exclude), and report it", WARN)
