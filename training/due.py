"""What is due after a step: on a schedule, or because all ranks agreed on it at the step before."""

from dataclasses import dataclass

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
