"""Forecasts and what they are compared with, brought together: same variables, valid time, grid and device.

A forecast is read as it lies on disk, block by block of dates and leads; truth and climatology are read once
for each valid time and kept as long as later initial dates can ask for them. All of it is read by one thread,
a block ahead of the scores. Shapes: M members, V variables, H latitudes, W longitudes.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
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
from verification.climatology import Climatology

BLOCK_BYTES = 2**27  # of a forecast, or of the truth, read at once; more only if a single field is larger
KEPT_BYTES = 2**30  # of truth and of climatology kept for later dates
MOST_DATES = 16  # read at once


class ForecastFields(Protocol):
    """What can be scored: a stored forecast, or one made from analyses or a climatology."""

    times: np.ndarray  # (n,) initial dates, datetime64[s], ascending
    leads: np.ndarray  # (L,) timedelta64[s], ascending
    num_members: int  # 0: not an ensemble
    block: tuple[int, int]  # initial dates and leads that are stored, and decoded, together

    @property
    def grid(self) -> Grid: ...

    @property
    def variables(self) -> Sequence[str]: ...

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


class KeptFields:
    """Fields by valid time on the grid and device of the evaluation; each is read once if memory allows."""

    def __init__(
        self,
        read: Callable[[np.datetime64], Iterator[tuple[np.datetime64, np.ndarray]]],
        regrid: Callable[[np.ndarray], Tensor],
    ) -> None:
        """read gives the field of a valid time, among those of others that cost nothing more."""
        self.read, self.regrid = read, regrid
        self.kept: OrderedDict[np.datetime64, Tensor] = OrderedDict()

    def get(self, time: np.datetime64) -> Tensor | None:
        if time not in self.kept:
            for other, field in self.read(time):
                self.kept[other] = self.regrid(field)
        found = self.kept.get(time)
        while sum(field.nbytes for field in self.kept.values()) > KEPT_BYTES and len(self.kept) > 1:
            self.kept.popitem(last=False)
        return found

    def forget_before(self, time: np.datetime64) -> None:
        """Initial dates ascend: nobody asks again for what is valid before the present one."""
        for old in [each for each in self.kept if each < time]:
            del self.kept[old]


class Matcher:
    """Reads pairs of forecast and truth, on one grid; `leads` are positions of those that count."""

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
        self.regrid_forecast = self._regridding(forecast.grid)
        self.truth = KeptFields(truth_reader(truth, self.variables), self._regridding(truth.grid))
        self.climatology = None
        if climatology is not None:
            read = lambda time: iter([(time, climatology.field(time, self.variables))])  # noqa: E731
            self.climatology = KeptFields(read, self._regridding(climatology.grid))

    def _regridding(self, source: Grid) -> Callable[[np.ndarray], Tensor]:
        if source.same_as(self.grid):
            return lambda fields: torch.from_numpy(fields).to(self.device)
        regridder = Regridder(source, self.grid, self.device)
        return lambda fields: regridder(torch.from_numpy(fields).to(self.device))

    def blocks(self, dates: Sequence[int]) -> list[list[int]]:
        """The dates in groups that are stored together and not too large to be read at once."""
        return _together(dates, min(self.forecast.block[0], self._limit(), MOST_DATES))

    def _limit(self) -> int:
        cells = self.forecast.grid.shape[0] * self.forecast.grid.shape[1]
        return max(1, BLOCK_BYTES // (4 * len(self.variables) * cells * max(1, self.forecast.num_members)))

    def pairs(self, blocks: Sequence[Sequence[int]]) -> Iterator[Pair]:
        """All pairs of blocks of dates, read one step ahead."""
        steps = []
        for block in blocks:
            size = max(1, min(self.forecast.block[1], self._limit() // len(block)))
            steps += [(block, leads) for leads in _together(self.leads, size)]
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as reader:
            waiting = deque(reader.submit(self._load, *step) for step in steps[:1])
            for following in [*steps[1:], None]:
                loaded = waiting.popleft().result()
                if following is not None:
                    waiting.append(reader.submit(self._load, *following))
                yield from loaded

    def _load(self, dates: Sequence[int], leads: Sequence[int]) -> list[Pair]:
        times, source = self.forecast.times, self.forecast
        for kept in filter(None, (self.truth, self.climatology)):
            kept.forget_before(times[dates[0]])
        block, some = (slice(positions[0], positions[-1] + 1) for positions in (dates, leads))
        fields = source.read_block(block, some, self.variables)
        pairs = []
        for date in dates:
            for lead in leads:
                valid_time = times[date] + source.leads[lead]
                truth = self.truth.get(valid_time)
                clim = self.climatology.get(valid_time) if self.climatology and truth is not None else None
                ours = self.regrid_forecast(fields[date - dates[0], lead - leads[0]])
                pairs.append(Pair(date, lead, ours, truth, clim))
        return pairs


def truth_reader(
    truth: Archive, variables: Sequence[str]
) -> Callable[[np.datetime64], Iterator[tuple[np.datetime64, np.ndarray]]]:
    """Reads the analysis of a date, and the later ones that lie in the same chunks; nothing where there is
    none.
    """
    cells = truth.grid.shape[0] * truth.grid.shape[1]
    size = max(1, min(truth.time_chunk(variables), BLOCK_BYTES // (4 * len(variables) * cells)))

    def read(time: np.datetime64) -> Iterator[tuple[np.datetime64, np.ndarray]]:
        i = int(np.searchsorted(truth.times, time))
        if i == len(truth.times) or truth.times[i] != time:
            return iter(())
        stop = min(len(truth.times), (i // size + 1) * size)
        block = truth.read_block(i, stop, variables)
        for field, time in zip(block, truth.times[i:stop], strict=True):
            refuse_fills(field, variables, time)
        return zip(truth.times[i:stop], block, strict=True)

    return read


def _together(positions: Sequence[int], size: int) -> list[list[int]]:
    """Ascending positions in groups of those with the same quotient by `size`."""
    return [list(group) for _, group in groupby(positions, key=lambda position: position // size)]
