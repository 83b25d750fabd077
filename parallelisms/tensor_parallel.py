"""Tensor parallelism with sequence parallelism: two collectives a block forward, two backward.

Tokens are sharded between the matrices: a column-parallel matrix gathers them, the next row-parallel matrix
reduce-scatters them (Korthikanti et al. 2022). All other parameters are replicated DTensors on the same mesh,
which makes a single gradient norm possible.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

TOKENS, HEADS = 1, 1  # dim of tokens in (B, T, D), and of heads in (B, N, T, E)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a ViT over the one axis of `mesh`; inputs and outputs of its modules are local tensors.

    Heads must be a multiple of the axis (parallelisms/degrees.py), tokens too (TokenShards pads them). Rows
    of qkv are ordered by head, so that a slice of them is whole heads (models/vit.py).
    """
    # Between the matrices tokens are sharded (sequence parallelism), so norms and sums take 1/tp each.
    shards = Shard(TOKENS)
    ends: dict[str, ParallelStyle] = {
        "patch_embedding": ColwiseParallel(input_layouts=Replicate(), output_layouts=shards),
        "position": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "norm": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
        "head": RowwiseParallel(input_layouts=shards, output_layouts=shards),
    }
    parallelize_module(model, mesh, {name: style for name, style in ends.items() if hasattr(model, name)})
    for block in model.get_submodule("blocks").children():
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
            "attention.qkv": ColwiseParallel(input_layouts=shards),
            "attention.q_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
            "attention.k_norm": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
            "attention.projection": RowwiseParallel(output_layouts=shards),
            "mlp_norm": SequenceParallel(sequence_dim=TOKENS, use_local_output=True),
            "mlp.up": ColwiseParallel(input_layouts=shards),
            "mlp.down": RowwiseParallel(output_layouts=shards),
        }
        if block.get_submodule("mlp").gate is not None:  # two matrices have the same input: gather it once
            plan["mlp"] = PrepareModuleInput(input_layouts=(shards,), desired_input_layouts=(Replicate(),))
            plan["mlp.up"] = ColwiseParallel(input_layouts=Replicate())
            plan["mlp.gate"] = ColwiseParallel(input_layouts=Replicate())
        parallelize_module(block, mesh, plan)
