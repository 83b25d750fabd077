"""Ranks, devices, and the one mesh of them: the only authority on process groups."""

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
from errors import DataError, RunFailed, UserError, as_user_error
from parallelisms.degrees import AXES, Degrees, resolve_degrees
from parallelisms.peer_messages import use_plain_messages

T = TypeVar("T")


# Time-out in seconds of ranks without a watchdog: another rank may write a file for hours. If a rank ends,
# its connections break in any case.
PATIENCE = 30 * 86_400.0


def start_ranks(timeout_seconds: float, backend: str = "auto") -> torch.device:
    """Join the process group that the environment describes, and return the device of this rank.

    backend: "auto" is NCCL with GPUs and gloo without. A single process is a group of one, so that later code
    need not ask whether there is a group.
    """
    use_plain_messages()
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each group connects all its ranks at once
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    use_cuda = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    name = {"auto": "cpu:gloo,cuda:nccl" if use_cuda else "gloo"}.get(backend, backend)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    timeout = timedelta(seconds=timeout_seconds)
    # -- the ranks' store: torchelastic's, or without it one that rank 0 makes
    store: Store = HashStore()
    if "RANK" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        options: dict[str, Any] = {"is_master": is_server, "timeout": timeout, "wait_for_workers": False}
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # Ranks of a single host listen on the loopback interface only.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            if is_server:
                options["master_listen_fd"] = socket.create_server(("127.0.0.1", port)).detach()
        # Torchelastic keeps its store over restarts, so keys contain the number of the attempt.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt/{attempt}", TCPStore(address, port, **options))
    dist.init_process_group(name, timeout=timeout, store=store, rank=rank, world_size=world_size)
    return device


@dataclass(frozen=True)
class Mesh:
    """Five axes. Ranks with equal dp coordinates read the same samples; the others shard one sample.

    `grid` has the axes pp, dp_replicate, dp_shard, cp, tp. `parameters` has pp, dp_replicate, fsdp, tp, where
    fsdp is dp_shard and cp together: parameters are equal over cp, so that sharding them over it is free and
    sums their gradients. Axes of one rank are left out of both: they need no groups.
    """

    degrees: Degrees
    grid: DeviceMesh
    parameters: DeviceMesh

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.grid.get_group(axis)

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self.grid.get_local_rank(axis) if getattr(self.degrees, axis) > 1 else 0

    @property
    def dp_rank(self) -> int:
        """Index of this rank's part of a batch, of `degrees.dp` parts."""
        return self.rank("dp_replicate") * self.degrees.dp_shard + self.rank("dp_shard")

    @property
    def fsdp_axes(self) -> DeviceMesh:
        """Axis that FSDP shards over, after the one it replicates over where there is one (HSDP)."""
        replicated = self.degrees.dp_replicate > 1
        return self.parameters["dp_replicate", "fsdp"] if replicated else self.parameters["fsdp"]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups of this rank."""
        axes = [*self.grid.get_all_groups(), *self.parameters.get_all_groups()]
        return [default_group(), *axes]

    def picture(self) -> str:
        """Return the coordinates of every global rank, one line each, without axes of one rank."""
        lines = []
        for rank, position in enumerate(np.ndindex(self.degrees.sizes)):
            named = zip(AXES, position, self.degrees.sizes, strict=True)
            lines.append(f"rank {rank:>4}: " + ", ".join(f"{axis} {i}" for axis, i, n in named if n > 1))
        return "\n".join(lines)


def build_mesh(device_type: str, degrees: Degrees) -> Mesh:
    """Return the mesh of all ranks, numbered in the order of AXES."""
    ranks = torch.arange(degrees.world).view(degrees.sizes)
    grid = device_mesh(device_type, ranks, AXES)
    flat = ranks.flatten(2, 3)  # (pp, dp_replicate, fsdp, tp)
    required = ("fsdp",) if degrees.uses_fsdp else ()  # of one rank, if replicas split their model by tp
    parameters = device_mesh(device_type, flat, ("pp", "dp_replicate", "fsdp", "tp"), required)
    mesh = Mesh(degrees, grid, parameters)
    if dist.get_backend() != "fake":
        # Private before torch 2.14.
        set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
        for group in mesh.groups:
            set_timeout(run_timeout(), group)
    return mesh


def default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def run_timeout() -> timedelta:
    """Return the time-out that `start_ranks` was given: torch gives new groups its own, of half an hour."""
    return default_group()._get_backend(torch.device("cpu")).options._timeout


def cpu_group() -> dist.ProcessGroup:
    """Return a new gloo group of all ranks, for messages that must not mix with those of other groups."""
    group: Any = dist.new_group(backend="gloo", timeout=run_timeout())
    return group


def device_mesh(
    device_type: str, ranks: Tensor, axes: tuple[str, ...], required: tuple[str, ...] = ()
) -> DeviceMesh:
    """Return the mesh of axes with several ranks and of `required` axes; for one rank the last axis."""
    names = [axis for axis, size in zip(axes, ranks.shape, strict=True) if size > 1 or axis in required]
    names = names or [axes[-1]]
    sizes = [ranks.shape[axes.index(axis)] for axis in names]
    return DeviceMesh(device_type, ranks.reshape(sizes), mesh_dim_names=tuple(names))


def mesh_of(parallelism: Parallelism, device: torch.device) -> Mesh:
    """Return the mesh of a configuration. ConfigError: its degrees do not make this number of ranks."""
    return build_mesh(device.type, resolve_degrees(dist.get_world_size(), parallelism))


def from_first_rank(compute: Callable[[], T]) -> T:
    """Return the result of `compute` on rank 0 on every rank; its UserError, RunFailed, or OSError as
    RunFailed, is raised on every rank.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        answer = list(_result_or_error(compute))
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        kind, text = answer[1]
        raise kind(text)
    return answer[0]


def from_all_ranks(value: T) -> list[T]:
    """Return the values of all ranks, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(compute: Callable[[], T]) -> T:
    """Return what `compute` returns on this rank; a UserError, RunFailed, or OSError as
    RunFailed, of any rank is raised on every rank.
    """
    result, problem = _result_or_error(compute)
    for kind, text in filter(None, from_all_ranks(problem)):
        raise kind(text)
    return cast(T, result)


def _result_or_error(compute: Callable[[], T]) -> tuple[T | None, tuple[type[Exception], str] | None]:
    try:
        return compute(), None
    except PermissionError as error:
        return None, (DataError, str(as_user_error(error)))
    except OSError as error:
        return None, (RunFailed, f"{error}; start again when that is repaired")
    except (UserError, RunFailed) as error:
        # Not the error itself: where dask's tblib is installed, exceptions are pickled as code.
        return None, (type(error), str(error))


def copy_part(target: Tensor, value: Tensor) -> None:
    """Copy this rank's part of a full `value` into a parameter, without communication."""
    if not isinstance(target, DTensor):
        target.copy_(value)
        return
    mesh = target.device_mesh
    # Tensor parallelism first, because FSDP has sharded its shards.
    for axis in reversed(range(mesh.ndim)):
        placement = target.placements[axis]
        if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
            dim, ranks, rank = placement.dim, mesh.size(axis), mesh.get_local_rank(axis)  # type: ignore[attr-defined]
            chunks = value.chunk(ranks, dim=dim)
            value = chunks[rank] if rank < len(chunks) else value.narrow(dim, 0, 0)
    local = target.to_local()
    local.copy_(value.to(local.device))
