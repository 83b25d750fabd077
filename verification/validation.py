"""Scoring forecasts over every date of a period, exactly once, on any number of ranks.

The sums over dates are those of evaluate.py. Shapes: B dates, M members of an ensemble (1 of any other
forecast), h states of a window (datasets/loader.py), L leads, V variables, H latitudes, W longitudes,
n dates in all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.loader import FieldDataset, Loader, evaluation_batches, split_sample
from verification.rollout import Forecast
from verification.scores import RegionMeans, combine, date_statistics, final_scores, statistic_names
from verification.scores_by_date import DIMS, Example
from verification.tables import as_text, describe_dates, lead_hours, score_table, select

Loss = Callable[[Tensor, Tensor], Tensor]
# Of an ensemble: keys of metrics.jsonl, metrics of evaluate.py.
OF_MEMBERS = {"crps": "crps", "spread_skill": "unbiased_spread_skill_ratio"}


@dataclass
class Scores:
    """Scores of "model" and the baselines in the form of `Evaluation.scores`, and the loss of the model.

    For an ensemble, "rmse" is the RMSE of its mean.
    """

    variables: Sequence[str]
    by_forecast: xr.Dataset
    loss: float

    @property
    def num_dates(self) -> list[int]:
        """The number of dates with a truth, for each lead."""
        return self.by_forecast["num_dates"].sel(forecast="model").values.tolist()

    def values(self, metric: str, name: str = "model") -> np.ndarray:
        """Return a score (L, V) of a forecast."""
        scores = self.by_forecast.sel(forecast=name)
        return np.stack([select(scores, metric, variable).values for variable in self.variables], axis=-1)

    def with_raw_weights(self, scores: Self) -> Self:
        """Return these scores and those of another model, which are named "raw weights"."""
        raw = scores.by_forecast.sel(forecast=["model"]).assign_coords(forecast=["raw weights"])
        both = xr.concat([self.by_forecast, raw], "forecast", data_vars="all", coords="minimal")
        return replace(self, by_forecast=both)

    def record(self, step: int) -> dict[str, float]:
        """Return the validation object of metrics.jsonl: keys of leads after the first end in @<hours>h."""
        suffixes = ["", *(f"@{hours}h" for hours in lead_hours(self.by_forecast)[1:])]
        record: dict[str, float] = {"step": step, "val/loss": self.loss}
        record |= {f"val/dates{suffix}": n for suffix, n in zip(suffixes, self.num_dates, strict=True)}
        values = {"rmse": self.values("rmse")}
        for name in self.by_forecast["forecast"].values[1:].tolist():
            values[f"rmse_{name.replace(' ', '_')}"] = self.values("rmse", name)
        for key, metric in OF_MEMBERS.items():
            if metric in self.by_forecast["metric"]:
                values[key] = self.values(metric)
        for key, table in values.items():
            keys = [f"val/{key}/{variable}{suffix}" for suffix in suffixes for variable in self.variables]
            record |= dict(zip(keys, table.ravel().tolist(), strict=True))
        return record

    def table(self) -> str:
        """Return the RMSE by variable and lead as text."""
        title = f"validation over {describe_dates(self.by_forecast.sel(forecast='model'))}"
        return as_text(score_table(self.by_forecast, "rmse", title))


class ValidationEnded(Exception):
    """Raised where the run has to end."""


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
        """dataset: samples of a window and the states at the leads, which that after one step may precede:
        the loss is of the first state, and only leads are scored. part: index of this rank's part of the
        dates, and number of parts; counts: True on one rank of each part; members: of the model's forecasts;
        num_forcing: number of last variables that are not scored; boundary: cells that are not scored, bool
        (H, W).
        """
        self.dataset, self.lead_steps, self.step_hours, self.device = dataset, lead_steps, step_hours, device
        self.counts, self.members, self.boundary = counts, members, boundary
        self.variables = dataset.variables[: len(dataset.variables) - num_forcing]
        num_states = dataset.samples.shape[1] - dataset.history
        self.steps = list(lead_steps) if num_states == len(lead_steps) else [1, *lead_steps]
        self.mean = RegionMeans(dataset.archive.grid, ["global"], device)
        self.batches = evaluation_batches(len(dataset), batch_size, *part)
        # One batch ahead: each has the truth at every lead.
        self.loader = Loader(dataset, self.batches, min(num_workers, 1), pin=device.type == "cuda")
        self.known: dict[str, xr.DataArray] = {}  # scores of the model and of the baselines

    @torch.no_grad()
    def run(
        self,
        model: Forecast,
        baselines: dict[str, Forecast],
        loss: Loss,
        is_ended: Callable[[], bool] | None = None,
    ) -> Scores:
        """Score the model, and the first time the baselines; the result has the same bits on any number of
        ranks. Raises ValidationEnded if `is_ended`, which is asked before each batch, is True.
        """
        forecasts = {"model": model, **({} if self.known else baselines)}
        # Statistics of each date (n, L, V, 1, S), and its loss and 1 if it has a truth: 0 on other ranks.
        statistics, num_variables, first_lead = {}, len(self.variables), self.steps.index(self.lead_steps[0])
        for name in forecasts:
            scores = statistic_names(False, name == "model" and self.members > 1)
            shape = (len(self.dataset), len(self.lead_steps), num_variables, 1, len(scores))
            coords = {"region": ["global"], "score": list(scores)}
            statistics[name] = torch.zeros(shape, dtype=torch.float64, device=self.device), coords
        losses = torch.zeros((2, len(self.dataset)), dtype=torch.float64, device=self.device)
        for indices, (fields, times) in zip(self.batches, self.loader, strict=True):
            if is_ended and is_ended():
                raise ValidationEnded
            fields, times = self.dataset.unpack(fields.to(self.device)), times.to(self.device)
            window, truths = split_sample(fields, self.dataset.history)
            state = fields[:, 0]
            rows = [row for row, date in enumerate(indices) if date >= 0]  # others are another rank's
            for name, forecast in forecasts.items():
                if name == "model":
                    by_lead = enumerate(forecast(window, times, self.steps))
                else:
                    by_lead = enumerate(forecast(state, times, self.lead_steps), first_lead)
                for column, predicted in by_lead:
                    predicted = predicted.unflatten(0, (len(state), -1))  # (B, M, V, H, W)
                    for row in rows:
                        # Not scored: cells that are missing at the start, where persistence has no value.
                        truth = torch.where(torch.isfinite(state[row]), truths[row, column], torch.nan)
                        if self.boundary is not None:
                            truth.masked_fill_(self.boundary, torch.nan)
                        members, truth = predicted[row, :, :num_variables], truth[:num_variables]
                        if column >= first_lead:
                            members = members if len(members) > 1 else members[0]
                            values = date_statistics([members], truth, None, self.mean)[0]  # (S, V, 1)
                            statistics[name][0][indices[row], column - first_lead] = values.permute(1, 2, 0)
                        if name == "model" and column == 0 and truth.isfinite().any():
                            # As in training: cells that are missing at the start count, too.
                            losses[0, indices[row]] = loss(predicted[row], truths[row, 0][None])
                            losses[1, indices[row]] = 1
        for values in (*(values for values, _ in statistics.values()), losses):
            if not self.counts:
                values.zero_()  # another rank has the same
            dist.all_reduce(values)

        # -- scores of all dates
        leads = np.array([steps * self.step_hours for steps in self.lead_steps], "timedelta64[h]")
        for name, (values, coords) in statistics.items():
            coords |= {"forecast": [name], "lead_time": leads.astype("timedelta64[ns]")}
            scores = final_scores(xr.DataArray(values.cpu().numpy()[None], coords, DIMS), self.members)
            self.known[name] = scores
        units = {name: self.dataset.archive.units(name) for name in self.variables}
        by_forecast = combine(list(self.known.values()), self.variables, units)
        return Scores(self.variables, by_forecast, (losses[0].sum() / losses[1].sum()).item())

    @torch.no_grad()
    def last_date(self, forecast: Forecast) -> Example:
        """Return the last initial date that has a truth at the first lead, and variable -> (truth, forecast)
        (H, W) there; of an ensemble its mean.
        """
        first = self.steps.index(self.lead_steps[0])
        last = int(np.flatnonzero(self.dataset.samples[:, self.dataset.history + first] >= 0)[-1])
        fields, times = self.dataset.__getitems__([last])
        window, truths = split_sample(fields, self.dataset.history)
        by_lead = forecast(window.to(self.device), times.to(self.device), self.lead_steps[:1])
        predicted = next(iter(by_lead)).mean(dim=0).cpu()
        pairs = zip(truths[0, first].numpy(), predicted.numpy(), strict=True)
        return np.datetime64(int(times), "s"), dict(zip(self.variables, pairs, strict=False))
