"""Baselines that a model has to beat, with the signature of every other forecast.

Shapes: B dates, L leads, V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from datasets.archive import Archive
from datasets.grid import area_weights
from verification.climatology import Climatology
from verification.rollout import Forecast
from verification.stores import state_of_analyses

# A climatology without annual and daily cycle, different from the one that evaluate.py computes.
TRAINING_MEAN = "training mean"
KEPT_BYTES = 2**29  # of analyses that several baselines start from
MIN_FIT_SAMPLES = 30  # with fewer, the factors are mostly noise
FIT_SAMPLES = 400  # dates of the training period, evenly spaced, that damped persistence is fitted on
# Function of a date and variables to the field (V, H, W) that damped persistence decays to.
Normal = Callable[[np.datetime64, Sequence[str]], np.ndarray]


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
    archive: Archive, variables: Sequence[str], samples: np.ndarray, mean_field: Tensor, leads: Sequence[int]
) -> dict[str, Forecast]:
    """Return the baselines of a run, fitted on training samples (n, 1 + L): positions in archive.times of a
    state and its truth at each lead, -1 where there is none. mean_field (V, H, W): on the device that is to
    forecast.
    """
    mean = dict(zip(variables, mean_field.cpu().numpy(), strict=True))
    normal: Normal = lambda time, names: np.stack([mean[name] for name in names])  # noqa: E731
    factors = fit_damping(archive, variables, samples, normal)
    damping = {lead: mean_field.new_tensor(factors[row]) for row, lead in enumerate(leads)}
    return {
        "persistence": persistence,
        "damped persistence": damped_persistence(mean_field, damping),
        TRAINING_MEAN: training_mean(mean_field),
    }


def fit_damping(
    archive: Archive, variables: Sequence[str], samples: np.ndarray, normal: Normal
) -> np.ndarray:
    """Return the factors (L, V) float32 of damped persistence, the least-squares ones: sum x y / sum x x of
    the anomalies from `normal` now and later, in float64 over the samples (n, 1 + L) of all ranks.

    Each state is read once for all leads.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    area = area_weights(archive.grid.latitude)[:, None]
    sums = np.zeros((2, samples.shape[1] - 1, len(variables)))  # of x y and x x

    def anomaly(date: int) -> np.ndarray:
        return archive.read(date, variables) - normal(archive.times[date], variables)

    for sample in samples[rank::ranks].tolist():
        now = anomaly(sample[0])
        for lead, date in enumerate(sample[1:]):
            later = anomaly(date) if date >= 0 else now[:0]
            for v, (x, y) in enumerate(zip(now, later, strict=date >= 0)):  # in float64, all are gigabytes
                there = np.isfinite(x) & np.isfinite(y)
                weighted = np.where(there, x, 0).astype(np.float64) * area
                sums[:, lead, v] += (
                    np.vdot(weighted, np.where(there, y, 0)),
                    np.vdot(weighted, np.where(there, x, 0)),
                )
    total = torch.from_numpy(sums)
    if ranks > 1:
        dist.all_reduce(total)
    return (total[0] / total[1].clamp_min(1e-300)).float().numpy()


def mean_of_dates(archive: Archive, variables: Sequence[str], dates: np.ndarray) -> np.ndarray:
    """Return the mean (V, H, W) float32 over dates (positions in archive.times), shared by all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    total = torch.zeros(
        (2, len(variables), *archive.grid.shape), dtype=torch.float64
    )  # values, and their number
    for date in dates[rank::ranks].tolist():
        fields = torch.from_numpy(archive.read(date, variables))
        total[0] += fields.nan_to_num(0)
        total[1] += torch.isfinite(fields)
    if ranks > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).float().numpy()


class AnalysesForecast:
    """Persistence, damped where factors are given: a verification.matching.ForecastFields."""

    from_analyses = False  # it is NaN in the cells that analyses lack
    num_members, block = 0, (1, 2**20)  # all leads of a date come from one analysis
    status: np.ndarray | None = None

    def __init__(
        self,
        archive: Archive,
        variables: Sequence[str],
        times: np.ndarray,
        leads: np.ndarray,
        factors: np.ndarray | None = None,
        normal: Normal | None = None,
        read: Callable[[np.datetime64, tuple[str, ...]], np.ndarray] | None = None,
    ) -> None:
        """times (n,) and leads (L,) are those of the forecast to compare with; factors (L, V) of damping
        towards `normal`; read: of another baseline, to read analyses only once.
        """
        self.archive, self.variables, self.grid, self.units = archive, variables, archive.grid, archive.units
        self.times, self.leads, self.factors, self.normal = times, leads, factors, normal
        size = 4 * len(variables) * archive.grid.shape[0] * archive.grid.shape[1]
        self.read = read or lru_cache(max(1, KEPT_BYTES // size))(self._read)

    def _read(self, time: np.datetime64, variables: tuple[str, ...]) -> np.ndarray:
        return self.archive.read(self.archive.index(time), variables)

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W) float32; NaN for dates without an analysis."""
        some, rows = self.leads[leads], [self.variables.index(name) for name in variables]
        out = np.full((dates.stop - dates.start, len(some), len(rows), *self.grid.shape), np.nan, np.float32)
        for row, time in enumerate(self.times[dates]):
            if time not in self.archive.times:
                continue
            state = self.read(time, tuple(variables))
            if self.factors is None or self.normal is None:
                out[row] = state
                continue
            anomaly = state - self.normal(time, variables)
            for column, lead in enumerate(some):
                factor = self.factors[leads][column, rows, None, None]
                np.multiply(factor, anomaly, out=out[row, column])
                out[row, column] += self.normal(time + lead, variables)
        return out

    def state(self, time: np.datetime64) -> str:
        """Return the state of the files with the analysis of a date, and of the factors."""
        factors = b"" if self.factors is None else self.factors.tobytes()
        return f"{state_of_analyses(self.archive, self.variables, time)} {sha256(factors).hexdigest()}"


class ClimatologyForecast:
    """The climatology of the valid time as a forecast, from any initial date."""

    num_members, block, from_analyses = 0, (1, 1), False
    status: np.ndarray | None = None

    def __init__(self, climatology: Climatology, times: np.ndarray, leads: np.ndarray) -> None:
        """times (n,) and leads (L,) as in every forecast: verification.matching.ForecastFields."""
        self.climatology, self.times, self.leads = climatology, times, leads
        self.grid, self.variables, self.units = climatology.grid, climatology.variables, climatology.units

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W) float32. Raises DataError for a valid time that the climatology lacks."""
        valid_times = self.times[dates, None] + self.leads[leads]  # (n, k)
        fields = np.stack([self.climatology.field(time, variables) for time in valid_times.ravel()])
        return fields.reshape(*valid_times.shape, *fields.shape[1:])

    def state(self, time: np.datetime64) -> str:
        return self.climatology.state
