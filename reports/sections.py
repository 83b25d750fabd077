"""The sections of a page: each a heading with tables, pictures and remarks; what is not there says why."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from errors import ConfigError, DataError
from reports.figures import curves, embedded_file, rmse_by_lead
from reports.forecast_maps import film, first_forecast, stills
from reports.run import HOUR, Run, differences
from reports.scores import rmse_of, score_rows, side_by_side
from verification.score_plots import headline

PLOTS = {
    "spectra.png": "Zonal energy spectra, means over the middle latitudes",
    "scorecard.png": "RMSE relative to the baseline; colours where it is significant",
    "acc.png": "Anomaly correlation",
    "bias.png": "Mean error",
}


@dataclass
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass
class Picture:
    """`svg` is an element, `source` what an image's src can be."""

    about: str
    svg: str = ""
    source: str = ""


@dataclass
class Section:
    title: str
    remarks: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


def sections(runs: Sequence[Run], cluster: str) -> list[Section]:
    """Of one run, or of several side by side."""
    found = [what_ran(runs)]
    if len(runs) > 1:
        found.append(what_differs(runs))
    found += [what_was_logged(runs), scores(runs)]
    for build in (spectra, forecasts):
        found += [build(run, named=len(runs) > 1) for run in runs]
    return [*found, where_time_went(runs), interruptions(runs), costs(runs, cluster)]


def what_ran(runs: Sequence[Run]) -> Section:
    lines: dict[str, Callable[[Run], Any]] = {
        "folder": lambda run: run.folder,
        "model": lambda run: run.settings["model.name"],
        "data": lambda run: run.settings["data.path"],
        "training period": lambda run: " to ".join(run.settings["data.train_period"]),
        "optimiser": lambda run: f"{run.settings['optimizer.name']}, lr {run.settings['optimizer.lr']:g}",
        "loss": lambda run: run.settings["training.loss"],
        "steps": lambda run: f"{run.steps:,} of {run.steps_asked:,}",
        "epochs": lambda run: f"{run.logged[-1]['epoch']:.2f}" if run.logged else "",
        "began": lambda run: run.starts[0]["time"] if run.starts else "not known",
        "last line": lambda run: run.ended,
        "ranks": ranks,
        "versions": lambda run: versions(run),
    }
    rows = [[name, *(str(value(run)) for run in runs)] for name, value in lines.items()]
    return Section("What ran", tables=[Table(["", *(run.name for run in runs)], rows)])


def ranks(run: Run) -> str:
    """ "8 x NVIDIA H100: dp_shard 4 x tp 2"."""
    if not run.starts:
        return "not known"
    last = run.starts[-1]
    layout = " x ".join(f"{axis} {n}" for axis, n in last["layout"].items() if n > 1)
    return f"{last['ranks']} x {last['device']}" + (f": {layout}" if layout else "")


def versions(run: Run) -> str:
    return (
        f"torch {run.starts[-1]['torch']}, Python {run.starts[-1]['python']}" if run.starts else "not known"
    )


def what_differs(runs: Sequence[Run]) -> Section:
    rows = [[key, *(str(value) for value in values)] for key, values in differences(runs)]
    remarks = [] if rows else ["Their configurations are the same."]
    return Section(
        "What differs", remarks, [Table(["key", *(run.name for run in runs)], rows)] if rows else []
    )


def what_was_logged(runs: Sequence[Run]) -> Section:
    about = "Against the step; a dotted line is where a run was started again."
    return Section("Curves", pictures=[Picture(about, svg=curves(runs))])


def scores(runs: Sequence[Run]) -> Section:
    """RMSE beside baselines, of all runs in one table and one picture."""
    section, tables = Section("Scores"), {}
    for run in runs:
        source, table = rmse_of(run)
        section.remarks.append(
            f"{run.name}: " + (f"RMSE from {source}." if source else "nothing was scored yet.")
        )
        if not table.empty:
            tables[run.name] = table
    if not tables:
        return section
    section.remarks.append("A star marks the least of a row; compare runs where they have the same dates.")
    drawn = side_by_side(tables)
    names = headline(list(dict.fromkeys(next(iter(drawn.values())).variable)), 6)
    section.pictures.append(Picture("RMSE against the lead", svg=rmse_by_lead(drawn, names)))
    section.tables.append(Table(*score_rows(drawn)))
    return section


