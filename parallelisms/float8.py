"""float8 training through torchao: matrices of the blocks multiply in float8, weights stay as they are."""

import importlib.util

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import Float8
from errors import ConfigError

TENSORWISE, ROWWISE = (8, 9), (9, 0)  # CUDA compute capabilities that have these matmuls
MULTIPLE = 16  # of both features: cuBLAS has no float8 matmul for others


def apply_float8(
    model: nn.Module, float8: Float8, device_type: str, tensor_parallel_degree: int = 1
) -> list[str]:
    """Swaps Linear layers for float8 ones, in place, under the same names; returns the names of those layers.

    Those are the layers in `model.blocks` whose numbers of features, in and out, are at least
    `filter_min_features` and multiples of 16 on every tensor-parallel rank; embedding and head never are.
    Comes before tensor parallelism: the new layer would not have the hooks that it puts on the old one.
    `emulate` rounds to float8 and multiplies in the parameters' precision: the numbers without the speed.
    "auto" takes the recipe that a layer is marked with (parallelisms/measured_choices.py), or "tensorwise".
    Raises ConfigError where the machine or the combination cannot do it, or no layer is left.
    """
    recipe, gather = float8.recipe, float8.enable_fsdp_float8_all_gather
    check_float8(recipe, float8.emulate, gather, device_type)
    names = float8_layers(model, float8.filter_min_features, tensor_parallel_degree)
    chosen = {name: marked_recipe(model, name) if recipe == "auto" else recipe for name in names}
    for one in sorted(set(chosen.values()) - {"none"}):
        swapped = [name for name in names if chosen[name] == one]
        convert(model, swapped, one, float8.emulate, gather)
    return [name for name in names if chosen[name] != "none"]


def convert(
    model: nn.Module, names: list[str], recipe: str, emulate: bool, float8_all_gather: bool = False
) -> None:
    """torchao's swap of the layers `names`; takes seconds to import it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", emulate)
    object.__setattr__(config, "enable_fsdp_float8_all_gather", float8_all_gather)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def mark_recipe(model: nn.Module, name: str, recipe: str) -> None:
    """Says what "auto" means for a layer; "none": it stays as it is. Stages of a pipeline keep the mark."""
    model.get_submodule(name).float8_recipe = recipe  # type: ignore[assignment]


def marked_recipe(model: nn.Module, name: str) -> str:
    return str(getattr(model.get_submodule(name), "float8_recipe", "tensorwise"))


def float8_layers(model: nn.Module, filter_min_features: int, tensor_parallel_degree: int) -> list[str]:
    """The names of the layers that `apply_float8` swaps. ConfigError where there is none."""
    multiple = MULTIPLE * tensor_parallel_degree
    names = [name for name in linear_names(model) if fits(model, name, filter_min_features, multiple)]
    if not names:
        raise ConfigError(
            f"float8.filter_min_features = {filter_min_features}: no layer of the blocks has so many "
            f"features in and out and multiples of {multiple}; lower it or set float8.enable = false"
        )
    return names


def linear_names(model: nn.Module) -> list[str]:
    """The Linear layers of the blocks, by their full names."""
    named = model.named_modules()
    return [name for name, m in named if isinstance(m, nn.Linear) and name.startswith("blocks.")]


def fits(model: nn.Module, name: str, min_features: int, multiple: int) -> bool:
    """Small matrices lose more by scaling than they gain; others have no float8 matmul."""
    features = tuple(model.get_submodule(name).weight.shape)  # type: ignore[union-attr]
    return min(features) >= min_features and all(n % multiple == 0 for n in features)


def check_float8(recipe: str, emulate: bool, enable_fsdp_float8_all_gather: bool, device_type: str) -> None:
    """Raises ConfigError, with the fix, where this machine or this combination cannot do it."""
    if enable_fsdp_float8_all_gather and recipe != "tensorwise":
        has = "may choose" if recipe == "auto" else "has"
        raise ConfigError(
            f'float8.enable_fsdp_float8_all_gather = true: "{recipe}" {has} more scales than a tensor; '
            'set it to false or float8.recipe = "tensorwise"'
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "float8.enable = true: the package torchao is not installed; pip install -r requirements.txt"
        )
    reason = "" if emulate else _missing(recipe, device_type)
    if reason:
        raise ConfigError(f"float8.enable = true: {reason}; set it to false or float8.emulate = true")


def can_run(recipe: str, device_type: str) -> bool:
    return not _missing(recipe, device_type)


def _missing(recipe: str, device_type: str) -> str:
    if device_type != "cuda" or not torch.cuda.is_available():
        return f"needs a CUDA device and the run is on {device_type}"
    needed = ROWWISE if recipe.startswith("rowwise") else TENSORWISE
    capability = torch.cuda.get_device_capability()
    if capability < needed:
        have, need = (".".join(map(str, version)) for version in (capability, needed))
        return f'recipe "{recipe}" needs compute capability {need} and this GPU has {have}'
    return ""


def precompute_float8_scales(model: nn.Module) -> None:
    """The scales of all sharded float8 weights in one all-reduce, not one each in the next forward.

    For after each optimiser step when the all-gather is float8; does nothing without such weights.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def plain_weight(weight: Tensor) -> Tensor:
    """The tensor inside a weight that FSDP gathers in float8, sharded as it is; any other tensor itself.

    torchao wraps such a shard in a class of its own, which cannot be saved in a checkpoint.
    """
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    inner = getattr(local, "_tensor", None)
    if not isinstance(weight, DTensor) or inner is None:
        return weight
    whole = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(inner, weight.device_mesh, weight.placements, run_check=False, **whole)
