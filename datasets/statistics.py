"""Statistics of the training period: sums over the moments of each date, which conversion has written.

Rows of moments are added in the order of the dates, in float64, so that statistics do not depend on the
number of ranks, threads or attempts. Shapes: V variables, H latitudes, W longitudes, n dates.
"""

import hashlib
import logging
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from config import RANDOM
from datasets.archive import BLOCK_BYTES, Archive, TrainingStore, consecutive, evenly_spaced, sums_file
from datasets.grid import area_weights, sum_moments
from datasets.remote import describe_error
from datasets.variables import CONVERSIONS, UnitConversion, units, usual_range
from errors import DataError
from jobs.durable_files import replacing

logger = logging.getLogger(__name__)
Numbers = dict[str, list[float]]  # mean, std, change_std -> one number for each variable
ROUNDING = 1e-7  # of float32: a smaller relative deviation is a constant
# Columns of a row: cells without a value, infinite ones, ones outside the variable's range; weight, first and
# second moment of the state (around the shift) and of its change over a model step.
MISSING, IMPLAUSIBLE, STATE, CHANGE, NUM_COLUMNS = 0, slice(1, 3), slice(3, 6), slice(6, 9), 9
PAIRS = 1000  # dates of which the change is computed where the store has that of another step
# Of sums, or of fields, that a start reads for the mean field; of more, evenly spaced ones.
MOST_BYTES = 2**34
DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)
# Of anything in the units of analyses; NetCDF fills with 9.96921e36, others with 1e20 and 1e30.
LARGEST = 1e15
FILLS = (-9999.0, -999.0, -999.9, 9999.0, -32767.0, -32768.0)  # customary ones that could be values
SAME = 1e-9  # relative tolerance: processors differ in the last digits of sums


# -- implausible values: impossible ones are refused, unlikely ones counted and logged once


def refuse_fills(fields: np.ndarray, variables: Sequence[str], date: Any, path: str) -> None:
    """Raise DataError naming path, variable, value and date if fields (V, H, W) have an undeclared fill."""
    for values, name in zip(fields, variables, strict=True):
        fill = undeclared_fill(values[np.isfinite(values)], name)
        if fill is not None:
            count = np.count_nonzero(values == fill)
            what = f"{name} is {fill:g} in {count} cells at {date}: a missing value that is not declared"
            raise DataError(f"{path!r}: {what}; give the variable the attribute _FillValue = {fill:g}")


def undeclared_fill(finite: np.ndarray, name: str) -> float | None:
    """Return a finite value that can only be an undeclared fill value, None if there is none: a value beyond
    all variables, or a customary fill value outside the range of a known variable.
    """
    if not finite.size:
        return None
    low, high = finite.min(), finite.max()
    if max(abs(low), abs(high)) > LARGEST:
        return low if abs(low) > LARGEST else high
    least, most = usual_range(name)
    if least <= low and high <= most:
        return None
    # Unchanged, or with its units converted: -9999 degC in K.
    conversions = [UnitConversion(), *(c for (_, ours), c in CONVERSIONS.items() if ours == units(name))]
    fills = [float(np.float32(fill * c.factor + c.offset)) for c in conversions for fill in FILLS]
    known = [value for value in fills if low <= value <= high and not least <= value <= most]
    return next((value for value in known if np.count_nonzero(finite == value) > 1), None)


def implausible_kinds(name: str) -> tuple[str, str]:
    """Return the names of infinite values and of those outside the usual range: "outside 170 to 340 K"."""
    low, high = usual_range(name)
    return "infinite", f"outside {low:g} to {high:g} {units(name)}"


def check_static(static: dict[str, np.ndarray], path: str) -> None:
    """Log the fraction of missing cells of constant fields (H, W), which are set to the mean of the others.
    Raises DataError for infinite values, undeclared fill values and a field without a value.
    """
    for name, field in static.items():
        refuse_fills(field[None], [name], "all dates", path)
        if infinite := np.isinf(field).sum():
            raise DataError(f"{path!r}: {name} is infinite in {infinite} cells; give them a value, or NaN")
        missing = np.isnan(field).mean()
        if missing == 1:
            raise DataError(f"{path!r}: {name} is missing in all cells; leave it out, or give it values")
        if missing:
            logger.warning("%s: %.1f %% of its cells are missing and get the mean", name, 100 * missing)


# -- sums of each date, and statistics of them


