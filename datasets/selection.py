"""The variables, dates and constant fields of an archive that a run uses.

Opening a selection also checks the [data] section against the data. Shapes: H latitudes, W
longitudes, T dates, h states of a window (datasets/loader.py).
"""

import logging
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from config import RANDOM, SIMULATED, Data
from datasets.archive import (
    Archive,
    TrainingStore,
    evenly_spaced,
    find_gaps,
    find_store,
    is_inside,
    read_static_field,
    usual_hours,
)
from datasets.channels import Channels
from datasets.conditions import FORCINGS
from datasets.convert import (
    SINGLE_PROCESS,
    Conversion,
    Request,
    check_first_start,
    lock,
    most_workers,
    open_source,
    store_of,
)
from datasets.options import parse_period, parse_selection
from datasets.remote import Access, is_url
from datasets.source import is_zarr
from datasets.statistics import check_static, refuse_fills
from errors import ConfigError, nearest, print_message, refuse, without_secrets

logger = logging.getLogger(__name__)


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

    def samples(self, period: str, later: Sequence[int]) -> np.ndarray:
        """Return (n, h + R) indices of a window and the dates t + later x step, for every t that has them:
        all in the period, so that periods do not overlap, with all variables. Raises ConfigError without any.
        """
        dates = getattr(self, period)
        rows = self.around(dates, [*range(0, -self.history, -1), *later], self.available(dates))
        is_complete = (rows >= 0).all(axis=1)
        if not is_complete.any():
            self._refuse(period, later[-1], self.history, "training.rollout_steps, or set data.step_hours")
        return rows[is_complete]

    def samples_by_lead(
        self, period: str, leads: Sequence[int], limit: int = 0, history: int = 1
    ) -> np.ndarray:
        """Return (n, h + L) indices of a window of `history` states and of t + lead x step, -1 if missing.

        For every t that has at least one of the leads; with `limit`, for evenly spaced t. The dates of a lead
        therefore do not depend on the other leads. Raises ConfigError for a lead that no date has.
        """
        dates = getattr(self, period)
        rows = self.around(dates, [*range(0, -history, -1), *leads], self.available(dates))
        rows = rows[(rows[:, :history] >= 0).all(axis=1)]
        for lead, later in zip(leads, rows[:, history:].T, strict=True):
            if not (later >= 0).any():
                self._refuse(period, lead, history, "validation.lead_hours")
        rows = evenly_spaced(rows, limit)
        return rows[(rows[:, history:] >= 0).any(axis=1)]

    def available(self, dates: np.ndarray) -> np.ndarray:
        """Return those of the dates (indices) on which the archive has all variables."""
        return dates[self.archive.has(self.variables)[dates]]

    def around(self, dates: np.ndarray, offsets: Sequence[int], available: np.ndarray) -> np.ndarray:
        """Return (n, len(offsets)) indices of t + offset x step for dates t, -1 if not `available`."""
        times = self.archive.times[dates][:, None] + np.array(offsets) * self.step
        if not len(available):
            return np.full(times.shape, -1)
        rows = np.searchsorted(self.archive.times[available], times).clip(max=len(available) - 1)
        return np.where(self.archive.times[available[rows]] == times, available[rows], -1)

    def _refuse(self, period: str, offset: int, history: int, key: str) -> NoReturn:
        hours, count = (offset * self.step).astype("timedelta64[h]"), len(getattr(self, period))
        usual = f"the data are {usual_hours(self.archive.times):g} hours apart"
        reason = f"data.{period}_period: none of its {count} dates has another {hours} later ({usual})"
        if history > 1:
            reason += f", and the {history - 1} before it that data.history = {history} needs"
        raise ConfigError(f"{reason}: make the period longer, or lower {key}")

    def describe(self, period: str, samples: np.ndarray) -> str:
        """Return a line with the number of samples of a period, and of the dates that are left out."""
        dates = getattr(self, period)
        times, left_out = self.archive.times[dates], len(dates) - len(self.available(dates))
        return (
            f"{period}: {len(samples)} samples from {len(dates)} dates, {times[0]} to {times[-1]}; left out: "
            f"{len(find_gaps(times))} dates that the data do not have, {left_out} that lack a variable, "
            f"{len(dates) - left_out - len(samples)} that lack an earlier or later date of their sample"
        )

    def land(self) -> np.ndarray | None:
        """Return the land-sea mask (H, W) of the data, None if there is none."""
        name = "land_sea_mask"
        if name in self.static:
            return self.static[name]
        exists = name in (*self.archive.static_variables, *self.archive.variables)
        return self.archive.read_static(name) if exists else None


