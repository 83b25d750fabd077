"""Statistics of the training period: what they are, when stored ones serve, the counting of a rank's part.

Shapes: V variables, H latitudes, W longitudes, n dates.
"""

import hashlib
import logging
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from archives.grid import Grid
from datasets.plausibility import say_findings, say_missing
from datasets.sums import Sums, shares_of
from durable_files import replacing
from errors import DataError

logger = logging.getLogger(__name__)
Numbers = dict[str, list[float]]  # mean, std, change_std -> one number a variable
BLOCK_BYTES = 2**28  # of fields read at once while streaming


class Fields(Protocol):
    """What can be read by date: an archive, or its dates held in memory."""

    times: np.ndarray
    grid: Grid

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray: ...

    def files_state(self, variables: Sequence[str]) -> bytes: ...

    def file_marks(self, variables: Sequence[str]) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Statistics:
    """Area-weighted moments of each variable over the training period, in its own units."""

    mean: np.ndarray  # (V,)
    std: np.ndarray  # (V,)
    change_std: np.ndarray  # (V,) standard deviation of the change over one model step
    mean_field: np.ndarray  # (V, H, W) float32: the climatology of the training period
    empty_dates: np.ndarray  # datetime64[s], those on which a variable has no value at all
    dates: np.ndarray  # (n,) datetime64[s], all that were counted
    fingerprint: str  # of what all this was computed from
    # what they came from, to go on from when dates are added, and marks of the files that were read then
    sums: Sums | None = None
    files: np.ndarray | None = None

    @classmethod
    def of(cls, sums: Sums, fingerprint: str) -> "Statistics":
        """DataError: no date, or no two of them a step apart, have values of all variables. Says what is
        unlikely.
        """
        looked = sums.table("looked")
        say_findings(sums.found)
        say_missing(sums.variables, looked, sums.table("missing"))
        for name, what in (("state", "date has"), ("change", "two dates a model step apart have")):
            if not sums.table(name)[..., 0].any():
                why = f"no {what} values of all of them among the {len(looked)} that count"
                raise DataError(f"data.variables = {sums.variables}: {why}; look at data.train_period")
        mean, std, change_std = sums.moments()
        for v in np.flatnonzero(sums.constant()):
            logger.warning(f"data.path: {sums.variables[v]} is {mean[v]:g} in all cells on all dates")
        return cls(mean, std, change_std, sums.mean_field(), sums.empty_dates, looked, fingerprint, sums)

    @property
    def numbers(self) -> Numbers:
        """What a model's weights were trained with: the three moments, to the last digit."""
        return {name: getattr(self, name).tolist() for name in ("mean", "std", "change_std")}

    def empty_in(self, times: np.ndarray) -> np.ndarray:
        """Indices of the dates `times` (T,) that have no value of some variable."""
        return np.flatnonzero(np.isin(times, self.empty_dates))

    def write(self, path: Path) -> None:
        arrays = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "sums"}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        if self.sums:  # those over single cells follow from the mean field
            arrays |= {f"sums.{name}": array for name, array in self.sums.arrays().items() if name != "total"}
        with replacing(path) as beside:
            np.savez(beside, **arrays)


DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def read_statistics(path: Path) -> Statistics | None:
    """None where there are none, or the file is damaged: then it says so."""
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        logger.warning("%s: is damaged, or of another version (%s)", path, type(error).__name__)
        return None


def _read(path: Path) -> Statistics:
    with np.load(path) as stored:
        return _from_arrays({name: stored[name] for name in stored.files})


def _from_arrays(arrays: dict[str, np.ndarray]) -> Statistics:
    kept = {name.removeprefix("sums."): array for name, array in arrays.items() if name.startswith("sums.")}
    if kept:
        kept["total"] = arrays["mean_field"].astype(np.float64) * kept["count"]
    own = {name: arrays[name] for name in arrays if not name.startswith("sums.")}
    own |= {"fingerprint": str(arrays["fingerprint"])}
    return Statistics(**own, sums=Sums.of_arrays(kept) if kept else None)  # type: ignore[reportArgumentType]


@dataclass(frozen=True, eq=False)
class Source:
    """What statistics are computed from."""

    fields: Fields
    variables: list[str]
    dates: np.ndarray  # indices into fields.times
    step: np.timedelta64  # of the model
    weights: np.ndarray  # (H,) of area; missing cells count in no moment

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.fields, self.variables, self.dates, self.step)


