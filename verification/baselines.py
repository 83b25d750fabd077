"""Baselines that a model has to beat, with the signature of every other forecast.

Shapes: B dates, L leads, V variables, H latitudes, W longitudes.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from datasets.archive import Archive
from datasets.field_dataset import FieldDataset
from datasets.loader import EvaluationSampler, build_loader
from jobs.durable_files import write_durably
from parallelisms.mesh import from_first_rank
from verification.rollout import Forecast

# A climatology without annual and daily cycle, different from the one that evaluate.py computes.
TRAINING_MEAN = "training mean"
MOST_STATES = 16  # analyses kept for further leads of the dates that are scored together
MIN_FIT_SAMPLES = 30  # with fewer, the factors are mostly noise
FIT_SAMPLES = 400  # dates of the training period, evenly spaced, that damped persistence is fitted on


def persistence(fields: Tensor, times: Tensor, leads: Sequence[int]) -> list[Tensor]:
    """Return the initial state (B, V, H, W) for every lead."""
    return [fields] * len(leads)


def training_mean(mean_field: Tensor) -> Forecast:
    """Return the forecast of the mean of the training period, (V, H, W), whatever the date."""

    def forecast(fields: Tensor, times: Tensor, leads: Sequence[int]) -> list[Tensor]:
        return [mean_field.expand_as(fields)] * len(leads)

    return forecast


def damped_persistence(mean_field: Tensor, damping: dict[int, Tensor]) -> Forecast:
    """Return the forecast mean + a (state - mean), `a` by lead and variable: damping[lead] (V,)."""

    def forecast(fields: Tensor, times: Tensor, leads: Sequence[int]) -> Iterator[Tensor]:
        for lead in leads:
            yield mean_field + damping[lead][:, None, None] * (fields - mean_field)

    return forecast


def fit_baselines(
    training: FieldDataset,
    mean_field: Tensor,
    area: Tensor,
    leads: Sequence[int],
    batch_size: int,
    cache: Path | None = None,
    fingerprint: str = "",
) -> dict[str, Forecast]:
    """Fit the baselines of a run on training samples of the state and its truth at each lead, NaN where there
    is none.

    The factor of damped persistence is the least-squares one, sum x y / sum x x of the anomalies now and
    later, summed over the dates of all ranks in float64. mean_field (V, H, W) and area (H,) on the device
    that is to forecast. cache: a file with the factors of leads that were fitted before, for the same
    `fingerprint` of the training data.
    """
    known: dict[int, list[float]] = from_first_rank(lambda: read_damping(cache, fingerprint)) if cache else {}
    for row, lead in enumerate(leads):  # one by one: all 40 leads of a sample at 1024 x 2048 are 6 GB
        if lead not in known:
            part = FieldDataset(training.archive, training.variables, training.samples[:, [0, 1 + row]])
            sums = sum_products(part, mean_field, area, batch_size)  # (2, V)
            dist.all_reduce(sums)
            known[lead] = (sums[0] / sums[1].clamp_min(1e-300)).float().tolist()
    if cache and dist.get_rank() == 0:
        content = {"fingerprint": fingerprint, "factors": known}
        with suppress(OSError):  # a full disk costs another fit
            write_durably(cache, json.dumps(content))
    damping = {lead: mean_field.new_tensor(known[lead]) for lead in leads}
    return {
        "persistence": persistence,
        "damped persistence": damped_persistence(mean_field, damping),
        TRAINING_MEAN: training_mean(mean_field),
    }


def read_damping(cache: Path, fingerprint: str) -> dict[int, list[float]]:
    """Return the factors (V,) of damped persistence by lead, {} without a file that is of these data."""
    try:
        content = json.loads(cache.read_text())
        factors = content["factors"] if content["fingerprint"] == fingerprint else {}
        return {int(lead): list(map(float, values)) for lead, values in factors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def sum_products(training: FieldDataset, mean_field: Tensor, area: Tensor, batch_size: int) -> Tensor:
    """Return the `products` of this rank's samples of a state and its truth, (2, V)."""
    sums = torch.zeros(2, len(mean_field), dtype=torch.float64, device=mean_field.device)
    sampler = EvaluationSampler(len(training), batch_size, dist.get_rank(), dist.get_world_size())
    for indices, (fields, _) in zip(sampler.batches, build_loader(training, sampler), strict=True):
        own = [row for row, index in enumerate(indices) if index >= 0]  # -1: a sample of another rank
        for row in own:  # one by one, to avoid a copy of the batch, which has gigabytes at 1024 x 2048
            states = training.unpack(fields[row : row + 1].to(mean_field.device))[0]  # (2, V, H, W)
            for v, mean in enumerate(mean_field):  # in float64, 17 variables at 1024 x 2048 are gigabytes
                now, later = states[:, v] - mean
                sums[:, v] += products(now, later, area)
    return sums


def products(now: Tensor, later: Tensor, area: Tensor) -> Tensor:
    """Return the area-weighted sums of now x later and now x now, of a variable's anomalies (H, W)."""
    there = torch.isfinite(now) & torch.isfinite(later)
    now, later = (torch.where(there, field, 0.0).double() for field in (now, later))
    weighted = now * area.double()[:, None]
    return torch.stack([(weighted * later).sum(), (weighted * now).sum()])


class AnalysesForecast:
    """A baseline computed from analyses, with the interface verification.matching.ForecastFields."""

    from_analyses = False  # it is NaN in the cells that analyses lack
    num_members, block = 0, (1, 2**20)  # all leads of a date come from one analysis
    status: np.ndarray | None = None

    def __init__(
        self,
        archive: Archive,
        variables: Sequence[str],
        times: np.ndarray,
        leads: np.ndarray,
        step: np.timedelta64,
        forecast: Forecast,
    ) -> None:
        """times (n,) and leads (L,), multiples of the step, are those of the forecast to compare with."""
        assert not (leads % step).astype(int).any(), f"leads {leads} are no multiples of {step}"
        self.archive, self.forecast, self.variables, self.grid = archive, forecast, variables, archive.grid
        self.times, self.leads, self.step, self.units = times, leads, step, archive.units
        self._state = lru_cache(MOST_STATES)(self._read_state)

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W) float32; NaN for dates without an analysis."""
        steps = [int(lead // self.step) for lead in self.leads[leads]]
        rows = [self.variables.index(name) for name in variables]
        out = np.full((dates.stop - dates.start, len(steps), len(rows), *self.grid.shape), np.nan, np.float32)
        for row, time in enumerate(self.times[dates]):
            if time in self.archive.times:
                seconds = torch.tensor([int(time.astype("datetime64[s]").astype(int))])
                for lead, fields in enumerate(self.forecast(self._state(time)[None], seconds, steps)):
                    out[row, lead] = fields[0, rows].numpy()
        return out

    def _read_state(self, time: np.datetime64) -> Tensor:
        return torch.from_numpy(self.archive.read(self.archive.index(time), self.variables))