def titled(title: str, run: Run, named: bool) -> str:
    return f"{title}: {run.name}" if named else title


def spectra(run: Run, named: bool) -> Section:
    """evaluate.py's plots."""
    section = Section(titled("Spectra and scorecard", run, named))
    plots = [(run.folder / "evaluation" / name, about) for name, about in PLOTS.items()]
    section.pictures = [Picture(about, source=embedded_file(path)) for path, about in plots if path.exists()]
    if not section.pictures:
        section.remarks.append("evaluate.py has not scored a forecast of this run.")
    return section


def forecasts(run: Run, named: bool) -> Section:
    section = Section(titled("A forecast", run, named))
    try:
        case = first_forecast(run)
    except (ConfigError, DataError) as error:
        section.remarks.append(f"No maps of forecasts: {error}")
        return section
    start = str(case.date)[:16].replace("T", " ")
    section.pictures = [
        Picture(f"{case.name} from the analysis of {start} UTC", source=film(case)),
        Picture("Forecast, truth and error", source=stills(case)),
    ]
    return section


def where_time_went(runs: Sequence[Run]) -> Section:
    """The plots of a run's newest trace, which traces.inspect_trace has drawn."""
    section = Section("Time")
    for run in runs:
        plots = sorted((run.folder / "plots").glob("trace-*.png"))
        section.pictures += [
            Picture(f"{run.name}: {path.stem}", source=embedded_file(path)) for path in plots
        ]
    if not section.pictures:
        section.remarks.append(
            "No trace: python -m traces.inspect_trace draws where the time of a step goes."
        )
    return section


def interruptions(runs: Sequence[Run]) -> Section:
    """A line a start, and the steps that were skipped."""
    section = Section("Restarts and skipped steps")
    for run in runs:
        lost, skipped = run.steps_lost, run.skipped
        starts = (
            f"{len(run.starts)} starts, {lost} logged steps done again" if run.starts else "starts not known"
        )
        section.remarks.append(f"{run.name}: {starts}, {skipped} bad steps skipped.")
        if len(run.starts) > 1:
            rows = [[s["time"], s["step"], s["reached"], s["ranks"], s["device"]] for s in run.starts]
            section.tables.append(Table(["start", "from step", "reached before", "ranks", "device"], rows))
    return section


def costs(runs: Sequence[Run], cluster: str) -> Section:
    head = ["", "hours of steps", "to the end", "device-hours", "$ so far", "$ to the end", "GB on disk"]
    rows = [cost_row(run, cluster) for run in runs]
    remarks = [
        "Of steps alone, at the speed of the last logged ones; validations, saves and waits come on top."
    ]
    if any(row[4] == "" for row in rows):
        remarks.append(
            "No price is known of the device: name a machine of planning/clusters.toml with --cluster."
        )
    return Section("Cost", remarks, [Table(head, rows)])


def cost_row(run: Run, cluster: str) -> list[str]:
    done, left = run.seconds / HOUR, run.seconds_to_the_end / HOUR
    price = run.dollars_an_hour(cluster)
    dollars = ["", ""] if price is None else [f"{price * done:,.2f}", f"{price * left:,.2f}"]
    devices = f"{run.starts[-1]['ranks'] * done:.2f}" if run.starts else ""
    size = f"{bytes_below(run.folder) / 1e9:.2f}"
    return [run.name, f"{done:.2f}", str(timedelta(seconds=round(left * HOUR))), devices, *dollars, size]


def bytes_below(folder: Path) -> int:
    """Of a file that has several names, once; checkpoints come and go while one looks."""
    seen: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(path, name))
            except FileNotFoundError:
                continue
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())
