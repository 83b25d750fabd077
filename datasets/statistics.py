"""Statistics of the training period: moments of the variables, summed over dates.

Each date has a row of moments, which is the same on every rank. Rows are added in the order of the dates, in
float64: statistics do not depend on the number of ranks, threads or attempts. Shapes: V variables, H
latitudes, W longitudes, n dates.
"""

import hashlib
import logging
import time
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from datasets.archive import Archive
from datasets.dates import evenly_spaced
from datasets.field_dataset import stream
from datasets.grid import sum_moments
from datasets.plausibility import count_implausible, log_implausible, refuse_fills
from errors import DataError
from jobs.durable_files import replacing

logger = logging.getLogger(__name__)
Numbers = dict[str, list[float]]  # mean, std, change_std -> one number for each variable
ROUNDING = 1e-7  # of float32: a smaller relative deviation is a constant
# Columns of a row: cells without a value, infinite ones, ones outside the variable's range; weight, first and
# second moment of the state (around the shift) and of its change over a model step.
MISSING, IMPLAUSIBLE, STATE, CHANGE, NUM_COLUMNS = 0, slice(1, 3), slice(3, 6), slice(6, 9), 9
SAMPLED_DATES = 16  # dates that represent all if files have no size and modification time
DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)
SAME = 1e-9  # relative tolerance: processors differ in the last digits of sums


@dataclass
class Sums:
    """Sums over dates; a date on which a variable has no values is not included."""

    variables: np.ndarray  # (V,) names
    # (V,), subtracted before squaring: squares of 5e4 m2 s-2 would lose seven of the sixteen digits.
    shift: np.ndarray
    total: np.ndarray  # (V, H, W) float64, of values
    count: np.ndarray  # (V, H, W) or, while no cell is missing, (V, 1, 1)
    dates: list[np.datetime64] = field(default_factory=list)  # in the order in which they were read
    rows: list[np.ndarray] = field(default_factory=list)  # (V, NUM_COLUMNS) of each date

    @classmethod
    def zeros(cls, source: "Source", shift: np.ndarray) -> Self:
        """Return the sums over no date; shift (V,) is near the means."""
        names, shape = np.array(source.variables), source.fields.grid.shape
        total, count = np.zeros((len(names), *shape)), np.zeros((len(names), 1, 1), np.int64)
        return cls(names, shift, total, count)

    def add(
        self, date: np.datetime64, now: np.ndarray, before: np.ndarray | None, area: np.ndarray, path: str
    ) -> bool:
        """Add fields (V, H, W) of a date. Returns False, and adds nothing, if one of them is empty.

        before: the fields a model step earlier, None if they are not there or one is empty; area: weights of
        rows (H,); path: of the source. Raises DataError for an undeclared fill value.
        """
        columns, names = np.zeros((len(now), NUM_COLUMNS)), self.variables.tolist()
        columns_of = partial(state_columns, date, area=area, path=path)
        states = _pool().map(columns_of, names, now, self.shift)
        columns[:, : STATE.stop] = list(states)
        has_values = not (columns[:, MISSING] == now[0].size).any()
        if not has_values:
            columns[:, STATE] = 0
        elif before is not None:
            columns[:, CHANGE] = list(_pool().map(partial(sum_moments, area=area), now, before))
        self.dates.append(date)
        self.rows.append(columns)
        if has_values:
            self.count = self.count + (np.isfinite(now) if columns[:, MISSING].any() else 1)
            np.add(self.total, now, out=self.total, where=np.isfinite(now))
        return has_values

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the dates (n,), in order, and their rows (n, V, NUM_COLUMNS)."""
        dates = np.array(self.dates, "datetime64[s]")
        order = np.argsort(dates)
        return dates[order], np.array(self.rows).reshape(-1, len(self.variables), NUM_COLUMNS)[order]

    def moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (V,) each: mean, standard deviation, and that of the change over a model step."""
        sums = self.table()[1].sum(axis=0)
        mean, std = _mean_and_std(sums[:, STATE])
        return self.shift + mean, std, _mean_and_std(sums[:, CHANGE])[1]

    def mean_field(self) -> np.ndarray:
        """Return (V, H, W) float32: the mean over the dates, the variable's where a cell has no value."""
        mean = self.moments()[0][:, None, None]
        with np.errstate(invalid="ignore"):
            return np.where(self.count > 0, self.total / self.count, mean).astype(np.float32)


def state_columns(
    date: np.datetime64, name: str, values: np.ndarray, shift: float, area: np.ndarray, path: str
) -> list[float]:
    """Return the columns of a variable's field (H, W) up to those of its state. Raises DataError."""
    refuse_fills(values[None], [name], date, path)
    finite = values[np.isfinite(values)]
    missing = values.size - finite.size
    moments = sum_moments(values, shift, area)
    return [missing, *count_implausible(values, finite, name), *moments]


