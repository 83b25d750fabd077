"""How far the weights of a matrix may move, as a fraction of their own size."""

import torch
from torch import Tensor


def trust_ratios(weights: Tensor, steps: Tensor, coefficient: float, cap: float) -> Tensor:
    """coefficient |w| / |step|, at most `cap`, of norms of whole parameters (N,); 1 where either is 0."""
    known = (weights > 0) & (steps > 0)
    return torch.where(known, (coefficient * weights / steps).clamp(max=cap), 1.0)
