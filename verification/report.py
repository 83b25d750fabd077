"""Scores for people: the table on the terminal, a long CSV, and gates that a release has to pass.

`Scores by forecast` are Datasets in WeatherBench2's form (verification/score_tables.py): a data variable a
variable, dims (metric, region, lead_time[, level]).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from datasets.variables import split_name
from errors import ConfigError
from verification.score_tables import lead_hours, one_variable, select, units_of, variable_names

GRAVITY = 9.80665  # m s-2: geopotential over it is in geopotential metres
LEADS_SHOWN = 6  # of a table; CSV and NetCDF have all
GATE = re.compile(r"(\w+)/([\w:]+)@(\d+)h([<>])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
HIGHER_IS_BETTER = ("acc", "acc_ratio_of_means")


def table(scores: Mapping[str, xr.Dataset], metric: str, title: str) -> str:
    """A row a variable and lead, a column a forecast; the best of each row has a star. Geopotential also in
    geopotential metres.
    """
    first = next(iter(scores.values()))
    leads = first["lead_time"].values
    leads = leads[np.unique(np.linspace(0, len(leads) - 1, min(LEADS_SHOWN, len(leads))).round().astype(int))]
    names = [name for name in variable_names(first) if np.isfinite(select(first, metric, name)).any()]
    width = max([len(name) for name in names] + [8]) + 2
    head = f"{metric.upper():<{width}}{'lead':>6}" + "".join(f"{name:>20}" for name in scores) + "   units"
    lines = [title, head, "-" * len(head)]
    for name in names:
        values = np.stack([_values(each, metric, name, leads) for each in scores.values()], axis=1)
        units = units_of(first, name) if metric not in HIGHER_IS_BETTER else ""
        rows = [(lead, row, units) for lead, row in zip(leads, values, strict=True)]
        if units == "m2 s-2":
            rows.append((leads[-1], values[-1] / GRAVITY, "gpm"))
        for lead, row, unit in rows:
            hours = int(lead / np.timedelta64(1, "h"))
            lines.append(f"{name:<{width}}{hours:>4} h{_cells(row, metric)}   {unit}")
    return "\n".join(lines)


def _values(scores: xr.Dataset, metric: str, variable: str, leads: np.ndarray) -> np.ndarray:
    """At these leads; NaN where this forecast has no such score."""
    try:
        return select(scores, metric, variable).reindex(lead_time=leads).values
    except KeyError:
        return np.full(len(leads), np.nan)


def _cells(values: Sequence[float], metric: str) -> str:
    finite = [value for value in values if np.isfinite(value)]
    best = (max if metric in HIGHER_IS_BETTER else min)(finite, default=np.nan)
    return "".join(f"{value:>19.4g}{'*' if value == best else ' '}" for value in values)


def write_csv(scores: Mapping[str, xr.Dataset], target: Path) -> None:
    """One row a number: forecast, metric, region, variable, level, lead_hours, value, units."""
    parts = []
    for forecast, dataset in scores.items():
        for variable in variable_names(dataset):
            name, level = split_name(variable)
            values = one_variable(dataset, variable).transpose("metric", "region", "lead_time")
            values = values.drop_vars(("level", "num_dates"), errors="ignore").rename("value")
            rows = values.to_dataframe().reset_index()
            rows["lead_hours"] = rows["lead_time"] // np.timedelta64(1, "h")
            level = "" if level is None else level
            parts.append(
                rows.assign(forecast=forecast, variable=name, level=level, units=units_of(dataset, variable))
            )
    whole = pd.concat(parts)
    columns = ["forecast", "metric", "region", "variable", "level", "lead_hours", "value", "units"]
    whole[np.isfinite(whole["value"])].to_csv(target, columns=columns, index=False, lineterminator="\r\n")


@dataclass(frozen=True)
class Gate:
    """A score that a release has to reach: "rmse/geopotential:500@120h<340"."""

    metric: str
    variable: str
    lead: int  # hours
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Gate":
        """ConfigError, with an example, for what is none."""
        match = GATE.fullmatch(text.replace(" ", ""))
        if not match:
            raise ConfigError(f"--gate {text!r}: write for example rmse/geopotential:500@120h<340")
        metric, variable, lead, sign, limit = match.groups()
        return cls(metric, variable, int(lead), sign, float(limit))

    def value(self, scores: xr.Dataset) -> float:
        """ConfigError, with what there is, where there is no such score."""
        hours = lead_hours(scores)
        if self.metric not in scores["metric"].values:
            valid = ", ".join(map(str, scores["metric"].values))
            raise ConfigError(f"--gate: no metric {self.metric!r}; there are {valid}")
        if self.variable not in variable_names(scores):
            valid = ", ".join(variable_names(scores))
            raise ConfigError(f"--gate: no variable {self.variable!r}; there are {valid}")
        if self.lead not in hours:
            raise ConfigError(f"--gate: no lead of {self.lead} h; there are {hours}")
        return float(select(scores, self.metric, self.variable)[hours.index(self.lead)])

    def judge(self, scores: xr.Dataset) -> tuple[bool, str]:
        """Whether it is passed, and a line that says so. NaN never passes."""
        value = self.value(scores)
        passed = value < self.limit if self.sign == "<" else value > self.limit
        name = f"{self.metric}/{self.variable}@{self.lead}h"
        wanted = f"{self.sign} {self.limit:g}"
        return passed, f"{'passed' if passed else 'MISSED'}: {name} = {value:.4g}, wanted {wanted}"
