"""`datasets.convert SOURCE --check`: all that is wrong with a source, in one table.

Every date of every variable is read once. Shapes: n dates, V variables, H latitudes, W longitudes.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from archives.archive import Archive, find_files
from archives.files import open_file
from archives.layouts import stored_fields
from archives.picks import check_used, parse_picks
from archives.stored_field import StoredField
from archives.variables import plain_units, split_name, units
from conversion.field_watch import FieldWatch
from conversion.parallel import Progress
from conversion.source import chosen_variables, dates_in
from errors import DataError
from text_tables import text_table

BLOCK_BYTES = 2**28  # about, of the fields that are read at once


class Finding(NamedTuple):
    """A row of the table: what is wrong, where, since which date, how often."""

    what: str
    where: str
    first: str = ""
    count: int = 1


def check_source(options: Namespace) -> int:
    """Prints the table; 0 where nothing is wrong, else 1. DataError, ConfigError: nothing to check."""
    picks = parse_picks(options.select)
    findings, fields, unreadable = readable_fields(find_files(options.source), picks)
    try:
        archive = Archive(options.source, fields, unreadable, picks)
    except DataError as error:
        findings.append(Finding(str(error), options.source))
        tell(findings, "")
        return 1
    check_used(picks, archive.extra_dimensions, archive.path)
    names = chosen_variables(archive, options.variables, options.levels, ())
    rows = np.flatnonzero(dates_in(archive.times, options.period))
    findings += [Finding(why, name) for name, why in unreadable.items()]
    findings += repeated_dates(fields) + missing_dates(archive, names, rows)
    findings += other_units(archive, names) + static_findings(archive)
    findings += values_of(archive, names, rows)
    tell(findings, f"{len(rows)} dates of {len(names)} variables")
    return 1 if findings else 0


def tell(findings: Sequence[Finding], seen: str) -> None:
    """The table, its columns as wide as they have to be."""
    if findings:
        rows = [("what", "where", "first date", "count"), *findings]
        widths = [2 + max(len(str(row[i])) for row in rows) for i in range(3)]
        print(text_table(" ".join(f"<{width}" for width in widths) + " <9", rows))
    print(f"checked: {seen or 'no fields'}; {len(findings) or 'nothing'} found")


def readable_fields(
    files: Sequence[str], picks: Mapping[str, str]
) -> tuple[list[Finding], list[StoredField], dict[str, str]]:
    """The fields of the files that can be opened, a finding for each other, and why arrays are no fields."""
    findings: list[Finding] = []
    fields: list[StoredField] = []
    unreadable: dict[str, str] = {}
    for name in files:
        try:
            found, reasons = stored_fields(open_file(name), picks=picks)
        except DataError as error:
            findings.append(Finding(str(error).partition(": ")[2], name))
            continue
        fields += found
        unreadable |= reasons
    return findings, fields, unreadable


# -- dates


def repeated_dates(fields: Sequence[StoredField]) -> list[Finding]:
    """Dates that a variable has twice: the first in the order of the files counts when it is read."""
    axes: dict[str, list[StoredField]] = {}
    for field in fields:
        for name in field.names if field.times is not None else ():
            axes.setdefault(name, []).append(field)
    by_axes: dict[tuple[int, ...], tuple[list[str], list[StoredField]]] = {}
    for name, own in axes.items():
        key = tuple(id(field.times) for field in own)
        by_axes.setdefault(key, ([], own))[0].append(name)
    findings = []
    for names, own in by_axes.values():
        every = np.concatenate([field.times for field in own if field.times is not None])
        dates, counts = np.unique(every[~np.isnat(every)], return_counts=True)
        twice = dates[counts > 1]
        if len(twice):
            again = int((counts - 1).sum())
            findings.append(Finding("dates that are there again", _some(names), str(twice[0]), again))
    return findings


def missing_dates(archive: Archive, names: Sequence[str], rows: np.ndarray) -> list[Finding]:
    """Dates that the usual interval would have between the first and the last; of all, of some variables."""
    times = archive.times[rows]
    gone = _gaps(times)
    findings = [Finding("dates missing", archive.path, str(gone[0]), len(gone))] if len(gone) else []
    lacking: dict[bytes, list[str]] = {}
    for name in names:
        lacking.setdefault(archive.has([name])[rows].tobytes(), []).append(name)
    for key, own in lacking.items():
        absent = np.flatnonzero(~np.frombuffer(key, bool))
        if len(absent):
            what = "dates missing that other variables have"
            findings.append(Finding(what, _some(own), str(times[absent[0]]), len(absent)))
    return findings


def _gaps(times: np.ndarray) -> np.ndarray:
    if len(times) < 3:
        return times[:0]
    steps, counts = np.unique(np.diff(times), return_counts=True)
    usual = steps[counts.argmax()]
    wide = np.flatnonzero(np.diff(times) > usual)
    inside = [np.arange(times[i] + usual, times[i + 1], usual) for i in wide]
    return np.concatenate([times[:0], *inside])


# -- what files say of themselves


def other_units(archive: Archive, names: Sequence[str]) -> list[Finding]:
    findings = []
    for base in dict.fromkeys(split_name(name)[0] for name in names):
        name = next(each for each in names if split_name(each)[0] == base)
        said, ours = archive.units(name), units(name)
        if ours and said and plain_units(said) != ours:
            findings.append(Finding(f"units {said!r}, where {ours!r} is known", base, "", 1))
    return findings


def static_findings(archive: Archive) -> list[Finding]:
    findings = []
    for name in archive.static_variables:
        try:
            values = archive.read_static(name)
        except DataError as error:
            findings.append(Finding(_reason(error), name))
            continue
        finite = values[np.isfinite(values)]
        if not len(finite) or finite.min() == finite.max():
            what = "one value everywhere" if len(finite) else "no value anywhere"
            findings.append(Finding(what, f"{name}, without dates"))
    return findings


# -- values


def values_of(archive: Archive, names: Sequence[str], rows: np.ndarray) -> list[Finding]:
    """Everything that shows only when the fields are read."""
    watches = {name: FieldWatch(name) for name in names}
    work = [
        (group, block) for group in archive.stored_together(names) for block in _blocks(archive, group, rows)
    ]
    progress, damaged = Progress(len(work)), []
    for group, block in work:
        damaged += _look(archive, group, block, watches)
        progress.advance()
    progress.close()
    return damaged + [
        Finding(what, _where(archive, name, date), str(date), count)
        for name, watch in watches.items()
        for what, date, count in watch.findings()
    ]


def _where(archive: Archive, name: str, date: np.datetime64) -> str:
    """A variable, and the file where there are several."""
    file = archive.file_of(archive.index(date), name)
    return name if file == archive.path else f"{name} in {os.path.basename(file)}"


def _blocks(archive: Archive, group: Sequence[str], rows: np.ndarray) -> Iterator[np.ndarray]:
    """Rows that follow each other, as many as are stored together or fit."""
    size = 4 * len(group) * archive.grid.shape[0] * archive.grid.shape[1]
    most = max(1, min(max(archive.time_chunk(group), 16), BLOCK_BYTES // size))
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        yield from (run[i : i + most] for i in range(0, len(run), most))


def _look(
    archive: Archive, group: Sequence[str], rows: np.ndarray, watches: Mapping[str, FieldWatch]
) -> list[Finding]:
    """A finding for each variable and date that cannot be read; the others are looked at."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    try:
        block = archive.read_block(start, stop, group)
    except DataError as error:
        if len(group) > 1:
            return [each for name in group for each in _look(archive, [name], rows, watches)]
        if len(rows) > 1:
            return [each for row in rows for each in _look(archive, group, row[None], watches)]
        date = archive.times[start]
        return [Finding(_reason(error), _where(archive, group[0], date), str(date))]
    there = {name: archive.has([name])[start:stop] for name in group}
    for v, name in enumerate(group):
        for i, date in enumerate(archive.times[start:stop]):
            if there[name][i]:
                watches[name].look(block[i, v], date)
    return []


def _reason(error: DataError) -> str:
    """Of an error that a field cannot be read with, without the file and the way out."""
    text = str(error).partition("; restore the file")[0]
    return "cannot be read (" + text.partition("cannot be read (")[2] if "cannot be read (" in text else text


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
