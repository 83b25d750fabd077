"""Conversion between physical and normalised fields.

Shapes: B batch, h states of a window (datasets/field_dataset.py), V variables, H latitudes, W longitudes.
"""

import torch
from torch import Tensor, nn

from datasets.statistics import Statistics
from models.conservation import ConservationProjection


class Normalizer(nn.Module):
    """Conversion between physical and normalised fields, and one step of the model from its output."""

    mean: Tensor
    std: Tensor
    change_scale: Tensor

    def __init__(
        self,
        statistics: Statistics,
        predict: str,
        history: int = 1,
        conservation: ConservationProjection | None = None,
    ) -> None:
        """conservation: of outputs, if the model has some (model.conserve)."""
        super().__init__()
        self.conservation = conservation
        self.predict, self.history = predict, history
        column = {"mean": statistics.mean, "std": statistics.std}
        column["change_scale"] = statistics.change_std / statistics.std
        for name, values in column.items():
            self.register_buffer(
                name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1), persistent=False
            )

    def normalize(self, fields: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised fields (..., V, H, W), 0 where missing, and a mask of values (bool)."""
        mask = torch.isfinite(fields)
        # In place: each of these fields is 540 MB for two states of 65 variables at 721 x 1440.
        return (fields - self.mean).div_(self.std).masked_fill_(~mask, 0.0), mask

    def normalize_window(self, window: Tensor) -> Tensor:
        """Return a physical window (B, h V, H, W) normalised, with 0 where a value is missing."""
        return self.normalize(window.unflatten(1, (self.history, -1)))[0].flatten(1, 2)

    def newest(self, window: Tensor) -> Tensor:
        """Return the state (B, V, H, W) of a window (B, h V, H, W) that a forecast starts from."""
        return window[:, : len(self.mean)]

    def denormalize(self, fields: Tensor) -> Tensor:
        """Return normalised fields (..., V, H, W) in physical units."""
        return fields * self.std + self.mean

    def advance(self, window: Tensor, output: Tensor) -> Tensor:
        """Return the next normalised window (B, h V, H, W) from this one and the model's output (B, V, H, W).

        In float32: the new state, then all states of this window but the oldest.
        """
        state = self.conservation(output) if self.conservation else output.float()
        if self.predict == "change":
            state = self.newest(window) + self.change_scale * state
        return state if self.history == 1 else torch.cat([state, window[:, : -len(self.mean)]], dim=1)

    def add_taken_over(self, gradient: Tensor, later: Tensor) -> None:
        """Add to a window's gradient, in place, the share of states that `advance` copies to the next one.

        later: the gradient with respect to that next window (B, h V, H, W).
        """
        num = len(self.mean)
        if self.predict == "change":
            gradient[:, :num] += later[:, :num]
        gradient[:, :-num] += later[:, num:]

    def expected_output(self, state: Tensor, target: Tensor) -> Tensor:
        """Return the output that takes `state` to `target` (B, V, H, W): the inverse of `advance`."""
        return target if self.predict == "state" else (target - state).div_(self.change_scale)

    @property
    def output_scale(self) -> Tensor:
        """The change of the next state with the output, (V, 1, 1)."""
        return torch.ones_like(self.change_scale) if self.predict == "state" else self.change_scale
