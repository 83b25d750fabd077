"""Scoring forecasts over every date of a period, exactly once, on any number of ranks.

The sums over dates are those of evaluate.py. Shapes: B dates, M members of an ensemble (1 of any other
forecast), h states of a window (datasets/field_dataset.py), L leads, V variables, H latitudes, W longitudes,
n dates in all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.field_dataset import FieldDataset, split_sample
from datasets.loader import EvaluationSampler, build_loader, unwrap_errors
from verification.evaluation import Tally
from verification.matching import Pair
from verification.rollout import Forecast
from verification.score_tables import describe_dates, lead_hours, select, table
from verification.scores import WIND_VECTORS, RegionMeans

Loss = Callable[[Tensor, Tensor], Tensor]
# An initial date, and variable -> (truth, forecast), each (H, W).
Example = tuple[np.datetime64, dict[str, tuple[np.ndarray, np.ndarray]]]
# Of an ensemble: keys of metrics.jsonl, metrics of evaluate.py.
OF_MEMBERS = {"crps": "crps", "spread_skill": "unbiased_spread_skill_ratio"}


@dataclass
class Scores:
    """Scores of a validation, by forecast in the form of `Evaluation.scores`, and the loss of the model.

    For an ensemble, "rmse" is the RMSE of its mean.
    """

    variables: Sequence[str]
    by_forecast: dict[str, xr.Dataset]  # "model", baselines
    loss: float

    @property
    def lead_hours(self) -> list[int]:
        return lead_hours(self.by_forecast["model"])

    @property
    def num_dates(self) -> list[int]:
        """Return the number of dates with a truth, for each lead."""
        return self.by_forecast["model"]["num_dates"].values.tolist()

    def values(self, metric: str, name: str = "model") -> np.ndarray:
        """Return a score (L, V) of a forecast."""
        scores = self.by_forecast[name]
        return np.stack([select(scores, metric, variable).values for variable in self.variables], axis=-1)

    def record(self, step: int) -> dict[str, float]:
        """Return the validation object of metrics.jsonl: keys of leads after the first end in @<hours>h."""
        record: dict[str, float] = {"step": step, "val/loss": self.loss}
        suffixes = ["", *(f"@{hours}h" for hours in self.lead_hours[1:])]
        record |= {f"val/dates{suffix}": n for suffix, n in zip(suffixes, self.num_dates, strict=True)}
        keys = {
            name: "rmse" if name == "model" else f"rmse_{name.replace(' ', '_')}" for name in self.by_forecast
        }
        tables = {key: self.values("rmse", name) for name, key in keys.items()}
        known = self.by_forecast["model"]["metric"]
        tables |= {key: self.values(metric) for key, metric in OF_MEMBERS.items() if metric in known}
        for key, values in tables.items():
            keys = [f"val/{key}/{variable}{suffix}" for suffix in suffixes for variable in self.variables]
            record |= dict(zip(keys, values.ravel().tolist(), strict=True))
        return record

    def table(self) -> str:
        """Return the RMSE by variable and lead as text."""
        dates = describe_dates(self.num_dates, self.lead_hours)
        return table(self.by_forecast, "rmse", f"validation over {dates}")


class Validation:
    """The samples of a period (window, and the truth at every lead), and the baselines' errors once known."""

    def __init__(
        self,
        dataset: FieldDataset,
        lead_steps: Sequence[int],
        step_hours: int,
        device: torch.device,
        batch_size: int,
        num_workers: int = 0,
        part: tuple[int, int] = (0, 1),
        counts: bool = True,
        members: int = 1,
        num_forcing: int = 0,
        boundary: Tensor | None = None,
    ) -> None:
        """part: index of this rank's part of the dates, and number of parts; counts: True on one rank of each
        part; members: of the model's forecasts; num_forcing: number of last variables that are not scored;
        boundary: cells that are not scored, bool (H, W).
        """
        self.boundary = boundary
        self.lead_steps, self.step_hours, self.device = lead_steps, step_hours, device
        self.variables = dataset.variables[: len(dataset.variables) - num_forcing]
        self.dataset, self.num_samples = dataset, len(dataset)
        self.counts, self.history = counts, dataset.samples.shape[1] - len(lead_steps)
        self.members, self.mean = members, RegionMeans(dataset.archive.grid, ["global"], device)
        self.sampler = EvaluationSampler(self.num_samples, batch_size, *part)
        # One batch ahead: each has the truth at every lead.
        self.loader = build_loader(dataset, self.sampler, num_workers, 1, pin=device.type == "cuda")
        self.known: dict[str, xr.Dataset] = {}

    @torch.no_grad()
    def run(self, model: Forecast, baselines: dict[str, Forecast], loss: Loss) -> Scores:
        """Score the model, and the first time the baselines."""
        forecasts = {"model": model, **({} if self.known else baselines)}
        shape, members = (self.num_samples, len(self.lead_steps)), {"model": self.members}
        tallies = {n: Tally(self.variables, members.get(n, 1), shape, self.mean) for n in forecasts}
        losses = torch.zeros(self.num_samples, dtype=torch.float64, device=self.device)
        batches = zip(self.sampler.batches, unwrap_errors(iter(self.loader)), strict=True)
        for indices, (fields, times) in batches:
            fields, times = self.dataset.unpack(fields.to(self.device)), times.to(self.device)
            window, truths = split_sample(fields, self.history)
            state = fields[:, 0]
            rows = [row for row, date in enumerate(indices) if date >= 0]  # others are another rank's
            for name, forecast in forecasts.items():
                start = window if name == "model" else state
                for lead, predicted in enumerate(forecast(start, times, self.lead_steps)):
                    predicted = predicted.unflatten(0, (len(state), -1))  # (B, M, V, H, W)
                    for row in rows:
                        date, truth = indices[row], self._scored(truths[row, lead], state[row])
                        self._add(tallies[name], date, lead, predicted[row], truth)
                        if name == "model" and lead == 0 and tallies[name].table[-1, date, 0].any():
                            # As in training: cells that are missing at the start count, too.
                            losses[date] = loss(predicted[row], truths[row, lead][None])
        return self._scores(tallies, losses)

    def _scored(self, truth: Tensor, state: Tensor) -> Tensor:
        """Return a truth (V, H, W) with NaN in cells that are missing in the initial state, where persistence
        has no value, or on the boundary.
        """
        truth = torch.where(torch.isfinite(state), truth, torch.nan)
        return truth if self.boundary is None else truth.masked_fill_(self.boundary, torch.nan)

    def _add(self, tally: Tally, date: int, lead: int, members: Tensor, truth: Tensor) -> None:
        """Count a forecast (M, V, H, W), without forcing variables."""
        rows, truth = list(range(len(self.variables))), truth[: len(self.variables)]
        scored = members[:, : len(rows)]
        scored = scored if len(scored) > 1 else scored[0]
        tally.add(Pair("", date, lead, rows, scored, truth, truth, None))

    @torch.no_grad()
    def last_date(self, forecast: Forecast) -> Example:
        """Return the last initial date that has a truth at the first lead, and variable -> (truth, forecast)
        (H, W) there; of an ensemble its mean.
        """
        last = int(np.flatnonzero(self.dataset.samples[:, self.history] >= 0)[-1])
        fields, times = self.dataset.__getitems__([last])
        (window, truths), first = split_sample(fields, self.history), self.lead_steps[:1]
        by_lead = forecast(window.to(self.device), times.to(self.device), first)
        predicted = next(iter(by_lead)).mean(dim=0).cpu()
        pairs = zip(truths[0, 0].numpy(), predicted.numpy(), strict=True)
        return np.datetime64(int(times), "s"), dict(zip(self.variables, pairs, strict=False))

    def _scores(self, tallies: dict[str, Tally], losses: Tensor) -> Scores:
        """Return the scores over all ranks, bit-exact on any number: a date is 0 on all but one."""
        for values in (*(tally.table for tally in tallies.values()), losses):
            if not self.counts:
                values.zero_()  # another rank has the same
        dist.all_reduce(losses)
        dates = self.dataset.archive.times[self.dataset.samples[:, 0]]
        leads = np.array([steps * self.step_hours for steps in self.lead_steps], "timedelta64[h]")
        units = {name: self.dataset.archive.units(name) for name in self.variables}
        found: dict[str, xr.Dataset] = {}
        for name, tally in tallies.items():
            dist.all_reduce(tally.table)
            scores = tally.results(dates, leads, ["global"], units).scores
            found[name] = scores.drop_vars(WIND_VECTORS, errors="ignore")
        self.known |= {name: scores for name, scores in found.items() if name != "model"}
        num_losses = tallies["model"].table[-1, :, 0].flatten(1).any(dim=1).sum()
        by_forecast = {"model": found["model"], **self.known}
        return Scores(self.variables, by_forecast, (losses.sum() / num_losses).item())
