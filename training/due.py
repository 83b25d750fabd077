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
    judges: bool = False  # a validation decides whether its checkpoint is the best: it is written before


@dataclass(frozen=True)
class Due:
    last: bool
    save: bool
    look: bool  # whether steps were skipped: the host waits for the device
    log: bool
    collect: bool
    validate: bool


def due_at(step: int, schedule: Schedule, asked_to_save: bool = False, asked_to_stop: bool = False) -> Due:
    """What comes after step `step`, in the order of the fields of `Due`."""
    last = step == schedule.last
    validate = every(schedule.validate, step) and not last and not asked_to_stop
    wanted = asked_to_save or asked_to_stop or last or every(schedule.save, step)
    save = bool(schedule.save) and (wanted or (schedule.judges and every(schedule.validate, step)))
    log = last or every(schedule.log, step)
    return Due(last, save, save or log, log, every(COLLECT_EVERY, step), validate)


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


@dataclass(frozen=True)
class Rollouts:
    """How many steps of the model a training step goes through, and what each of them counts."""

    stages: tuple[tuple[int, int], ...]  # first training step, and the steps of the model from there on
    gradient_steps: int = 0  # the last of them that have losses and gradients; 0: all
    weights: Sequence[float] = ()  # of the losses of the longest rollout; empty: all the same

    @classmethod
    def of(cls, training: Training) -> Self:
        lengths, begin = training.rollout_steps, training.rollout_from_step
        parts = range(1, len(lengths))
        first = [1, *(begin or (1 + training.steps * part // len(lengths) for part in parts))]
        stages = tuple(zip(first, lengths, strict=True))
        return cls(stages, training.rollout_gradient_steps, training.rollout_weights)

    @property
    def longest(self) -> int:
        return max(length for _, length in self.stages)

    def at(self, step: int) -> int:
        """Steps of the model in training step `step`; 1 is the first."""
        return [length for first, length in self.stages if first <= step][-1]

    def with_gradients(self, length: int) -> int:
        """How many of a rollout's steps, the last ones, gradients go through."""
        return min(self.gradient_steps or length, length)

    def shares(self, length: int) -> list[float]:
        """What the loss of each step of a rollout counts: 0 before its gradients begin, 1 in all."""
        begin = length - self.with_gradients(length)
        weights = list(self.weights[:length]) or [1.0] * length
        weights = [0.0] * begin + weights[begin:]
        return [weight / (sum(weights) or 1.0) for weight in weights]

    def passes(self, length: int) -> int:
        """Forward passes that a rollout is worth: a backward pass counts two; what is repeated, nothing."""
        return length + 2 * self.with_gradients(length)


ONE_STEP = Rollouts(((1, 1),))
