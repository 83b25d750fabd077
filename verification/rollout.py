"""Forecasts by applying the model to itself.

Shapes: B dates, h states of a window, L leads, V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from datasets.conditions import Conditions
from datasets.normalization import Normalizer
from models.noise import keys_of_members

# Signature of the model, persistence and climatology: physical states (B, V, H, W), or windows (B, h V, H, W)
# for the model, their dates (B,) in seconds since 1970, and the leads in model steps, ascending -> an
# iterable of physical fields (B, V, H, W), one lead after the other.
Forecast = Callable[[Tensor, Tensor, Sequence[int]], Iterable[Tensor]]
Model = Callable[[Tensor], Tensor]


def rollout(
    predict: Model,
    normalizer: Normalizer,
    conditions: Conditions,
    step_seconds: int,
    start: Tensor,
    times: Tensor,
    num_steps: int,
    keys: Tensor | None = None,
    known: Callable[[int, Tensor], Tensor] | None = None,
    shifts: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the normalised windows (B, h V, H, W) after 1, 2, ... `num_steps` steps from a physical one.

    times (B,): dates of `start`, seconds since 1970. Each step sees the forcings of its own date. Missing
    values start at the mean. keys (B,): of the noise of a model that is given some (models/noise.py).
    known: function that returns the argument `known` of `Normalizer.advance` for step 1, 2, ... and its date;
    without it forcing variables and the boundary keep their initial values. shifts (B,): of `start` and
    `known`, in training (`Conditions.append`).
    """
    window = normalizer.normalize_window(start)
    for step in range(num_steps):
        date = times + step * step_seconds
        later = None if known is None else known(step + 1, date + step_seconds)
        inputs = normalizer.with_known(window, later)
        output = predict(conditions.append(inputs, date, *conditions.draw(keys, date), shifts=shifts))
        window = normalizer.advance(window, output, later)
        yield window


def model_forecast(
    predict: Model,
    normalizer: Normalizer,
    conditions: Conditions,
    step_seconds: int,
    members: int = 1,
    seed: int = 0,
    known: Callable[[int, Tensor], Tensor] | None = None,
) -> Forecast:
    """Return the model as a forecast; of an ensemble the rows are those of all members: (B M, V, H, W).

    known: see `rollout`.
    """

    def forecast(start: Tensor, times: Tensor, leads: Sequence[int]) -> Iterator[Tensor]:
        keys = keys_of_members(seed, 0, times, members)
        start, times = (each.repeat_interleave(members, dim=0) for each in (start, times))
        windows = rollout(
            predict, normalizer, conditions, step_seconds, start, times, max(leads), keys, known
        )
        for lead, window in enumerate(windows, 1):
            if lead in leads:
                yield normalizer.denormalize(normalizer.newest(window))

    return forecast
