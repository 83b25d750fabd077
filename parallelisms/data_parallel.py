"""Data parallelism: every rank takes its share of the batch, and gradients are averaged."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def apply_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replicates the model over the mesh; gradients are reduced in buckets while backward goes on."""
    if mesh.size() == 1:
        return model
    device_ids = [torch.cuda.current_device()] if mesh.device_type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=device_ids, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )


def exchange_gradients(model: nn.Module, enabled: bool) -> AbstractContextManager:
    """While accumulating, only the last micro-batch of a step exchanges gradients."""
    if isinstance(model, DistributedDataParallel) and not enabled:
        return model.no_sync()
    return nullcontext()
