"""Check combinations of settings before any rank starts, without importing torch.

Each refusal is one line: key, value, reason, fix. Settings of one technique are checked in its own folder.
"""

from command_line import load_config
from config import Config, Profiling, Training, Validation, wall_time_seconds
from datasets.channels import Channels
from datasets.options import check_data, parse_period
from errors import nearest, refuse
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
    """Raise ConfigError for a combination that cannot work; the data themselves are checked when opened."""
    if "://" in config.job.dump_folder:
        reason = "a run writes into a local folder; name one, and copy it there afterwards"
        refuse("job.dump_folder", config.job.dump_folder, reason)
    check_model(config)
    check_data(config.data)
    _check_training(config)
    _check_rollouts(config.training)
    _check_optimizer(config)
    check_layout(config)
    _check_validation(config.validation, config.data.step_hours)
    _check_profiling(config.profiling)
    _check_best(config)
    _check_forecast(config)


def _check_profiling(profiling: Profiling) -> None:
    """Check that the step before a trace, which the profiler discards, fits between two traces."""
    freq, steps = profiling.profile_freq, profiling.profile_steps
    if profiling.enable_profiling and freq <= steps:
        reason = f"a trace of {steps} steps needs one more before it; set it to {steps + 1} or more"
        refuse("profiling.profile_freq", freq, reason)


def _check_training(config: Config) -> None:
    channels, weights = Channels.of(config.data), config.training.variable_weights
    variables = channels.predicted
    if weights and len(weights) != len(variables):
        reason = f"{len(variables)} variables are predicted; give one weight each"
        refuse("training.variable_weights", list(weights), reason)
    if weights and not any(weights):
        refuse("training.variable_weights", list(weights), "one of them must be above 0")
    if any(0 < weight < SMALLEST_WEIGHT for weight in weights):
        reason = f"too small for float32; raise all by one factor, to {SMALLEST_WEIGHT} or more, or write 0"
        refuse("training.variable_weights", list(weights), reason)
    _check_loss(config.training)
    _check_conserved(config, list(channels.prognostic))
    _check_ensemble(config)
    wall_time_seconds(config.training.max_wall_time)


def _check_loss(training: Training) -> None:
    """Refuse settings that the loss does not use."""
    weights = {
        "variable_weights": list(training.variable_weights),
        "weight_by_change": training.weight_by_change,
    }
    for key, value in weights.items():
        if value and training.loss == "relative_l2":
            reason = 'training.loss = "relative_l2" has no weights; leave this out'
            refuse(f"training.{key}", value, reason)


def _check_conserved(config: Config, variables: list[str]) -> None:
    """Check the quantities in model.conserve."""
    quantities = config.model.conserve
    for quantity in quantities:
        if quantity not in (*QUANTITIES, *variables):
            hint = nearest(quantity, [*QUANTITIES, *variables])
            refuse("model.conserve", quantity, f"no such quantity; {hint}")
        if not terms_of(quantity, variables):
            reason = "needs specific_humidity on two levels or more; add them, or take this out"
            refuse("model.conserve", quantity, reason)
        if lacking := [name for name in terms_of(quantity, variables) if name not in variables]:
            reason = f"needs {lacking[0]}, which is not in data.variables; add it, or take this out"
            refuse("model.conserve", quantity, reason)
    shifted = [shifted_variable(quantity, variables) for quantity in quantities]
    for quantity, variable in zip(quantities, shifted, strict=True):
        if shifted.count(variable) > 1:
            reason = f"another quantity also shifts {variable}; take one out"
            refuse("model.conserve", quantity, reason)
    if quantities and config.model.predict != "change":
        reason = 'needs the change over a step as output; set model.predict to "change"'
        refuse("model.conserve", list(quantities), reason)


def _check_ensemble(config: Config) -> None:
    """Check that members, noise and an ensemble loss are all set, or none of them."""
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
    if len(lengths) > training.steps:
        reason = f"{len(lengths)} stages of {training.steps} steps; name fewer, or raise training.steps"
        refuse("training.rollout_steps", lengths, reason)


def _check_optimizer(config: Config) -> None:
    """Refuse Muon on the host."""
    if config.optimizer.name == "Muon" and config.parallelism.cpu_offload:
        reason = "would multiply whole matrices on the host; set parallelism.cpu_offload to false"
        refuse("optimizer.name", "Muon", reason)


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
    """Check the score that selects the best checkpoint."""
    name, validation = config.checkpoint.keep_best, config.validation
    if not name:
        return
    if not (config.checkpoint.enable and validation.enable and validation.interval):
        reason = "needs checkpoint.enable, validation.enable and a validation.interval above 0"
        refuse("checkpoint.keep_best", name, reason)
    first, *later = sorted(config.validation.lead_hours)
    suffixes = ["", *(f"@{hours}h" for hours in later)]
    kinds = ("rmse", "crps") if config.training.loss == "crps" else ("rmse",)
    ends = [f"{v}{suffix}" for v in Channels.of(config.data).predicted for suffix in suffixes]
    scores = [f"val/{kind}/{end}" for kind in kinds for end in ends]
    if name not in ("val/loss", *scores):
        refuse(
            "checkpoint.keep_best", name, f"no such score ({first} h has no suffix); {nearest(name, scores)}"
        )


def _check_forecast(config: Config) -> None:
    forecast = config.forecast
    if forecast.persist_forcings and config.data.boundary_width:
        reason = "data.boundary_width needs the data of later dates; set it to false"
        refuse("forecast.persist_forcings", True, reason)
    parse_period("forecast.period", forecast.period)
    if forecast.num_members > 1 and not config.model.noise_dim:
        reason = "members of a model without noise are all the same; set it to 1"
        refuse("forecast.num_members", forecast.num_members, reason)
    if forecast.interval_hours and not (
        forecast.period or config.data.validation_period or config.data.test_period
    ):
        reason = "needs a first date to count from; set forecast.period"
        refuse("forecast.interval_hours", forecast.interval_hours, reason)
