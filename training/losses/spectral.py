"""AMSE: squared errors by wavenumber, in which small scales that are not there cost what they lack.

Squared errors are least where a forecast leaves out what it cannot place: its small scales fade. Of waves of
one wavenumber, with power P = <|X|^2> and coherence C = <Re X Y*> / sqrt(P_x P_y), the squared error is
(sqrt(P_x) - sqrt(P_y))^2 + 2 sqrt(P_x P_y) (1 - C); AMSE has max(P_x, P_y) for the second root. So the
amplitude is best at that of the truth however small the coherence is, and where C = 1 nothing changes.

Source: Subich et al. 2025, "Fixing the double penalty in data-driven weather forecasting through a modified
spherical harmonic loss function", which takes spherical harmonics: <> is the mean over all orders of a total
wavenumber. Here rows are transformed along longitude, and <> is the mean over latitudes, weighted by area, of
a zonal wavenumber: any global longitude-latitude grid has those, without a transform between latitudes. A
wavenumber is then a shorter wave near the poles, and nothing is said of scales along meridians. (A mean
within rows alone would not do: a single wave's C is the cosine of its phase error.)

Shapes: B batch, V variables, H latitudes, W longitudes, M = W/2 + 1 wavenumbers.
"""

from typing import Any

import torch
from torch import Tensor

from models.weather_model import WeatherModel
from parallelisms.parallelize import Shards

# Of amplitudes, in the coherence: without it the gradient of a wave without energy would be infinite.
LARGEST_RATIO = 100.0
SMALLEST = 1e-30  # power that counts as none; products of two such roots are still numbers of float32


def amse(error: Tensor, truth: Tensor) -> Tensor:
    """The sum over wavenumbers, samples and variables; error and truth (B, V, H, W), whole rows, each times
    the root of what a cell's squared error weighs. Without the modification it is the sum of error^2.

    The second term is max(P_x, P_y) / sqrt(P_x P_y) times what the first leaves of the squared error: 1 - C
    would be lost in rounding where a forecast is good. Where one amplitude is less than a hundredth of the
    other, C has that hundredth in its place, and goes to 0 with the smaller one.
    """
    difference, expected = (torch.fft.rfft(fields, norm="ortho") for fields in (error, truth))  # (B, V, H, M)
    x, y = (power(of).clamp_min(SMALLEST).sqrt() for of in (expected + difference, expected))  # (B, V, M)
    floored = torch.maximum(x, y / LARGEST_RATIO) * torch.maximum(y, x / LARGEST_RATIO)
    amplitudes = (x - y).square()
    incoherent = (power(difference) - amplitudes).clamp_min(0) + 2 * (floored - x * y)
    modified = amplitudes + torch.maximum(x, y).square() / floored * incoherent
    return (modified * waves(error.shape[-1], error.device)).sum()


def power(spectrum: Tensor) -> Tensor:
    """(B, V, H, M) complex -> (B, V, M): |X|^2 over all rows."""
    return torch.view_as_real(spectrum).square().sum(dim=(-3, -1))


def waves(width: int, device: torch.device) -> Tensor:
    """(M,): how often a real row's transform of `width` has each wavenumber: m and -m, if they are two."""
    number = torch.full((width // 2 + 1,), 2.0, device=device)
    number[0] = 1
    if width % 2 == 0:
        number[-1] = 1
    return number


class SpectralPart(torch.autograd.Function):
    """This rank's part of `amse`: the value over the shards of a sample, and the gradient of its own shard.

    Every rank that shares a sample gathers it, one after the other, and only the shard's gradient is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        target: Tensor,
        weights: Tensor,
        truth: Tensor,
        shards: Shards,
        geometry: WeatherModel,
    ) -> Tensor:
        """Shards (B, ...): of the truth times the root of weights, and as `Objective.cut` gives them."""
        total, gradients = torch.zeros((), device=output.device), []
        for number in range(len(output)):
            one = slice(number, number + 1)
            sample = output[one], target[one], weights[one], truth[one]
            loss, gradient = of_sample(*sample, shards, geometry)
            total += loss
            gradients.append(gradient)
        ctx.save_for_backward(torch.cat(gradients))
        ctx.dtype = output.dtype
        return total / shards.num_shards

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.dtype), None, None, None, None, None


def of_sample(
    output: Tensor, target: Tensor, weights: Tensor, truth: Tensor, shards: Shards, geometry: WeatherModel
) -> tuple[Tensor, Tensor]:
    """AMSE of a whole sample, and its gradient with respect to this rank's shard (1, ...) of the output."""
    roots, from_fields = weights.sqrt(), geometry.from_fields
    error = geometry.to_fields(shards.gather_output(roots * (output.float() - target)))
    with torch.enable_grad():
        error = error.detach().requires_grad_()
        loss = amse(error, geometry.to_fields(shards.gather_output(truth)))
        (gradient,) = torch.autograd.grad(loss, error)
    return loss.detach(), shards.cut_output(from_fields(gradient, with_zeros=True)) * roots
