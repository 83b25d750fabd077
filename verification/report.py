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
from verification.details import mean_over_latitudes
from verification.evaluation import Evaluation
from verification.score_tables import (
    lead_hours,
    one_variable,
    power_of_units,
    select,
    squared,
    times_metres,
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
    first = next(iter(scores.values()))
    counts = first.sel(metric="num_dates").to_array()
    scored = (counts > 0).any([dim for dim in counts.dims if dim != "lead_time"])
    leads = shown_leads(first["lead_time"].values[scored.values])
    names = [name for name in variable_names(first) if _has_metric(scores, metric, name)]
    width = max([len(name) for name in names] + [8]) + 2
    head = f"{metric.upper():<{width}}{'lead':>6}{'dates':>9}"
    caveats = {name: reason for name, reason in (caveats or {}).items() if name in scores}
    head += "".join(f"{name + '†' * (name in caveats):>20}" for name in scores) + "   units"
    lines = [title, head, "-" * len(head)]
    for name in names:
        values = np.stack([_values(each, metric, name, leads) for each in scores.values()], axis=1)
        counts = np.stack([_values(each, "num_dates", name, leads) for each in scores.values()], axis=1)
        units, dates = units_of(first, name, metric), [_range(row) for row in counts]
        rows = [(*row, units) for row in zip(leads, dates, values, strict=True)]
        if units == "m2 s-2":
            rows.append((leads[-1], dates[-1], values[-1] / GRAVITY, "gpm"))
        for lead, count, row, unit in rows:
            hours = int(lead / np.timedelta64(1, "h"))
            lines.append(f"{name:<{width}}{hours:>4} h{count:>9}{_cells(row, metric)}   {unit}".rstrip())
    lines += ["* the best of its row"] * (len(scores) > 1)
    return "\n".join([*lines, *(f"† {name}: {reason}" for name, reason in caveats.items())])


def shown_leads(leads: np.ndarray) -> np.ndarray:
    """All of a few leads; of many the first, every whole day, and the last."""
    if len(leads) <= LEADS_SHOWN:
        return leads
    days = leads[leads % DAY == np.timedelta64(0, "h")]
    if not len(days):
        days = leads[np.linspace(0, len(leads) - 1, LEADS_SHOWN).round().astype(int)]
    return np.unique(np.concatenate([leads[:1], days, leads[-1:]]))


def _values(scores: xr.Dataset, metric: str, variable: str, leads: np.ndarray) -> np.ndarray:
    """At these leads; NaN where this forecast has no such score."""
    try:
        return select(scores, metric, variable).reindex(lead_time=leads).values
    except KeyError:
        return np.full(len(leads), np.nan)


def _has_metric(scores: Mapping[str, xr.Dataset], metric: str, variable: str) -> bool:
    """Return True if any forecast has such a score; an RMSE that is not finite is printed as nan."""
    leads = next(iter(scores.values()))["lead_time"].values
    values = [_values(each, metric, variable, leads) for each in scores.values()]
    return metric == "rmse" or bool(np.isfinite(values).any())


def _range(counts: np.ndarray) -> str:
    """Return "47", or "46-47" where forecasts have different numbers of dates."""
    numbers = [int(count) for count in counts if np.isfinite(count)]
    return "-".join(map(str, sorted({min(numbers), max(numbers)}))) if numbers else "0"


def _cells(values: Sequence[float], metric: str) -> str:
    finite = [value for value in values if np.isfinite(value)]
    best = (max if metric in HIGHER_IS_BETTER else min)(finite, default=np.nan)
    stars = ["*" if value == best and len(values) > 1 else " " for value in values]
    return "".join(f"{value:>19.4g}{star}" for value, star in zip(values, stars, strict=True))


def write_netcdf(parts: Mapping[str, xr.Dataset], target: Path) -> None:
    """Scores, or those by date, by forecast: a dimension `forecast` first, NaN (no dates) where one has less.

    Coordinates of scores: `num_dates` (forecast, lead_time), and `power` (metric) of the variable's units.
    """
    parts_with_dates = [part.drop_vars("power").reset_coords("num_dates") for part in parts.values()]
    index = xr.DataArray(list(parts), dims="forecast", name="forecast")
    whole = xr.concat(parts_with_dates, dim=index, data_vars="all", join="outer", combine_attrs="override")
    whole["num_dates"] = whole["num_dates"].fillna(0).astype(int)
    power = [power_of_units(metric) for metric in whole["metric"].values]
    whole = whole.set_coords("num_dates").assign_coords(power=("metric", power))
    whole.to_netcdf(target, engine="h5netcdf")


def write_details(evaluations: Mapping[str, Evaluation], folder: Path) -> None:
    """Write the numbers of the plots of bias, spectra and ranks: a NetCDF a forecast (grids may differ) and
    spectra.csv with the means over latitude.
    """
    for name, evaluation in evaluations.items():
        plain = re.sub(r"[^\w.+-]", "_", name)
        for kind in ("bias", "spectra", "ranks"):
            found = getattr(evaluation, kind)
            if found is not None:
                found.to_netcdf(folder / f"{kind}_{plain}.nc", engine="h5netcdf")
    rows = [mean_spectra(name, e.spectra) for name, e in evaluations.items() if e.spectra is not None]
    if rows:
        pd.concat(rows).to_csv(folder / "spectra.csv", index=False, lineterminator="\r\n")


def mean_spectra(forecast: str, spectra: xr.Dataset) -> pd.DataFrame:
    """The lines of the plot of spectra: forecast, source, variable, level, lead_hours, wavelength_km, energy,
    units. Wavenumber 0, the mean, has no wavelength and is left out.
    """
    parts = []
    for variable in variable_names(spectra):
        name, level = split_name(variable)
        mean = mean_over_latitudes(one_variable(spectra, variable)).isel(frequency=slice(1, None))
        rows = mean.drop_vars("level", errors="ignore").rename("energy").to_dataframe().reset_index()
        rows["lead_hours"] = rows["lead_time"] // np.timedelta64(1, "h")
        rows["wavelength_km"] = rows["wavelength"] / 1000
        own = {"forecast": forecast, "variable": name, "level": "" if level is None else level}
        parts.append(rows.assign(**own, units=energy_units(spectra, variable)))
    columns = ["forecast", "source", "variable", "level", "lead_hours", "wavelength_km", "energy", "units"]
    return pd.concat(parts).reindex(columns=columns)


def energy_units(spectra: xr.Dataset, variable: str) -> str:
    """Units of zonal energy: the variable's squared, times the length of a circle of latitude in m."""
    return times_metres(squared(units_of(spectra, variable)))


def write_csv(scores: Mapping[str, xr.Dataset], target: Path) -> None:
    """One row a number: forecast, metric, region, variable, level, lead_hours, value, units, num_dates."""
    parts = []
    for forecast, dataset in scores.items():
        for variable in variable_names(dataset):
            name, level = split_name(variable)
            values = one_variable(dataset, variable).transpose("metric", "region", "lead_time")
            values = values.drop_vars(("level", "num_dates", "power"), errors="ignore")
            counts = values.sel(metric="num_dates", drop=True).astype(int).rename("num_dates")
            both = xr.merge([values.drop_sel(metric="num_dates").rename("value"), counts])
            rows = both.to_dataframe(["metric", "region", "lead_time"]).reset_index()
            rows["lead_hours"] = rows["lead_time"] // np.timedelta64(1, "h")
            rows["units"] = [units_of(dataset, variable, metric) for metric in rows["metric"]]
            level = "" if level is None else level
            parts.append(rows.assign(forecast=forecast, variable=name, level=level))
    whole = pd.concat(parts)
    columns = ["forecast", "metric", "region", "variable", "level", "lead_hours", "value", "units"]
    columns.append("num_dates")
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

    def check(self, variables: Sequence[str], leads: np.ndarray) -> None:
        """Before anything is scored. ConfigError: no such variable, or lead (L,) timedelta64."""
        if self.variable not in variables and "wind_vector" not in self.variable:
            raise ConfigError(f"--gate: no variable {self.variable!r}; there are {', '.join(variables)}")
        if np.timedelta64(self.lead, "h") not in leads:
            hours = (leads / np.timedelta64(1, "h")).astype(int).tolist()
            raise ConfigError(f"--gate: no lead of {self.lead} h; there are {hours}")

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
        """Return True if the gate is passed, and a line for the terminal. NaN never passes."""
        value = self.value(scores)
        passed = value < self.limit if self.sign == "<" else value > self.limit
        name = f"{self.metric}/{self.variable}@{self.lead}h"
        wanted = f"{self.sign} {self.limit:g}"
        return passed, f"{'passed' if passed else 'MISSED'}: {name} = {value:.4g}, wanted {wanted}"
