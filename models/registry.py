"""Which models there are, and what is known of each before one is built. No torch here: a configuration is
checked before anything starts.

A new model is a file in models/ and a line below: CONTRIBUTING.md, "Adding a model".
"""

from dataclasses import dataclass

from config import Config, Model, Parallelism
from errors import refuse

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


def check_model(config: Config) -> None:
    """Raise ConfigError for settings of the model that cannot work, or that it has no way to be split for."""
    registered = MODELS[config.model.name]
    _check_splits(config.parallelism, registered)
    if registered.tokens:
        _check_transformer(config.model)
    else:
        _check_grid_model(config, registered)
    _check_conditions(config, registered)
    if config.lora.enable:
        _check_lora(config)


def _check_splits(parallelism: Parallelism, registered: Registered) -> None:
    """Axes of the mesh that the model has no plan for."""
    method = parallelism.context_parallel_method
    for axis, split in {"context": method, "tensor": "tp", "pipeline": "pp"}.items():
        key = f"{axis}_parallel_degree"
        if (degree := getattr(parallelism, key)) == 1 or split in registered.splits:
            continue
        if "tiles" in registered.splits:
            fix = "set this to 1 and parallelism.domain_parallel_tiles instead"
            refuse(f"parallelism.{key}", degree, f"{registered.label} is split by its grid; {fix}")
        methods = [split for split in registered.splits if split in CONTEXT]
        if axis == "context" and methods:
            reason = f"{registered.label} cannot be split so; valid: {', '.join(methods)}"
            refuse("parallelism.context_parallel_method", method, reason)
        refuse(f"parallelism.{key}", degree, f"{registered.label} cannot be split so; set this to 1")


def _check_transformer(model: Model) -> None:
    if model.dim % model.num_heads:
        choices = [n for n in range(1, model.dim + 1) if model.dim % n == 0 and model.dim // n >= 8]
        near = sorted(choices or [1], key=lambda n: abs(n - model.num_heads))[:3]
        reason = f"does not divide model.dim = {model.dim}; near ones do: {near}"
        refuse("model.num_heads", model.num_heads, reason)
    if model.position == "sincos" and model.dim % 4:
        refuse("model.dim", model.dim, 'model.position = "sincos" needs a multiple of 4')
    if model.position == "rotary" and (model.dim // model.num_heads) % 4:
        reason = 'model.position = "rotary" needs heads whose size, dim / num_heads, is a multiple of 4'
        refuse("model.num_heads", model.num_heads, reason)
    needs_eights = model.attention_backend not in ("auto", "sdpa", "math")
    if needs_eights and (model.dim // model.num_heads) % 8:
        reason = f"{model.attention_backend} needs heads whose size, dim / num_heads, is a multiple of 8"
        refuse("model.num_heads", model.num_heads, reason)


def _check_grid_model(config: Config, registered: Registered) -> None:
    mode = config.activation_checkpoint.mode
    if mode in ("selective", "every_n_blocks"):
        reason = f'for the blocks of a ViT; with model.name = "{config.model.name}" valid: none, full, '
        refuse("activation_checkpoint.mode", mode, f"{reason}memory_budget")
    if config.float8.enable:
        reason = f"multiplies the matrices of a ViT, {registered.label} has none; set it to false"
        refuse("float8.enable", True, reason)


def _check_conditions(config: Config, registered: Registered) -> None:
    """What the norms of blocks are told."""
    conditions, key = list(config.model.conditions), "model.conditions"
    if not conditions:
        return
    for name in conditions:
        if conditions.count(name) > 1:
            refuse(key, conditions, f"{name!r} is listed twice; name it once")
    if not registered.conditioned:
        reason = f"are for the norms of a ViT; {registered.label} takes data.forcings: set this to []"
        refuse(key, conditions, reason)
    if "lead_time" in conditions and max(config.training.rollout_steps, default=1) == 1:
        reason = "one step has the lead 0 alone, and nothing is learned of others; set training.rollout_steps"
        refuse(key, conditions, f'{reason}, or take "lead_time" out')
    if config.parallelism.pipeline_parallel_degree > 1:
        reason = "do not travel from one stage of a pipeline to the next; set this to []"
        refuse(key, conditions, f"{reason}, or parallelism.pipeline_parallel_degree to 1")
    if config.activation_checkpoint.mode == "every_n_blocks":
        reason = 'differ from block to block, and "every_n_blocks" runs several as one; use "full"'
        refuse("activation_checkpoint.mode", "every_n_blocks", f"model.conditions = {conditions} {reason}")


def _check_lora(config: Config) -> None:
    """Adapters need matrices of a trained ViT to stand beside."""
    lora, model = config.lora, config.model
    if model.name != "vit":
        reason = f'adapts the matrices of a ViT, and model.name = "{model.name}" has none; set this to false'
        refuse("lora.enable", True, reason)
    if not config.checkpoint.initial_load_path:
        reason = "adapts a trained model; name its run in checkpoint.initial_load_path"
        refuse("lora.enable", True, reason)
    if config.float8.enable:
        refuse("float8.enable", True, "swaps the matrices that lora.enable adapts; set one of them to false")
    if lora.rank >= model.dim:
        refuse("lora.rank", lora.rank, f"is thin beside model.dim = {model.dim}; take less")
    parts = {"modulation": model.conditions, "position": model.position in ("learned", "spherical")}
    for name, there in parts.items():
        if name in lora.also_train and not there:
            reason = f"this model has no {name} that could train; take it out"
            refuse("lora.also_train", list(lora.also_train), reason)
