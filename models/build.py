"""The model that a configuration describes."""

from importlib import import_module

import torch

from config import Model
from models.registry import MODELS
from models.weather_model import WeatherModel


def build_model(
    model: Model, num_variables: int, num_further: int, grid_shape: tuple[int, int], periodic: bool
) -> WeatherModel:
    """On the meta device: no memory is taken before a rank knows which part of it is its own.

    The input is the state of `num_variables` and `num_further` channels (older states, conditions), on
    `grid_shape` latitudes and longitudes. ConfigError for a grid that does not go with the model.
    """
    known = MODELS[model.name]
    module, _, name = (known.conditioned if model.conditions else known.built_by).rpartition(".")
    builder = getattr(import_module(f"models.{module}"), name)
    with torch.device("meta"):
        return builder(num_variables + num_further, num_variables, grid_shape, model, periodic)
