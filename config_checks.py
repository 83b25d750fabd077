"""Combinations of settings that cannot work, said before any rank starts in one line: key, value, reason,
fix.
"""

import math

from archives.dates import parse_period
from archives.picks import parse_picks
from archives.storage_options import parse_storage_options
from archives.variables import expand_levels, named_by, nearest_name, split_name
from config import Config, Data, Model, Training, Validation
from errors import nearest, refuse
from losses.quantities import QUANTITIES, corrected, terms_of
from parallelisms.layout_checks import check_layout
from training.due import Rollouts


def check(config: Config) -> None:
    """Combinations that cannot work. What depends on the data is checked where the data are opened."""
    if config.model.name == "unet":
        _check_unet(config)
    else:
        _check_vit(config.model)
    _check_conditions(config)
    _check_data(config.data)
    _check_training(config)
    _check_rollouts(config.training)
    check_ramp(config.training)
    _check_optimizer(config)
    _check_schedule(config)
    check_layout(config)
    _check_validation(config.validation, config.data.step_hours)
    _check_plots(config)
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
            refuse(f"parallelism.{key}", degree, reason)
    if mode in ("selective", "every_n_blocks"):
        reason = 'for the blocks of a ViT; with model.name = "unet" valid: none, full, memory_budget'
        refuse("activation_checkpoint.mode", mode, reason)
    if config.float8.enable:
        refuse("float8.enable", True, "multiplies the matrices of a ViT, a U-Net has none; set it to false")


def _check_conditions(config: Config) -> None:
    """What the norms of blocks are told."""
    conditions, key = list(config.model.conditions), "model.conditions"
    if not conditions:
        return
    for name in conditions:
        if conditions.count(name) > 1:
            refuse(key, conditions, f"{name!r} is listed twice; name it once")
    if config.model.name == "unet":
        refuse(key, conditions, "are for the norms of a ViT; a U-Net takes data.forcings: set this to []")
    if "lead_time" in conditions and max(config.training.rollout_steps, default=1) == 1:
        reason = "one step has the lead 0 alone, and nothing is learned of others; set training.rollout_steps"
        refuse(key, conditions, f'{reason}, or take "lead_time" out')
    if config.parallelism.pipeline_parallel_degree > 1:
        reason = "do not travel from one stage of a pipeline to the next; set this to []"
        refuse(key, conditions, f"{reason}, or parallelism.pipeline_parallel_degree to 1")
    if config.activation_checkpoint.mode == "every_n_blocks":
        reason = 'differ from block to block, and "every_n_blocks" runs several as one; use "full"'
        refuse("activation_checkpoint.mode", "every_n_blocks", f"model.conditions = {conditions} {reason}")


