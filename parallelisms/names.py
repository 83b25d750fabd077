"""A parameter's own name, whatever wraps its module."""

WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")  # DDP, compile, activation checkpointing


def canonical(name: str) -> str:
    """`blocks.0._checkpoint_wrapped_module.mlp.up.weight` -> `blocks.0.mlp.up.weight`."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
