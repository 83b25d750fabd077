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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
import zarr
from dask import array as dask

from datasets.archive import Archive
from datasets.grid import Grid, coarser
from errors import DataError
from parallelisms.mesh import from_first_rank
from verification.climatology import Climatology
from verification.matching import ForecastFields, Match, Matcher
from verification.scores import (
    COMMON_AREA,
    RegionMeans,
    Spectra,
    combine,
    date_statistics,
    final_scores,
    statistic_names,
    wind_pairs,
)
from verification.stores import open_own_store, state_of_files
from verification.tables import headline

logger = logging.getLogger("rossby")
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


def create_table(
    path: Path, coords: Mapping[str, np.ndarray], num_members: Sequence[int], digests: np.ndarray
) -> np.ndarray:
    """Create a table, or continue one with the same coordinates; return which dates (n,) are finished,
    because they have the digest given. Raises DataError for a folder that is no table of ours.
    """
    unfinished = path.with_name(path.name + ".incomplete")
    if path.exists():
        stored = open_table(path)
        is_same = [np.array_equal(stored[axis].values, coords[axis]) for axis in DIMS]
        if all(is_same) and np.array_equal(stored["num_members"], num_members):
            return (stored["digest"].values == digests) & (digests != 0)
        shutil.rmtree(unfinished, ignore_errors=True)
        os.replace(path, unfinished)  # a kill must not leave a part of it under its name
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    shape = tuple(len(coords[axis]) for axis in DIMS)
    table = xr.Dataset(coords={**coords, "num_members": ("forecast", num_members)}, attrs={MARK: 1})
    table["statistics"] = DIMS, dask.full(shape, np.nan, chunks=-1)
    table["digest"] = "initial_time", dask.zeros(shape[1], np.uint64, chunks=-1)
    chunks = {"statistics": {"chunks": (shape[0], 1, *shape[2:])}, "digest": {"chunks": (1,)}}
    # Zarr 2, because Zarr 3 has no specification of text.
    table.to_zarr(unfinished, zarr_format=2, compute=False, encoding=chunks)
    os.replace(unfinished, path)
    return np.zeros(len(digests), bool)


def write_date(path: Path, date: int, statistics: np.ndarray, digest: int) -> None:
    """Write the statistics (forecast, lead_time, variable, region, score) of a date, then its digest."""
    group: Any = zarr.open_group(str(path), mode="r+")
    group["statistics"][:, date] = statistics
    group["digest"][date] = digest


