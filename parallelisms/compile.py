"""torch.compile of each block: one compilation serves all blocks of one shape, at any depth."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from models.vit import StochasticDepth

BACKEND: Any = "inductor"  # of all compilations; tests of many layouts set one that needs no C++


def apply_compile(model: nn.Module, backend: Any = None, backward_twice: bool = False) -> None:
    """Compile the blocks of `model` in place, after activation checkpointing and before FSDP.

    `block.compile()` preserves the names of parameters; torch.compile(block) would put `_orig_mod.` before
    them. All blocks of a ViT run the same code on the same shapes, so that one compilation serves all: one
    for training, one for evaluation; those of a U-Net have a shape each. A block that cannot be one graph is
    an error (`fullgraph`), not a slow step. Shapes are fixed, as is the grid.

    `backward_twice`: zero-bubble schedules compute gradients of inputs first and of weights later. A compiled
    backward then must not reuse the memory of its inputs, in this whole process.
    """
    # Dynamo would split a block's graph where a bucket of DDP's is full, for reductions that start earlier:
    # those of whole blocks start early enough, and parts of graphs cannot be fused.
    torch._dynamo.config.optimize_ddp = False  # type: ignore[reportPrivateImportUsage]
    if backward_twice:
        functorch_config.donated_buffer = False
    unify_stochastic_depth(model)
    # One compilation a kind of block for training and one for validation, of smaller last batches;
    # at its limit, 8, torch gives up. A ViT that reaches it would be a mistake, and fails.
    limit = max(torch._dynamo.config.recompile_limit, 4 * getattr(model, "kinds_of_blocks", 1))
    torch._dynamo.config.recompile_limit = limit  # type: ignore[reportPrivateImportUsage]
    for block in model.get_submodule("blocks").children():
        block.compile(backend=backend or BACKEND, fullgraph=True, dynamic=False)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors of fixed shapes as one graph."""
    graph = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)
    return lambda *tensors: graph(*map(_wait, tensors))


def _wait(tensor: Tensor) -> Tensor:
    """Wait for the result of a collective: a graph would detach the gradient of a pending one."""
    return tensor.clone() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def unify_stochastic_depth(model: nn.Module) -> None:
    """Pass the rates to the compiled code as tensors; as Python numbers, each would be its own compilation.

    (torch gives up after 8.) A block with rate 0 draws a mask too, of ones, so that it needs no other code.
    """
    layers = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    if all(layer.rate == 0.0 for layer in layers):
        return
    for layer in layers:
        # Not buffers, which materialisation would overwrite; on the CPU, so that no device is waited for;
        # not float64: torch makes Python floats of its single numbers.
        layer.rate_tensor = torch.tensor(layer.rate, dtype=torch.float32, device="cpu")
        layer.remaining = torch.tensor(1.0 - layer.rate, dtype=torch.float32, device="cpu")
        layer.forward = MethodType(_drop_samples, layer)


def _drop_samples(layer: Any, branch: Tensor) -> Tensor:
    """StochasticDepth.forward with tensors for its rate: (B, T, D) -> (B, T, D)."""
    if not layer.training:
        return branch
    keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= layer.rate_tensor
    return (branch * (keep / layer.remaining)).to(branch.dtype)  # float32 until here: one rounding
