"""Weights of cells and variables in a loss of normalised fields.

Shapes: B batch, V variables, H latitudes, W longitudes. Weights are computed from whole fields, so that no
rank needs a mean from another.
"""

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def mean_weights(mask: Tensor, area: Tensor, variable_weights: Tensor) -> Tensor:
    """Return weights (B, V, H, W) with which a weighted sum of penalties is their area-weighted mean.

    mask (bool) (B, V, H, W); area (H,) with mean 1; variable_weights (V,). The mean is taken over the cells
    that have a value, of each sample and variable first, then over these: so it does not depend on how a
    batch is divided.
    """
    weights = mask * area[:, None]  # (B, V, H, W)
    total = weights.sum(dim=(-2, -1), keepdim=True).clamp_min(TINY)  # (B, V, 1, 1)
    # In place, to avoid three more tensors of the size of the batch.
    return weights.div_(total).mul_(variable_weights[:, None, None] / (mask.shape[0] * mask.shape[1]))


def relative_l2_weights(mask: Tensor, target: Tensor) -> Tensor:
    """Return weights (B, V, H, W) with which a sample's weighted sum of squares is |p - y|^2 / |y|^2.

    The NERSC tutorial's loss is the mean over samples of the root of that; it is not weighted by area.
    """
    squares = (mask * target).square().sum(dim=(1, 2, 3), keepdim=True)  # (B, 1, 1, 1)
    return mask / squares.clamp_min(TINY)


def change_weights(change_ratio: Tensor, power: int = 2) -> Tensor:
    """Return weights (V,) 1 / (change std / std)^power: errors in units of a typical change over a step.

    power: that of an error in its penalty. Slow variables then count as much as fast ones (GraphCast, Lam et
    al. 2023, section 4.2).
    """
    return change_ratio.pow(-power)
