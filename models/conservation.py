"""Conservation: what a model gives, shifted so that a step does not change the global mean of a quantity.

The output of a model is the change over a step. Its shift is the same number everywhere, of the variable that
each quantity names first: of all fields that conserve, it is the nearest that differs in these alone.

Shapes: B batch, Q quantities, V variables, n of these that quantities are made of, H latitudes, W longitudes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


def correction(coefficients: np.ndarray, corrected: Sequence[int]) -> np.ndarray:
    """(n, n) float64: times global means (n,) what has to be taken off so that `coefficients` (Q, n) times
    what is left is 0. corrected: the column of each quantity's first variable, all of them different.
    """
    result = np.zeros((coefficients.shape[1], coefficients.shape[1]))
    result[corrected] = np.linalg.solve(coefficients[:, corrected], coefficients)
    return result


class Conservation(nn.Module):
    """Outputs (B, V, H, W) -> the same, float32, of which the means of all quantities are 0."""

    area: Tensor
    correction: Tensor

    def __init__(self, used: Sequence[int], correction: np.ndarray, area: np.ndarray) -> None:
        """used: the n variables; area (H,): weights of the rows."""
        super().__init__()
        self.used = list(used)
        weights = torch.from_numpy(np.asarray(area, np.float64) / np.sum(area))
        self.register_buffer("area", weights, persistent=False)
        self.register_buffer("correction", torch.from_numpy(correction), persistent=False)

    def forward(self, output: Tensor) -> Tensor:
        """In float64 where it adds up: what a mean is off by, each step of a forecast would add."""
        parts = [output[:, i].mean(dim=-1, dtype=torch.float64) @ self.area for i in self.used]
        shift = (torch.stack(parts, dim=1) @ self.correction.T).float()  # (B, n)
        result = output.float().clone()
        for number, variable in enumerate(self.used):
            result[:, variable] -= shift[:, number, None, None]
        return result
