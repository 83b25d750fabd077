"""One training step of any layout in one process: fake ranks, fake tensors, real code.

Assembles the configured layout as rank 0 of `world_size` ranks on torch's fake process group, and takes
train.py's step under FakeTensorMode: every operator computes shapes and nothing else. Memory is torch's
MemTracker's, collectives are the Recorder's.
"""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from command_line import text_table
from config import Config
from datasets.grid import Grid
from errors import refuse
from parallelisms.degrees import Degrees
from parallelisms.mesh import Mesh, mesh_of
from parallelisms.ring_attention import sends, sends_backward
from planning.network import Collective
from training.assembly import Fields, assemble
from training.batches import Batch
from training.gradients import LossScaler
from training.state import build_state
from training.step import Run, accumulate_gradients, update_weights

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

NO_HOOK = RemovableHandle(OrderedDict())


@dataclass
class Recorder(TorchDispatchMode):
    """Counts collectives inside `with Recorder(mesh) as record:`; `record.calls[Collective] -> number`.

    Counts calls of torch's dispatcher: c10d's own, DTensor's and FSDP's, the halo exchange, and the sends of
    the ring's operators.
    """

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
        name = func.name().partition(".")[0]
        kind, sizes = "send", SENDS.get(name, lambda _: ())(args)
        if name in KINDS:
            kind, index = KINDS[name]
            buffers = tree_leaves(result if index is None else args[index])
            sizes = [sum(buffer.nbytes for buffer in buffers if isinstance(buffer, Tensor))]
        if not sizes:
            return result
        group: Any = None  # the last argument that names a group, or is a boxed one
        for arg in reversed(args):
            if isinstance(arg, str) and arg.lower() not in ("sum", "avg", "max", "min"):
                group = group or _resolve_process_group(arg)  # type: ignore[arg-type]
            elif isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                group = group or dist.ProcessGroup.unbox(arg)  # type: ignore[attr-defined]
        ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        # Only FSDP calls c10d::_allgather_base_ and c10d::_reduce_scatter_base_.
        axis = "fsdp" if name.startswith("c10d::_") else self.axes.get(ranks, "world")
        self.calls.update(Collective(kind, axis, size) for size in sizes)
        return result


@dataclass(frozen=True)
class DryRun:
    """Memory and communication of one rank in a step, in bytes."""

    degrees: Degrees
    total_parameters: int  # of the whole model in float32
    parameters: int  # of this rank, master copies
    gradients: int
    optimizer: int
    peak: dict[str, int]  # at the step's peak, by kind (MemTracker's names)
    calls: Counter[Collective]

    def table(self) -> str:
        sizes = {"parameters": self.parameters, "gradients": self.gradients}
        sizes |= {"optimiser states": self.optimizer, "peak of the step": self.peak.get("Total", 0)}
        sizes |= {f"    {kind}": size for kind, size in self.peak.items() if kind != "Total" and size}
        lines = [f"{name:<28}{size / 2**20:>14,.1f} MiB" for name, size in sizes.items()]
        fraction = self.total_parameters / max(self.parameters, 1)
        lines[0] += f"   1/{fraction:.2f} of {self.total_parameters / 2**20:,.1f} MiB"
        lines.insert(0, f"rank 0 of {self.degrees.world}: {self.degrees}")
        # Calls and total bytes of each kind and axis.
        rows: list[tuple[object, ...]] = [("axis", "collective", "calls", "bytes a rank")]
        for axis, kind in sorted({(call.axis, call.kind) for call in self.calls}):
            alike = {c: n for c, n in self.calls.items() if (c.axis, c.kind) == (axis, kind)}
            size = sum(call.size * number for call, number in alike.items())
            rows.append((axis, kind, sum(alike.values()), f"{size / 2**20:.3f} MiB"))
        return "\n".join(lines + ["", text_table("<14 <16 >8 >20", rows)])


