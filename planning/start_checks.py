"""Checks that need this machine and the data, and the report of a run whose memory is not enough.

    .venv/bin/python -m planning.start_checks --job.config_file F --section.key value

run_train.sh runs them before any rank starts: configuration, data, devices, the run's folder, a resume, room
on the disk for all checkpoints; a warning where the planner expects too much memory. NGPU and NNODES give
the number of ranks. Exit codes: 0, 2 a check fails.
"""

import sys

from jobs.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()

from command_line import answer_early, start
from training.config_checks import check

if __name__ == "__main__":
    answer_early(__doc__, check)

import gc
import math
import os
import re
import shutil
import socket
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch

from checkpoints.files import check_steps
from checkpoints.identity import check_resume
from config import Config, Data
from datasets.grid import Grid, latitude_bounds
from datasets.options import COPIES_AHEAD
from datasets.selection import Selection, check_outside_source, convert_selection, open_for_training
from errors import ConfigError, RunFailed, one_line_errors, print_message, refuse, require
from jobs import machine
from jobs.heartbeat import activity
from jobs.log_setup import start_logging
from jobs.preemption import started_at
from jobs.watchdog import Watchdog
from models.attention import check_backend
from models.registry import build_model, registered
from models.weather_model import GridModel, TokenModel, WeatherModel
from parallelisms.degrees import check_processes, num_ranks, number_in_environment
from parallelisms.domain_parallel import choose_tiles
from parallelisms.float8 import check_float8, float8_layers
from parallelisms.pipeline import SPLIT_BACKWARD
from planning.clusters import load_cluster, machine_known_as
from planning.constants import GIB
from planning.cost import checkpoint_size, checkpoint_storage
from planning.search import Plan, cheapest_changes, plan
from planning.workload import workload_of
from training.loggers.opening import check_loggers

# Messages of allocators: CUDA's error has a class of its own, torch's on the host is a RuntimeError. oneDNN
# gives its message for any reason, so an allocation, which takes no memory, is tried afterwards.
OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|bad_alloc|cannot allocate memory", re.I)
ONEDNN_FAILED = re.compile(r"could not (create|execute) a (primitive|memory)")
TRIAL_SIZE = 2**28  # bytes
TARGET = 0.9  # of the planned peak, which suggested changes must not exceed: the plan may have been too low


def open_checked(config: Config) -> Selection:
    """Open the data of a run and check that machine, model and data fit together. ConfigError, DataError."""
    check_loggers(config.metrics)
    check_machine(config)
    check_folder("job.dump_folder", config.dump_folder, config.data)
    lead_hours = config.validation.lead_hours if config.validation.enable else ()
    longest = config.training.states_ahead
    data, patch_size = config.data, config.model.patch_size
    # Ranks, which exist already, find a store that is complete.
    may_convert = int(os.environ.get("WORLD_SIZE", "1")) == 1
    selection = open_for_training(data, patch_size, lead_hours, longest, may_convert)
    grid, num_variables = selection.archive.grid, len(selection.variables)
    model = check_model(config, grid, num_variables)

    # -- a lower bound of any run: the parameters of the ranks here, and the fields of one batch
    gpus, batch = range(torch.cuda.device_count()), config.training.local_batch_size
    memory = machine.memory() + sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
    width = "dim" if isinstance(model, TokenModel) else "width"
    hosts = max(num_ranks() // local_ranks()[1], 1)
    parameters = 4 * sum(parameter.numel() for parameter in model.parameters()) // hosts
    fields = (data.history + longest) * 4 * batch * num_variables * math.prod(grid.shape)
    for key, value, what, needed in (
        (f"model.{width}", getattr(config.model, width), "the parameters", parameters),
        ("training.local_batch_size", batch, "so many samples", fields),
    ):
        reason = f"{what} are {needed / GIB:,.0f} GiB, and this machine has {memory / GIB:,.0f}"
        require(needed <= memory, key, value, f"{reason}; take less, or more ranks on more machines")

    samples = len(selection.samples("train", range(1, 1 + longest)))
    reason = f"data.train_period has {samples} samples; lower it, or make the period longer"
    require(batch <= samples, "training.local_batch_size", batch, reason)
    check_resume(config, selection)
    check_steps(config.dump_folder / "checkpoints", config.training.steps, config.checkpoint.enable)
    # -- room for checkpoints, and what the planner expects: before there are ranks, or where there is one
    if may_convert and (made := plan_here(config, selection, num_ranks())):
        if warning := check_room(config, made):
            print_message(f"warning: {warning}")
    return convert_selection(data, patch_size, lead_hours, longest, selection)


def check_machine(config: Config) -> None:
    """Check devices, kernels and the environment of this machine. Raises ConfigError."""
    started_at()
    name, number = local_ranks()
    check_processes(name, number)
    num_gpus = torch.cuda.device_count()
    # GPUs that torch does not see would leave their run to the CPU, unless they are hidden on purpose.
    if not num_gpus and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1", "NoDevFiles"):
        with suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "--list-gpus"]
            listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if listed.returncode and os.environ.get("RANK", "0") == "0":
                reason = (listed.stdout + listed.stderr).strip().partition("\n")[0]
                print_message(f"warning: no GPU, the run is on the CPU: nvidia-smi fails ({reason})")
            if gpus := re.findall("^GPU ", listed.stdout, re.MULTILINE):
                sees = f"nvidia-smi lists {len(gpus)} GPUs, and torch {torch.__version__} sees none"
                fix = "install a torch for this driver, or train on the CPU with CUDA_VISIBLE_DEVICES=''"
                raise ConfigError(f"{sees}; {fix}")
    reason = f"this machine has {num_gpus} GPU(s); start at most one process on each"
    require(number <= num_gpus or not num_gpus, name, number, reason)
    # Schedules of a pipeline that an older torch has, and cannot run.
    schedule, key = config.parallelism.pipeline_parallel_schedule, "parallelism.pipeline_parallel_schedule"
    if config.parallelism.pipeline_parallel_degree > 1 and schedule in SPLIT_BACKWARD:
        release = tuple(map(int, torch.__version__.split(".")[:2]))
        fix = f'inside torch {torch.__version__}; install torch 2.13, or use "Interleaved1F1B"'
        require(schedule != "ZBVZeroBubble" or release >= (2, 12), key, schedule, f"fails {fix}")
        fix = f"with compile.enable it fails {fix}, or set that to false"
        require(not config.compile.enable or release >= (2, 13), key, schedule, fix)
    device_type = "cuda" if num_gpus else "cpu"
    if registered(config.model.name).has_tokens:
        dtype = getattr(torch, config.training.mixed_precision_param)
        check_backend(config.model.attention_backend, device_type, dtype)
    if config.float8.enable:
        check_float8(device_type)


