"""Configuration: frozen, typed dataclasses, one for each section.

Precedence, lowest first: default below, file that a configuration `extends`, configuration file, command line
(command_line.py). training/config_checks.py refuses combinations that cannot work.
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from errors import refuse

DEFAULT_CONFIG = "train_configs/demo.toml"
PROJECT = Path(__file__).resolve().parent
SIMULATED, RANDOM = "simulated", "random"  # values of data.path that name no file
PATHS = (  # keys that name a file or a folder; job.config_file is always relative to the caller's folder
    ("job", "dump_folder"),
    ("data", "path"),
    ("data", "more_paths"),
    ("data", "static_path"),
    ("data", "store_path"),
    ("checkpoint", "initial_load_path"),
    ("forecast", "path"),
    ("forecast", "checkpoint"),
)


@dataclass(frozen=True)
class Range:
    """Bounds of a number, inclusive unless `above` (the lower) or `below` (the upper) excludes them."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def admits(self, value: float) -> bool:
        reaches = value > self.low if self.above else value >= self.low
        return reaches and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'at least'} {self.low:g}"
        upper = f"{'below' if self.below else 'at most'} {self.high:g}"
        return lower if self.high in (math.inf, MOST, LARGEST) else f"{lower} and {upper}"


MOST = 10**9  # upper limit of counts and measures: a larger value is a typing error
Count = Annotated[int, Range(0, MOST)]
Positive = Annotated[int, Range(1, MOST)]
LARGEST = 1e30  # upper limit of all other numbers
NonNegative = Annotated[float, Range(0.0, LARGEST)]
AboveZero = Annotated[float, Range(0.0, LARGEST, above=True)]
# Numbers that determine the use of memory have tighter bounds.
Width = Annotated[int, Range(1, 65_536)]
Batch = Annotated[int, Range(1, 65_536)]
Layers = Annotated[int, Range(1, 4_096)]
Window = Annotated[int, Range(0, 65_536)]  # 0: the whole axis
Ranks = Annotated[int, Range(1, 1_000_000)]
Rest = Annotated[int, Range(-1, 1_000_000)]  # -1: what is left
Hours = Annotated[int, Range(1, 100_000)]
Steps = Annotated[int, Range(1, 100_000)]
Rollout = Annotated[int, Range(1, 1_000)]
Seconds = Annotated[int, Range(1, 10_000_000)]
Processes = Annotated[int, Range(0, 4_096)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Decay = Annotated[float, Range(0.0, 1.0, below=True)]  # with 1 a mean would never change
DType = Literal["float32", "bfloat16", "float16"]


def option(default: Any, help: str) -> Any:
    """Return the field of a key; `help` is what --help prints: meaning, unit, meaning of the default."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Job:
    config_file: str = option(DEFAULT_CONFIG, "TOML file to run.")
    dump_folder: str = option(
        "",
        "Folder of the run. Default: outputs/<name of config_file> in the project. If it has a config.toml "
        "and config_file is not given, that file is the configuration.",
    )


@dataclass(frozen=True)
class Data:
    path: str = option(
        "simulated",
        "Zarr store, NetCDF, HDF5 or GRIB file, folder, glob or URL of analyses. "
        "Training reads a store that the first start converts from it (data.store_path). "
        '"simulated": weather that is generated on first use. "random": noise, without a file.',
    )
    more_paths: tuple[str, ...] = option(
        (),
        "Further sources on the same grid, with more variables or dates. Dates that lack a variable are "
        "left out.",
    )
    store_path: str = option(
        "",
        "Folder of the store that the first start converts from data.path, or simulates. Default: in "
        "outputs/stores/, named by what is converted.",
    )
    storage_options: tuple[str, ...] = option(
        (),
        'Options of the store at a URL: ["anon=true", "endpoint_url=https://host"]. '
        "Give secrets in the environment instead.",
    )
    variables: tuple[str, ...] = option(
        (),
        "Predicted variables that are input of the next step, by WeatherBench2 name: "
        '["geopotential:500", "2m_temperature"].',
    )
    diagnostic_variables: tuple[str, ...] = option(
        (), 'Variables that are predicted but no input: ["total_precipitation_6hr"].'
    )
    forcing_variables: tuple[str, ...] = option(
        (), 'Variables that are input of each step but not predicted: ["sea_surface_temperature"].'
    )
    forcings_of_target: bool = option(
        False, "Also give the model data.forcing_variables at the date that it predicts."
    )
    boundary_width: Annotated[int, Range(0, 1000)] = option(
        0,
        "Width in cells of the boundary of a regional grid. The boundary is not predicted: the model gets "
        "its values at the date that it predicts. 0: no boundary.",
    )
    levels: tuple[Positive, ...] = option(
        (), 'Pressure levels in hPa of all variables that are named without a level: "temperature".'
    )
    static_variables: tuple[str, ...] = option(
        (), 'Constant input variables: ["land_sea_mask", "geopotential_at_surface"].'
    )
    static_path: str = option(
        "", "File with the static variables, regridded to the grid of the data. Default: data.path."
    )
    forcings: tuple[str, ...] = option(
        (), 'Inputs computed from date and position: ["toa_incident_solar_radiation", "sin_local_time"].'
    )
    select: tuple[str, ...] = option(
        (), 'Element to read along each additional dimension: ["member=0", "run=2020-01-01"].'
    )
    region: tuple[float, ...] = option(
        (), "Part of the grid to use: [north, west, south, east] in degrees. Default: the whole grid."
    )
    step_hours: Hours = option(6, "Lead time of one model step in hours.")
    history: Annotated[int, Range(1, 8)] = option(
        1, "Number of states, step_hours apart, that the model takes as input. One is predicted."
    )
    train_period: tuple[str, ...] = option(
        (),
        'First and last date of training, both included: ["1979-01-01", "2017-12-31"]. A last date without '
        "an hour includes that day. Default: all dates outside the other periods.",
    )
    validation_period: tuple[str, ...] = option((), "First and last date of validation. Default: none.")
    test_period: tuple[str, ...] = option(
        (),
        "First and last date of the test period, which training and validation do not use; the default "
        "period of forecast.py and evaluate.py.",
    )
    grid_shape: tuple[Count, Count] = option(
        (0, 0), "Number of latitudes and longitudes that the data must have. [0, 0]: any."
    )
    num_workers: Processes = option(
        0,
        "Threads of each rank that read batches ahead, a batch each. 0: read when a batch is needed.",
    )


@dataclass(frozen=True)
class Model:
    name: str = option(
        "vit", 'Architecture: "vit", "unet", or one of your own, "package.module:build"; docs/models.md.'
    )
    patch_size: tuple[Width, Width] = option((4, 4), "ViT: latitudes and longitudes of the grid per token.")
    dim: Width = option(192, "ViT: width of the residual stream.")
    num_layers: Layers = option(4, "ViT: number of transformer blocks.")
    num_heads: Layers = option(4, "ViT: number of attention heads; must divide dim.")
    mlp: Literal["gelu", "swiglu"] = option(
        "gelu", "ViT: activation between the matrices of the MLP; SwiGLU has a third matrix, for its gate."
    )
    mlp_dim: Annotated[int, Range(0, 1_048_576)] = option(
        0, "ViT: hidden width of the MLP. 0: 4 x dim, or about 8/3 x dim (as many parameters) for swiglu."
    )
    position: Literal["learned", "rotary"] = option(
        "learned", "ViT: a learned vector per token, or rotation of queries and keys by row and column."
    )
    attention_windows: tuple[tuple[Window, Window], ...] = option(
        (),
        "ViT: attention windows [rows, columns] in tokens, which the blocks use in turn; 0: the whole axis. "
        "[]: every token attends to all others. docs/models.md.",
    )
    qk_norm: bool = option(
        False, "ViT: normalize queries and keys per head, for stability at large learning rates."
    )
    stochastic_depth: Annotated[float, Range(0.0, 0.9)] = option(
        0.0,
        "ViT: probability of skipping a branch of the last block for a sample in training; 0 in the first "
        "block, linear in between. Which ones depends on seed, step and date, not on the layout.",
    )
    attention_backend: Literal["auto", "sdpa", "cudnn", "flash", "flash4", "flash_attn", "math"] = option(
        "auto",
        'ViT: kernel. "auto": by device, type, number of tokens; "sdpa": torch chooses; "math": matmuls.',
    )
    width: Width = option(
        64, "U-Net: channels at the resolution of the grid; the number doubles at each coarser level."
    )
    levels: Annotated[int, Range(1, 20)] = option(4, "U-Net: number of times the grid is halved.")
    predict: Literal["state", "change"] = option(
        "change", "Output of the model: the next state, or its normalized change over one step."
    )
    noise_dim: Annotated[int, Range(0, 4_096)] = option(
        0, "Input channels of Gaussian noise, different for each ensemble member. 0: none."
    )
    conserve: tuple[str, ...] = option(
        (),
        'Quantities to conserve in the global mean: "dry_mass", "total_water", or predicted variables. The '
        "output is shifted accordingly; docs/losses.md.",
    )

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the MLP."""
        return self.mlp_dim or (32 * max(1, round(self.dim / 12)) if self.mlp == "swiglu" else 4 * self.dim)


@dataclass(frozen=True)
class Optimizer:
    name: Literal["AdamW", "LAMB", "Muon", "SGD", "LARS"] = option(
        "AdamW", "Optimizer; LAMB and LARS suit large batches. docs/optimizers.md."
    )
    lr: AboveZero = option(1e-3, "Peak learning rate, at lr_reference_batch_size if that is set.")
    betas: tuple[Decay, Decay] = option(
        (0.9, 0.95), "AdamW, LAMB: decay rates of the means of gradients and of squared gradients."
    )
    momentum: Decay = option(0.9, "SGD, LARS, Muon: momentum; 0.95 is usual for Muon.")
    weight_decay: NonNegative = option(
        0.05, "Weight decay of matrices; decoupled, but part of the gradient with SGD and LARS."
    )
    lr_scaling: Literal["linear", "sqrt"] = option(
        "linear", "Growth of lr from the reference batch size to the global batch size."
    )
    lr_reference_batch_size: Count = option(0, "Batch size that lr was chosen for. 0: lr is not scaled.")


@dataclass(frozen=True)
class LrScheduler:
    warmup_steps: Count = option(100, "Steps of linear warm-up from 0.")
    decay_type: Literal["cosine", "linear", "sqrt", "constant"] = option(
        "cosine", 'Shape of the decay; "sqrt": 1 - sqrt(fraction of the decay steps that are done).'
    )
    decay_ratio: Fraction = option(
        1.0,
        "Fraction of the steps, at the end of the run, with a decay. 1: all steps after warm-up.",
    )
    min_lr_factor: Fraction = option(0.0, "Last learning rate as a fraction of the peak.")


@dataclass(frozen=True)
class Training:
    steps: Positive = option(1000, "Optimizer steps of the run.")
    seed: Annotated[int, Range(0, 10**12)] = option(
        0, "Seed of initial weights and sample order, which depend on nothing else."
    )
    local_batch_size: Batch = option(16, "Samples per rank in one forward and backward pass.")
    global_batch_size: Rest = option(
        -1,
        "Samples per optimizer step over all ranks. If more than local_batch_size x ranks, gradients of "
        "several passes are accumulated. -1: no accumulation.",
    )
    ema_decay: Decay = option(
        0.0,
        "Decay rate of an exponential moving average of the weights. Forecasts use the average, validation "
        "both the average and the raw weights. 0: no average.",
    )
    max_norm: NonNegative = option(1.0, "Norm to which gradients are clipped. 0: no clipping.")
    mixed_precision_param: DType = option(
        "float32",
        "Type of parameters and matmuls in the forward pass. float32 is TF32 on GPUs that have it "
        "(NVIDIA_TF32_OVERRIDE=0 in the environment: not); float16 has dynamic loss scaling.",
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = option(
        "float32", "Type in which gradients are reduced over ranks."
    )
    loss: Literal["mse", "rmse", "mae", "crps", "relative_l2"] = option(
        "mse",
        "Area-weighted mean squared error, its root for each variable and sample, mean absolute error, "
        "almost fair CRPS of an ensemble, or unweighted |prediction - target| / |target| (NERSC's tutorial).",
    )
    members: Annotated[int, Range(1, 1_000)] = option(
        1, 'Ensemble members per sample; more than 1 with loss = "crps".'
    )
    variable_weights: tuple[NonNegative, ...] = option(
        (), "Weight of each predicted variable in the loss. Default: all 1."
    )
    weight_by_change: bool = option(
        False,
        "Weight variables by 1 / (standard deviation of their change over a step)^2; with mae and rmse, "
        "without the square.",
    )
    augmentation: Literal["none", "roll", "roll_and_mirror"] = option(
        "none",
        '"roll": turn each sample about the axis of the Earth by a random number of columns, with constant '
        'fields and forcings. "roll_and_mirror": exchange north and south of half of them, too '
        "(docs/losses.md).",
    )
    rollout_steps: tuple[Rollout, ...] = option(
        (1,),
        "Model steps per training step, each starting from the previous output. [1, 2, 4]: longer rollouts "
        "in later stages of the run.",
    )
    deterministic: bool = option(False, "Refuse kernels that are not bit-exact from run to run.")
    max_wall_time: str = option(
        "", 'Save and exit with code 75 before this time has passed: "hours:minutes:seconds". Default: never.'
    )
    spike_threshold: NonNegative = option(
        0.0,
        "Skip a step if its loss exceeds the median of the last 100 by this many robust deviations "
        "(1.4826 x median absolute deviation). 0: skip only what is not finite.",
    )

    @property
    def states_ahead(self) -> int:
        """Number of states of a sample after its window, one model step apart."""
        return max(self.rollout_steps)


@dataclass(frozen=True)
class Parallelism:
    data_parallel: Literal["auto", "zero1"] = option(
        "auto",
        '"auto": DDP for replicas alone, else FSDP2 or HSDP. "zero1": shard the optimizer over replicas.',
    )
    data_parallel_replicate_degree: Ranks = option(
        1, "Copies of the model (DDP, or HSDP with shards in each copy)."
    )
    data_parallel_shard_degree: Rest = option(
        -1, "Ranks over which parameters are sharded (FSDP2). -1: all that remain."
    )
    tensor_parallel_degree: Ranks = option(
        1, "Ranks over which each matrix is sharded, by heads and hidden units."
    )
    context_parallel_degree: Ranks = option(
        1, "Ranks over which a sample is sharded: the tokens of a ViT, the grid of a U-Net in tiles."
    )
    context_parallel_method: Literal["ulysses", "all_gather", "ring"] = option(
        "ulysses",
        "ViT: how attention sees all tokens: exchange heads, gather keys and values, or circulate them.",
    )
    pipeline_parallel_degree: Ranks = option(1, "Ranks over which the blocks are distributed.")
    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = option(
        "1F1B",
        "Order of forward and backward passes; the last three have two stages per rank.",
    )
    pipeline_parallel_microbatch_size: Batch = option(1, "Samples of a micro-batch of the pipeline.")
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = option(
        "default",
        'Free the parameters of a block after its forward pass: "always" (ZeRO-3), "never" (ZeRO-2), '
        '"default": all blocks but the last.',
    )
    cpu_offload: bool = option(
        False, "Keep parameters, gradients and optimizer states in host memory (FSDP2)."
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective", "every_n_blocks"] = option(
        "none",
        'Activations recomputed in the backward pass: "full": whole blocks; "selective": all but matmuls and '
        'attention; "every_n_blocks": about sqrt(n) of n blocks as one.',
    )


@dataclass(frozen=True)
class Compile:
    enable: bool = option(
        False,
        "Compile each block (torch.compile, which needs g++ and Python's headers); blocks of one shape share "
        "the result.",
    )


@dataclass(frozen=True)
class Float8:
    enable: bool = option(
        False,
        "ViT: multiply the matrices of the blocks in float8 (torchao); emulated, slowly, without CUDA.",
    )
    enable_fsdp_float8_all_gather: bool = option(False, "Gather weights of FSDP in float8.")


@dataclass(frozen=True)
class Lora:
    rank: Annotated[int, Range(0, 1_024)] = option(
        0,
        "ViT: rank of low-rank adapters (Hu et al. 2021) of the matrices of checkpoint.initial_load_path, "
        "which are trained in place of these; docs/models.md. 0: no adapters.",
    )
    also_train: tuple[Literal["patch_embedding", "position", "norms", "head"], ...] = option(
        (),
        'Parts that are trained in addition; new input variables need "patch_embedding", new predicted '
        'variables "head".',
    )


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = option(
        True, "Save checkpoints, and resume from the newest complete one in the folder of the run."
    )
    interval: Positive = option(
        500, "Steps between saves; the last step is always saved, and so is one that is validated."
    )
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = option(
        "async_with_pinned_mem",
        '"async": copy, then write in the background. "async_with_pinned_mem": copy during the next forward '
        "and backward pass as well.",
    )
    keep_latest_k: Count = option(5, "Complete checkpoints to keep. 0: all.")
    initial_load_path: str = option(
        "",
        "Run, checkpoint or exported model with the weights to start from, for fine-tuning.",
    )
    keep_best: str = option(
        "",
        'Score that selects the best checkpoint, kept in best/: "val/rmse/geopotential:500@24h".',
    )


@dataclass(frozen=True)
class Validation:
    enable: bool = option(True, "Score forecasts from every date of data.validation_period.")
    interval: Count = option(0, "Steps between validations. 0: after the last step only.")
    lead_hours: tuple[Hours, ...] = option(
        (6, 24), "Lead times in hours that are scored; multiples of data.step_hours."
    )
    local_batch_size: Batch = option(
        16, "Initial dates per rank in one forward pass of a validation, with all members."
    )
    members: Annotated[int, Range(0, 1_000)] = option(
        0, 'Ensemble members of validation with training.loss = "crps". 0: training.members.'
    )
    plots: bool = option(
        True,
        "Write plots of loss, errors and maps to plots/ after the last step.",
    )


@dataclass(frozen=True)
class Metrics:
    log_freq: Positive = option(10, "Steps between log lines.")
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = option(
        ("tensorboard",),
        "Where metrics go besides metrics.jsonl: tensorboard/ in the folder of the run; Weights & Biases "
        "(extra wandb), offline unless WANDB_MODE is set.",
    )
    prometheus: str = option(
        "",
        "Address where the first rank of each host serves metrics to Prometheus (extra prometheus): "
        '"127.0.0.1:9400", or "0.0.0.0:9400" for all interfaces. Default: none.',
    )


@dataclass(frozen=True)
class Profiling:
    enable_profiling: bool = option(False, "Write traces of torch.profiler (for Perfetto) to traces/.")
    profile_freq: Annotated[int, Range(4, MOST)] = option(
        100, "Steps between the ends of traces, of 3 steps each. The step before one is discarded."
    )


@dataclass(frozen=True)
class Comm:
    timeout_seconds: Seconds = option(
        600,
        "Seconds without progress of a rank after which the run is ended: until the first step is complete, "
        "in validations, in saves and at the end.",
    )
    train_timeout_seconds: Seconds = option(100, "The same limit for training steps after the first.")


@dataclass(frozen=True)
class Forecast:
    path: str = option(
        "",
        "Zarr store to write. Default: forecast.zarr in the run's folder.",
    )
    checkpoint: str = option(
        "",
        "Checkpoint, folder of a run or exported model to use. Default: the newest checkpoint of "
        "job.dump_folder.",
    )
    period: tuple[str, ...] = option(
        (),
        "First and last initial date, both included. Default: data.test_period, else data.validation_period.",
    )
    interval_hours: Annotated[int, Range(0, 100_000)] = option(
        0, "Hours between initial dates; the data must have all of them. 0: every date in the data."
    )
    num_steps: Steps = option(
        40, "Model steps of data.step_hours from each initial date; 40 steps of 6 h are 10 days."
    )
    num_members: Layers = option(1, "Ensemble members; more than 1 for models with noise.")
    persist_forcings: bool = option(
        False,
        "Keep data.forcing_variables as at the initial date. Default: read them at every step.",
    )


def wall_time_seconds(text: str) -> float:
    """Return the seconds of training.max_wall_time, inf for "". Raises ConfigError."""
    if not text:
        return math.inf
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        refuse("training.max_wall_time", text, "write hours:minutes:seconds, for example 11:45:00")
    hours, minutes, seconds = map(int, parts)
    if minutes > 59 or seconds > 59 or not hours + minutes + seconds:
        reason = "minutes and seconds must be below 60, and the time above 0; leave it empty for no limit"
        refuse("training.max_wall_time", text, reason)
    return float(3600 * hours + 60 * minutes + seconds)


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


# -- paths: relative to the caller's folder on the command line, to the project's folder everywhere else


def in_project(path: str) -> str:
    """Return a path in the project: relative to it, absolute if the caller is in another folder."""
    path = os.path.expanduser(path)
    return str(PROJECT / path) if _is_relative(path) and Path.cwd() != PROJECT else path


def for_a_file(path: str) -> str:
    """Return a path relative to the caller's folder in the form that a configuration file anywhere needs."""
    return os.path.abspath(path) if _is_relative(path) and Path.cwd() != PROJECT else path


def _is_relative(path: str) -> bool:
    is_url = "://" in path or "::" in path  # fsspec's
    return bool(path) and path not in (SIMULATED, RANDOM) and not is_url and not os.path.isabs(path)
