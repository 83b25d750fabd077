"""The average of the weights in closed form, and its exchange with them."""

import pytest
import torch
from torch import nn

from training.ema import EMA


def test_average_follows_its_recurrence():
    weight = nn.Parameter(torch.tensor([1.0]))
    average, expected = EMA({"w": weight}, decay=0.9), 1.0
    for step in range(1, 200):
        weight.data.fill_(float(step))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert average.averages["w"].item() == pytest.approx(expected, rel=1e-5)


def test_averages_stand_in_for_the_weights_and_leave_again():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    average = EMA({"w": weight}, decay=0.5)
    weight.data.mul_(3)
    with pytest.raises(RuntimeError), average.applied():
        assert weight.tolist() == [1.0, 2.0]
        raise RuntimeError
    assert weight.tolist() == [3.0, 6.0] and average.averages["w"].tolist() == [1.0, 2.0]
