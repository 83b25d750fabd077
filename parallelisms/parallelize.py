"""From a plain model to the part of it that this rank trains, in one order with a reason for each place in
it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from config import ActivationCheckpoint, Compile, Parallelism
from models.vit import VisionTransformer, fill_with_nan, init_weights
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.context_parallel import apply_context_parallel, trim_padding
from parallelisms.data_parallel import apply_ddp, apply_fsdp
from parallelisms.mesh import Mesh
from parallelisms.names import canonical
from parallelisms.pieces import TokenShards
from parallelisms.tensor_parallel import apply_tensor_parallel


@dataclass
class ParallelModel:
    """What this rank trains, and how it takes part of a sample and gives part of a prediction."""

    geometry: VisionTransformer  # knows grids and patches; its parameters are those of `module`
    module: nn.Module  # what is called: the model, perhaps wrapped
    shards: TokenShards
    mesh: Mesh

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under their own names."""
        for name, parameter in self.module.named_parameters():
            yield canonical(name), parameter

    def predict(self, fields: Tensor) -> Tensor:
        """fields (B, C, H, W) -> (B, V, H, W), gathered on every rank that shares the sample: for
        validation.
        """
        piece = self.module(self.shards.cut_input(self.geometry.to_pieces(fields)))
        return self.geometry.to_fields(self.shards.gather_output(piece))

    @property
    def loss_scale(self) -> int:
        """FSDP averages gradients over cp too, where they have to be summed."""
        return self.mesh.degrees.cp

    @property
    def speaks_for_sample(self) -> bool:
        """True on one of the ranks that share a sample."""
        return all(self.mesh.rank(axis) == 0 for axis in ("pp", "cp", "tp"))


def parallelize(
    model: VisionTransformer,
    mesh: Mesh,
    device: torch.device,
    seed: int,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    compile: Compile,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> ParallelModel:
    """Applies every technique to a model on the meta device, then gives it memory and weights."""
    degrees, shards = mesh.degrees, TokenShards(mesh, model.num_tokens)
    # Tensor parallelism first: it cuts matrices by name, and everything after works with what is left of
    # them.
    if degrees.tp > 1:
        apply_tensor_parallel(model, mesh.parameters["tp"])
    # Context parallelism replaces attention, whose heads are by now those of this rank.
    if degrees.cp > 1:
        method = parallelism.context_parallel_method
        apply_context_parallel(model, mesh.group("cp"), method, model.num_tokens)
        model.position.first_token = shards.first_token
    elif shards.padded > model.num_tokens:
        trim_padding(model, model.num_tokens)
    # Checkpointing wraps what is recomputed, collectives included; compile must see the wrapper's inside.
    ac = activation_checkpoint
    apply_activation_checkpoint(model, ac.mode, ac.every_n_blocks, ac.memory_budget, compiled=compile.enable)
    if compile.enable:
        apply_compile(model)
    # Sharding comes last, so that a block's parameters are gathered once for all that happens in it.
    module: nn.Module = model
    if uses_fsdp(mesh):
        reshard = parallelism.fsdp_reshard_after_forward
        offload = parallelism.cpu_offload
        blocks, axes = model.blocks.values(), mesh.parameters["dp_replicate", "fsdp"]
        apply_fsdp(model, blocks, axes, param_dtype, reduce_dtype, reshard, offload)
        materialize(model, torch.device("cpu") if offload else device, seed)
    else:
        materialize(model, device, seed)
        if degrees.dp_replicate > 1:
            module = apply_ddp(model, mesh.grid["dp_replicate"])
    return ParallelModel(model, module, shards, mesh)


def uses_fsdp(mesh: Mesh) -> bool:
    """Whenever something is sharded; pure replicas are DDP's."""
    degrees = mesh.degrees
    return degrees.dp_shard * degrees.cp > 1 or (degrees.dp_replicate > 1 and degrees.splits_model)


def materialize(model: VisionTransformer, device: torch.device, seed: int) -> None:
    """Memory, then NaN, so that nothing forgotten passes unseen, then weights from (seed, name)."""
    model.to_empty(device=device)
    fill_with_nan(model)
    init_weights(model, seed, name_of=canonical, assign=copy_part)


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
