"""What is due in a step and after it: on a schedule, or because all ranks agreed on it at the step before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from config import Training

COLLECT_EVERY = (
    50  # steps between collections of Python's garbage: at random they stop one rank while others wait
)


@dataclass(frozen=True)
class Schedule:
    """Steps between ...; 0: never, but for what the last step brings."""

    last: int  # the step that ends the run
    log: int
    save: int
    validate: int
    keeps_best: bool = False  # validations choose the best checkpoint, which is saved before each


@dataclass(frozen=True)
class Due:
    last: bool
    save: bool
    check: bool  # how many steps were skipped, for which the host waits for the device
    log: bool
    collect: bool
    validate: bool


def due_at(step: int, schedule: Schedule, asked_to_save: bool = False, asked_to_stop: bool = False) -> Due:
    """What comes after step `step`, in the order of the fields of `Due`."""
    last = step == schedule.last
    validate = every(schedule.validate, step) and not last and not asked_to_stop
    wanted = asked_to_save or asked_to_stop or last or every(schedule.save, step)
    save = bool(schedule.save) and (wanted or (schedule.keeps_best and every(schedule.validate, step)))
    log = last or every(schedule.log, step)
    return Due(last, save, save or log, log, every(COLLECT_EVERY, step), validate)


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


Stages = tuple[tuple[int, int], ...]  # first training step, and what holds from there on


def stages_of(values: Sequence[int], from_step: Sequence[int], steps: int) -> Stages:
    """from_step: where each later value begins; empty: all have equal parts of `steps`."""
    parts = range(1, len(values))
    first = [1, *(from_step or (1 + steps * part // len(values) for part in parts))]
    return tuple(zip(first, values, strict=True))


def stage_at(stages: Stages, step: int) -> int:
    """What holds in training step `step`; 1 is the first."""
    return [value for first, value in stages if first <= step][-1]


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of each training step over all ranks: more in later stages, where the run has a ramp."""

    stages: Stages  # of samples
    smallest: int  # that all ranks take through the model at once: a micro-batch each

    @classmethod
    def of(cls, training: Training, chosen: int, smallest: int) -> Self:
        """chosen: throughout, where there is no ramp."""
        sizes = training.batch_ramp or (chosen,)
        return cls(stages_of(sizes, training.batch_ramp_from_step, training.steps), smallest)

    @classmethod
    def of_micro_batches(cls, number: int, smallest: int = 1) -> Self:
        """So many in every step."""
        return cls(((1, number * smallest),), smallest)

    @property
    def most_micro_batches(self) -> int:
        return max(size for _, size in self.stages) // self.smallest

    def at(self, step: int) -> int:
        """Samples of training step `step`; 1 is the first."""
        return stage_at(self.stages, step)

    def micro_batches(self, step: int) -> int:
        """Of training step `step`, that each rank accumulates."""
        return self.at(step) // self.smallest


@dataclass(frozen=True)
class Rollouts:
    """How many steps of the model a training step goes through, and what each of them counts."""

    stages: Stages  # of steps of the model
    gradient_steps: int = 0  # the last of them that have losses and gradients; 0: all
    weights: Sequence[float] = ()  # of the losses of the longest rollout; empty: all the same

    @classmethod
    def of(cls, training: Training) -> Self:
        stages = stages_of(training.rollout_steps, training.rollout_from_step, training.steps)
        return cls(stages, training.rollout_gradient_steps, training.rollout_weights)

    @property
    def longest(self) -> int:
        return max(length for _, length in self.stages)

    def at(self, step: int) -> int:
        """Steps of the model in training step `step`; 1 is the first."""
        return stage_at(self.stages, step)

    def with_gradients(self, length: int) -> int:
        """How many of a rollout's steps, the last ones, gradients go through."""
        return min(self.gradient_steps or length, length)

    def shares(self, length: int) -> list[float]:
        """What the loss of each step of a rollout counts: 0 before its gradients begin, 1 in all."""
        begin = length - self.with_gradients(length)
        weights = list(self.weights[:length]) or [1.0] * length
        weights = [0.0] * begin + weights[begin:]
        return [weight / (sum(weights) or 1.0) for weight in weights]

    def passes(self, length: int, frozen: bool = False) -> int:
        """Forward passes that a rollout is worth: a backward pass counts two, or one where matrices are
        frozen and have no gradients; what is repeated, nothing.
        """
        return length + (1 if frozen else 2) * self.with_gradients(length)


ONE_STEP = Rollouts(((1, 1),))


def num_places(training: Training, smallest: int) -> int:
    """Of forecasts that all ranks keep (training/replay.py); `smallest`: samples that they take at once."""
    return training.replay_capacity or max(training.global_batch_size, smallest)
