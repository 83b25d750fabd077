"""Scores of forecasts, one date and one lead at a time, in one table: accumulator, checkpoint and result.

    scores_by_date.zarr/
        statistics    (forecast, initial_time, lead_time, variable, region, score) float64, a chunk a date
        digest        (initial_time) of the files and options that the numbers of a date are from; 0: none yet
        num_members   (forecast)

`score` has the statistics of verification/scores.py: NaN where a date has no truth or a forecast no value,
infinite where the forecast is not finite though the truth is. Every score is a mean over dates of this table;
a killed evaluation continues with the dates without a digest, or with another one. The table is created under
the name `.incomplete` and renamed; each rank writes dates of its own.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
import zarr

from datasets.archive import Archive
from datasets.grid import Grid, coarser
from errors import DataError
from parallelisms.mesh import from_first_rank
from verification.climatology import Climatology
from verification.matching import ForecastFields, Match, Matcher
from verification.scores import (
    COMMON_AREA,
    RegionMeans,
    append_wind,
    date_statistics,
    final_scores,
    statistic_names,
    wind_pairs,
)
from verification.spectra import Spectra
from verification.stores import state_of_analyses
from verification.tables import by_variable, headline

logger = logging.getLogger("rossby")
T = TypeVar("T")
# An initial date, and variable -> (truth, forecast), each (H, W).
Example = tuple[np.datetime64, dict[str, tuple[np.ndarray, np.ndarray]]]
MARK = "rossby_scores_by_date"  # attribute of a table that is ours
DIMS = ("forecast", "initial_time", "lead_time", "variable", "region", "score")


@dataclass(frozen=True)
class Evaluation:
    """Scores of all forecasts of a comparison.

    - `scores`, in WeatherBench2's form: a data variable a variable ("geopotential", "2m_temperature", and
      "wind_vector", "10m_wind_vector" where both components are there), dims (forecast, metric, region,
      lead_time[, level]), float64, attribute `units`. `metric` has the names of scores.final_scores. NaN
      where a score is not defined (a wind vector has mse and rmse only), where a region has no cell on the
      grid, and where a forecast is not finite though the truth is. Metric `num_dates`: the number of initial
      dates with a truth, over which the other scores are taken; coordinate `num_dates` (forecast, lead_time):
      its maximum over variables. Metric `common_area`: the fraction of the area with a truth that is scored,
      because every forecast has a value there. Coordinate `num_members` (forecast): 1 without an ensemble.
    - `by_date`: the table, described at the top of this module.
    - `spectra` of each forecast at one lead, if it is asked for and the grid goes round the globe; `example`:
      fields of the first forecast at that lead, from the last date with a truth, on rank 0.
    """

    scores: xr.Dataset
    by_date: xr.Dataset
    grid: Grid
    spectra: dict[str, xr.Dataset] = field(default_factory=dict)
    example: Example | None = None
    example_hours: int = 0


class ScoreTable:
    """The table on a disk. Rank 0 calls `create`; then every rank writes dates of its own."""

    def __init__(self, path: Path, coords: Mapping[str, np.ndarray], num_members: Sequence[int]) -> None:
        self.path, self.coords, self.num_members = path, coords, list(num_members)

    def create(self, digests: np.ndarray) -> np.ndarray:
        """Create the table, or continue one with the same coordinates; return which dates (n,) are finished,
        because they have the digest given. Raises DataError for a folder that is no table of ours.
        """
        unfinished = self.path.with_name(self.path.name + ".incomplete")
        if self.path.exists():
            stored = self.open()
            same = stored["num_members"].values.tolist() == self.num_members
            if same and all(np.array_equal(stored[axis].values, self.coords[axis]) for axis in DIMS):
                return (stored["digest"].values == digests) & (digests != 0)
            shutil.rmtree(unfinished, ignore_errors=True)
            os.replace(self.path, unfinished)  # a kill must not leave a part of it under its name
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        coords = {axis: (axis, values) for axis, values in self.coords.items()}
        coords |= {"num_members": ("forecast", self.num_members)}
        # Zarr 2, because Zarr 3 has no specification of text.
        dataset = xr.Dataset(coords=coords, attrs={MARK: 1})
        dataset.to_zarr(unfinished, mode="w", zarr_format=2, consolidated=False)
        shape = tuple(len(self.coords[axis]) for axis in DIMS)
        arrays: dict[str, tuple[tuple[str, ...], str, float]] = {
            "statistics": (DIMS, "float64", np.nan),
            "digest": (("initial_time",), "uint64", 0),
        }
        group = zarr.open_group(str(unfinished), mode="r+", zarr_format=2)
        for name, (dims, dtype, fill) in arrays.items():
            chunks = tuple(1 if dim == "initial_time" else shape[DIMS.index(dim)] for dim in dims)
            sizes = tuple(shape[DIMS.index(dim)] for dim in dims)
            about: Any = {"_ARRAY_DIMENSIONS": list(dims)}
            group.create_array(
                name, shape=sizes, chunks=chunks, dtype=dtype, fill_value=fill, attributes=about
            )
        zarr.consolidate_metadata(str(unfinished))  # xarray opens it without a warning then
        os.replace(unfinished, self.path)
        return np.zeros(len(digests), bool)

    def write(self, date: int, statistics: np.ndarray, digest: int) -> None:
        """Write the statistics (forecast, lead_time, variable, region, score) of a date, then its digest."""
        group: Any = zarr.open_group(str(self.path), mode="r+")
        group["statistics"][:, date] = statistics
        group["digest"][date] = digest

    def open(self) -> xr.Dataset:
        """Open the table lazily. Raises DataError if there is none of ours."""
        try:
            # Without decoding of missing values: a digest is no float.
            options: Any = {"chunks": None, "consolidated": False, "mask_and_scale": False}
            table = xr.open_zarr(self.path, decode_timedelta=True, **options)
        except (OSError, ValueError, KeyError, TypeError, ExceptionGroup):  # zarr's, of many files
            table = xr.Dataset()
        variables = {*DIMS, "statistics", "digest", "num_members"}
        if MARK not in table.attrs or not variables <= {*table.variables}:
            reason = "exists, and is no table of scores of Rossby, or damaged"
            raise DataError(f"{self.path}: {reason}; remove it, or choose another --output")
        for array in table.variables.values():
            array.attrs.pop("_FillValue", None)  # else means would have it, and counts would be floats
        return table


def evaluate(
    forecasts: Mapping[str, ForecastFields],
    truth: Archive,
    climatology: Climatology | None = None,
    *,
    variables: Sequence[str] | None = None,
    lead_hours: Sequence[int] | None = None,
    dates: np.ndarray | None = None,
    grid: Grid | None = None,
    regions: Sequence[str] = ("global",),
    detail_lead: int | None = None,
    boundary_width: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda dates: None,
    path: Path | None = None,
) -> Evaluation:
    """Score forecasts against analyses on `grid`, or the coarsest of their grids, on common cells, dates and
    leads. Arguments that are not given default to everything in the first forecast.

    A forecast may lack variables, and leads of `lead_hours`; it then has no scores for them. variables: names
    with levels; dates: initial dates (datetime64). detail_lead: of spectra and of the example, in hours.
    boundary_width: cells from each side that are not scored. progress is called with the number of newly
    finished dates. path: of the table, from which a killed evaluation continues; without it the table is kept
    in memory. Each rank scores a part of the dates, and all ranks return the same result, bit-exact on any
    number of ranks (spectra: to rounding). Raises ConfigError for an unknown region, DataError if no date has
    a truth.
    """
    first, hour = next(iter(forecasts.values())), np.timedelta64(3600, "s")
    names = list(first.variables if variables is None else variables)
    leads = first.leads if lead_hours is None else np.sort(np.array(lead_hours)) * hour
    times = first.times if dates is None else dates
    times = reduce(np.intersect1d, [forecast.times for forecast in forecasts.values()], times)
    grid = grid or reduce(coarser, [forecast.grid for forecast in forecasts.values()], truth.grid)
    if not len(times) or not len(leads):
        raise DataError("the forecasts have no initial date and lead in common")
    means = RegionMeans(grid, regions, device)
    matcher = Matcher(forecasts, truth, climatology, names, times, leads, grid, device, boundary_width)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    # -- the table: created once, or continued -----------------------------------------------------------
    winds, num_members = wind_pairs(names), [max(1, each.num_members) for each in forecasts.values()]
    scores = [*statistic_names(climatology is not None, max(num_members) > 1), COMMON_AREA]
    coords = {
        "forecast": np.array(list(forecasts)),
        "initial_time": times.astype("datetime64[ns]"),
        "lead_time": leads.astype("timedelta64[ns]"),
        "variable": np.array([*names, *winds]),
        "region": np.array(list(regions)),
        "score": np.array(scores),
    }
    temporary = "" if path else on_first_rank(lambda: tempfile.mkdtemp(prefix="rossby-scores-"))
    table = ScoreTable(path or Path(temporary, "table.zarr"), coords, num_members)
    digests = np.ones(len(times), np.uint64)
    if path:
        digests = on_first_rank(lambda: date_digests(matcher, truth, climatology))
    finished = on_first_rank(lambda: table.create(digests))
    if finished.any():
        logger.info(f"evaluation: {finished.sum()} of {len(times)} dates are scored already, in {table.path}")
    progress(int(finished.sum()))

    # -- what this rank reads: neighbouring dates, of which many valid times are the same ----------------
    detail = None if detail_lead is None else (leads // hour).tolist().index(detail_lead)
    row = detail if grid.periodic else None  # of spectra
    blocks = matcher.blocks(np.flatnonzero(~finished).tolist())
    mine = [blocks[i] for i in np.array_split(np.arange(len(blocks)), ranks)[rank]]
    steps = [step for block in mine for step in matcher.steps(block, range(len(leads)))]
    if row is not None:  # sums of spectra are not in the table: of finished dates one lead is read again
        again = matcher.blocks(np.flatnonzero(finished).tolist())
        mine_again = [again[i] for i in np.array_split(np.arange(len(again)), ranks)[rank]]
        steps += [step for block in mine_again for step in matcher.steps(block, [row])]
    last = {tuple(step[0]): number for number, step in enumerate(steps)}  # the last step of each block
    spectra = {name: Spectra(names, grid, device) for name in forecasts if row is not None}

    # -- the loop -----------------------------------------------------------------------------------------
    # On a CPU each thread works on its own fields: torch's threads would wait for each other about a thousand
    # times per date, which took ten times as long on a busy machine.
    num_threads = torch.get_num_threads()
    width = num_threads if matcher.device.type == "cpu" else 1
    shape = (len(forecasts), len(leads), len(names), len(regions), len(scores))
    values: dict[int, np.ndarray] = {}  # of the dates of the present block
    with ThreadPoolExecutor(width, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for number, ((block, _, _), matches) in enumerate(zip(steps, matcher.read_ahead(steps), strict=True)):
            for match in matches:
                if row == match.lead:
                    for name, forecast in match.forecasts.items():
                        spectra[name].add(forecast, match.truth, match.rows)
            if finished[block[0]]:  # read for spectra alone
                continue
            values = values or {date: np.full(shape, np.nan) for date in block}
            # Variables of a match are divided among the threads.
            some = max(1, sum(len(match.rows) for match in matches) // (2 * width))
            parts_of = [(m, slice(v, v + some)) for m in matches for v in range(0, len(m.rows), some)]
            fill = partial(fill_statistics, values, has=matcher.has, means=means)
            list(threads.map(fill, *zip(*parts_of, strict=True)))  # raises errors of the threads
            if last[tuple(block)] == number:
                for date, statistics in values.items():
                    whole = append_wind(np.moveaxis(statistics, -1, 0), scores, winds)
                    table.write(date, np.moveaxis(whole, 0, -1), int(digests[date]))
                values = {}
                progress(ranks * len(block))
    torch.set_num_threads(num_threads)  # for threads that start later
    if ranks > 1:
        for sums in (total for each in spectra.values() for total in each.sums.values()):
            dist.all_reduce(sums)
        dist.barrier()  # all dates are written

    # -- the result: means over the table ----------------------------------------------------------------
    by_date = table.open()
    if temporary:
        by_date = by_date.load()
        if ranks > 1:
            dist.barrier()
        shutil.rmtree(temporary, ignore_errors=True)
    result = scores_of(by_date, matcher.units)
    if not result["num_dates"].any():
        raise DataError(f"the truth has no analysis for the forecasts, such as of {times[0] + leads[0]}")
    of_spectra = {
        name: total.result(leads[detail:][:1], matcher.has[name], matcher.units)
        for name, total in spectra.items()
    }
    example = read_example(matcher, detail) if detail is not None and rank == 0 else None
    return Evaluation(result, by_date, grid, of_spectra, example, detail_lead or 0)


def scores_of(by_date: xr.Dataset, units: Mapping[str, str]) -> xr.Dataset:
    """Return `Evaluation.scores` of a table of scores by date: means over its dates. units: of variables that
    the project does not know.
    """
    names, num_members = by_date["forecast"].values, by_date["num_members"].values.tolist()
    means = [  # one forecast after the other, because the table may be large
        final_scores(by_date["statistics"].sel(forecast=name).load(), members)
        for name, members in zip(names, num_members, strict=True)
    ]
    index = xr.DataArray(names, dims="forecast", name="forecast")
    array = xr.concat(means, index, join="outer", coords="minimal", compat="override")
    num_dates = array.sel(metric="num_dates", drop=True).max(("variable", "region")).astype(int)
    scores = by_variable(
        array.transpose("forecast", "metric", ...), by_date["variable"].values.tolist(), units
    )
    return scores.assign_coords(num_dates=num_dates, num_members=("forecast", num_members))


def read_example(matcher: Matcher, lead: int) -> Example | None:
    """Return truth and first forecast of the customary variables at a lead (position), from the last date
    that has a truth there; None without one.
    """
    name = next(iter(matcher.forecasts))
    shown = headline([v for v, there in zip(matcher.variables, matcher.has[name], strict=True) if there])
    for date in reversed(range(len(matcher.dates))):
        fields = {}
        for group, rows in enumerate(matcher.groups):
            wanted = [row for row in rows if matcher.variables[row] in shown]
            for match in matcher.read([date], [lead], group) if wanted else []:
                for row in wanted if name in match.forecasts else []:
                    forecast = match.forecasts[name][..., rows.index(row), :, :]
                    forecast = forecast.mean(dim=0) if forecast.ndim > 2 else forecast
                    truth = match.whole[rows.index(row)]
                    fields[matcher.variables[row]] = truth.cpu().numpy(), forecast.cpu().numpy()
        if fields:
            return matcher.dates[date], {variable: fields[variable] for variable in shown}
    return None


def fill_statistics(
    values: Mapping[int, np.ndarray],
    match: Match,
    part: slice,
    has: Mapping[str, Sequence[bool]],
    means: RegionMeans,
) -> None:
    """Fill the `values` (F, L, V, R, S) of the date of a match with the statistics of some of its variables:
    those that a forecast has. Called from threads.
    """
    rows, positions = match.rows[part], list(has)
    truth, climatology = match.truth[part], match.climatology
    climatology = None if climatology is None else climatology[part]
    fields = [forecast[..., part, :, :] for forecast in match.forecasts.values()]
    statistics = date_statistics(fields, truth, climatology, means).cpu().numpy()  # (f, S, v, R)
    area = np.ones(statistics.shape[2:])
    if match.whole is not match.truth:
        scored, all_cells = (torch.isfinite(t).double() for t in (truth, match.whole[part]))
        area = (means.total(scored) / means.total(all_cells)).cpu().numpy()
    for name, of_forecast in zip(match.forecasts, statistics, strict=True):
        there = [i for i, v in enumerate(rows) if has[name][v]]
        cells = values[match.date][positions.index(name), match.lead]  # (V, R, S)
        at = [rows[i] for i in there]
        cells[at, :, : len(of_forecast)] = of_forecast[:, there].transpose(1, 2, 0)
        cells[at, :, -1] = np.where(np.isnan(of_forecast[0, there]), np.nan, area[there])


def date_digests(matcher: Matcher, truth: Archive, climatology: Climatology | None) -> np.ndarray:
    """Return for each date (n,) uint64 a digest of what its numbers are from, so far as it may change: the
    files of the forecasts of that date, the analyses that they are compared with, and options.
    """
    state_of_truth = cache(lambda time: state_of_analyses(truth, matcher.variables, time))
    axes, boundary = (matcher.grid.latitude.tolist(), matcher.grid.longitude.tolist()), matcher.boundary_width
    options = f"{axes} {boundary} {matcher.has} {climatology.state if climatology else ''}"
    digests = []
    for date in matcher.dates:
        states = [forecast.state(date) for forecast in matcher.forecasts.values()]
        states += [state_of_truth(time) for time in (date, *(date + matcher.leads)) if time in truth.times]
        digest = hashlib.sha256("\n".join([options, *states]).encode()).digest()
        digests.append(int.from_bytes(digest[:8], "big") or 1)
    return np.array(digests, np.uint64)


def on_first_rank(compute: Callable[[], T]) -> T:
    """Return the result of rank 0 on every rank; without a process group that of this process."""
    return from_first_rank(compute) if dist.is_initialized() else compute()
