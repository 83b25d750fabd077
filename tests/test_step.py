"""What a step takes and what is due after it, beside what tests/test_parity.py holds it against; casts of
weights in one that accumulates gradients.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config import Checkpoint, Config, Metrics, Training, Validation
from errors import DataError
from parallelisms.mesh import from_first_rank
from tests.parity import Layout, SmallRun
from training.due import COLLECT_EVERY, actions_after

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


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_weights_are_cast_once_a_step(one_rank, checkpointing: str) -> None:
    """Of a block's first MLP matrix, which has a shape of its own."""
    small = SmallRun(Layout(1, accumulation=4, dtype="bfloat16", activation_checkpoint=checkpointing))
    shapes = [tuple(p.shape) for name, p in small.model.parameters.items() if name.endswith("mlp.up.weight")]
    small.watch = casts = Casts()
    small.step(0)
    assert casts.shapes.count(shapes[0]) == len(shapes)