def stored_statistics(caches: Sequence[Path], source: Source) -> Statistics | None:
    """The first that are of the same data and dates."""
    fingerprint = source.fingerprint
    for cache in caches:
        stored = read_statistics(cache)
        if stored and stored.fingerprint == fingerprint:
            return stored
    return None


def stored_as_trained(cache: Path, source: Source, numbers: Numbers) -> tuple[Statistics | None, np.ndarray]:
    """The statistics that weights were trained with, whatever dates have come since, where the files are as
    they were; else None, and the dates (indices) to compute them from again.
    """
    stored = read_statistics(cache)
    if not stored or stored.numbers != numbers:
        return None, source.dates
    dates = np.flatnonzero(np.isin(source.fields.times, stored.dates))
    if len(dates) < len(stored.dates):
        logger.info(f"{cache}: {len(stored.dates) - len(dates)} of its dates are not in the data any more")
        return stored, dates
    return stored if stored.fingerprint == replace(source, dates=dates).fingerprint else None, dates


SAME = 1e-9  # relative: of the same fields another processor adds up other last digits
WAY_OUT = (
    "take the data and the dates that the run began with, or start a new one: another job.dump_folder, with "
    "checkpoint.initial_load_path for its weights"
)


def as_trained(again: Statistics, variables: Sequence[str], numbers: Numbers) -> Statistics:
    """Statistics that were computed again, with the very digits that weights were trained with.

    DataError: the fields of these dates are others now.
    """
    if problem := _difference(variables, again.numbers, numbers):
        raise DataError(f"data.path: {problem}; {WAY_OUT}")
    logger.info("data.path: other files than before, with the same statistics")
    exact: dict[str, Any] = {name: np.asarray(values) for name, values in numbers.items()}
    return replace(again, **exact)


def _difference(variables: Sequence[str], now: Numbers, then: Numbers) -> str:
    """The first moment that is not what it was; "" where all are."""
    for name, values in now.items():
        for variable, ours, theirs, scale in zip(variables, values, then[name], then["std"], strict=True):
            if abs(ours - theirs) > SAME * scale:
                what = f"{name} of {variable} is {ours:.9g} here and was {theirs:.9g}"
                return f"the training dates are not those that the weights were trained on: {what}"
    return ""


SAMPLED = 16  # dates whose values stand for all where files say nothing of themselves


def fingerprint_of(fields: Fields, variables: Sequence[str], dates: np.ndarray, step: np.timedelta64) -> str:
    """Of names, dates, and of the files' names, sizes and times of change, which cost no reading.

    Through a URL nobody knows these: there it is the values of 16 dates, evenly spaced, so that a change of
    more than a fifteenth of the period is found for certain.
    """
    digest = hashlib.sha256(repr((list(variables), int(step / np.timedelta64(1, "s")))).encode())
    digest.update(fields.times[dates].astype("datetime64[s]").tobytes())
    files = fields.files_state(variables)
    digest.update(files)
    places = np.linspace(0, len(dates) - 1, SAMPLED).round().astype(int) if not files else []
    for i in dates[np.unique(places).astype(int)]:
        digest.update(fields.read_block(int(i), int(i) + 1, variables).tobytes())
    return digest.hexdigest()


