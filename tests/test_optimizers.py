"""Optimizers, learning rates and averages: tables against config.py, states that a checkpoint may not have,
the rate of each step and the average of the weights in closed form, and the mission's scaling.
"""

import math
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from config import LrScheduler, Optimizer
from tests.parity import Layout, SmallRun
from training.optimizers.build import DECAYS, SCALINGS, build_optimizer, learning_rate, peak_lr
from training.optimizers.layerwise import SharedSums
from training.state import EMA


def choices(section: type, key: str) -> tuple[str, ...]:
    return get_args(get_type_hints(section)[key])


def build(name: Any) -> torch.optim.Optimizer:
    parameters: dict[str, nn.Parameter] = dict(nn.Linear(4, 3).named_parameters())
    sums = SharedSums(list(parameters), parameters, 1, torch.device("cpu"))
    return build_optimizer(parameters, Optimizer(name=name), sums, torch.float32)


@pytest.mark.parametrize("name", choices(Optimizer, "name"))
def test_every_optimizer_of_the_configuration_is_built(name: str) -> None:
    assert type(build(name)).__name__ == name


def test_schedules_have_every_choice_of_the_configuration() -> None:
    assert set(DECAYS) == set(choices(LrScheduler, "decay_type"))
    assert set(SCALINGS) == set(choices(Optimizer, "lr_scaling"))


# -- learning rates


def lr_factor(
    step: int, steps: int, warmup_steps: int, decay: Any, min_factor: float, decay_ratio: float = 1.0
) -> float:
    schedule = LrScheduler(warmup_steps, decay, decay_ratio, min_factor)
    return learning_rate(Optimizer(lr=1.0, lr_reference_batch_size=0), schedule, steps, 1, step)


@pytest.mark.parametrize(("decay", "middle"), [("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)])
def test_decay_ends_at_the_last_step(decay, middle):
    last = 1.0 if decay == "constant" else 0.2
    assert lr_factor(55, 100, 10, decay, 0.0) == pytest.approx(middle)
    assert lr_factor(100, 100, 10, decay, 0.2) == pytest.approx(last)


def test_cosine_is_the_cosine():
    for step in (10, 33, 71, 100):
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        assert lr_factor(step, 100, 10, "cosine", 0.1) == pytest.approx(expected, rel=1e-12)


def test_a_run_shorter_than_its_warmup_trains():
    factors = [lr_factor(step, 3, 100, "cosine", 0.0) for step in (1, 2, 3)]
    assert factors == pytest.approx([0.01, 0.02, 0.03])


def test_scaling_of_the_mission_and_of_the_tutorial():
    assert peak_lr(3e-4, "linear", 8, 64) == pytest.approx(2.4e-3)
    assert peak_lr(3e-4, "linear", 8, 3072) == pytest.approx(0.1152)
    for batch, lr in ((64, 1e-3), (256, 2e-3), (1024, 4e-3)):  # lr 5e-4 at 16, square root
        assert peak_lr(5e-4, "sqrt", 16, batch) == pytest.approx(lr)
    assert peak_lr(1e-3, "linear", 0, 4096) == 1e-3


@pytest.mark.parametrize(
    ("decay", "middle"), [("cosine", 0.5), ("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_warmup_stable_decay(decay, middle):
    """100 steps, of which 10 warm up and the last 20 decay."""
    factors = [lr_factor(step, 100, 10, decay, 0.0, 0.2) for step in (5, 10, 50, 80, 90, 100)]
    assert factors == pytest.approx([0.5, 1.0, 1.0, 1.0, middle, 0.0])
    assert lr_factor(55, 100, 30, decay, 0.0, 1.0) == lr_factor(55, 100, 30, decay, 0.0)
    assert lr_factor(40, 100, 30, decay, 0.0, 0.9) == lr_factor(
        40, 100, 30, decay, 0.0
    )  # warm-up comes first


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
