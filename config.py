"""Every knob of Rossby: frozen, typed dataclasses, and nothing that reads or checks them.

A value is the default below < the file a config `extends` < the config file < the command line, all read by
command_line.py; config_checks.py refuses what cannot work together. A field's comment is its `--help`.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from models.registry import MODELS
from project_folder import in_project

DEFAULT_CONFIG = "train_configs/demo.toml"


@dataclass(frozen=True)
class Range:
    """Bounds of a number, inclusive unless `above` (the lower) or `below` (the upper) excludes them."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False  # whether inf is a value; everywhere else numbers are finite

    def admits(self, value: float) -> bool:
        if self.infinite and value == math.inf:
            return True
        reaches = value > self.low if self.above else value >= self.low
        return reaches and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'at least'} {self.low:g}"
        upper = f"{'below' if self.below else 'at most'} {self.high:g}"
        return lower if self.high in (math.inf, MOST, LARGEST) else f"{lower} and {upper}"


MOST = 10**9  # of anything that is counted or measured here: beyond it is a slip of the hand
Count = Annotated[int, Range(0, MOST)]
Positive = Annotated[int, Range(1, MOST)]
LARGEST = 1e30  # of a number that is not counted
NonNegative = Annotated[float, Range(0.0, LARGEST)]
AboveZero = Annotated[float, Range(0.0, LARGEST, above=True)]
# What memory is asked for by has tighter bounds.
Width = Annotated[int, Range(1, 65_536)]
Batch = Annotated[int, Range(1, 65_536)]
Layers = Annotated[int, Range(1, 4_096)]
Ranks = Annotated[int, Range(1, 1_000_000)]
Rest = Annotated[int, Range(-1, 1_000_000)]  # -1: what is left
Hours = Annotated[int, Range(1, 100_000)]
Steps = Annotated[int, Range(1, 100_000)]
Rollout = Annotated[int, Range(1, 1_000)]
Seconds = Annotated[int, Range(1, 10_000_000)]
Processes = Annotated[int, Range(0, 4_096)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Decay = Annotated[float, Range(0.0, 1.0, below=True)]  # 1 would never see a gradient
DType = Literal["float32", "bfloat16", "float16"]
if TYPE_CHECKING:
    ModelName = str
else:
    ModelName = Literal[tuple(MODELS)]


@dataclass(frozen=True)
class Job:
    config_file: str = DEFAULT_CONFIG  # the TOML file to run
    dump_folder: str = ""  # the run's folder; empty: outputs/<name of config_file> in the project's folder
    print_config: bool = False  # print the resolved configuration as TOML and end


@dataclass(frozen=True)
class Data:
    # "simulated" (generated on first use), or a Zarr store, NetCDF, HDF5 or GRIB file, folder, glob or URL
    path: str = "simulated"
    # options of the store at a URL: ["anon=true", "endpoint_url=https://host"]; secrets: in the environment
    storage_options: tuple[str, ...] = ()
    source: str = ""  # where these data come from, which is said where data.path cannot be read
    variables: tuple[str, ...] = ()  # predicted, WeatherBench2 names: "geopotential:500", "2m_temperature"
    levels: tuple[Positive, ...] = ()  # hPa; expands level variables named without one: "temperature"
    static_variables: tuple[str, ...] = ()  # input only, constant: "land_sea_mask", "geopotential_at_surface"
    static_path: str = ""  # a file that holds the static variables, regridded; empty: they are in data.path
    forcings: tuple[str, ...] = ()  # input only, computed: "toa_incident_solar_radiation", "sin_local_time"
    # which element of dimensions that analyses do not have: ["member=0", "run=2020-01-01"], a label each
    select: tuple[str, ...] = ()
    region: tuple[float, ...] = ()  # north, west, south, east in degrees: part of the grid; empty: all of it
    step_hours: Hours = 6  # lead time of one step of the model
    # states, step_hours apart, that the model sees; 2: the one before, too; input only, one is predicted
    history: Annotated[int, Range(1, 8)] = 1
    # first and last date, both included, a last one without an hour to its end: ["1979-01-01", "2017-12-31"]
    train_period: tuple[str, ...] = ()
    validation_period: tuple[str, ...] = ()  # the same; periods cannot overlap
    # the same, never trained on nor validated on; forecast.py and evaluate.py take it by default
    test_period: tuple[str, ...] = ()
    grid_shape: tuple[Count, Count] = (0, 0)  # latitudes, longitudes the data must have; [0, 0]: as they are
    # GiB up to which the fields of both periods are read once and kept in memory; inf: always
    cache_gib: Annotated[float, Range(0.0, MOST, infinite=True)] = 1.0
    # dates that statistics are computed from, in pairs one step apart; 0: every date of the training period
    statistics_dates: Count = 0
    # readers of a rank: threads for converted stores and fields in memory, else processes; 0: none
    num_workers: Processes = 0
    prefetch_factor: Annotated[int, Range(1, 4_096)] = 2  # batches that are read ahead; of processes, by each


@dataclass(frozen=True)
class Model:
    name: ModelName = "vit"  # docs/models.md; keys below say whose they are, a ViT's are a Swin's too
    patch_size: tuple[Width, Width] = (4, 4)  # ViT: latitudes x longitudes of one token
    dim: Width = 192  # ViT: width d of the residual stream
    num_layers: Layers = 4  # ViT: transformer blocks
    num_heads: Layers = 4  # ViT: attention heads; must divide dim
    mlp_dim: Annotated[int, Range(0, 1_048_576)] = 0  # ViT: hidden width of the MLP; 0: 4 x dim
    # Swin: rows x columns of tokens that attend to each other; half a window further on in every second block
    window_size: tuple[Width, Width] = (4, 8)
    # ViT: a vector a token is added, learned, of sines, or a learned sum of spherical harmonics; "rotary"
    # turns queries and keys by row and column
    position: Literal["learned", "sincos", "spherical", "rotary"] = "learned"
    # ViT: of the harmonics of "spherical", the largest; 16: down to 11 degrees of latitude
    position_degree: Annotated[int, Range(1, 64)] = 16
    qkv_bias: bool = True  # ViT: bias in the query, key and value projection
    qk_norm: bool = False  # ViT: normalise queries and keys per head: steadier at large learning rates
    # ViT: fraction of samples that skip the last block; earlier blocks are skipped by fewer
    stochastic_depth: Annotated[float, Range(0.0, 0.9)] = 0.0
    # ViT: kernel; "auto" measures which is fastest, "sdpa" lets torch choose, "math" is plain matmul
    attention_backend: Literal["auto", "sdpa", "cudnn", "flash", "flash3", "flash4", "flash_attn", "math"] = (
        "auto"
    )
    width: Width = 64  # U-Net: channels at the resolution of the grid; twice as many at each coarser level
    levels: Annotated[int, Range(1, 20)] = 4  # U-Net: how often the grid is halved
    predict: Literal["state", "change"] = "change"  # the next state, or its scaled change over one step
    # channels of Gaussian noise beside the input, by which members of an ensemble differ; 0: none
    noise_dim: Annotated[int, Range(0, 4_096)] = 0
    # ViT: "time_of_day", "day_of_year", "lead_time": what shifts and scales the norms of its blocks
    conditions: tuple[Literal["time_of_day", "day_of_year", "lead_time"], ...] = ()
    # "dry_mass", "total_water", or predicted variables, whose global mean no step changes: outputs are
    # shifted so that it stays; docs/losses.md
    conserve: tuple[str, ...] = ()


@dataclass(frozen=True)
class Optimizer:
    # LAMB and LARS (of SGD) suit large batches, Muon takes the matrices of blocks; docs/optimizers.md
    name: Literal["AdamW", "LAMB", "Muon", "SGD", "LARS"] = "AdamW"
    lr: AboveZero = 1e-3  # peak learning rate (at lr_reference_batch_size where that is set)
    beta1: Decay = 0.9  # AdamW (and what Muon leaves to it), LAMB: decay of the mean of gradients
    beta2: Decay = 0.95  # the same: decay of the mean of squared gradients
    eps: AboveZero = 1e-8  # the same: added to the root of the second moment
    momentum: Decay = 0.9  # SGD, LARS and Muon, which is usually given 0.95
    # of matrices (norms, biases and positions do not decay); decoupled, with SGD and LARS a part of gradients
    weight_decay: NonNegative = 0.05
    # LAMB, LARS: ceiling of a matrix's trust ratio, its norm over that of its step; inf: none
    trust_ratio_max: Annotated[float, Range(0.0, MOST, above=True, infinite=True)] = 10.0
    trust_coefficient: AboveZero = 1e-3  # LARS: by which trust ratios are multiplied
    # precision of both moments of matrices between steps: 8, 4 or 2.1 bytes a parameter
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    # update each parameter as soon as its gradient is there: less memory; no clipping, no accumulation
    in_backward: bool = False
    lr_scaling: Literal["linear", "sqrt"] = "linear"  # how lr grows from the reference to the global batch
    lr_reference_batch_size: Count = 0  # batch that lr was chosen for; 0: lr is used as it stands
    # ceiling of the scaled learning rate; inf: none
    lr_max: Annotated[float, Range(0.0, MOST, above=True, infinite=True)] = math.inf


@dataclass(frozen=True)
class LrScheduler:
    warmup_steps: Count = 100  # linear from 0
    warmup_fraction: Fraction = 0.0  # of the steps, in place of warmup_steps; 0: warmup_steps
    # to the last step; "sqrt" falls fast first and slowly in the end
    decay_type: Literal["cosine", "linear", "sqrt", "constant"] = "cosine"
    # of the steps, the last, in which it falls; 1: all after the warm-up; 0.2: warm-up, stable, decay
    decay_ratio: Fraction = 1.0
    min_lr_factor: Fraction = 0.0  # last learning rate over the peak
    restart_steps: tuple[Positive, ...] = ()  # steps after which a new stage begins, with warm-up and decay
    restart_lr_factors: tuple[AboveZero, ...] = ()  # peak of each later stage over the first's; []: all 1


@dataclass(frozen=True)
class Training:
    steps: Positive = 1000  # optimiser steps of the run
    seed: Annotated[int, Range(0, 10**12)] = 0  # weights and sample order are pure functions of it
    local_batch_size: Batch = 16  # samples a rank takes through the model at once
    # samples of an optimiser step, of all ranks; more than local_batch_size x ranks are accumulated; -1: none
    global_batch_size: Rest = -1
    # global batches of the stages of a run, ascending, [16, 32, 64], the last is global_batch_size: more
    # micro-batches are accumulated; []: the same throughout
    batch_ramp: tuple[Batch, ...] = ()
    # first training step of each later entry of batch_ramp; []: all have equal parts of the run
    batch_ramp_from_step: tuple[Positive, ...] = ()
    # of averaged weights, which validation (beside the raw ones) and forecasts then use; 0: none
    ema_decay: Decay = 0.0
    max_norm: NonNegative = 1.0  # clip the gradient norm to this; 0: no clipping
    mixed_precision_param: DType = "float32"  # precision of matmuls; float16 comes with a dynamic loss scaler
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"  # of gradients between ranks
    # area-weighted mean of squared, absolute or Huber errors, or of the almost fair CRPS of the members, or
    # the NERSC tutorial's unweighted |p-y|/|y|
    loss: Literal["mse", "mae", "huber", "crps", "relative_l2"] = "mse"
    # of the ensemble that each sample becomes: so many states at once for the model; above 1 with loss "crps"
    members: Annotated[int, Range(1, 1_000)] = 1
    # Huber: beyond it costs grow linearly; in standard deviations of what the model predicts (model.predict)
    huber_threshold: AboveZero = 1.0
    variable_weights: tuple[NonNegative, ...] = ()  # one number a predicted variable; empty: all 1
    # weigh each variable by 1/(standard deviation of its change over a step)^2; with "mae" without the square
    weight_by_change: bool = False
    # weigh each variable on a level by its pressure over the mean of the predicted levels; others by 1
    weight_by_pressure: bool = False
    # of "mse" that becomes AMSE, by zonal wavenumber: amplitudes of waves cost what they lack, so that small
    # scales stay; 1: all of it
    spectral_fraction: Fraction = 0.0
    # what model.conserve names, or "energy", kept by a term of the loss instead: the squared change of each
    # global mean
    conserve: tuple[str, ...] = ()
    conserve_weight: AboveZero = 1.0  # times that term
    # steps of the model in a training step, each from the last one's output; [1, 2, 4]: more as the run goes
    # on, in stages
    rollout_steps: tuple[Rollout, ...] = (1,)
    # first training step of each later entry of rollout_steps; []: all have equal parts of the run
    rollout_from_step: tuple[Positive, ...] = ()
    # last steps of a rollout that have losses and gradients; 0: all; 1: push-forward
    rollout_gradient_steps: Annotated[int, Range(0, 1_000)] = 0
    # what the loss of each step of the longest rollout, or of replay_steps, counts; []: all the same
    rollout_weights: tuple[Annotated[float, Range(0.0, 1e9)], ...] = ()
    # each sample is taken so many steps on from its date, one a training step, each from the model's own last
    # forecast, kept on the host; 0: every step starts from an analysis
    replay_steps: Annotated[int, Range(0, 1_000)] = 0
    # states that all ranks keep for it, each taken up again after replay_capacity / global batch training
    # steps; 0: one for each sample of the global batch
    replay_capacity: Count = 0
    tf32: bool = True  # TF32 matmuls where float32 is asked for (CUDA)
    deterministic: bool = False  # refuse kernels that do not repeat to the bit
    # save and end, to be started again, before so much time is gone: "hours:minutes:seconds"; empty: never
    max_wall_time: str = ""
    # skip a step whose loss lies so many robust deviations (1.4826 x median absolute deviation) above the
    # median of the last 100; 0: skip only what is not finite
    spike_threshold: NonNegative = 0.0
    # bad steps among 100 that are skipped; with one more the run goes back to its last good checkpoint and
    # takes other samples, and ends when that does not help
    max_skipped_steps: Count = 10
    # steps after which ranks compare the weights that must be equal on them, as before every save; 0: never
    fingerprint_steps: Count = 100

    @property
    def states_ahead(self) -> int:
        """That a sample has after its window, a step of the model apart."""
        return max(*self.rollout_steps, self.replay_steps, 1)


@dataclass(frozen=True)
class Parallelism:
    # "zero1" shards optimiser states over replicas; "auto" is DDP for replicas alone, else FSDP2 or HSDP
    data_parallel: Literal["auto", "zero1"] = "auto"
    data_parallel_replicate_degree: Ranks = 1  # copies of the model (DDP, or HSDP with shards inside each)
    data_parallel_shard_degree: Rest = -1  # ranks that parameters are sharded over (FSDP2); -1: the rest
    tensor_parallel_degree: Ranks = 1  # ranks that each matrix is cut over, by heads and hidden units
    # compiled matrices overlap with the gathers around them, a part at a time (CUDA with symmetric memory)
    enable_async_tensor_parallel: bool = False
    context_parallel_degree: Ranks = 1  # ranks that the tokens of a sample are dealt out to
    # rows x columns of tiles that the grid of a U-Net is cut into, one a rank
    domain_parallel_tiles: tuple[Ranks, Ranks] = (1, 1)
    # how attention sees all tokens: exchange heads, gather keys, or pass keys round
    context_parallel_method: Literal["ulysses", "all_gather", "ring"] = "ulysses"
    pipeline_parallel_degree: Ranks = 1  # ranks that the blocks are dealt out over
    # order of forward and backward of micro-batches; the last three have two stages a rank
    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    pipeline_parallel_microbatch_size: Batch = 1  # samples that pass through the pipeline at once
    pipeline_parallel_splits: tuple[Positive, ...] = ()  # first block of each later stage; []: by FLOPs
    # free the gathered parameters of a block after its forward: "always" (ZeRO-3), "never" (ZeRO-2),
    # "default": of all blocks but the last
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    cpu_offload: bool = False  # parameters, gradients and optimiser states live in host memory (FSDP2)
    # axes from the slowest to the fastest varying rank number: the last are neighbours in a node
    axis_order: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ActivationCheckpoint:
    # "full" recomputes blocks, "selective" all but matmuls and attention, "every_n_blocks" keeps every n-th
    # input
    mode: Literal["none", "full", "selective", "every_n_blocks", "memory_budget"] = "none"
    every_n_blocks: Positive = 7  # blocks recomputed as one
    memory_budget: Annotated[float, Range(0.0, 1.0)] = 0.5  # fraction of activations kept (needs compile)


@dataclass(frozen=True)
class Compile:
    enable: bool = False  # torch.compile of each block, one compilation for all of one shape
    # record each block's kernels and start them together, for steps too short for the host to keep up with;
    # on one CUDA device, or replicas of it
    cuda_graphs: bool = False


@dataclass(frozen=True)
class Float8:
    enable: bool = False  # matrices of a ViT's blocks multiply in float8 (torchao)
    # scales a tensor, or a row (finer, slower); "gw_hp": weight gradients in high precision; "auto": for each
    # shape of matrix what is measured to be fastest here, float8 or not
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "auto"] = "tensorwise"
    filter_min_features: Count = 0  # matrices with fewer features, in or out, stay as they are
    emulate: bool = False  # round to float8, multiply in high precision: its numbers on any device, slowly
    enable_fsdp_float8_all_gather: bool = False  # FSDP gathers weights in float8; needs "tensorwise"


