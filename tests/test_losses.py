"""Losses against explicit sums in float64, and the noise by which an ensemble's members differ."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from datasets.grid import area_weights
from models.noise import COARSE, FINE, NoiseFields, between, hash64, keys_of_members, noise_keys, noise_names
from tests.parity import Layout, SmallRun, cut
from training.losses.pointwise import (
    CRPS,
    PENALTIES,
    by_member,
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
    error = exact - target.double()
    sums = (weights.double() * (error.abs() if loss == "mae" else error.square())).flatten(1).sum(1)
    scale = torch.arange(1.0, 5.0)
    assert_as_exact(exact, sums, scale, output, lambda sum_of, ours: sum_of(ours, target, weights, penalty))


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        ("mse", Layout()),
        ("mae", Layout()),
        ("rmse", Layout(unet=True)),
        ("crps", Layout(members=3)),
        ("mse", Layout(conserve=True)),
        ("mse", Layout(conserve=True, unet=True)),
    ],
)
def test_outputs_and_the_states_they_lead_to_have_one_loss(one_rank, loss, layout):
    """That of a step is that of its fields, as validations have it; changes count in units of states. On a
    grid that patches do not divide.
    """
    run, members = SmallRun(replace(layout, grid=(11, 10)), loss=loss), layout.members
    objective, normalizer = run.objective, run.objective.normalizer
    normalizer.change_scale = torch.tensor([0.5, 2.0, 1.0])[:, None, None]
    fields, times = run.data[:8], torch.arange(8) * 21_600
    changes = torch.randn(8 * members, 3, 11, 10, generator=torch.Generator().manual_seed(3))
    output = objective.meta_model.from_fields(changes)
    output = objective.projection(output) if objective.projection else output
    noise = objective.conditions.draw(objective.noise_keys(1, times), objective.repeat_members(times))
    found = objective.loss_part(output, cut(objective, fields, times, *noise).targets).item()
    states, truth = normalizer.advance(objective.repeat_members(fields[:, 0]), changes), fields[:, 1]
    parts = zip(states.split(members), truth.split(1), strict=True)
    expected = [objective.loss_of_fields(*part).item() for part in parts]
    assert found == pytest.approx(np.mean(expected), rel=1e-5)


# -- the almost fair CRPS

ALPHA = 0.95  # Lang et al. 2024


def almost_fair(members: np.ndarray, truth: float) -> float:
    """Almost fair CRPS of members (M,) by the definition: a mixture of the fair and the plain CRPS."""
    count, skill, pairs = len(members), 0.0, 0.0
    for x in members:
        skill += abs(float(x) - truth) / count
        for other in members:
            pairs += abs(float(x) - float(other))
    fair, plain = skill - pairs / (2 * count * (count - 1)), skill - pairs / (2 * count**2)
    return ALPHA * fair + (1 - ALPHA) * plain


@pytest.mark.parametrize("members", [2, 3, 8])
def test_the_definition(members):
    x = np.random.default_rng(0).normal(size=(6, members))
    x[0, 0] = x[0, 1]  # equal members
    truth = np.random.default_rng(1).normal(size=6)
    expected = [almost_fair(row, y) for row, y in zip(x, truth, strict=True)]
    found = CRPS.cost(torch.tensor(x - truth[:, None])).mean(dim=-1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("members", "truth"), [(2, 0.3), (4, 2.0)])
def test_its_expectation_for_gaussian_members(members, truth):
    """Members of N(m, s^2): E|x - y| = s (z (2 F(z) - 1) + 2 f(z)) with z = (y - m) / s, and the distance of
    two of them is 2 s / sqrt(pi) (Gneiting and Raftery 2007). The fair CRPS has it whole: that of N(m, s^2).
    """
    mean, size, normal = 0.5, 0.8, NormalDist()
    z = (truth - mean) / size
    skill = size * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z))
    expected = skill - (1 - (1 - ALPHA) / members) * size / math.sqrt(math.pi)
    generator = torch.Generator().manual_seed(0)
    draws = mean + size * torch.randn(400_000, members, generator=generator, dtype=torch.float64)
    assert CRPS.cost(draws - truth).mean().item() == pytest.approx(expected, abs=4e-3)


def test_sums_and_gradients():
    """Value and gradient of the sum of weights x CRPS, by loops and autograd in float64."""
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(6, 8, 5, generator=generator).bfloat16().float()  # 2 samples of 3 members
    target, weights = torch.randn(2, 2, 8, 5, generator=generator)
    target, weights = target.repeat_interleave(3, 0), weights.repeat_interleave(3, 0)
    exact = output.double().requires_grad_()
    groups = (exact - target.double()).view(2, 3, 8, 5)
    apart = (groups[:, :, None] - groups[:, None]).abs().sum(dim=(1, 2)) / (2 * 3 * 2)
    crps = groups.abs().mean(dim=1) - (1 - (1 - ALPHA) / 3) * apart
    sums = (3 * weights[::3].double() * crps).sum(dim=(1, 2))
    scale = torch.tensor([1.0, 2.0])
    assert_as_exact(
        exact,
        sums,
        scale,
        output,
        lambda sum_of, ours: sum_of(*(by_member(each, 3) for each in (ours, target, weights)), penalty=CRPS),
    )


# -- noise


def test_bits_are_those_of_splitmix64():
    """The first numbers of Vigna's splitmix64.c with the states 0 and 1234567."""
    numbers = [[int(hash64(torch.tensor(state), i)) % 2**64 for i in range(3)] for state in (0, 1234567)]
    assert numbers[0] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert numbers[1] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    tensors = hash64(torch.tensor([1234567]), torch.arange(3))
    assert [int(number) % 2**64 for number in tensors] == numbers[1]