def local_ranks() -> tuple[str, int]:
    """Return the environment variable for the ranks of this host, and their number."""
    name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "NGPU"
    return name, number_in_environment(name)


def check_folder(key: str, folder: Path, data: Data) -> None:
    """Check that a folder can be made and written to, outside the data; changes nothing. ConfigError."""
    for source in (data.path, *data.more_paths):
        check_outside_source(key, str(folder), source)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    require(there.is_dir(), key, str(folder), f"{there} is not a folder")
    try:
        with TemporaryFile(dir=there):
            return
    except OSError as error:
        refuse(key, str(folder), f"{there} is no folder that can be written to ({error.strerror})")


def check_model(config: Config, grid: Grid, num_variables: int = 1) -> WeatherModel:
    """Check what depends on the grid of the data and on the model's layers; return the model, on the meta
    device. Raises ConfigError.
    """
    # -- losses and inputs that need a whole globe, or a boundary that needs a region
    is_global = grid.periodic and (np.abs(latitude_bounds(grid.latitude)[[0, -1]]) == 90).all()
    names, width = list(config.model.conserve), config.data.boundary_width
    reason = "the grid of data.path is not global, and what goes through its edges is not known"
    require(is_global or not names, "model.conserve", names, f"{reason}; set it to []")
    reason = "the grid goes round the globe; set it to 0, or data.region"
    require(not (width and grid.periodic), "data.boundary_width", width, reason)
    reason = f"nothing is left of {list(grid.shape)} points; lower it"
    require(2 * width < min(grid.shape), "data.boundary_width", width, reason)
    augmentation = config.training.augmentation
    reason = "the longitudes of the data do not go round the globe; leave this out"
    require(grid.periodic or augmentation == "none", "training.augmentation", augmentation, reason)
    is_equal = np.allclose(grid.latitude, -grid.latitude[::-1], atol=1e-3)
    reason = 'the latitudes of the data are not the same in both hemispheres; take "roll"'
    require(is_equal or augmentation != "roll_and_mirror", "training.augmentation", augmentation, reason)
    # -- the model itself, on the meta device: what shards its grid, its tokens or its layers
    degree = config.parallelism.context_parallel_degree
    model = build_model(config.model, num_variables, 0, grid.shape, grid.periodic)
    if isinstance(model, GridModel):
        choose_tiles(degree, model.padded_shape, model.multiple)
    elif isinstance(model, TokenModel) and degree > model.num_tokens:
        reason = f"a sample has {model.num_tokens} tokens; lower it, or model.patch_size"
        refuse("parallelism.context_parallel_degree", degree, reason)
    elif config.float8.enable:
        float8_layers(model, config.parallelism.tensor_parallel_degree)
    return model


