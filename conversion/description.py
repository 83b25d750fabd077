"""The text of `datasets.describe`: what an archive holds, and the `[data]` section that trains on it."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from archives.archive import Archive, find_files, open_archive
from archives.files import files_below, is_url
from archives.grid import Grid, latitude_bounds
from archives.picks import check_used, parse_picks
from archives.training_store import FORMAT, TrainingStore, read_attributes
from archives.variables import ON_LEVELS, group_levels, join_name
from conversion.moments import Moments
from errors import DataError, without_secrets
from text_tables import text_table

READ_FOR = 2.0  # seconds
HELD_OUT = 0.15  # of the dates, for validation, where there are no whole years to spare
YEAR = np.timedelta64(365, "D")
LONGEST_LEAD = np.timedelta64(24, "h")  # of validation.lead_hours, as they are by default


def describe(path: str, select: Sequence[str] = ()) -> str:
    """Raises ConfigError, DataError."""
    archive = open_archive(path, parse_picks(select))
    check_used(archive.picks, archive.extra_dimensions, path)
    attributes = read_attributes(Path(path))
    store = TrainingStore(Path(path)) if FORMAT in attributes else None
    parts = [
        f"{without_secrets(path)}: {_kind(store)}",
        variables_table(archive, attributes.get("largest_error", {})),
        *([statistics_table(attributes["moments"])] if attributes.get("moments") else []),
        text_table(
            "<14 <90",
            [
                ("static", ", ".join(archive.static_variables) or "none"),
                ("grid", grid_line(archive.grid)),
                ("period", period_line(archive.times)),
                ("gaps", gaps_line(archive.times)),
                ("whole dates", whole_line(archive, store)),
                ("chunks", chunks_line(archive, store)),
                ("size", size_line(archive)),
                ("read rate", rate_line(archive)),
            ],
        ),
        data_section(archive, path, select),
    ]
    return "\n\n".join(parts)


def _kind(store: TrainingStore | None) -> str:
    if store is None:
        return "analyses as they came; datasets.convert makes a training store of them"
    return f"a training store made of {', '.join(store.attributes['sources'])}"


def variables_table(archive: Archive, errors: dict[str, float]) -> str:
    """A row for each variable: its levels, units, how its numbers are stored, how far they are off."""
    rows: list[tuple[Any, ...]] = [("variable", "levels", "units", "stored as", "largest error")]
    for base, own in group_levels(archive.variables).items():
        levels = sorted(level for level in own if level is not None)
        names = [join_name(base, level) for level in own]
        worst = max((errors.get(name, 0.0) for name in names), default=0.0)
        dtype = str(archive.array_of(names[0]).dtype)
        shown = " ".join(map(str, levels)) or "-"
        rows.append((base, shown, archive.shown_units(names[0]), dtype, f"{worst:.2g}" if worst else "-"))
    widths = [2 + max(len(str(row[i])) for row in rows) for i in range(5)]
    return text_table(" ".join(f"<{width}" for width in widths), rows)


def statistics_table(stored: dict[str, list[Any]]) -> str:
    """Of all dates of a training store, weighted by area; a row for each variable."""
    rows: list[tuple[str, ...]] = [("variable", "mean", "standard deviation", "lowest", "highest")]
    for name, plain in stored.items():
        found = Moments.read(plain)
        shown = (found.mean, found.deviation, found.minimum, found.maximum)
        rows.append((name, *(f"{number:.6g}" for number in shown)))
    return text_table(f"<{2 + max(len(row[0]) for row in rows)} >12 >20 >12 >12", rows)


def grid_line(grid: Grid) -> str:
    (rows, columns), latitude, longitude = grid.shape, grid.latitude, grid.longitude
    whole = grid.periodic and np.abs(latitude_bounds(latitude)[[0, -1]]).min() > 90 - 1e-6
    return (
        f"{rows} x {columns} points, latitude {latitude[0]:g} to {latitude[-1]:g}, longitude "
        f"{longitude[0]:g} to {longitude[-1]:g}: {'the globe' if whole else 'a region'}"
    )


def usual_interval(times: np.ndarray) -> np.timedelta64:
    """The most common one between two dates. DataError: there is one date."""
    if len(times) < 2:
        raise DataError("it has one date: nothing to train on")
    steps, counts = np.unique(np.diff(times), return_counts=True)
    return steps[counts.argmax()]


def period_line(times: np.ndarray) -> str:
    hours = usual_interval(times) / np.timedelta64(1, "h")
    return f"{len(times)} dates, {times[0]} to {times[-1]}, {hours:g} hours apart"


def gaps_line(times: np.ndarray) -> str:
    """How many dates are missing in between, and the first stretches of them."""
    usual = usual_interval(times)
    wide = np.flatnonzero(np.diff(times) > usual)
    if not len(wide):
        return "none"
    missing = [int((times[i + 1] - times[i]) / usual) - 1 for i in wide]
    shown = [f"after {times[i]} ({count})" for i, count in list(zip(wide, missing, strict=True))[:3]]
    more = f", and {len(wide) - 3} more" if len(wide) > 3 else ""
    return f"{sum(missing)} dates missing: {', '.join(shown)}{more}"


def whole_line(archive: Archive, store: TrainingStore | None) -> str:
    """On how many dates every variable has a value, where that is known without reading them all."""
    if store is not None:
        valid = store.valid()
        empty = [name for v, name in enumerate(store.variables) if not valid[:, v].all()]
        short = f"; {', '.join(empty[:4])} lack some" if empty else ""
        return f"{int(valid.all(axis=1).sum())} have a value of every variable{short}"
    there = archive.has(archive.variables)
    return f"{int(there.sum())} have every variable; datasets.convert {archive.path} --check looks for values"


def chunks_line(archive: Archive, store: TrainingStore | None) -> str:
    array = archive.array_of(archive.variables[0])
    if not array.chunks:
        return "none: one array a variable"
    axes = " x ".join(f"{size} {dim or 'of axis ' + str(i)}" for i, (size, dim) in _sizes(array))
    held = f", {store.shard_dates} dates an object" if store else ""
    return f"{axes}{held}"


def _sizes(array: Any) -> Any:
    return enumerate(zip(array.chunks, array.dims, strict=True))


def size_line(archive: Archive) -> str:
    decoded = 4 * len(archive.times) * len(archive.variables) * np.prod(archive.grid.shape) / 1e9
    if is_url(archive.path):
        return f"{decoded:.3g} GB as float32; what is stored lies behind a URL"
    stored, count = 0, 0
    for name in find_files(archive.path):
        for file in files_below(name):
            stored, count = stored + os.path.getsize(file), count + 1
    return f"{stored / 1e9:.3g} GB in {count} files; {decoded:.3g} GB as float32"


def rate_line(archive: Archive) -> str:
    """Of dates in a random order, all variables, by one process."""
    order = np.random.default_rng(0).permutation(len(archive.times))
    archive.read(int(order[0]), archive.variables)  # opens the files
    start, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < READ_FOR:
        archive.read(int(order[count % len(order)]), archive.variables)
        count += 1
    size = 4 * len(archive.variables) * np.prod(archive.grid.shape) / 1e6
    return (
        f"{count / seconds:.3g} dates/s, {count * size / seconds:.3g} MB/s as float32: measured here, one "
        "process, dates at random, as warm as the files were"
    )


# -- the section


def data_section(archive: Archive, path: str, select: Sequence[str]) -> str:
    """TOML that a configuration may begin with."""
    train, validation = split_periods(archive.times)
    names, levels = _short_names(archive.variables)
    hours = usual_interval(archive.times) / np.timedelta64(1, "h")
    section: dict[str, Any] = {
        "path": path if is_url(path) else os.path.abspath(path),
        "variables": names,
        **({"levels": levels} if levels else {}),
        **({"static_variables": archive.static_variables} if archive.static_variables else {}),
        **({"select": list(select)} if select else {}),
        "grid_shape": list(archive.grid.shape),
        "step_hours": max(1, round(float(hours))),
        "train_period": train,
        "validation_period": validation,
    }
    # Texts, numbers and lists are written in TOML as in JSON; tomli_w gives each level a line of its own.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in section.items()]
    return without_secrets("\n".join(["[data]", *lines]))


def _short_names(variables: Sequence[str]) -> tuple[list[str], list[int]]:
    """Names and levels that expand to these variables: with levels apart, where all have the same."""
    groups = group_levels(variables)
    level_sets = {tuple(sorted(filter(None, own))) for base, own in groups.items() if None not in own}
    plain = all((None in own) != (base in ON_LEVELS) for base, own in groups.items())
    if len(level_sets) == 1 and plain:
        return list(groups), list(level_sets.pop())
    return list(variables), []


def split_periods(times: np.ndarray) -> tuple[list[str], list[str]]:
    """Training and validation: the last whole year where there are three, else the last part of the dates."""
    last_year = times[-1].astype("datetime64[Y]")
    first = last_year.astype("datetime64[s]")
    if times[-1] - times[0] < 3 * YEAR or (times >= first).sum() < 2:
        first = times[int(len(times) * (1 - HELD_OUT))]
        first = max(times[min(2, len(times) - 1)], min(first, times[-1] - LONGEST_LEAD))
        first = first if len(times) < 20 else first.astype("datetime64[D]").astype("datetime64[s]")
    before = times[times < first]
    return _period(before[0], before[-1]), _period(first, times[-1])


def _period(first: np.datetime64, last: np.datetime64) -> list[str]:
    """As a configuration writes it."""
    return [str(first).removesuffix("T00:00:00"), str(last)]