def _mean_and_std(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation from (V, 3); the deviation of a constant is 1."""
    weight, first, second = sums.T
    mean = first / weight
    variance = np.maximum(second / weight - mean**2, 0)
    return mean, np.where(variance > 0, np.sqrt(variance), 1.0)


@cache
def _pool() -> ThreadPoolExecutor:
    """Return as many threads as this rank has cores; numpy works without Python's lock."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="statistics")


@dataclass(frozen=True, eq=False)
class Statistics:
    """Area-weighted moments of each variable over the training period, in its units."""

    mean: np.ndarray  # (V,)
    std: np.ndarray  # (V,)
    change_std: np.ndarray  # (V,) standard deviation of the change over one model step
    mean_field: np.ndarray  # (V, H, W) float32: the climatology of the training period
    dates: np.ndarray  # (n,) datetime64[s], all that were read
    fingerprint: str  # of the data, dates and variables
    missing: np.ndarray | None = None  # (n, V) cells without a value; None: of a checkpoint, not known

    @classmethod
    def from_sums(cls, sums: Sums, fingerprint: str) -> "Statistics":
        """Compute statistics, and log what is implausible.

        Raises DataError if no date, or no two of them a step apart, have values of all variables.
        """
        names, (dates, rows) = sums.variables.tolist(), sums.table()
        missing = rows[:, :, MISSING].astype(int)
        log_implausible(names, dates, rows[:, :, IMPLAUSIBLE])
        for columns, subject in ((STATE, "date has"), (CHANGE, "two dates a model step apart have")):
            if not rows[:, :, columns.start].any():
                why = f"no {subject} values of all of them among the {len(dates)} that count"
                raise DataError(f"data.variables = {names}: {why}; look at data.train_period")
        mean, std, change_std = sums.moments()
        weight, first, second = rows[:, :, STATE].sum(axis=0).T
        constant = second / weight - (first / weight) ** 2 <= (ROUNDING * sums.shift) ** 2
        for v in np.flatnonzero(constant):
            logger.warning(f"data.path: {names[v]} is {mean[v]:g} in all cells on all dates")
        empty = (missing == sums.total[0].size).any(axis=1)
        if empty.any():
            first = f"{dates[empty][0]}; no sample starts from them"
            logger.warning(f"{empty.sum()} dates have no value of a variable, the first {first}")
        return cls(mean, std, change_std, sums.mean_field(), dates, fingerprint, missing)

    @property
    def numbers(self) -> Numbers:
        """Moments with which a model's weights were trained, all digits."""
        return {name: getattr(self, name).tolist() for name in ("mean", "std", "change_std")}

    def write(self, path: Path) -> None:
        """Write the statistics atomically; the archive has checksums. Raises OSError."""
        arrays: dict[str, Any] = {each.name: np.asarray(getattr(self, each.name)) for each in fields(self)}
        with replacing(path) as file:
            np.savez(file, **arrays)


def read_statistics(path: Path) -> Statistics | None:
    """Return stored statistics, None if there are none or, with a warning, if the file is damaged.

    Raises DataError if the arrays do not fit each other.
    """
    fix = "remove it, and the next start computes the statistics again"
    if path.is_dir():
        raise DataError(f"{path}: is a folder; {fix}")
    try:
        with np.load(path) as stored:
            arrays: dict[str, Any] = {each.name: stored[each.name] for each in fields(Statistics)}
        lengths = {len(arrays[name]) for name in ("mean", "std", "change_std", "mean_field")}
        arrays["fingerprint"] = str(arrays["fingerprint"])
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        logger.warning("%s: is damaged, or of another version (%s)", path, type(error).__name__)
        return None
    if len(lengths) > 1:
        raise DataError(f"{path}: its arrays differ in length; {fix}")
    return Statistics(**arrays)


@dataclass(frozen=True, eq=False)
class Source:
    """The fields and dates that statistics are computed from."""

    fields: Archive
    variables: list[str]
    dates: np.ndarray  # indices into fields.times
    step: np.timedelta64  # of the model
    weights: np.ndarray  # (H,) of area; missing cells count in no moment

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.fields, self.variables, self.dates, self.step)


def stored_statistics(cache: Path, source: Source) -> Statistics | None:
    """Return stored statistics if they are of the same data and dates."""
    stored = read_statistics(cache)
    return stored if stored and stored.fingerprint == source.fingerprint else None


def stored_as_trained(cache: Path, source: Source, numbers: Numbers) -> tuple[Statistics | None, np.ndarray]:
    """Return the statistics with which weights were trained, and the indices of their dates.

    The statistics are None if the files have changed since, and must then be computed again from these dates.
    Dates added to the data later have no effect.
    """
    stored = read_statistics(cache)
    if not stored or stored.numbers != numbers:
        return None, source.dates
    dates = np.flatnonzero(np.isin(source.fields.times, stored.dates))
    if len(dates) < len(stored.dates):
        logger.info(f"{cache}: {len(stored.dates) - len(dates)} of its dates are not in the data any more")
        return stored, dates
    return stored if stored.fingerprint == replace(source, dates=dates).fingerprint else None, dates


