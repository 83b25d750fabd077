"""Parallelization of a model: all techniques in order, with the reason for each position."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from config import ActivationCheckpoint, Compile, Float8, Parallelism
from jobs.heartbeat import span
from models.initialization import fill_with_nan, init_weights
from models.lora import trained
from models.vit import Attention
from models.weather_model import GridModel, TokenModel, WeatherModel
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.context_parallel import TokenShards, TrimmedKernel, apply_context_parallel
from parallelisms.data_parallel import Zero1, apply_ddp, apply_fsdp, exchange_gradients
from parallelisms.domain_parallel import GridTiles, apply_domain_parallel, build_tiles, choose_tiles
from parallelisms.float8 import apply_float8, precompute_float8_scales
from parallelisms.mesh import Mesh, copy_part
from parallelisms.pipeline import SPLIT_BACKWARD, Pipeline, cut_stages
from parallelisms.tensor_parallel import apply_tensor_parallel

# output, and tensors of its shape by name (training/objective.py) -> this rank's part of the loss
LossPart = Callable[[Tensor, dict[str, Tensor]], Tensor]
Shards = TokenShards | GridTiles


@dataclass(frozen=True)
class Recipe:
    """The settings of `parallelize`: sections of a configuration, and the types of matmuls and gradients."""

    parallelism: Parallelism
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    float8: Float8
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.param_dtype, enabled=self.param_dtype != torch.float32)


@dataclass
class ParallelModel:
    """The part of a model on this rank. It takes shards of samples and returns shards of predictions."""

    meta_model: WeatherModel  # the whole model on the meta device: grid, patches, names
    parts: list[nn.Module]  # the model, perhaps wrapped, or stages of a pipeline
    shards: Shards
    mesh: Mesh
    device: torch.device
    recipe: Recipe
    pipeline: Pipeline | None = None
    zero1: Zero1 | None = None

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this rank by their names in `meta_model`, to which DDP adds a prefix."""
        named = [pair for part in self.parts for pair in part.named_parameters()]
        return {name.removeprefix("module."): parameter for name, parameter in named}

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    def forward_backward(
        self,
        inputs: Tensor,
        targets: dict[str, Tensor],
        loss_part: LossPart,
        scale: float | Tensor,
        is_last: bool,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Return loss_part(output, targets) of a micro-batch; gradients are those of scale x loss.

        keys (B,): of the samples, for models that drop branches of them.
        is_last: gradients are reduced over all ranks. FSDP averages gradients over cp too, where they have
        to be summed: hence the factor.
        """
        scale = scale * self.mesh.degrees.cp
        if self.pipeline:
            with span("pipeline"):
                return self.pipeline.step(inputs, keys, targets, loss_part, scale)
        (part,) = self.parts
        with exchange_gradients(part, is_last):  # around both: DDP prepares for backward in forward
            with span("forward"):
                with self.recipe.autocast(self.device):
                    output = part(inputs) if keys is None else part(inputs, keys)
                loss = loss_part(output, targets)
            with span("backward"):
                (loss * scale).backward()
        return loss.detach()

    def optimized_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's optimizer: all trained ones, with ZeRO-1 a part of them."""
        return self.zero1.mine() if self.zero1 else trained(self.parameters)

    def zero_grad(self) -> None:
        """Reset all gradients: the optimizer may have a part of the parameters only."""
        for part in self.parts:
            part.zero_grad()

    def after_update(self) -> None:
        """Distribute the weights that the optimizer has changed."""
        if self.zero1:
            self.zero1.broadcast_updates()
        self._precompute_scales()

    def after_exchange(self) -> None:
        """Discard values computed from weights that have been replaced since, outside a training step.

        FSDP keeps the parameters that it gathered last in a forward without backward, and would reuse them.
        """
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        self._precompute_scales()

    def _precompute_scales(self) -> None:
        if self.recipe.float8.enable and self.recipe.float8.enable_fsdp_float8_all_gather:
            for part in self.parts:
                precompute_float8_scales(part)

    @torch.no_grad()
    def predict(self, fields: Tensor, keys: Tensor | None = None) -> Tensor:
        """fields (B, C, H, W) -> (B, V, H, W), whole on every rank of the sample; keys (B,) in training."""
        inputs = self.shards.cut_input(self.meta_model.from_fields(fields))
        if self.pipeline:
            assert isinstance(self.shards, TokenShards) and isinstance(self.meta_model, TokenModel)
            shape = (len(inputs), self.shards.output_tokens)  # (B, t)
            widths = self.meta_model.dim, self.meta_model.head.out_features
            output = self.pipeline.forward(inputs, keys, (*shape, widths[0]), (*shape, widths[1]))
        else:
            with self.recipe.autocast(self.device):
                output = self.parts[0](inputs) if keys is None else self.parts[0](inputs, keys)
        return self.meta_model.to_fields(self.shards.gather_output(output))

    def sum_over_sample(self, value: Tensor) -> None:
        """Sum over all ranks of the sample, in place."""
        self.shards.sum_over_shards(value)
        if self.pipeline:
            dist.all_reduce(value, group=self.pipeline_group)

    @property
    def is_sample_leader(self) -> bool:
        """True on the first rank of each sample."""
        return all(self.mesh.rank(axis) == 0 for axis in ("pp", "cp", "tp"))

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        return self.mesh.group("pp") if self.pipeline else None


def parallelize(
    model: WeatherModel,
    mesh: Mesh,
    device: torch.device,
    seed: int | None,
    recipe: Recipe,
    memory: AbstractContextManager | None = None,
) -> ParallelModel:
    """Apply every technique to a model on the meta device, then allocate it and initialize its weights.

    Without a seed it gets no weights; `memory` is the context of the allocation: a dry run's FakeTensorMode.
    """
    degrees, parallelism, shards = mesh.degrees, recipe.parallelism, build_shards(model, mesh)
    schedule = parallelism.pipeline_parallel_schedule
    # Stages first: a rank needs no blocks of other stages.
    parts, indices = cut_stages(model, mesh, schedule, recipe.autocast(device))
    wrapped: list[nn.Module] = []
    for part in parts:
        # float8 swaps layers, and tensor parallelism then puts its hooks on the new ones.
        if recipe.float8.enable:
            apply_float8(part, recipe.float8, device.type, degrees.tp)
        # Tensor parallelism shards matrices by name; all later steps work on the shards.
        if degrees.tp > 1:
            apply_tensor_parallel(part, mesh.parameters["tp"])
        # Context parallelism replaces attention, which has the heads of this rank by now.
        split_samples(part, shards, mesh, parallelism.context_parallel_method, recipe.reduce_dtype)
        # Checkpointing decides what is recomputed, collectives included, before compile traces it.
        apply_activation_checkpoint(part, recipe.activation_checkpoint, compiled=recipe.compile.enable)
        if recipe.compile.enable:
            apply_compile(part, backward_twice=degrees.pp > 1 and schedule in SPLIT_BACKWARD)
        # Sharding comes last, so that a block's parameters are gathered once for all of its work.
        if degrees.uses_fsdp:
            apply_fsdp(part, mesh.fsdp_axes, recipe.param_dtype, recipe.reduce_dtype, parallelism)
        # Allocate only now that each rank has its part; fill with NaN, then set weights from (seed, name).
        with memory or nullcontext():
            is_offloaded = parallelism.cpu_offload and degrees.uses_fsdp
            materialize(part, torch.device("cpu") if is_offloaded else device, device, seed)
            ddp = degrees.dp_replicate > 1 and not degrees.uses_fsdp
            wrapped.append(apply_ddp(part, mesh.grid["dp_replicate"]) if ddp else part)
    pipeline = Pipeline(wrapped, indices, schedule, mesh, device) if degrees.pp > 1 else None
    result = ParallelModel(model, wrapped, shards, mesh, device, recipe, pipeline)
    if parallelism.data_parallel == "zero1" and degrees.dp_replicate > 1:
        result.zero1 = Zero1(trained(result.parameters), mesh.group("dp_replicate"))
    return result


def build_shards(model: WeatherModel, mesh: Mesh) -> Shards:
    """Return the shards of a sample over cp, and of its output over tp: tokens, or tiles of the grid."""
    if isinstance(model, GridModel):
        tiles = choose_tiles(mesh.degrees.cp, model.padded_shape, model.multiple)
        axis = mesh.grid["cp"] if mesh.degrees.cp > 1 else None
        return build_tiles(axis, tiles, model.padded_shape, model.multiple)
    assert isinstance(model, TokenModel)
    return TokenShards(mesh, model.num_tokens)


def split_samples(
    part: nn.Module, shards: Shards, mesh: Mesh, method: str, reduce_dtype: torch.dtype
) -> None:
    """Change `part` to compute this rank's shard of a sample, and communicate where it needs others."""
    if isinstance(shards, GridTiles):
        if mesh.degrees.cp > 1:
            apply_domain_parallel(part, shards)
    elif mesh.degrees.cp > 1:
        apply_context_parallel(part, mesh.group("cp"), method, shards, reduce_dtype)
    elif shards.padded > shards.num_tokens:  # cut padded tokens off the keys
        for module in part.modules():
            if isinstance(module, Attention):
                module.kernel = TrimmedKernel(module.kernel, shards.num_tokens)


def materialize(
    model: nn.Module, parameter_device: torch.device, device: torch.device, seed: int | None
) -> None:
    """Allocate memory, fill it with NaN (which reveals parameters without weights), then set the weights."""
    model.to_empty(device=parameter_device)
    if seed is not None:  # else a dry run: fake tensors have no values
        fill_with_nan(model)
        init_weights(model, seed, assign=copy_part)
    for module in model.modules():  # FSDP offloads parameters only
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
