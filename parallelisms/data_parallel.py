"""Data parallelism: every rank computes its part of the batch, and gradients are averaged.

DDP replicates everything; FSDP2 shards parameters, gradients and optimizer states; HSDP shards them inside
groups and replicates the groups; ZeRO-1 is DDP with optimizer states on one rank each.
"""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from config import Parallelism

logger = logging.getLogger(__name__)
MOST_SHARDS = 256  # with more, rank 0 needs more than 20 s to plan the first save: docs/launch.md


def apply_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replicate the model over the mesh; gradients are reduced in buckets during the backward pass."""
    device_ids = [torch.cuda.current_device()] if mesh.device_type == "cuda" else None
    # Not synchronised at the start, because every rank has computed the same weights from (seed, name).
    shared = {"process_group": mesh.get_group(), "gradient_as_bucket_view": True, "init_sync": False}
    return DistributedDataParallel(model, device_ids=device_ids, **shared)


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    parallelism: Parallelism,
) -> None:
    """Shard each block, then the rest, over the last axis of `mesh`; a first axis replicates (HSDP).

    parallelism.fsdp_reshard_after_forward: "always" frees a block's gathered parameters after its forward
    (ZeRO-3), "never" keeps them until its backward (ZeRO-2), "default" frees all but the last block's, which
    backward needs immediately. In a pipeline "default" means "never": torch keeps parameters gathered in the
    backward pass for all micro-batches of a batch, and each forward pass would gather them again. Master
    parameters stay float32; matrices are gathered in `param_dtype`; gradients are summed in `reduce_dtype`.
    """
    shards = mesh.size(mesh.ndim - 1)
    if shards > MOST_SHARDS:
        fewer = f"parallelism.data_parallel_replicate_degree = {-(-shards // MOST_SHARDS)}"
        logger.warning(f"{shards} shards of every weight: rank 0 plans the first save slowly; set {fewer}")
    policy: dict = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    if parallelism.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    # -- every block is a unit of its own, so that one is gathered while another computes
    mode = parallelism.fsdp_reshard_after_forward
    if mode == "default" and parallelism.pipeline_parallel_degree > 1:
        mode = "never"
    blocks = list(model.get_submodule("blocks").children())
    for block in blocks:
        reshard = {"always": True, "never": False, "default": block is not blocks[-1]}[mode]
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, reshard_after_forward=mode == "always", **policy)
    # Gather the next block's parameters while this one computes, in either direction.
    for block, following in zip(blocks, blocks[1:], strict=False):
        assert isinstance(block, FSDPModule) and isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def exchange_gradients(model: nn.Module, is_last: bool) -> AbstractContextManager:
    """Return a context with the gradient communication of a micro-batch; is_last: it is the last of a step.

    FSDP reduce-scatters the gradients of every micro-batch, so that no rank has unsharded gradients of more
    than one or two blocks. All-reduces over replicas (HSDP and DDP) run only for the last micro-batch.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


class Zero1:
    """ZeRO-1 (Rajbhandari et al. 2020) in a group of replicas: each parameter is updated by one rank, which
    sends it to the others. The arithmetic is DDP's, bit-exact.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group, loads = group, [0] * dist.get_world_size(group)
        self.owned: list[dict[str, nn.Parameter]] = [{} for _ in loads]  # by rank
        # Largest first, each to the least loaded rank.
        for name, parameter in sorted(parameters.items(), key=lambda item: (-item[1].numel(), item[0])):
            rank = loads.index(min(loads))
            self.owned[rank][name] = parameter
            loads[rank] += parameter.numel()
        # In the order of the model, which is that of a message.
        self.owned = [
            {name: p for name, p in parameters.items() if name in of_rank} for of_rank in self.owned
        ]

    def mine(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank's optimizer."""
        return self.owned[dist.get_rank(self.group)]

    @torch.no_grad()
    def broadcast_updates(self) -> None:
        """Send the parameters of every owner to all ranks, in one message each, after an update."""
        for rank, of_rank in enumerate(self.owned):
            if parameters := list(of_rank.values()):
                message = torch.cat([p.flatten() for p in parameters])
                dist.broadcast(message, group=self.group, group_src=rank)
                values = message.split([p.numel() for p in parameters])
                for parameter, value in zip(parameters, values, strict=True):
                    parameter.copy_(value.view_as(parameter))
