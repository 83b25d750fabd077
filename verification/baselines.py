"""Baselines that a model has to beat, with the signature of every other forecast.

Shapes: B dates, L leads, V variables, H latitudes, W longitudes.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from datasets.archive import Archive
from datasets.grid import area_weights
from datasets.selection import Selection
from verification.climatology import Climatology
from verification.rollout import Forecast
from verification.stores import state_of_files

logger = logging.getLogger("rossby")
KEPT_BYTES = 2**29  # of analyses that several baselines start from
MIN_FIT_SAMPLES = 30  # with fewer, the factors are mostly noise
FIT_SAMPLES = 400  # dates of the training period, evenly spaced, that damped persistence is fitted on
# Function of a date and variables to fields (V, H, W), such as those that damped persistence decays to.
FieldsAt = Callable[[np.datetime64, Sequence[str]], np.ndarray]


def persistence(fields: Tensor, times: Tensor, leads: Sequence[int]) -> list[Tensor]:
    """Return the initial state (B, V, H, W) for every lead."""
    return [fields] * len(leads)


def fit_baselines(
    archive: Archive, variables: Sequence[str], samples: np.ndarray, mean_field: Tensor, leads: Sequence[int]
) -> dict[str, Forecast]:
    """Return the baselines of a run, fitted on training samples (n, 1 + L): positions in archive.times of a
    state and its truth at each lead, -1 where there is none. mean_field (V, H, W): on the device that is to
    forecast.
    """
    factors = fit_damping(archive, variables, samples, constant(variables, mean_field.cpu().numpy()))
    damping = {lead: mean_field.new_tensor(factors[row]) for row, lead in enumerate(leads)}  # (V,)

    return {
        "persistence": persistence,
        "damped persistence": lambda fields, times, leads: (
            mean_field + damping[lead][:, None, None] * (fields - mean_field) for lead in leads
        ),
        # A climatology without annual and daily cycle, different from the one that evaluate.py computes.
        "training mean": lambda fields, times, leads: [mean_field.expand_as(fields)] * len(leads),
    }


def constant(variables: Sequence[str], fields: np.ndarray) -> FieldsAt:
    """Return a function that returns the same fields (V, H, W) of these variables for each date."""
    return lambda time, names: fields[[variables.index(name) for name in names]]


def fit_damping(
    archive: Archive, variables: Sequence[str], samples: np.ndarray, normal: FieldsAt
) -> np.ndarray:
    """Return the factors (L, V) float32 of damped persistence, the least-squares ones: sum x y / sum x x of
    the anomalies from `normal` now and later, in float64 over the samples (n, 1 + L) of all ranks.

    Each state is read once for all leads.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    area, times = area_weights(archive.grid.latitude)[:, None], cast(Any, archive.times)
    sums = np.zeros((2, samples.shape[1] - 1, len(variables)))  # of x y and x x
    for sample in samples[rank::ranks].tolist():
        now = archive.read(sample[0], variables) - normal(times[sample[0]], variables)
        for lead, date in enumerate(sample[1:]):
            if date < 0:
                continue
            later = archive.read(date, variables) - normal(times[date], variables)
            for v, (x, y) in enumerate(zip(now, later, strict=True)):  # in float64, all are gigabytes
                valid = np.isfinite(x) & np.isfinite(y)
                weighted = np.where(valid, x, 0).astype(np.float64) * area
                sums[0, lead, v] += np.vdot(weighted, np.where(valid, y, 0))
                sums[1, lead, v] += np.vdot(weighted, np.where(valid, x, 0))
    # The sums of all ranks, so that all have the same factors.
    total = torch.from_numpy(sums)
    if ranks > 1:
        dist.all_reduce(total)
    return (total[0] / total[1].clamp_min(1e-300)).float().numpy()


