"""Climatology by WeatherBench2's recipe, stored in its schema, read back, and scored as a forecast.

The mean of a day of year and hour of day over all years, smoothed over days by a triangular window of 61 days
(weights 0, 1/30 .. 1 .. 1/30, 0) that wraps around the year; in years of 365 days the last day also counts as
day 366. If the dates of an hour of the day do not cover the year, it is the mean by hour of day, without
`dayofyear`. Shapes: V variables, H latitudes, W longitudes.
Source: WeatherBench2, scripts/compute_climatology.py and utils.compute_hourly_stat.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch.distributed as dist
import zarr

from datasets.archive import Archive, consecutive
from datasets.fields import Field, NamedFields
from datasets.remote import NO_OPTIONS, Access
from datasets.source import CLIMATOLOGY_ROLES, find_files, open_fields, open_files
from datasets.variables import split_name
from errors import DataError
from parallelisms.mesh import from_first_rank
from verification.stores import all_levels, create_store, open_own_store, state_of_files

logger = logging.getLogger("rossby")
DAYS, WINDOW = 366, 61
SUMS_BYTES = 2**31  # of sums in memory at once; an hour of a variable at least
KEPT_BYTES = 2**28  # of fields of an opened climatology
BLOCK_BYTES = 2**28  # of analyses read at once, and of the cells that are smoothed at once
CHUNK_BYTES = 2**18  # of a stored chunk: some days of one level
FINGERPRINT = "computed_from"  # attribute of a store
SAMPLED_DATES = 64  # of which files are compared with those of a stored climatology
DONE = "done"  # folder in a store that is not complete, with a file for each hour of a variable


def smoothing() -> np.ndarray:
    """Return the weight (366, 366) of day j in day i, a triangle from 1 to 0 round the year."""
    days, half = np.arange(DAYS), WINDOW // 2
    distance = np.abs(days[:, None] - days)
    distance = np.minimum(distance, DAYS - distance)
    return np.linspace(0, 1, half + 1)[half - np.minimum(distance, half)]


def compute_climatology(
    archive: Archive, variables: Sequence[str], dates: np.ndarray, path: str | Path
) -> None:
    """Compute the climatology of `dates` (positions in archive.times) into a Zarr store at `path`, unless one
    of the same data is there; an unfinished one is completed.

    `hour` has the hours of the dates. Means skip missing values. Called by all ranks together, which share
    the work.
    """
    times, grid, shape = archive.times[dates], archive.grid, archive.grid.shape
    # By day of the year, if each has dates within half a window at each hour: others would be NaN.
    index = pd.DatetimeIndex(times)
    days = pd.crosstab(index.hour, index.day_of_year).reindex(columns=np.arange(1, DAYS + 1), fill_value=0)
    hours, by_day = days.index.tolist(), bool((days.to_numpy() @ smoothing() > 0).all())
    target, unfinished = Path(path), Path(f"{path}.incomplete")
    marks = unfinished / DONE
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    on_first_rank = from_first_rank if dist.is_initialized() else lambda compute: compute()

    def begin() -> bool:
        """Return False if nothing is to be computed; otherwise create or continue the unfinished store."""
        # A digest of what it is computed from: names, grid, dates, and the state of the files of some of
        # them; of a URL the values of three dates.
        selected = [dict(archive.find(name)[0][0].selected) for name in variables]
        digest = hashlib.sha256(repr((archive.path, list(variables), selected)).encode())
        digest.update(times.tobytes() + grid.latitude.tobytes() + grid.longitude.tobytes())
        if "://" in archive.path:
            for date in dates[[0, len(dates) // 2, -1]]:
                digest.update(archive.read(int(date), variables).tobytes())
        else:
            for time in times[np.linspace(0, len(times) - 1, SAMPLED_DATES).astype(int)]:
                digest.update(state_of_files(archive, variables, time).encode())
        if open_own_store(target).attrs.get(FINGERPRINT) == digest.hexdigest():
            return False
        logger.info("computing the climatology of the training period, once, into %s", target)
        if not marks.is_dir() or open_own_store(unfinished).attrs.get(FINGERPRINT) != digest.hexdigest():
            axes = {"hour": np.asarray(hours)} | ({"dayofyear": np.arange(1, DAYS + 1)} if by_day else {})
            some_days = max(1, min(DAYS, CHUNK_BYTES // (4 * shape[0] * shape[1])))
            recipe = f"WeatherBench2, triangular window of {WINDOW} days" if by_day else "mean by hour of day"
            period = f"{len(times)} dates, {str(times[0])[:16]} to {str(times[-1])[:16]}"
            attributes = {"period": period, "recipe": recipe, FINGERPRINT: digest.hexdigest()}
            own_units = {name: archive.units(name) for name in variables}
            chunks = {"hour": 1, "dayofyear": some_days, "level": 1}
            create_store(unfinished, variables, grid, axes, chunks, attributes, own_units)
            marks.mkdir()
        return True

    if not on_first_rank(begin):
        return

    # -- groups of hours and variables: all hours of as many variables as fit in memory, or one hour; at least
    # as many groups as ranks, if there are enough variables
    smooth = smoothing() if by_day else np.ones((1, 1))
    size = SUMS_BYTES // (10 * len(smooth) * shape[0] * shape[1])  # a float64 and an int16 a cell and day
    together = [hours] if size >= len(hours) else [[hour] for hour in hours]
    width = max(1, min(size // len(together[0]), -(-len(variables) * len(together) // ranks)))
    groups = list(product(together, range(0, len(variables), width)))
    store, levels = zarr.open_group(unfinished, mode="r+"), all_levels(variables)
    for some_hours, start in groups[rank::ranks]:
        some = list(variables[start : start + width])
        pairs = [(h, v) for h, v in product(some_hours, some) if not (marks / f"{h}-{v}").exists()]
        if not pairs:
            continue
        total, count = day_sums(archive, some, dates, some_hours, by_day)
        for hour, variable in pairs:
            h, v = some_hours.index(hour), some.index(variable)
            mean = np.empty((len(smooth), *shape), np.float32)
            num_rows = max(1, BLOCK_BYTES // (8 * len(smooth) * shape[1]))
            for first in range(0, shape[0], num_rows):  # a product of all cells has gigabytes
                rows = slice(first, first + num_rows)
                sums, numbers = (array[h, v, :, rows].reshape(len(smooth), -1) for array in (total, count))
                with np.errstate(invalid="ignore"):
                    smoothed = (smooth @ sums) / (smooth @ numbers)
                mean[:, rows] = smoothed.reshape(len(smooth), -1, shape[1])
            name, level = split_name(variable)
            array: Any = store[name]
            at: list[Any] = [hours.index(hour), slice(None)] if by_day else [hours.index(hour)]
            at += [] if level is None else [levels.index(level)]
            array[tuple(at)] = mean if by_day else mean[0]
            (marks / f"{hour}-{variable}").touch()

    def finish() -> None:
        shutil.rmtree(marks)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(unfinished, target)

    if ranks > 1:
        dist.barrier()
    on_first_rank(finish)


def day_sums(
    archive: Archive, variables: Sequence[str], dates: np.ndarray, hours: Sequence[int], by_day: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return sums float64 and numbers of values int16 in one pass over the dates: (hours, V, 366, H, W) by
    day of the year, where the last day of a short year counts for both; (hours, V, 1, H, W) over all days.
    """
    shape = (len(hours), len(variables), DAYS if by_day else 1, *archive.grid.shape)
    total, count = np.zeros(shape), np.zeros(shape, np.int16)
    wanted = dates[np.isin(pd.DatetimeIndex(archive.times[dates]).hour, hours)]
    # Dates next to each other are read as blocks, because chunks of analyses have many dates.
    longest = max(1, BLOCK_BYTES // (4 * len(variables) * archive.grid.shape[0] * archive.grid.shape[1]))
    for run in consecutive(wanted):
        for some in np.split(run, range(longest, len(run), longest)):
            block = archive.read_block(int(some[0]), int(some[-1]) + 1, variables)
            for time, field in zip(pd.DatetimeIndex(archive.times[some]), block, strict=True):
                valid, h = np.isfinite(field), hours.index(time.hour)
                day = time.day_of_year - 1 if by_day else 0
                total[h, :, day] += np.where(valid, field, 0)
                count[h, :, day] += valid
                if by_day and day == DAYS - 2 and not time.is_leap_year:
                    total[h, :, -1] += np.where(valid, field, 0)
                    count[h, :, -1] += valid
    return total, count


class Climatology(NamedFields):
    """A stored climatology, by hour and day of year, or by one of them."""

    def __init__(self, path: str, fields: Sequence[Field]) -> None:
        """fields: with labels of hours and days of the year. Raises DataError if a label occurs twice."""
        super().__init__(path, fields)
        self.rows: dict[str, dict[int, int]] = {}  # axis -> label -> position
        for field in fields:
            for axis, labels in field.labels.items():
                rows = {label: row for row, label in enumerate(labels.tolist())}
                if len(rows) < len(labels) or self.rows.setdefault(axis, rows) != rows:
                    raise DataError(f"{path!r}: its coordinate {axis} does not label each of its fields once")
        # An ACC, damped persistence and the climatology as a forecast need the same fields.
        size = 4 * len(self.variables) * self.grid.shape[0] * self.grid.shape[1]
        self._read = lru_cache(max(2, KEPT_BYTES // size))(
            lambda variables, rows: self.read_fields(
                variables, ("hour", "dayofyear"), {axis: slice(row, row + 1) for axis, row in rows}
            )[0, 0]
        )

    def _rows_of(self, time: np.datetime64) -> dict[str, int | None]:
        stamp = pd.Timestamp(time)
        labels = {"hour": stamp.hour, "dayofyear": int(stamp.day_of_year)}
        return {axis: rows.get(labels[axis]) for axis, rows in self.rows.items()}

    def has(self, time: np.datetime64) -> bool:
        """Return True if it has the hour and the day of year of a date."""
        return None not in self._rows_of(time).values()

    def field(self, time: np.datetime64, variables: Sequence[str]) -> np.ndarray:
        """Return the mean (V, H, W) float32 for the hour and day of year of a date. Raises DataError for a
        date or a variable that it lacks.
        """
        rows = self._rows_of(time)
        for axis in [axis for axis, row in rows.items() if row is None]:
            raise DataError(f"{self.path!r} has no climatology of {time}: it lacks its {axis}")
        return self._read(tuple(variables), tuple(rows.items()))

    @cached_property
    def state(self) -> str:
        """The state of its files when it was first asked for."""
        return state_of_files(self, self.variables)


def open_climatology(path: str, access: Access = NO_OPTIONS) -> Climatology:
    """Open a climatology in WeatherBench2's schema. Raises DataError for another schema."""
    file_path, *more = find_files(path)
    if more:
        raise DataError(f"{path!r} has {len(more) + 1} files: name one climatology, such as {file_path!r}")
    opened, _ = open_fields(file_path, None, access, CLIMATOLOGY_ROLES)
    fields = [field for field in opened if {"hour", "dayofyear"} & set(field.roles)]
    if not fields:
        raise DataError(f"{path!r} is not a climatology: no variable has a dimension hour or dayofyear")
    about = open_files(file_path, access)[0].attrs
    logger.info("climatology: %s, of %s", about.get("recipe", path), about.get("period", "dates not named"))
    return Climatology(path, fields)
