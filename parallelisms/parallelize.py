"""From a plain model to the part of it that this rank trains, in one order with the reason of each step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import ActivationCheckpoint, Compile, Float8, Parallelism
from jobs.heartbeat import span
from models.initialization import fill_with_nan, init_weights
from models.lora import trained
from models.weather_model import GridModel, TokenModel, WeatherModel
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile, keep_gradients
from parallelisms.context_parallel import apply_context_parallel, trim_padding
from parallelisms.data_parallel import apply_ddp, apply_fsdp, exchange_gradients
from parallelisms.degrees import num_stages
from parallelisms.domain_parallel import GridTiles, apply_domain_parallel, build_tiles
from parallelisms.float8 import apply_float8, precompute_float8_scales
from parallelisms.mesh import Mesh, copy_part
from parallelisms.parameter_names import canonical
from parallelisms.pipeline import SPLIT_BACKWARD, Pipeline, cut_stages
from parallelisms.tensor_parallel import apply_tensor_parallel
from parallelisms.token_shards import TokenShards
from parallelisms.zero1 import Zero1

# output, and tensors of its shape by name (training/objective.py) -> this rank's part of the loss
LossPart = Callable[[Tensor, dict[str, Tensor]], Tensor]
Shards = TokenShards | GridTiles


@dataclass
class ParallelModel:
    """What this rank trains, and how it takes part of a sample and gives part of a prediction."""

    geometry: WeatherModel  # knows grids and patches; its parameters are those of `parts`
    parts: list[nn.Module]  # what is called: the model, perhaps wrapped, or stages of a pipeline
    shards: Shards
    mesh: Mesh
    device: torch.device
    autocast: torch.autocast
    pipeline: Pipeline | None = None
    gathers_float8: bool = False
    zero1: Zero1 | None = None
    cuda_graphs: bool = False

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of this rank under their own names."""
        return {canonical(name): p for part in self.parts for name, p in part.named_parameters()}

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    def forward_backward(
        self,
        inputs: Tensor,
        targets: dict[str, Tensor],
        loss_part: LossPart,
        scale: float,
        is_last: bool,
    ) -> Tensor:
        """Return loss_part(output, targets) of a micro-batch; gradients are those of scale x loss.

        is_last: gradients are reduced over all ranks. FSDP averages gradients over cp too, where they have
        to be summed: hence the factor.
        """
        scale *= self.mesh.degrees.cp
        if self.pipeline:
            with span("pipeline"):
                return self.pipeline.step(inputs, targets, loss_part, scale)
        (part,) = self.parts
        self._begin_pass()
        with exchange_gradients(part, is_last):  # around both: DDP prepares for backward in forward
            with span("forward"):
                with self.autocast:
                    output = part(inputs)
                loss = loss_part(output, targets)
            with span("backward"):
                (loss * scale).backward()
        return loss.detach()

    def _begin_pass(self) -> None:
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # what the last pass returned is not needed any more

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """What this rank's optimiser updates: all it has that trains, but for ZeRO-1."""
        return self.zero1.mine() if self.zero1 else trained(self.parameters)

    def zero_grad(self) -> None:
        """Of all parameters: the optimiser may have a part of them only."""
        for part in self.parts:
            part.zero_grad(set_to_none=not self.cuda_graphs)

    def after_update(self) -> None:
        """To be called when the optimiser has changed the weights."""
        if self.zero1:
            self.zero1.broadcast_updates()
        for part in self.parts if self.gathers_float8 else ():
            precompute_float8_scales(part)

    @torch.no_grad()
    def predict(self, fields: Tensor) -> Tensor:
        """fields (B, C, H, W) -> (B, V, H, W), whole on every rank that takes part in the sample."""
        self._begin_pass()
        inputs = self.shards.cut_input(self.geometry.from_fields(fields))
        if self.pipeline:
            assert isinstance(self.shards, TokenShards) and isinstance(self.geometry, TokenModel)
            tokens = (len(inputs), self.shards.output_tokens, self.geometry.dim)
            output = self.pipeline.forward(inputs, tokens, (*tokens[:2], self.geometry.head.out_features))
        else:
            with self.autocast:
                output = self.parts[0](inputs)
        return self.geometry.to_fields(self.shards.gather_output(output))

    def sum_over_sample(self, value: Tensor) -> None:
        """In place, over all ranks that take part in the sample."""
        self.shards.sum_over_shards(value)
        if self.pipeline:
            dist.all_reduce(value, group=self.pipeline_group)

    @property
    def speaks_for_sample(self) -> bool:
        """True on one of the ranks that take part in a sample."""
        return all(self.mesh.rank(axis) == 0 for axis in ("pp", "cp", "tp"))

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        return self.mesh.group("pp") if self.pipeline else None


