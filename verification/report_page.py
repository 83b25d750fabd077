"""A report of one or more runs as one HTML file that needs nothing else.

    .venv/bin/python -m verification.report_page outputs/demo                     one run
    .venv/bin/python -m verification.report_page outputs/demo outputs/other       runs next to each other

--output FILE    (default: report.html in the first run's folder)

Configuration, losses, scores, restarts and time, with the plots of train.py, evaluate.py and
traces.inspect_trace that the folders have. Exit codes: 0, 2 bad input.
"""

import base64
import io
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from matplotlib.pyplot import close

from command_line import own_options, split_options
from datasets.variables import units
from errors import ConfigError, DataError, one_line_errors
from jobs.durable_files import write_durably
from jobs.journal import read_records
from verification.plots import add_legend, build_panels, draw_by_lead, draw_losses, headline, label_axes

OPTIONS = own_options(output="")
KEY = re.compile(r"val/rmse(?:_(?P<baseline>\w+))?/(?P<variable>.+?)(?:@(?P<hours>\d+)h)?")
COLUMNS = ["forecast", "variable", "hours", "value", "units", "dates"]
PLOTS = ("plots/*.png", "evaluation/*.png")


@dataclass(frozen=True)
class Run:
    """The files of a run's folder. records, starts: lines of metrics.jsonl and starts.jsonl."""

    name: str
    folder: Path
    settings: dict[str, Any]  # "training.steps" -> value
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]

    @property
    def logged(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("step_seconds") is not None]

    @property
    def seconds(self) -> float:
        """Return the seconds of the steps that count, without repeated ones, validations and saves."""
        steps = pairwise([0, *(record["step"] for record in self.logged)])
        pairs = zip(steps, self.logged, strict=True)
        return sum((step - before) * record["step_seconds"] for (before, step), record in pairs)

    @property
    def skipped(self) -> int:
        """Return the bad steps; each start counts its own."""
        counts = pairwise([0, *(record.get("skipped_steps") or 0 for record in self.logged)])
        return sum(now if now < before else now - before for before, now in counts)

    def scores(self) -> pd.DataFrame:
        """Return the RMSE of evaluate.py, or else of the last validation; columns COLUMNS."""
        stored = self.folder / "evaluation/scores.csv"
        if stored.exists():
            table = pd.read_csv(stored).query("metric == 'rmse' and region == 'global' and lead_hours > 0")
            levels = table.level.map(lambda level: "" if pd.isna(level) else f":{level:g}")
            table = table.assign(variable=table.variable + levels, hours=table.lead_hours)
            return table.assign(dates=table.num_dates).reindex(columns=COLUMNS)
        record = next((each for each in reversed(self.records) if "val/loss" in each), {})
        first, rows = min(self.settings["validation.lead_hours"], default=0), []
        for key, value in record.items():
            if (found := KEY.fullmatch(key)) and value is not None:
                dates = record.get("val/dates" + (f"@{found['hours']}h" if found["hours"] else ""))
                name = (found["baseline"] or "model").replace("_", " ")
                rows.append((name, found["variable"], int(found["hours"] or first), value, "", dates))
        return pd.DataFrame(rows, columns=COLUMNS)


@dataclass
class Section:
    title: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    pictures: list[tuple[str, str]] = field(default_factory=list)  # caption, source


