"""From a configuration to what computes: one assembly for training, forecasts, dry runs and tests."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from config import ActivationCheckpoint, Config
from datasets.conditions import Conditions
from datasets.grid import Grid, area_weights
from datasets.normalization import Normalizer
from datasets.selection import Selection
from datasets.statistics import Statistics
from datasets.variables import expand_levels
from models.attention import preferred_backend, use_backend
from models.build import build_model
from models.lora import apply_lora, share_that_trains, trained
from models.weather_model import TokenModel, WeatherModel
from parallelisms.measured_choices import Choices, choose_attention, choose_float8
from parallelisms.mesh import Mesh
from parallelisms.parallelize import LossPart, ParallelModel, parallelize
from parallelisms.parameter_names import canonical
from training.bad_steps import BadSteps
from training.conservation import build_conservation, build_kept, refuse_missing
from training.due import GlobalBatch, Rollouts, num_places
from training.ema import EMA
from training.fingerprints import Fingerprints
from training.gradients import LossScaler
from training.losses.penalties import penalty_of
from training.losses.weights import variable_weights
from training.no_checkpoints import Saves
from training.objective import Objective
from training.optimizers.build import build_optimizer
from training.optimizers.lr_schedules import learning_rate
from training.optimizers.noise_scale import build_noise_scale
from training.optimizers.trust_ratios import SharedSums
from training.replay import Replay
from training.state import Progress, TrainState
from training.update import Update, UpdateInBackward

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fields:
    """What a model has to know of the data: V variables and S constant fields on H x W points."""

    variables: Sequence[str]
    grid: Grid
    static: Sequence[np.ndarray]  # (H, W) each
    statistics: Statistics

    @classmethod
    def of(cls, selection: Selection, statistics: Statistics) -> "Fields":
        return cls(selection.variables, selection.archive.grid, list(selection.static.values()), statistics)

    @classmethod
    def standard(cls, config: Config, grid: Grid, num_variables: int) -> "Fields":
        """Of data that need not be there: variables of mean 0 and deviation 1, constant fields of zeros."""
        ones, nothing = np.ones(num_variables), np.zeros(0, "datetime64[s]")
        mean_field = np.zeros((num_variables, *grid.shape), np.float32)
        static = [np.zeros(grid.shape) for _ in config.data.static_variables]
        names = [f"variable {number}" for number in range(num_variables)]
        return cls(names, grid, static, Statistics(0 * ones, ones, ones, mean_field, nothing, nothing, ""))


@dataclass
class Assembly:
    """A model on this rank, and what stands between it and physical fields."""

    meta_model: WeatherModel  # knows grids and patches; its parameters are those of `model`
    num_parameters: int  # of the whole model
    model: ParallelModel
    normalizer: Normalizer
    conditions: Conditions
    fingerprints: Fingerprints


def assemble(
    config: Config,
    fields: Fields,
    mesh: Mesh,
    device: torch.device,
    run_folder: Path | None = None,
    for_training: bool = True,
    memory: AbstractContextManager | None = None,
) -> Assembly:
    """The model that `config` describes, cut for this rank, with weights from (seed, name).

    run_folder: of the run, which keeps the kernels and recipes that it has measured to be fastest, and which
    a forecast takes as they are; None: nothing is measured.
    memory: what the model gets its memory in, without values: a dry run's FakeTensorMode.
    """
    training = config.training
    told = (config.model.noise_dim, config.model.conditions)
    conditions = Conditions(fields.static, config.data.forcings, fields.grid, *told).to(device)
    names, rows = predicted(config), area_weights(fields.grid.latitude)
    refuse_missing([*config.model.conserve, *training.conserve], names, fields.statistics)
    conservation = build_conservation(config.model.conserve, names, fields.statistics, rows)
    normalizer = Normalizer(fields.statistics, config.model.predict, config.data.history, conservation)
    normalizer = normalizer.to(device)
    num_variables, shape = len(fields.variables), fields.grid.shape
    further = (config.data.history - 1) * num_variables + conditions.num_channels
    meta_model = build_model(config.model, num_variables, further, shape, fields.grid.periodic)
    if config.lora.enable:
        apply_lora(meta_model, config.lora)
        if for_training:
            logger.info("LoRA: %s", share_that_trains(meta_model))
    num_parameters = sum(p.numel() for p in meta_model.parameters())
    dtype = getattr(torch, training.mixed_precision_param)
    if isinstance(meta_model, TokenModel):
        backend = config.model.attention_backend
        use_backend(meta_model, preferred_backend(device, dtype) if backend == "auto" else backend)
    if run_folder and isinstance(meta_model, TokenModel):
        measured = (dtype, device, Choices(run_folder, fixed=not for_training))
        states = training.local_batch_size * training.members  # that the model takes at once
        if config.model.attention_backend == "auto":
            choose_attention(meta_model, states, mesh.degrees, *measured)
        if config.float8.enable and config.float8.recipe == "auto":
            settings = (config.float8, config.compile.enable)
            choose_float8(meta_model, states, mesh.degrees, *settings, *measured)
    model = parallelize(
        meta_model,
        mesh,
        device,
        None if memory else training.seed,
        config.parallelism,
        # A forecast keeps nothing for a backward.
        config.activation_checkpoint if for_training else ActivationCheckpoint(),
        config.compile,
        param_dtype=dtype,
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        float8=config.float8,
        memory=memory,
    )
    fingerprints = Fingerprints(model, config.training.fingerprint_steps)
    return Assembly(meta_model, num_parameters, model, normalizer, conditions, fingerprints)


def build_objective(config: Config, assembly: Assembly, area: np.ndarray) -> Objective:
    """What is minimised, area (H,); of how many micro-batches a pipeline's schedule is told too."""
    training, model, meta_model = config.training, assembly.model, assembly.meta_model
    weights = torch.tensor(area, dtype=torch.float32, device=model.device)
    kept = build_kept(training, predicted(config), weights, assembly.normalizer, meta_model, model)
    objective = Objective(
        penalty_of(training.loss),
        training.loss == "relative_l2",
        meta_model,
        model.shards,
        assembly.conditions,
        assembly.normalizer,
        weights,
        variable_weights(training.variable_weights, len(assembly.normalizer.mean)),
        training.weight_by_change,
        training.local_batch_size,
        Rollouts.of(training),
        config.data.step_hours * 3600,
        training.spectral_fraction,
        training.members,
        training.seed,
        kept,
    )
    objective.replay = build_replay(config, assembly, len(area))
    if config.compile.enable:
        objective.compile()
    if model.pipeline:
        parallelism = config.parallelism
        micro_batches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        schedule = parallelism.pipeline_parallel_schedule
        model.pipeline.schedule(schedule, micro_batches)
    return objective


