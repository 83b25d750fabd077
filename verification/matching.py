"""Pairs of forecast and truth of the same variables, valid time, units, grid and device.

A forecast is read by blocks of dates and leads; truth and climatology are read once for each valid time and
kept as long as later initial dates can ask for them. One thread reads, a block ahead of the scores. Shapes: M
members, V variables, H latitudes, W longitudes.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from datasets.archive import Archive
from datasets.grid import Grid
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

    @property
    def grid(self) -> Grid: ...

    @property
    def variables(self) -> Sequence[str]: ...

    @property
    def blown_up(self) -> Collection[np.datetime64]:
        """Initial dates from which the model diverged."""
        ...

    def units(self, name: str) -> str: ...

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """(n, k, V, H, W), or (n, k, M, V, H, W) for an ensemble, float32."""
        ...


@dataclass(frozen=True)
class Pair:
    """An initial date and a lead by their positions, and their fields (V, H, W) on the device."""

    date: int
    lead: int
    forecast: Tensor  # or (M, V, H, W)
    truth: Tensor | None  # without it there is no score
    climatology: Tensor | None


class FieldCache:
    """Cache of fields by valid time; each is read once if memory allows."""

    def __init__(
        self,
        read: Callable[[np.datetime64], Iterator[tuple[np.datetime64, np.ndarray]]],
        regrid: Callable[[np.ndarray], Tensor],
    ) -> None:
        """read yields the field of a valid time, and those of others that cost nothing more."""
        self.read, self.regrid = read, regrid
        self.fields: OrderedDict[np.datetime64, Tensor] = OrderedDict()

    def get(self, time: np.datetime64) -> Tensor | None:
        if time not in self.fields:
            self.fields |= {other: self.regrid(field) for other, field in self.read(time)}
        field = self.fields.get(time)
        while sum(each.nbytes for each in self.fields.values()) > KEPT_BYTES and len(self.fields) > 1:
            self.fields.popitem(last=False)
        return field

    def forget_before(self, time: np.datetime64) -> None:
        """Drop fields that are valid before the present initial date: initial dates ascend."""
        for old in [each for each in self.fields if each < time]:
            del self.fields[old]


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
    ) -> None:
        self.forecast, self.variables, self.leads = forecast, list(variables), list(leads)
        self.device, self.grid = torch.device(device), grid
        # All fields are compared in the units of the truth.
        self.units = {name: truth.units(name) for name in self.variables}
        self.regrid_forecast = self._regridding(forecast)
        self.truth = FieldCache(truth_reader(truth, self.variables), self._regridding(truth))
        self.climatology = None
        if climatology is not None:
            self.climatology = FieldCache(
                lambda time: iter([(time, climatology.field(time, self.variables))]),
                self._regridding(climatology),
            )

    def _regridding(self, source: ForecastFields | Archive | Climatology) -> Callable[[np.ndarray], Tensor]:
        """Return the function from fields (..., V, H, W) of a source to those in the evaluation's units,
        grid and device. Raises DataError for units that cannot be converted.
        """
        convert = unit_converter(self.variables, source.units, self.units)
        if source.grid.same_as(self.grid):
            return lambda fields: torch.from_numpy(convert(fields)).to(self.device)
        regridder = Regridder(source.grid, self.grid, self.device)
        return lambda fields: regridder(torch.from_numpy(convert(fields)).to(self.device))

    def blocks(self, dates: Sequence[int]) -> list[list[int]]:
        """Return the dates in groups that are stored together and not too large to be read at once."""
        return _together(dates, min(self.forecast.block[0], self._limit(), MOST_DATES))

    def _limit(self) -> int:
        cells = self.forecast.grid.shape[0] * self.forecast.grid.shape[1]
        return max(1, BLOCK_BYTES // (4 * len(self.variables) * cells * max(1, self.forecast.num_members)))

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
        times, source = self.forecast.times, self.forecast
        for cache in filter(None, (self.truth, self.climatology)):
            cache.forget_before(times[dates[0]])
        block, some = (slice(positions[0], positions[-1] + 1) for positions in (dates, leads))
        fields = source.read_block(block, some, self.variables)
        pairs = []
        for date in dates:
            for lead in leads:
                valid_time = times[date] + source.leads[lead]
                truth = self.truth.get(valid_time)
                clim = self.climatology.get(valid_time) if self.climatology and truth is not None else None
                ours = self.regrid_forecast(fields[date - dates[0], lead - leads[0]])
                if truth is not None and times[date] not in source.blown_up:
                    truth = mask_missing(truth, ours)
                pairs.append(Pair(date, lead, ours, truth, clim))
        return pairs


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


def truth_reader(
    truth: Archive, variables: Sequence[str]
) -> Callable[[np.datetime64], Iterator[tuple[np.datetime64, np.ndarray]]]:
    """Return the function that reads the analysis of a date, if there is one, and the later ones in the same
    chunks.
    """
    cells = truth.grid.shape[0] * truth.grid.shape[1]
    size = max(1, min(truth.time_chunk(variables), BLOCK_BYTES // (4 * len(variables) * cells)))

    def read(time: np.datetime64) -> Iterator[tuple[np.datetime64, np.ndarray]]:
        i = int(np.searchsorted(truth.times, time))
        if i == len(truth.times) or truth.times[i] != time:
            return
        stop = min(len(truth.times), (i // size + 1) * size)
        fields = truth.read_block(i, stop, variables)
        for field, date in zip(fields, truth.times[i:stop], strict=True):
            refuse_fills(field, variables, date)
            yield date, field

    return read


def _together(positions: Sequence[int], size: int) -> list[list[int]]:
    """Return ascending positions in groups of those with the same quotient by `size`."""
    return [list(group) for _, group in groupby(positions, key=lambda position: position // size)]
