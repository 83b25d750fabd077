"""Pairs of forecast and truth with the same variables, valid time, units, grid, cells and device.

All forecasts of a comparison are read together, in blocks of dates and leads. Truth and climatology are read
and regridded once for all of them, and a cell is scored if the truth and every forecast have a value. One
thread reads, one block ahead of the scores. Shapes: M members, V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from datasets.archive import Archive
from datasets.grid import Grid
from datasets.normalization import boundary_cells
from datasets.plausibility import refuse_fills
from datasets.regrid import Regridder
from datasets.variables import UnitConversion, find_conversion, group_levels
from errors import DataError
from verification.climatology import Climatology
from verification.stores import COMPUTED, DIVERGED, NOT_COMPUTED

BLOCK_BYTES = 2**27  # of a forecast, or of the truth, read at once; more if one array of a date is larger
KEPT_BYTES = 2**30  # of truth and of climatology, kept for later dates
MOST_DATES = 16  # read at once


class ForecastFields(Protocol):
    """Forecasts that can be scored: a stored forecast, or one made from analyses or a climatology."""

    times: np.ndarray  # (n,) initial dates, datetime64[s], ascending
    leads: np.ndarray  # (L,) timedelta64[s], ascending
    num_members: int  # 0: not an ensemble
    block: tuple[int, int]  # initial dates and leads that are stored, and decoded, together
    from_analyses: bool  # cells that are missing in the initial analysis are not scored, as in train.py
    status: np.ndarray | None  # (n, L) of verification.stores; None: all are computed

    @property
    def grid(self) -> Grid: ...

    @property
    def variables(self) -> Sequence[str]: ...

    def units(self, name: str) -> str: ...

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W), or (n, k, M, V, H, W) for an ensemble, float32."""
        ...


@dataclass(frozen=True)
class Pair:
    """Fields (V, H, W) on the device of a forecast and of its truth, at one date and lead."""

    name: str  # of the forecast
    date: int  # position among the dates that are compared
    lead: int  # position among the leads that are compared
    rows: list[int]  # positions of these V among the forecast's variables
    forecast: Tensor  # or (M, V, H, W)
    truth: Tensor  # NaN in cells that are not scored, because the truth or a forecast lacks them
    whole: Tensor  # the truth without this mask
    climatology: Tensor | None  # NaN where there is none


class Source:
    """A forecast of a comparison, with the positions of the compared dates and leads on its own axes."""

    def __init__(
        self, fields: ForecastFields, dates: np.ndarray, leads: np.ndarray, groups: list[list[str]]
    ) -> None:
        self.fields = fields
        self.dates = np.searchsorted(fields.times, dates)  # (n,)
        there = np.isin(leads, fields.leads)
        self.leads = np.where(there, np.searchsorted(fields.leads, leads), -1)  # (L,), -1: not there
        self.parts = [[name for name in group if name in fields.variables] for group in groups]
        self.variables = sum(self.parts, [])

    def status(self, date: int, lead: int) -> int:
        """Return the status at a date and lead, given by their positions in the comparison."""
        status = self.fields.status
        return COMPUTED if status is None else int(status[self.dates[date], self.leads[lead]])

    def read(self, dates: list[int], leads: list[int], names: list[str]) -> dict[tuple[int, int], np.ndarray]:
        """Return the fields ([M,] V, H, W) by date and lead, those that are there, from one block."""
        there = [lead for lead in leads if self.leads[lead] >= 0]
        if not names or not there:
            return {}
        rows, columns = (axis - axis[0] for axis in (self.dates[dates], self.leads[there]))
        first, begin = int(self.dates[dates[0]]), int(self.leads[there[0]])
        spans = slice(first, first + int(rows[-1]) + 1), slice(begin, begin + int(columns[-1]) + 1)
        block = self.fields.read_block(*spans, names)
        at = product(zip(dates, rows, strict=True), zip(there, columns, strict=True))
        return {(date, lead): block[row, column] for (date, row), (lead, column) in at}


