"""Scores of a forecast over its initial dates: streamed, in float64, on any device and number of ranks.

`evaluate` returns an `Evaluation`, which is xarray Datasets in WeatherBench2's form:

- `scores`: a data variable a variable ("geopotential", "2m_temperature", and "wind_vector", "10m_wind_vector"
  where both components are there), dims (metric, region, lead_time[, level]), float64, attribute `units`.
  `metric` has the names of scores.final_scores. NaN where a score is not defined (a wind vector has mse and
  rmse only), where a region has no cell on the grid, and where a forecast is not finite though the truth is.
  Metric `num_dates`: how many initial dates had a truth, and so are in the other scores; coordinate
  `num_dates` (lead_time): the most that a variable had.
- `by_date`: the same dims with `time` (the initial date) first: the statistics of each date that confidence
  intervals need, for the first of the regions. NaN where there is no truth.
- `bias`, `spectra`, `ranks` for the leads with details, or None: see details.py.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.archive import Archive
from datasets.grid import coarser
from errors import DataError
from verification.climatology import Climatology
from verification.details import Details
from verification.matching import ForecastFields, Matcher, Pair
from verification.score_tables import by_variable
from verification.scores import (
    RegionMeans,
    append_wind,
    complete,
    date_statistics,
    final_scores,
    statistic_names,
    wind_pairs,
)


@dataclass(frozen=True)
class Evaluation:
    """Scores of one forecast; the Datasets are described at the top of this module."""

    scores: xr.Dataset
    by_date: xr.Dataset
    bias: xr.Dataset | None = None
    spectra: xr.Dataset | None = None
    ranks: xr.Dataset | None = None


class Request(NamedTuple):
    """Variables to score (wind vectors last), positions of leads and dates, regions."""

    variables: list[str]
    winds: dict[str, tuple[int, int]]
    leads: list[int]
    dates: list[int]
    regions: list[str]
    statistics: tuple[str, ...]
    units: dict[str, str]  # of each variable


def evaluate(
    forecast: ForecastFields,
    truth: Archive,
    climatology: Climatology | None = None,
    *,
    variables: Sequence[str] | None = None,
    lead_hours: Sequence[int] | None = None,
    dates: np.ndarray | None = None,
    regions: Sequence[str] = ("global",),
    detailed_hours: Sequence[int] = (),
    boundary_width: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda dates: None,
) -> Evaluation:
    """Score a forecast against analyses, on the coarser of their grids; what is not given is all that the
    forecast has.

    variables: names with levels; dates: initial dates (datetime64). detailed_hours: leads that get maps and
    spectra. boundary_width: cells from each side that are not scored. progress is called with the number of
    dates just finished. Each rank scores a part of the dates, and all ranks return the same result, that of
    one rank bit-exact (maps and spectra: to rounding). Raises ConfigError for an unknown region, DataError
    if no date has a truth.
    """
    fields = list(forecast.variables if variables is None else variables)
    winds, statistics = wind_pairs(fields), statistic_names(climatology is not None, forecast.num_members)
    hours, units = forecast.leads / np.timedelta64(1, "h"), {name: truth.units(name) for name in fields}
    leads, some_dates = positions(hours, lead_hours), positions(forecast.times, dates)
    asked = Request([*fields, *winds], winds, leads, some_dates, list(regions), statistics, units)
    grid = coarser(forecast.grid, truth.grid)
    matcher = Matcher(forecast, truth, climatology, fields, asked.leads, grid, device, boundary_width)
    details = None
    if detailed_hours:
        detailed = positions(hours, detailed_hours)
        details = Details(detailed, fields, grid, forecast.num_members, device, units)
    table = score_pairs(matcher, asked, RegionMeans(grid, asked.regions, device), details, progress)
    if not table[:, :, -1].any():
        first = forecast.times[asked.dates[0]] + forecast.leads[asked.leads[0]] if asked.dates else "any date"
        raise DataError(f"the truth has no analysis for any date and lead of the forecast, such as {first}")
    return collect(forecast, asked, table, details)


def positions(axis: np.ndarray, wanted: Sequence | np.ndarray | None) -> list[int]:
    """Return the positions of the wanted values, which must exist, on an ascending axis; None: all."""
    if wanted is None:
        return list(range(len(axis)))
    found = np.flatnonzero(np.isin(axis, wanted)).tolist()
    assert len(found) == len(set(wanted)), f"{wanted} of {axis}"
    return found


def score_pairs(
    matcher: Matcher,
    asked: Request,
    means: RegionMeans,
    details: Details | None,
    progress: Callable[[int], object],
) -> Tensor:
    """Return the table (n, L, S + 1, V, R) of all dates: statistics, then 1 with a truth, else 0.

    Each date is filled by one rank, so that the sum over ranks adds zeros: bit-exact on any number. On a CPU
    each thread works on fields of its own: torch's own threads would wait for each other some thousand times
    a date, and where the machine has other work that took ten times as long.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shape = (len(asked.dates), len(asked.leads), len(asked.statistics) + 1)
    shape = (*shape, len(asked.variables), len(asked.regions))
    table = torch.zeros(shape, dtype=torch.float64, device=means.rows.device)

    def score(pair: Pair) -> None:
        if pair.truth is not None:
            values, present = date_statistics(pair.forecast, pair.truth, pair.climatology, means)
            values, present = append_wind(values, present, asked.winds)
            row = table[asked.dates.index(pair.date), asked.leads.index(pair.lead)]
            row[:-1], row[-1] = complete(values, asked.statistics), present

    num_threads, done = torch.get_num_threads(), 0
    width = num_threads if table.device.type == "cpu" else 1
    pairs = matcher.pairs(matcher.blocks(asked.dates)[rank::ranks])
    with ThreadPoolExecutor(width, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        while some := list(islice(pairs, 2 * width)):  # more fields need not be in memory
            list(threads.map(score, some))
            if details is not None:
                details.add(some)
            before, done = done // len(asked.leads), done + len(some)
            progress(ranks * (done // len(asked.leads) - before))
    torch.set_num_threads(num_threads)  # for threads that start later
    if ranks > 1:
        dist.all_reduce(table)
    return table


def collect(forecast: ForecastFields, asked: Request, table: Tensor, details: Details | None) -> Evaluation:
    """Return the Datasets of a table (n, L, S + 1, V, R) of all dates."""
    present = table[:, :, -1:] > 0
    total = torch.where(present, table, 0.0).sum(dim=0)  # (L, S + 1, V, R)
    means = dict(zip(asked.statistics, (total[:, :-1] / total[:, -1:]).unbind(1), strict=True))
    final = {"num_dates": total[:, -1], **final_scores(means, forecast.num_members)}  # (L, V, R) each
    leads, names, regions = forecast.leads[asked.leads], asked.variables, asked.regions
    coords = {"metric": list(final), "region": regions, "lead_time": leads.astype("timedelta64[ns]")}
    coords["num_dates"] = ("lead_time", total[:, -1].flatten(1).amax(1).long().cpu().numpy())
    values = torch.stack(list(final.values())).permute(0, 3, 1, 2).cpu().numpy()
    scores = by_variable(values, ("metric", "region", "lead_time", "variable"), names, coords, asked.units)
    times = forecast.times[asked.dates].astype("datetime64[ns]")
    coords |= {"time": times, "metric": list(asked.statistics), "region": regions[:1]}
    m = asked.statistics.index("mse")
    broken = table[:, :, m : m + 1].isnan()  # infinite, since NaN is a date that has no pair
    by_statistic = torch.where(broken, torch.inf, table).masked_fill(~present, torch.nan)
    by_statistic = by_statistic[:, :, :-1, :, :1]  # (n, L, S, V, 1)
    statistics = by_statistic.permute(0, 2, 4, 1, 3).cpu().numpy()
    dims = ("time", "metric", "region", "lead_time", "variable")
    by_date = by_variable(statistics, dims, names, coords, asked.units)
    if details is None:
        return Evaluation(scores, by_date)
    if dist.is_initialized():
        details.reduce()
    detailed = forecast.leads[list(details.row)]
    maps = details.bias(detailed), details.energy(detailed), details.rank_histogram(detailed)
    return Evaluation(scores, by_date, *maps)