class Baseline:
    """A forecast that is computed from analyses or a climatology, and read like a stored one.

    Of analyses persistence, damped towards `normal` where there are factors (L, V); of a climatology that of
    the valid time, which has to be there.
    """

    num_members, status = 1, None
    block = (1, 2**20)  # all leads of a date come from one analysis

    def __init__(
        self,
        source: Archive | Climatology,
        variables: Sequence[str],
        times: np.ndarray,
        leads: np.ndarray,
        factors: np.ndarray | None = None,
        normal: FieldsAt | None = None,
        read: FieldsAt | None = None,
    ) -> None:
        """times (n,), leads (L,): of the forecast to compare with. read: function that reads an analysis."""
        self.source, self.variables, self.times, self.leads = source, variables, times, leads
        self.factors, self.normal, self.read = factors, normal, read
        self.grid, self.units = source.grid, source.units

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W) float32; NaN for dates without an analysis."""
        times, source = self.times[dates], self.source
        shape = (len(times), len(self.leads[leads]), len(variables), *self.grid.shape)
        fields = np.full(shape, np.nan, np.float32)
        for of_date, time in zip(fields, times, strict=True):
            valid_times = time + self.leads[leads]
            if isinstance(source, Climatology):
                for of_lead, valid_time in zip(of_date, valid_times, strict=True):
                    of_lead[...] = source.field(valid_time, variables)
            elif time in source.times:
                names = tuple(variables)
                analysis = self.read(time, names) if self.read else source.read(source.index(time), names)
                of_date[...] = analysis
                if self.factors is None or self.normal is None:
                    continue
                anomaly, rows = analysis - self.normal(time, names), [self.variables.index(n) for n in names]
                factors = self.factors[leads][:, rows, None, None]
                for of_lead, valid_time, factor in zip(of_date, valid_times, factors, strict=True):
                    of_lead[...] = factor * anomaly + self.normal(valid_time, names)
        return fields

    def state(self, time: np.datetime64) -> str:
        """Return a text that changes when the forecast from a date may have changed."""
        if isinstance(self.source, Climatology):
            return self.source.state
        factors = b"" if self.factors is None else self.factors.tobytes()
        return f"{state_of_files(self.source, self.variables, time)} {sha256(factors).hexdigest()}"


def build_baselines(
    names: Sequence[str],
    times: np.ndarray,
    leads: np.ndarray,
    selection: Selection,
    variables: Sequence[str],
    climatology: Climatology | None,
) -> dict[str, Baseline]:
    """Return the baselines named, from initial dates (n,) at the leads (L,) that are whole steps and have a
    truth: to fit other leads would read years of analyses for nothing. Climatology is included if it has all
    valid times and at least one of the scored `variables`; damped persistence decays to it if it has all.
    """
    archive, step, now = selection.archive, selection.step, np.timedelta64(0, "s")
    leads = leads[(leads > now) & (leads % step == now)]
    leads = leads[np.isin(times[:, None] + leads, archive.times).any(axis=0)]
    # Persistence and its damped form read the same analyses: one cache for both.
    valid_times = np.unique(times[:, None] + leads)
    variables = [name for name in selection.variables if name in variables]
    bytes_of_state = 4 * len(variables) * archive.grid.shape[0] * archive.grid.shape[1]
    read = lru_cache(max(1, KEPT_BYTES // bytes_of_state))(
        lambda time, some: archive.read(archive.index(time), some)
    )
    baselines = {}
    if "persistence" in names:
        baselines["persistence"] = Baseline(archive, variables, times, leads, read=read)
    if "damped_persistence" in names:
        # Fitted on the dates of train.py, towards the climatology of each date or the mean of these dates.
        samples = selection.samples_by_lead("train", (leads // step).tolist(), FIT_SAMPLES)
        if len(samples) < MIN_FIT_SAMPLES:
            logger.warning("damped persistence is fitted on %d dates: too few to rely on", len(samples))
        dates = np.concatenate([times, valid_times, archive.times[np.unique(samples[samples >= 0])]])
        is_complete = (
            climatology and {*variables} <= {*climatology.variables} and all(map(climatology.has, dates))
        )
        if climatology and is_complete and climatology.grid.same_as(archive.grid):
            normal, text = climatology.field, "the climatology of the date"
        else:
            # The mean over the dates, shared by all ranks.
            total = torch.zeros((2, len(variables), *archive.grid.shape), dtype=torch.float64)
            for date in np.unique(samples[:, 0])[dist.get_rank() :: dist.get_world_size()]:
                fields = torch.from_numpy(archive.read(int(date), variables))
                total[0] += fields.nan_to_num(0)
                total[1] += torch.isfinite(fields)  # the number of values
            dist.all_reduce(total)
            normal = constant(variables, (total[0] / total[1]).float().numpy())
            text = "the mean of the training period"
        logger.info("damped persistence decays to %s; fitted on %d dates", text, len(samples))
        factors = fit_damping(archive, variables, samples, normal)
        baselines["damped persistence"] = Baseline(archive, variables, times, leads, factors, normal, read)
    # One valid time without a climatology would leave a date out of all scores, so it is taken whole or not.
    if "climatology" in names and climatology:
        lacking = [time for time in valid_times if not climatology.has(time)]
        if not {*variables} & {*climatology.variables}:
            logger.info("climatology is no baseline: %s has none of the variables", climatology.path)
        elif lacking:
            number = f"{len(lacking)} valid times, the first {lacking[0]}"
            logger.info("climatology is no baseline: %s lacks %s", climatology.path, number)
        else:
            baselines["climatology"] = Baseline(climatology, climatology.variables, times, leads)
    return baselines
