"""Forecasts that cost nothing, which a model has to beat. Each has the signature of every other forecast.

Shapes: B dates, L leads, V variables, H latitudes, W longitudes.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from datasets.era5 import Archive
from datasets.loader import EvaluationSampler, FieldDataset, build_loader
from verification.rollout import Forecast

FIT_SAMPLES = 400  # of the training period, evenly spaced, that damped persistence is fitted on


def persistence(fields: Tensor, times: Tensor, leads: Sequence[int]) -> Tensor:
    """Tomorrow will be like today: (B, V, H, W) -> (B, L, V, H, W)."""
    return fields[:, None].expand(-1, len(leads), -1, -1, -1)


def climatology(mean_field: Tensor) -> Forecast:
    """The mean of the training period, (V, H, W), whatever the date."""

    def forecast(fields: Tensor, times: Tensor, leads: Sequence[int]) -> Tensor:
        return mean_field.expand(len(fields), len(leads), -1, -1, -1)

    return forecast


def damped_persistence(mean_field: Tensor, damping: dict[int, Tensor]) -> Forecast:
    """mean + a (state - mean), with one `a` a variable for each lead: damping[lead] (V,)."""

    def forecast(fields: Tensor, times: Tensor, leads: Sequence[int]) -> Tensor:
        factors = torch.stack([damping[lead] for lead in leads])  # (L, V)
        anomaly = (fields - mean_field)[:, None]  # (B, 1, V, H, W)
        return mean_field + factors[:, :, None, None] * anomaly

    return forecast


class DampingFit:
    """Least-squares `a` of damped persistence, summed over dates in float64: sum x y / sum x x of the
    anomalies.
    """

    def __init__(self, mean_field: Tensor, area: Tensor, num_leads: int) -> None:
        self.mean_field, self.area = mean_field, area.double()[:, None]  # (V, H, W), (H, 1)
        self.products = self.area.new_zeros(num_leads, len(mean_field))
        self.squares = torch.zeros_like(self.products)

    def add(self, fields: Tensor, truth: Tensor) -> None:
        """fields (B, V, H, W) and the truth at each lead (B, L, V, H, W), NaN where missing."""
        now = (fields - self.mean_field)[:, None].double()
        later = (truth - self.mean_field).double()
        valid = torch.isfinite(now) & torch.isfinite(later)
        weights = valid * self.area
        sums = [torch.where(valid, now * other, 0.0) * weights for other in (later, now)]
        products, squares = (term.sum(dim=(0, 3, 4)) for term in sums)  # (L, V) each
        self.products += products
        self.squares += squares

    def damping(self, leads: Sequence[int]) -> dict[int, Tensor]:
        """The factors (V,) of each lead, from the dates of all ranks."""
        for total in (self.products, self.squares):
            dist.all_reduce(total)
        factors = (self.products / self.squares.clamp_min(1e-300)).float()  # (L, V)
        return dict(zip(leads, factors, strict=True))


def fit_baselines(
    training: FieldDataset, mean_field: Tensor, area: Tensor, leads: Sequence[int], batch_size: int
) -> dict[str, Forecast]:
    """The baselines of a run, fitted on training samples of the state and its truth at each lead.

    mean_field (V, H, W) and area (H,) on the device that is to forecast.
    """
    fit = DampingFit(mean_field, area, len(leads))
    sampler = EvaluationSampler(len(training), batch_size, dist.get_rank(), dist.get_world_size())
    for indices, (fields, _) in zip(sampler.batches, build_loader(training, sampler), strict=True):
        fields = fields[torch.tensor(indices) >= 0].to(mean_field.device)  # -1: a sample of another rank
        fit.add(fields[:, 0], fields[:, 1:])
    return {
        "persistence": persistence,
        "damped persistence": damped_persistence(mean_field, fit.damping(leads)),
        "climatology": climatology(mean_field),
    }


class AnalysesForecast:
    """A baseline made from analyses as a forecast like any other: verification.matching.ForecastFields."""

    num_members, block = 0, (1, 2**20)  # all leads of a date come from one analysis

    def __init__(
        self,
        archive: Archive,
        forecast: Forecast,
        variables: Sequence[str],
        times: np.ndarray,
        leads: np.ndarray,
        step: np.timedelta64,
        device: torch.device | str = "cpu",
    ) -> None:
        """times (n,) and leads (L,) as the forecast it is compared with has them; step: what the leads of
        `forecast` count in. ValueError where a lead is no multiple of it.
        """
        odd = next((lead for lead in leads if lead % step), None)
        if odd is not None:
            raise ValueError(f"a baseline with steps of {step} cannot forecast {odd}; take other leads")
        self.archive, self.forecast, self.variables, self.grid = archive, forecast, variables, archive.grid
        self.times, self.leads, self.step, self.device = times, leads, step, device

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """(n, k, V, H, W) float32; NaN for dates without an analysis."""
        steps = [int(lead // self.step) for lead in self.leads[leads]]
        rows = [self.variables.index(name) for name in variables]
        out = np.full((dates.stop - dates.start, len(steps), len(rows), *self.grid.shape), np.nan, np.float32)
        for row, time in enumerate(self.times[dates]):
            if time in self.archive.times:
                state = self.archive.read(self.archive.index(time), self.variables)
                out[row] = self._from(state, time, steps)[:, rows]
        return out

    def _from(self, state: np.ndarray, time: np.datetime64, steps: Sequence[int]) -> np.ndarray:
        seconds = torch.tensor([int(time.astype("datetime64[s]").astype(int))], device=self.device)
        fields = torch.from_numpy(state).to(self.device)[None]
        return self.forecast(fields, seconds, steps)[0].cpu().numpy()  # (L, V, H, W)
