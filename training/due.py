"""Schedules: actions that follow a step, and the number of model steps in a training step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from config import Config, Training

COLLECT_EVERY = 50  # steps between garbage collections: at random times they stop one rank while others wait


class Due(NamedTuple):
    """Actions that follow a step, in this order."""

    last: bool
    check: bool  # of the number of skipped steps, for which the host waits for the device
    log: bool
    collect: bool  # Python's garbage
    save: bool
    validate: bool


def actions_after(config: Config, step: int, asked_to_stop: bool = False) -> Due:
    """Return the actions after step `step`, without the validation at the end of the run."""
    last, validate = step == config.training.steps, every(config.validation.interval, step)
    # Before a validation, too, which may take long, may be ended, and may find the best checkpoint.
    interval = config.checkpoint.interval if config.checkpoint.enable else 0
    save = interval > 0 and (asked_to_stop or last or validate or every(interval, step))
    log = last or every(config.metrics.log_freq, step)
    validate = validate and not last and not asked_to_stop
    return Due(last, save or log, log, every(COLLECT_EVERY, step), save, validate)


def every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


@dataclass(frozen=True)
class Rollouts:
    """Steps of the model that a training step takes, in stages of equal length."""

    lengths: Sequence[int]  # of the rollouts of each stage
    steps: int  # of the training

    @classmethod
    def of(cls, training: Training) -> Self:
        return cls(training.rollout_steps, training.steps)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def at(self, step: int) -> int:
        """Return the steps of the model in training step `step`; 1 is the first."""
        return [length for length, begin, _ in self.stages() if begin < step][-1]

    def begins_stage(self, step: int) -> bool:
        """Return True if the length of rollouts changes at training step `step`."""
        return step > 1 and self.at(step) != self.at(step - 1)

    def stages(self) -> list[tuple[int, int, int]]:
        """Return for each stage the length of its rollouts, the training step after which it begins, and its
        last step.
        """
        number = len(self.lengths)
        borders = [self.steps * stage // number for stage in range(number + 1)]
        return list(zip(self.lengths, borders, borders[1:], strict=False))

    def passes(self, length: int, frozen: bool = False) -> int:
        """Return the forward passes that a rollout costs: a backward pass counts two, or one where matrices
        are frozen and have no gradients; recomputation counts nothing.
        """
        return length * (2 if frozen else 3)
