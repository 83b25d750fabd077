"""The passage between physical and normalised fields.

Shapes: B batch, h states of a window (datasets/window.py), V variables, H latitudes, W longitudes.
"""

import torch
from torch import Tensor, nn

from datasets.statistics import Statistics
from models.conservation import Conservation


class Normalizer(nn.Module):
    """Physical fields to normalised ones and back, and one step of the model from its output.

    Lives on the device: the loader moves fields as they are stored.
    """

    mean: Tensor
    std: Tensor
    change_scale: Tensor

    def __init__(
        self, statistics: Statistics, predict: str, history: int = 1, conservation: Conservation | None = None
    ) -> None:
        """conservation: of outputs, where the model has some (model.conserve)."""
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
        """fields (..., V, H, W) -> normalised fields with 0 where a value is missing, and a mask of values
        (bool).
        """
        mask = torch.isfinite(fields)
        # In place: each of these fields is 540 MB for two states of 65 variables at 721 x 1440.
        return (fields - self.mean).div_(self.std).masked_fill_(~mask, 0.0), mask

    def normalize_window(self, window: Tensor) -> Tensor:
        """(B, h V, H, W) physical -> normalised, with 0 where a value is missing."""
        return self.normalize(window.unflatten(1, (self.history, -1)))[0].flatten(1, 2)

    def newest(self, window: Tensor) -> Tensor:
        """(B, h V, H, W) -> the state (B, V, H, W) that a forecast starts from."""
        return window[:, : len(self.mean)]

    def denormalize(self, fields: Tensor) -> Tensor:
        """(..., V, H, W) normalised -> physical units."""
        return fields * self.std + self.mean

    def advance(self, window: Tensor, output: Tensor) -> Tensor:
        """The next normalised window (B, h V, H, W) from this one and the model's output (B, V, H, W), in
        float32: the new state, then all of this window's but the oldest.
        """
        state = self.conservation(output) if self.conservation else output.float()
        if self.predict == "change":
            state = self.newest(window) + self.change_scale * state
        return state if self.history == 1 else torch.cat([state, window[:, : -len(self.mean)]], dim=1)

    def add_taken_over(self, gradient: Tensor, later: Tensor) -> None:
        """To the gradient with respect to a window, in place: what `advance` takes over from it into the next
        window, with respect to which the gradient is `later` (B, h V, H, W).
        """
        num = len(self.mean)
        if self.predict == "change":
            gradient[:, :num] += later[:, :num]
        gradient[:, :-num] += later[:, num:]

    def expected_output(self, state: Tensor, target: Tensor) -> Tensor:
        """The output that would take `state` to `target` (B, V, H, W), normalised: `advance` undone."""
        return target if self.predict == "state" else (target - state).div_(self.change_scale)

    @property
    def output_scale(self) -> Tensor:
        """(V, 1, 1): by how much the next state changes with the output."""
        return torch.ones_like(self.change_scale) if self.predict == "state" else self.change_scale
