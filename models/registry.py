"""Registry of models: the abilities of each, and the checks of their settings.

No torch is imported here: a configuration is checked before anything starts. A new model is a file in models/
and an entry of MODELS: docs/models.md, "Adding a model".
"""

from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING

from config import Config, Model
from errors import nearest, refuse

if TYPE_CHECKING:
    from models.weather_model import WeatherModel

CONTEXT = ("ulysses", "all_gather", "ring")  # parallelism.context_parallel_method
# Keys of [model] that change speed or training, but not the meaning of trained weights.
HARMLESS = ("attention_backend", "stochastic_depth")


@dataclass(frozen=True)
class Registered:
    """An architecture. `builder` is "module:function", with the arguments of `build_model`'s call.

    splits: ways to shard a sample or the model: "tp", "pp", "tiles", or methods of context parallelism. All
    models have data parallelism, checkpointing of whole blocks and compile.
    unused: keys of [model] that the architecture does not read; all others, except those in HARMLESS, are
    part of a checkpoint's identity.
    """

    label: str  # its name in messages
    builder: str
    splits: tuple[str, ...]
    unused: tuple[str, ...] = ()
    has_tokens: bool = True  # its input is patches as tokens (TokenModel), or the grid itself (GridModel)
    planned: bool = False  # planning/ has closed forms for it; --dry_run measures any model

    @property
    def settings(self) -> tuple[str, ...]:
        """Keys of [model] without which the weights have no meaning."""
        excluded = ("name", *HARMLESS, *self.unused)
        return tuple(field.name for field in fields(Model) if field.name not in excluded)


VIT_KEYS = ("patch_size", "dim", "num_layers", "num_heads", "mlp", "mlp_dim", "position", "attention_windows")
VIT_KEYS += ("qk_norm",)
MODELS = {
    "vit": Registered(
        "a ViT", "models.vit:VisionTransformer", ("tp", "pp", *CONTEXT), ("width", "levels"), planned=True
    ),
    "unet": Registered("a U-Net", "models.unet:UNet", ("tiles",), VIT_KEYS, has_tokens=False),
}


def registered(name: str) -> Registered:
    """Return the registered entry of a model, or one for a function "package.module:build", which has the
    arguments of those in models/ and may have attributes `splits` and `has_tokens` (default: none, False).

    Raises ConfigError if there is no such model.
    """
    if name in MODELS:
        return MODELS[name]
    module, colon, function = name.partition(":")
    if not colon:
        refuse("model.name", name, f'{nearest(name, MODELS)}; a model of your own is "package.module:build"')
    try:
        builder = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        refuse("model.name", name, f"{error}; name a function of a module on PYTHONPATH")
    splits, has_tokens = getattr(builder, "splits", ()), getattr(builder, "has_tokens", False)
    return Registered(f"the model {name}", name, tuple(splits), has_tokens=has_tokens)


def build_model(
    model: Model, num_variables: int, num_more: int, grid_shape: tuple[int, int], periodic: bool
) -> "WeatherModel":
    """Return a model on the meta device: a rank allocates only its own part of it.

    Its input has `num_variables` channels of the state and `num_more` others (older states, forcings, noise)
    on `grid_shape` latitudes and longitudes. Raises ConfigError if the model does not support the grid.
    """
    import torch

    from models.weather_model import GridModel, TokenModel

    known = registered(model.name)
    module, _, function = known.builder.partition(":")
    with torch.device("meta"):
        builder = getattr(import_module(module), function)
        built = builder(num_variables + num_more, num_variables, grid_shape, model, periodic)
    if not isinstance(built, kind := TokenModel if known.has_tokens else GridModel):
        reason = f"returns a {type(built).__name__}, not a {kind.__name__} of models/weather_model.py"
        refuse("model.name", model.name, reason)
    return built


def check_model(config: Config) -> None:
    """Raise ConfigError for invalid settings of the model, or parallelism that it does not support."""
    model, parallelism, known = config.model, config.parallelism, registered(config.model.name)
    # -- degrees of parallelism
    method = "tiles" if "tiles" in known.splits else parallelism.context_parallel_method
    for axis, split in {"context": method, "tensor": "tp", "pipeline": "pp"}.items():
        key = f"{axis}_parallel_degree"
        if (degree := getattr(parallelism, key)) == 1 or split in known.splits:
            continue
        if axis == "context" and (methods := [split for split in known.splits if split in CONTEXT]):
            reason = f"{known.label} cannot be split so; valid: {', '.join(methods)}"
            refuse("parallelism.context_parallel_method", method, reason)
        fix = "1, and parallelism.context_parallel_degree instead" if method == "tiles" else "1"
        refuse(f"parallelism.{key}", degree, f"{known.label} cannot be split so; set this to {fix}")
    # -- a model of tokens: heads, windows
    if known.has_tokens:
        if model.dim % model.num_heads:
            choices = [n for n in range(1, model.dim + 1) if model.dim % n == 0 and model.dim // n >= 8]
            near = sorted(choices or [1], key=lambda n: abs(n - model.num_heads))[:3]
            reason = f"does not divide model.dim = {model.dim}; near ones do: {near}"
            refuse("model.num_heads", model.num_heads, reason)
        pinned = model.attention_backend if model.attention_backend not in ("auto", "sdpa", "math") else ""
        multiples = {
            'model.position = "rotary"': 4 if model.position == "rotary" else 1,
            pinned: 8 if pinned else 1,
        }
        for feature, multiple in multiples.items():
            if (model.dim // model.num_heads) % multiple:
                reason = f"{feature} needs a head size, dim / num_heads, that is a multiple of {multiple}"
                refuse("model.num_heads", model.num_heads, reason)
        if model.attention_windows and parallelism.context_parallel_degree > 1 and method != CONTEXT[0]:
            reason = "does not keep the tokens of a window on one rank, and model.attention_windows is set"
            refuse("parallelism.context_parallel_method", method, f'{reason}; use "{CONTEXT[0]}"')
    # -- a model of the grid: nothing that is for blocks of a ViT
    else:
        mode = config.activation_checkpoint.mode
        if mode in ("selective", "every_n_blocks"):
            reason = f'for the blocks of a ViT; with model.name = "{model.name}" valid: none, full'
            refuse("activation_checkpoint.mode", mode, reason)
        if config.float8.enable:
            reason = f"multiplies the matrices of a ViT, {known.label} has none; set it to false"
            refuse("float8.enable", True, reason)
    # -- adapters
    lora = config.lora
    if not lora.rank:
        return
    if model.name != "vit":
        reason = f'adapts the matrices of a ViT, and model.name = "{model.name}" has none; set lora.rank = 0'
        refuse("lora.rank", lora.rank, reason)
    if not config.checkpoint.initial_load_path:
        reason = "adapts a trained model; name its run in checkpoint.initial_load_path"
        refuse("lora.rank", lora.rank, reason)
    if config.float8.enable:
        refuse(
            "float8.enable", True, "swaps the matrices that lora.rank adapts; set it to false, or that to 0"
        )
    if (degree := config.parallelism.tensor_parallel_degree) > 1:
        reason = "does not shard the adapters of lora.rank; set it to 1, all other kinds of parallelism do"
        refuse("parallelism.tensor_parallel_degree", degree, reason)
    if lora.rank >= model.dim:
        refuse("lora.rank", lora.rank, f"must be smaller than model.dim = {model.dim}")
    if "position" in lora.also_train and model.position != "learned":
        reason = "this model has no learned positions; remove it from the list"
        refuse("lora.also_train", list(lora.also_train), reason)
