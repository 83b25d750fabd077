"""The model that a configuration describes: each maps what `from_fields` makes of fields."""

import torch

from config import Model
from models.conditioning import ConditionedTransformer
from models.unet import UNet
from models.vit import VisionTransformer

WeatherModel = VisionTransformer | UNet


def build_model(
    model: Model, num_variables: int, num_further: int, grid_shape: tuple[int, int], periodic: bool
) -> WeatherModel:
    """On the meta device: no memory is taken before a rank knows which part of it is its own.

    The input is the state of `num_variables` and `num_further` channels (older states, conditions), on
    `grid_shape` latitudes and longitudes. ValueError for a grid that is too small for it.
    """
    inputs = num_variables + num_further
    with torch.device("meta"):
        if model.name == "unet":
            return UNet(inputs, num_variables, grid_shape, model.width, model.levels, periodic=periodic)
        kind = ConditionedTransformer if model.conditions else VisionTransformer
        return kind(inputs, num_variables, grid_shape, model, periodic)
