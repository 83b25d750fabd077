"""Scores for people: the table on the terminal, CSV and NetCDF files.

`Scores by forecast` are Datasets in WeatherBench2's form (verification/score_tables.py): a data variable a
variable, dims (metric, region, lead_time[, level]).
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from command_line import text_table
from verification.evaluation import Evaluation
from verification.score_tables import combine, select, units_of, variable_names

GRAVITY = 9.80665  # m s-2: geopotential over it is in geopotential metres
LEADS_SHOWN = 6  # of a table, where no lead is a whole day; CSV and NetCDF have all
DAY = np.timedelta64(24, "h")
HIGHER_IS_BETTER = ("acc", "acc_ratio_of_means")


def table(scores: Mapping[str, xr.Dataset], metric: str, title: str) -> str:
    """Return a row a variable and lead with the number of dates ("46-47": fewest and most of a forecast), a
    column a forecast; the best of each row has a star. Geopotential also in geopotential metres. Leads
    without any date are left out.
    """
    first, whole = next(iter(scores.values())), combine(scores)
    counts = first.sel(metric="num_dates").to_array()
    scored = (counts > 0).any([dim for dim in counts.dims if dim != "lead_time"])
    leads = shown_leads(first["lead_time"].values[scored.values])
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
    width = max([len(str(row[0])) for row in rows] + [8]) + 2
    rows.insert(0, (metric.upper(), "lead", "dates", *scores, "   units"))
    lines = text_table(f"<{width} >6 >9{' >20' * len(scores)} <0", rows).splitlines()
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([title, *lines, *["* the best of its row"] * (len(scores) > 1)])


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
    return leads[(leads % DAY == np.timedelta64(0, "h")) | np.isin(leads, leads[[0, -1]])]


def write_scores(evaluations: Mapping[str, Evaluation], folder: Path) -> None:
    """Write scores and those by date, and maps of bias and spectra: a NetCDF a forecast."""
    scores = combine({name: evaluation.scores for name, evaluation in evaluations.items()})
    scores.to_netcdf(folder / "scores.nc", engine="h5netcdf")
    write_csv(scores, folder / "scores.csv")
    by_date = combine({name: evaluation.by_date for name, evaluation in evaluations.items()})
    by_date.to_netcdf(folder / "scores_by_date.nc", engine="h5netcdf")
    for name, evaluation in evaluations.items():
        for kind in ("bias", "spectra"):
            if (details := getattr(evaluation, kind)) is not None:
                plain = re.sub(r"[^\w.+-]", "_", name)
                details.to_netcdf(folder / f"{kind}_{plain}.nc", engine="h5netcdf")


def write_csv(scores: xr.Dataset, target: Path) -> None:
    """Write a row a number of combined scores, with its units and number of initial dates."""
    columns = ["forecast", "metric", "region", "variable", "level", "lead_hours", "value", "units"]
    parts = []
    for name, array in scores.reset_coords("num_dates", drop=True).data_vars.items():
        values, num_dates = array.drop_sel(metric="num_dates"), array.sel(metric="num_dates", drop=True)
        table = xr.Dataset({"value": values, "num_dates": num_dates}).to_dataframe()
        parts.append(table.reset_index().assign(variable=name))
    rows = pd.concat(parts).reindex(columns=[*columns, "lead_time", "num_dates"])
    rows = rows[np.isfinite(rows["value"])].astype({"num_dates": int, "level": "Int64"})
    rows["lead_hours"] = rows["lead_time"] // np.timedelta64(1, "h")
    pairs = zip(rows["variable"], rows["metric"], strict=True)
    rows["units"] = [units_of(scores, variable, metric) for variable, metric in pairs]
    rows.to_csv(target, columns=[*columns, "num_dates"], index=False, lineterminator="\r\n")
