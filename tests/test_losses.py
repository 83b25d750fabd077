"""Losses against explicit sums in float64."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from datasets.grid import area_weights, global_grid
from tests.parity import Layout, SmallRun, cut
from training.losses.pointwise import (
    PENALTIES,
    fused_sum_of_costs,
    mean_weights,
    relative_l2_weights,
    root_loss,
    sum_of_costs,
)


def mse(prediction, target, mask, area, weights):
    return sum_of_costs(prediction, target, mean_weights(mask, area, weights)).sum()


def relative_l2(prediction, target, mask):
    squares = sum_of_costs(prediction, target, relative_l2_weights(mask, target))
    return root_loss(squares, len(mask), lambda total: total)


def batch(b=4, v=3, h=6, w=5, missing=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    prediction, target = (torch.randn(b, v, h, w, generator=generator) for _ in range(2))
    mask = torch.rand(b, v, h, w, generator=generator) > missing
    area = torch.tensor(area_weights(np.linspace(90, -90, h)), dtype=torch.float32)
    return prediction, target * mask, mask, area, torch.tensor([1.0, 2.0, 0.5])


@pytest.mark.parametrize(("loss", "expected", "tolerance"), [("mse", 1 / 3, 1e-5), ("mae", 1 / 2, 1e-4)])
def test_losses_of_a_known_field_on_721_rows(loss, expected, tolerance):
    """The error sin(latitude) is evenly spread over area from -1 to 1: the mean of its squares is 1/3, that
    of its sizes 1/2; cells of 0.25 degrees know it to so much.
    """
    latitude = np.linspace(90, -90, 721)
    area = torch.tensor(area_weights(latitude), dtype=torch.float32)
    error = torch.tensor(np.sin(np.deg2rad(latitude)), dtype=torch.float32)[:, None].expand(1, 1, 721, 4)
    weights = mean_weights(torch.ones_like(error, dtype=torch.bool), area, torch.ones(1))
    found = sum_of_costs(error, torch.zeros_like(error), weights, PENALTIES[loss]).sum()
    assert found.item() == pytest.approx(expected, rel=tolerance)


def test_a_field_without_any_value_costs_nothing():
    prediction, target, mask, area, weights = batch()
    mask[1] = False
    prediction.requires_grad_()
    loss = mse(prediction, target, mask, area, weights)
    loss.backward()
    assert torch.isfinite(loss) and prediction.grad is not None
    assert torch.isfinite(prediction.grad).all() and not prediction.grad[1].any()


def test_a_variable_without_any_value_adds_nothing_to_the_sum_of_roots():
    prediction, target, mask, area, weights = batch()
    prediction = (10 * prediction).requires_grad_()
    mask[1, 2] = False
    costs = sum_of_costs(prediction, target, mean_weights(mask, area, weights), dim=1)  # (B, V)
    root_loss(costs, len(mask), lambda total: total).backward()
    assert prediction.grad is not None and torch.isfinite(prediction.grad).all()
    assert not prediction.grad[1, 2].any() and prediction.grad[1, 1].any()


def test_relative_l2_is_not_weighted_by_area():
    target = torch.tensor([[3.0, 4.0], [6.0, 8.0]]).view(2, 1, 1, 2)
    prediction = target + torch.tensor([[3.0, 4.0], [0.0, 0.0]]).view(2, 1, 1, 2)
    mask = torch.ones_like(target, dtype=torch.bool)
    assert relative_l2(prediction, target, mask).item() == pytest.approx((5 / 5 + 0 / 10) / 2)


def exact_cost(loss: str, error: torch.Tensor) -> torch.Tensor:
    return error.abs() if loss == "mae" else error.square()


def assert_as_exact(exact: Tensor, sums: Tensor, scale: Tensor, output: Tensor, ours_of: Callable) -> None:
    """Sums and the gradient of their weighted sum, from float32 and bf16, next to those in float64."""
    (sums * scale).sum().backward()
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        for function in (sum_of_costs, fused_sum_of_costs):
            ours = output.detach().to(dtype, copy=True).requires_grad_()
            found = ours_of(function, ours)
            (found * scale).sum().backward()
            assert found.dtype == torch.float32
            assert ours.grad is not None and ours.grad.dtype == dtype and exact.grad is not None
            for one, other in ((found, sums.detach()), (ours.grad, exact.grad)):
                assert (one.double() - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("loss", ("mse", "mae"))
def test_sums_a_sample_at_a_time_are_those_of_the_plain_expression(loss):
    """Value and gradient of sum w cost(p - y), by autograd in float64, and ours from float32 and bf16."""
    generator = torch.Generator().manual_seed(0)
    output, target, weights = torch.randn(3, 4, 8, 5, generator=generator)
    # bf16 changes no error's sign.
    output = output.bfloat16().float()
    exact, penalty = output.double().requires_grad_(), PENALTIES[loss]
    sums = (weights.double() * exact_cost(loss, exact - target.double())).flatten(1).sum(1)
    scale = torch.arange(1.0, 5.0)
    assert_as_exact(exact, sums, scale, output, lambda sum_of, ours: sum_of(ours, target, weights, penalty))


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        ("mse", Layout()),
        ("mae", Layout()),
        ("rmse", Layout()),
        ("rmse", Layout(unet=True)),
        ("mse", Layout(conserve=True)),
        ("mse", Layout(conserve=True, unet=True)),
    ],
)
def test_outputs_and_the_states_they_lead_to_have_one_loss(one_rank, loss, layout):
    """That of a step is that of its fields, as validations have it; changes count in units of states. On a
    grid that patches do not divide.
    """
    run = SmallRun(replace(layout, grid=(11, 10)), loss=loss)
    objective, normalizer = run.objective, run.objective.normalizer
    scale = normalizer.change_scale = torch.tensor([0.5, 2.0, 1.0])[:, None, None]
    fields, times = run.data[:8], torch.zeros(8, dtype=torch.int64)
    changes = torch.randn(8, 3, 11, 10, generator=torch.Generator().manual_seed(3))
    output = objective.meta_model.from_fields(changes)
    output = (objective.projection(output) if objective.projection else output).requires_grad_()
    loss_part = objective.loss_part(output, cut(objective, fields, times).targets)
    found = loss_part.item()
    states, truth = normalizer.advance(fields[:, 0], changes), fields[:, 1]
    parts = [objective.loss_of_fields(states[i : i + 1], truth[i : i + 1]) for i in range(8)]
    assert found == pytest.approx(torch.stack(parts).mean().item(), rel=1e-5)
    if layout.conserve:
        return
    area = torch.tensor(area_weights(global_grid((11, 10)).latitude))[:, None] * truth.isfinite()
    exact = changes.double().requires_grad_()
    costs = exact_cost(loss, exact - ((truth - fields[:, 0]) / scale).nan_to_num())
    costs = costs * scale ** (1 if loss == "mae" else 2)
    means = (area * costs).sum((-2, -1)) / area.sum((-2, -1))  # (B, V)
    means = means.sqrt() if loss == "rmse" else means
    expected = (means * torch.tensor([1.0, 2.0, 0.5])).mean()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    loss_part.backward()
    expected.backward()
    assert output.grad is not None and exact.grad is not None
    gradient = objective.meta_model.to_fields(output.grad).double()
    torch.testing.assert_close(gradient, exact.grad, rtol=1e-3, atol=1e-6)