def sampled_pairs(source: Source, limit: int) -> np.ndarray:
    """At most `limit` of the dates (0: all) in pairs one model step apart, spread over all of them.

    One from each of equal stretches, at random in it, of the hours of the day in turn: evenly spaced ones can
    all be of the same hour.
    """
    dates, times = source.dates, source.fields.times
    if not limit or len(dates) <= limit:
        return dates
    later = np.searchsorted(times[dates], times[dates] + source.step)
    inside = later < len(dates)
    follows = times[dates[later[inside]]] == times[dates[inside]] + source.step
    firsts, seconds = dates[inside][follows], dates[later[inside]][follows]
    if not len(firsts):
        return dates  # and Statistics.of says so
    of_day = (times[firsts] - times[firsts].astype("datetime64[D]")).astype(int)
    hours, rng = np.unique(of_day), np.random.default_rng(0)
    stretches = np.array_split(np.arange(len(firsts)), min(len(firsts), max(1, limit // 2)))
    picked = []
    for number, stretch in enumerate(stretches):
        wanted = stretch[of_day[stretch] == hours[number % len(hours)]]
        picked.append(rng.choice(wanted if len(wanted) else stretch))
    return np.union1d(firsts[picked], seconds[picked])


def sums_to_extend(cache: Path, source: Source) -> Sums | None:
    """Those of earlier, fewer dates: where all files that were read then are as they were, and 16 dates."""
    try:
        stored = _read(cache)
    except DAMAGE:
        return None
    times = source.fields.times[source.dates]
    if not stored.sums or stored.files is None or not np.isin(stored.dates, times).all():
        return None
    if not len(stored.files) or not np.isin(stored.files, source.fields.file_marks(source.variables)).all():
        return None
    added = np.setdiff1d(times, stored.dates)
    if np.isin(added + source.step, stored.dates).any():  # a pair of theirs was not counted
        return None
    for row in np.unique(np.linspace(0, len(stored.dates) - 1, SAMPLED).round().astype(int)):
        if not _is_as_it_was(source, stored.sums, row):
            return None
    return stored.sums


def _is_as_it_was(source: Source, sums: Sums, row: int) -> bool:
    i = int(np.searchsorted(source.fields.times, sums.looked[row]))
    fields = source.fields.read_block(i, i + 1, source.variables)[0]
    shares = shares_of(sums.looked[row], sums.variables, fields, sums.shift, source.weights)
    return np.array_equal([one.moments for one in shares], sums.state[row])


class Counting:
    """Some dates of a source, read and added up a while at a time."""

    def __init__(self, source: Source, own: np.ndarray, shift: np.ndarray) -> None:
        """own: indices of the dates that count here. The other date of a pair may be another's: it is read
        too.
        """
        times = source.fields.times
        before = np.flatnonzero(np.isin(times, times[own] - source.step))
        self.source, self.own, self.left, self.num_counted = source, own, len(own), 0
        read = np.union1d(own, np.intersect1d(before, source.dates))
        self.fields = stream(source.fields, source.variables, read) if len(own) else iter(())
        self.sums = Sums.around(source.variables, shift, source.fields.grid.shape)
        self.recent: dict[np.datetime64, np.ndarray] = {}  # fields of the last model step

    def go_on(self, seconds: float = float("inf")) -> int:
        """Reads for so long, and at least one date; how many are left."""
        until = time.monotonic() + seconds
        while self.left and (self._next() or time.monotonic() < until):
            pass
        return self.left

    def _next(self) -> bool:
        """Whether it was a date of another's."""
        i, field = next(self.fields)
        now, step = self.source.fields.times[i], self.source.step
        self.recent = {date: kept for date, kept in self.recent.items() if date >= now - step} | {now: field}
        if counts := bool(np.isin(i, self.own)):
            self.sums.add(now, field, self.recent.get(now - step), self.source.weights)
            self.left, self.num_counted = self.left - 1, self.num_counted + 1
        return not counts


def first_shift(source: Source) -> np.ndarray:
    """(V,): the means of the first date that counts, around which all squares are taken."""
    first = source.fields.read_block(int(source.dates[0]), int(source.dates[0]) + 1, source.variables)[0]
    valid = np.isfinite(first)
    total = np.where(valid, first, 0).sum(axis=(1, 2), dtype=np.float64)
    return total / np.maximum(valid.sum(axis=(1, 2)), 1)


def compute(source: Source) -> Statistics:
    """By this process alone."""
    counting = Counting(source, source.dates, first_shift(source))
    counting.go_on()
    return Statistics.of(counting.sums, source.fingerprint)


def stream(archive: Fields, variables: Sequence[str], dates: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(index, field (V, H, W)) for each of the ascending dates, read in runs of neighbours."""
    first = archive.read_block(int(dates[0]), int(dates[0]) + 1, variables)
    longest = max(1, BLOCK_BYTES // first.nbytes)
    for run in np.split(dates, np.flatnonzero(np.diff(dates) != 1) + 1):
        for part in np.split(run, range(longest, len(run), longest)):
            block = archive.read_block(int(part[0]), int(part[-1]) + 1, variables)
            yield from zip(part.tolist(), block, strict=True)


def known_empty_dates(archive: Fields, variables: Sequence[str], dates: np.ndarray) -> np.ndarray:
    """Indices of the dates on which one of the variables has no value at all, as far as looking is cheap.

    Only fields in memory are looked at. Elsewhere such a date costs its reading: masks keep it out of the
    scores.
    """
    if not (getattr(archive, "in_memory", False) and len(dates)):
        return np.zeros(0, int)
    found = [
        i for i, field in stream(archive, variables, dates) if not np.isfinite(field).any(axis=(1, 2)).all()
    ]
    return np.asarray(found, int)
