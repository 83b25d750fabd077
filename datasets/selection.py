"""The variables, dates and constant fields of an archive that a run uses.

Opening a selection is also the check of what a configuration says about its data: everything that is not
there raises a ConfigError of one line. Shapes: S static variables, H latitudes, W longitudes, T dates, h
states of a window (datasets/field_dataset.py).
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch

from config import SIMULATED, Data, in_project
from datasets import simulated
from datasets.archive import Archive, open_archive, read_all_fields, read_one
from datasets.dates import find_gaps, is_inside
from datasets.field_dataset import window_steps
from datasets.files import is_zarr
from datasets.forcings import check_forcings
from datasets.grid import Grid
from datasets.options import (
    Region,
    check_selection,
    is_whole_day,
    parse_period,
    parse_selection,
    state_variables,
)
from datasets.plausibility import refuse_fills
from datasets.regrid import Regridder
from datasets.remote import NO_OPTIONS, Access, is_url, protocol_of
from datasets.variables import nearest_name
from errors import ConfigError, DataError

logger = logging.getLogger(__name__)
SIMULATED_PATH = "outputs/simulated.zarr"


@dataclass(frozen=True)
class Selection:
    """An archive as `data.*` describes it: predicted variables, constant inputs, the dates of each period."""

    archive: Archive
    variables: list[str]
    static: dict[str, np.ndarray]  # name -> (H, W) float32, as it is in the data
    step: np.timedelta64  # lead time of one model step
    train: np.ndarray  # indices into archive.times
    validation: np.ndarray
    history: int = 1  # states of a window

    def samples(self, period: str, later: Sequence[int], empty: np.ndarray) -> np.ndarray:
        """Return (n, h + R) indices of a window and the dates t + later x step, for every t that has them.

        All dates of a sample are in the period, so that none reaches into another; gaps and `empty` dates
        (without any value of a variable) make no samples. Raises ConfigError if there are none at all.
        """
        rows = self._around(period, [*window_steps(self.history), *later], empty)
        whole = (rows >= 0).all(axis=1)
        if not whole.any():
            self._refuse(period, later[-1], self.history, "data.step_hours or training.rollout_steps")
        return rows[whole]

    def samples_by_lead(
        self, period: str, leads: Sequence[int], empty: np.ndarray, limit: int = 0, history: int = 1
    ) -> np.ndarray:
        """Return (n, h + L) indices of a window of `history` states and of t + lead x step, -1 if missing.

        Every t with any of the leads, or those among `limit` dates of the period, evenly spaced: so the dates
        of a lead do not depend on the other leads. Raises ConfigError for a lead that no date has.
        """
        rows = self._around(period, [*window_steps(history), *leads], empty)
        rows = rows[(rows[:, :history] >= 0).all(axis=1)]
        for lead, later in zip(leads, rows[:, history:].T, strict=True):
            if not (later >= 0).any():
                self._refuse(period, lead, history, "validation.lead_hours")
        rows = evenly_spaced(rows, limit)
        return rows[(rows[:, history:] >= 0).any(axis=1)]

    def _around(self, period: str, offsets: Sequence[int], empty: np.ndarray) -> np.ndarray:
        """Return (n, len(offsets)) indices of t + offset x step for dates t of a period, -1 if missing."""
        dates = self._dates(period)
        return self.around(dates, offsets, np.setdiff1d(dates, empty))

    def around(self, dates: np.ndarray, offsets: Sequence[int], available: np.ndarray) -> np.ndarray:
        """Return (n, len(offsets)) indices of t + offset x step for dates t, -1 if not `available`."""
        times = self.archive.times[dates][:, None] + np.array(offsets) * self.step
        if not len(available):
            return np.full(times.shape, -1)
        rows = np.searchsorted(self.archive.times[available], times).clip(max=len(available) - 1)
        return np.where(self.archive.times[available[rows]] == times, available[rows], -1)

    def _refuse(self, period: str, offset: int, history: int, key: str) -> NoReturn:
        hours, count = (offset * self.step).astype("timedelta64[h]"), len(self._dates(period))
        reason = f"data.{period}_period: none of its {count} dates has another {hours} later"
        if history > 1:
            reason += f", and the {history - 1} before it that data.history = {history} needs"
        raise ConfigError(f"{reason}: make the period longer, or lower {key}")

    def describe(self, period: str, samples: np.ndarray, empty: np.ndarray) -> str:
        """Return one line: how many samples a period has, and which dates are left out of it."""
        dates = self._dates(period)
        times, left_out = self.archive.times[dates], int(np.isin(dates, empty).sum())
        return (
            f"{period}: {len(samples)} samples from {len(dates)} dates, {times[0]} to {times[-1]}; "
            f"{len(find_gaps(times))} dates missing in between, "
            f"{left_out} left out for fields without a value, "
            f"{len(dates) - left_out - len(samples)} without the dates that follow"
            f"{' or come before' if self.history > 1 else ''}"
        )

    def land(self) -> np.ndarray | None:
        """Return the data's own land-sea mask (H, W), if it has one: it may be of another planet."""
        name = "land_sea_mask"
        if name in self.static:
            return self.static[name]
        exists = name in (*self.archive.static_variables, *self.archive.variables)
        return self.archive.read_static(name) if exists else None

    def _dates(self, period: str) -> np.ndarray:
        return getattr(self, period)


