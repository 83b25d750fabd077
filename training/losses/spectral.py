"""AMSE, a squared error by wavenumber that preserves the amplitude of small scales.

A squared error is smallest where a forecast omits what it cannot place, so small scales fade. Waves of one
wavenumber with power P = <|X|^2> and coherence C = <Re X Y*> / sqrt(P_x P_y) have the squared error
(sqrt(P_x) - sqrt(P_y))^2 + 2 sqrt(P_x P_y) (1 - C); AMSE has max(P_x, P_y) for the second root. So the best
amplitude is that of the truth for any coherence, and at C = 1 nothing changes.

Source: Subich et al. 2025, "Fixing the double penalty in data-driven weather forecasting through a modified
spherical harmonic loss function", with spherical harmonics; <> is there the mean over all orders of a total
wavenumber. Here rows are transformed along longitude and <> is the area-weighted mean over latitudes of a
zonal wavenumber, a shorter wave near the poles; scales along meridians do not enter.

Shapes: B batch, V variables, H latitudes, W longitudes, M = W/2 + 1 wavenumbers.
"""

from typing import Any

import torch
from torch import Tensor

from models.weather_model import WeatherModel
from parallelisms.parallelize import Shards

LARGEST_RATIO = 100.0  # of amplitudes, in the coherence: bounds the gradient of a wave without energy
SMALLEST = 1e-30  # power treated as none; products of two such roots are still float32 numbers


def amse(error: Tensor, truth: Tensor) -> Tensor:
    """Return the sum over wavenumbers, samples and variables, of whole rows (B, V, H, W), each multiplied by
    the root of a cell's weight. Without the modification it is the sum of error^2.

    The second term is max(P_x, P_y) / sqrt(P_x P_y) times the rest of the squared error: 1 - C would be lost
    in rounding where a forecast is good. Where one amplitude is below a hundredth of the other, C uses that
    hundredth, and goes to 0 with the smaller one.
    """
    difference, expected = (torch.fft.rfft(fields, norm="ortho") for fields in (error, truth))  # (B, V, H, M)
    x, y = (power(each).clamp_min(SMALLEST).sqrt() for each in (expected + difference, expected))  # (B, V, M)
    floored = torch.maximum(x, y / LARGEST_RATIO) * torch.maximum(y, x / LARGEST_RATIO)
    amplitudes = (x - y).square()
    incoherent = (power(difference) - amplitudes).clamp_min(0) + 2 * (floored - x * y)
    modified = amplitudes + torch.maximum(x, y).square() / floored * incoherent
    return (modified * multiplicity(error.shape[-1], error.device)).sum()


def power(spectrum: Tensor) -> Tensor:
    """(B, V, H, M) complex -> (B, V, M): |X|^2 over all rows."""
    return torch.view_as_real(spectrum).square().sum(dim=(-3, -1))


def multiplicity(width: int, device: torch.device) -> Tensor:
    """Return the number (M,) of waves m and -m in each wavenumber of a real row's transform."""
    number = torch.full((width // 2 + 1,), 2.0, device=device)
    number[0] = 1
    if width % 2 == 0:
        number[-1] = 1
    return number


class SpectralPart(torch.autograd.Function):
    """This rank's part of `amse` over a batch of shards (B, ...), and the gradient of its own shard.

    Ranks that share a sample gather it, one sample at a time, and keep the gradient of their shard.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *inputs: Any) -> Tensor:
        """inputs: target, weights, truth times the root of weights (`Objective.cut`), shards, model."""
        *tensors, shards, model = inputs
        samples = zip(*(each.split(1) for each in (output, *tensors)), strict=True)
        losses, gradients = zip(*(loss_of_sample(sample, shards, model) for sample in samples), strict=True)
        ctx.save_for_backward(torch.cat(gradients))
        ctx.dtype = output.dtype
        return sum(losses, torch.zeros((), device=output.device)) / shards.num_shards

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.dtype), *[None] * 5


def loss_of_sample(sample: tuple[Tensor, ...], shards: Shards, model: WeatherModel) -> tuple[Tensor, Tensor]:
    """Return AMSE of a whole sample and its gradient with respect to this rank's shard (1, ...)."""
    output, target, weights, truth = sample
    roots, to_fields = weights.sqrt(), model.to_fields
    error = to_fields(shards.gather_output(roots * (output.float() - target)))
    with torch.enable_grad():
        error = error.detach().requires_grad_()
        loss = amse(error, to_fields(shards.gather_output(truth)))
        (gradient,) = torch.autograd.grad(loss, error)
    return loss.detach(), shards.cut_output(model.from_fields(gradient, with_zeros=True)) * roots
