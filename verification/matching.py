"""Pairs of forecast and truth of the same variables, valid time, units, grid and device.

A forecast is read by blocks of dates and leads; truth and climatology are kept for later initial dates. One
thread reads, a block ahead of the scores. Shapes: M members, V variables, H latitudes, W longitudes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
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
from datasets.variables import CONVERSIONS, UnitConversion, plain_units
from errors import DataError
from verification.climatology import Climatology

BLOCK_BYTES = 2**27  # of a forecast, or of the truth, read at once; more only if a single field is larger
KEPT_BYTES = 2**30  # of truth and of climatology kept for later dates
MOST_DATES = 16  # read at once


class ForecastFields(Protocol):
    """Forecasts that can be scored: a stored forecast, or one made from analyses or a climatology."""

    times: np.ndarray  # (n,) initial dates, datetime64[s], ascending
    leads: np.ndarray  # (L,) timedelta64[s], ascending
    num_members: int  # 0: not an ensemble
    block: tuple[int, int]  # initial dates and leads that are stored, and decoded, together
    caveat: str  # reason not to rely on it, "" for none
    from_analyses: bool  # cells that the analysis of the initial date lacks are not scored, as in train.py

    @property
    def grid(self) -> Grid: ...

    @property
    def variables(self) -> Sequence[str]: ...

    @property
    def blown_up(self) -> Collection[np.datetime64]:
        """Return initial dates from which the model diverged."""
        ...

    def units(self, name: str) -> str: ...

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """Return (n, k, V, H, W), or (n, k, M, V, H, W) for an ensemble, float32."""
        ...


@dataclass(frozen=True)
class Pair:
    """An initial date and a lead by their positions, and their fields (V, H, W) on the device."""

    date: int
    lead: int
    forecast: Tensor  # or (M, V, H, W)
    truth: Tensor | None  # without it there is no score
    climatology: Tensor | None


class Matcher:
    """Reader of pairs of forecast and truth, on one grid; `leads` are positions of those that count."""

    def __init__(
        self,
        forecast: ForecastFields,
        truth: Archive,
        climatology: Climatology | None,
        variables: Sequence[str],
        leads: Sequence[int],
        grid: Grid,
        device: torch.device | str,
        boundary_width: int = 0,
    ) -> None:
        """boundary_width: cells from each side of the grid that are not scored."""
        boundary = boundary_cells(grid.shape, boundary_width).to(device)
        self.boundary = boundary if boundary_width else None
        self.forecast, self.leads, self.grid = forecast, list(leads), grid
        self.device, self.variables = torch.device(device), (names := list(variables))
        # All fields are compared in the units of the truth.
        self.units = {name: truth.units(name) for name in names}
        self.regrid_forecast = self._regridding(forecast)
        max_fields = max(1, min(self._valid_dates(truth.times), KEPT_BYTES // _field_bytes(grid, names)))
        self.times, limit = truth.times, BLOCK_BYTES // _field_bytes(truth.grid, names)
        self.in_chunk = max(1, min(truth.time_chunk(names), limit))
        read = partial(read_chunk, truth, names, self.in_chunk, self._regridding(truth))
        self.read_truths = lru_cache(max(1, max_fields // self.in_chunk))(read)
        self.climatology = None
        if climatology is not None:
            regrid = self._regridding(climatology)
            self.climatology = lru_cache(max_fields)(lambda time: regrid(climatology.field(time, names)))

    def _regridding(self, source: ForecastFields | Archive | Climatology) -> Callable[[np.ndarray], Tensor]:
        """Return the function from fields (..., V, H, W) of a source to those in the evaluation's units,
        grid and device. Raises DataError for units that cannot be converted.
        """
        convert, device = unit_converter(self.variables, source.units, self.units), self.device
        if source.grid.same_as(self.grid):
            return lambda fields: torch.from_numpy(convert(fields)).to(device)
        regridder = Regridder(source.grid, self.grid, device)
        outside = ~regridder.covered  # the mean of a part of a cell is not that of the cell

        def regrid(fields: np.ndarray) -> Tensor:
            return regridder(torch.from_numpy(convert(fields)).to(device)).masked_fill(outside, torch.nan)

        return regrid

    def blocks(self, dates: Sequence[int]) -> list[list[int]]:
        """Return the dates in groups that are stored together and not too large to be read at once."""
        return _together(dates, min(self.forecast.block[0], self._limit(), MOST_DATES))

    def _valid_dates(self, times: np.ndarray) -> int:
        """Return how many of these dates the initial dates that are read together have as valid times."""
        starts, longest = self.forecast.times, self.forecast.leads[self.leads].max()
        together = min(self.forecast.block[0], MOST_DATES, len(starts)) - 1
        first, last = starts[: len(starts) - together], starts[together:] + longest
        return int((np.searchsorted(times, last, "right") - np.searchsorted(times, first)).max()) or 1

    def _limit(self) -> int:
        num_bytes = _field_bytes(self.forecast.grid, self.variables) * max(1, self.forecast.num_members)
        return max(1, BLOCK_BYTES // num_bytes)

    def pairs(self, blocks: Sequence[Sequence[int]]) -> Iterator[Pair]:
        """Yield all pairs of blocks of dates, read one step ahead."""
        steps = []
        for block in blocks:
            size = max(1, min(self.forecast.block[1], self._limit() // len(block)))
            steps += [(block, leads) for leads in _together(self.leads, size)]
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as reader:
            ahead = reader.submit(self._load, *steps[0]) if steps else None
            for following in [*steps[1:], None]:
                loaded = ahead.result() if ahead else []
                ahead = reader.submit(self._load, *following) if following else None
                yield from loaded

    def _load(self, dates: Sequence[int], leads: Sequence[int]) -> list[Pair]:
        times, source, pairs = self.forecast.times, self.forecast, []
        block, some = (slice(positions[0], positions[-1] + 1) for positions in (dates, leads))
        fields = source.read_block(block, some, self.variables)
        for date, lead in product(dates, leads):
            valid_time = times[date] + source.leads[lead]
            truth = self._find_truth(valid_time)
            clim = self.climatology(valid_time) if self.climatology and truth is not None else None
            forecast = self.regrid_forecast(fields[date - dates[0], lead - leads[0]])
            if truth is not None and self.boundary is not None:
                truth = truth.masked_fill(self.boundary, torch.nan)
            start = self._find_truth(times[date]) if source.from_analyses else None
            if truth is not None and start is not None:  # persistence has no value there either
                truth = mask_missing(truth, start)
            if truth is not None and times[date] not in source.blown_up:
                truth = mask_missing(truth, forecast)
            pairs.append(Pair(date, lead, forecast, truth, clim))
        return pairs

    def _find_truth(self, time: np.datetime64) -> Tensor | None:
        """Return the analysis (V, H, W) of a date, None if there is none."""
        i = int(np.searchsorted(self.times, time))
        if i == len(self.times) or self.times[i] != time:
            return None
        return self.read_truths(i // self.in_chunk)[i % self.in_chunk]


def read_chunk(
    truth: Archive, variables: list[str], size: int, regrid: Callable[[np.ndarray], Tensor], chunk: int
) -> Tensor:
    """Return the analyses (n, V, H, W) of `size` dates that are stored together."""
    start, stop = chunk * size, min((chunk + 1) * size, len(truth.times))
    fields = truth.read_block(start, stop, variables)
    for field, time in zip(fields, truth.times[start:stop], strict=True):
        refuse_fills(field, variables, time)
    return regrid(fields)


def _field_bytes(grid: Grid, variables: Sequence[str]) -> int:
    return 4 * len(variables) * grid.shape[0] * grid.shape[1]


def mask_missing(truth: Tensor, forecast: Tensor) -> Tensor:
    """Return the truth (V, H, W), NaN where the forecast, or a member of it, has no value (NaN).

    A date or cell that a forecast lacks is left out of its scores. An infinite value is not missing.
    """
    missing = torch.isnan(forecast)
    if not missing.any():
        return truth
    missing = missing.any(dim=0) if forecast.ndim > truth.ndim else missing
    return torch.where(missing, torch.nan, truth)


def unit_converter(
    variables: Sequence[str], theirs: Callable[[str], str], ours: Mapping[str, str]
) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that converts fields (..., V, H, W) from one source's units to the truth's.

    Units that a source does not name are taken for the truth's. Raises DataError for a pair of units that
    datasets.variables cannot convert.
    """
    pairs = [conversion_between(name, theirs(name), ours[name]) for name in variables]
    if all(pair == UnitConversion() for pair in pairs):
        return lambda fields: fields
    factor, offset = (np.array(column, np.float32)[:, None, None] for column in zip(*pairs, strict=True))
    return lambda fields: fields * factor + offset


def conversion_between(name: str, theirs: str, ours: str) -> UnitConversion:
    """Return the conversion of a variable's units, in either direction of the table. Raises DataError."""
    source, target = plain_units(theirs), plain_units(ours)
    if source == target or not source or not target:
        return UnitConversion()
    if (source, target) in CONVERSIONS:
        return CONVERSIONS[source, target]
    if (target, source) in CONVERSIONS:
        factor, offset = CONVERSIONS[target, source]
        return UnitConversion(1 / factor, -offset / factor)
    reason = f"{theirs!r} in what is scored and {ours!r} in the truth"
    raise DataError(f"{name}: its units are {reason}, and there is no conversion; correct the attribute")


def _together(positions: Sequence[int], size: int) -> list[list[int]]:
    """Return ascending positions in groups of those with the same quotient by `size`."""
    return [list(group) for _, group in groupby(positions, key=lambda position: position // size)]