def open_table(path: Path) -> xr.Dataset:
    """Open a table lazily. Raises DataError if there is none of ours."""
    # Without decoding of missing values: a digest is no float.
    table = xr.decode_cf(open_own_store(path), mask_and_scale=False, decode_timedelta=True)
    if MARK not in table.attrs or not {*DIMS, "statistics", "digest", "num_members"} <= {*table.variables}:
        reason = "exists, and is no table of scores of Rossby, or damaged"
        raise DataError(f"{path}: {reason}; remove it, or choose another --output")
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
    on_first_rank = from_first_rank if dist.is_initialized() else lambda compute: compute()

    # -- the table: created once, or continued; wind vectors follow the variables -------------------------
    num_members = [forecast.num_members for forecast in forecasts.values()]
    wind = wind_pairs(names)  # by wind vector
    scores = [*statistic_names(climatology is not None, max(num_members) > 1), COMMON_AREA]
    coords = {
        "forecast": np.array(list(forecasts)),
        "initial_time": times.astype("datetime64[ns]"),
        "lead_time": leads.astype("timedelta64[ns]"),
        "variable": np.array([*names, *wind]),
        "region": np.array(list(regions)),
        "score": np.array(scores),
    }
    temporary = "" if path else on_first_rank(lambda: tempfile.mkdtemp(prefix="rossby-scores-"))
    target = path or Path(temporary, "table.zarr")
    digests = on_first_rank(lambda: date_digests(matcher)) if path else np.ones(len(times), np.uint64)
    finished = on_first_rank(lambda: create_table(target, coords, num_members, digests))
    if finished.any():
        logger.info(f"evaluation: {finished.sum()} of {len(times)} dates are scored already, in {target}")
    progress(int(finished.sum()))

    # -- what this rank reads: neighbouring dates, of which many valid times are the same ----------------
    detail = None if detail_lead is None else (leads // hour).tolist().index(detail_lead)
    spectra = (
        [Spectra(names, grid, device) for _ in forecasts] if detail is not None and grid.periodic else []
    )
    steps = matcher.steps(np.flatnonzero(~finished).tolist(), range(len(leads)), rank, ranks)
    if spectra and detail is not None:
        # Their sums are not in the table: of finished dates one lead is read again.
        steps += matcher.steps(np.flatnonzero(finished).tolist(), [detail], rank, ranks)

    # -- the loop -----------------------------------------------------------------------------------------
    # On a CPU each thread works on its own fields: torch's threads would wait for each other about a thousand
    # times per date, which took ten times as long on a busy machine.
    num_threads = torch.get_num_threads()
    width = num_threads if matcher.device.type == "cpu" else 1
    shape = (len(forecasts), len(leads), len(coords["variable"]), len(regions), len(scores))
    values = defaultdict[int, np.ndarray](lambda: np.full(shape, np.nan))  # of the dates of the present block
    with ThreadPoolExecutor(width, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for number, matches in enumerate(matcher.read_ahead(steps)):
            for match in matches if spectra else []:
                if match.lead == detail:
                    for f in np.flatnonzero(match.has.any(axis=1)):
                        spectra[f].add(match.forecasts[f], match.truth, match.rows)
            block = steps[number].dates
            if finished[block[0]]:
                continue
            # Variables of a match are divided among the threads.
            some = max(1, sum(len(match.rows) for match in matches) // (2 * width))
            tasks = [
                (m, values[m.date], slice(v, v + some), means)
                for m in matches
                for v in range(0, len(m.rows), some)
            ]
            list(threads.map(fill_statistics, *zip(*tasks, strict=True)))  # raises errors of the threads
            if number + 1 == len(steps) or steps[number + 1].dates != block:  # its dates are complete
                for date in block:
                    # Only the squared error of a wind vector is defined, the sum over both components; of the
                    # areas it has that of u.
                    of_date, mse, area = values[date], scores.index("mse"), scores.index(COMMON_AREA)
                    for row, (u, v) in enumerate(wind.values(), len(names)):
                        of_date[:, :, row, :, mse] = of_date[:, :, u, :, mse] + of_date[:, :, v, :, mse]
                        of_date[:, :, row, :, area] = of_date[:, :, u, :, area]
                    write_date(target, date, of_date, int(digests[date]))
                values.clear()
                progress(ranks * len(block))
    torch.set_num_threads(num_threads)  # for threads that start later
    if ranks > 1:
        for sums in (sums for of_forecast in spectra for sums in of_forecast.sums.values()):
            dist.all_reduce(sums)
        dist.barrier()  # all dates are written

    # -- the result: means over the table ----------------------------------------------------------------
    by_date = open_table(target)
    if temporary:
        by_date = by_date.load()
        if ranks > 1:
            dist.barrier()
        shutil.rmtree(temporary, ignore_errors=True)
    units = {name: truth.units(name) for name in names}
    # One forecast after the other, because the table may be large.
    of_forecast = [
        final_scores(by_date["statistics"].isel(forecast=[f]).load(), members)
        for f, members in enumerate(num_members)
    ]
    result = combine(of_forecast, coords["variable"].tolist(), units)
    if not result["num_dates"].any():
        raise DataError(f"the truth has no analysis for the forecasts, such as of {times[0] + leads[0]}")
    of_spectra = {}
    for name, has in zip(forecasts, matcher.has, strict=True) if spectra else []:
        of_spectra[name] = spectra.pop(0).result(leads[detail:][:1], has, units)  # frees gigabytes of sums
    example = read_example(matcher, detail) if detail is not None and rank == 0 else None
    return Evaluation(result, by_date, grid, of_spectra, example, detail_lead or 0)


def fill_statistics(match: Match, values: np.ndarray, part: slice, means: RegionMeans) -> None:
    """Fill the `values` (F, L, V, R, S) of the date of a match with the statistics of some of its variables:
    those that a forecast has. Called from threads.
    """
    truth, climatology = match.truth[part], match.climatology
    climatology = None if climatology is None else climatology[part]
    fields = [forecast[..., part, :, :] for forecast in match.forecasts]
    statistics = date_statistics(fields, truth, climatology, means).cpu().numpy()  # (F, S, v, R)
    area = np.ones(statistics.shape[2:])
    if match.analysis is not match.truth:
        scored, all_cells = (torch.isfinite(t).double() for t in (truth, match.analysis[part]))
        area = (means.total(scored) / means.total(all_cells)).cpu().numpy()
    statistics = np.moveaxis(statistics, 1, -1)  # (F, v, R, S)
    statistics[~match.has[:, part]] = np.nan
    at_lead, rows = values[:, match.lead], list(match.rows[part])
    at_lead[:, rows, :, : statistics.shape[-1]] = statistics
    at_lead[..., -1][:, rows] = np.where(np.isnan(statistics[..., 0]), np.nan, area)


def read_example(matcher: Matcher, lead: int) -> Example | None:
    """Return truth and first forecast of the customary variables at a lead (position), from the last date
    that has a truth there; None without one.
    """
    customary = headline(np.array(matcher.variables)[matcher.has[0]].tolist())
    for date in reversed(range(len(matcher.dates))):
        fields = {}
        for step in matcher.steps([date], [lead]):
            names = [matcher.variables[row] for row in step.rows]
            for match in matcher.read(step) if {*names} & {*customary} else []:
                forecast = match.forecasts[0]
                forecast = forecast.mean(dim=0) if forecast.ndim > 3 else forecast
                pairs = zip(match.analysis.cpu().numpy(), forecast.cpu().numpy(), strict=True)
                fields |= dict(zip(names, pairs, strict=True)) if match.has[0].any() else {}
        if fields:
            return matcher.dates[date], {name: fields[name] for name in customary}
    return None


def date_digests(matcher: Matcher) -> np.ndarray:
    """Return for each date (n,) uint64 a digest of what its numbers are from, so far as it may change: the
    files of the forecasts of that date, the analyses that they are compared with, and options.
    """
    truth, grid, climatology = matcher.truth, matcher.grid, matcher.climatology
    state_of_truth = cache(lambda time: state_of_files(truth, matcher.variables, time))
    options = (grid.latitude.tolist(), grid.longitude.tolist(), matcher.boundary_width, matcher.has.tolist())
    digests = []
    for date in matcher.dates:
        states = [repr(options), climatology.state if climatology else ""]
        states += [forecast.state(date) for forecast in matcher.forecasts]
        states += [state_of_truth(time) for time in (date, *(date + matcher.leads)) if time in truth.times]
        digests.append(int.from_bytes(hashlib.sha256("\n".join(states).encode()).digest()[:8], "big") or 1)
    return np.array(digests, np.uint64)
