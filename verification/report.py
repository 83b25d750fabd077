"""Scores for people: the table on the terminal, CSV files, and gates that a release has to pass.

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

from command_line import text_table
from datasets.variables import split_name
from errors import ConfigError
from verification.details import mean_over_latitudes
from verification.evaluation import Evaluation
from verification.score_tables import (
    combine,
    lead_hours,
    one_variable,
    select,
    units_of,
    variable_names,
)

GRAVITY = 9.80665  # m s-2: geopotential over it is in geopotential metres
LEADS_SHOWN = 6  # of a table, where no lead is a whole day; CSV and NetCDF have all
DAY = np.timedelta64(24, "h")
GATE = re.compile(r"(\w+)/([\w:]+)@(\d+)h([<>])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
HIGHER_IS_BETTER = ("acc", "acc_ratio_of_means")


def table(
    scores: Mapping[str, xr.Dataset], metric: str, title: str, caveats: Mapping[str, str] | None = None
) -> str:
    """Return a row a variable and lead with the number of dates ("46-47": fewest and most of a forecast), a
    column a forecast; the best of each row has a star. Geopotential also in geopotential metres. Leads
    without any date are left out. caveats: by forecast, in footnotes.
    """
    first, whole = next(iter(scores.values())), combine(scores)
    counts = first.sel(metric="num_dates").to_array()
    scored = (counts > 0).any([dim for dim in counts.dims if dim != "lead_time"])
    leads = shown_leads(first["lead_time"].values[scored.values])
    notes = {name: reason for name, reason in (caveats or {}).items() if name in scores}
    rows: list[tuple[object, ...]] = []
    for name in variable_names(first):
        of_variable = [select(whole, each, name).sel(lead_time=leads) for each in (metric, "num_dates")]
        values, dates = (each.transpose("lead_time", "forecast").values for each in of_variable)
        if metric != "rmse" and not np.isfinite(values).any():  # an RMSE that is not finite is shown as nan
            continue
        units = units_of(first, name, metric)
        own = list(zip(leads, dates, values, [units] * len(leads), strict=True))
        if units == "m2 s-2":
            own.append((leads[-1], dates[-1], values[-1] / GRAVITY, "gpm"))
        rows += [(name, *_row(*each, metric)) for each in own]
    head = (metric.upper(), "lead", "dates", *(name + "†" * (name in notes) for name in scores), "   units")
    width = max([len(str(row[0])) for row in rows] + [8]) + 2
    lines = [title, *text_table(f"<{width} >6 >9{' >20' * len(scores)} <0", [head, *rows]).splitlines()]
    lines.insert(2, "-" * len(lines[1]))
    lines += ["* the best of its row"] * (len(scores) > 1)
    return "\n".join([*lines, *(f"† {name}: {reason}" for name, reason in notes.items())])


def _row(lead: np.timedelta64, dates: np.ndarray, values: np.ndarray, units: str, metric: str) -> list[str]:
    """Return lead, numbers of dates (F,), values (F,) with a star at the best, and units as text."""
    best = (max if metric in HIGHER_IS_BETTER else min)(values[np.isfinite(values)], default=np.nan)
    cells = [f"{value:.4g}{'*' if value == best and len(values) > 1 else ' '}" for value in values]
    numbers = dates[np.isfinite(dates)].astype(int)
    between = "-".join(map(str, sorted({min(numbers, default=0), max(numbers, default=0)})))
    return [f"{int(lead / np.timedelta64(1, 'h'))} h", between, *cells, f"   {units}"]


def shown_leads(leads: np.ndarray) -> np.ndarray:
    """Return all of a few leads; of many the first, every whole day, and the last."""
    if len(leads) <= LEADS_SHOWN:
        return leads
    days = leads[leads % DAY == np.timedelta64(0, "h")]
    if not len(days):
        days = leads[np.linspace(0, len(leads) - 1, LEADS_SHOWN).round().astype(int)]
    return np.unique(np.concatenate([leads[:1], days, leads[-1:]]))


def write_scores(evaluations: Mapping[str, Evaluation], folder: Path) -> None:
    """Write scores and those by date, and the numbers of the plots of bias, spectra and ranks: a NetCDF a
    forecast (grids may differ) and spectra.csv with the means over latitude.
    """
    scores = combine({name: evaluation.scores for name, evaluation in evaluations.items()})
    scores.to_netcdf(folder / "scores.nc", engine="h5netcdf")
    write_csv(scores, folder / "scores.csv")
    by_date = combine({name: evaluation.by_date for name, evaluation in evaluations.items()})
    by_date.to_netcdf(folder / "scores_by_date.nc", engine="h5netcdf")
    for name, evaluation in evaluations.items():
        for kind in ("bias", "spectra", "ranks"):
            if (details := getattr(evaluation, kind)) is not None:
                plain = re.sub(r"[^\w.+-]", "_", name)
                details.to_netcdf(folder / f"{kind}_{plain}.nc", engine="h5netcdf")
    rows = [mean_spectra(name, e.spectra) for name, e in evaluations.items() if e.spectra is not None]
    if rows:
        pd.concat(rows).to_csv(folder / "spectra.csv", index=False, lineterminator="\r\n")


def mean_spectra(forecast: str, spectra: xr.Dataset) -> pd.DataFrame:
    """Return the lines of the plot of spectra; wavenumber 0, the mean, has no wavelength and is left out."""
    parts = []
    for variable in variable_names(spectra):
        name, level = split_name(variable)
        mean = mean_over_latitudes(one_variable(spectra, variable)).isel(frequency=slice(1, None))
        rows = mean.drop_vars("level", errors="ignore").rename("energy").to_dataframe().reset_index()
        rows["lead_hours"] = rows["lead_time"] // np.timedelta64(1, "h")
        rows["wavelength_km"] = rows["wavelength"] / 1000
        own = {"forecast": forecast, "variable": name, "level": "" if level is None else level}
        parts.append(rows.assign(**own, units=units_of(spectra, variable)))
    columns = ["forecast", "source", "variable", "level", "lead_hours", "wavelength_km", "energy", "units"]
    return pd.concat(parts).reindex(columns=columns) if parts else pd.DataFrame(columns=columns)


def write_csv(scores: xr.Dataset, target: Path) -> None:
    """Write a row a number of combined scores, with its units and number of initial dates."""
    parts = []
    for variable in variable_names(scores):
        name, level = split_name(variable)
        by_metric = one_variable(scores, variable).to_series().unstack("metric")
        by_metric = by_metric.set_index("num_dates", append=True)
        rows = by_metric.melt(ignore_index=False, var_name="metric").reset_index()
        units = {metric: units_of(scores, variable, metric) for metric in by_metric}
        rows["units"] = [units[metric] for metric in rows["metric"]]
        parts.append(rows.assign(variable=name, level="" if level is None else level))
    rows = pd.concat(parts)
    rows = rows[np.isfinite(rows["value"])].astype({"num_dates": int})
    rows["lead_hours"] = rows["lead_time"] // np.timedelta64(1, "h")
    columns = ["forecast", "metric", "region", "variable", "level", "lead_hours", "value", "units"]
    rows.to_csv(target, columns=[*columns, "num_dates"], index=False, lineterminator="\r\n")


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
        """Raise ConfigError, with an example, for a text that is not a gate."""
        match = GATE.fullmatch(text.replace(" ", ""))
        if not match:
            raise ConfigError(f"--gate {text!r}: write for example rmse/geopotential:500@120h<340")
        metric, variable, lead, sign, limit = match.groups()
        return cls(metric, variable, int(lead), sign, float(limit))

    def check(self, **known: Sequence) -> None:
        """Raise ConfigError unless the gate's metric, variable and lead are among the known ones."""
        for key, values in known.items():
            if getattr(self, key) not in values:
                there_are = ", ".join(map(str, values))
                raise ConfigError(f"--gate: no {key} {getattr(self, key)!r}; there are {there_are}")

    def judge(self, scores: xr.Dataset) -> tuple[bool, str]:
        """Return True if the gate is passed, and a line for the terminal. NaN never passes."""
        hours = lead_hours(scores)
        self.check(metric=scores["metric"].values.tolist(), variable=variable_names(scores), lead=hours)
        value = float(select(scores, self.metric, self.variable)[hours.index(self.lead)])
        passed = value < self.limit if self.sign == "<" else value > self.limit
        score = f"{self.metric}/{self.variable}@{self.lead}h = {value:.4g}"
        return passed, f"{'passed' if passed else 'MISSED'}: {score}, wanted {self.sign} {self.limit:g}"
