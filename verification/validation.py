"""Scoring forecasts over every date of a period, exactly once, on any number of ranks.

Shapes: B dates, M members of an ensemble (1 of any other forecast), h states of a window
(datasets/window.py), L leads, V variables, H latitudes, W longitudes, n dates in all.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from datasets.field_dataset import FieldDataset, split_sample
from datasets.loader import EvaluationSampler, build_loader, unwrap_errors
from verification.rollout import Forecast
from verification.scores import mean_squared_error, rmse
from verification.validation_scores import ENSEMBLE, Scores, ensemble_errors

Loss = Callable[[Tensor, Tensor], Tensor]
# An initial date, and variable -> (truth, forecast), each (H, W).
Example = tuple[np.datetime64, dict[str, tuple[np.ndarray, np.ndarray]]]


def truth_of(state: Tensor, truths: Tensor, lead: int) -> Tensor:
    """A state (B, V, H, W) and its truths (B, L, V, H, W) -> the truth at a lead (B, 1, V, H, W).

    Cells missing at the start are left out: persistence has no value there.
    """
    return torch.where(torch.isfinite(state[:, None]), truths[:, lead : lead + 1], torch.nan)


def loss_of_date(predicted: Tensor, truth: Tensor, loss: Loss) -> Tensor:
    """() of fields (M, V, H, W) and (1, V, H, W); 0 where there is no truth."""
    return torch.where(torch.isfinite(truth).any(), loss(predicted, truth), 0.0)


class Validation:
    """The samples of a period (window, and the truth at every lead), and the baselines' errors once known."""

    def __init__(
        self,
        dataset: FieldDataset,
        lead_steps: Sequence[int],
        step_hours: int,
        area: Tensor,
        batch_size: int,
        num_workers: int = 0,
        part: tuple[int, int] = (0, 1),
        counts: bool = True,
        members: int = 1,
    ) -> None:
        """part: which part of the dates is this rank's, of how many; counts: on one rank of each part;
        members: of the model's forecasts.
        """
        self.lead_steps, self.step_hours, self.area, self.device = lead_steps, step_hours, area, area.device
        self.dataset, self.variables, self.num_samples = dataset, dataset.variables, len(dataset)
        self.counts, self.history = counts, dataset.samples.shape[1] - len(lead_steps)
        self.members, self.ensemble = members, ENSEMBLE * (members > 1)
        self.sampler = EvaluationSampler(self.num_samples, batch_size, *part)
        # One batch ahead: each has the truth at every lead.
        self.loader = build_loader(dataset, self.sampler, num_workers, 1, pin=area.device.type == "cuda")
        self.known: dict[str, Tensor] = {}

    @torch.no_grad()
    def run(self, model: Forecast, baselines: dict[str, Forecast], loss: Loss) -> Scores:
        """Scores of the model and the baselines; these are computed the first time only."""
        forecasts = {"model": model, **({} if self.known else baselines)}
        shape = (self.num_samples, len(self.lead_steps), len(self.variables))
        tables = [*forecasts, *self.ensemble]
        errors = {name: torch.zeros(shape, dtype=torch.float64, device=self.device) for name in tables}
        losses, present = torch.zeros_like(errors["model"][:, 0, 0]), torch.zeros_like(errors["model"])
        for indices, (fields, times) in zip(
            self.sampler.batches, unwrap_errors(iter(self.loader)), strict=True
        ):
            # -1: a date that is another rank's
            mine = [row for row, index in enumerate(indices) if index >= 0]
            dates = torch.tensor([indices[row] for row in mine], dtype=torch.int64, device=self.device)
            fields, times = self.dataset.unpack(fields.to(self.device)), times.to(self.device)
            window, truths = split_sample(fields, self.history)
            state = fields[:, 0]
            for name, forecast in forecasts.items():
                start = window if name == "model" else state
                predicted = forecast(start, times, self.lead_steps)  # (B M, L, V, H, W)
                predicted = predicted.unflatten(0, (len(state), -1))  # (B, M, L, V, H, W)
                for lead in range(len(self.lead_steps)):
                    truth = truth_of(state, truths, lead)
                    members = predicted[:, :, lead]  # (B, M, V, H, W)
                    mean = members.mean(dim=1, keepdim=True)
                    errors[name][dates, lead] = mean_squared_error(mean, truth, self.area)[mine, 0]
                    present[dates, lead] = torch.isfinite(truth).any(-1).any(-1)[mine, 0].double()
                    for table in self.ensemble if name == "model" else ():
                        of_members = ensemble_errors(table, members, truth[:, 0], self.area)
                        errors[table][dates, lead] = of_members[mine]
                if name == "model":
                    for row in mine:
                        truth = truth_of(state[row : row + 1], truths[row : row + 1], 0)[0]
                        losses[indices[row]] = loss_of_date(predicted[row, :, 0], truth, loss)
        return self._scores(errors, losses, present)

    @torch.no_grad()
    def last_date(self, forecast: Forecast) -> Example:
        """The last initial date that has a truth at the first lead, and variable -> (truth, forecast) (H, W)
        there; of an ensemble its mean.
        """
        last = int(np.flatnonzero(self.dataset.samples[:, self.history] >= 0)[-1])
        fields, times = self.dataset.__getitems__([last])
        (window, truths), first = split_sample(fields, self.history), self.lead_steps[:1]
        predicted = forecast(window.to(self.device), times.to(self.device), first)[:, 0].mean(dim=0).cpu()
        pairs = zip(truths[0, 0].numpy(), predicted.numpy(), strict=True)
        return np.datetime64(int(times), "s"), dict(zip(self.variables, pairs, strict=True))

    def _scores(self, errors: dict[str, Tensor], losses: Tensor, present: Tensor) -> Scores:
        """Each date was filled by one rank, so that the sum over ranks adds zeros: the same bits on any
        number.
        """
        for name, table in errors.items():
            errors[name] = torch.where(present > 0, table, 0.0)
        for table in (*errors.values(), losses, present):
            if not self.counts:
                table.zero_()  # another rank says the same
            dist.all_reduce(table)
        of_ensemble = {name: errors.pop(name).sum(dim=0) / present.sum(dim=0) for name in self.ensemble}
        tables = {name: rmse(table, present) for name, table in errors.items()}
        counts = (present > 0).any(-1).sum(dim=0)  # (L,)
        self.known |= {name: table for name, table in tables.items() if name != "model"}
        lead_hours = [steps * self.step_hours for steps in self.lead_steps]
        return Scores(
            self.variables,
            lead_hours,
            counts.tolist(),
            [self.dataset.archive.units(name) for name in self.variables],
            {"model": tables["model"], **self.known},
            (losses.sum() / counts[0]).item(),
            of_ensemble,
            self.members,
        )
