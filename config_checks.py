"""Combinations of settings that cannot work, said before any rank starts in one line: key, value, reason,
fix.
"""

import math
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from command_line import ConfigError, nearest
from config import Config, Data, Model, Parallelism, Validation
from datasets.variables import expand_levels
from parallelisms.degrees import check_axis_order, check_heads, num_stages, resolve_degrees

if TYPE_CHECKING:
    from datasets.grid import Grid


def check(config: Config) -> None:
    """Combinations that cannot work. What depends on the data is checked where the data are opened."""
    if config.model.name == "unet":
        _check_unet(config)
    else:
        _check_vit(config.model)
    _check_data(config.data)
    _check_training(config)
    _check_optimizer(config)
    _check_ranks(config)
    _check_validation(config.validation, config.data.step_hours)
    _check_best(config)
    _check_forecast(config)


def _check_unet(config: Config) -> None:
    parallelism, mode = config.parallelism, config.activation_checkpoint.mode
    for axis in ("context", "tensor", "pipeline"):
        key = f"{axis}_parallel_degree"
        if (degree := getattr(parallelism, key)) > 1:
            reason = (
                "a U-Net is split by its grid; set this to 1 and parallelism.domain_parallel_tiles instead"
            )
            _fail(f"parallelism.{key}", degree, reason)
    if mode in ("selective", "every_n_blocks"):
        reason = 'for the blocks of a ViT; with model.name = "unet" valid: none, full, memory_budget'
        _fail("activation_checkpoint.mode", mode, reason)
    if config.float8.enable:
        _fail("float8.enable", True, "multiplies the matrices of a ViT, a U-Net has none; set it to false")


