"""Losses of normalised fields, in float32. Shapes: B batch, V variables, H latitudes, W longitudes."""

import torch
from torch import Tensor


def mse_loss(
    prediction: Tensor, target: Tensor, mask: Tensor, area: Tensor, variable_weights: Tensor
) -> Tensor:
    """Area-weighted mean squared error over the cells that have a value; a scalar.

    prediction, target, mask (bool) (B, V, H, W); area (H,) with mean 1; variable_weights (V,). The mean is
    taken a sample and variable first, then over samples and variables: so it does not depend on how a batch
    is divided.
    """
    weights = mask * area[:, None]  # (B, V, H, W)
    squares = (weights * (prediction - target).square()).sum(dim=(-2, -1))  # (B, V)
    mean = squares / weights.sum(dim=(-2, -1)).clamp_min(torch.finfo(torch.float32).tiny)
    return (mean * variable_weights).mean()


def relative_l2_loss(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Mean over samples of |p - y| / |y| over all values, not weighted by area: the NERSC tutorial's loss."""
    error = (mask * (prediction - target)).flatten(1).norm(dim=1)
    return (error / (mask * target).flatten(1).norm(dim=1).clamp_min(1e-12)).mean()


def variable_weights(given: tuple[float, ...], num_variables: int) -> Tensor:
    """(V,) weights that the user gives, or ones. ValueError when there are not as many as variables."""
    if given and len(given) != num_variables:
        reason = f"{num_variables} variables are predicted; give one weight each"
        raise ValueError(f"training.variable_weights = {list(given)}: {reason}")
    return torch.tensor(given) if given else torch.ones(num_variables)


def change_weights(change_ratio: Tensor) -> Tensor:
    """(V,) weights 1/(change std / std)^2: an error counts in units of a variable's typical change over a
    step.

    Slow variables are then not drowned by fast ones (GraphCast, Lam et al. 2023, section 4.2).
    """
    return change_ratio.square().reciprocal()
