"""Assembly of a model from a configuration, for training, forecasts, dry runs and tests."""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from config import ActivationCheckpoint, Config
from datasets.channels import Channels
from datasets.conditions import Conditions
from datasets.grid import Grid, area_weights
from datasets.normalization import Normalizer
from datasets.selection import Selection
from datasets.statistics import Statistics
from models.attention import preferred_backend, use_backend
from models.lora import apply_lora, count_parameters
from models.registry import build_model
from models.weather_model import TokenModel, WeatherModel
from parallelisms.mesh import Mesh
from parallelisms.parallelize import ParallelModel, Recipe, parallelize
from training.conservation import build_conservation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fields:
    """Description of the data for a model: V variables and S constant fields on H x W points."""

    variables: Sequence[str]
    grid: Grid
    static: Sequence[np.ndarray]  # (H, W) each
    statistics: Statistics

    @classmethod
    def of(cls, selection: Selection, statistics: Statistics) -> "Fields":
        return cls(selection.variables, selection.archive.grid, list(selection.static.values()), statistics)

    @classmethod
    def standard(cls, config: Config, grid: Grid, num_variables: int) -> "Fields":
        """Return fields that need no data: variables of mean 0 and deviation 1, constant fields of zeros."""
        ones, nothing = np.ones(num_variables), np.zeros(0, "datetime64[s]")
        mean_field = np.zeros((num_variables, *grid.shape), np.float32)
        static = [np.zeros(grid.shape) for _ in config.data.static_variables]
        names = [f"variable {number}" for number in range(num_variables)]
        return cls(names, grid, static, Statistics(0 * ones, ones, ones, mean_field, nothing, ""))


@dataclass
class Assembly:
    """A model on this rank, and the conversions between it and physical fields."""

    meta_model: WeatherModel  # knows grids and patches; its parameters are those of `model`
    num_parameters: int  # of the whole model
    model: ParallelModel
    normalizer: Normalizer
    conditions: Conditions


def assemble(
    config: Config,
    fields: Fields,
    mesh: Mesh,
    device: torch.device,
    for_training: bool = True,
    memory: AbstractContextManager | None = None,
) -> Assembly:
    """Return this rank's part of the model that `config` describes, with weights from (seed, name).

    memory: context in which the model is allocated, without values: a dry run's FakeTensorMode.
    """
    training = config.training
    # -- conversions between physical fields and the model's input and output
    channels = Channels.of(config.data, config.model.noise_dim)
    conditions = Conditions(fields.static, channels, fields.grid).to(device)
    names, area = channels.variables, area_weights(fields.grid.latitude)
    conservation = build_conservation(config.model.conserve, names, fields.statistics, area)
    normalizer = Normalizer(fields.statistics, config.model.predict, channels, conservation).to(device)
    # -- the whole model, on the meta device
    num_more = len(channels.inputs) - len(names)
    meta_model = build_model(config.model, len(names), num_more, fields.grid.shape, fields.grid.periodic)
    if config.lora.rank:
        apply_lora(meta_model, config.lora)
        if for_training:
            trained, total = count_parameters(meta_model)
            logger.info(f"LoRA: {trained:,} of {total:,} parameters train ({trained / total:.2%})")
    # Counted before they are sharded.
    num_parameters = sum(p.numel() for p in meta_model.parameters())
    dtype = getattr(torch, training.mixed_precision_param)
    if isinstance(meta_model, TokenModel):
        backend = config.model.attention_backend
        if backend == "auto":
            head_dim = config.model.dim // config.model.num_heads
            window_tokens = max(map(math.prod, meta_model.windows), default=meta_model.num_tokens)
            backend = preferred_backend(device, dtype, window_tokens, head_dim)
        use_backend(meta_model, backend)
    # -- this rank's part of it
    recipe = Recipe(
        config.parallelism,
        # A forecast has no backward pass, so that nothing is stored for one.
        config.activation_checkpoint if for_training else ActivationCheckpoint(),
        config.compile,
        config.float8,
        param_dtype=dtype,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
    )
    seed = None if memory else training.seed
    model = parallelize(meta_model, mesh, device, seed, recipe, memory)
    if model.pipeline and for_training:
        micro_batches = training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
        model.pipeline.schedule(config.parallelism.pipeline_parallel_schedule, micro_batches)
    return Assembly(meta_model, num_parameters, model, normalizer, conditions)
