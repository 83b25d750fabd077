"""Ranks, devices and the mesh they form."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


def start_ranks(backend: str, timeout_seconds: int) -> torch.device:
    """Joins the process group that torchrun describes, or makes one of a single process; this rank's device.

    A single process is a group of one, so that nothing after this asks whether there is a group.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    use_cuda = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    name = {"auto": "cpu:gloo,cuda:nccl" if use_cuda else "gloo"}.get(backend, backend)
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(name, timeout=timeout)
    else:
        dist.init_process_group(name, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    return device


def build_mesh(device: torch.device) -> DeviceMesh:
    """Every rank holds a full copy of the model: one axis, `dp_replicate`."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_replicate",))


def from_first_rank(compute: Callable[[], T]) -> T:
    """What `compute` returns on rank 0, on every rank: for what is read or fitted once."""
    result = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]  # type: ignore[return-value]
