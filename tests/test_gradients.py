"""Norm, clipping and loss scaling, the latter against torch's GradScaler."""

import pytest
import torch
from torch import nn

from training.gradients import LossScaler, clip, total_norm


def parameters(*values: float) -> list[nn.Parameter]:
    result = [nn.Parameter(torch.zeros(())) for _ in values]
    for parameter, value in zip(result, values, strict=True):
        parameter.grad = torch.tensor(value)
    return result


def test_norm_and_clipping():
    pair = parameters(3.0, 4.0)
    norm = total_norm(pair)
    assert norm.item() == 5.0
    clip(pair, 0.0, norm)
    assert pair[0].grad is not None and pair[0].grad.item() == 3.0  # 0: no clipping
    clip(pair, 2.5, norm)
    assert pair[0].grad.item() == pytest.approx(1.5, rel=1e-5)


def test_scale_doubles_after_good_steps_and_halves_on_overflow():
    ours = LossScaler(True, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    for value in [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, float("nan"), 1.0]:
        theirs.scale(torch.ones(()))
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([value])
        theirs.step(optimizer)
        theirs.update()
        assert ours.good(torch.tensor(value)) == (value == 1.0)
        assert ours.factor == theirs.get_scale()


def test_disabled_it_does_nothing():
    scaler, loss = LossScaler(False), torch.tensor(2.0)
    assert scaler.scale(loss) is loss and scaler.good(torch.tensor(float("nan"))) and scaler.state() == {}