class Matcher:
    """Reader of the pairs of several forecasts, on one grid."""

    def __init__(
        self,
        forecasts: Mapping[str, ForecastFields],
        truth: Archive,
        climatology: Climatology | None,
        variables: Sequence[str],
        dates: np.ndarray,
        leads: np.ndarray,
        grid: Grid,
        device: torch.device | str,
        boundary_width: int = 0,
    ) -> None:
        """dates (n,): initial dates that all forecasts have; leads (L,): those to score; boundary_width:
        cells from each side of the grid that are not scored.
        """
        boundary = boundary_cells(grid.shape, boundary_width).to(device)
        self.boundary = boundary if boundary_width else None
        self.grid, self.device, self.dates, self.leads = grid, torch.device(device), dates, leads
        # Numbers of dates and leads that fit in memory together for every forecast.
        sizes = [max(1, f.num_members) * field_bytes(f.grid, len(variables)) for f in forecasts.values()]
        self.limit = BLOCK_BYTES // max(sizes)
        self.groups = [list(variables)]
        if not self.limit:  # one array of a date has the levels of a variable
            by_name = group_levels(variables).values()
            self.groups = [[variables[row] for row in rows.values()] for rows in by_name]
        self.sources = {name: Source(f, dates, leads, self.groups) for name, f in forecasts.items()}
        self.units = {name: truth.units(name) for name in variables}
        self.regrid = {name: self._regridder(forecast) for name, forecast in forecasts.items()}
        most = max(map(len, self.groups))
        num_cached = max(1, min(self._valid_dates(truth.times), KEPT_BYTES // field_bytes(grid, most)))
        self.find_truth = self._truth_finder(truth, num_cached)
        self.find_climatology = climatology and self._climatology_finder(climatology, num_cached)

    def _truth_finder(self, truth: Archive, num_cached: int) -> Callable[[np.datetime64, int], Tensor | None]:
        """Return a function that maps a date and a group number to the analysis (V, H, W) or None.
        num_cached: number of analyses to keep for later dates.
        """
        regrid, times = self._regridder(truth), truth.times
        limit = BLOCK_BYTES // field_bytes(truth.grid, max(map(len, self.groups)))
        size = max(1, min(truth.time_chunk(sum(self.groups, [])), limit))

        @lru_cache(len(self.groups) * max(1, num_cached // size))
        def read(chunk: int, group: int) -> Tensor:
            start, names = chunk * size, self.groups[group]
            fields = truth.read_block(start, min(start + size, len(times)), names)
            for field, time in zip(fields, times[start:], strict=False):
                refuse_fills(field, names, time, truth.path)
            return regrid(fields)

        def find(time: np.datetime64, group: int) -> Tensor | None:
            i = int(np.searchsorted(times, time))
            return read(i // size, group)[i % size] if time in times[i : i + 1] else None

        return find

    def _climatology_finder(
        self, climatology: Climatology, num_cached: int
    ) -> Callable[[np.datetime64, int], Tensor]:
        """Return the same function for a climatology, with NaN for missing fields."""
        regrid = self._regridder(climatology)

        @lru_cache(len(self.groups) * num_cached)
        def find(time: np.datetime64, group: int) -> Tensor:
            names = self.groups[group]
            found = torch.full((len(names), *self.grid.shape), torch.nan, device=self.device)
            own = [name for name in names if name in climatology.variables]
            if own and climatology.has(time):
                found[list(map(names.index, own))] = regrid(climatology.field(time, own))
            return found

        return find

    def _regridder(self, source: ForecastFields | Archive | Climatology) -> Callable[[np.ndarray], Tensor]:
        """Return a function that regrids fields (..., V, H, W) of a source to the evaluation's grid and
        device. Raises DataError if the units differ from the truth's.
        """
        check_units(source, self.units)
        if source.grid.same_as(self.grid):
            return lambda fields: torch.from_numpy(fields).to(self.device)
        regridder = Regridder(source.grid, self.grid, self.device)
        outside = ~regridder.covered  # cells that the source covers only in part
        return lambda fields: regridder(torch.from_numpy(fields).to(self.device)).masked_fill(
            outside, torch.nan
        )

    def _valid_dates(self, times: np.ndarray) -> int:
        """Return the largest number of these dates that are valid times of a block of initial dates."""
        starts, together = self.dates, min(max(map(len, self.blocks())), len(self.dates)) - 1
        first, last = starts[: len(starts) - together], starts[together:] + self.leads.max()
        return int((np.searchsorted(times, last, "right") - np.searchsorted(times, first)).max()) or 1

    def blocks(self) -> list[list[int]]:
        """Return positions of the dates in groups that are stored together and fit in memory, by the forecast
        with the largest chunks.
        """
        widest = max(self.sources.values(), key=lambda source: source.fields.block[0])
        return _together(widest.dates, min(widest.fields.block[0], self.limit, MOST_DATES))

    def pairs(self, blocks: Sequence[list[int]]) -> Iterator[tuple[list[Pair], list[int]]]:
        """Yield pairs that are read together, one step ahead, and the dates of a block that are complete with
        them.
        """
        widest = max(self.sources.values(), key=lambda source: source.fields.block[1])
        steps, ends = [], {}
        for block in blocks:
            size = min(widest.fields.block[1], self.limit // len(block))
            steps += product([block], _together(widest.leads, size), range(len(self.groups)))
            ends[len(steps) - 1] = block
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as reader:
            ahead = reader.submit(self._load, *steps[0]) if steps else None
            for number in range(len(steps)):
                loaded = ahead.result() if ahead else []
                ahead = reader.submit(self._load, *steps[number + 1]) if number + 1 < len(steps) else None
                yield loaded, ends.get(number, [])

    def _load(self, dates: list[int], leads: list[int], group: int) -> list[Pair]:
        read = {name: s.read(dates, leads, s.parts[group]) for name, s in self.sources.items()}
        return [pair for at in product(dates, leads) for pair in self._match(*at, group, read)]

    def _match(
        self, date: int, lead: int, group: int, read: Mapping[str, dict[tuple[int, int], np.ndarray]]
    ) -> list[Pair]:
        """Return the pairs of all forecasts at a date and lead; none without a truth, or where a forecast is
        not computed yet.
        """
        start, valid_time = self.dates[date], self.dates[date] + self.leads[lead]
        truth = self.find_truth(valid_time, group)
        fields = {name: blocks[date, lead] for name, blocks in read.items() if (date, lead) in blocks}
        status = {name: self.sources[name].status(date, lead) for name in fields}
        if truth is None or NOT_COMPUTED in status.values():
            return []
        whole = truth = truth if self.boundary is None else truth.masked_fill(self.boundary, torch.nan)
        if any(self.sources[name].fields.from_analyses for name in fields):
            analysis = self.find_truth(start, group)
            truth = truth if analysis is None else mask_missing(truth, analysis, range(len(truth)))
        found = {name: self.regrid[name](each) for name, each in fields.items()}
        rows = {name: list(map(self.groups[group].index, self.sources[name].parts[group])) for name in fields}
        for name, forecast in found.items():
            if status[name] != DIVERGED:  # a diverged forecast is wrong there, not missing
                truth = mask_missing(truth, forecast, rows[name])
        clim = self.find_climatology(valid_time, group) if self.find_climatology else None
        pairs = []
        for name, forecast in found.items():
            source, own, everywhere, means = self.sources[name], truth, whole, clim
            if len(rows[name]) < len(truth):
                own, means = truth[rows[name]], None if clim is None else clim[rows[name]]
                everywhere = own if truth is whole else whole[rows[name]]
            own_rows = list(map(source.variables.index, source.parts[group]))
            pairs.append(Pair(name, date, lead, own_rows, forecast, own, everywhere, means))
        return pairs


def field_bytes(grid: Grid, variables: int) -> int:
    """Return the bytes of a field of so many variables in float32."""
    return 4 * variables * grid.shape[0] * grid.shape[1]


def mask_missing(truth: Tensor, fields: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the truth (V, H, W), NaN where fields ([M,] v, H, W) of some of its variables have no value.

    An infinite value is not missing; in an ensemble, one member without a value makes a cell missing.
    """
    missing = torch.isnan(fields)
    if not missing.any():
        return truth
    missing, masked = (missing.any(dim=0) if fields.ndim > truth.ndim else missing), truth.clone()
    masked[list(rows)] = masked[list(rows)].masked_fill(missing, torch.nan)
    return masked


def check_units(source: ForecastFields | Archive | Climatology, units: Mapping[str, str]) -> None:
    """Raise DataError unless a source has its variables in these units (the truth's), or no units.

    Variables that the project knows are read in its own units, whatever the file has.
    """
    for name in {*source.variables} & {*units}:
        theirs = source.units(name)
        if find_conversion(theirs, units[name]) != UnitConversion():
            reason = f"{theirs!r} in what is scored and {units[name]!r} in the truth"
            raise DataError(
                f"{name}: its units are {reason}, and there is no conversion; convert one of them"
            )


def _together(positions: np.ndarray, size: int) -> list[list[int]]:
    """Return 0, 1, ... in groups with the same quotient of their ascending positions by `size`."""
    numbers = groupby(range(len(positions)), key=lambda number: int(positions[number]) // max(1, size))
    return [list(group) for _, group in numbers]
