"""Scores as xarray Datasets in WeatherBench2's form, a data variable a variable, levels as a dimension; as
tables of text; and a scorecard, which tests the differences of two forecasts for significance.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from datasets.variables import group_levels, split_name, units
from errors import DataError

GRAVITY = 9.80665  # m s-2: geopotential over it is in geopotential metres
# Limits of the tables; scores.nc has everything.
LEADS_SHOWN = 6  # of a table that are not whole days
VARIABLES_SHOWN = 24
HEADLINE = (
    "geopotential:500",
    "temperature:850",
    "2m_temperature",
    "mean_sea_level_pressure",
    "10m_u_component_of_wind",
    "10m_v_component_of_wind",
    "wind_vector:850",
    "specific_humidity:700",
)
DAY = np.timedelta64(24, "h")
TITLES = {
    "rmse": "root-mean-square error",
    "acc": "anomaly correlation",
    "crps": "continuous ranked probability score (fair)",
    "unbiased_spread_skill_ratio": "spread over skill, 1 for a perfect ensemble",
}
OF_MEMBERS = ("crps", "unbiased_spread_skill_ratio")  # others of TITLES are of the mean of an ensemble
# Metrics without units, of those in a table.
PURE = ("acc", "unbiased_spread_skill_ratio")
# Of the scorecard.
BOUND = 50.0  # per cent at the ends of the colour scale
LEVEL = 0.05  # of significance
QUANTILE = 1.959964  # of the normal distribution, two-sided at this level
LEAST_DAYS = 30  # with fewer the autocorrelation of differences is not known


def by_variable(array: xr.DataArray, variables: Sequence[str], own_units: Mapping[str, str]) -> xr.Dataset:
    """Return an array with a dimension "variable" as a Dataset, "geopotential:500" as level 500 of
    "geopotential"; levels that a variable does not have are NaN.

    own_units: units of the variables that the project does not know.
    """
    array, fields = array.drop_vars("variable", errors="ignore"), list[xr.Dataset]()
    for name, rows in group_levels(variables).items():
        field = array.isel(variable=list(rows.values()))
        if None in rows:
            field = field.isel(variable=0)
        else:
            field = field.rename(variable="level").assign_coords(level=list(rows)).sortby("level")
        fields.append(field.rename(name).to_dataset())
    merged = xr.merge(fields, join="outer", compat="override", combine_attrs="drop")
    known = {split_name(name)[0]: text for name, text in own_units.items()}
    for name, field in merged.items():
        text = units(str(name)) or known.get(str(name), "")
        field.attrs["units"] = "m s-1" if "wind_vector" in str(name) else text
    return merged


def lead_hours(scores: xr.Dataset | xr.DataArray) -> list[int]:
    """Return the leads of scores in hours."""
    return [int(lead / np.timedelta64(1, "h")) for lead in scores["lead_time"].values]


def variable_names(scores: xr.Dataset) -> list[str]:
    """Return the variables with their levels, "geopotential:500", that have any score."""
    names = []
    for name, array in scores.data_vars.items():
        if "level" not in array.dims:
            names.append(str(name))
            continue
        finite = array.notnull().any(dim=[dim for dim in array.dims if dim != "level"])
        names += [f"{name}:{int(level)}" for level in array["level"].values[finite.values]]
    return names


def headline(names: Sequence[str]) -> list[str]:
    """Return as many variables as are customary, those first."""
    first = [name for name in HEADLINE if name in names]
    return list(dict.fromkeys([*first, *names]))[: len(HEADLINE)]


def one_variable(scores: xr.Dataset, variable: str) -> xr.DataArray:
    """Return "geopotential:500" of a Dataset, without dimension `level`. KeyError if it is not there."""
    name, level = split_name(variable)
    return scores[name] if level is None else scores[name].sel(level=level)


def select(scores: xr.Dataset, metric: str, variable: str) -> xr.DataArray:
    """Return a score of the whole globe, or of the first region if the globe was not asked for.

    KeyError if there is no such score.
    """
    regions = scores["region"].values
    region = "global" if "global" in regions else regions[0]
    return one_variable(scores, variable).sel(metric=metric, region=region)


def describe_dates(scores: xr.Dataset) -> str:
    """Return "47 initial dates", or "47 initial dates at 6 h, 7 at 240 h" where leads differ; scores: of one
    forecast.
    """
    numbers, hours = scores["num_dates"].values.tolist(), lead_hours(scores)
    if len(set(numbers)) == 1:
        return f"{numbers[0]} initial dates"
    return f"{numbers[0]} initial dates at {hours[0]} h, {numbers[-1]} at {hours[-1]} h"


def labels(scores: xr.Dataset) -> list[str]:
    """Return the names of forecasts for tables and plots: "model (mean of 4 members)" for an ensemble."""
    names = scores["forecast"].values.tolist()
    members = scores["num_members"].values.tolist() if "num_members" in scores.coords else [1] * len(names)
    return [f"{n} (mean of {m} members)" if m > 1 else n for n, m in zip(names, members, strict=True)]


# -- tables --------------------------------------------------------------------------------------------


def tables_of(scores: xr.Dataset, about: str) -> list[pd.DataFrame]:
    """Return the `score_table` of those of TITLES that scores (forecast, ...) have."""
    tables = []
    for metric, title in TITLES.items():
        if metric in scores["metric"]:
            chosen = scores.isel(forecast=scores["num_members"] > 1) if metric in OF_MEMBERS else scores
            tables.append(score_table(chosen, metric, f"{title}, {about}"))
    return tables


def as_text(table: pd.DataFrame) -> str:
    """Return a table as text under its title."""
    return f"{table.attrs['title']}\n{table.to_string(index=False, float_format='{:.4g}'.format)}"


def score_table(scores: xr.Dataset, metric: str, title: str) -> pd.DataFrame:
    """Return a row a variable and lead with the number of dates ("46-47": fewest and most of a forecast), a
    column a forecast; attribute `title`. Geopotential also in geopotential metres. Leads without any date are
    left out, and of more than VARIABLES_SHOWN variables all but the customary ones.
    """
    first, columns = scores.isel(forecast=0), labels(scores)
    if metric in OF_MEMBERS:
        columns = scores["forecast"].values.tolist()  # not of the mean of members
    counts = first.sel(metric="num_dates").to_array()
    scored = (counts > 0).any([dim for dim in counts.dims if dim != "lead_time"])
    leads, names = first["lead_time"].values[scored.values], variable_names(first)
    if len(leads) > LEADS_SHOWN:  # the first, every whole day, and the last
        leads = leads[(leads % DAY == np.timedelta64(0, "h")) | np.isin(leads, leads[[0, -1]])]
    # -- a table a variable, whose rows are leads
    tables = [pd.DataFrame(columns=[metric.upper(), *columns])]
    for name in names if len(names) <= VARIABLES_SHOWN else headline(names):
        values, dates = (select(scores, score, name).sel(lead_time=leads) for score in (metric, "num_dates"))
        if not values.size or (metric != "rmse" and values.isnull().all()):
            continue  # an RMSE that is not finite is printed as NaN
        rows: Any = values.transpose("lead_time", "forecast").to_pandas()
        rows.columns = columns
        ends = zip(dates.min("forecast").values, dates.max("forecast").values, strict=True)
        rows.insert(0, "dates", ["-".join(map("{:.0f}".format, sorted({*pair}))) for pair in ends])
        rows.insert(0, "lead", [f"{hours} h" for hours in lead_hours(values)])
        rows.insert(0, metric.upper(), name)
        rows["units"] = "" if metric in PURE else one_variable(first, name).attrs.get("units", "")
        if metric != "rmse":
            rows = rows.dropna(subset=columns, how="all")
        tables.append(rows)
        if rows["units"].iat[0] == "m2 s-2":
            last = rows.iloc[[-1]].assign(units="gpm")
            tables.append(last.assign(**{column: last[column] / GRAVITY for column in columns}))
    table = pd.concat(tables[1:] or tables)
    if len(names) > VARIABLES_SHOWN:
        title += f"; {table[metric.upper()].nunique()} of {len(names)} variables"
    table.attrs["title"] = title
    return table


# -- scorecard -----------------------------------------------------------------------------------------


def build_scorecard(by_date: xr.Dataset, first: str, second: str) -> pd.DataFrame:
    """Return forecast `first` relative to `second` in a table of scores by date, in its first region: a row a
    variable and lead that both have.

    Columns first, second, variable, lead_hours, percent (of the RMSE: below 0 the first has the smaller
    error), significant (1 or 0; 0 also where the dates are fewer than `dates_needed`), num_dates that both
    have. Attributes `dates_needed`, and `by_chance`: a sentence. Raises DataError if there is nothing to
    compare.
    """
    mse = by_date["statistics"].isel(region=0, drop=True).sel(score="mse", drop=True)
    mse, times = mse.transpose("forecast", "variable", "lead_time", "initial_time"), by_date["initial_time"]
    ours, theirs = (mse.sel(forecast=name, drop=True).load() for name in (first, second))
    # An infinite error is that of a broken forecast: the difference is NaN.
    both = ours.notnull() & theirs.notnull()
    num_dates = both.sum("initial_time")
    # With fewer days the inflation by autocorrelation cannot be estimated, and too much would be marked.
    interval = np.median(np.diff(times.values)) if len(times) > 1 else DAY
    needed = math.ceil(LEAST_DAYS * DAY / interval)
    with np.errstate(invalid="ignore", divide="ignore"):
        rmse = [(squares.where(both, 0).sum("initial_time") / num_dates) ** 0.5 for squares in (ours, theirs)]
        percent = 100 * (rmse[0] - rmse[1]) / rmse[1]
        is_tested = np.isfinite(percent) & (num_dates >= needed)
        significant = is_tested & differs_from_0((ours - theirs).where(both).values)
    columns = {"percent": percent, "significant": significant.astype(int), "num_dates": num_dates}
    card = xr.Dataset(columns).to_dataframe(["variable", "lead_time"]).query("num_dates > 0").reset_index()
    if not np.isfinite(card["percent"]).any():
        raise DataError(f"{first} and {second} have no number to compare: one is broken, or lacks the dates")
    hours = card["lead_time"] // np.timedelta64(1, "h")
    card = card.assign(first=first, second=second, lead_hours=hours)
    card = card.reindex(columns=["first", "second", "variable", "lead_hours", *columns])
    tested, marked = int(is_tested.sum()), int(significant.sum())
    chance = f"of equally good forecasts {LEVEL:.0%}, about {LEVEL * tested:.0f}, would be by chance"
    card.attrs["by_chance"] = f"{marked} of {tested} tested cells are marked; {chance}"
    if not tested:
        card.attrs["by_chance"] = f"no cell is tested for significance, with less than {needed} initial dates"
    card.attrs["dates_needed"] = needed
    return card


def differs_from_0(differences: np.ndarray) -> np.ndarray:
    """Return where the mean of differences (..., n) of two forecasts is not 0, by a paired t-test.

    The variance of the mean is that of independent dates times the inflation by an AR(2) process with the
    autocorrelation at lags 1 and 2 (Geer 2016, Tellus A 68, 30229), of which the degrees of freedom are those
    of as many independent dates. Subtracting the mean of the sample makes autocovariances smaller by the
    variance of that mean, which is added again: it matters where dates are few. NaN: a date that one of the
    forecasts lacks.
    """
    there, count = ~np.isnan(differences), (~np.isnan(differences)).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(there, differences, 0).sum(axis=-1) / count
        anomaly = np.where(there, differences - mean[..., None], 0)
        covariances = []
        for lag in range(3):
            ends = slice(lag, None), slice(None, anomaly.shape[-1] - lag)
            products, pairs = (x[..., ends[0]] * x[..., ends[1]] for x in (anomaly, there))
            covariances.append(products.sum(axis=-1) / pairs.sum(axis=-1))
        # Twice: the variance that is missing depends on the inflation, which depends on it.
        missing = np.zeros_like(mean)
        for _ in range(2):
            variance, first, second = (covariance + missing for covariance in covariances)
            r1, r2 = first / variance, second / variance
            a1, a2 = r1 * (1 - r2) / (1 - r1**2), (r2 - r1**2) / (1 - r1**2)  # Yule-Walker
            inflation = np.clip((1 - a1 * r1 - a2 * r2) / (1 - a1 - a2) ** 2, 1, count / 3)
            missing = variance * inflation / count
        t, dof, z = np.abs(mean) / np.sqrt(missing), np.maximum(count / inflation - 1, 2), QUANTILE
        # The quantile of Student's t, by its expansion around that of the normal distribution.
        limit = z + (z**3 + z) / (4 * dof) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
        limit += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * dof**3)
    return t > limit


def write_scorecard(card: pd.DataFrame, folder: Path) -> None:
    """Write a scorecard as CSV, and as an HTML table: coloured per cents, bold where significant."""
    finite = card.loc[np.isfinite(card["percent"])]  # others: a forecast is broken, or no date is common
    finite.to_csv(folder / "scorecard.csv", index=False, float_format="%.4f", lineterminator="\r\n")
    wide = finite.pivot(index="variable", columns="lead_hours").reindex(finite["variable"].unique())
    weights = wide["significant"].map(lambda significant: "font-weight: bold" * (significant == 1))
    style = wide["percent"].style.apply(lambda _: weights, axis=None)
    style.background_gradient("RdBu_r", axis=None, vmin=-BOUND, vmax=BOUND).format("{:.0f}", na_rep="")
    names, needed = " relative to ".join(card.loc[0, ["first", "second"]]), card.attrs["dates_needed"]
    note = f"below 0: better; bold: significant at {LEVEL:.0%} (tested from {needed} initial dates on)"
    style.set_caption(f"RMSE of {names} (%), by lead in hours; {note}; {card.attrs['by_chance']}")
    (folder / "scorecard.html").write_text(style.to_html())
