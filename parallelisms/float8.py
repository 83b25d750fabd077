"""float8 training through torchao: matrices of the blocks multiply in float8, weights stay as they are."""

import importlib.util
import logging

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from config import Float8
from errors import ConfigError

logger = logging.getLogger("rossby")
CAPABILITY = (8, 9)  # lowest CUDA compute capability with float8 matmuls
MULTIPLE = 16  # of both features: cuBLAS has no float8 matmul for others


def apply_float8(
    model: nn.Module, float8: Float8, device_type: str, tensor_parallel_degree: int = 1
) -> list[str]:
    """Swap Linear layers for float8 ones, in place, under the same names; return the names of those layers.

    These are the layers in `model.blocks` with multiples of 16 features, in and out, on every tensor-parallel
    rank. Call before tensor parallelism, because a new layer does not have the hooks of the old one.
    On devices other than CUDA float8 is emulated: values are rounded to float8 and multiplied in high
    precision. Raises ConfigError if the machine cannot do it, or no layer is left.
    """
    check_float8(device_type)
    names = float8_layers(model, tensor_parallel_degree)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # takes seconds

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    if device_type != "cuda":
        logger.info("float8: emulated on %s: the numbers of a GPU, without its speed", device_type)
        object.__setattr__(config, "emulate", True)
    object.__setattr__(config, "enable_fsdp_float8_all_gather", float8.enable_fsdp_float8_all_gather)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
    return names


def float8_layers(model: nn.Module, tensor_parallel_degree: int) -> list[str]:
    """Return the names of the layers that `apply_float8` swaps. Raises ConfigError if there is none."""
    multiple = MULTIPLE * tensor_parallel_degree
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith("blocks.")
        and all(n % multiple == 0 for n in module.weight.shape)
    ]
    if not names:
        raise ConfigError(
            f"float8.enable = true: no layer of the blocks has multiples of {multiple} features in and out; "
            "choose another model.dim, or set it to false"
        )
    return names


def check_float8(device_type: str) -> None:
    """Raise ConfigError, with the fix, if this machine cannot do it."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "float8.enable = true: the package torchao is not installed; pip install -r requirements.txt"
        )
    if device_type == "cuda" and (capability := torch.cuda.get_device_capability()) < CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        reason = f"needs compute capability {need} and this GPU has {have}"
        raise ConfigError(f"float8.enable = true: {reason}; set it to false")


def precompute_float8_scales(model: nn.Module) -> None:
    """Compute the scales of all sharded float8 weights in one all-reduce, not one each in the next forward.

    Call after each optimizer step if the all-gather is in float8.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def plain_weight(weight: Tensor) -> Tensor:
    """Return the tensor inside a weight that FSDP gathers in float8, sharded alike; any other tensor itself.

    torchao wraps such a shard in a class of its own, which cannot be saved in a checkpoint.
    """
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    inner = getattr(local, "_tensor", None)
    if not isinstance(weight, DTensor) or inner is None:
        return weight
    mesh, placements, shape, stride = weight.device_mesh, weight.placements, weight.shape, weight.stride()
    return DTensor.from_local(inner, mesh, placements, run_check=False, shape=shape, stride=stride)
