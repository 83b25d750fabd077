"""A parameter's own name, whatever wraps its module, and the blocks of a model or of a stage of it."""

from typing import cast

from torch import nn

from models.vit import Block

WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")  # DDP, compile, activation checkpointing


def canonical(name: str) -> str:
    """`blocks.0._checkpoint_wrapped_module.mlp.up.weight` -> `blocks.0.mlp.up.weight`."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def blocks_of(model: nn.Module) -> list[Block]:
    """The transformer blocks of a ViT or of a stage of one."""
    return cast(list[Block], list(cast(nn.ModuleDict, model.blocks).values()))
