"""Activation checkpointing: what a block keeps for its backward pass, and what it computes again.

Sizes are in units of T d: tokens x width numbers of the compute dtype, derived in
docs/activation_checkpointing.md. Every mode replaces `forward` on the instance: no module is wrapped and no
name changes.
"""

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from config import ActivationCheckpoint
from models.vit import StochasticDepth
from models.weather_model import TokenModel

MATMULS = {"aten::mm", "aten::addmm", "aten::linear", "aten::_scaled_mm"}
# By name, not by object: packages and torch versions differ in which of these exist.
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
    "rossby::ring_attention",  # its sends are not made again either
}


def apply_activation_checkpoint(
    model: TokenModel, settings: ActivationCheckpoint, *, compiled: bool = False
) -> None:
    """Changes what the blocks of `model` keep, in place; before compile and before FSDP.

    none: all that autograd asks for; full: each block's input; every_n_blocks: the input of every n-th block,
    n blocks recomputed as one; selective: outputs of matmuls and of attention; memory_budget: the compiler's
    own choice, from 0 (as full) to 1 (as none). That budget is a setting of the whole process: the last call
    wins. `compiled`: whether the blocks will be. Comes after tensor parallelism: it looks for DTensors.
    """
    mode, every_n_blocks = settings.mode, settings.every_n_blocks
    assert compiled or mode != "memory_budget", "only the compiler can keep a budget"
    functorch_config.activation_memory_budget = settings.memory_budget if mode == "memory_budget" else 1.0
    if mode == "full" and compiled and any(isinstance(p, DTensor) for p in model.parameters()):
        # Under tensor parallelism torch 2.13 counts the mesh, which a recomputed collective needs, among the
        # saved tensors ("expected all tensors_saved_with_vc_check to be Tensors"): recompute the compiled
        # block from outside.
        mode, every_n_blocks = "every_n_blocks", 1
    if mode == "every_n_blocks":
        model.forward = MethodType(partial(_forward_in_segments, every_n=every_n_blocks), model)
    elif mode in ("full", "selective"):
        for block in model.blocks.values():
            block.forward = MethodType(_forward_full if mode == "full" else _forward_selective, block)
    if mode in ("full", "every_n_blocks", "selective"):
        for module in model.modules():
            if isinstance(module, StochasticDepth):
                module.forward = MethodType(_forward_keeping_mask, module)


# -- one block at a time: `forward` is a function of this module bound to the block, so that compile sees the
#    same code on every block and compiles it once


def _forward_full(block: nn.Module, *inputs: Tensor) -> Tensor:
    """(B, T, D) -> (B, T, D); keeps tokens (and their modulation) alone."""
    return checkpoint(partial(type(block).forward, block), *inputs, use_reentrant=False)


def _forward_selective(block: nn.Module, *inputs: Tensor) -> Tensor:
    """(B, T, D) -> (B, T, D); keeps what comes in and what matmuls and attention gave."""
    # A float8 matmul saves its input only after it has run, so it runs again unless its output is kept.
    contexts = _keep_all_but_last if type(block.mlp.down) is nn.Linear else _keep_all  # type: ignore[union-attr]
    forward = partial(type(block).forward, block)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)


def _keep_all_but_last() -> Any:
    return create_selective_checkpoint_contexts(KeepMatmuls(kept=3))


def _keep_all() -> Any:
    return create_selective_checkpoint_contexts(KeepMatmuls(kept=4))


class KeepMatmuls:
    """The policy of one pass through a block: keep attention and the first `kept` of its four matmuls.

    The fourth (`mlp.down`) ends in the next block's input, which is kept anyway, and the recomputation ends
    when it has that matmul's input: neither its output nor a second run of it is ever needed.
    """

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.seen = {False: 0, True: 0}  # is_recompute -> matmuls so far; torch 2.11 asks in both passes

    def __call__(
        self, ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = op.name().partition(".")[0]  # "aten::mm.out" -> "aten::mm"
        if name in MATMULS:
            self.seen[ctx.is_recompute] += 1
            keep = self.seen[ctx.is_recompute] <= self.kept
        else:
            keep = name in ATTENTIONS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _forward_keeping_mask(module: nn.Module, branch: Tensor) -> Tensor:
    """Keeps the mask of stochastic depth, one number a sample, out of the recomputation.

    The second mask comes after `mlp.down`: to get it back, that matmul would have to run again. The compiler
    sees this itself.
    """
    if torch.compiler.is_compiling():
        return type(module).forward(module, branch)
    with saved_tensors_hooks(_as_it_is, _as_it_is):  # the innermost hooks win over those of checkpoint
        return type(module).forward(module, branch)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


# -- n blocks as one


class Segments:
    """Stands in for `model.blocks` while the model runs; its values are segments of n blocks."""

    def __init__(self, blocks: Iterable[nn.Module], every_n: int) -> None:
        self.blocks, self.every_n = list(blocks), every_n

    def values(self) -> list[Callable[..., Tensor]]:
        starts = range(0, len(self.blocks), self.every_n)
        segments = [self.blocks[start : start + self.every_n] for start in starts]
        return [partial(checkpoint, partial(_run, segment), use_reentrant=False) for segment in segments]


def _run(blocks: list[nn.Module], tokens: Tensor, *modulation: Tensor) -> Tensor:
    """(B, T, D) -> (B, T, D); each block is called as a module: its hooks and its compiled code take part.
    modulation: of a single block.
    """
    for block in blocks:
        tokens = block(tokens, *modulation)
    return tokens


def _forward_in_segments(model: nn.Module, x: Tensor, every_n: int) -> Tensor:
    """The model's own forward, which finds segments under the name `blocks`.

    An instance attribute hides the submodule of that name only while forward runs, so names of parameters and
    whoever walks through the modules never see a segment.
    """
    blocks = model.get_submodule("blocks")
    vars(model)["blocks"] = Segments(blocks.children(), every_n)
    try:
        return type(model).forward(model, x)
    finally:
        del vars(model)["blocks"]
