"""Which models there are, and what is known of each before one is built. No torch here: a configuration is
checked before anything starts.

A new model is a file in models/ and a line below: CONTRIBUTING.md, "Adding a model".
"""

from dataclasses import dataclass

CONTEXT = ("ulysses", "all_gather", "ring")  # parallelism.context_parallel_method


@dataclass(frozen=True)
class Registered:
    """`settings` are the keys of [model] that its weights do not work without; others change speed or
    training. `splits` are ways to cut a sample or the model: "tp", "pp", "tiles", or methods of context
    parallelism; data parallelism, checkpointing of whole blocks and compile are everyone's.
    """

    label: str  # what messages call it
    built_by: str  # "module.function" in models/: (in_channels, out_channels, grid_shape, Model, periodic)
    splits: tuple[str, ...]
    settings: tuple[str, ...]
    tokens: bool = True  # what goes in: patches as tokens (TokenModel), or the grid itself (GridModel)
    conditioned: str = ""  # as built_by, with model.conditions; empty: it cannot be told any
    planned: bool = False  # whether planning/ has its closed forms; --dry_run measures any


ALL = ("predict", "noise_dim", "conserve")
TOKENS = ("patch_size", "dim", "num_layers", "num_heads", "mlp_dim", "position", "position_degree")
TOKENS += ("qkv_bias", "qk_norm", *ALL)

MODELS = {
    "vit": Registered(
        "a ViT",
        "vit.VisionTransformer",
        ("tp", "pp", *CONTEXT),
        (*TOKENS, "conditions"),
        conditioned="conditioning.ConditionedTransformer",
        planned=True,
    ),
    "unet": Registered("a U-Net", "unet.build_unet", ("tiles",), ("width", "levels", *ALL), tokens=False),
    "swin": Registered("a Swin", "swin.SwinTransformer", ("tp", "pp", "ulysses"), (*TOKENS, "window_size")),
}