@dataclass(frozen=True)
class Lora:
    # a ViT's weights stay as checkpoint.initial_load_path has them, and low-rank adapters beside the matrices
    # of its blocks train (Hu et al. 2021); docs/adapters.md
    enable: bool = False
    rank: Annotated[int, Range(1, 1_024)] = 8  # r of the two matrices, (r, in) and (out, r), of an adapter
    alpha: AboveZero = 16.0  # adapters are multiplied by alpha / rank
    # what the adapted matrices rest in: float32, or 2 or 1 bytes a weight (torchao's int8, a scale a row)
    base_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    # what trains beside the adapters; new input variables need "patch_embedding", new predicted ones "head"
    also_train: tuple[Literal["patch_embedding", "position", "modulation", "norms", "head"], ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False  # save, and resume from the newest complete checkpoint in the run's folder
    interval: Positive = 500  # steps between saves; the last step is always saved
    interval_minutes: NonNegative = 0.0  # save after so many minutes too; 0: by steps alone
    # "async": copy, then write in the background; "async_with_pinned_mem": copy during the next forward and
    # backward too
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async_with_pinned_mem"
    keep_latest_k: Count = 5  # complete checkpoints kept; 0: all
    # start from the weights of another run (its folder or one of its checkpoints), for fine-tuning
    initial_load_path: str = ""
    # score whose best checkpoint is kept in best/, for example "val/rmse/geopotential:500@24h"; empty: none
    keep_best: str = ""


@dataclass(frozen=True)
class Validation:
    enable: bool = True  # score every date of data.validation_period
    interval: Count = 0  # steps between validations; 0: only after the last step
    lead_hours: tuple[Hours, ...] = (6, 24)  # lead times scored, in hours; multiples of data.step_hours
    local_batch_size: Batch = 16  # initial dates, with all members, a rank takes through the model at once
    # of the ensemble that starts from each date, with training.loss "crps"; 0: training.members
    members: Annotated[int, Range(0, 1_000)] = 0
    # loss curve, error against lead time, maps and spectra into plots/ after the last step and, where metrics
    # go to TensorBoard, W&B or MLflow, into these at every validation
    plots: bool = True
    # what maps and plots of evaluate.py show, "geopotential:500", "wind_vector"; empty: a customary choice
    plot_variables: tuple[str, ...] = ()
    # end the run after so many validations in a row without a better checkpoint.keep_best; 0: never
    early_stop_patience: Count = 0


@dataclass(frozen=True)
class Metrics:
    log_freq: Positive = 10  # steps between log lines
    enable_tensorboard: bool = True  # scalars into tensorboard/
    # Weights & Biases (an extra), offline in wandb/ of the run's folder unless WANDB_MODE says otherwise
    enable_wandb: bool = False
    # MLflow (an extra), files in mlflow/ of the run's folder unless MLFLOW_TRACKING_URI says otherwise
    enable_mlflow: bool = False
    # where the first rank of each host answers Prometheus (an extra); 0: nowhere
    prometheus_port: Annotated[int, Range(0, 65_535)] = 0
    prometheus_address: str = "127.0.0.1"  # of the interface that it listens on; "0.0.0.0": all of them
    peak_tflops: NonNegative = 0.0  # dense bf16 peak a device for MFU; 0: known GPUs by name, else no MFU


@dataclass(frozen=True)
class Profiling:
    enable_profiling: bool = False  # write torch profiler traces (Chrome, Perfetto) into traces/
    profile_freq: Positive = 100  # steps between traces
    profile_steps: Positive = 3  # steps in a trace
    with_stack: bool = False  # the lines of Python that called each operator, too; traced steps take longer
    with_memory: bool = False  # each allocation in the traces, too: traces.inspect_trace adds them up by part
    enable_memory_snapshot: bool = False  # CUDA allocator snapshots beside the traces


@dataclass(frozen=True)
class Comm:
    # a rank that is not heard of, or does not get on, for so many seconds ends the run: before the end of the
    # first step, in validations, in saves and at the end
    timeout_seconds: Seconds = 600
    train_timeout_seconds: Seconds = 100  # the same in all later steps, when everything is compiled


@dataclass(frozen=True)
class Forecast:
    path: str = ""  # the Zarr store to write; empty: forecast.zarr in the run's folder
    # checkpoint, or folder of a run, to forecast from; empty: the newest of job.dump_folder
    checkpoint: str = ""
    averaged_weights: bool = True  # those of training.ema_decay, where the checkpoint has them
    # first and last initial date, both included; empty: data.test_period, else data.validation_period
    period: tuple[str, ...] = ()
    # hours between initial dates, all of which must be in the data; 0: every date
    interval_hours: Annotated[int, Range(0, 100_000)] = 0
    num_steps: Steps = 40  # steps of data.step_hours from each initial date: 40 x 6 h are 10 days
    include_initial_state: bool = False  # write the lead of 0 h too
    local_batch_size: Batch = 8  # states (dates x members) a rank takes through the model at once
    num_members: Layers = 1  # members of an ensemble; the first starts from the analysis itself
    # how far the other members start from the analysis, in standard deviations of a variable's change a step;
    # -1: 0.2, or 0 where the model has noise (model.noise_dim)
    perturbation: Annotated[float, Range(-1.0, LARGEST)] = -1.0
    # perturbations, and a model's noise, are a function of (seed, date, member)
    seed: Annotated[int, Range(0, 10**12)] = 0


@dataclass(frozen=True)
class Config:
    job: Job = field(default_factory=Job)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LrScheduler = field(default_factory=LrScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    lora: Lora = field(default_factory=Lora)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    forecast: Forecast = field(default_factory=Forecast)

    @property
    def dump_folder(self) -> Path:
        """The run's folder."""
        default = in_project(f"outputs/{Path(self.job.config_file).stem}")
        return Path(self.job.dump_folder or default)


SECTIONS: dict[str, type] = {f.name: f.default_factory for f in dataclasses.fields(Config)}  # type: ignore[misc]
