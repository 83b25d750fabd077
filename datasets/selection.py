"""Which variables, dates and constant fields of an archive a run uses.

Opening a selection is also the check of what a configuration says about its data: everything that is not
there raises a ConfigError of one line. Shapes: S static variables, H latitudes, W longitudes, T dates,
h states of a window (datasets/window.py).
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from archives.archive import Archive, open_archive
from archives.dates import is_whole_day, parse_period
from archives.picks import check_used, parse_picks
from archives.static_field import read_static_field
from archives.storage_options import Access, protocol_of
from archives.variables import expand_levels, nearest_name
from config import Data
from datasets import simulated
from datasets.forcings import check_forcings
from datasets.plausibility import refuse_fills
from datasets.window import window_steps
from errors import ConfigError, DataError
from project_folder import SIMULATED, in_project

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
    history: int = 1  # states of a window

    def samples(self, period: str, later: Sequence[int], empty: np.ndarray) -> np.ndarray:
        """(n, h + R) indices of a window and the R dates t + later x step, for every t where all are there.

        All dates of a sample lie in the period, so that none reaches into another; gaps and `empty` dates
        (without any value of a variable) make no samples. ConfigError where there are none at all.
        """
        rows = self._around(period, [*window_steps(self.history), *later], empty)
        whole = (rows >= 0).all(axis=1)
        if not whole.any():
            self._refuse(period, later[-1], self.history)
        return rows[whole]

    def samples_a_lead(
        self, period: str, leads: Sequence[int], empty: np.ndarray, limit: int = 0, history: int = 1
    ) -> np.ndarray:
        """(n, h + L) indices of a window of `history` states and of t + lead x step, -1 for a lead that t has
        not: a long lead takes no dates from short ones.

        Every t with any of the leads, or those among `limit` dates of the period, evenly spaced: so the
        dates of a lead do not depend on which others are asked for. ConfigError for a lead that no date has.
        """
        rows = self._around(period, [*window_steps(history), *leads], empty)
        rows = rows[(rows[:, :history] >= 0).all(axis=1)]
        for lead, later in zip(leads, rows[:, history:].T, strict=True):
            if not (later >= 0).any():
                self._refuse(period, lead, history)
        rows = evenly_spaced(rows, limit)
        return rows[(rows[:, history:] >= 0).any(axis=1)]

    def _around(self, period: str, offsets: Sequence[int], empty: np.ndarray) -> np.ndarray:
        """(n, len(offsets)) indices of t + offset x step for every date t of a period, -1 where it is not
        there or empty.
        """
        dates = self._dates(period)
        return self.around(dates, offsets, np.setdiff1d(dates, empty))

    def around(self, dates: np.ndarray, offsets: Sequence[int], there: np.ndarray) -> np.ndarray:
        """(n, len(offsets)) indices of t + offset x step for every date t (n,), -1 for one that is not among
        the dates `there`, ascending.
        """
        wanted = self.archive.times[dates][:, None] + np.array(offsets) * self.step
        if not len(there):
            return np.full(wanted.shape, -1)
        rows = np.searchsorted(self.archive.times[there], wanted).clip(max=len(there) - 1)
        return np.where(self.archive.times[there[rows]] == wanted, there[rows], -1)

    def _refuse(self, period: str, offset: int, history: int) -> NoReturn:
        hours, count = (offset * self.step).astype("timedelta64[h]"), len(self._dates(period))
        reason = f"data.{period}_period: none of its {count} dates has another {hours} later"
        if history > 1:
            reason += f", and the {history - 1} before it that data.history = {history} needs"
        raise ConfigError(reason)

    def describe(self, period: str, samples: np.ndarray, empty: np.ndarray) -> str:
        """One line: how many samples a period has, and what was left out of it."""
        dates = self._dates(period)
        times, left_out = self.archive.times[dates], int(np.isin(dates, empty).sum())
        return (
            f"{period}: {len(samples)} samples from {len(dates)} dates, {times[0]} to {times[-1]}; "
            f"{_missing(times)} dates missing in between, {left_out} left out for fields without a value, "
            f"{len(dates) - left_out - len(samples)} without the dates that follow"
            f"{' or come before' if self.history > 1 else ''}"
        )

    def land(self) -> np.ndarray | None:
        """The data's own land-sea mask (H, W), where they have one: they may be of another planet."""
        name = "land_sea_mask"
        if name in self.static:
            return self.static[name]
        there = name in (*self.archive.static_variables, *self.archive.variables)
        return self.archive.read_static(name) if there else None

    def _dates(self, period: str) -> np.ndarray:
        return {"train": self.train, "validation": self.validation}[period]


