"""One training step of any layout in one process: fake ranks, fake tensors, real code.

Builds the configured layout as rank 0 of `world_size` ranks on torch's fake process group, under
FakeTensorMode: every operator computes shapes and nothing else. Memory is torch's MemTracker's, collectives
are the Recorder's.
"""

import warnings
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from config import Config
from models.build import build_model
from parallelisms.collectives import Collective, Recorder
from parallelisms.degrees import Degrees, resolve_degrees
from parallelisms.layout_checks import degrees_asked
from parallelisms.mesh import build_mesh
from parallelisms.parallelize import ParallelModel, parallelize
from training.gradients import clip, total_norm
from training.losses import mse_loss, sum_of_squares
from training.optimizers import build_optimizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class DryRun:
    """What one rank holds and sends in a step, in bytes."""

    degrees: Degrees
    total_parameters: int  # bytes of the whole model in float32
    replicated: int  # of `parameters`: what tensor parallelism leaves whole, beyond an even share
    parameters: int  # of this rank, master copies
    gradients: int
    optimizer: int
    peak: dict[str, int]  # at the step's peak, by kind (MemTracker's names)
    collectives: str  # a table of `calls`
    calls: Counter[Collective]

    @property
    def padding(self) -> int:
        """What is left beyond an even share: shards whose first dim the ranks do not divide."""
        even = self.total_parameters // (self.degrees.world // (self.degrees.dp_replicate * self.degrees.pp))
        return max(self.parameters - self.replicated - even, 0) if self.degrees.pp == 1 else 0

    def table(self) -> str:
        share = self.total_parameters / max(self.parameters, 1)
        whole = mib(self.total_parameters).strip()
        lines = [
            f"rank 0 of {self.degrees.world}: {self.degrees}",
            f"{'parameters':<28}{mib(self.parameters)}   1/{share:.2f} of {whole}",
            f"    {'whole on every tp rank':<24}{mib(self.replicated)}   norms, positions, some biases",
            f"    {'padding of shards':<24}{mib(self.padding)}",
            f"{'gradients':<28}{mib(self.gradients)}",
            f"{'optimiser states':<28}{mib(self.optimizer)}",
            f"peak of the step{'':<12}{mib(self.peak.get('Total', 0))}",
            *(f"    {kind:<24}{mib(size)}" for kind, size in self.peak.items() if kind != "Total" and size),
            "",
            self.collectives,
        ]
        return "\n".join(lines)


def mib(size: int) -> str:
    return f"{size / 2**20:>14,.1f} MiB"


def dry_run(
    config: Config, world_size: int, grid_shape: tuple[int, int], num_variables: int, periodic: bool
) -> DryRun:
    """One step of `config` on `world_size` ranks. grid_shape: latitudes and longitudes of the data."""
    warnings.filterwarnings("ignore", category=UserWarning)  # torch's about fake groups
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        return _step(config, grid_shape, num_variables, periodic)
    finally:
        dist.destroy_process_group()


def _step(config: Config, grid_shape: tuple[int, int], num_variables: int, periodic: bool) -> DryRun:
    training, device = config.training, torch.device("cpu")
    degrees = resolve_degrees(dist.get_world_size(), **degrees_asked(config.parallelism))
    mesh = build_mesh("cpu", degrees, config.parallelism.axis_order)
    num_conditions = len(config.data.static_variables) + len(config.data.forcings)
    plan = build_model(config.model, num_variables, num_conditions, grid_shape, periodic)
    total = sum(4 * p.numel() for p in plan.parameters())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = parallelize(
        plan,
        mesh,
        device,
        None,
        config.parallelism,
        config.activation_checkpoint,
        config.compile,
        param_dtype=DTYPES[training.mixed_precision_param],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        memory=fake,
    )
    with fake:
        parameters = dict(model.named_parameters())
        optimizer = build_optimizer(parameters, (0.9, 0.95), 1e-8, 0.1, "fused")
        make_states(optimizer)
        if config.optimizer.in_backward:
            for parameter in parameters.values():
                parameter.register_post_accumulate_grad_hook(release_gradient)
        tracker = MemTracker()
        tracker.track_external(*model.parts, optimizer)
        channels = (num_variables, num_variables + num_conditions)
        with tracker:
            gradients, record = _run(config, model, channels, grid_shape, tracker)
        with record:  # not tracked: as fake tensors, operators in place have temporaries
            norm = total_norm(parameters.values(), model.pipeline_group)
            clip(parameters.values(), config.training.max_norm, norm)
            optimizer.step()
        states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    peak = tracker.get_tracker_snapshot("peak")[device]
    return DryRun(
        degrees,
        total,
        sum(map(beyond_even_share, parameters.values())),
        sum(map(local_bytes, parameters.values())),
        gradients,
        sum(map(local_bytes, states)),
        with_micro_batches(
            {str(getattr(kind, "value", kind)): n for kind, n in peak.items()}, in_flight(config)
        ),
        record.table(),
        record.calls,
    )


