"""Forecasts by applying the model to itself. Shapes: B dates, L leads, V variables, H latitudes, W
longitudes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from datasets.conditions import Conditions
from datasets.normalization import Normalizer

# A forecast, whoever makes it: physical states (B, V, H, W), their dates (B,) in seconds since 1970, and
# the leads in model steps, ascending -> physical fields (B, L, V, H, W). The model, persistence and
# climatology all look like this.
Forecast = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
Model = Callable[[Tensor], Tensor]


def model_forecast(
    predict: Model, normalizer: Normalizer, conditions: Conditions, step_seconds: int
) -> Forecast:
    """The model as a forecast: each step sees the forcings of its own date."""

    def forecast(fields: Tensor, times: Tensor, leads: Sequence[int]) -> Tensor:
        state, _ = normalizer.normalize(fields)
        taken = []
        for lead in range(1, max(leads) + 1):
            output = predict(conditions.append(state, times + (lead - 1) * step_seconds))
            state = normalizer.advance(state, output)
            if lead in leads:
                taken.append(normalizer.denormalize(state))
        return torch.stack(taken, dim=1)

    return forecast