def _intervals(times: np.ndarray) -> str:
    """What lies between dates, for an error: the most common interval."""
    if len(times) < 2:
        return "it has one date"
    found, counts = np.unique(np.diff(times).astype("timedelta64[m]"), return_counts=True)
    return f"its dates are {found[counts.argmax()].astype(int) / 60:g} hours apart"


def _missing(times: np.ndarray) -> int:
    """Dates that the most common interval would have between the first and the last, and that are not
    there.
    """
    intervals = np.diff(times).astype(int)
    usual = np.bincount(np.searchsorted(np.unique(intervals), intervals)).argmax()
    return int((intervals / np.unique(intervals)[usual] - 1).clip(min=0).round().sum())


def open_selection(
    data: Data, patch_size: tuple[int, int], lead_hours: Sequence[int], rollout_steps: int = 1
) -> Selection:
    """Opens `data.path` and checks what the configuration says of it. Raises ConfigError or DataError."""
    opened = open_fields(data, patch_size)
    train, validation = _split(opened.archive.times, data)
    selection = replace(opened, train=train, validation=validation)
    nothing = np.zeros(0, int)
    selection.samples("train", range(1, 1 + rollout_steps), nothing)
    if len(selection.validation) and lead_hours:
        leads = [hours // data.step_hours for hours in lead_hours]
        selection.samples_a_lead("validation", leads, nothing, history=data.history)
    return selection


def open_fields(data: Data, patch_size: tuple[int, int]) -> Selection:
    """Opens `data.path` without looking at its periods: a forecast may start from analyses of other years.

    Raises ConfigError or DataError.
    """
    check_forcings(data.forcings)
    variables = expand_levels(data.variables, data.levels)
    picks, access = parse_picks(data.select), access_of(data)
    simulated_path = _simulated_path(data, variables) if data.path == SIMULATED else ""
    with _naming_source(data.source):
        archive = open_archive(simulated_path or data.path, picks, access)
    check_used(picks, archive.extra_dimensions, archive.path)
    try:
        # A missing variable or level says so here.
        refuse_fills(archive.read(0, variables), variables, archive.times[0])
    except (OSError, RuntimeError) as error:
        raise DataError(f"data.path = {data.path!r}: cannot be read: {error}") from None
    _check_grid(archive.grid.shape, data.grid_shape, patch_size)
    path, names = data.static_path, data.static_variables
    with _naming_source(data.source):
        static = {
            name: read_static_field(path, name, archive.grid, picks, access)
            if path
            else archive.read_static(name)
            for name in names
        }
    step, nothing = np.timedelta64(data.step_hours * 3600, "s"), np.zeros(0, int)
    return Selection(archive, variables, static, step, nothing, nothing, data.history)


def access_of(data: Data) -> Access:
    """How the URLs of a run are read: data.path, and others of the same protocol."""
    return Access(data.storage_options, protocol_of(data.path), data.disk_cache_path, data.disk_cache_gib)


@contextmanager
def _naming_source(source: str) -> Iterator[None]:
    """A DataError says where the data come from, too: a configuration travels without them."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}; data.source: {source}") if source else error from None


def initial_dates(selection: Selection, period: tuple[str, ...], interval_hours: int) -> np.ndarray:
    """Indices of the windows (n, h) in a period that forecasts start from, `interval_hours` apart.

    With interval 0 it is every date that has all variables, and a whole window. ConfigError: there is none,
    or one of the dates wanted is missing; the last day counts as far as the data go.
    """
    archive, key = selection.archive, "forecast.period"
    there = np.flatnonzero(archive.has(selection.variables))
    if not period:
        raise ConfigError(f"{key} = []: name the first and the last initial date; the data are {archive}")
    if not interval_hours:
        found = there[np.isin(there, _inside(archive.times, key, period))]
        if not len(found):
            raise ConfigError(f"{key} = {list(period)}: no date {_span(archive.times)}")
        return _whole_windows(selection, found, there, key)
    first, last = _ends(key, period)
    if is_whole_day(period[1]):
        last = min(last, max(archive.times[-1], last.astype("datetime64[D]")))
    count = int((last - first) / np.timedelta64(interval_hours, "h")) + 1
    wanted = first + np.arange(count) * np.timedelta64(interval_hours, "h")
    try:
        found = np.array([archive.index(date) for date in wanted])
    except ValueError as error:
        raise ConfigError(f"{key} = {list(period)}: {error}") from None
    if len(absent := found[~np.isin(found, there)]):
        date = archive.times[absent[0]]
        raise ConfigError(f"{key} = {list(period)}: {archive.path!r} has not all variables at {date}")
    windows = selection.around(found, window_steps(selection.history), there)
    if len(cut := np.flatnonzero((windows < 0).any(axis=1))):
        date = f"{archive.times[found[cut[0]]]}: {_history(selection)}"
        raise ConfigError(f"{key} = {list(period)}: no forecast can start from {date}; begin later")
    return windows


def _whole_windows(selection: Selection, dates: np.ndarray, there: np.ndarray, key: str) -> np.ndarray:
    """(n, h) of the dates whose window is among those that are `there`; says how many are left out."""
    windows = selection.around(dates, window_steps(selection.history), there)
    whole = (windows >= 0).all(axis=1)
    if not whole.any():
        raise ConfigError(f"{key}: no forecast can start from any of its dates: {_history(selection)}")
    if not whole.all():
        logger.info("%s: %d dates left out: %s", key, (~whole).sum(), _history(selection))
    return windows[whole]


def _history(selection: Selection) -> str:
    """What a date lacks that has no window."""
    number, step = selection.history, selection.step.astype("timedelta64[h]")
    return f"not all of the data.history = {number} states, {step} apart, that end there are in the data"


def _simulated_path(data: Data, variables: list[str]) -> str:
    """The embedded data set, generated on first use; what it does not have is said before that."""
    static = [] if data.static_path else data.static_variables
    for key, names, known in (
        ("variables", variables, simulated.VARIABLES),
        ("static_variables", static, simulated.STATIC_VARIABLES),
    ):
        if missing := [name for name in names if name not in known]:
            hint = nearest_name(missing[0], known)
            raise ConfigError(f"data.{key} = {missing[0]!r}: not in the simulated data{hint}")
    _check_grid((simulated.NUM_LAT, simulated.NUM_LON), data.grid_shape, (1, 1))
    return str(simulated.ensure_simulated(in_project(SIMULATED_PATH)))


def _check_grid(shape: tuple[int, int], wanted: tuple[int, int], patch_size: tuple[int, int]) -> None:
    if any(wanted) and tuple(wanted) != tuple(shape):
        raise ConfigError(
            f"data.grid_shape = {list(wanted)}: the data have {list(shape)}; set that or [0, 0]"
        )
    if patch_size[0] > shape[0] or patch_size[1] > shape[1]:
        raise ConfigError(f"model.patch_size = {list(patch_size)}: larger than the grid {list(shape)}")


def _split(times: np.ndarray, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and the validation period; without a training period, all other dates train."""
    validation = _inside(times, "data.validation_period", data.validation_period)
    if data.train_period:
        train = _inside(times, "data.train_period", data.train_period)
    else:
        train = np.setdiff1d(np.arange(len(times)), validation)
    if len(train) < 2:
        raise ConfigError(
            f"data.train_period = {list(data.train_period)}: fewer than two dates {_span(times)}"
        )
    if data.validation_period and not len(validation):
        period = list(data.validation_period)
        raise ConfigError(f"data.validation_period = {period}: no date {_span(times)}")
    return train, validation


def _inside(times: np.ndarray, key: str, period: tuple[str, ...]) -> np.ndarray:
    if not period:
        return np.zeros(0, int)
    first, last = _ends(key, period)
    return np.flatnonzero((times >= first) & (times <= last))


def _ends(key: str, period: tuple[str, ...]) -> tuple[np.datetime64, np.datetime64]:
    """The first and the last instant of a period that is not empty."""
    span = parse_period(key, period)
    assert span
    return np.datetime64(span[0], "s"), np.datetime64(span[1], "s")


def _span(times: np.ndarray) -> str:
    return f"of it is in the data, which run from {times[0]} to {times[-1]}"


def evenly_spaced(items: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of the items (0: all), from the first to the last."""
    if not limit or len(items) <= limit:
        return items
    return items[np.linspace(0, len(items) - 1, limit).round().astype(int)]
