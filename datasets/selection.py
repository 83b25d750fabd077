"""Which variables, dates and constant fields of an archive a run uses.

Opening a selection is also the check of what a configuration says about its data: everything that is not
there raises a ValueError of one line. Shapes: S static variables, H latitudes, W longitudes, T dates.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from config import Data, parse_period
from datasets.era5 import Archive, open_archive, read_static_field
from datasets.simulated import ensure_simulated
from datasets.variables import expand_levels

logger = logging.getLogger(__name__)
SIMULATED_PATH = "outputs/simulated.zarr"


@dataclass(frozen=True)
class Selection:
    """An archive seen through `data.*`: predicted variables, constant inputs, the dates of each period."""

    archive: Archive
    variables: list[str]
    static: dict[str, np.ndarray]  # name -> (H, W) float32, as it is in the data
    step: np.timedelta64  # lead time of one model step
    train: np.ndarray  # indices into archive.times
    validation: np.ndarray

    def samples(self, period: str, offsets: Sequence[int], empty: np.ndarray) -> np.ndarray:
        """(n, len(offsets)) indices of the dates t + offset x step, for every t where all of them are
        there.

        All dates of a sample lie in the period, so that none reaches into another; gaps and `empty` dates
        (without any value of a variable) make no samples. What was left out is logged in one line, once a
        period.
        """
        dates = {"train": self.train, "validation": self.validation}[period]
        times = self.archive.times[dates]
        full = ~np.isin(dates, empty)
        columns, present = [], full.copy()
        for offset in offsets:
            wanted = times + offset * self.step
            place = np.searchsorted(times, wanted).clip(max=len(dates) - 1)
            present &= (times[place] == wanted) & full[place]
            columns.append(dates[place])
        if not present.any():
            hours = (offsets[-1] * self.step).astype("timedelta64[h]")
            raise ValueError(
                f"data.{period}_period: none of its {len(dates)} dates has another {hours} later"
            )
        logger.info(
            "%s: %d samples from %d dates, %s to %s; %d dates missing in between, %d left out for fields "
            "without a value, %d without the dates that follow",
            *(period, present.sum(), len(dates), times[0], times[-1]),
            *(_missing(times), (~full).sum(), (full & ~present).sum()),
        )
        return np.stack(columns, axis=1)[present]


def _missing(times: np.ndarray) -> int:
    """Dates that the most common interval would have between the first and the last, and that are not
    there.
    """
    intervals = np.diff(times).astype(int)
    usual = np.bincount(np.searchsorted(np.unique(intervals), intervals)).argmax()
    return int((intervals / np.unique(intervals)[usual] - 1).clip(min=0).round().sum())


def open_selection(data: Data, patch_size: tuple[int, int]) -> Selection:
    """Opens `data.path` and checks variables, dates, grid and patches against it. Raises ValueError."""
    variables = expand_levels(data.variables, data.levels)
    archive = open_archive(str(ensure_simulated(SIMULATED_PATH)) if data.path == "simulated" else data.path)
    archive.read(0, variables)  # a missing variable or level says so here
    _check_grid(archive.grid.shape, data.grid_shape, patch_size)
    return Selection(
        archive,
        variables,
        _read_static(archive, data.static_variables, data.static_path),
        np.timedelta64(data.step_hours * 3600, "s"),
        *_split(archive.times, data),
    )


def _check_grid(shape: tuple[int, int], wanted: tuple[int, int], patch_size: tuple[int, int]) -> None:
    if any(wanted) and tuple(wanted) != tuple(shape):
        raise ValueError(f"data.grid_shape = {list(wanted)}: the data have {list(shape)}; set that or [0, 0]")
    if patch_size[0] > shape[0] or patch_size[1] > shape[1]:
        raise ValueError(f"model.patch_size = {list(patch_size)}: larger than the grid {list(shape)}")


def _split(times: np.ndarray, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation period; without a training period, all other dates train."""
    validation = _inside(times, "validation_period", data.validation_period)
    if data.train_period:
        train = _inside(times, "train_period", data.train_period)
    else:
        train = np.setdiff1d(np.arange(len(times)), validation)
    if len(train) < 2:
        raise ValueError(
            f"data.train_period = {list(data.train_period)}: fewer than two dates {_span(times)}"
        )
    if data.validation_period and not len(validation):
        period = list(data.validation_period)
        raise ValueError(f"data.validation_period = {period}: no date {_span(times)}")
    return train, validation


def _inside(times: np.ndarray, key: str, period: tuple[str, ...]) -> np.ndarray:
    span = parse_period(f"data.{key}", period)
    if span is None:
        return np.zeros(0, int)
    first, last = (np.datetime64(_naive(end), "s") for end in span)
    return np.flatnonzero((times >= first) & (times <= last))


def _naive(instant: datetime) -> datetime:
    return instant.replace(tzinfo=None)  # numpy's datetimes are UTC without saying so


def _span(times: np.ndarray) -> str:
    return f"of it is in the data, which run from {times[0]} to {times[-1]}"


def _read_static(archive: Archive, names: tuple[str, ...], path: str) -> dict[str, np.ndarray]:
    if path:
        return {name: read_static_field(path, name, archive.grid) for name in names}
    return {name: archive.read_static(name) for name in names}


def evenly_spaced(items: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of the items (0: all), from the first to the last."""
    if not limit or len(items) <= limit:
        return items
    return items[np.linspace(0, len(items) - 1, limit).round().astype(int)]