def open_run(folder: Path) -> Run:
    """Raises DataError if it is no run's folder, or nothing was logged."""
    config, records = folder / "config.toml", read_records(folder / "metrics.jsonl")
    if not config.is_file():
        raise DataError(f"{folder}: has no config.toml; name a run's folder, such as outputs/demo")
    if not records:
        raise DataError(f"{folder}: metrics.jsonl has no line yet; wait for the first logged step")
    try:
        tables = tomllib.loads(config.read_text())
        settings = {f"{section}.{key}": value for section in tables for key, value in tables[section].items()}
        _ = settings["validation.lead_hours"], settings["training.steps"]
    except (tomllib.TOMLDecodeError, AttributeError, KeyError) as error:
        raise DataError(f"{config}: {error}; is it a run's folder?") from None
    return Run(folder.resolve().name, folder, settings, records, read_records(folder / "starts.jsonl"))


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Raises DataError as `open_run`, or if a folder is named twice."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DataError(f"{', '.join(map(str, folders))}: a folder is named twice; name each run once")
    runs = [open_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        return [Run(str(run.folder), run.folder, run.settings, run.records, run.starts) for run in runs]
    return runs


def build_sections(runs: Sequence[Run]) -> list[Section]:
    names = [run.name for run in runs]
    described = [describe(run) for run in runs]
    rows = [[label, *(each[label] for each in described)] for label in described[0]]
    sections = [Section("Runs", ["", *names], rows)]
    keys = dict.fromkeys(key for run in runs for key in run.settings if key != "job.dump_folder")
    values = [[key, *(run.settings.get(key) for run in runs)] for key in keys]
    if different := [row for row in values if any(value != row[1] for value in row[2:])]:
        sections.append(Section("Settings that differ", ["key", *names], different))
    tables = side_by_side(runs)
    sections.append(Section("Losses", pictures=[("Training (lines), validation (points)", losses(runs))]))
    if tables:
        pictures = [("RMSE against lead time", rmse_by_lead(tables))]
        sections.append(Section("Scores", *score_rows(tables), pictures=pictures))
    for run in runs:
        files = [path for pattern in PLOTS for path in sorted(run.folder.glob(pattern))]
        pictures = [(str(path.relative_to(run.folder)), embed(path.read_bytes())) for path in files]
        sections.append(Section(f"Plots of {run.name}", pictures=pictures))
    return sections


def describe(run: Run) -> dict[str, str]:
    last = run.starts[-1] if run.starts else {}
    layout = " x ".join(f"{axis} {n}" for axis, n in last.get("layout", {}).items() if n > 1)
    repeated = sum(max(start["reached"] - start["step"], 0) for start in run.starts[1:])
    steps, asked = max(record["step"] for record in run.records), int(run.settings["training.steps"])
    left = (asked - steps) * run.logged[-1]["step_seconds"] if run.logged else 0.0
    return {
        "folder": str(run.folder),
        "model": str(run.settings.get("model.name")),
        "data": str(run.settings.get("data.path")),
        "steps": f"{steps:,} of {asked:,}",
        "ranks": f"{last['ranks']} x {last['device']} {layout}" if last else "not known",
        "versions": f"torch {last['torch']}, Python {last['python']}" if last else "not known",
        "starts": f"{len(run.starts)}, {repeated} logged steps repeated, {run.skipped} bad steps skipped",
        "time of the steps": str(timedelta(seconds=round(run.seconds))),
        "time left": str(timedelta(seconds=round(left))),
        "device hours": f"{last.get('ranks', 1) * run.seconds / 3600:.2f}",
    }


def side_by_side(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the scores of each run's model under the run's name, then those of each baseline once."""
    tables = {run.name: table for run in runs if not (table := run.scores()).empty}
    models = {name: table[table.forecast == "model"] for name, table in tables.items()}
    every = [part for table in tables.values() for part in table.groupby("forecast", sort=False)]
    return models | {str(name): part for name, part in every if name != "model"}


def score_rows(tables: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of RMSE: the least of a row has a star."""
    whole = pd.concat(tables, names=["source"]).reset_index("source")
    rows = []
    for (variable, hours), own in whole.groupby(["variable", "hours"], sort=False):  # type: ignore[misc]
        values, least = own.groupby("source").value.first(), own.value.min()
        cells = [mark(values.get(name), least) for name in tables]
        dates = ", ".join(f"{count:.0f}" for count in sorted(set(own.dates.dropna())))
        rows.append([variable, f"{hours} h", dates, *cells, next(iter(own.units.dropna()), "")])
    return ["variable", "lead", "dates", *tables, "units"], rows


def mark(value: float | None, least: float) -> str:
    return "" if value is None else f"{value:.4g} *" if value == least else f"{value:.4g}"


def losses(runs: Sequence[Run]) -> str:
    figure, (axes,) = build_panels(1, "", size=(8.0, 4.0))
    draw_losses(axes, {run.name: run.records for run in runs})
    return picture(figure)


def rmse_by_lead(tables: dict[str, Any]) -> str:
    names = headline(list(dict.fromkeys(name for table in tables.values() for name in table.variable)), 6)
    figure, panels = build_panels(len(names), "", columns=3)
    for axes, name in zip(panels, names, strict=True):
        for number, (label, table) in enumerate(tables.items()):
            own = table[table.variable == name].sort_values("hours")
            draw_by_lead(axes, own.hours, own.value, label, number)
        label_axes(axes, name, "rmse", units(name))
    add_legend(figure, panels)
    return picture(figure)


def picture(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    close(figure)
    return embed(buffer.getvalue())


def embed(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Raises DataError if a folder is no run's, or the page cannot be written."""
    runs = open_runs(folders)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    page = environment.get_template("report_page.html").render(
        title=" and ".join(run.name for run in runs),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        sections=build_sections(runs),
    )
    try:
        write_durably(output, page)
    except OSError as error:
        raise DataError(f"--output {output}: {error.strerror}; name another file") from None


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    with one_line_errors():
        options, names = split_options(argv, OPTIONS)
        if unknown := [name for name in names if name.startswith("-")]:
            raise ConfigError(f"report_page: {unknown[0]}: no such option; see --help")
        if not names:
            raise ConfigError("report_page: name a run's folder, such as outputs/demo")
        folders = [Path(name) for name in names]
        target = Path(options.output or folders[0] / "report.html")
        write_page(folders, target)
        print(f"written: {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
