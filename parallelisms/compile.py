"""torch.compile of each block: one compilation serves all blocks of one shape, at any depth."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed._functional_collectives import AsyncCollectiveTensor

BACKEND: Any = "inductor"  # for all compilations; tests of many layouts replace it by one without C++


def apply_compile(model: nn.Module, backend: Any = None, backward_twice: bool = False) -> None:
    """Compile the blocks of `model` in place, after activation checkpointing and before FSDP.

    `block.compile()` preserves the names of parameters; torch.compile(block) would put `_orig_mod.` before
    them. All blocks of a ViT run the same code on the same shapes, so that one compilation serves all: one
    for training, one for evaluation; those of a U-Net have a shape each. A block that cannot be one graph is
    an error (`fullgraph`), not a slow step. Shapes are fixed, as is the grid.

    `backward_twice`: zero-bubble schedules compute gradients of inputs first and of weights later. A compiled
    backward then must not reuse the memory of its inputs, in this whole process.
    """
    # Dynamo would split a block's graph at the buckets of DDP, so that reductions start earlier. Reductions
    # of whole blocks start early enough, and parts of graphs cannot be fused.
    torch._dynamo.config.optimize_ddp = False  # type: ignore[reportPrivateImportUsage]
    if backward_twice:
        functorch_config.donated_buffer = False
    # One compilation per kind of block for training, and one for validation with its smaller last batches.
    # torch's limit is 8. A ViT that exceeds the limit is an error of ours, and fails.
    limit = max(torch._dynamo.config.recompile_limit, 4 * getattr(model, "kinds_of_blocks", 1))
    torch._dynamo.config.recompile_limit = limit  # type: ignore[reportPrivateImportUsage]
    for block in model.get_submodule("blocks").children():
        block.compile(backend=backend or BACKEND, fullgraph=True, dynamic=False)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors of fixed shapes as one graph, which waits for results of collectives."""
    graph = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)
    # A graph would detach the gradient of a pending result; to clone it waits.
    return lambda *given: graph(*(t.clone() if isinstance(t, AsyncCollectiveTensor) else t for t in given))
