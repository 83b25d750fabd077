"""Climatology by WeatherBench2's recipe, stored in its schema, read back, and scored as a forecast.

The mean of a day of year and hour of day over all years, smoothed over days by a triangular window of 61 days
(weights 0, 1/30 .. 1 .. 1/30, 0) that goes round the year; years of 365 days lend their last day to day 366.
Computed a group of variables at a time, so that memory depends neither on the number of years nor on that of
variables. Where the analyses cover less than a year of days there is no annual cycle to be had: then it is
the mean by hour of day, without `dayofyear`. Shapes: V variables, H latitudes, W longitudes.
Source: WeatherBench2, scripts/compute_climatology.py and utils.compute_hourly_stat.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import zarr

from datasets.era5 import Archive, find_files
from datasets.files import open_file
from datasets.grid import Grid
from datasets.layouts import StoredField, coordinate_role, stored_fields
from datasets.normalization import stream
from datasets.variables import nearest_name, split_name, units
from errors import DataError

DAYS, WINDOW = 366, 61
SUMS_BYTES = 2**31  # of sums held at once
CHUNK_BYTES = 2**18  # of a stored chunk: some days of one level
CLIMATOLOGY_ROLES = {"hour": "hour", "dayofyear": "dayofyear"}
AXES = ("hour", "dayofyear", "level", "latitude", "longitude")


def hour_of_day(times: np.ndarray | np.datetime64) -> np.ndarray:
    """Hours since midnight, of datetime64."""
    return (times - times.astype("datetime64[D]")).astype("timedelta64[h]").astype(int)


def day_of_year(times: np.ndarray | np.datetime64) -> np.ndarray:
    """1 for the first of January, of datetime64."""
    return (times.astype("datetime64[D]") - times.astype("datetime64[Y]")).astype(int) + 1


def window_weights(window: int = WINDOW) -> np.ndarray:
    """Triangle (window,) from 0 over 1 back to 0; DataError where the number of days is even."""
    if window % 2 == 0 or window < 3:
        raise ValueError(f"window of {window} days: it needs a middle; take an odd number, 3 or more")
    rising = np.linspace(0, 1, window // 2 + 1)
    return np.concatenate([rising, rising[-2::-1]])


def smoothing(window: int = WINDOW) -> np.ndarray:
    """(366, 366): what day j contributes to day i, round the year."""
    distance = np.arange(window) - window // 2
    matrix = np.zeros((DAYS, DAYS))
    for offset, weight in zip(distance, window_weights(window), strict=True):
        matrix[np.arange(DAYS), (np.arange(DAYS) + offset) % DAYS] += weight
    return matrix


def days_of(time: np.datetime64) -> list[int]:
    """Days of the year that a date counts for: the last one of a year of 365 days stands for day 366 too."""
    day, tomorrow = (int(day_of_year(each)) for each in (time, time + np.timedelta64(1, "D")))
    return [day, DAYS] if (day, tomorrow) == (365, 1) else [day]


def covers_a_year(times: np.ndarray) -> bool:
    """Whether every day of the year has dates within half a window around it."""
    there = np.zeros(DAYS)
    there[day_of_year(times) - 1] = 1
    return bool(((smoothing() @ there) > 0).all())


def compute_climatology(
    archive: Archive,
    variables: Sequence[str],
    dates: np.ndarray,
    path: str,
    step_hours: int = 6,
) -> None:
    """Computes the climatology of `dates` (places in archive.times) and writes it to a Zarr store at `path`.

    hour 0, step_hours, ... 18; missing values count in no mean. DataError where an hour has no date at all.
    """
    times = archive.times[dates]
    hours = list(range(0, 24, step_hours))
    empty = next((hour for hour in hours if hour not in hour_of_day(times)), None)
    if empty is not None:
        raise DataError(
            f"climatology: none of {len(times)} dates is at {empty} h; take another step than {step_hours} h"
        )
    by_day = covers_a_year(times)
    store = create_store(path, archive.grid, variables, hours, DAYS if by_day else 0, times)
    smooth = smoothing() if by_day else np.ones((1, DAYS))
    for some_hours, some in groups(hours, variables, archive.grid):
        total, count = day_sums(archive, some, dates, some_hours)
        for (h, hour), (v, name) in product(enumerate(some_hours), enumerate(some)):
            sums, numbers = (each[h, v].reshape(DAYS, -1) for each in (total, count))
            with np.errstate(invalid="ignore"):
                mean = (smooth @ sums) / (smooth @ numbers)
            write_mean(store, name, hours.index(hour), mean.reshape(-1, *archive.grid.shape))
    zarr.consolidate_metadata(path, zarr_format=2)  # xarray warns of a store without


def groups(
    hours: Sequence[int], variables: Sequence[str], grid: Grid
) -> Iterator[tuple[list[int], list[str]]]:
    """Hours and variables whose sums are held at once: all hours of as many variables as fit, or one hour."""
    size = SUMS_BYTES // (12 * DAYS * grid.shape[0] * grid.shape[1])  # a float64 and an int32 a cell and day
    together = [list(hours)] if size >= len(hours) else [[hour] for hour in hours]
    width = max(1, size // len(together[0]))
    for some_hours in together:
        for start in range(0, len(variables), width):
            yield some_hours, list(variables[start : start + width])


def day_sums(
    archive: Archive, variables: Sequence[str], dates: np.ndarray, hours: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Sums float64 and numbers of values int32, (hours, V, 366, H, W), one pass over the dates."""
    shape = (len(hours), len(variables), DAYS, *archive.grid.shape)
    total, count = np.zeros(shape), np.zeros(shape, np.int32)
    wanted = dates[np.isin(hour_of_day(archive.times[dates]), hours)]
    for date, field in stream(archive, variables, wanted):
        time, valid = archive.times[date], np.isfinite(field)
        place = hours.index(int(hour_of_day(time)))
        for day in days_of(time):
            total[place, :, day - 1] += np.where(valid, field, 0)
            count[place, :, day - 1] += valid
    return total, count


