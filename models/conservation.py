"""Conservation: a shift of the output, after which a step does not change the global means of quantities.

The output of a model is the change over a step. The shift is equal in all cells, and applies to the first
variable of each quantity: the smallest correction that changes only these variables.

Shapes: B batch, Q quantities, V variables, n variables that the quantities consist of, H latitudes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


def correction(coefficients: np.ndarray, corrected: Sequence[int]) -> np.ndarray:
    """Return the matrix (n, n), float64, that maps global means (n,) to the shift to be subtracted.

    `coefficients` (Q, n) times the shifted means is 0. corrected: the column of each quantity's first
    variable, all of them different.
    """
    result = np.zeros((coefficients.shape[1], coefficients.shape[1]))
    result[corrected] = np.linalg.solve(coefficients[:, corrected], coefficients)
    return result


class ConservationProjection(nn.Module):
    """Projection of outputs (B, V, H, W) -> the same shape, float32, with global means of 0."""

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
        """Project outputs. Means are float64, because their errors add up over the steps of a forecast."""
        means = [output[:, i].mean(dim=-1, dtype=torch.float64) @ self.area for i in self.used]
        shift = (torch.stack(means, dim=1) @ self.correction.T).float()  # (B, n)
        result = output.float().clone()
        for number, variable in enumerate(self.used):
            result[:, variable] -= shift[:, number, None, None]
        return result
