"""Forecasts and their truth with the same variables, valid time, units, grid, cells and device.

All forecasts of a comparison are read together, in blocks of dates and leads that are stored together. Truth
and climatology are read and regridded once for all of them, and a cell is scored if the truth and every
forecast have a value. One thread reads, one block ahead of the scores. Shapes: M members, V variables, H
latitudes, W longitudes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from typing import Any, Protocol

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

logger = logging.getLogger("rossby")
BLOCK_BYTES = 2**27  # of a forecast, or of the truth, read at once; more if one array of a date is larger
KEPT_BYTES = 2**30  # of truth and of climatology, kept for later dates
MOST_DATES = 16  # read at once
PROBES = 8  # dates at which a variable must be missing to count as one that a forecast does not have
Step = tuple[list[int], list[int], int]  # dates and leads that are read together, and a group of variables


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

    def state(self, time: np.datetime64) -> str:
        """Return a text that changes when the values of the forecasts from a date may have changed."""
        ...


@dataclass(frozen=True)
class Match:
    """Fields (V, H, W) on the device of all forecasts and of their truth, at one date and lead."""

    date: int  # position among the dates that are compared
    lead: int  # position among the leads that are compared
    rows: list[int]  # positions of these V among the variables that are compared
    forecasts: dict[str, Tensor]  # or (M, V, H, W); NaN for a variable that a forecast does not have
    truth: Tensor  # NaN in cells that are not scored, because the truth or a forecast lacks them
    whole: Tensor  # the truth without this mask
    climatology: Tensor | None  # NaN where there is none


class Matcher:
    """Reader of several forecasts and their truth, on one grid."""

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
        self.forecasts, self.grid, self.device = dict(forecasts), grid, torch.device(device)
        self.dates, self.leads, self.variables = dates, leads, list(variables)
        boundary = boundary_cells(grid.shape, boundary_width).to(device)
        self.boundary, self.boundary_width = boundary if boundary_width else None, boundary_width
        self.units = {name: truth.units(name) for name in variables}
        self.has = {name: self._variables_of(name, forecast) for name, forecast in self.forecasts.items()}
        # Positions of the dates and leads in each forecast, -1 for a lead that it does not have.
        self.date_rows, self.lead_rows = {}, {}
        for name, forecast in self.forecasts.items():
            self.date_rows[name] = np.searchsorted(forecast.times, dates)
            rows, there = np.searchsorted(forecast.leads, leads), np.isin(leads, forecast.leads)
            self.lead_rows[name] = np.where(there, rows, -1)
        # Numbers of dates and leads that fit in memory together for every forecast.
        size = max(max(1, f.num_members) * self._bytes(f.grid, len(variables)) for f in forecasts.values())
        self.limit, self.groups = BLOCK_BYTES // size, [list(range(len(variables)))]
        if not self.limit:  # one array of a date has the levels of a variable
            self.groups = [list(rows.values()) for rows in group_levels(variables).values()]
        most = max(map(len, self.groups))
        self.regrid = {name: self._regridder(forecast) for name, forecast in self.forecasts.items()}
        # As many states are kept as valid times are in one block of dates: the next block needs most of them.
        spans = [dates[[block[0], block[-1]]] for block in self.blocks(range(len(dates)))]
        inside = [(truth.times >= first) & (truth.times <= last + leads.max()) for first, last in spans]
        num_cached = min(max(map(np.sum, inside)), KEPT_BYTES // self._bytes(grid, most))
        self.find_truth = self._truth_finder(truth, max(1, int(num_cached)))
        self.find_climatology = climatology and self._climatology_finder(climatology, max(1, int(num_cached)))

    def _variables_of(self, name: str, forecast: ForecastFields) -> list[bool]:
        """Return which variables a forecast has. One without a value in some fields of its first, middle and
        last dates counts as absent: stores have NaN on levels that a model does not predict.
        """
        has = {variable: variable in forecast.variables for variable in self.variables}
        rows = np.searchsorted(forecast.times, self.dates)
        leads = np.searchsorted(forecast.leads, self.leads[np.isin(self.leads, forecast.leads)])
        some = (
            rows[np.linspace(0, len(rows) - 1, PROBES).astype(int)] if len(rows) and len(leads) else rows[:0]
        )
        places = list(product(dict.fromkeys(some.tolist()), dict.fromkeys(leads[[-1, 0]].tolist())))
        empty, there = list[str](), [variable for variable in self.variables if has[variable]]
        for positions in group_levels(there).values():  # an array: members of all may not fit in memory
            missing = [there[position] for position in positions.values()]
            for date, lead in places:
                is_computed = forecast.status is None or forecast.status[date, lead] != NOT_COMPUTED
                if missing and is_computed:
                    fields = forecast.read_block(slice(date, date + 1), slice(lead, lead + 1), missing)
                    is_empty: Any = np.isnan(np.moveaxis(fields, -3, 0)).reshape(len(missing), -1).all(1)
                    missing = [name for name, value in zip(missing, is_empty, strict=True) if value]
            empty += missing
        if empty and len(empty) < len(there):
            logger.info("%s has no value of %s, which is not scored there", name, ", ".join(empty))
            has |= dict.fromkeys(empty, False)
        return list(has.values())

    def _truth_finder(self, truth: Archive, num_cached: int) -> Callable[[np.datetime64, int], Tensor | None]:
        """Return a function that maps a date and a group number to the analysis (V, H, W) or None.
        num_cached: number of analyses to keep for later dates.
        """
        regrid, times = self._regridder(truth), truth.times
        chunk = max(field.chunk("time") for name in self.variables for field, _ in truth.find(name))
        size = max(1, min(chunk, BLOCK_BYTES // self._bytes(truth.grid, max(map(len, self.groups)))))

        @lru_cache(len(self.groups) * max(1, num_cached // size))
        def read(chunk: int, group: int) -> Tensor:
            start, names = chunk * size, [self.variables[row] for row in self.groups[group]]
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
            names = [self.variables[row] for row in self.groups[group]]
            fields = torch.full((len(names), *self.grid.shape), torch.nan, device=self.device)
            there = [name for name in names if name in climatology.variables]
            if there and climatology.has(time):
                fields[list(map(names.index, there))] = regrid(climatology.field(time, there))
            return fields

        return find

    def _regridder(self, source: ForecastFields | Archive | Climatology) -> Callable[[np.ndarray], Tensor]:
        """Return a function that regrids fields (..., V, H, W) of a source to the evaluation's grid and
        device. Raises DataError if the units differ from the truth's.
        """
        # Variables that the project knows are read in its own units, whatever the file has.
        for name in {*source.variables} & {*self.units}:
            theirs = source.units(name)
            if find_conversion(theirs, self.units[name]) != UnitConversion():
                reason = f"{theirs!r} in what is scored and {self.units[name]!r} in the truth"
                raise DataError(
                    f"{name}: its units are {reason}, and there is no conversion; convert one of them"
                )
        if source.grid.same_as(self.grid):
            return lambda fields: torch.from_numpy(fields).to(self.device)
        regridder = Regridder(source.grid, self.grid, self.device)
        outside = ~regridder.covered  # cells that the source covers only in part
        return lambda fields: regridder(torch.from_numpy(fields).to(self.device)).masked_fill(
            outside, torch.nan
        )

    @staticmethod
    def _bytes(grid: Grid, variables: int) -> int:
        """Return the bytes of a field of so many variables in float32."""
        return 4 * variables * grid.shape[0] * grid.shape[1]

    # -- what is read together -------------------------------------------------------------------------

    def blocks(self, dates: Sequence[int]) -> list[list[int]]:
        """Return the dates (positions) in groups that are stored together and fit in memory, by the forecast
        with the largest chunks.
        """
        name = max(self.forecasts, key=lambda name: self.forecasts[name].block[0])
        size = max(1, min(self.forecasts[name].block[0], self.limit, MOST_DATES))
        return [
            list(block) for _, block in groupby(dates, key=lambda d: int(self.date_rows[name][d]) // size)
        ]

    def steps(self, block: list[int], leads: Sequence[int]) -> list[Step]:
        """Return what is read after each other for a block of dates: leads that are stored together."""
        name = max(self.forecasts, key=lambda name: self.forecasts[name].block[1])
        size = max(1, min(self.forecasts[name].block[1], self.limit // len(block)))
        together = groupby(leads, key=lambda lead: int(self.lead_rows[name][lead]) // size)
        return [(block, s, g) for s in [list(some) for _, some in together] for g in range(len(self.groups))]

    def read_ahead(self, steps: Sequence[Step]) -> Iterator[list[Match]]:
        """Yield the matches of each step; a thread reads those of the next one meanwhile."""
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as reader:
            ahead = [reader.submit(self.read, *step) for step in steps[:1]]
            for number in range(len(steps)):
                matches = ahead.pop().result()
                ahead += [reader.submit(self.read, *step) for step in steps[number + 1 : number + 2]]
                yield matches

    def read(self, dates: list[int], leads: list[int], group: int) -> list[Match]:
        """Return the matches of a group of variables at dates and leads, given by their positions."""
        names = [self.variables[row] for row in self.groups[group]]
        fields: dict[tuple[int, int], dict[str, np.ndarray]] = {at: {} for at in product(dates, leads)}
        for name, forecast in self.forecasts.items():
            there = [lead for lead in leads if self.lead_rows[name][lead] >= 0]
            some = [v for v, row in zip(names, self.groups[group], strict=True) if self.has[name][row]]
            if not there or not some:
                continue
            rows, columns = self.date_rows[name][dates], self.lead_rows[name][there]
            spans = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
            block = forecast.read_block(*spans, some)
            for (date, row), (lead, column) in product(
                zip(dates, rows, strict=True), zip(there, columns, strict=True)
            ):
                fields[date, lead][name] = block[row - rows[0], column - columns[0]]
        matches = [self.match(date, lead, group, read) for (date, lead), read in fields.items()]
        return [match for match in matches if match]

    def match(self, date: int, lead: int, group: int, fields: Mapping[str, np.ndarray]) -> Match | None:
        """Return the match of the fields ([M,] v, H, W) of each forecast; None without a truth, or where a
        forecast is not computed yet. fields: of those variables of the group that the forecast has.
        """
        start, valid_time, rows = self.dates[date], self.dates[date] + self.leads[lead], self.groups[group]
        status = {
            name: COMPUTED if s is None else int(s[self.date_rows[name][date], self.lead_rows[name][lead]])
            for name, s in ((name, self.forecasts[name].status) for name in fields)
        }
        truth = self.find_truth(valid_time, group) if fields else None
        if truth is None or NOT_COMPUTED in status.values():
            return None
        whole = truth = truth if self.boundary is None else truth.masked_fill(self.boundary, torch.nan)
        if any(self.forecasts[name].from_analyses for name in fields):
            analysis = self.find_truth(start, group)
            truth = truth if analysis is None else mask_missing(truth, analysis, range(len(rows)))
        forecasts = {}
        for name, values in fields.items():
            forecast = self.regrid[name](values)
            there = [i for i, row in enumerate(rows) if self.has[name][row]]
            if status[name] != DIVERGED:  # a diverged forecast is wrong there, not missing
                truth = mask_missing(truth, forecast, there)
            if len(there) < len(rows):
                shape = (*forecast.shape[:-3], len(rows), *self.grid.shape)
                some, forecast = forecast, torch.full(shape, torch.nan, device=self.device)
                forecast[..., there, :, :] = some
            forecasts[name] = forecast
        climatology = self.find_climatology(valid_time, group) if self.find_climatology else None
        return Match(date, lead, rows, forecasts, truth, whole, climatology)


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
