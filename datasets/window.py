"""Windows: the `data.history` states, a step apart, that a model sees of a date, the newest first.

A sample lists the dates of its window, the newest before older ones, then those that follow it: so its first
date is the one that a forecast starts from, whatever the history. To a model a window is one field with h V
channels.

Shapes: B batch, h states of a window, R states that follow, V variables, H latitudes, W longitudes.
"""

from collections.abc import Sequence

from torch import Tensor


def window_steps(history: int) -> range:
    """When the states of a window are, in steps of the model: 0, -1, ..."""
    return range(0, -history, -1)


def channel_names(variables: Sequence[str], history: int, step_hours: int) -> list[str]:
    """Of a window's h V channels: "2m_temperature", ..., "2m_temperature 6 h before"."""
    older = [f"{name} {n * step_hours} h before" for n in range(1, history) for name in variables]
    return [*variables, *older]


def split_sample(fields: Tensor, history: int) -> tuple[Tensor, Tensor]:
    """fields (B, h + R, V, H, W) -> the window (B, h V, H, W), and what follows (B, R, V, H, W)."""
    return fields[:, :history].flatten(1, 2), fields[:, history:]