def dry_run(config: Config, world_size: int, grid: Grid, num_variables: int) -> DryRun:
    """Run one step of `config` on `world_size` ranks, uncompiled, so that memory can be tracked."""
    if (degree := config.parallelism.pipeline_parallel_degree) > 1:
        reason = "a dry run does not support pipelines; plan without --dry_run"
        refuse("parallelism.pipeline_parallel_degree", degree, reason)
    # "auto" must not choose "math" for few tokens here, as it does on a CPU.
    backend = config.model.attention_backend.replace("auto", "sdpa")
    config = replace(config, model=replace(config.model, attention_backend=backend))
    config = replace(config, compile=replace(config.compile, enable=False))
    warnings.filterwarnings("ignore", category=UserWarning)  # torch's about fake groups
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        fields = Fields.standard(config, grid, num_variables)
        device, fake = torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True)
        mesh = mesh_of(config.parallelism, device)
        assembly = assemble(config, fields, mesh, device, memory=fake)
        model = assembly.model
        state = replace(build_state(config, assembly), scaler=LossScaler(False))  # a scaler reads values
        tracker = StepTracker()
        for part in model.parts:
            if isinstance(part, DistributedDataParallel):
                part.register_comm_hook(None, reduced_bucket)
        with fake:
            # Allocate the optimizer states, as after the first step: the peak of a run is that of its second.
            for parameter in model.optimized_parameters().values():
                parameter.grad = torch.zeros_like(parameter)
            state.optimizer.step()
            model.zero_grad()
            tracker.track_external(*model.parts, state.optimizer)
            if state.average:
                tracker.track_external(*state.average.averages.values())
            for part in model.parts:
                tracker._track_module_params_and_buffers(part)
            batches = FakeBatches(config, fields, mesh.degrees, Recorder(mesh))
            smallest = config.training.local_batch_size * mesh.degrees.dp
            run = Run(config, assembly, state, np.ones(fields.grid.shape[0]), len(batches) * smallest)
            with batches.record:
                with tracker:
                    loss = accumulate_gradients(run, 1, batches)
                gradients = sum(local_bytes(p.grad) for p in model.parameters.values() if p.grad is not None)
                # Not tracked: as fake tensors, operators in place have temporaries.
                update_weights(run, 1, loss)
                model.zero_grad()
        states = [value for moments in state.optimizer.state.values() for value in moments.values()]
        peak = tracker.get_tracker_snapshot("peak")[device]
        # The collectives of every micro-batch that the first one represents.
        calls = batches.record.calls + Counter(
            {call: number * (batches.accumulation - 2) for call, number in batches.first.items()}
        )
        return DryRun(
            degrees=mesh.degrees,
            total_parameters=4 * assembly.num_parameters,
            parameters=sum(map(local_bytes, model.parameters.values())),
            gradients=gradients,
            optimizer=sum(local_bytes(value) for value in states if isinstance(value, Tensor)),
            peak={str(getattr(kind, "value", kind)): n for kind, n in peak.items()},
            calls=calls,
        )
    finally:
        dist.destroy_process_group()


class ModulesWithoutHooks(ModTracker):
    """torch's module tracker without its hooks, which keep gradients and whole graphs alive. With them the
    peak of a rollout, or of a backward pass in two parts, was up to three times too large.
    """

    def __enter__(self) -> "ModulesWithoutHooks":
        return self

    def __exit__(self, *args: object) -> None:
        pass


class StepTracker(MemTracker):
    """torch's tracker of memory, for one step of a layout. What FSDP gathers counts as activations.

    torch waits for every parameter's gradient: a frozen one (LoRA) has none. DTensor computes the shape of a
    result that it has not seen before on whole tensors, under the same FakeTensorMode: they take no memory.
    DTensor is patched inside, as torch 2.11 lacks the hook of later ones around that computation.
    """

    in_propagation = False

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = ModulesWithoutHooks()
        self._compute_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def __enter__(self) -> "StepTracker":
        def propagate(propagator: ShardingPropagator, schema: OpSchema) -> Any:
            self.in_propagation = True
            try:
                return self._compute_shapes(propagator, schema)
            finally:
                self.in_propagation = False

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        ShardingPropagator._propagate_tensor_meta_non_cached = self._compute_shapes
        super().__exit__(*args)

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles.setdefault(parameter, (NO_HOOK, NO_HOOK))
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.in_propagation:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _update_peak_stats(self, peak_state: object) -> None:
        """Update only the peak of the step; torch would walk all modules at every operator for theirs."""
        for device, snapshot in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < snapshot["Total"]:
                self._peak_mem[device] = snapshot["Total"]
                self._peak_mem_snap[device] = dict(snapshot)


class FakeBatches:
    """Micro-batches of a step. Those that only accumulate are equal, so the first represents all of them."""

    def __init__(self, config: Config, fields: Fields, degrees: Degrees, record: Recorder) -> None:
        training = config.training
        states = config.data.history + max(training.rollout_steps)
        self.shape = (training.local_batch_size, states, len(fields.variables), *fields.grid.shape)
        self.accumulation = max(training.global_batch_size // (training.local_batch_size * degrees.dp), 1)
        self.record, self.first = record, Counter()

    def __len__(self) -> int:
        return min(self.accumulation, 2)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            if number:
                self.first = self.record.calls.copy()
            yield Batch(torch.empty(self.shape), torch.zeros(self.shape[0], dtype=torch.int64))


def reduced_bucket(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket like DDP's default, for which the fake group does not return a tensor."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    dist.all_reduce(bucket.buffer())
    done.set_result(bucket.buffer())
    return done


def local_bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
