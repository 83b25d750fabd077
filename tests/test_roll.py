"""Samples turned about the axis of the Earth (training.augmentation); tests/parity.py has layouts."""

from dataclasses import replace

import pytest
import torch

from datasets.channels import Channels
from datasets.conditions import FORCINGS, Conditions, roll_longitudes
from datasets.grid import global_grid
from models.noise import keys_of_members
from tests.parity import Layout, SmallRun, difference
from training.batches import Batch
from training.objective import ROLL_STREAM
from training.rollout import forward_backward

GRID = (12, 10)
TIMES = torch.tensor([1_577_836_800, 1_583_100_000, 1_590_000_000])


def test_all_that_depends_on_the_position_is_moved_along() -> None:
    """Static fields and every forcing, exactly as the columns of the window."""
    generator = torch.Generator().manual_seed(0)
    static = [torch.randn(GRID, generator=generator).numpy() for _ in range(2)]
    channels = Channels(("one", "two"), computed=tuple(FORCINGS))
    conditions, shifts = Conditions(static, channels, global_grid(GRID)), torch.tensor([0, 3, 9])
    window = torch.randn(3, 2, *GRID, generator=generator)
    inputs = conditions.append(window, TIMES)
    expected = [field.roll(shift, dims=-1) for field, shift in zip(inputs, shifts.tolist(), strict=True)]
    rolled = conditions.append(roll_longitudes(window, shifts), TIMES, shifts=shifts)
    assert torch.equal(rolled, torch.stack(expected))


@pytest.mark.parametrize(
    "layout",
    (
        Layout(history=2, rollout=3),
        Layout(unet=True),
        Layout(rollout=2, members=3),
        Layout(rollout=2, roles=True, conserve=True),
    ),
)
def test_loss_and_gradients_are_those_of_samples_rolled_by_hand(one_rank, layout: Layout) -> None:
    """Each sample by itself with the constant fields of its own turn, and no augmentation."""
    options = () if layout.unet else (("attention_backend", "math"),)
    layout = replace(layout, grid=GRID, model=options)
    run, plain = SmallRun(replace(layout, roll=True)), SmallRun(layout)
    loss, _ = run.step(0)
    (batch,) = plain.batches(0)
    _, shifts = run.objective.roll(batch.fields, run.objective.noise_keys(1, batch.times))
    assert shifts is not None and len(set(shifts.tolist())) > 3
    shifts = shifts[:: layout.members]
    objective, number, total = plain.objective, len(shifts), 0.0
    static = objective.conditions.static
    for sample, shift in enumerate(shifts.tolist()):
        objective.conditions.static = static.roll(shift, dims=-1)
        rows = slice(sample, sample + 1)
        rolled = Batch(batch.fields[rows].roll(shift, dims=-1), batch.times[rows])
        total += forward_backward(objective, 1, rolled, 1 / number, is_last=True).item() / number
    assert loss == pytest.approx(total, rel=1e-6)
    gradients = {name: p.grad.numpy() for name, p in plain.model.parameters.items() if p.grad is not None}
    assert difference(run.gradients, gradients)[0] < 1e-5


def test_shifts_are_a_function_of_seed_step_and_date(one_rank) -> None:
    """Every number of columns is as likely, and all members of a sample have the same."""
    run, times = SmallRun(Layout(grid=GRID, members=2, roll=True)), 21_600 * torch.arange(5_000)
    fields = torch.arange(GRID[1]).expand(len(times), 1, -1)

    def draw(seed: int, step: int) -> torch.Tensor:
        rolled, shifts = run.objective.roll(fields, keys_of_members(seed, step, times, 2))
        assert shifts is not None and torch.equal(shifts[::2], shifts[1::2])
        assert torch.equal(rolled[:, 0].argmin(dim=1), shifts[::2])
        return shifts[::2]

    counts = draw(0, 1).bincount(minlength=GRID[1])
    assert len(counts) == GRID[1] and (counts.double() - 500).abs().max() < 100
    assert torch.equal(draw(0, 1), draw(0, 1))
    for other in (draw(1, 1), draw(0, 2)):
        assert (other == draw(0, 1)).double().mean() < 0.15
    assert times.max() < ROLL_STREAM  # a date is no stream of the roll