def _run(
    config: Config,
    model: ParallelModel,
    channels: tuple[int, int],
    grid_shape: tuple[int, int],
    tracker: MemTracker,
) -> tuple[int, Recorder]:
    """Micro-batches; bytes of this rank's gradients, and all collectives.

    Of micro-batches that only accumulate one is run, and its collectives counted for each.
    """
    training, degrees = config.training, model.mesh.degrees
    batch = training.local_batch_size
    accumulation = max(training.global_batch_size // (batch * degrees.dp), 1)
    loss = lambda output, target, weights: mse_loss(sum_of_squares(output, target, weights))  # noqa: E731
    record = Recorder(model.mesh)
    for last in [False, True] if accumulation > 1 else [True]:
        tracker.reset_mod_stats()  # it follows one pass through each module
        target = model.geometry.to_pieces(torch.empty(batch, channels[0], *grid_shape))
        inputs = model.geometry.to_pieces(torch.empty(batch, channels[1], *grid_shape))
        pieces = model.shards.cut_output(target)
        size = config.parallelism.pipeline_parallel_microbatch_size
        with Recorder(model.mesh) as calls:
            if model.pipeline:  # one of the micro-batches that pass through the first stage
                output = model.parts[0](model.shards.cut_input(inputs)[:size])
                output.backward(torch.empty_like(output))
            else:
                model.forward_backward(
                    model.shards.cut_input(inputs), pieces, torch.empty_like(pieces), loss, 1.0, last
                )
        repeated = batch // size if model.pipeline else 1
        for call, number in calls.calls.items():
            record.calls[call] += number * repeated * (1 if last else accumulation - 1)
    gradients = sum(local_bytes(p.grad) for _, p in model.named_parameters() if p.grad is not None)
    return gradients, record


def release_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """As after the first step: the peak of a run is that of its second."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def with_micro_batches(peak: dict[str, int], number: int) -> dict[str, int]:
    """The peak with the activations of `number` micro-batches instead of one."""
    more = (number - 1) * peak.get("Activation", 0)
    return peak | {key: peak[key] + more for key in ("Activation", "Total") if key in peak}


def in_flight(config: Config) -> int:
    """Micro-batches whose activations the first stage of a pipeline holds at once; 1 without a pipeline.

    1F1B starts one a stage before the first comes back, GPipe all of them.
    """
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    chunks = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    gpipe = parallelism.pipeline_parallel_schedule == "GPipe"
    return chunks if gpipe else min(chunks, parallelism.pipeline_parallel_degree)


def local_bytes(tensor: Tensor) -> int:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def beyond_even_share(tensor: Tensor) -> int:
    """Bytes of a parameter that this rank would not have if tensor parallelism had dealt it out."""
    if not isinstance(tensor, DTensor) or "tp" not in (tensor.device_mesh.mesh_dim_names or ()):
        return 0
    axis = (tensor.device_mesh.mesh_dim_names or ()).index("tp")
    ranks = tensor.device_mesh.size(axis)
    return local_bytes(tensor) * (ranks - 1) // ranks if tensor.placements[axis].is_replicate() else 0