def parallelize(
    model: WeatherModel,
    mesh: Mesh,
    device: torch.device,
    seed: int | None,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    float8: Float8 | None = None,
    memory: AbstractContextManager | None = None,
) -> ParallelModel:
    """Applies every technique to a model on the meta device, then gives it memory and weights.

    Without a seed it gets no weights; `memory` is what it gets its memory in: a dry run's FakeTensorMode.
    """
    degrees, shards = mesh.degrees, build_shards(model, mesh, parallelism.domain_parallel_tiles)
    autocast = torch.autocast(device.type, param_dtype, enabled=param_dtype != torch.float32)
    # Stages first: a rank has nothing to do with blocks that are not its own.
    parts, indices = cut_stages(model, mesh, parallelism, autocast)
    wrapped: list[nn.Module] = []
    for part in parts:
        # float8 swaps layers, and tensor parallelism then puts its hooks on the new ones.
        if float8 and float8.enable:
            apply_float8(part, float8, device.type, degrees.tp)
        # Tensor parallelism cuts matrices by name, and everything after works with what is left of them.
        if degrees.tp > 1:
            asynchronous = parallelism.enable_async_tensor_parallel
            apply_tensor_parallel(part, mesh.parameters["tp"], asynchronous=asynchronous)
        # Context parallelism replaces attention, whose heads are by now those of this rank.
        split_samples(part, model, shards, mesh, parallelism.context_parallel_method, reduce_dtype)
        # Checkpointing decides what is recomputed, collectives included, before compile sees it.
        apply_activation_checkpoint(part, activation_checkpoint, compiled=compile.enable)  # type: ignore[arg-type]
        if compile.enable:
            splits = degrees.pp > 1 and parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD
            apply_compile(part, cuda_graphs=compile.cuda_graphs, backward_twice=splits)
        # Sharding comes last, so that a block's parameters are gathered once for all that happens in it.
        offload = parallelism.cpu_offload and degrees.uses_fsdp
        if degrees.uses_fsdp:
            apply_fsdp(part, mesh.fsdp_axes, param_dtype, reduce_dtype, parallelism)
        # Memory only now, when a rank knows its part; then NaN, then weights from (seed, name).
        with memory or nullcontext():
            materialize(part, torch.device("cpu") if offload else device, seed)
            if compile.cuda_graphs:
                keep_gradients(part)
            ddp = degrees.dp_replicate > 1 and not degrees.uses_fsdp
            wrapped.append(apply_ddp(part, mesh.grid["dp_replicate"]) if ddp else part)
    pipeline = None
    if degrees.pp > 1:
        stages = num_stages(parallelism.pipeline_parallel_schedule, degrees.pp)
        pipeline = Pipeline(wrapped, indices, stages, mesh, device)
    gathers_float8 = float8 is not None and float8.enable and float8.enable_fsdp_float8_all_gather
    result = ParallelModel(model, wrapped, shards, mesh, device, autocast, pipeline, gathers_float8)
    result.cuda_graphs = compile.cuda_graphs
    if parallelism.data_parallel == "zero1":
        result.zero1 = Zero1(trained(result.parameters), mesh.group("dp_replicate"))
    return result


def build_shards(model: WeatherModel, mesh: Mesh, tiles: tuple[int, int]) -> Shards:
    """Who holds what of a sample. cp divides tokens or the grid itself."""
    if isinstance(model, GridModel):
        shared = mesh.grid["cp"] if mesh.degrees.cp > 1 else None
        return build_tiles(shared, tiles, model.padded_shape, model.multiple)
    assert isinstance(model, TokenModel)
    return TokenShards(mesh, model.num_tokens)


def split_samples(
    part: nn.Module, model: WeatherModel, shards: Shards, mesh: Mesh, method: str, reduce_dtype: torch.dtype
) -> None:
    """From now on `part` computes this rank's shard of a sample, and asks the others for what it needs."""
    if isinstance(model, GridModel):
        assert isinstance(shards, GridTiles)
        if mesh.degrees.cp > 1:
            apply_domain_parallel(part, shards)
        return
    assert isinstance(shards, TokenShards)
    if mesh.degrees.cp > 1:
        apply_context_parallel(part, mesh.group("cp"), method, shards, reduce_dtype)
    elif shards.padded > shards.num_tokens:
        trim_padding(part, shards.num_tokens)


def materialize(model: nn.Module, device: torch.device, seed: int | None) -> None:
    """Memory, then NaN, so that nothing forgotten passes unseen, then weights from (seed, name)."""
    model.to_empty(device=device)
    if seed is None:
        return  # a dry run: fake tensors have no values
    fill_with_nan(model)
    init_weights(model, seed, name_of=canonical, assign=copy_part)
