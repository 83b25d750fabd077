"""Conversion between physical and normalised fields.

Shapes: B batch, h states of a window (datasets/loader.py), V variables, H latitudes, W longitudes.
"""

import torch
from torch import Tensor, nn

from datasets.channels import Channels
from datasets.statistics import Statistics
from models.conservation import ConservationProjection

ALL = slice(None)


def boundary_cells(shape: tuple[int, int], width: int) -> Tensor:
    """Return where the boundary of a limited area is, bool (H, W): `width` cells from each side."""
    boundary = torch.ones(shape, dtype=torch.bool)
    boundary[width : shape[0] - width, width : shape[1] - width] = False
    return boundary


class Normalizer(nn.Module):
    """Conversion between physical and normalised fields, and one step of the model from its output.

    Forcing variables and the boundary of a limited area (data.boundary_width) are known of the next state,
    not predicted. The boundary is also an input of the step that leads to this state; forcing variables are
    with data.forcings_of_target.
    """

    boundary: Tensor | None
    mean: Tensor
    std: Tensor
    change_scale: Tensor

    def __init__(
        self,
        statistics: Statistics,
        predict: str,
        channels: Channels,
        conservation: ConservationProjection | None = None,
    ) -> None:
        """conservation: projection of outputs, if model.conserve is set."""
        super().__init__()
        self.channels, self.conservation, self.predict = channels, conservation, predict
        self.history, self.num_forcing = channels.history, len(channels.forcing)
        roles = ("predicted", "diagnostic", "forcing")
        self.predicted, self.diagnostic, self.forcing = map(channels.find, roles)
        shape, width = statistics.mean_field.shape[-2:], channels.boundary_width
        boundary = boundary_cells(shape, width) if width else None
        self.register_buffer("boundary", boundary, persistent=False)
        columns = {"mean": statistics.mean, "std": statistics.std}
        columns["change_scale"] = statistics.change_std / statistics.std
        columns["change_scale"][self.diagnostic] = 1  # their change is relative to the mean, 0
        for name, values in columns.items():
            column = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)
            self.register_buffer(name, column, persistent=False)

    # -- fields

    def normalize(self, fields: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised fields (..., V, H, W), 0 where missing, and a mask of values (bool)."""
        mask = torch.isfinite(fields)
        # In place, because two states of 65 variables at 721 x 1440 take 540 MB.
        return self._standardize(fields).masked_fill_(~mask, 0.0), mask

    def _standardize(self, fields: Tensor, variables: slice = ALL) -> Tensor:
        """Return the fields (..., v, H, W) of some variables normalised, NaN where a value is missing."""
        return (fields - self.mean[variables]).div_(self.std[variables])

    def normalize_target(self, truth: Tensor) -> tuple[Tensor, Tensor]:
        """Return a normalised truth (B, V, H, W), and a mask of the values (bool) that are predicted."""
        target, mask = self.normalize(truth)
        if self.num_forcing:
            mask[..., self.forcing, :, :] = False
        if self.boundary is not None:
            mask &= ~self.boundary
        return target, mask

    def normalize_window(self, window: Tensor) -> Tensor:
        """Return a physical window (B, h V, H, W) normalised, with 0 where a value is missing."""
        return self.normalize(window.unflatten(1, (self.history, -1)))[0].flatten(1, 2)

    def newest(self, window: Tensor) -> Tensor:
        """Return the state (B, V, H, W) of a window (B, h V, H, W) that a forecast starts from."""
        return window[:, : len(self.mean)]

    def denormalize(self, fields: Tensor) -> Tensor:
        """Return normalised fields (..., V, H, W) in physical units."""
        return fields * self.std + self.mean

    # -- steps

    def with_known(self, window: Tensor, known: Tensor | None) -> Tensor:
        """Return a normalised window (B, h V, H, W) followed by the inputs of the next state: predicted
        variables on the boundary (0 inside and where a value is missing) and forcing variables. known: as for
        `advance`; None: the boundary is 0, forcing variables do not change.
        """
        inputs = [window]
        if self.boundary is not None:
            ahead = torch.zeros_like(self.newest(window))
            ahead = ahead if known is None else self._on_boundary(ahead, known)
            inputs.append(ahead[:, self.predicted])
        if self.num_forcing and self.channels.forcings_of_target:
            inputs.append(self._forcing_after(window, known))
        return torch.cat(inputs, dim=1) if len(inputs) > 1 else window

    def _on_boundary(self, state: Tensor, known: Tensor) -> Tensor:
        """Return a normalised state (B, V, H, W) with the known values on its boundary."""
        assert self.boundary is not None
        values = self._standardize(known)
        return torch.where(self.boundary & torch.isfinite(values), values, state)

    def advance(self, window: Tensor, output: Tensor, known: Tensor | None = None) -> Tensor:
        """Return the next normalised window (B, h V, H, W) from this one and the model's output (B, V, H, W).

        It has, in float32, the new state and then all states of this window except the oldest. known:
        physical `channels.known` of the new state, (B, F, H, W), or (B, V, H, W) with a boundary. If it is
        None or a value is missing, forcing variables do not change, and the boundary is predicted.
        """
        state = self.conservation(output) if self.conservation else output.float()
        if self.predict == "change":
            state = self._without_diagnostic(self.newest(window)) + self.change_scale * state
        if self.boundary is not None and known is not None:
            state = self._on_boundary(state, known)
        if self.num_forcing:
            state = torch.cat([state[:, self.predicted], self._forcing_after(window, known)], dim=1)
        return state if self.history == 1 else torch.cat([state, window[:, : -len(self.mean)]], dim=1)

    def _without_diagnostic(self, state: Tensor) -> Tensor:
        """Return a normalised state (B, V, H, W) with 0 in place of diagnostic variables."""
        if not self.channels.diagnostic:
            return state
        zeros = torch.zeros_like(state[:, self.diagnostic])
        return torch.cat([state[:, : self.diagnostic.start], zeros, state[:, self.forcing]], dim=1)

    def _forcing_after(self, window: Tensor, known: Tensor | None) -> Tensor:
        """Return the normalised forcing variables (B, F, H, W), the last of those that are known."""
        before = self.newest(window)[:, self.forcing].float()
        if known is None:
            return before
        after = self._standardize(known[:, -self.num_forcing :], self.forcing)
        return torch.where(torch.isfinite(after), after, before)

    def expected_output(self, state: Tensor, target: Tensor) -> Tensor:
        """Return the output that takes `state` to `target` (B, V, H, W): the inverse of `advance`."""
        if self.predict == "state":
            return target
        return (target - self._without_diagnostic(state)).div_(self.change_scale)

    # -- gradients of rollouts

    def drop_boundary(self, gradient: Tensor, known: Tensor) -> Tensor:
        """Return the gradient of a window (B, h V, H, W) without its newest state's boundary, which `advance`
        took from `known` (B, V, H, W), so that it depends on no earlier step.
        """
        if self.boundary is None:
            return gradient
        newest = self.newest(gradient).masked_fill(self.boundary & torch.isfinite(known), 0)
        return torch.cat([newest, gradient[:, len(self.mean) :]], dim=1)

    def add_taken_over(self, gradient: Tensor, later: Tensor) -> None:
        """Add the gradient of the states that `advance` copies to the next window, `later`, in place."""
        num = len(self.mean)
        if self.predict == "change":
            gradient[:, :num] += later[:, :num]
        gradient[:, :-num] += later[:, num:]

    @property
    def output_scale(self) -> Tensor:
        """Derivative of the next state with respect to the output, (V, 1, 1)."""
        return torch.ones_like(self.change_scale) if self.predict == "state" else self.change_scale
