"""The average of the weights in closed form, and its exchange with them."""

import pytest
import torch
from torch import nn

from tests.parity import Layout, SmallRun
from training.ema import EMA


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
                conditions = run.objective.condition(times, times, 0)
                window = run.data[:2, 0].nan_to_num()
                run.model.predict(run.objective.conditions.append(window, times, *conditions))
    return losses


def test_a_forecast_by_the_averages_leaves_training_as_it_was(ranks):
    """FSDP keeps what a forward without a backward has gathered: averages, for the next step."""
    plain, validated = (ranks(2).run(losses_with_forecasts, forecasts)[0] for forecasts in (False, True))
    assert plain == validated
