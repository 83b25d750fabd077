"""Scores of forecasts over their common initial dates: streamed, in float64, on any device and number of
ranks.

`evaluate` returns an `Evaluation` of each forecast, with xarray Datasets in WeatherBench2's form:

- `scores`: a data variable a variable ("geopotential", "2m_temperature", and "wind_vector", "10m_wind_vector"
  where both components are there), dims (metric, region, lead_time[, level]), float64, attribute `units`.
  `metric` has the names of scores.final_scores. NaN where a score is not defined (a wind vector has mse and
  rmse only), where a region has no cell on the grid, and where a forecast is not finite though the truth is.
  Metric `num_dates`: the number of initial dates with a truth, over which the other scores are taken;
  coordinate `num_dates` (lead_time): its maximum over variables. Metric `common_area`: the fraction of the
  area with a truth that is scored, because every forecast has a value there.
- `by_date`: the same dims with `time` (the initial date) first: the statistics of each date that confidence
  intervals need, for the first of the regions. NaN where there is no truth.
- `spectra` at one lead, if they are asked for and the grid goes round the globe: see spectra.py.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch import Tensor

from datasets.archive import Archive
from datasets.grid import Grid, coarser
from errors import DataError
from jobs.saved_parts import SavedParts
from parallelisms.mesh import from_first_rank
from verification.climatology import Climatology
from verification.matching import ForecastFields, Matcher, Pair
from verification.score_tables import by_variable, combine
from verification.scores import (
    DERIVED,
    RegionMeans,
    append_wind,
    complete,
    date_statistics,
    final_scores,
    statistic_names,
    wind_pairs,
)
from verification.spectra import Spectra

logger = logging.getLogger("rossby")


@dataclass(frozen=True)
class Evaluation:
    """Scores of one forecast; the Datasets are described at the top of this module."""

    scores: xr.Dataset
    by_date: xr.Dataset
    spectra: xr.Dataset | None = None


class Tally:
    """Statistics of one forecast, here and in the validation of train.py.

    `table` (S + 2, n, L, V, R) float64: S statistics of each date and lead, the fraction of the area that is
    scored, and 1 where there is a truth.
    """

    def __init__(
        self,
        variables: Sequence[str],
        num_members: int,
        shape: tuple[int, int],
        means: RegionMeans,
        with_climatology: bool = False,
        spectra: Spectra | None = None,
    ) -> None:
        """shape: numbers of dates and leads."""
        self.variables, self.num_members = list(variables), num_members
        self.means, self.spectra = means, spectra
        self.statistics = statistic_names(with_climatology, num_members)
        stored = [name for name in self.statistics if name not in DERIVED]
        size = (len(stored) + 2, *shape, len(self.variables), len(means.weight))
        self.table = torch.zeros(size, dtype=torch.float64, device=means.rows.device)

    def add(self, pair: Pair, part: slice = slice(None)) -> None:
        """Count some variables of a pair. Called from threads."""
        truth, clim = pair.truth[part], None if pair.climatology is None else pair.climatology[part]
        values, present = date_statistics(pair.forecast[..., part, :, :], truth, clim, self.means)
        area = present.double()
        if pair.whole is not pair.truth:
            scored, all_cells = (torch.isfinite(each[part]).double() for each in (pair.truth, pair.whole))
            area = torch.where(present, self.means.total(scored) / self.means.total(all_cells), 0.0)
        entry = self.table[:, pair.date, pair.lead]
        entry[:, pair.rows[part]] = torch.cat([values, area[None], present[None].double()])

    @property
    def sums(self) -> dict[str, Tensor]:
        """Return the sums to add over ranks and attempts. Each date is counted by one of them, so the table
        is bit-exact on any number of ranks.
        """
        return {"table": self.table, **(self.spectra.sums if self.spectra else {})}

    def results(
        self, dates: np.ndarray, leads: np.ndarray, regions: list[str], units: Mapping[str, str]
    ) -> Evaluation:
        """Return the Datasets, once the table has all dates."""
        winds = wind_pairs(self.variables)
        names = [*self.variables, *winds]
        # One lead at a time, because the table is large and this makes several copies.
        final_by_lead, each_by_lead = zip(
            *(self.lead_results(lead, winds) for lead in range(len(leads))), strict=True
        )
        final = {name: torch.stack([own[name] for own in final_by_lead]) for name in final_by_lead[0]}
        coords = {"metric": list(final), "region": regions, "lead_time": leads.astype("timedelta64[ns]")}
        coords["num_dates"] = ("lead_time", final["num_dates"].flatten(1).amax(1).long().cpu().numpy())
        table = torch.stack(list(final.values())).permute(0, 3, 1, 2).cpu().numpy()
        scores = by_variable(table, ("metric", "region", "lead_time", "variable"), names, coords, units)
        coords |= {"time": dates.astype("datetime64[ns]"), "metric": list(self.statistics)}
        coords["region"] = regions[:1]
        dims = ("time", "metric", "region", "lead_time", "variable")
        each = torch.stack(each_by_lead, dim=2)[..., None].permute(1, 0, 4, 2, 3)
        by_date = by_variable(each.cpu().numpy(), dims, names, coords, units)
        return Evaluation(scores, by_date, self.spectra.result(leads) if self.spectra else None)

    def lead_results(
        self, lead: int, winds: Mapping[str, tuple[int, int]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return scores (V, R) of a lead, and the statistics of dates in the first region, (S, n, V)."""
        table = self.table[:, :, lead]
        rows = [*range(len(self.variables)), *(u for u, _ in winds.values())]  # of the areas, those of u
        values, present = append_wind(table[:-2], table[-1] > 0, winds)
        area, values = table[-2][..., rows, :], complete(values, self.statistics)
        broken = values[self.statistics.index("mse")].isnan()  # the forecast is not finite
        # Without a climatology a date has no anomalies.
        weights = (present & (~values.isnan() | broken)).double()  # (S, n, V, R)
        totals = torch.where(weights > 0, values, 0.0).sum(dim=1) / weights.sum(dim=1)  # (S, V, R)
        num_dates = present.double().sum(dim=0)  # (V, R)
        common_area = torch.where(present, area, 0.0).sum(dim=0) / num_dates
        final = {"num_dates": num_dates, "common_area": common_area}
        final |= final_scores(dict(zip(self.statistics, totals, strict=True)), self.num_members)
        # Infinite where the forecast is not finite; NaN means that a date has no pair.
        each = torch.where(broken, torch.inf, values).masked_fill(~present, torch.nan)
        return final, each[..., 0].clone()  # not a view, which would keep all regions


