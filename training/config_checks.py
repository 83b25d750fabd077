"""Refuse combinations of settings that cannot work, before any rank starts and without importing torch.

Each refusal is one line: key, value, reason, fix. What a model, the data or a layout cannot do is checked in
their folders, and what depends on the values of the data when these are opened.
"""

from command_line import load_config
from config import Config, wall_time_seconds
from datasets.channels import Channels
from datasets.options import check_data, parse_period
from errors import nearest, require
from models.registry import check_model
from parallelisms.degrees import check_layout
from training.losses.quantities import QUANTITIES, shifted_variable, terms_of

# Smallest variable weight above 0: float32 rounds 1e-46 to 0, and cells divide weights further.
SMALLEST_WEIGHT = 1e-30


def load_checked(argv: list[str]) -> Config:
    """Return the checked configuration that a command line asks for. Raises ConfigError."""
    config = load_config(argv)
    check(config)
    return config


def check(config: Config) -> None:
    """Raise ConfigError for the first combination that cannot work."""
    reason = "a run writes into a local folder; name one, and copy it there afterwards"
    require("://" not in config.job.dump_folder, "job.dump_folder", config.job.dump_folder, reason)
    check_model(config)
    check_data(config.data)

    # -- the loss: weights of variables; members, noise and an ensemble loss are all set, or none of them
    training, weights = config.training, list(config.training.variable_weights)
    channels, key = Channels.of(config.data), "training.variable_weights"
    predicted = channels.predicted
    reason = f"{len(predicted)} variables are predicted; give one weight each"
    require(not weights or len(weights) == len(predicted), key, weights, reason)
    require(not weights or any(weights), key, weights, "one of them must be above 0")
    reason = f"too small for float32; raise all by one factor, to {SMALLEST_WEIGHT} or more, or write 0"
    require(not any(0 < weight < SMALLEST_WEIGHT for weight in weights), key, weights, reason)
    reason = 'training.loss = "relative_l2" has no weights; leave this out'
    has_weights = training.loss != "relative_l2"
    require(has_weights or not weights, key, weights, reason)
    by_change = training.weight_by_change
    require(has_weights or not by_change, "training.weight_by_change", by_change, reason)

    members, noise, validated = training.members, config.model.noise_dim, config.validation.members
    if training.loss != "crps":
        reason = f'serves training.loss = "crps" alone, and that is "{training.loss}"; set this to'
        require(members == 1, "training.members", members, f"{reason} 1")
        require(not noise, "model.noise_dim", noise, f"{reason} 0")
        require(not validated, "validation.members", validated, f"{reason} 0")
    else:
        reason = "needs an ensemble: set training.members and model.noise_dim to 2 or more (docs/losses.md)"
        require(members > 1 and noise, "training.loss", training.loss, reason)
        reason = "no ensemble; set it to 2 or more, or to 0 for training.members"
        require(validated != 1, "validation.members", validated, reason)

    # -- quantities that the model conserves
    quantities, variables = config.model.conserve, list(channels.prognostic)
    for quantity in quantities:
        known = list(QUANTITIES) + variables
        reason = f"no such quantity; {nearest(quantity, known)}"
        require(quantity in known, "model.conserve", quantity, reason)
        terms = terms_of(quantity, variables)
        reason = "needs specific_humidity on two levels or more; add them, or take this out"
        require(terms, "model.conserve", quantity, reason)
        lacking = [name for name in terms if name not in variables]
        reason = f"needs {', '.join(lacking[:1])}, which is not in data.variables; add it, or take this out"
        require(not lacking, "model.conserve", quantity, reason)
    shifted = [shifted_variable(quantity, variables) for quantity in quantities]
    for quantity, variable in zip(quantities, shifted, strict=True):
        reason = f"another quantity also shifts {variable}; take one out"
        require(shifted.count(variable) == 1, "model.conserve", quantity, reason)
    reason = 'needs the change over a step as output; set model.predict to "change"'
    is_change = not quantities or config.model.predict == "change"
    require(is_change, "model.conserve", list(quantities), reason)

    # -- rollouts and optimizer
    lengths = list(training.rollout_steps)
    require(lengths, "training.rollout_steps", lengths, "name how many, [1] for the next state alone")
    reason = f"{len(lengths)} stages of {training.steps} steps; name fewer, or raise training.steps"
    require(len(lengths) <= training.steps, "training.rollout_steps", lengths, reason)
    wall_time_seconds(training.max_wall_time)
    is_muon_on_host = config.optimizer.name == "Muon" and config.parallelism.cpu_offload
    reason = "would multiply whole matrices on the host; set parallelism.cpu_offload to false"
    require(not is_muon_on_host, "optimizer.name", "Muon", reason)
    augmentation, width = training.augmentation, config.data.boundary_width
    reason = "an area with a boundary cannot be turned about the Earth's axis; leave this out"
    require(augmentation == "none" or not width, "training.augmentation", augmentation, reason)

    check_layout(config)

    # -- validation, and the score that selects the best checkpoint
    validation, step_hours = config.validation, config.data.step_hours
    leads, best = list(validation.lead_hours), config.checkpoint.keep_best
    reason = "name one lead time, or set validation.enable to false"
    require(leads or not validation.enable, "validation.lead_hours", leads, reason)
    for hours in leads:
        reason = f"not a multiple of data.step_hours = {step_hours}"
        require(hours % step_hours == 0, "validation.lead_hours", hours, reason)
        require(
            leads.count(hours) == 1, "validation.lead_hours", leads, f"{hours} is listed twice; name it once"
        )
    if best:
        is_scored = config.checkpoint.enable and validation.enable and validation.interval
        reason = "needs checkpoint.enable, validation.enable and a validation.interval above 0"
        require(is_scored, "checkpoint.keep_best", best, reason)
        first = min(leads)
        suffixes = [f"@{hours}h" if hours > first else "" for hours in sorted(leads)]
        kinds = ("rmse", "crps") if training.loss == "crps" else ("rmse",)
        names = [f"{name}{suffix}" for name in predicted for suffix in suffixes]
        scores = ["val/loss"] + [f"val/{kind}/{name}" for kind in kinds for name in names]
        named = best.removesuffix(f"@{first}h")
        reason = f"no such score ({first} h has no suffix); {nearest(named, scores[1:])}"
        require(best in scores, "checkpoint.keep_best", best, reason)

    # -- forecasts
    forecast, data = config.forecast, config.data
    reason = "data.boundary_width needs the data of later dates; set it to false"
    is_known = not (forecast.persist_forcings and data.boundary_width)
    require(is_known, "forecast.persist_forcings", True, reason)
    parse_period("forecast.period", forecast.period)
    reason = "members of a model without noise are all the same; set it to 1"
    differ = forecast.num_members == 1 or config.model.noise_dim
    require(differ, "forecast.num_members", forecast.num_members, reason)
    reason = "needs a first date to count from; set forecast.period"
    has_start = forecast.period or data.validation_period or data.test_period or not forecast.interval_hours
    require(has_start, "forecast.interval_hours", forecast.interval_hours, reason)
