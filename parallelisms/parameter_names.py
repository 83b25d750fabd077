"""Names of parameters and blocks, without the wrappers of their modules."""

from typing import cast

from torch import nn

from models.vit import Block

WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")  # DDP, compile, activation checkpointing


def canonical(name: str) -> str:
    """`module.blocks.0._orig_mod.mlp.up.weight` -> `blocks.0.mlp.up.weight`."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def blocks_of(model: nn.Module) -> list[Block]:
    """Return the transformer blocks of a ViT or of a stage of one."""
    return cast(list[Block], list(cast(nn.ModuleDict, model.blocks).values()))
