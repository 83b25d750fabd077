"""What an ensemble's members are worth beside its mean: CRPS, and whether they differ as much as it errs.

Shapes: B dates, M members, V variables, H latitudes, W longitudes.
"""

import numpy as np
import torch
from torch import Tensor

from verification.scores import fair_crps

ENSEMBLE = ("crps", "variance")


def ensemble_errors(name: str, members: Tensor, truth: Tensor, area: Tensor) -> Tensor:
    """(B, V) float64: the area-weighted mean, over the cells that have a truth, of the fair CRPS or of the
    unbiased variance of members (B, M, V, H, W) beside a truth (B, V, H, W).

    NaN where a field has no cell with a truth, and where a member is not finite though the truth is.
    """
    rows = area.double()[:, None]
    fields = [
        _mean(name, members[date, :, variable], truth[date, variable], rows)
        for date, variable in np.ndindex(*truth.shape[:2])
    ]
    return torch.stack(fields).view(truth.shape[:2])


def _mean(name: str, members: Tensor, truth: Tensor, rows: Tensor) -> Tensor:
    """(M, H, W), (H, W) and weights (H, 1) -> (). One field at a time, as errors of the mean are."""
    valid = torch.isfinite(truth)
    of_cells = fair_crps(members, truth) if name == "crps" else members.double().var(dim=0, correction=1)
    weights = valid * rows
    return (weights * torch.where(valid, of_cells, 0.0)).sum() / weights.sum()


def spread_skill(variance: Tensor, rmse: Tensor, num_members: int) -> Tensor:
    """Spread over skill: 1 where the truth might be one of the members, less where they are too sure.

    variance: the mean over dates and cells of the members' unbiased variance; rmse: of their mean. That of M
    members errs by sqrt((M + 1) / M) more than that of infinitely many (Fortin et al. 2014).
    """
    return ((num_members + 1) / num_members * variance).sqrt() / rmse