def open_selection(
    data: Data, patch_size: tuple[int, int], lead_hours: Sequence[int], rollout_steps: int = 1
) -> Selection:
    """Open `data.path` and check what the configuration says of it. Raises ConfigError or DataError."""
    opened = open_without_periods(data, patch_size)
    train, validation = _split(opened.archive.times, data)
    selection = replace(opened, train=train, validation=validation)
    nothing = np.zeros(0, int)
    selection.samples("train", range(1, 1 + rollout_steps), nothing)
    if len(selection.validation) and lead_hours:
        leads = [hours // data.step_hours for hours in lead_hours]
        selection.samples_by_lead("validation", leads, nothing, history=data.history)
    return selection


def open_without_periods(data: Data, patch_size: tuple[int, int]) -> Selection:
    """Open `data.path` without looking at its periods: a forecast may start from analyses of other years.

    Raises ConfigError or DataError, which says where the data come from: a configuration travels without
    them.
    """
    try:
        return _open_without_periods(data, patch_size)
    except DataError as error:
        raise DataError(f"{error}; data.source: {data.source}") if data.source else error from None


def _open_without_periods(data: Data, patch_size: tuple[int, int]) -> Selection:
    check_forcings(data.forcings)
    variables = state_variables(data)
    selection, access, names = parse_selection(data.select), access_of(data), data.static_variables
    own = [] if data.more_paths else variables  # the others may be in further sources
    simulated_path = _simulated_path(data, own) if data.path == SIMULATED else ""
    archive = open_archive(simulated_path or data.path, selection, access, data.region, data.more_paths)
    check_selection(selection, archive.extra_dimensions, archive.path)
    archive.check(variables)
    # A missing variable or level is reported here.
    refuse_fills(archive.read(0, variables), variables, archive.times[0])
    _check_grid(archive.grid.shape, data.grid_shape, patch_size)
    path, where = data.static_path, (archive.grid, selection, access, data.region)
    read = (lambda name: read_static_field(path, name, *where)) if path else archive.read_static
    step, nothing = np.timedelta64(data.step_hours * 3600, "s"), np.zeros(0, int)
    static = {name: read(name) for name in names}
    return Selection(archive, variables, static, step, nothing, nothing, data.history)


def access_of(data: Data) -> Access:
    """Return how the URLs of a run are read: data.path, and others of the same protocol."""
    return Access(data.storage_options, protocol_of(data.path))


def check_outside_source(key: str, folder: str, path: str) -> None:
    """Raise ConfigError if a folder that will be written is inside the Zarr store that is read."""
    inside = (
        not is_url(path)
        and is_zarr(path)
        and f"{os.path.realpath(folder)}/".startswith(f"{os.path.realpath(path)}/")
    )
    if inside:
        raise ConfigError(
            f"{key} = {folder!r}: is inside the store {path!r} that is read; choose another folder"
        )


def read_static_field(
    path: str,
    name: str,
    target: Grid,
    selection: dict[str, str] | None = None,
    access: Access = NO_OPTIONS,
    region: Region = (),
) -> np.ndarray:
    """Return a field (H, W) float32 of some file, conservatively regridded if it is not on the target grid.

    The file need not have times; of a variable with times the first date counts. NCAR's LSMASK is read as
    "land_sea_mask": land, islands and ice shelves are 1, oceans and lakes 0. Raises DataError if the file has
    no such field, or its grid is wholly outside the target.
    """
    fields, unreadable = read_all_fields(path, selection, access)
    names = [each for field in fields for each in field.names]
    location = next(((f, f.names.index(name)) for f in fields if name in f.names), None)
    if location is None:
        why = unreadable.get(name)
        raise DataError(f"{path!r} has no field {name!r}{f': {why}' if why else nearest_name(name, names)}")
    source, values = location[0].orientation.grid, read_one(*location)
    if source.same_as(target):
        return values
    regridded = Regridder(source, target)(torch.from_numpy(values)).numpy()
    if np.isnan(regridded).all():
        place = f"latitudes {target.latitude[0]:g} to {target.latitude[-1]:g}"
        raise DataError(f"{path!r} has {name!r} nowhere on the grid of data.path, {place}")
    return regridded


def initial_dates(selection: Selection, period: tuple[str, ...], interval_hours: int) -> np.ndarray:
    """Return indices of the windows (n, h) in a period that forecasts start from, `interval_hours` apart.

    With interval 0 it is every date that has all variables and a whole window; otherwise each of the dates
    has to have them, up to the end of the data on the last day. Raises ConfigError.
    """
    archive, key = selection.archive, "forecast.period"
    available = np.flatnonzero(archive.has(selection.variables))
    if not period:
        raise ConfigError(f"{key} = []: name the first and the last initial date; the data are {archive}")
    dates = available[is_inside(archive.times[available], key, period)]
    if interval_hours:
        first, last = (np.datetime64(end, "s") for end in parse_period(key, period) or ())
        if is_whole_day(period[1]):
            last = min(last, max(archive.times[-1], last.astype("datetime64[D]")))
        times = np.arange(first, last + np.timedelta64(1, "s"), np.timedelta64(interval_hours, "h"))
        if len(absent := np.setdiff1d(times, archive.times[available])):
            span = f"its dates are from {archive.times[0]} to {archive.times[-1]}"
            reason = f"{archive.path!r} has not all variables at {absent[0]}"
            raise ConfigError(f"{key} = {list(period)}: {reason}; {span}")
        dates = np.flatnonzero(np.isin(archive.times, times))
    if not len(dates):
        raise ConfigError(f"{key} = {list(period)}: no date {_span(archive.times)}")
    windows = selection.around(dates, window_steps(selection.history), available)
    cut = (windows < 0).any(axis=1)
    number, step = selection.history, selection.step.astype("timedelta64[h]")
    lacking = f"the data lack some of the data.history = {number} states, {step} apart, that end there"
    if cut.all() or (interval_hours and cut.any()):
        reason = f"no forecast can start from {archive.times[dates[cut][0]]}: {lacking}"
        raise ConfigError(f"{key} = {list(period)}: {reason}; begin later")
    if cut.any():
        logger.info("%s: %d dates left out: %s", key, cut.sum(), lacking)
    return windows[~cut]


def _simulated_path(data: Data, variables: list[str]) -> str:
    """Return the path of the simulated data, generated on first use. Raises ConfigError."""
    static = [] if data.static_path else data.static_variables
    for key, names, known in (
        ("variables", variables, simulated.VARIABLES),
        ("static_variables", static, simulated.STATIC_VARIABLES),
    ):
        if missing := [name for name in names if name not in known]:
            hint = nearest_name(missing[0], known)
            raise ConfigError(f"data.{key} = {missing[0]!r}: not in the simulated data{hint}")
    if not data.region:
        _check_grid((simulated.NUM_LAT, simulated.NUM_LON), data.grid_shape, (1, 1))
    return str(simulated.ensure_simulated(in_project(SIMULATED_PATH)))


def _check_grid(shape: tuple[int, int], expected: tuple[int, int], patch_size: tuple[int, int]) -> None:
    if any(expected) and tuple(expected) != tuple(shape):
        raise ConfigError(
            f"data.grid_shape = {list(expected)}: the data have {list(shape)}; set that or [0, 0]"
        )
    if patch_size[0] > shape[0] or patch_size[1] > shape[1]:
        raise ConfigError(f"model.patch_size = {list(patch_size)}: larger than the grid {list(shape)}")


def _split(times: np.ndarray, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of the training and validation period; without one, all other dates train."""
    validation = _inside(times, "data.validation_period", data.validation_period)
    if data.train_period:
        train = _inside(times, "data.train_period", data.train_period)
    else:
        test = _inside(times, "data.test_period", data.test_period)
        train = np.setdiff1d(np.arange(len(times)), np.union1d(validation, test))
    if len(train) < 2:
        period = list(data.train_period)
        raise ConfigError(f"data.train_period = {period}: fewer than two dates {_span(times)}")
    if data.validation_period and not len(validation):
        period = list(data.validation_period)
        raise ConfigError(f"data.validation_period = {period}: no date {_span(times)}")
    return train, validation


def _inside(times: np.ndarray, key: str, period: tuple[str, ...]) -> np.ndarray:
    return np.flatnonzero(is_inside(times, key, period)) if period else np.zeros(0, int)


def _span(times: np.ndarray) -> str:
    return f"of it is in the data, which are from {times[0]} to {times[-1]}"


def evenly_spaced(items: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` of the items (0: all), from the first to the last."""
    if not limit or len(items) <= limit:
        return items
    return items[np.linspace(0, len(items) - 1, limit).round().astype(int)]