def test_noise_is_a_function_of_seed_step_date_and_member():
    times = torch.tensor([0, 21_600, -21_600])
    keys = {
        tuple(keys_of_members(seed, step, times, 4).tolist()) for seed in (0, 1, 10**12) for step in (0, 1, 2)
    }
    assert len({key for row in keys for key in row}) == 3 * 3 * 3 * 4
    fields = NoiseFields(4, (32, 64), periodic=True).draw
    whole = fields(keys_of_members(7, 3, times, 2), times.repeat_interleave(2))
    for row, (date, member) in enumerate((date, member) for date in times for member in (0, 1)):
        alone = noise_keys(7, 3, date[None], torch.tensor([member]))
        assert torch.equal(fields(alone, date[None])[0], whole[row])  # whatever the batch


@pytest.mark.parametrize("grid, periodic", [((32, 64), True), ((19, 37), False), ((11, 10), True)])
def test_noise_has_variance_one_everywhere(grid, periodic):
    """Exactly, by the weights; as drawn it is normal, and channels have nothing to do with each other."""
    for size in (FINE, COARSE):
        for points, round in ((grid[0], False), (grid[1], periodic)):
            pair, weights = between(points, math.ceil(points / size), round)
            matrix = np.zeros((points, math.ceil(points / size)))
            for i in range(points):
                matrix[i, pair[0, i]] += weights[0, i]
                matrix[i, pair[1, i]] += weights[1, i]
            np.testing.assert_allclose(np.square(matrix).sum(axis=1), 1, rtol=1e-12)
    times = torch.arange(4000) * 21_600
    draws = NoiseFields(3, grid, periodic).draw(keys_of_members(0, 1, times, 1), times).double()
    assert draws.mean(dim=0).abs().max() < 0.09 and (draws.var(dim=0) - 1).abs().max() < 0.14
    assert (draws**4).mean().item() == pytest.approx(3, abs=0.1)
    channels = torch.corrcoef(draws[:, :, grid[0] // 2, grid[1] // 2].T)
    assert (channels - torch.eye(3)).abs().max() < 0.06
    seam, inside = ((draws[..., a] * draws[..., b]).mean().item() for a, b in ((0, -1), (1, 2)))
    assert (
        abs(seam - inside) < 0.25 if periodic else abs(seam) < 0.1
    )  # neighbours, or the two ends of a region


def test_a_single_channel_is_fine_noise():
    keys = torch.arange(2)
    one, several = (NoiseFields(number, (32, 64), True) for number in (1, 2))
    assert torch.equal(one.draw(keys, keys), several.draw(keys, keys)[:, :1])


@pytest.mark.parametrize("number", [2, 3, 4, 8])
def test_half_of_the_noise_is_kept_through_a_forecast(number):
    """Of either scale; the other half has nothing to do with the step before."""
    fields, keys = NoiseFields(number, (32, 64), periodic=True), torch.arange(500)
    first, second = (fields.draw(keys, torch.full((500,), date)) for date in (0, 21_600))
    kept = [name.endswith("kept") for name in noise_names(number)]
    assert sum(kept) in (number // 2, (number + 1) // 2)
    for channel, same in enumerate(kept):
        assert torch.equal(first[:, channel], second[:, channel]) == same
        product = (first[:, channel] * second[:, channel]).mean(dim=0)
        assert product.mean().item() == pytest.approx(float(same), abs=0.08)
