"""Check combinations of settings before any rank starts, without importing torch.

Each refusal is one line: key, value, reason, fix. What a technique alone needs is checked in its own folder.
"""

from command_line import load_config
from config import Config, Training, Validation, wall_time_seconds
from datasets.options import check_data, parse_period, predicted_variables
from datasets.variables import named_by, nearest_name
from errors import nearest, refuse
from models.registry import check_model
from parallelisms.degrees import num_ranks, resolve_degrees
from parallelisms.layout_checks import check_layout
from training.due import Rollouts, num_places
from training.losses.quantities import NEEDS, QUANTITIES, corrected, squares_of, terms_of

# Of variables, if above 0. Float32 rounds 1e-46 to 0, a loss without gradient; cells divide weights further.
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
    _check_replay(config)
    check_ramp(config.training)
    _check_optimizer(config)
    check_layout(config)
    _check_replay_capacity(config)
    _check_validation(config.validation, config.data.step_hours)
    _check_plots(config)
    _check_best(config)
    _check_forecast(config)


def _check_plots(config: Config) -> None:
    """Wind vectors are no variables, but there are scores of them."""
    there = predicted_variables(config.data)
    for name in config.validation.plot_variables:
        if not name.partition(":")[0].endswith("wind_vector") and not named_by([name], there):
            reason = f"not among data.variables{nearest_name(name, there)}; name one of them"
            refuse("validation.plot_variables", name, reason)


def _check_training(config: Config) -> None:
    weights, variables = config.training.variable_weights, predicted_variables(config.data)
    if weights and len(weights) != len(variables):
        reason = f"{len(variables)} variables are predicted; give one weight each"
        refuse("training.variable_weights", list(weights), reason)
    if weights and not any(weights):
        refuse("training.variable_weights", list(weights), "one of them must be above 0")
    if any(0 < weight < SMALLEST_WEIGHT for weight in weights):
        reason = f"too small for float32; raise all by one factor, to {SMALLEST_WEIGHT} or more, or write 0"
        refuse("training.variable_weights", list(weights), reason)
    _check_loss(config.training)
    _check_conserved(config, variables)
    _check_ensemble(config)
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable:
        reason = 'only the compiler can keep a budget; set compile.enable = true or use mode "selective"'
        refuse("activation_checkpoint.mode", "memory_budget", reason)
    wall_time_seconds(config.training.max_wall_time)


def _check_loss(training: Training) -> None:
    """Refuse settings that the loss does not use."""
    fraction = training.spectral_fraction
    if fraction and training.loss != "mse":
        reason = f'takes the place of squared errors, and training.loss = "{training.loss}"'
        refuse("training.spectral_fraction", fraction, f'{reason}; set that to "mse" or this to 0')
    weights = {
        "variable_weights": list(training.variable_weights),
        "weight_by_change": training.weight_by_change,
    }
    for key, value in weights.items():
        if value and training.loss == "relative_l2":
            reason = 'training.loss = "relative_l2" has no weights; leave this out'
            refuse(f"training.{key}", value, reason)


def _check_conserved(config: Config, variables: list[str]) -> None:
    """Quantities whose global mean is kept, by each step of the model or by the loss."""
    exact, paid = config.model.conserve, config.training.conserve
    if exact and paid:
        refuse("training.conserve", list(paid), "model.conserve keeps global means; set one of them to []")
    key, quantities = ("model.conserve", exact) if exact else ("training.conserve", paid)
    for quantity in quantities:
        if quantity not in (*QUANTITIES, *variables):
            refuse(key, quantity, f"no such quantity; {nearest(quantity, [*QUANTITIES, *variables])}")
        if not terms_of(quantity, variables):
            reason = f"needs {NEEDS[quantity]} on two levels or more; add them, or take this out"
            refuse(key, quantity, reason)
        if exact and squares_of(quantity, variables):
            reason = "no shift of one variable keeps it; training.conserve asks for it in the loss"
            refuse(key, quantity, reason)
    first = [corrected(quantity, variables) for quantity in quantities]
    for quantity in quantities:
        if lacking := [name for name in terms_of(quantity, variables) if name not in variables]:
            reason = f"is made of {lacking[0]}, which is not among data.variables; add it, or take this out"
            refuse(key, quantity, reason)
        if first.count(corrected(quantity, variables)) > 1:
            refuse(
                key,
                quantity,
                f"another one is kept by shifting {corrected(quantity, variables)}, too; take one out",
            )
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
    if training.replay_steps and weights:
        if len(weights) != training.replay_steps:
            fix = f"give {training.replay_steps}, one each of training.replay_steps"
            refuse("training.rollout_weights", weights, fix)
        if not any(weights):
            refuse("training.rollout_weights", weights, "no step has a loss; raise one")
        return
    if weights and len(weights) != rollouts.longest:
        refuse("training.rollout_weights", weights, f"give {rollouts.longest}, one each step of the longest")
    for length in lengths:
        if not any(rollouts.shares(length)):
            reason = f"a rollout of {length} has no loss, of whose steps the last"
            reason = f"{reason} {rollouts.with_gradients(length)} count; raise the weight of one of these"
            refuse("training.rollout_weights", weights, reason)


def _check_replay(config: Config) -> None:
    """Steps from forecasts of earlier training steps, and what else says where a step starts."""
    training, key = config.training, "training.replay_steps"
    steps, rollout = training.replay_steps, list(training.rollout_steps)
    if not steps:
        if training.replay_capacity:
            reason = "says where training.replay_steps keeps forecasts, and that is 0; set one of them"
            refuse("training.replay_capacity", training.replay_capacity, reason)
        return
    if steps == 1:
        refuse(key, 1, "the first step starts from an analysis; set it to 2 or more, or to 0 for no replay")
    if rollout != [1]:
        refuse("training.rollout_steps", rollout, f"{key} = {steps} takes one step at a time; set it to [1]")
    if training.loss == "crps":
        refuse(
            key, steps, 'a state is kept of each sample, and training.loss = "crps" has members; set it to 0'
        )


def _check_replay_capacity(config: Config) -> None:
    """Refuse a number of states that the ranks cannot share equally."""
    smallest = config.training.local_batch_size * resolve_degrees(num_ranks(), config.parallelism).dp
    places = num_places(config.training, smallest)
    if config.training.replay_steps and places % smallest:
        reason = f"not a multiple of local_batch_size x data-parallel ranks = {smallest}"
        near = max(round(places / smallest), 1) * smallest
        refuse("training.replay_capacity", config.training.replay_capacity, f"{reason}; try {near}")


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
    if forecast.interval_hours and not (
        forecast.period or config.data.validation_period or config.data.test_period
    ):
        reason = "needs a first date to count from; set forecast.period"
        refuse("forecast.interval_hours", forecast.interval_hours, reason)