def create_store(
    path: str, grid: Grid, variables: Sequence[str], hours: Sequence[int], days: int, times: np.ndarray
):
    """An empty Zarr 2 store in WeatherBench2's schema; without days (0) no `dayofyear`."""
    store = zarr.open_group(path, mode="w", zarr_format=2)
    levels: dict[str, list[int]] = {}
    for name, level in map(split_name, variables):
        levels.setdefault(name, []).extend([] if level is None else [level])
    axes = {"hour": np.asarray(hours), "latitude": grid.latitude, "longitude": grid.longitude}
    axes |= {"dayofyear": np.arange(1, days + 1)} if days else {}
    every = sorted({level for each in levels.values() for level in each})
    axes |= {"level": np.asarray(every)} if every else {}
    for axis, values in axes.items():
        array = store.create_array(  # without a fill value: xarray would take 0 h and 0 degrees for missing
            axis,
            shape=values.shape,
            dtype=values.dtype,
            fill_value=None,
            attributes={"_ARRAY_DIMENSIONS": [axis]},
        )
        array[:] = values
    for name, own in levels.items():
        dims = ["hour", *["dayofyear"] * bool(days), *["level"] * bool(own), "latitude", "longitude"]
        shape = tuple(len(axes[dim]) for dim in dims)
        many = max(1, min(days, CHUNK_BYTES // (4 * grid.shape[0] * grid.shape[1])))
        chunks = tuple({"hour": 1, "dayofyear": many, "level": 1}.get(d, len(axes[d])) for d in dims)
        attributes = {"_ARRAY_DIMENSIONS": dims, "units": units(name)}
        store.create_array(
            name, shape=shape, chunks=chunks, dtype="f4", fill_value=np.nan, attributes=attributes
        )
    first, last = (str(time)[:16] for time in (times[0], times[-1]))
    store.attrs["period"] = f"{len(times)} dates, {first} to {last}"
    store.attrs["recipe"] = (
        f"WeatherBench2, triangular window of {WINDOW} days" if days else "mean by hour of day"
    )
    return store


def write_mean(store, variable: str, hour: int, mean: np.ndarray) -> None:
    """Writes (366 or 1, H, W) of one hour into the store."""
    name, level = split_name(variable)
    array = store[name]
    where: list[int | slice] = [hour]
    if "dayofyear" in array.attrs["_ARRAY_DIMENSIONS"]:
        where.append(slice(None))
    else:
        mean = mean[0]
    if level is not None:
        where.append(int(np.flatnonzero(store["level"][:] == level)[0]))
    array[tuple(where)] = mean.astype(np.float32)


class Climatology:
    """A stored climatology, by hour and day of year, or by one of both."""

    def __init__(self, path: str, fields: Sequence[StoredField], hours: np.ndarray) -> None:
        self.path, self.hours, self.grid = path, hours, fields[0].orientation.grid
        self._places = {name: (field, i) for field in fields for i, name in enumerate(field.names)}
        self.variables = list(self._places)

    def field(self, time: np.datetime64, variables: Sequence[str]) -> np.ndarray:
        """The mean (V, H, W) float32 for the hour and day of year of a date; DataError for an hour or a
        variable that it has not.
        """
        hour, day = int(hour_of_day(time)), int(day_of_year(time))
        if hour not in self.hours:
            raise DataError(f"{self.path!r} has the hours {self.hours.tolist()}: no climatology of {time}")
        row = int(np.flatnonzero(self.hours == hour)[0])
        wanted = {"hour": slice(row, row + 1), "dayofyear": slice(day - 1, day)}
        out = np.empty((len(variables), *self.grid.shape), np.float32)
        levels: dict[StoredField, list[tuple[int, int]]] = {}
        for place, name in enumerate(variables):
            if name not in self._places:
                raise DataError(f"{self.path!r} has no {name!r}{nearest_name(name, self.variables)}")
            field, position = self._places[name]
            levels.setdefault(field, []).append((place, position))
        for field, pairs in levels.items():
            first, last = (pick(position for _, position in pairs) for pick in (min, max))
            block = field.block(AXES, wanted | {"level": slice(first, last + 1)})[0, 0]
            for place, position in pairs:
                out[place] = block[position - first]
        return out


def open_climatology(path: str) -> Climatology:
    """Open a climatology in WeatherBench2's schema; DataError naming the path where it is none."""
    file = open_file(find_files(path)[0])
    found, _ = stored_fields(file, CLIMATOLOGY_ROLES)
    fields = [field for field in found if {"hour", "dayofyear"} & set(field.roles)]
    if not fields:
        raise DataError(f"{path!r} is no climatology: no variable has a dimension hour or dayofyear")
    names = [name for name in file.arrays if coordinate_role(file, name, CLIMATOLOGY_ROLES) == "hour"]
    hours = np.asarray(file.fetch(names[0]), int) if names else np.arange(24)
    return Climatology(path, fields, hours)


class ClimatologyForecast:
    """The climatology of the valid time as a forecast, from any initial date."""

    num_members, block = 0, (1, 1)

    def __init__(self, climatology: Climatology, times: np.ndarray, leads: np.ndarray) -> None:
        """times (n,) and leads (L,) as in every forecast: verification.matching.ForecastFields."""
        self.climatology, self.times, self.leads = climatology, times, leads
        self.grid, self.variables = climatology.grid, climatology.variables

    def read_block(self, dates: slice, leads: slice, variables: Sequence[str]) -> np.ndarray:
        """(n, k, V, H, W) float32."""
        valid_times = self.times[dates, None] + self.leads[leads]  # (n, k)
        fields = [self.climatology.field(time, variables) for time in valid_times.ravel()]
        return np.stack(fields).reshape(*valid_times.shape, *fields[0].shape)
