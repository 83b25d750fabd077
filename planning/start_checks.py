"""Checks that need this machine and the data. run_train.sh runs them before any rank starts.

python -m planning.start_checks --job.config_file F --section.key value
"""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from command_line import answer_early, start
from training.config_checks import check

if __name__ == "__main__":
    answer_early(__doc__, check)

import numpy as np
import torch

from checkpoints.files import check_steps
from checkpoints.identity import check_resume
from config import Config
from datasets.grid import Grid, latitude_bounds
from datasets.selection import Selection, check_outside_source, open_selection
from errors import one_line_errors, refuse
from jobs.preemption import started_at
from models.attention import check_backend
from models.registry import build_model, registered
from models.weather_model import GridModel, TokenModel
from parallelisms.degrees import check_processes, num_ranks, number_in_environment
from parallelisms.domain_parallel import choose_tiles
from parallelisms.float8 import check_float8, float8_layers
from parallelisms.pipeline import SPLIT_BACKWARD
from planning.clusters import load_cluster, machine_known_as
from planning.hardware import Cluster
from planning.workload import COPIES_AHEAD, Workload, workload_of
from training.loggers.opening import check_loggers
from training.process_settings import host_memory

CGROUPS = Path("/sys/fs/cgroup")


def open_checked(config: Config) -> Selection:
    """Open the data of a run and check that machine, model and data fit together. ConfigError, DataError."""
    check_loggers(config.metrics)
    check_machine(config)
    check_folder("job.dump_folder", config.dump_folder)
    for source in (config.data.path, *config.data.more_paths):
        check_outside_source("job.dump_folder", str(config.dump_folder), source)
    lead_hours = config.validation.lead_hours if config.validation.enable else ()
    longest = config.training.states_ahead
    selection = open_selection(config.data, config.model.patch_size, lead_hours, longest)
    check_model(config, selection.archive.grid)
    check_memory(config, len(selection.variables), selection.archive.grid)
    check_resume(config, selection)
    check_steps(config.dump_folder / "checkpoints", config.training.steps, config.checkpoint.enable)
    return selection


def check_machine(config: Config) -> None:
    """Check devices, kernels and the environment of this machine. Raises ConfigError."""
    started_at()
    use_cuda = check_devices()
    check_schedule(config)
    device_type, dtype = "cuda" if use_cuda else "cpu", getattr(torch, config.training.mixed_precision_param)
    if registered(config.model.name).has_tokens:
        check_backend(config.model.attention_backend, device_type, dtype)
    if config.float8.enable:
        check_float8(device_type)


def check_devices() -> bool:
    """Return True where ranks of this host have GPUs. ConfigError: fewer than there are ranks."""
    num_gpus = torch.cuda.device_count()
    name, number = local_ranks()
    check_processes(name, number)
    if 0 < num_gpus < number:
        refuse(name, number, f"this machine has {num_gpus} GPU(s); start at most one process on each")
    return num_gpus > 0


def check_schedule(config: Config) -> None:
    """Refuse schedules of a pipeline that an older torch has, and cannot run."""
    key, schedule = "pipeline_parallel_schedule", config.parallelism.pipeline_parallel_schedule
    release = torch_release()
    if config.parallelism.pipeline_parallel_degree == 1 or schedule not in SPLIT_BACKWARD:
        return
    if schedule == "ZBVZeroBubble" and release < (2, 12):
        reason = f'fails inside torch {torch.__version__}; install torch 2.13, or use "Interleaved1F1B"'
        refuse(f"parallelism.{key}", schedule, reason)
    if config.compile.enable and release < (2, 13):
        reason = f"with compile.enable it fails inside torch {torch.__version__}; set that to false"
        refuse(f"parallelism.{key}", schedule, f'{reason}, install torch 2.13, or use "Interleaved1F1B"')


