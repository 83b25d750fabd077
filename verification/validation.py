"""Scoring forecasts over every date of a period, exactly once, on any number of ranks.

Shapes: B dates, M members of an ensemble (1 of any other forecast), h states of a window
(datasets/field_dataset.py), L leads, V variables, H latitudes, W longitudes, n dates in all, S statistics.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.field_dataset import FieldDataset, split_sample
from datasets.loader import EvaluationSampler, build_loader, unwrap_errors
from verification.report import table
from verification.rollout import Forecast
from verification.score_tables import by_variable, describe_dates
from verification.scores import RegionMeans, date_statistics, ensemble_scores, statistic_names

Loss = Callable[[Tensor, Tensor], Tensor]
# An initial date, and variable -> (truth, forecast), each (H, W).
Example = tuple[np.datetime64, dict[str, tuple[np.ndarray, np.ndarray]]]


@dataclass
class Scores:
    """Scores of a validation: tables (L, V) in physical units by forecast, and the loss of the model.

    Of an ensemble `rmse` is its mean's, and `ensemble` has "crps" and "spread_skill" of its members.
    """

    variables: Sequence[str]
    lead_hours: Sequence[int]
    num_dates: Sequence[int]  # with a truth, a lead
    units: dict[str, str]  # by variable
    rmse: dict[str, Tensor]
    loss: float
    ensemble: dict[str, Tensor] = field(default_factory=dict)

    def record(self, step: int) -> dict[str, float]:
        """Return the validation object of metrics.jsonl: leads but for the first end in @<hours>h."""
        record: dict[str, float] = {"step": step, "val/loss": self.loss}
        suffixes = ["", *(f"@{hours}h" for hours in self.lead_hours[1:])]
        record |= {f"val/dates{suffix}": n for suffix, n in zip(suffixes, self.num_dates, strict=True)}
        keys = {name: "rmse" if name == "model" else f"rmse_{name.replace(' ', '_')}" for name in self.rmse}
        for key, values in ({keys[name]: rmse for name, rmse in self.rmse.items()} | self.ensemble).items():
            names = [f"val/{key}/{variable}{suffix}" for suffix in suffixes for variable in self.variables]
            record |= dict(zip(names, values.flatten().tolist(), strict=True))
        return record

    def datasets(self) -> dict[str, xr.Dataset]:
        """Return scores by forecast in the form of `Evaluation.scores`, of the region "global"."""
        counts = torch.tensor(self.num_dates)[:, None].expand(-1, len(self.variables))
        leads = np.array(self.lead_hours, "timedelta64[h]").astype("timedelta64[ns]")
        dims = ("metric", "region", "lead_time", "variable")
        datasets = {}
        for name, rmse in self.rmse.items():
            tables = {"rmse": rmse, "num_dates": counts, **(self.ensemble if name == "model" else {})}
            coords = {"metric": list(tables), "region": ["global"], "lead_time": leads}
            coords["num_dates"] = ("lead_time", list(self.num_dates))
            values = torch.stack([each.double().cpu() for each in tables.values()])[:, None].numpy()
            datasets[name] = by_variable(values, dims, self.variables, coords, self.units)
        return datasets

    def table(self) -> str:
        """Return the RMSE by variable and lead as text; of an ensemble also its scores."""
        scores, dates = self.datasets(), describe_dates(self.num_dates, self.lead_hours)
        texts = [table(scores, "rmse", f"validation over {dates}")]
        model = {"model": scores["model"]}
        titles = {"crps": "CRPS of the members", "spread_skill": "spread over skill: 1 if reliable"}
        texts += [table(model, metric, titles[metric]) for metric in self.ensemble]
        return "\n\n".join(texts)


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
        """part: which part of the dates is this rank's, of how many; counts: on one rank of each part;
        members: of the model's forecasts; num_forcing: variables that are not scored, the last ones;
        boundary: cells that are not, bool (H, W).
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
        self.known: dict[str, Tensor] = {}

    @torch.no_grad()
    def run(self, model: Forecast, baselines: dict[str, Forecast], loss: Loss) -> Scores:
        """Score the model, and the first time the baselines."""
        forecasts = {"model": model, **({} if self.known else baselines)}
        shape = (self.num_samples, len(self.lead_steps), len(self.variables))
        zeros = partial(torch.zeros, dtype=torch.float64, device=self.device)
        sums = {name: zeros(len(self._statistics(name)), *shape) for name in forecasts}
        losses, present = zeros(self.num_samples), zeros(shape)
        batches = zip(self.sampler.batches, unwrap_errors(iter(self.loader)), strict=True)
        for indices, (fields, times) in batches:
            fields, times = self.dataset.unpack(fields.to(self.device)), times.to(self.device)
            window, truths = split_sample(fields, self.history)
            state = fields[:, 0]
            rows = [row for row, date in enumerate(indices) if date >= 0]  # others are another rank's
            for name, forecast in forecasts.items():
                predicted = forecast(window if name == "model" else state, times, self.lead_steps)
                predicted = predicted.unflatten(0, (len(state), -1))  # (B, M, L, V, H, W)
                for row, lead in product(rows, range(len(self.lead_steps))):
                    date, members = indices[row], predicted[row, :, lead]
                    # Cells missing at the start are left out: persistence has no value there.
                    truth = torch.where(torch.isfinite(state[row]), truths[row, lead], torch.nan)
                    if self.boundary is not None:
                        truth.masked_fill_(self.boundary, torch.nan)
                    scored = members[:, : len(self.variables)]  # without forcing variables
                    scored, known = scored if len(scored) > 1 else scored[0], truth[: len(self.variables)]
                    values, there = date_statistics(scored, known, None, self.mean)
                    sums[name][:, date, lead] = torch.where(there, values, 0.0)[..., 0]
                    present[date, lead] = there[:, 0].double()
                    if name == "model" and lead == 0 and there.any():
                        losses[date] = loss(members, truth[None])
        return self._scores(sums, losses, present)

    def _statistics(self, name: str) -> list[str]:
        """Return the names of the `date_statistics` of a forecast."""
        return list(statistic_names(False, self.members if name == "model" else 1)[:-1])

    @torch.no_grad()
    def last_date(self, forecast: Forecast) -> Example:
        """Return the last initial date that has a truth at the first lead, and variable -> (truth, forecast)
        (H, W) there; of an ensemble its mean.
        """
        last = int(np.flatnonzero(self.dataset.samples[:, self.history] >= 0)[-1])
        fields, times = self.dataset.__getitems__([last])
        (window, truths), first = split_sample(fields, self.history), self.lead_steps[:1]
        predicted = forecast(window.to(self.device), times.to(self.device), first)[:, 0].mean(dim=0).cpu()
        pairs = zip(truths[0, 0].numpy(), predicted.numpy(), strict=True)
        return np.datetime64(int(times), "s"), dict(zip(self.variables, pairs, strict=False))

    def _scores(self, sums: dict[str, Tensor], losses: Tensor, present: Tensor) -> Scores:
        """Return the scores of all ranks, bit-exact on any number: each date is not 0 on one of them only."""
        for values in (*sums.values(), losses, present):
            if not self.counts:
                values.zero_()  # another rank has the same
            dist.all_reduce(values)
        means = {name: values.sum(dim=1) / present.sum(dim=0) for name, values in sums.items()}  # (S, L, V)
        rmse = {name: mean[0].sqrt() for name, mean in means.items()}  # the root after the mean over dates
        self.known |= {name: values for name, values in rmse.items() if name != "model"}
        ensemble = {}
        if self.members > 1:
            of_model = dict(zip(self._statistics("model"), means["model"], strict=True))
            scores = ensemble_scores(of_model, self.members)
            ensemble = {"crps": scores["crps"], "spread_skill": scores["unbiased_spread_skill_ratio"]}
        counts = (present > 0).any(-1).sum(dim=0)  # (L,)
        return Scores(
            self.variables,
            [steps * self.step_hours for steps in self.lead_steps],
            counts.tolist(),
            {name: self.dataset.archive.units(name) for name in self.variables},
            {"model": rmse["model"], **self.known},
            (losses.sum() / counts[0]).item(),
            ensemble,
        )
