"""Scores for a page, from evaluate.py's files where it has run, else from the last validation.

A table of scores has the columns forecast, variable ("geopotential:300"), hours, value, units and dates.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from reports.run import Run

KEY = re.compile(r"val/rmse(?:_(?P<baseline>\w+))?/(?P<variable>.+?)(?:@(?P<hours>\d+)h)?")
COLUMNS = ["forecast", "variable", "hours", "value", "units", "dates"]
OWN = "model"
SHOWN = (6, 24, 72, 120, 240)


def rmse_of(run: Run) -> tuple[str, pd.DataFrame]:
    """Where they are from, and the table; empty where nothing was scored yet."""
    stored = run.folder / "evaluation/scores.csv"
    if stored.exists():
        return "evaluate.py", evaluated(pd.read_csv(stored), "rmse")
    if run.validations:
        last = run.validations[-1]
        return f"the validation after step {last['step']}", validated(last, run.settings)
    return "", pd.DataFrame(columns=COLUMNS)


def evaluated(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The global scores of one metric."""
    own = table.query("metric == @metric and region == 'global' and lead_hours > 0").copy()
    levels = own.level.map(lambda level: "" if pd.isna(level) else f":{level:g}")
    own["variable"] = own.variable + levels
    own["hours"], own["dates"] = own.lead_hours, own.num_dates
    return own.reindex(columns=COLUMNS)


def validated(record: dict, settings: dict) -> pd.DataFrame:
    """A record knows no units."""
    first, rows = settings["validation.lead_hours"][0], []
    for key, value in record.items():
        if (found := KEY.fullmatch(key)) and value is not None:
            hours = int(found["hours"] or first)
            dates = record.get("val/dates" + (f"@{hours}h" if found["hours"] else ""))
            name = (found["baseline"] or OWN).replace("_", " ")
            rows.append((name, found["variable"], hours, value, None, dates))
    return pd.DataFrame(rows, columns=COLUMNS)


def shown_hours(table: pd.DataFrame) -> list[int]:
    """The customary leads that are there, else all."""
    there = sorted(set(table.hours))
    return [hours for hours in there if hours in SHOWN] or there


def side_by_side(tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """What is drawn and compared: the model of each run under the run's name, then each baseline once."""
    own = {run: table[table.forecast == OWN] for run, table in tables.items()}
    others = {name: part for table in tables.values() for name, part in table.groupby("forecast", sort=False)}
    return own | {str(name): part for name, part in others.items() if name != OWN}


def score_rows(drawn: Mapping[str, pd.DataFrame]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of what a page shows: a row a variable and lead, the best of it with a star."""
    whole = pd.concat(drawn, names=["shown"]).reset_index("shown")
    values = whole.set_index(["variable", "hours", "shown"]).value
    rows = []
    pairs: Any = whole.groupby(["variable", "hours"], sort=False)
    for (variable, hours), own in pairs:
        if hours in shown_hours(whole):
            found = [float(values.get((variable, hours, name), np.nan)) for name in drawn]
            cells = [cell(value, float(np.nanmin(found))) for value in found]
            rows.append([variable, f"{hours} h", dates_of(own), *cells, next(iter(own.units.dropna()), "")])
    return ["variable", "lead", "dates", *drawn, ""], rows


def dates_of(rows: pd.DataFrame) -> str:
    """ "400", or "23, 400" where not all have the same."""
    return ", ".join(f"{count:.0f}" for count in sorted(set(rows.dates.dropna())))


def cell(value: float, least: float) -> str:
    return "" if np.isnan(value) else f"{value:.4g}{' *' if value == least else ''}"
