"""The model that a configuration describes: every one maps pieces of fields, as `from_fields` cuts them."""

import torch

from config import Model
from models.unet import UNet
from models.vit import VisionTransformer

WeatherModel = VisionTransformer | UNet


def build_model(
    model: Model, num_variables: int, num_conditions: int, grid_shape: tuple[int, int], periodic: bool
) -> WeatherModel:
    """On the meta device: no memory is taken before a rank knows which part of it is its own.

    The input is the state of `num_variables` and `num_conditions` further channels, on `grid_shape`
    latitudes and longitudes. ValueError for a grid that is too small for it.
    """
    inputs = num_variables + num_conditions
    with torch.device("meta"):
        if model.name == "unet":
            return UNet(inputs, num_variables, grid_shape, model.width, model.levels, periodic=periodic)
        return VisionTransformer(
            inputs,
            num_variables,
            grid_shape,
            model.patch_size,
            model.dim,
            model.num_layers,
            model.num_heads,
            model.mlp_dim,
            periodic=periodic,
            position=model.position,
            qkv_bias=model.qkv_bias,
            qk_norm=model.qk_norm,
            stochastic_depth=model.stochastic_depth,
            attention_backend=model.attention_backend,
        )
