"""Forecasts and their truth with the same variables, valid time, units, grid, cells and device.

All forecasts of a comparison are read together, in blocks of dates and leads that are stored together. Truth
and climatology are read and regridded once for all of them, and a cell is scored if the truth and every
forecast have a value. One thread reads, one block ahead of the scores. Shapes: F forecasts, M members, V
variables, H latitudes, W longitudes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datasets.archive import Archive
from datasets.grid import Grid
from datasets.normalization import boundary_cells
from datasets.regrid import Regridder
from datasets.statistics import refuse_fills
from datasets.variables import UnitConversion, find_conversion, group_levels
from errors import DataError
from verification.baselines import Baseline
from verification.climatology import Climatology
from verification.stores import COMPUTED, DIVERGED, NOT_COMPUTED, StoredForecast

logger = logging.getLogger("rossby")
BLOCK_BYTES = 2**27  # of a forecast, or of the truth, read at once; more if one array of a date is larger
KEPT_BYTES = 2**30  # of truth, and of climatology, kept for later dates
MOST_DATES = 16  # read at once
ForecastFields = StoredForecast | Baseline  # that can be scored
PROBES = 8  # dates at which a variable must be missing to count as one that a forecast does not have


class Step(NamedTuple):
    """Positions, among those compared, of dates, leads and variables that are read together."""

    dates: list[int]
    leads: list[int]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """Fields on the device of all forecasts and of their truth, at one date and lead (positions)."""

    date: int
    lead: int
    rows: tuple[int, ...]  # positions of these V among the variables that are compared
    forecasts: list[Tensor]  # F of (V, H, W) or (M, V, H, W)
    has: np.ndarray  # (F, V) bool; where a forecast does not have a variable, or the lead, it is NaN
    truth: Tensor  # (V, H, W), NaN in cells that are not scored, because the truth or a forecast lacks them
    analysis: Tensor  # the truth without this mask
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
        self.forecasts, self.truth, self.climatology = list(forecasts.values()), truth, climatology
        self.variables, self.dates, self.leads = list(variables), dates, leads
        self.grid, self.device, self.boundary_width = grid, torch.device(device), boundary_width
        # Positions of the dates and leads in each forecast, -1 for a lead that it does not have.
        self.date_rows = [np.searchsorted(forecast.times, dates) for forecast in self.forecasts]
        self.lead_rows = [
            np.where(np.isin(leads, forecast.leads), np.searchsorted(forecast.leads, leads), -1)
            for forecast in self.forecasts
        ]
        self.has = np.array([self._find_variables(f, name) for f, name in enumerate(forecasts)])  # (F, V)
        sources = [*self.forecasts, truth, *([climatology] if climatology else [])]
        self.regrid = {source: self._regridder(source) for source in sources}

        # -- what fits in memory: dates and leads of every forecast, of all variables or of one array
        size, state = max(f.num_members * bytes_of(f.grid) for f in self.forecasts), bytes_of(truth.grid)
        self.fields_at_once, self.groups = BLOCK_BYTES // (size * len(variables)), [(*range(len(variables)),)]
        if not self.fields_at_once:
            self.groups = [(*rows.values(),) for rows in group_levels(variables).values()]
        chunk = max(field.chunk("time") for name in variables for field, _ in truth.find(name))
        self.times_at_once = max(1, min(chunk, BLOCK_BYTES // (state * max(map(len, self.groups)))))
        # As many states are kept as valid times are in one block of dates: the next block needs most of them.
        ends = np.array([dates[[block[0], block[-1]]] for block in self.blocks(range(len(dates)))])
        inside = 1 + np.diff(np.searchsorted(truth.times, ends + leads[-1] * np.arange(2))).max()
        blocks_in_cache = min(inside, KEPT_BYTES // (bytes_of(grid) * len(variables))) // self.times_at_once
        self.read_truth = lru_cache(len(self.groups) * max(1, int(blocks_in_cache)))(self._read_truth)

    def _find_variables(self, f: int, name: str) -> list[bool]:
        """Return which variables a forecast has. One without a value in some fields of its first, middle and
        last dates counts as absent: stores have NaN on levels that a model does not predict.
        """
        forecast, leads = self.forecasts[f], self.lead_rows[f][self.lead_rows[f] >= 0]
        stored = missing = [variable for variable in self.variables if variable in forecast.variables]
        dates = self.date_rows[f][np.linspace(0, len(self.dates) - 1, PROBES).astype(int)]
        for date, lead in product(np.unique(dates), np.unique([*leads[-1:], *leads[:1]])):
            if forecast.status is not None and forecast.status[date, lead] == NOT_COMPUTED:
                continue
            names, missing = missing, []
            for rows in group_levels(names).values():  # an array: members of all may not fit in memory
                array = [names[row] for row in rows.values()]
                fields = forecast.read_block(slice(date, date + 1), slice(lead, lead + 1), array)
                is_empty = np.isnan(np.moveaxis(fields, -3, 0)).reshape(len(array), -1).all(axis=1)
                missing += np.array(array)[is_empty].tolist()
        if missing and len(missing) < len(stored):
            logger.info("%s has no value of %s, which is not scored there", name, ", ".join(missing))
            stored = [variable for variable in stored if variable not in missing]
        return [variable in stored for variable in self.variables]

    def _regridder(self, source: ForecastFields | Archive | Climatology) -> Callable[[np.ndarray], Tensor]:
        """Return a function that regrids fields (..., V, H, W) of a source to the evaluation's grid and
        device. Raises DataError if the units differ from the truth's.
        """
        # Variables that the project knows are read in its own units, whatever the file has.
        for name in {*source.variables} & {*self.variables}:
            theirs, ours = source.units(name), self.truth.units(name)
            if find_conversion(theirs, ours) != UnitConversion():
                reason = f"{theirs!r} in what is scored and {ours!r} in the truth"
                fix = "and there is no conversion; convert one of them"
                raise DataError(f"{name}: its units are {reason}, {fix}")
        if source.grid.same_as(self.grid):
            return lambda fields: torch.from_numpy(fields).to(self.device)
        regridder = Regridder(source.grid, self.grid, self.device)
        outside = ~regridder.covered  # cells that the source covers only in part

        def regrid(fields: np.ndarray) -> Tensor:
            return regridder(torch.from_numpy(fields).to(self.device)).masked_fill(outside, torch.nan)

        return regrid

    # -- what is read together -------------------------------------------------------------------------

    def blocks(self, dates: Sequence[int]) -> list[list[int]]:
        """Return the dates (positions) in groups that are stored together and fit in memory, by the forecast
        with the largest chunks.
        """
        chunks = [forecast.block[0] for forecast in self.forecasts]
        rows = self.date_rows[np.argmax(chunks)]
        size = max(1, min(max(chunks), self.fields_at_once, MOST_DATES))
        return [list(block) for _, block in groupby(dates, key=lambda date: int(rows[date]) // size)]

    def steps(self, block: list[int], leads: Sequence[int]) -> list[Step]:
        """Return what is read after each other for a block of dates: leads that are stored together."""
        chunks = [forecast.block[1] for forecast in self.forecasts]
        rows = self.lead_rows[np.argmax(chunks)]
        size = max(1, min(max(chunks), self.fields_at_once // len(block)))
        together = [list(some) for _, some in groupby(leads, key=lambda lead: int(rows[lead]) // size)]
        return [Step(block, some, group) for some in together for group in self.groups]

    def read_ahead(self, steps: Sequence[Step]) -> Iterator[list[Match]]:
        """Yield the matches of each step; a thread reads those of the next one meanwhile."""
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as reader:
            ahead = [reader.submit(self.read, step) for step in steps[:1]]
            for number in range(len(steps)):
                matches = ahead.pop().result()
                ahead += [reader.submit(self.read, step) for step in steps[number + 1 : number + 2]]
                yield matches

    def read(self, step: Step) -> list[Match]:
        """Return the matches of a step: none at a date and lead without a truth, or where a forecast is not
        computed yet.
        """
        blocks = {}
        for f, forecast in enumerate(self.forecasts):
            there = np.flatnonzero(self.has[f, step.rows])
            rows, columns = self.date_rows[f][step.dates], self.lead_rows[f][step.leads]
            if there.size and columns.max() >= 0:
                spans = slice(rows[0], rows[-1] + 1), slice(columns[columns >= 0][0], columns.max() + 1)
                names = [self.variables[step.rows[i]] for i in there]
                blocks[f] = there, forecast.read_block(*spans, names), (spans[0].start, spans[1].start)
        matches = [self._match(*at, step.rows, blocks) for at in product(step.dates, step.leads)]
        return [match for match in matches if match]

    def _match(self, date: int, lead: int, rows: tuple[int, ...], blocks: Mapping[int, Any]) -> Match | None:
        """blocks: by forecast the variables that it has, their fields, and the positions of the first."""
        valid_time, shape = self.dates[date] + self.leads[lead], (len(rows), *self.grid.shape)
        truth = analysis = self.find_truth(valid_time, rows)
        if truth is None or analysis is None:
            return None
        # -- forecasts; a cell counts where the truth and all of them have a value, so that all are scored on
        # the same
        has = np.zeros((len(self.forecasts), len(rows)), bool)
        forecasts: dict[int, Tensor] = {}
        for f, (there, block, (first_date, first_lead)) in blocks.items():
            source, at = self.forecasts[f], (self.date_rows[f][date], self.lead_rows[f][lead])
            if at[1] < 0:
                continue
            status = COMPUTED if source.status is None else source.status[at]
            if status == NOT_COMPUTED:
                return None
            if source.status is not None and (initial := self.find_truth(self.dates[date], rows)) is not None:
                truth = mask_missing(truth, initial, np.arange(len(rows)))
            fields = self.regrid[source](block[at[0] - first_date, at[1] - first_lead])
            if status != DIVERGED:  # a diverged forecast is wrong there, not missing
                truth = mask_missing(truth, fields, there)
            has[f, there], forecasts[f] = True, fields
            if len(there) < len(rows):
                forecasts[f] = fields.new_full((*fields.shape[:-3], *shape), torch.nan)
                forecasts[f][..., there, :, :] = fields
        if not has.any():
            return None
        # -- the climatology of the valid time, for anomalies
        normal, climatology = None, self.climatology
        if climatology:
            normal = torch.full(shape, torch.nan, device=self.device)
            there = [i for i, row in enumerate(rows) if self.variables[row] in climatology.variables]
            if there and climatology.has(valid_time):
                fields = climatology.field(valid_time, [self.variables[rows[i]] for i in there])
                normal[there] = self.regrid[climatology](fields)
        absent = torch.full(shape, torch.nan, device=self.device)
        fields = [forecasts.get(f, absent) for f in range(len(self.forecasts))]
        return Match(date, lead, rows, fields, has, truth, analysis, normal)

    def find_truth(self, time: np.datetime64, rows: tuple[int, ...]) -> Tensor | None:
        """Return the analysis (V, H, W) at a date, NaN on the boundary; None without one."""
        i = int(np.searchsorted(self.truth.times, time))
        if time not in self.truth.times[i : i + 1]:
            return None
        return self.read_truth(i // self.times_at_once, rows)[i % self.times_at_once]

    def _read_truth(self, block: int, rows: tuple[int, ...]) -> Tensor:
        start, names = block * self.times_at_once, [self.variables[row] for row in rows]
        times = self.truth.times[start : start + self.times_at_once]
        fields = self.truth.read_block(start, start + len(times), names)
        for field, time in zip(fields, times, strict=True):
            refuse_fills(field, names, time, self.truth.path)
        boundary = boundary_cells(self.grid.shape, self.boundary_width).to(self.device)
        return self.regrid[self.truth](fields).masked_fill(boundary, torch.nan)


def bytes_of(grid: Grid) -> int:
    """Return the bytes of a field in float32."""
    return 4 * grid.shape[0] * grid.shape[1]


def mask_missing(truth: Tensor, fields: Tensor, rows: np.ndarray) -> Tensor:
    """Return the truth (V, H, W), NaN where fields ([M,] v, H, W) of some of its variables have no value.

    An infinite value is not missing; in an ensemble, one member without a value makes a cell missing.
    """
    missing = torch.isnan(fields)
    if not missing.any():
        return truth
    missing, masked = (missing.any(dim=0) if fields.ndim > truth.ndim else missing), truth.clone()
    masked[rows] = masked[rows].masked_fill(missing, torch.nan)
    return masked
