"""Forecasts and their truth with the same variables, valid time, units, grid, cells and device.

All forecasts of a comparison are read together, in blocks of dates and leads that are stored together. Truth
and climatology are read and regridded once for all of them, and a cell is scored if the truth and every
forecast have a value. One thread reads, one block ahead of the scores. Shapes: F forecasts, M members, V
variables, H latitudes, W longitudes.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from datasets.archive import Archive
from datasets.fields import NamedFields
from datasets.grid import Grid
from datasets.normalization import boundary_cells
from datasets.regrid import Regridder
from datasets.statistics import refuse_fills
from datasets.variables import UnitConversion, find_conversion, group_levels
from errors import DataError
from verification.baselines import Baseline
from verification.climatology import Climatology
from verification.stores import DIVERGED, NOT_COMPUTED, StoredForecast

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
        cells from each side of the grid that are not scored. Raises DataError if units differ.
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
        # The variables (F, V) that forecasts have. One without a value in some fields of its first, middle
        # and last dates counts as absent: stores have NaN on levels that a model does not predict.
        self.has = np.array([[v in f.variables for v in variables] for f in self.forecasts])
        probes = np.linspace(0, len(dates) - 1, PROBES).astype(int)
        for f, (title, forecast) in enumerate(forecasts.items()):
            columns = self.lead_rows[f][self.lead_rows[f] >= 0]
            missing = np.flatnonzero(self.has[f]).tolist()
            for at in product(np.unique(self.date_rows[f][probes]), np.unique([*columns[:1], *columns[-1:]])):
                if forecast.status is not None and forecast.status[at] == NOT_COMPUTED:
                    continue
                # An array after the other: members of all may not fit in memory.
                candidates, missing = [variables[v] for v in missing], []
                for rows in group_levels(candidates).values():
                    names, spans = [candidates[row] for row in rows.values()], [slice(i, i + 1) for i in at]
                    fields = np.moveaxis(forecast.read_block(spans[0], spans[1], names), -3, 0)
                    is_empty = np.isnan(fields).reshape(len(names), -1).all(axis=1)
                    missing += [self.variables.index(names[i]) for i in np.flatnonzero(is_empty)]
            if missing and len(missing) < self.has[f].sum():
                self.has[f, missing] = False
                names = ", ".join(variables[v] for v in missing)
                logger.info("%s has no value of %s, which is not scored there", title, names)
        # -- units, and grids: variables that the project knows are read in its own units, whatever a file has
        self.regridders: dict[NamedFields | Baseline, Regridder] = {}  # of sources on another grid
        for source in [*self.forecasts, truth, *([climatology] if climatology else [])]:
            for name in {*source.variables} & {*variables}:
                theirs, ours = source.units(name), truth.units(name)
                if find_conversion(theirs, ours) != UnitConversion():
                    reason = f"{theirs!r} in what is scored and {ours!r} in the truth"
                    fix = "and there is no conversion; convert one of them"
                    raise DataError(f"{name}: its units are {reason}, {fix}")
            if not source.grid.same_as(grid):
                self.regridders[source] = Regridder(source.grid, grid, self.device)

        # -- what fits in memory: dates and leads of every forecast, of all variables or of one array
        size, state = max(f.num_members * bytes_of(f.grid) for f in self.forecasts), bytes_of(truth.grid)
        self.fields_at_once, self.groups = BLOCK_BYTES // (size * len(variables)), [(*range(len(variables)),)]
        if not self.fields_at_once:
            self.groups = [(*rows.values(),) for rows in group_levels(variables).values()]
        chunk = max(field.chunk("time") for name in variables for field, _ in truth.find(name))
        self.times_at_once = max(1, min(chunk, BLOCK_BYTES // (state * max(map(len, self.groups)))))
        # As many states are kept as valid times are in one block of dates: the next block needs most of them.
        blocks = [step.dates for step in self.steps(range(len(dates)), [0])]
        ends = np.array([dates[[block[0], block[-1]]] for block in blocks])
        inside = 1 + np.diff(np.searchsorted(truth.times, ends + leads[-1] * np.arange(2))).max()
        blocks_in_cache = min(inside, KEPT_BYTES // (bytes_of(grid) * len(variables))) // self.times_at_once
        self.read_truth = lru_cache(len(self.groups) * max(1, int(blocks_in_cache)))(self._read_truth)

    # -- what is read together -------------------------------------------------------------------------

    def steps(self, dates: Sequence[int], leads: Sequence[int], rank: int = 0, ranks: int = 1) -> list[Step]:
        """Return what a rank reads of dates and leads (positions), one step after the other: those that are
        stored together and fit in memory, by the forecast with the largest chunks.
        """
        chunks, steps = np.array([forecast.block for forecast in self.forecasts]), list[Step]()
        rows, columns = self.date_rows[chunks[:, 0].argmax()], self.lead_rows[chunks[:, 1].argmax()]
        size = max(1, min(int(chunks[:, 0].max()), self.fields_at_once, MOST_DATES))
        blocks = [list(block) for _, block in groupby(dates, key=lambda date: rows[date] // size)]
        for i in np.array_split(np.arange(len(blocks)), ranks)[rank]:
            most = max(1, min(int(chunks[:, 1].max()), self.fields_at_once // len(blocks[i])))
            for _, together in groupby(leads, key=lambda lead, most=most: columns[lead] // most):
                some = list(together)
                steps += [Step(blocks[i], some, group) for group in self.groups]
        return steps

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
        rows, matches, device = step.rows, list[Match](), self.device
        # -- by forecast the variables that it has, their fields, and the positions of the first date and lead
        blocks = {}
        for f, forecast in enumerate(self.forecasts):
            there = np.flatnonzero(self.has[f, rows])
            at, columns = self.date_rows[f][step.dates], self.lead_rows[f][step.leads]
            if there.size and columns.max() >= 0:
                first = at[0], columns[columns >= 0][0]
                spans = slice(first[0], at[-1] + 1), slice(first[1], columns.max() + 1)
                fields = forecast.read_block(*spans, [self.variables[rows[i]] for i in there])
                blocks[f] = there, fields, first
        for date, lead in product(step.dates, step.leads):
            valid_time, shape = self.dates[date] + self.leads[lead], (len(rows), *self.grid.shape)
            truth = analysis = self.find_truth(valid_time, rows)
            places = {
                f: (self.date_rows[f][date], self.lead_rows[f][lead])
                for f in blocks
                if self.lead_rows[f][lead] >= 0
            }
            statuses = {f: self.forecasts[f].status for f in places}  # None: all are computed
            status = {f: s[places[f]] for f, s in statuses.items() if s is not None}
            if truth is None or analysis is None or not places or NOT_COMPUTED in status.values():
                continue
            # -- forecasts; a cell counts where the truth and all of them have a value, so that all are scored
            # on the same
            has = np.zeros((len(self.forecasts), len(rows)), bool)
            forecasts = [torch.full(shape, torch.nan, device=device)] * len(self.forecasts)
            for f, at in places.items():
                there, block, first = blocks[f]
                if f in status and (initial := self.find_truth(self.dates[date], rows)) is not None:
                    truth = mask_missing(truth, initial, np.arange(len(rows)))
                fields = self.regrid(self.forecasts[f], block[at[0] - first[0], at[1] - first[1]])
                if status.get(f) != DIVERGED:  # a diverged forecast is wrong there, not missing
                    truth = mask_missing(truth, fields, there)
                has[f, there], forecasts[f] = True, fields
                if len(there) < len(rows):
                    forecasts[f] = fields.new_full((*fields.shape[:-3], *shape), torch.nan)
                    forecasts[f][..., there, :, :] = fields
            # -- the climatology of the valid time, for anomalies
            normal, climatology = None, self.climatology
            if climatology:
                normal = torch.full(shape, torch.nan, device=device)
                there = [i for i, row in enumerate(rows) if self.variables[row] in climatology.variables]
                if there and climatology.has(valid_time):
                    fields = climatology.field(valid_time, [self.variables[rows[i]] for i in there])
                    normal[there] = self.regrid(climatology, fields)
            matches.append(Match(date, lead, rows, forecasts, has, truth, analysis, normal))
        return matches

    def regrid(self, source: NamedFields | Baseline, fields: np.ndarray) -> Tensor:
        """Return fields (..., V, H, W) of a source on the grid and the device of the comparison, NaN in cells
        that the source covers only in part.
        """
        tensor, regridder = torch.from_numpy(fields).to(self.device), self.regridders.get(source)
        return tensor if regridder is None else regridder(tensor).masked_fill(~regridder.covered, torch.nan)

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
        return self.regrid(self.truth, fields).masked_fill(boundary, torch.nan)


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
