"""Recorder of the collectives of a step: kind, axis of the mesh, bytes.

Counts calls of torch's dispatcher: c10d's own, DTensor's and FSDP's, the halo exchange, and the sends of the
ring's operators.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[reportPrivateImportUsage]
from torch.utils._python_dispatch import TorchDispatchMode

from parallelisms.mesh import Mesh
from parallelisms.ring_attention import sends, sends_backward

# Operator -> its kind, and the index of the argument with the larger buffer, the bytes of which are counted.
KINDS = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", None),  # the output
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional_autograd::all_gather_into_tensor": ("all-gather", None),
    "_c10d_functional_autograd::all_to_all_single": ("all-to-all", 0),
    "rossby::swap_strips": ("send", 0),
}

# Operators that send several tensors: bytes of each, by their arguments.
SENDS = {
    "rossby::ring_attention": lambda args: sends(args[1], args[2], args[-1]),
    "rossby::ring_attention_backward": lambda args: sends_backward(args[2], args[3], args[-2], args[-1]),
}

FSDP = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")  # only FSDP calls these


@dataclass(frozen=True)
class Collective:
    """A kind of collective along an axis. `size`: bytes of the larger buffer of a call."""

    kind: str
    axis: str
    size: int


@dataclass
class Recorder(TorchDispatchMode):
    """Counts collectives inside `with Recorder(mesh) as record:`; `record.calls[Collective] -> number`."""

    mesh: Mesh
    calls: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()
        # By ranks, not by name: DTensor reuses the groups of an earlier equal mesh.
        self.axes: dict[tuple[int, ...], str] = {}
        for mesh in (self.mesh.parameters, self.mesh.grid):
            for axis in mesh.mesh_dim_names or ():
                self.axes[tuple(dist.get_process_group_ranks(mesh.get_group(axis)))] = axis

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (name := func.name().partition(".")[0]) in KINDS:
            kind, index = KINDS[name]
            size = total_bytes(result if index is None else args[index])
            axis = "fsdp" if name in FSDP else self.axes.get(group_ranks(args), "world")
            self.calls[Collective(kind, axis, size)] += 1
        for size in SENDS.get(name, lambda _: ())(args):
            self.calls[Collective("send", self.axes.get(group_ranks(args), "world"), size)] += 1
        return result


def total_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(total_bytes(item) for item in value) if isinstance(value, list | tuple) else 0


def group_ranks(args: Any) -> tuple[int, ...]:
    """Return the ranks of a collective's group, given by its name or as a boxed group."""
    for arg in reversed(args):
        if isinstance(arg, str) and arg.lower() not in ("sum", "avg", "max", "min"):
            return tuple(dist.get_process_group_ranks(_resolve_process_group(arg)))  # type: ignore[arg-type]
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))  # type: ignore[attr-defined]
    return ()
