"""torch.compile of each block: one compilation serves all blocks of one shape, whatever the depth."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from models.vit import StochasticDepth

BACKEND: Any = "inductor"  # of all compilations; tests of many layouts take one that needs no C++


def apply_compile(
    model: nn.Module, backend: Any = None, cuda_graphs: bool = False, backward_twice: bool = False
) -> None:
    """Compiles the blocks of `model` in place, after activation checkpointing and before FSDP.

    `block.compile()` keeps the module and so the names of its parameters; torch.compile(block) would put
    `_orig_mod.` before them. All blocks of a ViT run the same code on the same shapes, so that one
    compilation fits all: one for training, one for evaluation; those of a U-Net have a shape each.
    What cannot be compiled as one graph is an error (`fullgraph`), not a slow step. Shapes are fixed: the
    grid never changes within a run.

    `cuda_graphs`: every block's kernels are recorded. What a graph returns is overwritten when it runs again,
    so that gradients have to be added to memory of their own, which stays: `keep_gradients`.

    `backward_twice`: what zero-bubble schedules do, for gradients of inputs first and of weights later. A
    compiled backward then must not take the memory of what it was given: for this whole process.
    """
    # Dynamo would cut a block's graph where a bucket of DDP's is full, for reductions that start earlier:
    # those of whole blocks start early enough, and graphs in parts cannot be fused.
    torch._dynamo.config.optimize_ddp = False  # type: ignore[reportPrivateImportUsage]
    if backward_twice:
        functorch_config.donated_buffer = False
    unify_stochastic_depth(model)
    blocks = list(model.get_submodule("blocks").children())
    # A compilation a kind of block for training and one for validation, whose last batch may be a smaller
    # one; at its limit, 8, torch gives up. A ViT that came there would be a mistake, and shall say so.
    limit = max(torch._dynamo.config.recompile_limit, 4 * getattr(model, "kinds_of_blocks", 1))
    torch._dynamo.config.recompile_limit = limit  # type: ignore[reportPrivateImportUsage]
    for block in blocks:
        mode = "reduce-overhead" if cuda_graphs else None
        block.compile(backend=backend or BACKEND, fullgraph=True, dynamic=False, mode=mode)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors of fixed shapes as one graph."""
    graph = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)
    return lambda *tensors: graph(*map(_arrived, tensors))


def _arrived(tensor: Tensor) -> Tensor:
    """What a collective gives, once it is there: a graph would cut the gradient of one on its way."""
    return tensor.clone() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def keep_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def unify_stochastic_depth(model: nn.Module) -> None:
    """Hands the rates to the compiled code as tensors; as Python numbers, each would be its own compilation.

    (torch gives up after 8.) A block with rate 0 draws a mask too, of ones, so that it needs no other code.
    """
    layers = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    if all(layer.rate == 0.0 for layer in layers):
        return
    for layer in layers:
        # Not buffers, which materialisation would overwrite; on the CPU, so that no device is waited for;
        # not float64, of whose single numbers torch makes Python floats again.
        layer.rate_tensor = torch.tensor(layer.rate, dtype=torch.float32, device="cpu")
        layer.kept_fraction = torch.tensor(1.0 - layer.rate, dtype=torch.float32, device="cpu")
        layer.forward = MethodType(_drop_samples, layer)


def _drop_samples(layer: Any, branch: Tensor) -> Tensor:
    """StochasticDepth.forward with tensors for its rate: (B, T, D) -> (B, T, D)."""
    if not layer.training:
        return branch
    keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= layer.rate_tensor
    return (branch * (keep / layer.kept_fraction)).to(branch.dtype)  # float32 until here: one rounding