def torch_release() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def local_ranks() -> tuple[str, int]:
    """Return the environment variable for the ranks of this host, and their number."""
    name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "NGPU"
    return name, number_in_environment(name)


def check_folder(key: str, folder: Path) -> None:
    """Check that a folder can be made and written to; changes nothing. ConfigError."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        refuse(key, str(folder), f"{there} is not a folder")
    try:
        with TemporaryFile(dir=there):
            return
    except OSError as error:
        refuse(key, str(folder), f"{there} is no folder that can be written to ({error.strerror})")


def check_memory(config: Config, num_variables: int, grid: Grid) -> None:
    """ConfigError: not even the parameters of the ranks here, or the fields of one batch, fit this machine.

    A lower bound of any run; planning/preflight.py compares the planned peak.
    """
    gpus = range(torch.cuda.device_count())
    memory = host_memory() + sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    hosts = max(num_ranks() // local_ranks()[1], 1)
    model = build_model(config.model, num_variables, 0, grid.shape, grid.periodic)
    key = "dim" if isinstance(model, TokenModel) else "width"
    numbers = sum(parameter.numel() for parameter in model.parameters())
    what = ("the parameters", 4 * numbers // hosts, memory)
    _check_bytes(f"model.{key}", getattr(config.model, key), *what)
    batch = config.training.local_batch_size
    states = config.data.history + max(config.training.rollout_steps)  # inputs and targets
    fields = states * 4 * batch * num_variables * math.prod(grid.shape)
    _check_bytes("training.local_batch_size", batch, "so many samples", fields, memory)


def _check_bytes(key: str, value: int, what: str, needed: int, memory: int) -> None:
    if needed > memory:
        reason = f"{what} are {needed / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f}"
        refuse(key, value, f"{reason}; take less, or more ranks on more machines")


def check_model(config: Config, grid: Grid) -> None:
    """Check what depends on the grid of the data and on the model's layers. Raises ConfigError."""
    check_tokens(config, grid)
    check_globe(config, grid)
    check_boundary(config.data.boundary_width, grid)
    model = build_model(config.model, 1, 0, grid.shape, grid.periodic)
    if isinstance(model, GridModel):
        choose_tiles(config.parallelism.context_parallel_degree, model.padded_shape, model.multiple)
    elif config.float8.enable:
        float8_layers(model, config.parallelism.tensor_parallel_degree)


def check_globe(config: Config, grid: Grid) -> None:
    """Raise ConfigError if global means are conserved and the data are not global."""
    ends = np.abs(latitude_bounds(grid.latitude)[[0, -1]])
    if grid.periodic and (ends == 90).all():
        return
    if names := config.model.conserve:
        reason = "the grid of data.path is not global, and what goes through its edges is not known"
        refuse("model.conserve", list(names), f"{reason}; set it to []")


def check_boundary(width: int, grid: Grid) -> None:
    """Raise ConfigError if a boundary is wanted where the grid has none, or nothing is left inside of it."""
    if width and grid.periodic:
        refuse("data.boundary_width", width, "the grid goes round the globe; set it to 0, or data.region")
    if 2 * width >= min(grid.shape):
        refuse("data.boundary_width", width, f"nothing is left of {list(grid.shape)} points; lower it")


def check_tokens(config: Config, grid: Grid) -> None:
    """ConfigError: a rank would have none of a sample's tokens."""
    degree = config.parallelism.context_parallel_degree
    tokens = math.prod(-(-n // size) for n, size in zip(grid.shape, config.model.patch_size, strict=True))
    if registered(config.model.name).has_tokens and degree > tokens:
        reason = f"a sample has {tokens} tokens; lower it, or model.patch_size"
        refuse("parallelism.context_parallel_degree", degree, reason)


# -- this machine, in the planner's terms


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


def main(argv: list[str]) -> None:
    with one_line_errors():
        open_checked(start(argv, __doc__, check))


if __name__ == "__main__":
    main(sys.argv[1:])
