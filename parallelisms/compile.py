"""torch.compile of each block: one compilation serves all of them, whatever the depth."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from models.vit import StochasticDepth


def apply_compile(model: nn.Module, fullgraph: bool = True, backend: Any = "inductor") -> None:
    """Compiles the blocks of `model` in place, after activation checkpointing and before FSDP.

    `block.compile()` keeps the module and so the names of its parameters; torch.compile(block) would put
    `_orig_mod.` before them. All blocks run the same code on the same shapes, so that the first one's
    compilation fits the others: one for training, one for evaluation. What cannot be compiled as one graph is
    an error (`fullgraph`), not a slow step. Shapes are fixed: the grid never changes within a run.
    """
    unify_stochastic_depth(model)
    for block in model.blocks.values():  # type: ignore[operator, union-attr]
        block.compile(backend=backend, fullgraph=fullgraph, dynamic=False)


def unify_stochastic_depth(model: nn.Module) -> None:
    """Hands the rates to the compiled code as tensors: as Python numbers, each would be a compilation of its own.

    (torch gives up after 8.) A block with rate 0 draws a mask too, of ones, so that it needs no other code.
    """
    layers = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    if all(layer.rate == 0.0 for layer in layers):
        return
    for layer in layers:
        # Not a buffer, which materialisation would overwrite; on the CPU, so that no device is waited for;
        # float64, so that 1 - rate is the number that Python computes.
        layer.rate_tensor = torch.tensor(layer.rate, dtype=torch.float64, device="cpu")
        layer.forward = MethodType(_drop_samples, layer)


def _drop_samples(layer: nn.Module, branch: Tensor) -> Tensor:
    """StochasticDepth.forward with `rate_tensor` for `rate`: (B, T, D) -> (B, T, D)."""
    if not layer.training:
        return branch
    rate = layer.rate_tensor
    keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= rate
    return branch * keep.to(branch.dtype) / (1.0 - rate)  # type: ignore[operator]
