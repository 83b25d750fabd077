"""Data parallelism: every rank takes its part of the batch, and gradients are averaged.

DDP holds everything everywhere; FSDP2 shards parameters, gradients and optimiser states; HSDP shards them
inside groups and replicates the groups.
"""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from config import Parallelism

logger = logging.getLogger(__name__)
MOST_SHARDS = 256  # above, rank 0 plans the first save for more than 20 s: docs/launch.md


def apply_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replicates the model over the mesh; gradients are reduced in buckets while backward goes on."""
    if mesh.size() == 1:
        return model
    device_ids = [torch.cuda.current_device()] if mesh.device_type == "cuda" else None
    # Not synchronised at start: every rank has made the same weights from (seed, name).
    shared = {"process_group": mesh.get_group(), "gradient_as_bucket_view": True, "init_sync": False}
    return DistributedDataParallel(model, device_ids=device_ids, **shared)


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    parallelism: Parallelism,
) -> None:
    """Shards each block, then what is left, over the last axis of `mesh`; a first axis replicates (HSDP).

    parallelism.fsdp_reshard_after_forward: "always" frees a block's gathered parameters after its forward
    (ZeRO-3), "never" keeps them until its backward (ZeRO-2), "default" frees all but the last block's, which
    backward needs at once. Master parameters stay float32; matrices see `param_dtype`; gradients are summed
    in `reduce_dtype`.
    """
    shards = mesh.size(mesh.ndim - 1)
    if shards > MOST_SHARDS:
        fewer = f"parallelism.data_parallel_replicate_degree = {-(-shards // MOST_SHARDS)}"
        logger.warning(f"{shards} shards of every weight: rank 0 plans the first save for long; set {fewer}")
    policy: dict = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    if parallelism.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    blocks = list(model.get_submodule("blocks").children())
    asked = parallelism.fsdp_reshard_after_forward
    for index, block in enumerate(blocks):
        last = index == len(blocks) - 1
        reshard = {"always": True, "never": False, "default": not last}[asked]
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, reshard_after_forward=asked == "always", **policy)
    _prefetch([b for b in blocks if isinstance(b, FSDPModule)])


def _prefetch(blocks: list[FSDPModule]) -> None:
    """Gather the next block's parameters while this one computes, in either direction."""
    for block, following in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def exchange_gradients(model: nn.Module, enabled: bool) -> AbstractContextManager:
    """While accumulating, only the last micro-batch of a step exchanges gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_is_last_backward(enabled)
    elif isinstance(model, DistributedDataParallel) and not enabled:
        return model.no_sync()
    return nullcontext()
