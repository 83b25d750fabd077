"""Ranks, devices, and the one mesh they form. Everything that asks "with whom" asks here."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from config import Parallelism
from errors import UserError
from parallelisms.degrees import AXES, Degrees, resolve_degrees
from parallelisms.peer_messages import read_plainly

T = TypeVar("T")


def start_ranks(timeout_seconds: int, backend: str = "auto") -> torch.device:
    """Join the process group that the environment describes, and return the device of this rank.

    backend: "auto" is NCCL with GPUs and gloo without. A single process is a group of one, so that no later
    code has to ask whether there is a group.
    """
    read_plainly()
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each group connects all its ranks at once
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    use_cuda = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    name = {"auto": "cpu:gloo,cuda:nccl" if use_cuda else "gloo"}.get(backend, backend)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    timeout = timedelta(seconds=timeout_seconds)
    store = job_store(rank, timeout) if "RANK" in os.environ else HashStore()
    dist.init_process_group(name, timeout=timeout, store=store, rank=rank, world_size=world_size)
    return device


def job_store(rank: int, timeout: timedelta) -> Store:
    """Return the ranks' store: torchelastic's, or without it one that rank 0 makes.

    Torchelastic keeps its store when it starts ranks again, so that keys need the number of the attempt.
    Ranks of one host listen on the loopback alone.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {"is_master": is_server, "timeout": timeout, "wait_for_workers": False}
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if is_server:
            options["master_listen_fd"] = socket.create_server(("127.0.0.1", port)).detach()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt/{attempt}", TCPStore(address, port, **options))


@dataclass(frozen=True)
class Mesh:
    """Five axes. Ranks that share their dp coordinates read the same samples; the others split one sample.

    `grid` has the axes pp, dp_replicate, dp_shard, cp, tp. `parameters` has pp, dp_replicate, fsdp, tp,
    where fsdp is dp_shard and cp together: parameters are replicated over cp, so that sharding them over it
    costs nothing and sums their gradients. Axes of one rank are left out of both: nobody talks along them,
    and every rank would make the groups of all others.
    """

    degrees: Degrees
    ranks: Tensor  # global ranks by their coordinates on all five axes
    grid: DeviceMesh
    parameters: DeviceMesh

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.grid.get_group(axis)

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return self.grid.get_local_rank(axis) if getattr(self.degrees, axis) > 1 else 0

    @property
    def dp_rank(self) -> int:
        """Which of `degrees.dp` parts of a batch this rank reads."""
        return self.rank("dp_replicate") * self.degrees.dp_shard + self.rank("dp_shard")

    @property
    def fsdp_axes(self) -> DeviceMesh:
        """What FSDP shards over, behind the axis it replicates over where there is one (HSDP)."""
        replicated = self.degrees.dp_replicate > 1
        return self.parameters["dp_replicate", "fsdp"] if replicated else self.parameters["fsdp"]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every group that this rank trains in."""
        axes = [*self.grid.get_all_groups(), *self.parameters.get_all_groups()]
        return [dist.distributed_c10d._get_default_group(), *axes]

    def picture(self) -> str:
        """Which global rank holds which coordinate, one line a rank, axes of one rank left out."""
        lines = []
        for position, rank in np.ndenumerate(self.ranks.numpy()):
            named = zip(AXES, position, self.degrees.sizes, strict=True)
            lines.append(f"rank {rank:>4}: " + ", ".join(f"{axis} {i}" for axis, i, n in named if n > 1))
        return "\n".join(lines)


def build_mesh(device_type: str, degrees: Degrees, axis_order: tuple[str, ...] = AXES) -> Mesh:
    """The mesh of all ranks. `axis_order` names the axes from the slowest to the fastest varying rank number.

    By default neighbours in number, which share a node, are tp, then cp: these talk most.
    """
    order = [AXES.index(axis) for axis in axis_order]
    ranks = torch.arange(degrees.world).view([degrees.sizes[i] for i in order])
    ranks = ranks.permute([order.index(i) for i in range(len(AXES))]).contiguous()
    grid = device_mesh(device_type, ranks, AXES)
    flat = ranks.flatten(2, 3)  # (pp, dp_replicate, fsdp, tp)
    sharded = ("fsdp",) if degrees.uses_fsdp else ()  # over one rank, where replicas split their model by tp
    parameters = device_mesh(device_type, flat, ("pp", "dp_replicate", "fsdp", "tp"), sharded)
    mesh = Mesh(degrees, ranks, grid, parameters)
    take_timeout(mesh.groups, device_type)
    return mesh


def device_mesh(
    device_type: str, ranks: Tensor, axes: tuple[str, ...], always: tuple[str, ...] = ()
) -> DeviceMesh:
    """Of the axes with more than one rank, and those that are `always` there; of one rank: of the last."""
    kept = [axis for axis, size in zip(axes, ranks.shape, strict=True) if size > 1 or axis in always]
    kept = kept or [axes[-1]]
    sizes = [ranks.shape[axes.index(axis)] for axis in kept]
    return DeviceMesh(device_type, ranks.reshape(sizes), mesh_dim_names=tuple(kept))


def take_timeout(groups: list[dist.ProcessGroup], device_type: str) -> None:
    """That of the run (comm.timeout_seconds) for all groups: torch gives new ones its default, up to half an
    hour.
    """
    if dist.get_backend() == "fake":
        return
    options = groups[0]._get_backend(torch.device(device_type)).options
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def mesh_of(parallelism: Parallelism, device: torch.device) -> Mesh:
    """The mesh that a configuration asks for. ConfigError: its degrees do not give this number of ranks."""
    degrees = resolve_degrees(dist.get_world_size(), parallelism)
    return build_mesh(device.type, degrees, parallelism.axis_order)


def from_first_rank(compute: Callable[[], T]) -> T:
    """What `compute` returns on rank 0, on every rank: for what is read or fitted once.

    A user's mistake that rank 0 finds is raised on every rank.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = compute()
        except UserError as error:
            # Not the error itself: where dask's tblib is installed, exceptions are pickled as code.
            answer[1] = type(error), str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        kind, text = answer[1]
        raise kind(text)
    return answer[0]


def on_all_ranks(compute: Callable[[], T]) -> T:
    """Return what `compute` returns on this rank; a UserError of any rank is raised on every rank."""
    result, problem = None, None
    try:
        result = compute()
    except UserError as error:
        problem = type(error), str(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for kind, text in filter(None, problems):
        raise kind(text)
    return cast(T, result)


def copy_part(target: Tensor, value: Tensor) -> None:
    """Copies this rank's part of a full `value` into a parameter, without talking to anyone."""
    if not isinstance(target, DTensor):
        target.copy_(value)
        return
    mesh = target.device_mesh
    # Innermost last: FSDP has sharded what tensor parallelism had left.
    for axis in reversed(range(mesh.ndim)):
        placement = target.placements[axis]
        if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
            dim, ranks, rank = placement.dim, mesh.size(axis), mesh.get_local_rank(axis)  # type: ignore[attr-defined]
            parts = value.chunk(ranks, dim=dim)
            value = parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)
    local = target.to_local()
    local.copy_(value.to(local.device))
