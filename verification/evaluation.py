"""Scores of a forecast over its initial dates: streamed, in float64, on any device and number of ranks.

`evaluate` gives an `Evaluation`, which is xarray Datasets in WeatherBench2's form:

- `scores`: a data variable a variable ("geopotential", "2m_temperature", and "wind_vector", "10m_wind_vector"
  where both components are there), dims (metric, region, lead_time[, level]), float64. `lead_time` is
  timedelta64[ns]; `metric` holds the names of scores.final_scores: mse, rmse, rmse_sqrt_before_time_avg, mae,
  bias; with a climatology acc (WeatherBench2's), acc_ratio_of_means (WeatherBench-X's), forecast_activity,
  truth_activity; for ensembles, whose mean the former score, crps, spread, spread_skill_ratio,
  unbiased_spread_skill_ratio. NaN where a score is not defined (a wind vector has mse and rmse only), where a
  region has no cell on the grid, and where a forecast is not finite though the truth is. Coordinate
  `num_dates` (lead_time): how many initial dates had a truth. Attribute `units` of a variable is its own.
- `by_date`: the same dims with `time` (the initial date, datetime64[ns]) first: the statistics of each date
  that confidence intervals need (mse, mae, bias, rmse_sqrt_before_time_avg, acc, ..., crps, variance), for
  the regions asked for. NaN where there is no truth.
- `maps`, `spectra`, `ranks` for the leads with details, or None: see details.py.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.era5 import Archive
from datasets.variables import nearest_name
from errors import DataError
from verification.details import Details
from verification.matching import FieldsByValidTime, ForecastFields, Matcher, Pair
from verification.score_tables import by_variable, lead_coordinate
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
    maps: xr.Dataset | None = None
    spectra: xr.Dataset | None = None
    ranks: xr.Dataset | None = None


class Plan(NamedTuple):
    """What is scored: variables (wind vectors last), places of leads and dates, regions."""

    variables: list[str]
    winds: dict[str, tuple[int, int]]
    leads: list[int]
    dates: list[int]
    regions: list[str]
    regions_by_date: list[str]
    statistics: tuple[str, ...]


class DateTable(NamedTuple):
    """Statistics of one date or more: values (B, L, S, V, R), present (B, L, V, R) bool."""

    values: Tensor
    present: Tensor


def evaluate(
    forecast: ForecastFields,
    truth: Archive,
    climatology: FieldsByValidTime | None = None,
    *,
    variables: Sequence[str] | None = None,
    lead_hours: Sequence[int] | None = None,
    dates: np.ndarray | None = None,
    regions: Sequence[str] = ("global",),
    regions_by_date: Sequence[str] | None = None,
    detailed_hours: Sequence[int] = (),
    device: torch.device | str = "cpu",
    share: tuple[int, int] = (0, 1),
    progress: Callable[[int], object] = lambda dates: None,
) -> Evaluation:
    """Scores a forecast against analyses; all that is not given is all that the forecast has.

    variables: names with levels; lead_hours; dates: initial dates (datetime64). regions_by_date: those of
    `regions` kept for each date (default: the first). detailed_hours: leads that get maps and spectra.
    share: rank and number of ranks, each of which scores every so many-th block of dates; all of them get the
    same result, to the bit that of one rank (maps and spectra: to rounding). progress is called with
    the number of dates just finished. Evaluated on the forecast's or the truth's grid, the coarser of both;
    the rest is regridded conservatively. DataError where a name, lead, date or region is not there, or no
    date has a truth.
    """
    kept_regions = regions[:1] if regions_by_date is None else regions_by_date
    plan = make_plan(forecast, climatology, variables, lead_hours, dates, regions, kept_regions)
    grid = min(forecast.grid, truth.grid, key=lambda each: each.shape[0] * each.shape[1])
    own = plan.variables[: len(plan.variables) - len(plan.winds)]
    matcher = Matcher(forecast, truth, climatology, own, plan.leads, grid, device)
    details = None
    if detailed_hours:
        wanted = places_of_leads(forecast, detailed_hours)
        details = Details(wanted, own, grid, forecast.num_members, device)
    totals, kept = Totals(plan, device), []
    with Scorer(plan, RegionMeans(grid, plan.regions, device), details) as scorer:
        for round_tables in score_rounds(matcher, plan, scorer, share):
            for table in round_tables:  # in the order of dates, whoever scored them
                kept += totals.add(table)
                progress(len(table.values))
    totals.require_truth(forecast, plan)
    if details is not None and share[1] > 1:
        details.reduce()
    return collect(forecast, plan, totals, kept, details)


def make_plan(
    forecast: ForecastFields,
    climatology: FieldsByValidTime | None,
    variables: Sequence[str] | None,
    lead_hours: Sequence[int] | None,
    dates: np.ndarray | None,
    regions: Sequence[str],
    regions_by_date: Sequence[str],
) -> Plan:
    """Checks what is asked for against the forecast. Raises DataError."""
    names = list(forecast.variables if variables is None else variables)
    missing = next((name for name in names if name not in forecast.variables), None)
    if missing is not None:
        hint = nearest_name(missing, forecast.variables)
        raise DataError(f"the forecast has no variable {missing!r}{hint}; name one that it has")
    astray = next((name for name in regions_by_date if name not in regions), None)
    if astray is not None:
        raise ValueError(f"region {astray!r} is kept by date but not scored; add it to the regions")
    winds = wind_pairs(names)
    return Plan(
        names + list(winds),
        winds,
        list(range(len(forecast.leads))) if lead_hours is None else places_of_leads(forecast, lead_hours),
        list(range(len(forecast.times))) if dates is None else places_of_dates(forecast, dates),
        list(regions),
        list(regions_by_date),
        statistic_names(climatology is not None, forecast.num_members),
    )


def places_of_leads(forecast: ForecastFields, hours: Sequence[int]) -> list[int]:
    """Where these leads stand in the forecast; DataError for one that is not there."""
    known = {int(lead // np.timedelta64(1, "h")): place for place, lead in enumerate(forecast.leads)}
    missing = next((hour for hour in hours if hour not in known), None)
    if missing is not None:
        raise DataError(f"the forecast has no lead of {missing} h; it has {', '.join(map(str, known))} h")
    return sorted(known[hour] for hour in set(hours))


def places_of_dates(forecast: ForecastFields, dates: np.ndarray) -> list[int]:
    """Where these initial dates stand in the forecast; DataError for one that is not there."""
    wanted = np.unique(np.asarray(dates).astype("datetime64[s]"))
    missing = wanted[~np.isin(wanted, forecast.times)]
    if len(missing):
        span = f"{forecast.times[0]} .. {forecast.times[-1]}"
        raise DataError(f"the forecast has no initial date {missing[0]}; it has {span}")
    return np.flatnonzero(np.isin(forecast.times, wanted)).tolist()


def score_rounds(
    matcher: Matcher, plan: Plan, scorer: "Scorer", share: tuple[int, int]
) -> Iterator[list[DateTable]]:
    """Tables of blocks of dates in their order. In each round every rank scores one block, and all ranks get
    all of them: so sums over dates are made in one order, whatever the number of ranks.
    """
    (rank, ranks), blocks = share, matcher.blocks(plan.dates)
    pairs, longest = matcher.pairs(blocks[rank::ranks]), max(map(len, blocks), default=0)
    for first in range(0, len(blocks), ranks):
        round_blocks = blocks[first : first + ranks]
        table = empty_table(longest, plan, scorer.device)
        if rank < len(round_blocks):
            scorer.fill(table, round_blocks[rank], pairs)
        tables = gather(table, ranks) if ranks > 1 else [table]
        yield [
            DateTable(each.values[: len(block)], each.present[: len(block)])
            for block, each in zip(round_blocks, tables, strict=False)  # no blocks left for the last ranks
        ]


class Scorer:
    """Turns pairs of fields into tables of statistics, several at a time on a CPU.

    There each thread works on fields of its own: torch's own threads would wait for each other some thousand
    times a date, and where the machine has other work that took ten times as long. To be used in a `with`.
    """

    def __init__(self, plan: Plan, means: RegionMeans, details: Details | None) -> None:
        self.plan, self.means, self.details, self.device = plan, means, details, means.rows.device
        self.usual = torch.get_num_threads()
        self.width = self.usual if self.device.type == "cpu" else 1

    def __enter__(self) -> "Scorer":
        self.threads = ThreadPoolExecutor(self.width, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *error: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        torch.set_num_threads(self.usual)  # for threads that start later

    def fill(self, table: DateTable, block: Sequence[int], pairs: Iterator[Pair]) -> None:
        """Scores all dates and leads of a block into its table."""
        rows, columns = ({p: i for i, p in enumerate(places)} for places in (block, self.plan.leads))
        waiting: deque[Future] = deque()
        for _ in range(len(block) * len(self.plan.leads)):
            pair = next(pairs)
            if pair.truth is None:
                continue
            place = rows[pair.date], columns[pair.lead]
            waiting.append(self.threads.submit(self._score, table, place, pair))
            if self.details is not None:
                self.details.add(pair)
            if len(waiting) > 2 * self.width:  # more fields need not be in memory
                waiting.popleft().result()
        for each in waiting:
            each.result()

    def _score(self, table: DateTable, place: tuple[int, int], pair: Pair) -> None:
        assert pair.truth is not None
        values, present = date_statistics(pair.forecast, pair.truth, pair.climatology, self.means)
        values, present = append_wind(values, present, self.plan.winds)
        table.values[place], table.present[place] = complete(values, self.plan.statistics), present


def empty_table(num_dates: int, plan: Plan, device: torch.device) -> DateTable:
    shape = (num_dates, len(plan.leads), len(plan.variables), len(plan.regions))
    values = torch.full((*shape[:2], len(plan.statistics), *shape[2:]), torch.nan, dtype=torch.float64)
    return DateTable(values.to(device), torch.zeros(shape, dtype=torch.bool, device=device))


def gather(table: DateTable, ranks: int) -> list[DateTable]:
    """The tables of all ranks, on every rank."""
    values = [torch.empty_like(table.values) for _ in range(ranks)]
    present = [torch.empty_like(table.present) for _ in range(ranks)]
    dist.all_gather(values, table.values)
    dist.all_gather(present, table.present)
    return [DateTable(*each) for each in zip(values, present, strict=True)]


class Totals:
    """Sums over dates of statistics, (L, S, V, R), and of how many dates had a truth."""

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        table = empty_table(1, plan, torch.device(device))
        self.values, self.count = torch.zeros_like(table.values[0]), table.present[0].double()
        self.dates = torch.zeros(len(plan.leads), dtype=torch.int64, device=device)
        self.places = [plan.regions.index(name) for name in plan.regions_by_date]

    def add(self, table: DateTable) -> list[np.ndarray]:
        """Adds dates one by one; what is kept of each, (L, S, V, R')."""
        for values, present in zip(table.values, table.present, strict=True):
            self.values += torch.where(present[:, None], values, 0.0)
            self.count += present
            self.dates += present.flatten(1).any(1)
        missing = torch.where(table.present[:, :, None], table.values, torch.nan)
        return list(missing[..., self.places].cpu().numpy())

    def means(self) -> Tensor:
        """(S, L, V, R); NaN where no date had a truth."""
        return (self.values / self.count[:, None]).movedim(1, 0)

    def require_truth(self, forecast: ForecastFields, plan: Plan) -> None:
        if not self.dates.any():
            first = (
                forecast.times[plan.dates[0]] + forecast.leads[plan.leads[0]] if plan.dates else "any date"
            )
            raise DataError(
                f"the truth has no analysis for any date and lead of the forecast, such as {first}"
            )


def collect(
    forecast: ForecastFields, plan: Plan, totals: Totals, kept: Sequence[np.ndarray], details: Details | None
) -> Evaluation:
    """Tensors to Datasets."""
    means = dict(zip(plan.statistics, totals.means(), strict=True))
    final = final_scores(means, forecast.num_members)  # (L, V, R) each
    leads = forecast.leads[plan.leads]
    coords = {"metric": list(final), "region": plan.regions, "lead_time": lead_coordinate(leads)}
    table = torch.stack(list(final.values())).permute(0, 3, 1, 2).cpu().numpy()
    coords["num_dates"] = ("lead_time", totals.dates.cpu().numpy())
    scores = by_variable(table, ("metric", "region", "lead_time", "variable"), plan.variables, coords)
    times = forecast.times[plan.dates].astype("datetime64[ns]")
    coords |= {"time": times, "metric": list(plan.statistics), "region": plan.regions_by_date}
    statistics = np.stack(kept).transpose(0, 2, 4, 1, 3)
    dims = ("time", "metric", "region", "lead_time", "variable")
    by_date = by_variable(statistics, dims, plan.variables, coords)
    if details is None:
        return Evaluation(scores, by_date)
    detailed = forecast.leads[list(details.place)]
    return Evaluation(
        scores, by_date, details.maps(detailed), details.energy(detailed), details.rank_histogram(detailed)
    )
