"""State of a run: the content of a checkpoint, and how it is restored on any layout.

Names are the model's own; sharded tensors are DTensors, so that another layout can load them. The order of
samples and all random numbers are functions of (seed, step): no generator has to be saved.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config import Config
from models.lora import trained
from parallelisms.float8 import plain_weight
from parallelisms.parallelize import ParallelModel
from training.assembly import Assembly
from training.bad_steps import BadSteps
from training.ema import EMA
from training.gradients import LossScaler
from training.optimizers.build import build_optimizer
from training.optimizers.shards import empty_moment
from training.optimizers.trust_ratios import SharedSums

Parameters = dict[str, nn.Parameter]  # under their own names, those of this rank
OPTIONAL = ("ema.", "train.", "bad_steps.")  # a run without averages or fp16 saves fewer


@dataclass
class Progress:
    """The position of a run in its data: after `step` steps it has taken `samples` samples."""

    step: int = 0
    samples: int = 0
    global_batch: int = 0  # samples of the last step; 0: no step was taken
    rollbacks: int = 0  # number of times that the run went back to a checkpoint to take other samples
    went_back_to: int = -1  # the step of the last of these checkpoints

    def advance(self, samples: int) -> None:
        """Count one step of `samples` samples."""
        self.step, self.samples, self.global_batch = self.step + 1, self.samples + samples, samples

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the values that the state has; the others stay unchanged."""
        for name in vars(self).keys() & state.keys():
            setattr(self, name, int(state[name]))


@dataclass
class TrainState:
    """Everything that a checkpoint contains, as it is on this rank."""

    parameters: Parameters
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    average: EMA | None
    progress: Progress
    bad_steps: BadSteps
    model: ParallelModel | None = None

    def restart(self, step: int) -> None:
        """Forget what was computed from the weights of later steps: gathered copies, scales of float8."""
        if self.model:
            self.model.after_exchange()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live tensors, not copies: "model.<name>", "optimizer.<name>.<moment>", "ema.<name>"."""
        parts: dict[str, Mapping[str, Tensor]] = {
            "model": self.parameters,
            "optimizer": self._moments(),
            "ema": self.average.averages if self.average else {},
            "train": {**self.progress.state_dict(), **self.scaler.state_dict()},
            "bad_steps": self.bad_steps.window,
        }
        return {
            f"{part}.{name}": plain_weight(tensor.detach())
            for part, tensors in parts.items()
            for name, tensor in tensors.items()
        }

    def _moments(self) -> dict[str, Tensor]:
        """Name the optimiser's tensors. Its groups follow from the configuration and the step."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        return {
            f"{names[parameter]}.{moment}": value
            for parameter, moments in self.optimizer.state.items()
            for moment, value in moments.items()
        }

    def allocate_moments(self, stored: Iterable[str]) -> None:
        """Allocate the optimiser's tensors of this rank's parameters that a checkpoint has, sharded alike."""
        own = {p for group in self.optimizer.param_groups for p in group["params"]}
        for key in stored:
            part, _, rest = key.partition(".")
            name, _, moment = rest.rpartition(".")
            parameter = self.parameters.get(name)
            if part == "optimizer" and parameter is not None and parameter in own:
                self.optimizer.state[parameter][moment] = empty_moment(self.optimizer, parameter, moment)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the values that are not tensors of the run; `load` has filled the tensors of `state_dict`."""
        train = {name.removeprefix("train."): tensor for name, tensor in state.items()}
        self.progress.load_state_dict(train)
        if "scaler.factor" in train:
            self.scaler.load_state_dict(train)
        if self.average:  # of parameters without one: parts of lora.also_train may be new
            self.average.restart(name for name in self.parameters if f"ema.{name}" not in state)

    def restart_average(self) -> None:
        """Start the averages from the weights."""
        if self.average:
            self.average.restart(self.parameters)


def build_state(config: Config, assembly: Assembly) -> TrainState:
    """Return the state before the first step of a model with initial weights."""
    training, model = config.training, assembly.model
    products = torch.float32 if training.mixed_precision_param == "float32" else torch.bfloat16
    optimizer = build_optimizer(model.optimized_parameters(), config.optimizer, shared_sums(model), products)
    scaler = LossScaler(enabled=training.mixed_precision_param == "float16")
    average = None
    if training.ema_decay:
        average = EMA(trained(model.parameters), training.ema_decay, model.after_exchange)
    bad_steps = BadSteps(training, model.device, model.mesh.degrees.dp)
    return TrainState(model.parameters, optimizer, scaler, average, Progress(), bad_steps, model)


def shared_sums(model: ParallelModel) -> SharedSums:
    """Return sums over all ranks of their parts of parameters; with ZeRO-1 one rank updates each."""
    degrees, own = model.mesh.degrees, model.optimized_parameters()
    names = [name for name, _ in model.meta_model.named_parameters()]
    return SharedSums(names, own, 1 if model.zero1 else degrees.world // degrees.pp, model.device)
