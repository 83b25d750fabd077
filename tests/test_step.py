"""What a step takes and what is due after it, beside what tests/test_parity.py holds it against."""

from types import SimpleNamespace

import pytest
import torch

from config import Training
from datasets.loader import TrainSampler
from errors import DataError
from parallelisms.mesh import from_first_rank
from training.batches import Batches
from training.due import COLLECT_EVERY, ONE_STEP, Due, GlobalBatch, Rollouts, Schedule, due_at
from training.state import Progress

EVERY = Schedule(last=100, log=10, save=20, validate=30)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, set()),
        (10, {"log", "check"}),
        (20, {"log", "check", "save"}),
        (30, {"log", "check", "validate"}),
        (COLLECT_EVERY, {"log", "check", "collect"}),
        (100, {"last", "log", "check", "save", "collect"}),
    ],
)
def test_what_is_due(step: int, expected: set[str]) -> None:
    assert {name for name, value in vars(due_at(step, EVERY)).items() if value} == expected


def test_what_is_asked_for_comes_beside_the_schedule() -> None:
    assert due_at(7, EVERY, asked_to_save=True) == Due(False, True, True, False, False, False)
    stopped = due_at(30, EVERY, asked_to_stop=True)
    assert stopped.save and stopped.log and not stopped.validate  # it is started again, and validates then


def test_nothing_is_saved_where_checkpoints_are_off() -> None:
    off = Schedule(last=100, log=10, save=0, validate=0)
    assert not any(due_at(step, off, asked_to_save=True, asked_to_stop=True).save for step in (5, 20, 100))


def test_a_validation_that_judges_has_its_checkpoint() -> None:
    judging = Schedule(last=100, log=10, save=40, validate=30, keeps_best=True)
    assert [due_at(step, judging).save for step in (30, 40, 50)] == [True, True, False]


class CountingLoader:
    """A loader whose batches say where they lie in the sequence of samples."""

    dataset = SimpleNamespace(unpack=lambda fields: fields)

    def __init__(self) -> None:
        self.sampler = TrainSampler(100, 0, 2, 1, 0, 1)
        self.accumulations: list[int] = []
        self.starts: list[tuple[int, int]] = []
        self.num_dates: list[int] = []

    def iterate(self, taken: int, shuffle: int = 0, num_dates: int = 2, accumulation: int = 1):
        self.starts.append((taken, shuffle))
        self.num_dates.append(num_dates)
        self.accumulations.append(accumulation)
        for first in range(taken, 1000, 2):
            yield torch.full((2, 1), float(first)), torch.zeros(2, dtype=torch.int64)


def batches_of(
    loader: CountingLoader, progress: Progress, size: GlobalBatch, rollouts: Rollouts = ONE_STEP
) -> Batches:
    return Batches(loader, progress, torch.device("cpu"), size, rollouts)  # type: ignore[arg-type]


def test_the_loader_goes_where_progress_stands() -> None:
    """On with the next samples; back after a rollback; the same again after a step that was not taken."""
    loader, progress = CountingLoader(), Progress()
    batches = batches_of(loader, progress, GlobalBatch.of_micro_batches(2, 2))

    def firsts() -> list[int]:
        return [int(fields[0, 0]) for fields, _ in batches]

    assert len(batches) == 2 and firsts() == [0, 2]
    progress.advance(batches.samples)
    assert firsts() == [4, 6] and loader.starts == [(0, 0)]
    assert firsts() == [4, 6] and loader.starts == [(0, 0), (4, 0)]  # a replica was lost
    progress.advance(batches.samples)
    assert firsts() == [8, 10] and len(loader.starts) == 2
    progress.samples, progress.rollbacks = 4, 1
    assert firsts() == [4, 6] and loader.starts[-1] == (4, 1)


def test_a_stage_reads_what_its_steps_need() -> None:
    """The same samples in the same order, with as many dates as a rollout has states."""
    loader, progress = CountingLoader(), Progress()
    one, rollouts = GlobalBatch.of_micro_batches(1, 2), Rollouts(((1, 1), (3, 4)))
    batches = batches_of(loader, progress, one, rollouts)
    firsts = []
    for _ in range(4):
        firsts += [int(fields[0, 0]) for fields, _ in batches]
        progress.advance(batches.samples)
    assert firsts == [0, 2, 4, 6] and loader.starts == [(0, 0), (4, 0)] and loader.num_dates == [2, 5]
    again = batches_of(loader, progress, one, rollouts)
    assert next(iter(again))[0][0, 0] == 8 and loader.num_dates[-1] == 5


def test_a_ramp_takes_each_sample_once() -> None:
    """Batches of 2, 4 and 6 samples, two steps each: none is left out or taken twice where they change, and a
    run that begins anew in between, or goes back, takes the same.
    """
    ramp = GlobalBatch.of(Training(steps=6, batch_ramp=(2, 4, 6)), 6, 2)
    assert [ramp.at(step) for step in range(1, 7)] == [2, 2, 4, 4, 6, 6] and ramp.most_micro_batches == 3
    named = GlobalBatch.of(Training(steps=6, batch_ramp=(2, 6), batch_ramp_from_step=(6,)), 6, 2)
    assert [named.micro_batches(step) for step in (1, 5, 6, 9)] == [1, 1, 3, 3]
    loader, progress, steps, states = CountingLoader(), Progress(), [], []
    batches = batches_of(loader, progress, ramp)
    for _ in range(6):
        states.append(progress.state_dict())
        steps.append([int(fields[0, 0]) for fields, _ in batches])
        progress.advance(batches.samples)
    assert steps == [[0], [2], [4, 6], [8, 10], [12, 14, 16], [18, 20, 22]]
    assert loader.starts == [(0, 0), (4, 0), (12, 0)] and loader.accumulations == [1, 2, 3]
    assert progress.samples == 24 and batches.epoch == 0.24
    for state, expected in reversed(list(zip(states, steps, strict=True))):
        progress.load_state_dict(state)
        for again in (batches, batches_of(CountingLoader(), progress, ramp)):
            assert [int(fields[0, 0]) for fields, _ in again] == expected


def fail_on_the_first_rank() -> str:
    def read() -> None:
        raise DataError("x.zarr: is not there")

    try:
        from_first_rank(read)
    except DataError as error:
        return str(error)
    return "nothing"


def test_a_mistake_that_the_first_rank_finds_is_found_by_all(ranks) -> None:
    assert ranks(2).run(fail_on_the_first_rank) == ["x.zarr: is not there"] * 2