def as_trained(again: Statistics, variables: Sequence[str], numbers: Numbers) -> Statistics:
    """Return recomputed statistics with all digits of those with which weights were trained.

    Raises DataError if the fields of these dates have changed.
    """
    for name, values in again.numbers.items():
        for variable, now, then, std in zip(variables, values, numbers[name], numbers["std"], strict=True):
            if abs(now - then) > SAME * std:
                raise DataError(
                    "data.path: the training dates are not those that the weights were trained on: "
                    f"{name} of {variable} is {now:.9g} here and was {then:.9g}; take the data and the dates "
                    "that the run began with, or another job.dump_folder with checkpoint.initial_load_path"
                )
    logger.info("data.path: other files than before, with the same statistics")
    exact: dict[str, Any] = {name: np.asarray(values) for name, values in numbers.items()}
    return replace(again, **exact)


def fingerprint_of(fields: Archive, variables: Sequence[str], dates: np.ndarray, step: np.timedelta64) -> str:
    """Return a digest of names, dates, and the files' names, sizes and modification times.

    For a URL, which has no modification times, it uses the values of 16 evenly spaced dates instead.
    """
    digest = hashlib.sha256(repr((list(variables), int(step / np.timedelta64(1, "s")))).encode())
    digest.update(fields.times[dates].astype("datetime64[s]").tobytes())
    files = fields.files_state(variables)
    digest.update(files)
    for i in [] if files else evenly_spaced(dates, SAMPLED_DATES):
        digest.update(fields.read(int(i), variables).tobytes())
    return digest.hexdigest()


def sampled_pairs(source: Source, limit: int) -> np.ndarray:
    """Return at most `limit` of the dates (0: all) in pairs one model step apart, spread over all of them.

    The pairs are divided into equal parts, and each gives a random pair, of the hours of the day in turn:
    evenly spaced dates can all have the same hour.
    """
    dates, times = source.dates, source.fields.times
    if not limit or len(dates) <= limit:
        return dates
    later = np.searchsorted(times[dates], times[dates] + source.step)
    inside = later < len(dates)
    follows = times[dates[later[inside]]] == times[dates[inside]] + source.step
    firsts, seconds = dates[inside][follows], dates[later[inside]][follows]
    if not len(firsts):
        return dates  # which Statistics.from_sums refuses
    of_day = (times[firsts] - times[firsts].astype("datetime64[D]")).astype(int)
    hours, rng = np.unique(of_day), np.random.default_rng(0)
    stretches = np.array_split(np.arange(len(firsts)), min(len(firsts), max(1, limit // 2)))
    picked = []
    for number, stretch in enumerate(stretches):
        of_hour = stretch[of_day[stretch] == hours[number % len(hours)]]
        picked.append(rng.choice(of_hour if len(of_hour) else stretch))
    return np.union1d(firsts[picked], seconds[picked])


class Counting:
    """Summation over a part of the dates of a source, for a limited time per call."""

    def __init__(self, source: Source, own: np.ndarray, shift: np.ndarray) -> None:
        """own: indices of the dates that are counted here; the other date of a pair is read too."""
        times = source.fields.times
        before = np.flatnonzero(np.isin(times, times[own] - source.step))
        self.source, self.own, self.left = source, own, len(own)
        read = np.union1d(own, np.intersect1d(before, source.dates))
        self.fields = stream(source.fields, source.variables, read) if len(own) else iter(())
        self.sums = Sums.zeros(source, shift)
        # Fields of the last model step, none of which is empty.
        self.recent: dict[np.datetime64, np.ndarray] = {}

    def go_on(self, seconds: float = float("inf")) -> int:
        """Read for `seconds`, and at least one date; return the number of remaining dates."""
        until = time.monotonic() + seconds
        while self.left and (self._next() or time.monotonic() < until):
            pass
        return self.left

    def _next(self) -> bool:
        """Read a date; return True if it counts elsewhere."""
        i, field = next(self.fields)
        now, step = self.source.fields.times[i], self.source.step
        before = self.recent.get(now - step)
        self.recent = {date: earlier for date, earlier in self.recent.items() if date > now - step}
        counts = bool(np.isin(i, self.own))
        if counts:
            has_values = self.sums.add(now, field, before, self.source.weights, self.source.fields.path)
            self.left -= 1
        else:
            has_values = bool(np.isfinite(field).any(axis=(1, 2)).all())  # of every variable
        if has_values:
            self.recent[now] = field
        return not counts


def first_shift(source: Source) -> np.ndarray:
    """Return the means (V,) of the first valid date, which are subtracted before squaring."""
    first = source.fields.read(int(source.dates[0]), source.variables)
    valid = np.isfinite(first)
    total = np.where(valid, first, 0).sum(axis=(1, 2), dtype=np.float64)
    return total / np.maximum(valid.sum(axis=(1, 2)), 1)


def compute(source: Source) -> Statistics:
    """Compute the statistics in this process only."""
    counting = Counting(source, source.dates, first_shift(source))
    counting.go_on()
    return Statistics.from_sums(counting.sums, source.fingerprint)
