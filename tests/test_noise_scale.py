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
from training.optimizers.noise_scale import KEPT, SETTLED, NoiseScale, build_noise_scale, critical_batch
from training.rollout import forward_backward


def single(size: int, **settings: Any) -> tuple[NoiseScale, nn.Parameter]:
    """Of one parameter, with micro-batches of 8 samples, 4 a step."""
    weights = nn.Parameter(torch.zeros(size))
    model: Any = SimpleNamespace(device=torch.device("cpu"), parameters={"weights": weights})
    return NoiseScale(model, 8, 32, 4, reduced=False), weights


def take(noise: NoiseScale, weights: nn.Parameter, gradients: Tensor, scale: float = 1.0) -> None:
    """A step of four micro-batches with these mean gradients (4, size), accumulated as train_step does."""
    weights.grad = scale * gradients[0] / 4
    noise.first_micro_batch(4)
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
    assert torch.equal(noise.means, before) and noise.square == 0


def test_a_ramp_begins_the_averages_anew(one_rank) -> None:
    """Norms of other sizes: |G|^2 = 3, S = 60, at 8 and 32 samples, at 8 alone, then at 8 and 64."""
    noise, weights = single(4)
    take(noise, weights, torch.ones(4, 4))
    norms = {size: torch.tensor(3 + 60 / size).sqrt() for size in (8, 64)}
    for micro_batches, expected in ((1, None), (8, 20.0)):
        for _ in range(3):
            weights.grad = norms[8] / micro_batches * torch.tensor([1.0, 0, 0, 0])
            noise.first_micro_batch(micro_batches)
            noise.step(norms[8 * micro_batches], 1.0)
        assert noise.critical_batch() == (expected and pytest.approx(expected, rel=1e-4))
    assert (noise.small, noise.large, noise.steps) == (8, 64, 3)


def test_advice_comes_once_and_late(one_rank, caplog) -> None:
    noise, _ = single(4)
    noise.advise(2.0)
    noise.steps = SETTLED
    noise.advise(None)
    noise.advise(10.0)
    assert not caplog.text
    noise.advise(4.0)
    noise.advise(4.0)
    assert caplog.text.count("lies far beyond the critical one, about 4: it takes 7.2 times the samples") == 1


@pytest.mark.parametrize(
    ("degrees", "micro_batches", "dtype", "expected"),
    [
        (Degrees(), 1, torch.float32, None),
        (Degrees(), 4, torch.float16, (2, 8)),
        (Degrees(dp_replicate=2), 1, torch.float32, None),
        (Degrees(dp_replicate=2), 3, torch.float32, (2, 12)),
        (Degrees(dp_shard=2), 1, torch.bfloat16, (2, 4)),
        (Degrees(dp_shard=2, dp_replicate=2), 3, torch.float32, (2, 24)),
        (Degrees(dp_shard=2), 1, torch.float16, None),
        (Degrees(dp_shard=2, tp=2), 4, torch.float32, None),
        (Degrees(pp=2), 4, torch.float32, None),
        (Degrees(cp=2), 4, torch.float32, None),
    ],
)
def test_who_has_it(degrees: Degrees, micro_batches: int, dtype: torch.dtype, expected: Any) -> None:
    model: Any = SimpleNamespace(mesh=SimpleNamespace(degrees=degrees), device=torch.device("cpu"), parts=[])
    noise = build_noise_scale(model, 2, micro_batches, dtype)
    assert (noise and (noise.small, noise.large)) == expected


def gradients_of_chunks() -> Tensor:
    """(4, parameters): of two samples each of the first global batch, in one process, one after the other."""
    run, found = SmallRun(Layout(1, accumulation=4)), []
    for batch in run.batches(0):
        forward_backward(run.objective, None, 1, batch, 1.0, is_last=True)
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
    means = noise.means / (1 - KEPT)
    dist.all_reduce(means)
    losses.append(watched.step(1)[0])
    with patch("training.step.build_noise_scale", lambda *_: None):
        plain = SmallRun(layout)
    return (means / dist.get_world_size()).tolist(), losses, [plain.step(0)[0], plain.step(1)[0]]


@pytest.mark.parametrize(
    ("layout", "shares"),
    [  # chunks that the small batches of the ranks are made of
        (Layout(1, accumulation=4), [[0]]),
        (Layout(2, replicate(), accumulation=2), [[0], [1]]),
        (Layout(2), [[0, 1], [2, 3]]),
        (Layout(2, accumulation=2), [[0], [1], [2], [3]]),
    ],
    ids=["one rank", "ddp 2", "fsdp 2", "fsdp 2, accumulation 2"],
)
def test_norms_are_those_of_one_process(one_rank, ranks, layout: Layout, shares: list[list[int]]) -> None:
    chunks = gradients_of_chunks()
    small = torch.stack([chunks[own].mean(0).square().sum() for own in shares]).mean()
    expected = [small.item(), chunks.mean(0).square().sum().item()]
    found = ranks(layout.ranks).run(squares, layout) if layout.ranks > 1 else [squares(layout)]
    for norms, watched, plain in found:
        assert norms == pytest.approx(expected, rel=1e-5)
        assert watched == plain  # to the bit
