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

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.archive import Archive
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

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (L, S + 1, V, R) of the table of a date: statistics, then 1 with a truth, else 0."""
        return len(self.leads), len(self.statistics) + 1, len(self.variables), len(self.regions)


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
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda dates: None,
) -> Evaluation:
    """Score a forecast against analyses, on the coarser of their grids; what is not given is all that the
    forecast has.

    variables: names with levels; dates: initial dates (datetime64). detailed_hours: leads that get maps and
    spectra. progress is called with the number of dates just finished. Each rank scores a part of the dates,
    and all ranks return the same result, bit-exact that of one rank (maps and spectra: to rounding). Raises
    ConfigError for an unknown region, DataError if no date has a truth.
    """
    fields = list(forecast.variables if variables is None else variables)
    winds, statistics = wind_pairs(fields), statistic_names(climatology is not None, forecast.num_members)
    hours, units = forecast.leads // np.timedelta64(1, "h"), {name: truth.units(name) for name in fields}
    leads, some_dates = positions(hours, lead_hours), positions(forecast.times, dates)
    asked = Request([*fields, *winds], winds, leads, some_dates, list(regions), statistics, units)
    grid = min(forecast.grid, truth.grid, key=lambda each: each.shape[0] * each.shape[1])
    matcher = Matcher(forecast, truth, climatology, fields, asked.leads, grid, device)
    details = None
    if detailed_hours:
        detailed = positions(hours, detailed_hours)
        details = Details(detailed, fields, grid, forecast.num_members, device, units)
    total, date_values = torch.zeros(asked.shape, dtype=torch.float64, device=device), []
    with Scorer(asked, RegionMeans(grid, asked.regions, device), details) as scorer:
        for table in date_tables(matcher, asked, scorer):  # in the order of dates, on any number of ranks
            present = table[:, -1:] > 0
            total += torch.where(present, table, 0.0)
            date_values.append(torch.where(present, table, torch.nan)[:, :-1, :, 0].cpu().numpy())
            progress(1)
    if not total[:, -1].any():
        first = forecast.times[asked.dates[0]] + forecast.leads[asked.leads[0]] if asked.dates else "any date"
        raise DataError(f"the truth has no analysis for any date and lead of the forecast, such as {first}")
    return collect(forecast, asked, total, date_values, details)


def positions(axis: np.ndarray, wanted: Sequence | np.ndarray | None) -> list[int]:
    """Return the positions of the wanted values, which must exist, on an ascending axis; None: all."""
    if wanted is None:
        return list(range(len(axis)))
    found = np.flatnonzero(np.isin(axis, wanted)).tolist()
    assert len(found) == len(set(wanted)), f"{wanted} of {axis}"
    return found


def date_tables(matcher: Matcher, asked: Request, scorer: "Scorer") -> Iterator[Tensor]:
    """Yield the table (L, S + 1, V, R) of each date, in the order of dates.

    In each round every rank scores one block of dates, and all ranks get all of them: so sums over dates are
    made in one order, whatever the number of ranks.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    blocks = matcher.blocks(asked.dates)
    pairs, longest = matcher.pairs(blocks[rank::ranks]), max(map(len, blocks), default=0)
    for first in range(0, len(blocks), ranks):
        in_round = blocks[first : first + ranks]  # none is left for the last ranks in the last round
        ours = torch.full((longest, *asked.shape), torch.nan, dtype=torch.float64, device=scorer.device)
        ours[:, :, -1] = 0
        if rank < len(in_round):
            scorer.fill(ours, in_round[rank], pairs)
        tables = [ours]
        if ranks > 1:
            tables = [torch.empty_like(ours) for _ in range(ranks)]
            dist.all_gather(tables, ours)
        for block, table in zip(in_round, tables, strict=False):
            yield from table[: len(block)]


class Scorer:
    """Turns pairs of fields into tables of statistics, several at a time on a CPU.

    There each thread works on fields of its own: torch's own threads would wait for each other some thousand
    times a date, and where the machine has other work that took ten times as long. To be used in a `with`.
    """

    def __init__(self, asked: Request, means: RegionMeans, details: Details | None) -> None:
        self.asked, self.means, self.details, self.device = asked, means, details, means.rows.device
        self.usual = torch.get_num_threads()
        self.width = self.usual if self.device.type == "cpu" else 1

    def __enter__(self) -> "Scorer":
        self.threads = ThreadPoolExecutor(self.width, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *error: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        torch.set_num_threads(self.usual)  # for threads that start later

    def fill(self, tables: Tensor, block: Sequence[int], pairs: Iterator[Pair]) -> None:
        """Scores all dates and leads of a block into its tables (B, L, S + 1, V, R)."""
        waiting: deque[Future] = deque()
        for pair in islice(pairs, len(block) * len(self.asked.leads)):
            if pair.truth is None:
                continue
            table = tables[block.index(pair.date), self.asked.leads.index(pair.lead)]
            waiting.append(self.threads.submit(self._score, table, pair))
            if self.details is not None:
                self.details.add(pair)
            if len(waiting) > 2 * self.width:  # more fields need not be in memory
                waiting.popleft().result()
        for each in waiting:
            each.result()

    def _score(self, table: Tensor, pair: Pair) -> None:
        assert pair.truth is not None
        values, present = date_statistics(pair.forecast, pair.truth, pair.climatology, self.means)
        values, present = append_wind(values, present, self.asked.winds)
        table[:-1], table[-1] = complete(values, self.asked.statistics), present


def collect(
    forecast: ForecastFields,
    asked: Request,
    total: Tensor,
    date_values: Sequence[np.ndarray],
    details: Details | None,
) -> Evaluation:
    """Return Datasets; date_values: statistics of each date in the first region, (L, S, V) each."""
    means = dict(zip(asked.statistics, (total[:, :-1] / total[:, -1:]).unbind(1), strict=True))
    num_dates = total[:, -1]
    final = {"num_dates": num_dates, **final_scores(means, forecast.num_members)}  # (L, V, R) each
    leads, names, regions = forecast.leads[asked.leads], asked.variables, asked.regions
    coords = {"metric": list(final), "region": regions, "lead_time": leads.astype("timedelta64[ns]")}
    coords["num_dates"] = ("lead_time", num_dates.flatten(1).amax(1).long().cpu().numpy())
    table = torch.stack(list(final.values())).permute(0, 3, 1, 2).cpu().numpy()
    scores = by_variable(table, ("metric", "region", "lead_time", "variable"), names, coords, asked.units)
    times = forecast.times[asked.dates].astype("datetime64[ns]")
    coords |= {"time": times, "metric": list(asked.statistics), "region": regions[:1]}
    statistics = np.stack(date_values).transpose(0, 2, 1, 3)[:, :, None]
    dims = ("time", "metric", "region", "lead_time", "variable")
    by_date = by_variable(statistics, dims, names, coords, asked.units)
    if details is None:
        return Evaluation(scores, by_date)
    if dist.is_initialized():
        details.reduce()
    detailed = forecast.leads[list(details.row)]
    return Evaluation(
        scores, by_date, details.bias(detailed), details.energy(detailed), details.rank_histogram(detailed)
    )