def open_selection(
    data: Data,
    patch_size: tuple[int, int],
    lead_hours: Sequence[int],
    rollout_steps: int = 1,
    elsewhere: Collection[str] = (),
) -> Selection:
    """Open `data.path` and check the configuration against it. Raises ConfigError or DataError.

    elsewhere: dimensions of other sources, which `data.select` may name, too.
    """
    opened = open_without_periods(data, patch_size, elsewhere)
    times, span = opened.archive.times, _span(opened.archive)
    periods = {name: getattr(data, f"{name}_period") for name in ("train", "validation", "test")}
    train, validation, test = (
        np.flatnonzero(is_inside(times, f"data.{name}_period", period)) if period else np.zeros(0, int)
        for name, period in periods.items()
    )
    if not data.train_period:  # all other dates train
        train = np.setdiff1d(np.arange(len(times)), np.union1d(validation, test))
    if len(train) < 2:
        refuse("data.train_period", list(data.train_period), f"it has fewer than two dates {span}")
    if data.validation_period and not len(validation):
        refuse("data.validation_period", list(data.validation_period), f"it has no date {span}")
    # -- a period has samples, or the run ends here: a window and its later states must be in the data
    selection = replace(opened, train=train, validation=validation)
    selection.samples("train", range(1, 1 + rollout_steps))
    if len(validation) and lead_hours:
        leads = [hours // data.step_hours for hours in lead_hours]
        selection.samples_by_lead("validation", leads, history=data.history)
    return selection


def open_for_training(
    data: Data, patch_size: tuple[int, int], lead_hours: Sequence[int], rollout_steps: int, may_convert: bool
) -> Selection:
    """Open what a run trains on, or will be converted for it: the training store, or the source of one.

    may_convert: True in the process that starts a run before its ranks exist, which calls `convert_selection`
    after its checks; the ranks find a complete store. Raises ConfigError or DataError.
    """
    if is_trained_directly(data) or may_convert:
        return open_selection(data, patch_size, lead_hours, rollout_steps)
    store = stored(data)
    if not find_store(store.path):
        check_first_start(data)
    Request.of(data).check_store(Path(store.path))
    return open_selection(store, patch_size, lead_hours, rollout_steps)


def convert_selection(
    data: Data,
    patch_size: tuple[int, int],
    lead_hours: Sequence[int],
    rollout_steps: int,
    selection: Selection,
) -> Selection:
    """Return the selection of the training store, which is written if it lacks something of the source.
    selection: of `open_for_training`. Raises ConfigError, DataError or RunFailed.
    """
    if is_trained_directly(data) or isinstance(selection.archive, TrainingStore):
        return selection
    request, target = Request.of(data), store_of(data)
    conversion = Conversion(request, target, selection.archive)
    attributes, states, dates = request.check_store(target, conversion.names), {}, len(conversion.times)
    is_new = not attributes.get("complete")
    if is_new:
        check_first_start(data, conversion.num_bytes)
    else:
        states = conversion.states()
    # -- nothing to write if the store is complete and the source is as it was
    if not states or attributes["states"] != states or attributes["dates"] != dates:
        with lock(target, request):
            if is_new:
                size, free = conversion.num_bytes / 2**30, shutil.disk_usage(target.parent).free / 2**30
                print_message(
                    f"data.path = {without_secrets(data.path)}: converting {dates} dates of "
                    f"{len(conversion.names)} variables, at most {size:.2f} GiB, to {target} "
                    f"({free:.1f} GiB free), once"
                )
            conversion.run(1 if conversion.num_bytes < SINGLE_PROCESS else most_workers())
    return open_selection(stored(data), patch_size, lead_hours, rollout_steps)


def is_trained_directly(data: Data) -> bool:
    """Return True if data.path is noise, or a training store, of which all is taken."""
    is_changed = bool(data.more_paths or data.region)
    is_store = data.path == SIMULATED or bool(find_store(data.path))
    return data.path == RANDOM or (is_store and not is_changed)


def stored(data: Data) -> Data:
    """Return the settings with the training store of a configuration in the place of its source."""
    return replace(
        data,
        path=str(store_of(data)),
        more_paths=(),
        select=(),
        region=(),
        static_path="",
        storage_options=(),
    )


def open_without_periods(
    data: Data, patch_size: tuple[int, int], elsewhere: Collection[str] = ()
) -> Selection:
    """Open `data.path` without checking its periods, as for a forecast. Raises ConfigError or DataError."""
    for name in data.forcings:
        if name not in FORCINGS:
            refuse("data.forcings", name, f"unknown; {nearest(name, FORCINGS)}")
    variables = Channels.of(data).variables
    archive = open_source(data, elsewhere)
    archive.check(variables)
    # A missing variable or level is reported here.
    refuse_fills(archive.read(0, variables), variables, archive.times[0], archive.path)
    shape = archive.grid.shape
    if any(data.grid_shape) and tuple(data.grid_shape) != shape:
        refuse("data.grid_shape", list(data.grid_shape), f"the data have {list(shape)}; set that or [0, 0]")
    if patch_size[0] > shape[0] or patch_size[1] > shape[1]:
        refuse("model.patch_size", list(patch_size), f"larger than the grid {list(shape)}")
    static, labels = {}, parse_selection(data.select)
    access = Access.of(data.storage_options, data.path)
    for name in data.static_variables:
        if data.static_path:
            static[name] = read_static_field(data.static_path, name, archive.grid, labels, access)
        else:
            static[name] = archive.read_static(name)
    check_static(static, data.static_path or archive.path)
    step, nothing = np.timedelta64(data.step_hours * 3600, "s"), np.zeros(0, int)
    return Selection(archive, variables, static, step, nothing, nothing, data.history)


def check_outside_source(key: str, folder: str, path: str) -> None:
    """Raise ConfigError if a folder that will be written is inside the Zarr store that is read."""
    is_local_store = not is_url(path) and is_zarr(path)
    if is_local_store and Path(folder).resolve().is_relative_to(Path(path).resolve()):
        refuse(key, folder, f"is inside the store {path!r} that is read; choose another folder")


def initial_dates(selection: Selection, period: tuple[str, ...], interval_hours: int) -> np.ndarray:
    """Return indices of the windows (n, h) in a period that forecasts start from, `interval_hours` apart:
    with 0 all dates with all variables and a whole window. Otherwise every date must have them, up to the end
    of the data on the last day. Raises ConfigError.
    """
    archive, key = selection.archive, "forecast.period"
    if not period:
        raise ConfigError(f"{key} = []: name the first and the last initial date; the data are {archive}")
    available = np.flatnonzero(archive.has(selection.variables))
    dates = available[is_inside(archive.times[available], key, period)]
    if interval_hours:
        first, last = (np.datetime64(end, "s") for end in parse_period(key, period) or ())
        if len(period[1]) <= len("2001-01-01"):  # a whole day, of which the data may lack the end
            last = min(last, max(archive.times[-1], last.astype("datetime64[D]")))
        times = np.arange(first, last + np.timedelta64(1, "s"), np.timedelta64(interval_hours, "h"))
        if len(absent := np.setdiff1d(times, archive.times[available])):
            place = f"{absent[0]} (forecast.interval_hours = {interval_hours})"
            refuse(key, list(period), f"not all variables are at {place} {_span(archive)}")
        dates = np.flatnonzero(np.isin(archive.times, times))
    if not len(dates):
        refuse(key, list(period), f"it has no date {_span(archive)}")
    # -- dates without the states before them: an error where the interval asks for them
    windows = selection.around(dates, range(0, -selection.history, -1), available)
    cut = (windows < 0).any(axis=1)
    lacking = f"the data lack some of the data.history = {selection.history} states that end there"
    if cut.all() or (interval_hours and cut.any()):
        reason = f"no forecast can start from {archive.times[dates[cut][0]]}: {lacking}; begin later"
        refuse(key, list(period), reason)
    if cut.any():
        logger.info("%s: %d dates left out: %s", key, cut.sum(), lacking)
    return windows[~cut]


def _span(archive: Archive) -> str:
    return f"in the data, which are from {archive.times[0]} to {archive.times[-1]}"
