"""A report of one or more runs as one HTML file that needs nothing else.

    .venv/bin/python -m verification.report_page outputs/demo                     one run
    .venv/bin/python -m verification.report_page outputs/demo outputs/other       runs next to each other

--output FILE    (default: report.html in the first run's folder)

Configuration, losses, scores, starts and time, with the plots of train.py, evaluate.py and
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
from verification.plots import build_panels, draw_losses

OPTIONS = own_options(output="")
KEY = re.compile(r"val/rmse(?:_(?P<baseline>\w+))?/(?P<variable>.+?)(?:@(?P<hours>\d+)h)?")
Table = Any  # a DataFrame: what pandas' methods give by their annotations no checker can tell
COLUMNS = ["forecast", "variable", "hours", "value", "units", "dates"]
PLOTS = ("plots/*.png", "evaluation/*.png")


@dataclass(frozen=True)
class Run:
    """The files of a run's folder. records, starts: lines of metrics.jsonl and starts.jsonl."""

    folder: Path
    settings: dict[str, Any]  # "training.steps" -> value
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]


@dataclass
class Section:
    title: str
    table: str = ""  # HTML
    pictures: list[tuple[str, str]] = field(default_factory=list)  # caption, source


def open_run(folder: Path) -> Run:
    """Raise DataError if it is no run's folder, or nothing was logged."""
    config, records = folder / "config.toml", read_records(folder / "metrics.jsonl")
    if not records:
        raise DataError(f"{folder}: metrics.jsonl has no line; name a run's folder, such as outputs/demo")
    try:
        tables = tomllib.loads(config.read_text())
        settings = {f"{section}.{key}": value for section in tables for key, value in tables[section].items()}
        _ = settings["validation.lead_hours"], settings["training.steps"]
    except (OSError, tomllib.TOMLDecodeError, AttributeError, KeyError) as error:
        raise DataError(f"{config}: {error}; is it a run's folder?") from None
    return Run(folder, settings, records, read_records(folder / "starts.jsonl"))


def build_sections(runs: dict[str, Run]) -> list[Section]:
    """Return the sections of the page; runs: by name."""
    sections = [Section("Runs", pd.DataFrame({name: describe(run) for name, run in runs.items()}).to_html())]
    settings = pd.DataFrame({name: run.settings for name, run in runs.items()}).astype(str)
    differing = settings[settings.nunique(axis=1) > 1].drop("job.dump_folder", errors="ignore")
    if len(differing):
        sections.append(Section("Settings that differ", differing.to_html()))
    figure, (axes,) = build_panels(1, "", size=(8.0, 4.0))
    draw_losses(axes, {name: run.records for name, run in runs.items()})
    figure.savefig(png := io.BytesIO(), format="png", dpi=90)
    close(figure)
    pictures = [("Training (lines), validation (points)", embed(png.getvalue()))]
    sections.append(Section("Losses", pictures=pictures))
    scores = gather_scores(runs)
    if len(scores):
        table = tabulate(scores).to_html(na_rep="", float_format="{:.4g}".format)
        sections.append(Section("Scores: RMSE", table))
    for name, run in runs.items():
        files = [path for pattern in PLOTS for path in sorted(run.folder.glob(pattern))]
        pictures = [(str(path.relative_to(run.folder)), embed(path.read_bytes())) for path in files]
        sections.append(Section(f"Plots of {name}", pictures=pictures))
    return sections


def describe(run: Run) -> dict[str, str]:
    """Return what a run is and how far it came. Its time is that of the steps, without validations, saves."""
    last = run.starts[-1] if run.starts else {}
    layout = " x ".join(f"{axis} {n}" for axis, n in last.get("layout", {}).items() if n > 1)
    records = pd.DataFrame(run.records, columns=["step", "step_seconds"])
    logged = records.dropna()
    seconds = (logged.step.diff().fillna(logged.step) * logged.step_seconds).sum()
    return {
        "folder": str(run.folder),
        "model": str(run.settings.get("model.name")),
        "data": str(run.settings.get("data.path")),
        "steps": f"{records.step.max():,} of {run.settings['training.steps']:,}",
        "ranks": f"{last['ranks']} x {last['device']} {layout}" if last else "not known",
        "versions": f"torch {last['torch']}, Python {last['python']}" if last else "not known",
        "starts": str(len(run.starts)),
        "time of the steps": str(timedelta(seconds=round(seconds))),
        "device hours": f"{last.get('ranks', 1) * seconds / 3600:.2f}",
    }


def read_scores(run: Run) -> Table:
    """Return the RMSE of evaluate.py, or else of the last validation; columns COLUMNS."""
    stored = run.folder / "evaluation/scores.csv"
    if stored.exists():
        table: Table = pd.read_csv(stored).query("metric == 'rmse' and region == 'global' and lead_hours > 0")
        levels = table.level.map(lambda level: "" if pd.isna(level) else f":{level:g}")
        table = table.assign(variable=table.variable + levels, hours=table.lead_hours)
        return table.assign(dates=table.num_dates)[COLUMNS]
    record = next((each for each in reversed(run.records) if "val/loss" in each), {})
    first, rows = min(run.settings["validation.lead_hours"], default=0), []
    for key, value in record.items():
        if (found := KEY.fullmatch(key)) and value is not None:
            dates = record.get("val/dates" + (f"@{found['hours']}h" if found["hours"] else ""))
            name, variable = (found["baseline"] or "model").replace("_", " "), found["variable"]
            rows.append((name, variable, int(found["hours"] or first), value, units(variable), dates))
    return pd.DataFrame(rows, columns=COLUMNS)


def gather_scores(runs: dict[str, Run]) -> Table:
    """Return the scores of each run's model under the run's name, then those of each baseline once."""
    tables: dict[str, Table] = {name: read_scores(run) for name, run in runs.items()}
    models = [table[table.forecast == "model"].assign(forecast=name) for name, table in tables.items()]
    others: Table = pd.concat([table[table.forecast != "model"] for table in tables.values()])
    return pd.concat([*models, others.drop_duplicates(["forecast", "variable", "hours"])])


def tabulate(scores: Table) -> Table:
    """Return a row a variable and lead, with its numbers of dates, and a column a forecast."""
    rows = scores.groupby(["variable", "hours"], sort=False)
    table = scores.pivot_table("value", ["variable", "hours"], "forecast", "first", sort=False)
    dates = rows.dates.agg(lambda each: ", ".join(f"{n:.0f}" for n in sorted(set(each.dropna()))))
    table.insert(0, "dates", dates)
    return table.assign(units=rows.units.first()).rename_axis(columns=None)


def embed(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Raise DataError if a folder is no run's, or the page cannot be written."""
    names = [folder.resolve().name for folder in folders]
    labels = map(str, folders) if len(set(names)) < len(names) else names
    runs = {name: open_run(folder) for name, folder in zip(labels, folders, strict=True)}
    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=templates, autoescape=True, trim_blocks=True)
    page = environment.get_template("report_page.html").render(
        title=" and ".join(runs),
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
        if not names or any(name.startswith("-") for name in names):
            raise ConfigError(f"report_page {' '.join(names)}: name runs' folders, such as outputs/demo")
        folders = [Path(name) for name in names]
        target = Path(options.output or folders[0] / "report.html")
        write_page(folders, target)
        print(f"written: {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