def evaluate(
    forecast: ForecastFields, truth: Archive, climatology: Climatology | None = None, **options: Any
) -> Evaluation:
    """Score a single forecast: see `evaluate_together`."""
    return evaluate_together({"forecast": forecast}, truth, climatology, **options)["forecast"]


def evaluate_together(
    forecasts: Mapping[str, ForecastFields],
    truth: Archive,
    climatology: Climatology | None = None,
    *,
    variables: Sequence[str] | None = None,
    lead_hours: Sequence[int] | None = None,
    dates: np.ndarray | None = None,
    grid: Grid | None = None,
    regions: Sequence[str] = ("global",),
    spectra_lead: int | None = None,
    boundary_width: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda dates: None,
    saved: SavedParts | None = None,
) -> dict[str, Evaluation]:
    """Score forecasts against analyses on `grid`, or the coarsest of their grids, on common cells, dates and
    leads. Arguments that are not given default to everything in the first forecast.

    A forecast may lack variables, and leads of `lead_hours`; it then has no scores for them. variables: names
    with levels; dates: initial dates (datetime64). spectra_lead: in hours.
    boundary_width: cells from each side that are not scored. progress is called with the number of newly
    finished dates. saved: partial sums, written regularly to continue after a kill. Each rank scores a part
    of the dates, and all ranks return the same result, bit-exact on any number of ranks (spectra: to
    rounding). Raises ConfigError for an unknown region, DataError if no date has a truth.
    """
    first, hour = next(iter(forecasts.values())), np.timedelta64(3600, "s")
    names = list(first.variables if variables is None else variables)
    leads = first.leads if lead_hours is None else np.sort(np.array(lead_hours)) * hour
    times = reduce(
        np.intersect1d, [each.times for each in forecasts.values()], first.times if dates is None else dates
    )
    grid = grid or reduce(coarser, [each.grid for each in forecasts.values()], truth.grid)
    matcher = Matcher(forecasts, truth, climatology, names, times, leads, grid, device, boundary_width)
    means, tallies = RegionMeans(grid, regions, device), {}
    for name, source in matcher.sources.items():
        own, spectra = source.variables, None
        if spectra_lead is not None and grid.periodic:
            row = (leads // hour).tolist().index(spectra_lead)
            spectra = Spectra(row, own, grid, device, matcher.units)
        shape, members = (len(times), len(leads)), source.fields.num_members
        tallies[name] = Tally(own, members, shape, means, climatology is not None, spectra)
    score_pairs(matcher, tallies, progress, saved)
    if not any(tally.table[-1].any() for tally in tallies.values()):
        when = times[0] + leads[0] if len(times) and len(leads) else "any date"
        raise DataError(f"the truth has no analysis for any date and lead of the forecast, such as {when}")
    return {
        name: tally.results(times, leads, list(regions), matcher.units) for name, tally in tallies.items()
    }


def score_pairs(
    matcher: Matcher,
    tallies: Mapping[str, Tally],
    progress: Callable[[int], object],
    saved: SavedParts | None,
) -> None:
    """Fill the tables of all dates.

    Each date is filled by one rank, and the sum over ranks adds only zeros, so it is bit-exact. On a CPU each
    thread works on its own fields: torch's threads would wait for each other about a thousand times per
    date, which took ten times as long on a busy machine.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sums = {f"{i} {key}": own for i, t in enumerate(tallies.values()) for key, own in t.sums.items()}
    earlier: list[dict[str, Any]] = []  # on rank 0: what killed attempts have counted
    done = dates_before(saved, earlier) if saved else []
    progress(len(done))
    blocks, scored = [block for block in matcher.blocks() if not {*block} & {*done}], list[int]()

    def partial_sums() -> dict[str, Any]:
        own = {key: total[:, scored] if key.endswith("table") else total for key, total in sums.items()}
        return {"dates": np.array(scored, int), **{key: total.cpu().numpy() for key, total in own.items()}}

    num_threads = torch.get_num_threads()
    width = num_threads if matcher.device.type == "cpu" else 1
    with ThreadPoolExecutor(width, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for pairs, finished in matcher.pairs(blocks[rank::ranks]):
            some = max(1, sum(len(pair.rows) for pair in pairs) // (2 * width))  # variables of a thread
            tasks = [(pair, slice(v, v + some)) for pair in pairs for v in range(0, len(pair.rows), some)]
            list(threads.map(lambda task: tallies[task[0].name].add(*task), tasks))
            for pair in pairs:
                if spectra := tallies[pair.name].spectra:
                    spectra.add(pair)
            scored += finished
            if saved and finished:  # not within a block, of which the sums of spectra would have a part
                saved.write_if_due(partial_sums)
            progress(ranks * len(finished))
    torch.set_num_threads(num_threads)  # for threads that start later
    for key, total in sums.items():
        for arrays in earlier:
            part = total.new_tensor(arrays[key])
            total[(slice(None), arrays["dates"]) if key.endswith("table") else ...] += part
        if ranks > 1:
            dist.all_reduce(total)


def dates_before(saved: SavedParts, earlier: list[dict[str, Any]]) -> list[int]:
    """Return the dates that killed attempts have scored; append their arrays to `earlier` on rank 0."""

    def read() -> tuple[list[int], int]:
        earlier.extend(saved.read())
        return [date for arrays in earlier for date in arrays["dates"].tolist()], saved.attempt

    dates, saved.attempt = from_first_rank(read)
    if dates:
        logger.info(f"evaluation: {len(dates)} dates are scored already")
    return dates


def plain_name(name: str) -> str:
    """Return the name of a forecast as a part of a file's name."""
    return re.sub(r"[^\w.+-]", "_", name)


def write_scores(evaluations: Mapping[str, Evaluation], folder: Path) -> None:
    """Write scores, statistics by date, and spectra (one NetCDF file per forecast)."""
    for pattern in ("rmse.png", "acc.png", "spectra.png", "spectra_*.nc", "scorecard.csv", "scorecard.html"):
        for path in folder.glob(pattern):
            path.unlink()  # of an earlier evaluation
    scores = combine({name: evaluation.scores for name, evaluation in evaluations.items()})
    scores.to_netcdf(folder / "scores.nc", engine="h5netcdf")
    by_date = combine({name: evaluation.by_date for name, evaluation in evaluations.items()})
    by_date.to_netcdf(folder / "scores_by_date.nc", engine="h5netcdf")
    for name, evaluation in evaluations.items():
        if evaluation.spectra is not None:
            evaluation.spectra.to_netcdf(folder / f"spectra_{plain_name(name)}.nc", engine="h5netcdf")
