"""The critical batch: where it is known in closed form, and from gradients of each layout that has it."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelisms.degrees import Degrees
from tests.parity import Layout, SmallRun, replicate
from training.optimizers.noise_scale import DECAY, NoiseScale, build_noise_scale, critical_batch
from training.rollout import forward_backward


def single(size: int, **settings: Any) -> tuple[NoiseScale, nn.Parameter]:
    """Of one parameter, with micro-batches of 8 samples, 4 a step."""
    weights = nn.Parameter(torch.zeros(size))
    mesh = SimpleNamespace(degrees=Degrees())
    parts: dict[str, Any] = {"device": torch.device("cpu"), "parameters": {"weights": weights}, "mesh": mesh}
    model: Any = SimpleNamespace(parts=[], **parts)
    return NoiseScale(model, 8, 4), weights


def take(noise: NoiseScale, weights: nn.Parameter, gradients: Tensor, scale: float = 1.0) -> None:
    """A step of four micro-batches with these mean gradients (4, size), accumulated as train_step does."""
    weights.grad = scale * gradients[0] / 4
    noise.first_micro_batch()
    noise.step(gradients.mean(0).norm(), scale)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_quadratic_with_known_noise(one_rank, scale: float) -> None:
    """|w - x|^2 / 2 of samples x ~ N(mean, variance 1) in 1,000 dimensions: S = 1,000, |G|^2 = 20."""
    generator, size = torch.Generator().manual_seed(0), 1000
    noise, weights = single(size)
    gradient = torch.full((size,), (20 / size) ** 0.5)
    for _ in range(600):
        samples = torch.randn(4, size, generator=generator) / 8**0.5  # the mean of 8
        take(noise, weights, gradient + samples, scale)
    assert noise.critical_batch() == pytest.approx(1000 / 20, rel=0.1)


def test_formula() -> None:
    """|G|^2 = 3, S = 60: norms as they are expected at 4 and at 20 samples."""
    assert critical_batch(3 + 60 / 4, 3 + 60 / 20, 4, 20) == pytest.approx(20)
    assert critical_batch(60 / 4, 60 / 20, 4, 20) is None  # nothing but noise
    assert critical_batch(3.0, 3.0, 4, 20) == 0.0  # none


def test_a_step_that_is_not_finite_does_not_count(one_rank) -> None:
    noise, weights = single(4)
    take(noise, weights, torch.ones(4, 4))
    before = noise.means.clone()
    take(noise, weights, torch.full((4, 4), torch.nan))
    assert torch.equal(noise.means, before)
    take(noise, weights, torch.ones(4, 4))
    assert noise.means.isfinite().all() and not torch.equal(noise.means, before)


@pytest.mark.parametrize(
    ("degrees", "micro_batches", "exists"),
    [
        (Degrees(), 1, False),
        (Degrees(), 4, True),
        (Degrees(dp_replicate=2), 3, True),
        (Degrees(dp_shard=2), 1, False),
        (Degrees(dp_shard=2), 3, True),
        (Degrees(dp_shard=2, dp_replicate=2), 3, False),
        (Degrees(dp_shard=2, tp=2), 4, False),
        (Degrees(pp=2), 4, False),
        (Degrees(cp=2), 4, False),
    ],
)
def test_layouts_that_have_it(degrees: Degrees, micro_batches: int, exists: bool) -> None:
    model: Any = SimpleNamespace(mesh=SimpleNamespace(degrees=degrees), device=torch.device("cpu"), parts=[])
    assert bool(build_noise_scale(model, 2, micro_batches)) == exists


def gradients_of_chunks() -> Tensor:
    """(4, parameters): of two samples each of the first global batch, in one process, one after the other."""
    run, found = SmallRun(Layout(1, accumulation=4)), []
    for batch in run.batches(0):
        forward_backward(run.objective, 1, batch, 1.0, is_last=True)
        found.append(
            torch.cat([p.grad.flatten() for p in run.model.parameters.values() if p.grad is not None])
        )
        run.model.zero_grad()
    return torch.stack(found).double()


def squares(layout: Layout) -> tuple[list[float], list[float], list[float]]:
    """Both squared norms of the first step, over all ranks; losses of two steps with the noise scale, and
    without.
    """
    watched = SmallRun(layout)
    losses, noise = [watched.step(0)[0]], watched.run.noise_scale
    assert noise is not None
    means = noise.means / (1 - DECAY)
    dist.all_reduce(means)
    losses.append(watched.step(1)[0])
    with patch("training.step.build_noise_scale", lambda *_: None):
        plain = SmallRun(layout)
    return (means / dist.get_world_size()).tolist(), losses, [plain.step(0)[0], plain.step(1)[0]]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, accumulation=4),
        Layout(2, replicate(), accumulation=2),
        Layout(2, accumulation=2),
        Layout(2, replicate(data_parallel="zero1"), accumulation=2),
    ],
    ids=["one rank", "ddp 2", "fsdp 2", "zero1 2"],
)
def test_norms_are_those_of_one_process(one_rank, ranks, layout: Layout) -> None:
    """The first micro-batch of rank r is chunk r; FSDP has the mean of its ranks'."""
    chunks, is_sharded = gradients_of_chunks(), layout.ranks > 1 and not layout.parallelism
    first = chunks[: layout.ranks]
    small = (first.mean(0, keepdim=True) if is_sharded else first).square().sum(1).mean()
    expected = [small.item(), chunks.mean(0).square().sum().item()]
    found = ranks(layout.ranks).run(squares, layout) if layout.ranks > 1 else [squares(layout)]
    for norms, watched, plain in found:
        assert norms == pytest.approx(expected, rel=1e-5)
        assert watched == plain  # to the bit
