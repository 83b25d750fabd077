"""Samples turned about the axis of the Earth (training.augmentation); test_history.py has their gradients."""

from typing import Any

import numpy as np
import pytest
import torch

from config import Config, Training
from datasets.channels import Channels
from datasets.conditions import FORCINGS, Conditions
from datasets.grid import Grid, global_grid
from errors import ConfigError
from models.noise import keys_of_members
from planning.start_checks import check_model
from tests.parity import Layout, SmallRun
from training.objective import TURN_STREAM

GRID = (12, 10)
TIMES = torch.tensor([1_577_836_800, 1_583_100_000, 1_590_000_000])


def test_all_that_depends_on_the_position_is_moved_along() -> None:
    """Static fields and every forcing, exactly as the columns of the window."""
    generator = torch.Generator().manual_seed(0)
    static = [torch.randn(GRID, generator=generator).numpy() for _ in range(2)]
    channels = Channels(("one", "two"), computed=tuple(FORCINGS))
    conditions, shifts = Conditions(static, channels, global_grid(GRID)), torch.tensor([0, 3, 9])
    states = torch.randn(3, 2, *GRID, generator=generator)
    inputs = conditions.append(states, TIMES)
    expected = [field.roll(shift, dims=-1) for field, shift in zip(inputs, shifts.tolist(), strict=True)]
    window = conditions.turn(states[:, None], shifts)[:, 0]
    assert torch.equal(conditions.append(window, TIMES, shifts=shifts), torch.stack(expected))


def test_the_mirror_image_is_that_of_the_other_season() -> None:
    """Winds to the north change their sign; half a year later the sun is as high on the other side; positions
    stay, and with them the Coriolis force.
    """
    channels = Channels(("u_component_of_wind:500", "10m_v_component_of_wind"), computed=tuple(FORCINGS))
    conditions = Conditions([np.arange(120.0).reshape(GRID)], channels, global_grid(GRID))
    states, shift = torch.randn(1, 1, 2, *GRID, generator=torch.Generator().manual_seed(0)), 4
    shifts, equinox = torch.tensor([GRID[1] + shift]), torch.tensor([1_584_676_200])  # 2020-03-20 03:50
    image = conditions.turn(states, shifts)
    assert torch.equal(image[:, :, 0], states[:, :, 0].flip(-2).roll(shift, -1))
    assert torch.equal(image[:, :, 1], -states[:, :, 1].flip(-2).roll(shift, -1))
    season = 90 * 86_400
    for times, later in ((equinox + season, equinox - season), (equinox - season, equinox + season)):
        plain, other = (conditions.append(states[:, 0], date).roll(shift, -1) for date in (times, later))
        inputs = conditions.append(image[:, 0], times, shifts=shifts)
        found = dict(zip(["u", "v", "static", *FORCINGS], inputs[0], strict=True))
        expected = dict(zip(["u", "v", "static", *FORCINGS], plain[0], strict=True))
        assert torch.equal(found["static"], expected["static"].flip(-2))
        for name in FORCINGS:
            if name == "toa_incident_solar_radiation":
                assert torch.allclose(found[name], expected[name].flip(-2), atol=1e-6)
                assert (found[name] - other[0][3]).abs().max() < 0.1  # the Earth is nearer in January
            elif "day_of_year" in name:
                assert torch.equal(found[name], -expected[name])
            else:
                assert torch.equal(found[name], expected[name])


def test_shifts_are_a_function_of_seed_step_and_date(one_rank) -> None:
    """Every number of columns of either image is as likely, and all members of a sample have the same."""
    run, times = SmallRun(Layout(grid=GRID, members=2, roll=True)), 21_600 * torch.arange(5_000)
    fields = torch.arange(float(GRID[1])).expand(len(times), 1, 3, 2, -1)

    def draw(seed: int, step: int) -> torch.Tensor:
        rolled, shifts = run.objective.augment(fields, keys_of_members(seed, step, times, 2))
        assert shifts is not None and torch.equal(shifts[::2], shifts[1::2])
        assert torch.equal(rolled[:, 0, 0, 0].argmin(dim=1), shifts[::2] % GRID[1])
        return shifts[::2]

    counts = draw(0, 1).bincount(minlength=2 * GRID[1])
    assert len(counts) == 2 * GRID[1] and (counts.double() - 250).abs().max() < 60
    assert torch.equal(draw(0, 1), draw(0, 1))
    for other in (draw(1, 1), draw(0, 2)):
        assert (other == draw(0, 1)).double().mean() < 0.15
    assert times.max() < TURN_STREAM  # a date is no stream of the roll


@pytest.mark.parametrize(
    ("grid", "augmentation", "message"),
    [
        (Grid(np.linspace(60, -60, 12), np.arange(12.0)), "roll", "do not go round the globe"),
        (Grid(np.linspace(60, -30, 12), np.arange(12) * 30.0), "roll_and_mirror", "same in both hemispheres"),
    ],
)
def test_grids_without_the_symmetry_are_refused(grid: Grid, augmentation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"training.augmentation = '{augmentation}': .*{message}"):
        check_model(Config(training=Training(augmentation=augmentation)), grid)