def _check_vit(model: Model) -> None:
    if model.dim % model.num_heads:
        choices = [n for n in range(1, model.dim + 1) if model.dim % n == 0 and model.dim // n >= 8]
        near = sorted(choices or [1], key=lambda n: abs(n - model.num_heads))[:3]
        reason = f"does not divide model.dim = {model.dim}; near ones do: {near}"
        refuse("model.num_heads", model.num_heads, reason)
    if model.position == "sincos" and model.dim % 4:
        refuse("model.dim", model.dim, 'model.position = "sincos" needs a multiple of 4')
    if model.position == "rotary" and (model.dim // model.num_heads) % 4:
        reason = 'model.position = "rotary" needs heads whose size, dim / num_heads, is a multiple of 4'
        refuse("model.num_heads", model.num_heads, reason)
    needs_eights = model.attention_backend not in ("auto", "sdpa", "math")
    if needs_eights and (model.dim // model.num_heads) % 8:
        reason = f"{model.attention_backend} needs heads whose size, dim / num_heads, is a multiple of 8"
        refuse("model.num_heads", model.num_heads, reason)


def _check_data(data: Data) -> None:
    if not data.path:
        refuse("data.path", "", 'name a file, folder, glob or URL, or "simulated"')
    if not data.variables:
        example = '["geopotential:500", "2m_temperature"]'
        refuse("data.variables", [], f"name what is predicted, for example {example}")
    predicted_variables(data)
    parse_picks(data.select)
    parse_storage_options(data.storage_options)
    for key in ("static_variables", "forcings"):
        names = list(getattr(data, key))
        if twice := [name for name in names if names.count(name) > 1]:
            refuse(f"data.{key}", names, f"{twice[0]!r} is listed twice; name it once")
    _check_periods(data)
    if bool(data.grid_shape[0]) != bool(data.grid_shape[1]):
        reason = "give both numbers, or [0, 0] for the grid of the data"
        refuse("data.grid_shape", list(data.grid_shape), reason)


def predicted_variables(data: Data) -> list[str]:
    """`data.variables`, those on levels with theirs: "geopotential:500"."""
    try:
        return expand_levels(data.variables, data.levels)
    except ValueError as error:
        refuse("data.variables", list(data.variables), str(error))


def _check_plots(config: Config) -> None:
    """Wind vectors are no variables, but there are scores of them."""
    there = predicted_variables(config.data)
    for name in config.validation.plot_variables:
        if not name.partition(":")[0].endswith("wind_vector") and not named_by([name], there):
            reason = f"not among data.variables{nearest_name(name, there)}; name one of them"
            refuse("validation.plot_variables", name, reason)


def _check_periods(data: Data) -> None:
    train = parse_period("data.train_period", data.train_period)
    validation = parse_period("data.validation_period", data.validation_period)
    if train and validation and train[0] <= validation[1] and validation[0] <= train[1]:
        reason = f"overlaps data.train_period = {list(data.train_period)}"
        refuse("data.validation_period", list(data.validation_period), f"{reason}; move one of them")


def _check_training(config: Config) -> None:
    weights, variables = config.training.variable_weights, predicted_variables(config.data)
    if weights and len(weights) != len(variables):
        reason = f"{len(variables)} variables are predicted; give one weight each"
        refuse("training.variable_weights", list(weights), reason)
    if weights and not any(weights):
        refuse("training.variable_weights", list(weights), "one of them must be above 0")
    _check_loss(config.training, variables)
    _check_conserved(config, variables)
    _check_ensemble(config)
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable:
        reason = 'only the compiler can keep a budget; set compile.enable = true or use mode "selective"'
        refuse("activation_checkpoint.mode", "memory_budget", reason)
    wall_time_seconds(config.training.max_wall_time)


def _check_loss(training: Training, variables: list[str]) -> None:
    """What does not go with the loss that is chosen."""
    fraction = training.spectral_fraction
    if fraction and training.loss != "mse":
        reason = f'takes the place of squared errors, and training.loss = "{training.loss}"'
        refuse("training.spectral_fraction", fraction, f'{reason}; set that to "mse" or this to 0')
    if not training.weight_by_pressure:
        return
    if training.loss == "relative_l2":
        reason = 'training.loss = "relative_l2" has no weights; set this to false'
        refuse("training.weight_by_pressure", True, reason)
    if not any(split_name(name)[1] for name in variables):
        refuse("training.weight_by_pressure", True, "no variable has a level; set this to false")


def _check_conserved(config: Config, variables: list[str]) -> None:
    """Quantities whose global mean is kept, by each step of the model or by the loss."""
    exact, paid = config.model.conserve, config.training.conserve
    if exact and paid:
        refuse("training.conserve", list(paid), "model.conserve keeps global means; set one of them to []")
    key, quantities = ("model.conserve", exact) if exact else ("training.conserve", paid)
    first = [corrected(quantity) for quantity in quantities]
    for quantity in quantities:
        if quantity not in (*QUANTITIES, *variables):
            refuse(key, quantity, f"no such quantity; {nearest(quantity, [*QUANTITIES, *variables])}")
        if lacking := [name for name in terms_of(quantity) if name not in variables]:
            reason = f"is made of {lacking[0]}, which is not among data.variables; add it, or take this out"
            refuse(key, quantity, reason)
        if first.count(corrected(quantity)) > 1:
            refuse(key, quantity, f"another one is kept by shifting {corrected(quantity)}, too; take one out")
    if quantities and config.model.predict != "change":
        reason = 'is said of the change over a step; set model.predict to "change"'
        refuse(key, list(quantities), reason)


def _check_ensemble(config: Config) -> None:
    """Members, the noise by which they differ, and the loss that makes something of that: all or none."""
    training, noise, validated = config.training, config.model.noise_dim, config.validation.members
    if training.loss != "crps":
        fix = f'is for training.loss = "crps", and that is "{training.loss}"; set this to'
        if training.members > 1:
            refuse("training.members", training.members, f"{fix} 1")
        if noise:
            refuse("model.noise_dim", noise, f"{fix} 0")
        if validated:
            refuse("validation.members", validated, f"{fix} 0")
        return
    if training.members == 1:
        refuse("training.members", 1, 'training.loss = "crps" is that of an ensemble; set this to 2 or more')
    if not noise:
        refuse("model.noise_dim", 0, "the members of an ensemble would be all the same; set it to 2 or more")
    if validated == 1:
        refuse("validation.members", 1, "no ensemble; set it to 2 or more, or to 0 for training.members")


def _check_rollouts(training: Training) -> None:
    lengths = list(training.rollout_steps)
    if not lengths:
        refuse("training.rollout_steps", lengths, "name how many, [1] for the next state alone")
    _check_stages(training, "rollout_steps", "rollout_from_step")
    rollouts, weights = Rollouts.of(training), list(training.rollout_weights)
    if training.rollout_gradient_steps > rollouts.longest:
        reason = f"a rollout has {rollouts.longest} steps at most; take less, or 0 for all"
        refuse("training.rollout_gradient_steps", training.rollout_gradient_steps, reason)
    if weights and len(weights) != rollouts.longest:
        refuse("training.rollout_weights", weights, f"give {rollouts.longest}, one each step of the longest")
    for length in lengths:
        if not any(rollouts.shares(length)):
            reason = f"a rollout of {length} has no loss, of whose steps the last"
            reason = f"{reason} {rollouts.with_gradients(length)} count; raise the weight of one of these"
            refuse("training.rollout_weights", weights, reason)


def _check_stages(training: Training, entries: str, from_step: str) -> None:
    """Where each later entry of a key that names the stages of a run begins."""
    key, begin = f"training.{from_step}", list(getattr(training, from_step))
    later = max(len(getattr(training, entries)) - 1, 0)
    if begin and (len(begin) != later or begin != sorted({1, *begin})[1:]):
        reason = f"name the first step of each of the {later} later entries of {entries}"
        refuse(key, begin, f"{reason}, ascending, from 2 on; or [] for equal parts")
    if begin and begin[-1] > training.steps:
        reason = f"lies beyond training.steps = {training.steps}; take less, or [] for equal parts"
        refuse(key, begin[-1], reason)


def check_ramp(training: Training) -> None:
    """Batches that grow in stages; how ranks share them is the layout's to check."""
    ramp, batch = list(training.batch_ramp), training.global_batch_size
    _check_stages(training, "batch_ramp", "batch_ramp_from_step")
    if ramp != sorted(set(ramp)):
        refuse("training.batch_ramp", ramp, "name batches that ascend, or [] for the same throughout")
    if ramp and ramp[-1] != batch:
        reason = (
            f"its last entry has to be training.global_batch_size, which is {batch}; set that to {ramp[-1]}"
        )
        refuse("training.batch_ramp", ramp, reason)
    if len(ramp) > training.steps:
        refuse(
            "training.batch_ramp", ramp, f"has more stages than training.steps = {training.steps}; name fewer"
        )


def _check_optimizer(config: Config) -> None:
    """Moments in few bits, and matrices that are made whole."""
    optimizer, dtype, model = config.optimizer, config.optimizer.state_dtype, config.model
    if optimizer.name == "Muon" and config.parallelism.cpu_offload:
        reason = "would multiply whole matrices on the host; set parallelism.cpu_offload to false"
        refuse("optimizer.name", "Muon", reason)
    if dtype != "float32" and optimizer.name != "AdamW":
        reason = f'is for AdamW; with optimizer.name = "{optimizer.name}" set it to "float32"'
        refuse("optimizer.state_dtype", dtype, reason)
    if dtype == "bfloat16" and optimizer.beta2 > 0.99:
        reason = (
            'so slow a mean stands still in 8 bits; set optimizer.beta2 to 0.99 or less, or this to "int8"'
        )
        refuse("optimizer.state_dtype", dtype, reason)
    tp, block = config.parallelism.tensor_parallel_degree, 64  # BLOCK of optimizers/compact_adamw.py
    for key, width in {"dim": model.dim, "mlp_dim": model.mlp_dim or 4 * model.dim}.items():
        if dtype == "int8" and width % block == 0 and width // tp % block:
            reason = (
                f"tensor_parallel_degree = {tp} cuts model.{key} = {width} inside a block of {block} numbers"
            )
            refuse("optimizer.state_dtype", dtype, f'{reason}; use "bfloat16" or fewer ranks a matrix')


def _check_schedule(config: Config) -> None:
    """Stages of the learning rate."""
    schedule, steps = config.lr_scheduler, config.training.steps
    restarts, factors = list(schedule.restart_steps), list(schedule.restart_lr_factors)
    if restarts != sorted(set(restarts)) or (restarts and restarts[-1] >= steps):
        reason = f"name steps that ascend and lie before training.steps = {steps}"
        refuse("lr_scheduler.restart_steps", restarts, reason)
    if factors and len(factors) != len(restarts):
        reason = f"lr_scheduler.restart_steps names {len(restarts)} restarts; give one factor each"
        refuse("lr_scheduler.restart_lr_factors", factors, reason)


def wall_time_seconds(text: str) -> float:
    """Seconds of training.max_wall_time, "hours:minutes:seconds"; inf for ""."""
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


def _check_validation(validation: Validation, step_hours: int) -> None:
    leads = list(validation.lead_hours)
    if validation.enable and not leads:
        refuse("validation.lead_hours", leads, "name one lead time, or set validation.enable to false")
    for hours in leads:
        if hours % step_hours:
            refuse("validation.lead_hours", hours, f"not a multiple of data.step_hours = {step_hours}")
        if leads.count(hours) > 1:
            refuse("validation.lead_hours", leads, f"{hours} is listed twice; name it once")


def _check_best(config: Config) -> None:
    """The score that decides which checkpoint is the best, and when a run ends early."""
    name, patience = config.checkpoint.keep_best, config.validation.early_stop_patience
    if patience and not name:
        reason = 'needs a score to judge by; set checkpoint.keep_best, for example to "val/loss"'
        refuse("validation.early_stop_patience", patience, reason)
    if not name:
        return
    validation = config.validation
    if not (config.checkpoint.enable and validation.enable and validation.interval):
        reason = "needs checkpoint.enable, validation.enable and a validation.interval above 0"
        refuse("checkpoint.keep_best", name, reason)
    if config.fault_tolerance.enable:
        refuse(
            "checkpoint.keep_best", name, "with fault_tolerance.enable replicas would judge each for itself"
        )
    check_score("checkpoint.keep_best", name, config)


def check_score(key: str, name: str, config: Config) -> None:
    """ConfigError: a validation has no score of this name, or none by which weights could be judged."""
    first, *others = sorted(config.validation.lead_hours)
    suffixes = ["", *(f"@{hours}h" for hours in others)]
    kinds = ("rmse", "crps") if config.training.loss == "crps" else ("rmse",)
    ends = [f"{v}{suffix}" for v in predicted_variables(config.data) for suffix in suffixes]
    scores = [f"val/{kind}/{end}" for kind in kinds for end in ends]
    if name not in ("val/loss", *scores):
        refuse(key, name, f"no such score ({first} h has no suffix); {nearest(name, scores)}")


def _check_forecast(config: Config) -> None:
    forecast = config.forecast
    parse_period("forecast.period", forecast.period)
    if -1 < forecast.perturbation < 0:
        reason = "name 0 or more, or -1 for what is customary"
        refuse("forecast.perturbation", forecast.perturbation, reason)
    if forecast.interval_hours and not (forecast.period or config.data.validation_period):
        reason = "needs a first date to count from; set forecast.period"
        refuse("forecast.interval_hours", forecast.interval_hours, reason)
