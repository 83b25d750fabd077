"""Activation checkpointing: the tensors that a block saves for its backward pass or recomputes.

Sizes are in units of T d: tokens x width numbers of the compute dtype, derived in
docs/speed.md. A mode replaces `forward` on the instance, or sets how many blocks the model
recomputes as one: no module is wrapped and no name changes.
"""

from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from config import ActivationCheckpoint
from models.lora import AdaptedLinear
from models.vit import StochasticDepth
from parallelisms.degrees import segment_length

# By name, not by object: packages and torch versions differ in which of these exist.
MATMULS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::linear": 0,
    "aten::_scaled_mm": 0,
}  # index of the first factor
ATTENTIONS = {
    "aten::bmm",  # the two matmuls of the "math" kernel
    "aten::baddbmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_attention_math",
    "flash_attn::_flash_attn_forward",  # the package flash-attn
    "flash_attn_3::_flash_attn_forward",
    "flash_attn_3::fwd",
    "flex_attention",
    "rossby::ring_attention",  # its sends are not repeated either
}

THIN = 8  # out_features / in_features above which a matrix is thin, as in adapters; in an MLP it is 4


def apply_activation_checkpoint(
    model: nn.Module, settings: ActivationCheckpoint, *, compiled: bool = False
) -> None:
    """Change what the blocks of `model` save, in place; after tensor parallelism, before compile and FSDP.

    none: everything that autograd needs; full: the input of each block; every_n_blocks: the input of every
    n-th block, n of `segment_length`; selective: outputs of matmuls and attention. compiled: True if
    blocks will be compiled.
    """
    mode, blocks = settings.mode, list(model.get_submodule("blocks").children())
    every_n = segment_length(len(blocks))
    if mode == "full" and compiled and any(isinstance(p, DTensor) for p in model.parameters()):
        # Under tensor parallelism torch 2.13 saves the mesh, which a recomputed collective needs, as if it
        # were a tensor ("expected all tensors_saved_with_vc_check to be Tensors"). So the compiled block is
        # recomputed from outside.
        mode, every_n = "every_n_blocks", 1
    if mode == "every_n_blocks":
        model.checkpoint_every = every_n  # type: ignore[assignment]
    elif mode in ("full", "selective"):
        for block in blocks:
            block.forward = MethodType(_forward_full if mode == "full" else _forward_selective, block)
    for module in model.modules() if mode != "none" else ():
        if isinstance(module, StochasticDepth):
            module.forward = MethodType(_forward_saving_factors, module)


# `forward` is a function of this module bound to the block: compile sees the same code on every block, and
# compiles it once.


def _forward_full(block: nn.Module, *inputs: Tensor) -> Tensor:
    """(B, T, D) -> (B, T, D); saves tokens alone."""
    return checkpoint(partial(type(block).forward, block), *inputs, use_reentrant=False)  # type: ignore[reportReturnType]


def _forward_selective(block: nn.Module, *inputs: Tensor) -> Tensor:
    """(B, T, D) -> (B, T, D); saves inputs and the outputs of matmuls and attention."""
    # A float8 matmul saves its input only after it has run, so it runs again unless its output is saved.
    is_float8 = type(block.get_submodule("mlp.down")) not in (nn.Linear, AdaptedLinear)
    policy = _save if is_float8 else _save_unless_reducing
    contexts = partial(create_selective_checkpoint_contexts, policy)
    forward = partial(type(block).forward, block)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)  # type: ignore[reportReturnType]


def _save(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save outputs of attention and of all matmuls."""
    name = op.name().partition(".")[0]  # "aten::mm.out" -> "aten::mm"
    is_saved = name in MATMULS or name in ATTENTIONS
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _save_unless_reducing(
    ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save outputs of attention and of matmuls, except of matrices with more features in than out, and of
    thin ones: an adapter's output is as large as that of its matrix, and cheap to recompute.

    `mlp.down` has more features in than out. Its output is part of the next block's input, which is saved
    anyway, and recomputation stops at its input, so that it never runs again.
    """
    name = op.name().partition(".")[0]
    if name in MATMULS:
        first, second = args[MATMULS[name] : MATMULS[name] + 2]
        features, results = first.shape[-1], second.shape[0 if name == "aten::linear" else -1]
        if features > results or features * THIN < results:
            return CheckpointPolicy.PREFER_RECOMPUTE
    return _save(ctx, op, *args, **kwargs)


def _forward_saving_factors(module: nn.Module, branch: Tensor, factors: Tensor | None) -> Tensor:
    """Exclude the factors of stochastic depth, one number per sample, from recomputation.

    Those of the MLP come after `mlp.down`, which would have to run again for them. The compiler avoids this
    itself.
    """
    if is_compiling():
        return type(module).forward(module, branch, factors)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):  # the innermost hooks win
        return type(module).forward(module, branch, factors)
