"""Describe analyses: their content, their problems, and a [data] section to train on them.

    .venv/bin/python -m datasets.describe SOURCE
    .venv/bin/python -m datasets.describe SOURCE --select member=0 --all

SOURCE is a value of data.path. Values are checked on 24 evenly spaced dates, with --all on every date.
Exit codes: 0 no problems, 1 problems, 2 bad input.
"""

from errors import DataError, one_line_errors, without_secrets
from jobs.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()  # before the imports, which take a second

import json
import os
import sys
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from command_line import OneLineParser
from config import Validation
from datasets.archive import Archive, consecutive, evenly_spaced, find_gaps, read_all_fields, usual_hours
from datasets.grid import latitude_bounds
from datasets.options import check_selection, parse_selection
from datasets.remote import Access, is_url
from datasets.statistics import implausible_kinds, undeclared_fill
from datasets.variables import OFTEN_ZERO, group_levels, join_name, known_name, usual_range

SAMPLED_DATES = 24
MOST_RANGES = 10  # of dates in a row of the table
HELD_OUT = 0.15  # of the dates, for validation
LONGEST_LEAD = np.timedelta64(24, "h")  # default of validation.lead_hours


class Finding(NamedTuple):
    """A row of the table of problems."""

    problem: str
    where: str
    dates: str = ""
    count: int = 1


def main(argv: list[str]) -> int:
    """Print the description; return 1 if there are problems. Raises ConfigError, DataError."""
    parser = OneLineParser("datasets.describe", __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="what data.path takes: file, folder, glob or URL")
    add("--select", nargs="+", default=[], metavar="DIM=LABEL", help="as data.select")
    add("--storage_options", nargs="+", default=[], metavar="NAME=VALUE", help="as data.storage_options")
    add("--all", action="store_true", help="look at the values of every date")
    options = parser.parse_args(argv)
    # -- the source, with what of it cannot be read, and what is odd about the values of some dates
    selection, left_out = parse_selection(options.select), dict[str, str]()
    access = Access.of(options.storage_options, options.source)
    fields, unreadable = read_all_fields(options.source, selection, access, left_out)
    archive = Archive(options.source, fields, unreadable)
    check_selection(selection, archive.extra_dimensions, options.source)
    grid, times = archive.grid, archive.times
    dates = evenly_spaced(np.arange(len(times)), 0 if options.all else SAMPLED_DATES)
    problems, missing = find_problems(archive, dates, options.all)
    unread = [Finding(reason, name) for name, reason in (left_out | archive.unreadable).items()]
    findings = dict.fromkeys([*unread, *problems])

    # A row for each variable; of its levels the largest share of cells without a value.
    rows = []
    for base, levels in group_levels(archive.variables).items():
        names = [join_name(base, level) for level in levels]
        raw, unit = archive.find(names[0])[0][0].raw, archive.units(names[0])
        if unit and "units" not in getattr(raw, "attrs", {}):  # what is read is assumed to be in ours
            unit += " (assumed)"
        share = max(missing.get(name, 0) for name in names)
        numbers = " ".join(str(level) for level in sorted(filter(None, levels)))
        percent = f"{100 * share:.1f} %" if share else "-"
        rows.append((base, numbers or "-", unit or "-", str(raw.dtype), percent))
    # -- the description: variables, grid, period, problems, and a [data] section to begin with
    variables = pd.DataFrame(rows, columns=["variable", "levels", "units", "type", "missing"])
    spans = [f"{values[0]:g} to {values[-1]:g}" for values in (grid.latitude, grid.longitude)]
    is_global = grid.periodic and np.abs(latitude_bounds(grid.latitude)[[0, -1]]).min() > 90 - 1e-6
    extent = f"latitude {spans[0]}, longitude {spans[1]}: {'the globe' if is_global else 'a region'}"
    problems = pd.DataFrame(list(findings), columns=Finding._fields)
    checked = f"the values of {len(dates)} of {len(times)} dates"
    print(f"{without_secrets(options.source)}\n\n{variables.to_string(index=False, justify='left')}\n")
    print(f"grid        {grid.shape[0]} x {grid.shape[1]} points, {extent}")
    print(f"period      {len(times)} dates, {times[0]} to {times[-1]}, {usual_hours(times):g} hours apart\n")
    if findings:
        print(f"{problems.to_string(index=False, justify='left')}\n{len(problems)} problems in {checked}\n")
    else:
        print(f"no problems in {checked}\n")
    # -- sections that train below any shipped configuration; the last part of the dates validates
    first = times[int(len(times) * (1 - HELD_OUT))]
    first = max(times[min(2, len(times) - 1)], min(first, times[-1] - LONGEST_LEAD))
    first = first if len(times) < 20 else first.astype("datetime64[D]").astype("datetime64[s]")
    before = times[times < first]
    train, validation = (
        [str(begin).removesuffix("T00:00:00"), str(end)]
        for begin, end in ((before[0], before[-1]), (first, times[-1]))
    )
    step, path = max(1, round(usual_hours(times))), options.source
    lists = {key: getattr(options, key) for key in ("select", "storage_options")}
    on_levels = {name.partition(":")[0] for name in archive.variables if ":" in name}
    section: dict[str, Any] = {
        "path": path if is_url(path) else os.path.abspath(path),
        "variables": [name for name in archive.variables if name not in on_levels],
        "levels": [],  # and, if there are none, no static variables: the configuration may have some
        "static_variables": archive.static_variables,
        **{key: values for key, values in lists.items() if values},
        "grid_shape": list(archive.grid.shape),
        "step_hours": step,
        "train_period": train,
        "validation_period": validation,
    }
    # Texts, numbers and lists are the same in TOML and JSON; tomli_w gives each level a line of its own.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in section.items()]
    longest = (times[-1] - np.datetime64(validation[0])) / np.timedelta64(1, "h")
    leads = [h for h in Validation().lead_hours if h % step == 0 and h <= longest] or [step]
    print(without_secrets("\n".join(["[data]", *lines, "", "[validation]", f"lead_hours = {leads}"])))
    return int(bool(findings))


