"""What is due after a step, its casts, clipping and loss scaling; memory that the next one uses again."""

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from config import Checkpoint, Config, Metrics, Training, Validation
from errors import DataError
from parallelisms.mesh import from_first_rank
from tests.parity import Layout, SmallRun
from tests.started_jobs import run_program
from training.due import COLLECT_EVERY, actions_after
from training.gradients import LossScaler, reduce_partial_gradients, total_norm

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


def find_a_mistake() -> None:
    with pytest.raises(DataError, match="x.zarr: is not there"):
        from_first_rank(Mock(side_effect=DataError("x.zarr: is not there")))


def test_a_mistake_that_the_first_rank_finds_is_found_by_all(ranks) -> None:
    ranks(2).run(find_a_mistake)


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


# -- gradients


def clipped_summands() -> tuple[float, float, list[float]]:
    """Norms before and after clipping to 2.5, and the gradients: rank r has their summands 1 + r and 4 r."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pair = [nn.Parameter(DTensor.from_local(torch.zeros(()), mesh, [Replicate()])) for _ in range(2)]
    for parameter, summand in zip(pair, (1.0 + dist.get_rank(), 4.0 * dist.get_rank()), strict=True):
        parameter.grad = DTensor.from_local(torch.tensor(8.0 * summand), mesh, [Partial()])
    scaler = LossScaler(True, initial=8.0)
    reduce_partial_gradients(pair)
    scaler.unscale(pair)
    norm = total_norm(pair)
    clip_grads_with_norm_(pair, 2.5, norm)
    found = [p.grad.full_tensor().item() for p in pair if isinstance(p.grad, DTensor)]
    return norm.item(), total_norm(pair).item(), found


def test_summands_of_tensor_parallelism_are_added_before_they_are_clipped(ranks):
    """3 and 4 over two ranks; torch 2.11 does not clip summands."""
    for before, after, gradients in ranks(2).run(clipped_summands):
        assert before == 5.0 and after == pytest.approx(2.5, rel=1e-5)
        assert gradients == pytest.approx([1.5, 2.0], rel=1e-5)


def test_scale_doubles_after_good_steps_and_halves_on_overflow():
    ours = LossScaler(True, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    for value in [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, float("nan"), 1.0]:
        theirs.scale(torch.ones(()))
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([value])
        theirs.step(optimizer)
        theirs.update()
        assert ours.update(torch.tensor(value)) == (value != 1.0)
        assert ours.factor == theirs.get_scale()


def test_the_scale_has_a_floor_below_which_overflow_is_a_bad_step():
    scaler = LossScaler(True, initial=4.0)
    may_overflow = []
    for _ in range(4):
        may_overflow.append(bool(scaler.may_overflow))
        assert scaler.update(torch.tensor(float("inf")))
    assert may_overflow == [True, True, False, False] and scaler.factor == 1.0


# -- memory that a step frees is reused by the next one, and returned when a validation begins


STEPS = """
import resource, sys, torch
from training.process_settings import retain_memory
if sys.argv[1] == "kept":
    retain_memory(torch.device("cpu"))
def step():
    activations = [torch.ones(10_000_000) for _ in range(4)]  # 40 MB each
    while activations:
        activations.pop()  # as backward does: the newest first
for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def number_from(program: str, how: str, local_ranks: int = 1) -> int:
    """Output of the program in its own process."""
    done = run_program(sys.executable, "-c", program, how, LOCAL_WORLD_SIZE=str(local_ranks))
    return int(done.stdout or pytest.fail(done.stderr))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library has other settings")
def test_the_next_step_faults_no_pages_in() -> None:
    assert number_from(STEPS, "kept") < 100
    assert number_from(STEPS, "kept", local_ranks=10_000) > 3_900  # of 39,000: they have little memory each


LEFT = """
import sys, torch
from contextlib import nullcontext
from pathlib import Path
from training.process_settings import return_memory, retain_memory
def held() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
cpu = torch.device("cpu")
retain_memory(cpu)
before = held()
blocks = [torch.ones(10_000_000) for _ in range(8)]  # 40 MB each
del blocks[::2]  # gaps between blocks in use
with return_memory(cpu) if sys.argv[1] == "given back" else nullcontext():
    fields = [torch.ones(15_000_000) for _ in range(4)]  # 60 MB: none fits into the place of one of those
    del fields[:3]
    print(held() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library has no malloc_trim")
def test_a_validation_begins_without_what_steps_left() -> None:
    kept = number_from(LEFT, "kept")  # KiB, of which 330,000 are not used
    assert number_from(LEFT, "given back") < kept - 150_000