# -- what the planner expects here


def plan_here(config: Config, selection: Selection, world_size: int) -> Plan | None:
    """Return the plan of a run on this machine; None for models, adapters and GPUs that the planner does not
    know.
    """
    on_gpu, local = torch.cuda.is_available(), local_ranks()[1]
    name = machine_known_as(torch.cuda.get_device_name() if on_gpu else "cpu")
    if not name or not registered(config.model.name).planned or config.lora.rank:
        return None
    cluster = load_cluster(name).with_devices(local)
    work = workload_of(config, world_size, selection.archive.grid.shape, len(selection.variables))
    if on_gpu:  # where other programs may have some of the memory
        memory = min(cluster.device.memory, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
        work = work.replace(copies_ahead=COPIES_AHEAD)
    else:  # which the ranks share
        host_memory = machine.memory()
        memory, cluster = host_memory // local, replace(cluster, host_memory=host_memory)
    device = replace(cluster.device, memory=memory)
    return plan(work, replace(cluster, device=device, devices_per_node=local, devices=world_size))


def check_room(config: Config, made: Plan) -> str:
    """Return a warning with the fix where the planner expects more memory than a rank has, or else "".
    ConfigError if the disk has no room for the checkpoints that are still to come.
    """
    folder = config.dump_folder
    most = checkpoint_storage(checkpoint_size(made.work), config.checkpoint, config.training.steps)
    needed = most - sum(path.stat().st_size for path in (folder / "checkpoints").glob("step-*/*"))
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    reason = f"{needed / GIB:,.3f} GiB of checkpoints are to come, and its disk has {free / GIB:,.3f} free"
    reason += "; make room, or lower checkpoint.keep_latest_k"
    require(needed <= free or not config.checkpoint.enable, "job.dump_folder", str(folder), reason)
    if made.fits:
        return ""
    room, peak = made.cluster.capacity / GIB, made.memory.peak / GIB
    fix = cheapest_changes(made.work, made.cluster, config)
    return f"{peak:.2f} GiB a rank are planned, and there are {room:.2f}: {fix}"


@contextmanager
def run_with_watchdog(config: Config) -> Iterator[Watchdog]:
    """Start logging and the watchdog. Raises RunFailed for an allocator's error, with the planned peak, its
    components and the cheapest changes.
    """
    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    with Watchdog(config.dump_folder, config.comm) as watchdog:
        try:
            yield watchdog
        except (MemoryError, RuntimeError) as error:
            text = " ".join(str(error).split())
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or OUT_OF_MEMORY.search(text)
            if not is_memory and ONEDNN_FAILED.search(text):
                try:
                    torch.empty(TRIAL_SIZE, dtype=torch.uint8)
                except RuntimeError:
                    is_memory = True
            if isinstance(error, RunFailed) or not is_memory:
                raise
            rank = f"rank {os.environ.get('RANK', '0')} ({socket.gethostname()}, pid {os.getpid()})"
            place = f"{rank} in step {activity.step}, {activity.describe_phase()}"
            # Of CUDA's message what was asked for, the memory of the device, and what is free.
            asked = ". ".join(text.split(". ")[:3])
            traceback.clear_frames(error.__traceback__)  # frees tensors, for the explanation takes memory
            gc.collect()
            if watchdog.selection is None:  # nor are they opened now
                explanation = "the data were being opened"
            elif made := plan_here(config, watchdog.selection, int(os.environ.get("WORLD_SIZE", "1"))):
                device, peak = made.cluster.device, made.memory.peak
                less = min(device.memory, round(TARGET * peak) + device.reserved)
                room = replace(made.cluster, device=replace(device, memory=less))
                largest = sorted(made.memory.components.items(), key=lambda component: -component[1])[:3]
                named = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in largest)
                explanation = (
                    f"the planner expects a peak of {peak / GIB:.2f} GiB a rank, in "
                    f"{made.memory.peak_moment}: {named}; there are {made.cluster.capacity / GIB:.2f} GiB; "
                    f"{cheapest_changes(made.work, room, config)}"
                )
            else:
                fix = "plan.py --dry_run measures what a layout needs"
                explanation = f"the planner does not know this model or GPU: {fix}"
            raise RunFailed(f"{place}: out of memory ({asked}); {explanation}") from None


def main(argv: list[str]) -> None:
    with one_line_errors():
        open_checked(start(argv, __doc__, None))


if __name__ == "__main__":
    main(sys.argv[1:])
