"""The learning rate of each step and the average of the weights in closed form, and the mission's scaling."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from config import LrScheduler, Optimizer
from tests.parity import Layout, SmallRun
from training.optimizers.build import learning_rate, peak_lr
from training.state import EMA

# -- learning rates

SHAPES = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


@pytest.mark.parametrize("decay", SHAPES)
@pytest.mark.parametrize(("ratio", "warmup", "start"), [(1.0, 10, 10), (0.2, 10, 80), (0.9, 30, 30)])
def test_rates_rise_stay_and_decay(decay: Any, ratio, warmup, start):
    """Over 100 steps, of which the last `ratio` decay to 0.2 of the peak; warm-up comes first."""
    schedule, settings = LrScheduler(warmup, decay, ratio, 0.2), Optimizer(lr=1.0, lr_reference_batch_size=0)
    for step in range(1, 101):
        expected = 0.2 + 0.8 * SHAPES[decay](max(0.0, (step - start) / (100 - start)))
        expected = min(step / warmup, expected) if step < warmup else expected
        assert learning_rate(settings, schedule, 100, 1, step) == pytest.approx(expected, rel=1e-12)
    short = [learning_rate(settings, LrScheduler(100, decay), 3, 1, step) for step in (1, 2, 3)]
    assert short == pytest.approx([0.01, 0.02, 0.03])  # of a run shorter than its warm-up


def test_scaling_of_the_mission_and_of_the_tutorial():
    assert peak_lr(3e-4, "linear", 8, 64) == pytest.approx(2.4e-3)
    assert peak_lr(3e-4, "linear", 8, 3072) == pytest.approx(0.1152)
    for batch, lr in ((64, 1e-3), (256, 2e-3), (1024, 4e-3)):  # lr 5e-4 at 16, square root
        assert peak_lr(5e-4, "sqrt", 16, batch) == pytest.approx(lr)
    assert peak_lr(1e-3, "linear", 0, 4096) == 1e-3


# -- averages of the weights


def test_average_follows_its_recurrence():
    weight = nn.Parameter(torch.tensor([1.0]))
    average, expected = EMA({"w": weight}, 0.9, lambda: None), 1.0
    for step in range(1, 200):
        weight.data.fill_(float(step))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.averages["w"].item() == pytest.approx(expected, rel=1e-5)


def test_averages_stand_in_for_the_weights_and_leave_again():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    average = EMA({"w": weight}, 0.5, lambda: None)
    weight.data.mul_(3)
    with pytest.raises(RuntimeError), average.applied():
        assert weight.tolist() == [1.0, 2.0]
        raise RuntimeError
    assert weight.tolist() == [3.0, 6.0] and average.averages["w"].tolist() == [1.0, 2.0]


def losses_with_forecasts(forecasts: bool) -> list[float]:
    """Losses of three steps; after each, perhaps, a forecast by the averages, as in a validation."""
    run, losses = SmallRun(Layout(2), ema_decay=0.9), []
    for step in range(3):
        losses.append(run.step(step)[0])
        if forecasts and run.state.average:
            with run.state.average.applied():
                times = torch.zeros(2, dtype=torch.int64)
                conditions = run.objective.conditions.draw(times, times)
                window = run.data[:2, 0].nan_to_num()
                run.model.predict(run.objective.conditions.append(window, times, *conditions))
    return losses


def test_a_forecast_by_the_averages_leaves_training_as_it_was(ranks):
    """FSDP keeps what a forward without a backward has gathered: averages, for the next step."""
    plain, validated = (ranks(2).run(losses_with_forecasts, forecasts)[0] for forecasts in (False, True))
    assert plain == validated
