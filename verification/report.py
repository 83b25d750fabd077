"""Scores for people: the table on the terminal, a long CSV, and gates that a release has to pass.

`Scores by forecast` are Datasets in WeatherBench2's form (verification/score_tables.py): a data variable a
variable, dims (metric, region, lead_time[, level]).
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from datasets.variables import split_name
from errors import ConfigError

GRAVITY = 9.80665  # m s-2: geopotential over it is in geopotential metres
LEADS_SHOWN = 6  # of a table; CSV and NetCDF have all
GATE = re.compile(
    r"(?P<metric>[\w]+)/(?P<variable>[\w:]+)@(?P<lead>\d+)h(?P<sign>[<>])(?P<limit>[-+.\deE]+)$"
)
HIGHER_IS_BETTER = ("acc", "acc_ratio_of_means")


def lead_hours(scores: xr.Dataset) -> list[int]:
    """Leads of a Dataset of scores, in hours."""
    return [int(lead / np.timedelta64(1, "h")) for lead in scores["lead_time"].values]


def variable_names(scores: xr.Dataset) -> list[str]:
    """Variables with their levels, "geopotential:500", that have any score."""
    names = []
    for name, array in scores.data_vars.items():
        if "level" not in array.dims:
            names.append(str(name))
            continue
        finite = array.notnull().any(dim=[dim for dim in array.dims if dim != "level"])
        names += [f"{name}:{int(level)}" for level in array["level"].values[finite.values]]
    return names


def select(scores: xr.Dataset, metric: str, variable: str, region: str = "global") -> np.ndarray:
    """Values (L,) over all leads. KeyError where there is no such score."""
    name, level = split_name(variable)
    array = scores[name].sel(metric=metric, region=region)
    return (array if level is None else array.sel(level=int(level))).values


def units_of(scores: xr.Dataset, variable: str) -> str:
    return str(scores[split_name(variable)[0]].attrs.get("units", ""))


def table(scores: Mapping[str, xr.Dataset], metric: str, title: str, region: str = "global") -> str:
    """A row a variable and lead, a column a forecast; the best of each row has a star. Geopotential also in
    geopotential metres.
    """
    first = next(iter(scores.values()))
    hours = lead_hours(first)
    shown = np.unique(np.linspace(0, len(hours) - 1, min(LEADS_SHOWN, len(hours))).round().astype(int))
    names = [name for name in variable_names(first) if np.isfinite(select(first, metric, name, region)).any()]
    width = max([len(name) for name in names] + [8]) + 2
    head = f"{metric.upper():<{width}}{'lead':>6}" + "".join(f"{name:>20}" for name in scores) + "   units"
    lines = [title, head, "-" * len(head)]
    for name in names:
        columns = [_values(each, metric, name, region, hours) for each in scores.values()]
        units = units_of(first, name) if metric not in HIGHER_IS_BETTER else ""
        for place in shown:
            lines.append(
                _row(name, width, hours[place], [column[place] for column in columns], metric, units)
            )
        if units == "m2 s-2":
            values = [column[shown[-1]] / GRAVITY for column in columns]
            lines.append(_row(name, width, hours[shown[-1]], values, metric, "gpm"))
    return "\n".join(lines)


def _values(scores: xr.Dataset, metric: str, variable: str, region: str, hours: Sequence[int]) -> np.ndarray:
    """Of these leads; NaN where this forecast has no such score."""
    try:
        own = dict(zip(lead_hours(scores), select(scores, metric, variable, region), strict=True))
    except KeyError:
        own = {}
    return np.array([own.get(hour, np.nan) for hour in hours])


def _row(name: str, width: int, hours: int, values: Sequence[Any], metric: str, units: str) -> str:
    finite = [value for value in values if np.isfinite(value)]
    best = (max if metric in HIGHER_IS_BETTER else min)(finite, default=np.nan)
    cells = [f"{value:>19.4g}{'*' if value == best else ' '}" for value in values]
    return f"{name:<{width}}{hours:>4} h" + "".join(cells) + f"   {units}"


def long_rows(scores: Mapping[str, xr.Dataset]) -> Iterator[dict[str, object]]:
    """One row a number: forecast, metric, region, variable, level, lead_hours, value, units."""
    for forecast, dataset in scores.items():
        hours = lead_hours(dataset)
        for variable in variable_names(dataset):
            name, level = split_name(variable)
            for metric in dataset["metric"].values:
                for region in dataset["region"].values:
                    values = select(dataset, metric, variable, region)
                    for hour, value in zip(hours, values, strict=True):
                        if np.isfinite(value):
                            yield {
                                "forecast": forecast,
                                "metric": metric,
                                "region": region,
                                "variable": name,
                                "level": "" if level is None else level,
                                "lead_hours": hour,
                                "value": repr(float(value)),
                                "units": units_of(dataset, variable),
                            }


def write_csv(scores: Mapping[str, xr.Dataset], target: Path) -> None:
    rows = list(long_rows(scores))
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["forecast"])
        writer.writeheader()
        writer.writerows(rows)


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
        match = GATE.match(text.replace(" ", ""))
        if not match:
            raise ConfigError(f"--gate {text!r}: write for example rmse/geopotential:500@120h<340")
        metric, variable, lead, sign, limit = match.groups()
        try:
            return cls(metric, variable, int(lead), sign, float(limit))
        except ValueError:
            raise ConfigError(f"--gate {text!r}: {limit!r} is not a number") from None

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