def mean_and_std(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation, 1 of a constant, from weight, first and second moment (V, 3)."""
    weight, first, second = sums.T
    mean = first / weight
    variance = np.maximum(second / weight - mean**2, 0)
    return mean, np.where(variance > 0, np.sqrt(variance), 1.0)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Area-weighted moments of each variable over the training period, in its units."""

    mean: np.ndarray  # (V,)
    std: np.ndarray  # (V,)
    change_std: np.ndarray  # (V,) standard deviation of the change over one model step
    mean_field: np.ndarray  # (V, H, W) float32: the climatology of the training period
    dates: np.ndarray  # (n,) datetime64[s], of the training period
    fingerprint: str  # of the data, dates and variables
    missing: np.ndarray | None = None  # (n, V) cells without a value; None: of a checkpoint, not known

    @classmethod
    def of(
        cls, archive: TrainingStore, variables: Sequence[str], dates: np.ndarray, step: np.timedelta64
    ) -> "Statistics":
        """Compute statistics over dates (indices into archive.times) on which all variables have values, and
        log what is implausible. Raises DataError if there is none, or no two of them a step apart.
        """
        names, times = list(variables), archive.times[dates]
        key, among = f"data.variables = {names}", f"the {len(dates)} that count; look at data.train_period"
        rows = np.ascontiguousarray(archive.rows(names)[dates])
        shift = np.array([archive.shifts[name] for name in names])
        missing = rows[:, :, MISSING].astype(int)
        for name, columns in zip(names, rows[:, :, IMPLAUSIBLE].transpose(1, 2, 0), strict=True):
            for kind, counts in zip(implausible_kinds(name), columns, strict=True):
                if counts.any():
                    first = f"the first at {times[np.flatnonzero(counts)[0]]}"
                    logger.warning(f"data.path: {name}: {int(counts.sum())} values {kind}, {first}")
        is_complete = (missing < archive.grid.shape[0] * archive.grid.shape[1]).all(axis=1)
        if not is_complete.all():
            first = f"{times[~is_complete][0]}; no sample starts from them"
            logger.warning(f"{(~is_complete).sum()} dates have no value of a variable, the first {first}")
        if not is_complete.any():
            raise DataError(f"{key}: no date has values of all of them among {among}")
        rows[~is_complete] = 0
        sums = rows[:, :, STATE].sum(axis=0)
        mean, std = mean_and_std(sums)

        # The change over a step, on dates whose date before is one of these, too.
        is_pair = is_complete & np.isin(times - step, times[is_complete])
        if not is_pair.any():
            reason = f"no two dates a model step apart have values of all of them among {among}"
            raise DataError(f"{key}: {reason}")
        if archive.change_step == step:
            rows[~is_pair, :, CHANGE] = 0
            changes = rows[:, :, CHANGE].sum(axis=0)
        else:
            changes = read_changes(archive, names, dates[is_pair], step)
        change_std = mean_and_std(changes)[1]

        weight, first, second = sums.T
        is_constant = second / weight - (first / weight) ** 2 <= (ROUNDING * shift) ** 2
        for v in np.flatnonzero(is_constant):
            logger.warning(f"data.path: {names[v]} is {shift[v] + mean[v]:g} in all cells on all dates")
        text = repr((names, int(step / np.timedelta64(1, "s"))))
        digest = hashlib.sha256(text.encode() + times.tobytes() + rows.tobytes()).hexdigest()
        mean = shift + mean

        # The mean field: of whole shards, by the sums that conversion has written.
        total, count = (np.zeros((len(names), *archive.grid.shape), dtype) for dtype in (float, np.int64))
        if archive.path == RANDOM:  # of noise the mean is the same in all cells
            field = np.broadcast_to(mean[:, None, None], total.shape).astype(np.float32)
            return cls(mean, std, change_std, field, times, digest, missing)
        size, is_left = archive.shard_dates, np.zeros(len(archive.times), bool)
        is_left[dates[is_complete]] = True
        starts = [start for start in range(0, len(is_left), size) if is_left[start : start + size].all()]
        for start in evenly_spaced(np.array(starts, int), max(1, MOST_BYTES // (8 * total.size))).tolist():
            for v, name in enumerate(names):
                path = sums_file(Path(archive.path), name, start)
                try:
                    with np.load(path) as stored:
                        total[v] += stored["total"]
                        count[v] += stored["count"]
                except DAMAGE as error:
                    reason = f"cannot be read ({describe_error(error)}); convert the data again"
                    raise DataError(f"{path}: {reason}") from None
        # -- and of dates in shards that the period cuts, a limited number of them
        for start in starts:
            is_left[start : start + size] = False
        left = evenly_spaced(np.flatnonzero(is_left), max(1, MOST_BYTES // (4 * total.size)))
        longest = max(1, BLOCK_BYTES // (4 * total.size))
        for run in consecutive(left):
            for some in np.split(run, range(longest, len(run), longest)):
                for fields in archive.read_block(int(some[0]), int(some[-1]) + 1, names):
                    valid = np.isfinite(fields)
                    np.add(total, fields, out=total, where=valid)
                    count += valid
        with np.errstate(invalid="ignore", divide="ignore"):
            field = np.where(count > 0, total / count, mean[:, None, None]).astype(np.float32)
        return cls(mean, std, change_std, field, times, digest, missing)

    @property
    def numbers(self) -> Numbers:
        """Moments with which a model's weights were trained, all digits."""
        return {name: getattr(self, name).tolist() for name in ("mean", "std", "change_std")}


def read_changes(
    archive: Archive, variables: Sequence[str], dates: np.ndarray, step: np.timedelta64
) -> np.ndarray:
    """Return weight, first and second moment (V, 3) of the change up to at most PAIRS of the dates: of equal
    parts a random one each, of the hours of the day in turn, which evenly spaced dates need not have.
    """
    times, area = archive.times, area_weights(archive.grid.latitude)
    of_day = (times[dates] - times[dates].astype("datetime64[D]")).astype(int)
    hours, rng, sums = np.unique(of_day), np.random.default_rng(0), np.zeros((len(variables), 3))
    stretches = np.array_split(np.arange(len(dates)), min(len(dates), PAIRS))
    for number, stretch in enumerate(stretches):
        of_hour = stretch[of_day[stretch] == hours[number % len(hours)]]
        date = int(dates[rng.choice(of_hour if len(of_hour) else stretch)])
        now, before = (archive.read(i, variables) for i in (date, archive.index(times[date] - step)))
        sums += sum_moments(now, before, area)
    return sums


# -- the statistics of a run, in its folder


def load_statistics(
    path: Path,
    archive: Archive,
    variables: Sequence[str],
    dates: np.ndarray,
    step: np.timedelta64,
    trained: Numbers | None = None,
) -> Statistics:
    """Return the statistics of a run, and write its dates and numbers to `path` at the first start.

    trained: the statistics with which the run's weights were trained, of which all digits are kept. Dates
    that were added to the data since have no effect then. Raises DataError if the fields of the run's dates
    have changed, or are gone.
    """
    assert isinstance(archive, TrainingStore), "runs train from stores"
    stored: dict[str, np.ndarray] = {}
    if path.is_dir():
        raise DataError(f"{path}: is a folder; remove it, and the next start computes the statistics again")
    # -- the dates and numbers of the run's first start
    try:
        with np.load(path) as file:
            stored = {name: file[name] for name in ("mean", "std", "change_std", "dates")}
    except FileNotFoundError:
        pass
    except DAMAGE as error:
        logger.warning("%s: is damaged, or of another version (%s)", path, type(error).__name__)
    other = "another job.dump_folder with checkpoint.initial_load_path"
    if trained and stored and {name: stored[name].tolist() for name in trained} == trained:
        dates = np.flatnonzero(np.isin(archive.times, stored["dates"]))
        if len(absent := np.setdiff1d(stored["dates"], archive.times)):
            reason = f"lacks {len(absent)} dates that the run was trained on, the first {absent[0]}"
            raise DataError(f"data.path {reason}; restore them, or take {other}")
    # -- the numbers of the same dates now: sums that conversion has written, so this takes no reading
    statistics = Statistics.of(archive, variables, dates, step)
    if not trained:
        mean, std, change_std = statistics.mean, statistics.std, statistics.change_std
        with replacing(path) as partial:
            np.savez(partial, dates=statistics.dates, mean=mean, std=std, change_std=change_std)
        return statistics
    # -- the weights mean what they were trained with: other data under the same path are refused
    for name, values in statistics.numbers.items():
        for variable, now, then, std in zip(variables, values, trained[name], trained["std"], strict=True):
            if abs(now - then) > SAME * std:
                raise DataError(
                    "data.path: the training dates are not those that the weights were trained on: "
                    f"{name} of {variable} is {now:.9g} here and was {then:.9g}; take the data and the dates "
                    f"that the run began with, or {other}"
                )
    mean, std, change_std = (np.asarray(trained[name]) for name in ("mean", "std", "change_std"))
    return replace(statistics, mean=mean, std=std, change_std=change_std)
