"""What a step takes and what is due after it, beside what tests/test_parity.py holds it against; casts of
weights in one that accumulates gradients.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config import Checkpoint, Config, Metrics, Training, Validation
from errors import DataError
from parallelisms.mesh import from_first_rank
from tests.parity import Layout, SmallRun
from training.batches import Batches
from training.due import COLLECT_EVERY, actions_after
from training.state import Progress

EVERY = Config(
    training=Training(steps=100),
    metrics=Metrics(log_freq=10),
    checkpoint=Checkpoint(interval=20),
    validation=Validation(interval=30),
)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, set()),
        (10, {"log", "check"}),
        (20, {"log", "check", "save"}),
        (30, {"log", "check", "save", "validate"}),
        (COLLECT_EVERY, {"log", "check", "collect"}),
        (100, {"last", "log", "check", "save", "collect"}),
    ],
)
def test_what_is_due(step: int, expected: set[str]) -> None:
    assert {name for name, value in actions_after(EVERY, step)._asdict().items() if value} == expected


def test_what_changes_the_schedule() -> None:
    """Being asked to stop; checkpoints that are off."""
    stopped = actions_after(EVERY, 30, asked_to_stop=True)
    assert stopped.save and stopped.log and not stopped.validate  # it is started again, and validates then
    off = replace(EVERY, checkpoint=Checkpoint(enable=False))
    assert not any(actions_after(off, step, asked_to_stop=True).save for step in (5, 20, 100))


class SamplesWithoutFields:
    """A dataset of 100 samples, without their fields."""

    samples = np.zeros((100, 2), int)

    def __len__(self) -> int:
        return len(self.samples)

    def with_dates(self, samples: np.ndarray) -> Self:
        return self

    def unpack(self, fields: torch.Tensor) -> torch.Tensor:
        return fields


def test_the_loader_goes_where_progress_stands(monkeypatch) -> None:
    """On with the next samples; back after a rollback; the same again after a step that was not taken."""
    starts, progress = [], Progress()

    def load(dataset, sampler, *_, **__):
        """Yield batches that contain their position in the sequence of samples."""
        starts.append((sampler.start, sampler.shuffle))
        for first in range(sampler.start, 1000, 2):
            yield torch.full((2, 1), float(first)), torch.zeros(2, dtype=torch.int64)

    monkeypatch.setattr("training.batches.Loader", load)
    config = Config(training=Training(local_batch_size=2))
    mesh = SimpleNamespace(dp_rank=0, degrees=SimpleNamespace(dp=1))
    model: Any = SimpleNamespace(device=torch.device("cpu"), mesh=mesh)
    state: Any = SimpleNamespace(progress=progress)
    dataset: Any = SamplesWithoutFields()
    batches = Batches(dataset, config, state, model, 4)

    def firsts() -> list[int]:
        return [int(fields[0, 0]) for fields, _ in batches]

    assert len(batches) == 2 and firsts() == [0, 2]
    progress.advance(4)
    assert firsts() == [4, 6] and starts == [(0, 0)]
    assert firsts() == [4, 6] and starts == [(0, 0), (4, 0)]
    progress.advance(4)
    assert firsts() == [8, 10] and len(starts) == 2
    progress.samples, progress.rollbacks = 4, 1
    assert firsts() == [4, 6] and starts[-1] == (4, 1)
    assert batches.epoch == 0.04


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


# -- casts of weights


class Casts(TorchDispatchMode):
    """Number of matrices that are cast from float32 to bfloat16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return out


def casts_of_a_step(layout: Layout) -> int:
    """Of a block's first MLP matrix, which has a shape of its own."""
    small = SmallRun(layout)
    shapes = [tuple(p.shape) for name, p in small.model.parameters.items() if name.endswith("mlp.up.weight")]
    small.watch = casts = Casts()
    small.step(0)
    return casts.shapes.count(shapes[0]) // len(shapes)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_weights_are_cast_once_a_step(one_rank, checkpointing: str) -> None:
    layout = Layout(1, accumulation=4, dtype="bfloat16", activation_checkpoint=checkpointing)
    assert casts_of_a_step(layout) == 1
