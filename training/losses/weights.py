"""What each cell, variable and level of normalised fields weighs in a loss.

Shapes: B batch, V variables, H latitudes, W longitudes. Weights are made of whole fields, so that no rank has
to ask another for a mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from datasets.variables import split_name

TINY = torch.finfo(torch.float32).tiny


def mean_weights(mask: Tensor, area: Tensor, variable_weights: Tensor) -> Tensor:
    """(B, V, H, W) weights whose weighted sum of what errors cost is the area-weighted mean of that.

    mask (bool) (B, V, H, W); area (H,) with mean 1; variable_weights (V,). The mean is taken over the cells
    that have a value, of each sample and variable first, then over these: so it does not depend on how a
    batch is divided.
    """
    weights = mask * area[:, None]  # (B, V, H, W)
    total = weights.sum(dim=(-2, -1), keepdim=True).clamp_min(TINY)  # (B, V, 1, 1)
    # In place: three more fields of the size of the batch otherwise.
    return weights.div_(total).mul_(variable_weights[:, None, None] / (mask.shape[0] * mask.shape[1]))


def relative_l2_weights(mask: Tensor, target: Tensor) -> Tensor:
    """(B, V, H, W) weights of squared errors whose weighted sum over a sample is |p - y|^2 / |y|^2.

    The NERSC tutorial's loss is the mean over samples of the root of that; it is not weighted by area.
    """
    squares = (mask * target).square().sum(dim=(1, 2, 3), keepdim=True)  # (B, 1, 1, 1)
    return mask / squares.clamp_min(TINY)


def variable_weights(given: tuple[float, ...], num_variables: int) -> Tensor:
    """(V,) weights that the user gives, or ones."""
    return torch.tensor(given) if given else torch.ones(num_variables)


def change_weights(change_ratio: Tensor, power: int = 2) -> Tensor:
    """(V,) weights 1/(change std / std)^power: an error counts in units of a variable's typical change over
    a step. `power`: by which power of an error its cost grows.

    Slow variables are then not drowned by fast ones (GraphCast, Lam et al. 2023, section 4.2).
    """
    return change_ratio.pow(-power)


def pressure_weights(variables: Sequence[str]) -> Tensor:
    """(V,): a level's pressure over the mean of all levels that are predicted; 1 for what has no level.

    So a level counts about as much as the air at it weighs (GraphCast, Lam et al. 2023, section 4.2).
    """
    levels = [split_name(name)[1] for name in variables]
    distinct = {level for level in levels if level}
    mean = sum(distinct) / max(len(distinct), 1)
    return torch.tensor([level / mean if level else 1.0 for level in levels])
