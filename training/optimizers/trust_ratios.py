"""How far the weights of a matrix may move, as a fraction of their own size."""

import torch
from torch import Tensor


def squared_norms(weights: list[Tensor], steps: list[Tensor]) -> Tensor:
    """Of what a rank has of each parameter: |w|^2 and |step|^2, (N, 2), float64."""
    if not weights:
        return torch.zeros(0, 2, dtype=torch.float64)
    norms = torch._foreach_norm([*weights, *steps])  # type: ignore[reportPrivateImportUsage]
    return torch.stack(norms).view(2, -1).T.double().square()


def trust_ratios(weights: Tensor, steps: Tensor, coefficient: float, cap: float) -> Tensor:
    """coefficient |w| / |step|, at most `cap`, of norms of whole parameters (N,); 1 where either is 0."""
    known = (weights > 0) & (steps > 0)
    return torch.where(known, (coefficient * weights / steps).clamp(max=cap), 1.0)
