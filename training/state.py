"""State of a run: the content of a checkpoint, and how it is restored on any layout.

Names are the model's own; sharded tensors are DTensors, so that another layout can load them. The order of
samples and all random numbers are functions of (seed, step): no generator has to be saved.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from config import Config
from models.lora import trained
from parallelisms.float8 import plain_weight
from parallelisms.parallelize import ParallelModel
from training.assembly import Assembly
from training.bad_steps import BadSteps
from training.gradients import LossScaler
from training.optimizers.build import build_optimizer
from training.optimizers.layerwise import SharedSums
from training.optimizers.shards import local

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


class EMA:
    """Exponential moving average of the weights, sharded as they are; validation and export use it.

    average <- decay x average + (1 - decay) x weight, after every step, in float32.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], decay: float, after_exchange: Callable[[], None]
    ) -> None:
        """after_exchange: called after every swap of weights and averages."""
        self.parameters, self.decay, self.after_exchange = parameters, decay, after_exchange
        self.averages: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after step `step` (from 1), faster early on to forget the initial weights."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [local(average) for average in self.averages.values()]
        weights = [local(self.parameters[name]) for name in self.averages]
        torch._foreach_lerp_(averages, weights, 1 - decay)  # type: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def restart(self, names: Iterable[str]) -> None:
        """Set the averages of these parameters, if they have some, to the weights."""
        for name in self.averages.keys() & set(names):
            self.averages[name].copy_(self.parameters[name].detach())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights for the averages inside the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self.averages.items():
            weight = self.parameters[name]
            trained = weight.detach().clone()
            weight.copy_(average)
            average.copy_(trained)
        self.after_exchange()


@dataclass
class TrainState:
    """Everything that a checkpoint contains, as it is on this rank."""

    parameters: dict[str, nn.Parameter]  # under their own names, those of this rank
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
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"model.{name}"] = parameter
            # The optimizer's groups follow from the configuration and the step, and are not saved.
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{moment}"] = value
        for name, average in (self.average.averages if self.average else {}).items():
            tensors[f"ema.{name}"] = average
        for name, value in vars(self.progress).items():
            tensors[f"train.{name}"] = torch.tensor(value)
        if isinstance(self.scaler.factor, Tensor):
            tensors["train.scaler.factor"] = self.scaler.factor.double()
            tensors["train.scaler.good_steps"] = self.scaler.good_steps.double()
        for name, value in self.bad_steps.window.items():
            tensors[f"bad_steps.{name}"] = value
        return {name: plain_weight(tensor.detach()) for name, tensor in tensors.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the values that are not tensors of the run; `load` has filled the tensors of `state_dict`."""
        for name in vars(self.progress):
            if (value := state.get(f"train.{name}")) is not None:  # else it stays unchanged
                setattr(self.progress, name, int(value))
        factor = state.get("train.scaler.factor")
        if factor is not None and isinstance(self.scaler.factor, Tensor):
            self.scaler.factor = factor.to(self.scaler.factor)
            self.scaler.good_steps.copy_(state["train.scaler.good_steps"])
        if self.average:  # of parameters without one: parts of lora.also_train may be new
            self.average.restart(name for name in self.parameters if f"ema.{name}" not in state)


def build_state(config: Config, assembly: Assembly) -> TrainState:
    """Return the state before the first step of a model with initial weights."""
    training, model = config.training, assembly.model
    degrees, parameters = model.mesh.degrees, model.optimized_parameters()
    # Sums over all ranks of their parts of parameters; with ZeRO-1 one rank updates each.
    names = [name for name, _ in model.meta_model.named_parameters()]
    num_holders = 1 if model.zero1 else degrees.world // degrees.pp
    sums = SharedSums(names, parameters, num_holders, model.device)
    products = torch.float32 if training.mixed_precision_param == "float32" else torch.bfloat16
    optimizer = build_optimizer(parameters, config.optimizer, sums, products)
    scaler = LossScaler(training.mixed_precision_param == "float16", model.device)
    average = None
    if training.ema_decay:
        average = EMA(trained(model.parameters), training.ema_decay, model.after_exchange)
    bad_steps = BadSteps(training, model.device, degrees.dp)
    return TrainState(model.parameters, optimizer, scaler, average, Progress(), bad_steps, model)