def _check_vit(model: Model) -> None:
    if model.dim % model.num_heads:
        choices = [n for n in range(1, model.dim + 1) if model.dim % n == 0 and model.dim // n >= 8]
        near = sorted(choices or [1], key=lambda n: abs(n - model.num_heads))[:3]
        reason = f"does not divide model.dim = {model.dim}; near ones do: {near}"
        _fail("model.num_heads", model.num_heads, reason)
    if model.position == "sincos" and model.dim % 4:
        _fail("model.dim", model.dim, 'model.position = "sincos" needs a multiple of 4')
    if model.attention_backend in ("flash", "flash_attn", "cudnn") and (model.dim // model.num_heads) % 8:
        reason = f"{model.attention_backend} needs heads whose size, dim / num_heads, is a multiple of 8"
        _fail("model.num_heads", model.num_heads, reason)


def _check_data(data: Data) -> None:
    if not data.path:
        _fail("data.path", "", 'name a file, folder, glob or URL, or "simulated"')
    if not data.variables:
        example = '["geopotential:500", "2m_temperature"]'
        _fail("data.variables", [], f"name what is predicted, for example {example}")
    predicted_variables(data)
    for key in ("static_variables", "forcings"):
        names = list(getattr(data, key))
        if twice := [name for name in names if names.count(name) > 1]:
            _fail(f"data.{key}", names, f"{twice[0]!r} is listed twice; name it once")
    _check_periods(data)
    if bool(data.grid_shape[0]) != bool(data.grid_shape[1]):
        reason = "give both numbers, or [0, 0] for the grid of the data"
        _fail("data.grid_shape", list(data.grid_shape), reason)


def predicted_variables(data: Data) -> list[str]:
    """`data.variables`, those on levels with theirs: "geopotential:500"."""
    try:
        return expand_levels(data.variables, data.levels)
    except ValueError as error:
        _fail("data.variables", list(data.variables), str(error))


def _check_periods(data: Data) -> None:
    train = parse_period("data.train_period", data.train_period)
    validation = parse_period("data.validation_period", data.validation_period)
    if train and validation and train[0] <= validation[1] and validation[0] <= train[1]:
        reason = f"overlaps data.train_period = {list(data.train_period)}"
        _fail("data.validation_period", list(data.validation_period), f"{reason}; move one of them")


def parse_period(name: str, period: tuple[str, ...]) -> tuple[datetime, datetime] | None:
    """First and last instant (UTC) of ["first", "last"]; a last day without an hour counts to its end."""
    if not period:
        return None
    if len(period) != 2:
        _fail(name, list(period), 'two dates expected, for example ["2001-01-01", "2007-12-31"]')
    first, last = (_parse_date(name, text) for text in period)
    if len(period[1]) <= len("2001-01-01"):
        last += timedelta(days=1, seconds=-1)
    if last < first:
        _fail(name, list(period), "the last date lies before the first; exchange them")
    return first, last


def _parse_date(name: str, text: str) -> datetime:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        _fail(name, text, "not a date; write 2001-12-31 or 2001-12-31T18:00")
    return date.astimezone(UTC) if date.tzinfo else date.replace(tzinfo=UTC)


def _check_training(config: Config) -> None:
    weights, variables = config.training.variable_weights, predicted_variables(config.data)
    if weights and len(weights) != len(variables):
        reason = f"{len(variables)} variables are predicted; give one weight each"
        _fail("training.variable_weights", list(weights), reason)
    if weights and not any(weights):
        _fail("training.variable_weights", list(weights), "one of them must be above 0")
    wall_time_seconds(config.training.max_wall_time)


def _check_optimizer(config: Config) -> None:
    """Moments in few bits."""
    optimizer, dtype, model = config.optimizer, config.optimizer.state_dtype, config.model
    if dtype != "float32" and optimizer.implementation != "fused":
        reason = f'optimizer.state_dtype = "{dtype}" is updated by the fused kernel; set it to "fused"'
        _fail("optimizer.implementation", optimizer.implementation, reason)
    if dtype == "bfloat16" and optimizer.beta2 > 0.99:
        reason = (
            'so slow a mean stands still in 8 bits; set optimizer.beta2 to 0.99 or less, or this to "int8"'
        )
        _fail("optimizer.state_dtype", dtype, reason)
    tp, block = config.parallelism.tensor_parallel_degree, 64  # BLOCK of training/optimizer_states.py
    for key, width in {"dim": model.dim, "mlp_dim": model.mlp_dim or 4 * model.dim}.items():
        if dtype == "int8" and width % block == 0 and width // tp % block:
            reason = (
                f"tensor_parallel_degree = {tp} cuts model.{key} = {width} inside a block of {block} numbers"
            )
            _fail("optimizer.state_dtype", dtype, f'{reason}; use "bfloat16" or fewer ranks a matrix')


def wall_time_seconds(text: str) -> float:
    """Seconds of training.max_wall_time, "hours:minutes:seconds"; inf for ""."""
    if not text:
        return math.inf
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        _fail("training.max_wall_time", text, "write hours:minutes:seconds, for example 11:45:00")
    hours, minutes, seconds = map(int, parts)
    if minutes > 59 or seconds > 59 or not hours + minutes + seconds:
        reason = "minutes and seconds must be below 60, and the time above 0; leave it empty for no limit"
        _fail("training.max_wall_time", text, reason)
    return float(3600 * hours + 60 * minutes + seconds)


def _check_ranks(config: Config) -> None:
    parallelism, heads = config.parallelism, config.model.num_heads
    check_axis_order(parallelism.axis_order)
    _check_tiles(parallelism, config.model.name)
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    check_heads(heads, tp, cp, parallelism.context_parallel_method)
    degrees = resolve_degrees(num_ranks(), **degrees_asked(parallelism))
    _check_pipeline(config)
    if parallelism.data_parallel == "zero1" and degrees.dp_replicate != degrees.world:
        reason = f"works on replicas alone; set data_parallel_replicate_degree = {degrees.world}"
        _fail("parallelism.data_parallel", "zero1", reason)
    replicas = _check_replicas(config)
    batch, smallest = config.training.global_batch_size, config.training.local_batch_size * degrees.dp
    smallest *= replicas
    if batch != -1 and (batch < 1 or batch % smallest):
        near = max(round(batch / smallest), 1) * smallest
        reason = f"not a multiple of local_batch_size x data-parallel ranks = {smallest}; try {near} or -1"
        _fail("training.global_batch_size", batch, reason)


def _check_replicas(config: Config) -> int:
    """How many replicas share a global batch."""
    place = config.fault_tolerance
    if not place.enable:
        return 1
    if place.replica_id >= place.group_size:
        reason = f"replicas are numbered from 0 to {place.group_size - 1}, fault_tolerance.group_size - 1"
        _fail("fault_tolerance.replica_id", place.replica_id, reason)
    if place.min_replica_size > place.group_size:
        reason = f"more than fault_tolerance.group_size = {place.group_size}; lower it"
        _fail("fault_tolerance.min_replica_size", place.min_replica_size, reason)
    return place.group_size


def _check_tiles(parallelism: Parallelism, model: str) -> None:
    """Tiles and ranks; tiles and the grid come together where the data are open (`check_model`)."""
    key, tiles = "parallelism.domain_parallel_tiles", parallelism.domain_parallel_tiles
    if math.prod(tiles) == 1:
        return
    if model != "unet":
        reason = f'only a U-Net is split by its grid; model.name = "{model}" by its tokens: set '
        _fail(key, list(tiles), f"{reason}[1, 1] and parallelism.context_parallel_degree")
    shard, ranks = parallelism.data_parallel_shard_degree, num_ranks()
    others = parallelism.data_parallel_replicate_degree * max(shard, 1)
    if ranks % (math.prod(tiles) * others) or (shard != -1 and ranks != math.prod(tiles) * others):
        reason = f"{math.prod(tiles)} ranks a sample x {others} data-parallel"
        fitting = [n for n in range(1, ranks + 1) if ranks % (n * others) == 0]
        fitting = fitting if shard == -1 else [n for n in fitting if n * others == ranks]
        valid = f"rows x columns may be {fitting}" if fitting else "lower the data-parallel degrees"
        _fail(key, list(tiles), f"{reason} do not make the run's {ranks} rank(s); {valid}")


def _check_pipeline(config: Config) -> None:
    parallelism, local = config.parallelism, config.training.local_batch_size
    if parallelism.pipeline_parallel_degree == 1:
        return
    size = parallelism.pipeline_parallel_microbatch_size
    if local % size:
        reason = f"does not divide training.local_batch_size = {local}; try 1"
        _fail("parallelism.pipeline_parallel_microbatch_size", size, reason)
    if config.float8.enable and config.float8.recipe == "auto":
        reason = 'measures whole batches, which a pipeline cuts up; name "tensorwise" or "rowwise"'
        _fail("float8.recipe", "auto", reason)
    stages = num_stages(parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree)
    if local // size < stages and parallelism.pipeline_parallel_schedule != "GPipe":
        reason = (
            f"makes {local // size} micro-batches of a batch for {stages} stages: take one a stage at least"
        )
        _fail("training.local_batch_size", local, reason)
    if stages > config.model.num_layers:
        reason = f"makes {stages} stages of model.num_layers = {config.model.num_layers}; take fewer"
        _fail("parallelism.pipeline_parallel_degree", parallelism.pipeline_parallel_degree, reason)


def degrees_asked(parallelism: Parallelism) -> dict[str, int]:
    """The degrees of the configuration under the mesh's names for its axes; dp_shard may be -1."""
    return {
        "pp": parallelism.pipeline_parallel_degree,
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        # One of the two is 1: tokens are a ViT's, tiles a U-Net's.
        "cp": parallelism.context_parallel_degree * math.prod(parallelism.domain_parallel_tiles),
        "tp": parallelism.tensor_parallel_degree,
    }


def num_ranks() -> int:
    """Ranks of this run: torchrun's WORLD_SIZE, or what run_train.sh is about to start."""
    if "WORLD_SIZE" in os.environ:
        return _number_in_environment("WORLD_SIZE")
    return _number_in_environment("NGPU") * _number_in_environment("NNODES")


def _number_in_environment(name: str) -> int:
    """A number of processes, 1 where it is not set. NNODES may be a range, 2:4."""
    text = os.environ.get(name) or "1"
    first = text.partition(":")[0]
    if not first.isdecimal() or int(first) < 1:
        _fail(name, text, "an environment variable that must be a whole number, at least 1")
    return int(first)


def _check_validation(validation: Validation, step_hours: int) -> None:
    leads = list(validation.lead_hours)
    if validation.enable and not leads:
        _fail("validation.lead_hours", leads, "name one lead time, or set validation.enable to false")
    for hours in leads:
        if hours % step_hours:
            _fail("validation.lead_hours", hours, f"not a multiple of data.step_hours = {step_hours}")
        if leads.count(hours) > 1:
            _fail("validation.lead_hours", leads, f"{hours} is listed twice; name it once")


def _check_best(config: Config) -> None:
    """The score that decides which checkpoint is the best, and when a run ends early."""
    name, patience = config.checkpoint.keep_best, config.validation.early_stop_patience
    if patience and not name:
        reason = 'needs a score to judge by; set checkpoint.keep_best, for example to "val/loss"'
        _fail("validation.early_stop_patience", patience, reason)
    if not name:
        return
    validation = config.validation
    if not (config.checkpoint.enable and validation.enable and validation.interval):
        reason = "needs checkpoint.enable, validation.enable and a validation.interval above 0"
        _fail("checkpoint.keep_best", name, reason)
    if config.fault_tolerance.enable:
        _fail(
            "checkpoint.keep_best", name, "with fault_tolerance.enable replicas would judge each for itself"
        )
    first, *others = sorted(validation.lead_hours)
    suffixes = ["", *(f"@{hours}h" for hours in others)]
    scores = [f"val/rmse/{v}{suffix}" for v in predicted_variables(config.data) for suffix in suffixes]
    if name not in ("val/loss", *scores):
        _fail(
            "checkpoint.keep_best", name, f"no such score ({first} h has no suffix); {nearest(name, scores)}"
        )


def _check_forecast(config: Config) -> None:
    forecast = config.forecast
    parse_period("forecast.period", forecast.period)
    if forecast.interval_hours and not (forecast.period or config.data.validation_period):
        reason = "needs a first date to count from; set forecast.period"
        _fail("forecast.interval_hours", forecast.interval_hours, reason)


def check_machine(config: Config) -> None:
    """What only the machine that trains knows: devices, kernels, folder. ValueError; no rank is started."""
    import torch  # here, because it takes 2 s that --help and a misspelt key need not wait for

    from models.attention import check_backend
    from parallelisms.float8 import check_float8
    from parallelisms.replicas import check_replicas

    if config.fault_tolerance.enable:
        check_replicas(config.fault_tolerance)
    backend, num_gpus = config.comm.backend, torch.cuda.device_count()
    if backend == "nccl" and not num_gpus:
        _fail("comm.backend", backend, 'this machine has no CUDA device; use "auto" or "gloo"')
    use_cuda = num_gpus > 0 and backend != "gloo"
    name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "NGPU"
    local_ranks = _number_in_environment(name)
    if use_cuda and local_ranks > num_gpus:
        _fail(name, local_ranks, f"this machine has {num_gpus} GPU(s); start at most one process on each")
    if config.parallelism.enable_async_tensor_parallel and not (use_cuda and config.compile.enable):
        reason = "needs CUDA devices and compile.enable = true; set it to false"
        _fail("parallelism.enable_async_tensor_parallel", True, reason)
    folder = config.dump_folder
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        _fail("job.dump_folder", str(folder), f"{there} is not a folder that can be written to")
    device_type, dtype = "cuda" if use_cuda else "cpu", getattr(torch, config.training.mixed_precision_param)
    if config.model.name == "vit":
        check_backend(config.model.attention_backend, device_type, dtype)
    float8 = config.float8
    if float8.enable:
        check_float8(float8.recipe, float8.emulate, float8.enable_fsdp_float8_all_gather, device_type)


def check_model(config: Config, grid: "Grid") -> None:
    """What depends on the grid of the data, and on the model's layers. ValueError; no rank is started."""
    if config.model.name == "vit" and not config.float8.enable:
        return
    from models.build import build_model  # here for the same reason as above
    from models.unet import UNet
    from parallelisms.domain_parallel import check_tiles
    from parallelisms.float8 import float8_layers

    model = build_model(config.model, 1, 0, grid.shape, grid.periodic)
    if isinstance(model, UNet):
        tiles = config.parallelism.domain_parallel_tiles
        check_tiles(tiles, model.padded_shape, model.multiple, math.prod(tiles))
    else:
        float8_layers(model, config.float8.filter_min_features, config.parallelism.tensor_parallel_degree)


def _fail(key: str, value: Any, reason: str) -> NoReturn:
    raise ConfigError(f"{key} = {value!r}: {reason}")