def build_replay(config: Config, assembly: Assembly, rows: int) -> Replay | None:
    """Places for forecasts that training steps start from, where the run has some; rows: latitudes."""
    training, model = config.training, assembly.model
    if not training.replay_steps:
        return None
    channels = config.data.history * len(assembly.normalizer.mean)
    columns = assembly.meta_model.grid_shape[1]
    smallest = training.local_batch_size * model.mesh.degrees.dp
    window = (training.local_batch_size, channels, rows, columns)
    weights = training.rollout_weights or (1.0,) * training.replay_steps
    seconds = config.data.step_hours * 3600
    return Replay(num_places(training, smallest), smallest, window, seconds, model, weights)


def predicted(config: Config) -> list[str]:
    return expand_levels(config.data.variables, config.data.levels)


def build_run_state(config: Config, model: ParallelModel, replay: Replay | None = None) -> TrainState:
    """Optimiser, loss scaler and averages of a model whose weights are there; no step has been taken."""
    decay = config.training.ema_decay
    products = torch.float32 if config.training.mixed_precision_param == "float32" else torch.bfloat16
    optimizer = build_optimizer(model.own_parameters(), config.optimizer, sums_of(model), products)
    average = EMA(trained(model.parameters), decay) if decay else None
    scaler = LossScaler(enabled=config.training.mixed_precision_param == "float16")
    bad_steps = BadSteps(config.training.spike_threshold, config.training.max_skipped_steps, model.device)
    return TrainState(model.parameters, optimizer, scaler, average, Progress(), bad_steps, replay)


def sums_of(model: ParallelModel) -> SharedSums:
    """Over all ranks, of what each has of the model's parameters; ZeRO-1 has one rank update each."""
    degrees, own = model.mesh.degrees, model.own_parameters()
    names = [canonical(name) for name, _ in model.geometry.named_parameters()]
    return SharedSums(names, own, 1 if model.zero1 else degrees.world // degrees.pp, model.device)


def build_update(
    config: Config,
    model: ParallelModel,
    run: TrainState,
    saves: Saves,
    loss_part: LossPart,
    global_batch: GlobalBatch,
) -> Update | UpdateInBackward:
    """The way from gradients to weights that `config` asks for. ConfigError: gradients accumulate."""
    schedule = partial(learning_rate, config.optimizer, config.lr_scheduler, config.training.steps)
    parts = (model, run, saves, lambda step: schedule(global_batch.at(step), step), loss_part)
    accumulation = global_batch.most_micro_batches
    if config.optimizer.in_backward:
        return UpdateInBackward(*parts, accumulation)
    noise = build_noise_scale(model, config.training.local_batch_size, accumulation)
    return Update(*parts, config.training.max_norm, noise)
