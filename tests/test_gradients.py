"""Norm, clipping and loss scaling, the latter against torch's GradScaler."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grads_with_norm_

from training.gradients import LossScaler, reduce_partial_gradients, total_norm


def parameters(*values: float) -> list[nn.Parameter]:
    result = [nn.Parameter(torch.zeros(())) for _ in values]
    for parameter, value in zip(result, values, strict=True):
        parameter.grad = torch.tensor(value)
    return result


def test_norm_and_clipping():
    pair = parameters(3.0, 4.0)
    norm = total_norm(pair)
    assert norm.item() == 5.0
    assert pair[0].grad is not None and pair[0].grad.item() == 3.0  # 0: no clipping
    clip_grads_with_norm_(pair, 2.5, norm)
    assert pair[0].grad.item() == pytest.approx(1.5, rel=1e-5)


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


def test_disabled_it_does_nothing():
    scaler = LossScaler(False)
    assert scaler.factor == 1.0 and not scaler.update(torch.tensor(float("nan")))
    assert scaler.may_overflow is None


def test_the_scale_has_a_floor_below_which_overflow_is_a_bad_step():
    scaler = LossScaler(True, initial=4.0)
    may_overflow = []
    for _ in range(4):
        may_overflow.append(bool(scaler.may_overflow))
        assert scaler.update(torch.tensor(float("inf")))
    assert may_overflow == [True, True, False, False] and scaler.factor == 1.0