def describe_dates(dates: np.ndarray, axis: np.ndarray) -> str:
    """Return dates as text: the first and the last of each stretch on the axis, of at most ten."""
    ranges = [axis[[run[0], run[-1]]] for run in consecutive(np.searchsorted(axis, dates))]
    texts = [" to ".join(dict.fromkeys(map(str, ends))) for ends in ranges[:MOST_RANGES]]
    more = f" and {len(ranges) - MOST_RANGES} more" if len(ranges) > MOST_RANGES else ""
    return ", ".join(texts) + more


def find_problems(archive: Archive, dates: np.ndarray, every_date: bool) -> tuple[list, dict[str, float]]:
    """Return a finding for each problem of names, dates, units and files, and of the fields on dates
    (indices), and the missing share of each variable's cells. every_date: compare files on all dates.
    """
    findings: list[Finding] = []
    for name in [*archive.variables, *archive.static_variables]:
        if known := known_name(name):
            findings.append(Finding(f"an unknown name; the nearest known one is {known}", name))
    for name, levels in group_levels(archive.variables).items():
        if None in levels and len(levels) > 1:
            findings.append(Finding("with and without a level, of which a run takes one", name))
    gaps = find_gaps(archive.times)
    if len(gaps):
        ranges = describe_dates(gaps, np.union1d(gaps, archive.times))
        findings.append(Finding("dates missing", archive.path, ranges, len(gaps)))
    for name in archive.variables:
        absent = archive.times[~archive.has([name])]
        if len(absent):
            ranges = describe_dates(absent, archive.times)
            findings.append(Finding("dates missing that other variables have", name, ranges, len(absent)))
    for name in archive.variables:
        try:
            archive.check([name], every_date)
        except DataError as error:
            findings.append(Finding(str(error), name))
    for name in archive.static_variables:
        field = archive.read_static(name)
        if np.isnan(field).all():
            findings.append(Finding("no value at all", name))
        elif len(np.unique(field[np.isfinite(field)])) < 2:
            findings.append(Finding("one value everywhere", name))
    # -- values
    problems: dict[tuple[str, str], list[int]] = {}  # problem and name -> dates
    always: dict[str, np.ndarray] = {}  # name -> cells (H, W) that are missing on every date with values
    shares: dict[str, dict[int, float]] = {}  # name -> date -> share of cells that are missing
    for i in dates.tolist():
        for names in archive.group_by_array(archive.variables):
            try:
                fields = archive.read(i, names)
            except DataError as error:
                problems.setdefault((str(error), names[0]), []).append(i)
                continue
            for name, values in zip(names, fields, strict=True):
                if not archive.has([name])[i]:
                    continue
                missing, finite = np.isnan(values), values[np.isfinite(values)]
                if (fill := undeclared_fill(finite, name)) is not None:
                    found = [f"{fill:g} in some cells: a missing value that is not declared"]
                    finite = finite[finite != fill]
                else:
                    found = []
                if not len(finite):
                    found.append("no value at all")
                elif finite.min() == finite.max() and name.partition(":")[0] not in OFTEN_ZERO:
                    found.append("one value everywhere")
                low, high = usual_range(name)
                counts = np.isinf(values).sum(), ((finite < low) | (finite > high)).sum()
                kinds = zip(implausible_kinds(name), counts, strict=True)
                for problem in (*found, *(f"values {kind}" for kind, count in kinds if count)):
                    problems.setdefault((problem, name), []).append(i)
                shares.setdefault(name, {})[i] = missing.mean()
                if not missing.all():
                    always[name] = always.get(name, missing) & missing
    # A mask of land is missing on every date; cells that are missing on some dates only are a defect.
    for name, mask in always.items():
        more = [i for i, share in shares[name].items() if mask.mean() < share < 1]
        if more:
            problems["missing cells that have values on other dates", name] = more
    for (problem, name), rows in problems.items():
        ranges = describe_dates(archive.times[rows], archive.times[dates])
        findings.append(Finding(problem, name, ranges, len(rows)))
    return findings, {name: float(np.mean([*of_dates.values()])) for name, of_dates in shares.items()}


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
