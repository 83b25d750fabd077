"""Scores as xarray Datasets in WeatherBench2's form, a data variable a variable, levels as a dimension, and
as tables of text and CSV.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from datasets.variables import group_levels, split_name, units

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
# Metrics without units, and those in the square of their variable's.
PURE = (
    "acc",
    "acc_ratio_of_means",
    "spread_skill_ratio",
    "unbiased_spread_skill_ratio",
    "num_dates",
    "common_area",
)
SQUARES = ("mse", "variance", "anomaly_covariance", "forecast_anomaly_square", "truth_anomaly_square")


def by_variable(
    values: np.ndarray,
    dims: Sequence[str],
    variables: Sequence[str],
    coords: Mapping[str, Any],
    own_units: Mapping[str, str],
) -> xr.Dataset:
    """Return an array with a dimension "variable" as a Dataset, "geopotential:500" as level 500 of
    "geopotential"; levels that a variable does not have are NaN.

    own_units: units of the variables that the project does not know.
    """
    array = xr.DataArray(values, dims=list(dims), coords=dict(coords))
    fields: list[xr.Dataset] = []
    for name, rows in group_levels(variables).items():
        if None in rows:
            field = array.isel(variable=rows[None])
        else:
            field = array.isel(variable=list(rows.values())).rename(variable="level")
            field = field.assign_coords(level=list(rows)).sortby("level")
        fields.append(field.rename(name).to_dataset())
    merged = xr.merge(fields, join="outer", compat="override", combine_attrs="drop")
    known = {split_name(name)[0]: text for name, text in own_units.items()}
    for name, field in merged.items():
        own = units(str(name)) or known.get(str(name), "")
        field.attrs["units"] = "m s-1" if "wind_vector" in str(name) else own
    return merged


def combine(parts: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Return the scores of all forecasts with a first dimension `forecast`, NaN (no dates) where missing.

    Coordinate `num_dates` (forecast, lead_time).
    """
    index = xr.DataArray(list(parts), dims="forecast", name="forecast")
    datasets = [part.reset_coords("num_dates") for part in parts.values()]
    joined: Any = {"join": "outer", "combine_attrs": "override", "compat": "override"}
    # Forecasts of surface variables alone have no level.
    whole = xr.concat(datasets, dim=index, data_vars="all", coords="minimal", **joined)
    return whole.assign_coords(num_dates=whole["num_dates"].fillna(0).astype(int))


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


def headline(names: Sequence[str], most: int = 8) -> list[str]:
    """Return at most `most` variables, the customary ones first."""
    first = [name for name in HEADLINE if name in names]
    return list(dict.fromkeys([*first, *names]))[:most]


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


def units_of(scores: xr.Dataset, variable: str, metric: str = "") -> str:
    """Return the units of a variable, or of a metric of it: K, K2 of the mse; "" of a pure number."""
    own = str(scores[split_name(variable)[0]].attrs.get("units", ""))
    return "" if metric in PURE else squared(own) if metric in SQUARES else own


def squared(units: str) -> str:
    """Return "m2 s-2" for "m s-1", "K2" for "K"; pure numbers stay ("1")."""
    words = [re.fullmatch(r"(.*?[^\d-])(-?\d+)?", word) for word in units.split()]
    return " ".join(f"{word[1]}{2 * int(word[2] or 1)}" if word else "1" for word in words)


def describe_dates(num_dates: Sequence[int], lead_hours: Sequence[int]) -> str:
    """Return "47 initial dates", or "47 initial dates at 6 h, 7 at 240 h" where the leads differ."""
    if len(set(num_dates)) == 1:
        return f"{num_dates[0]} initial dates"
    return f"{num_dates[0]} initial dates at {lead_hours[0]} h, {num_dates[-1]} at {lead_hours[-1]} h"


def table(scores: Mapping[str, xr.Dataset], metric: str, title: str) -> str:
    """Return a row a variable and lead with the number of dates ("46-47": fewest and most of a forecast), a
    column a forecast. Geopotential also in geopotential metres. Leads without any date are left out, and of
    more than VARIABLES_SHOWN variables all but the customary ones.
    """
    first, whole, parts = next(iter(scores.values())), combine(scores), list[pd.DataFrame]()
    counts = first.sel(metric="num_dates").to_array()
    scored = (counts > 0).any([dim for dim in counts.dims if dim != "lead_time"])
    leads = shown_leads(first["lead_time"].values[scored.values])
    names = printed = variable_names(first)
    if len(names) > VARIABLES_SHOWN:
        printed = headline(names)
        title += f"; {len(printed)} of {len(names)} variables"
    for name in printed:
        values, dates = (select(whole, each, name).sel(lead_time=leads) for each in (metric, "num_dates"))
        if metric != "rmse":  # an RMSE that is not finite is printed as nan
            values = values.dropna("forecast", how="all")
        if not values.size:
            continue
        rows: Any = values.transpose("lead_time", "forecast").to_pandas()
        between = zip(dates.min("forecast").values, dates.max("forecast").values, strict=True)
        rows.insert(0, "dates", ["-".join(map("{:.0f}".format, sorted({*ends}))) for ends in between])
        rows.insert(0, "lead", [f"{hours} h" for hours in lead_hours(values)])
        rows.insert(0, metric.upper(), name)
        rows["units"] = units_of(first, name, metric)
        parts.append(rows)
        if rows["units"].iat[0] == "m2 s-2":
            last = rows.iloc[[-1]].assign(units="gpm")
            parts.append(last.assign(**{each: last[each] / GRAVITY for each in scores}))
    whole = pd.concat(parts) if parts else pd.DataFrame(columns=[metric.upper(), *scores])
    return f"{title}\n{whole.to_string(index=False, float_format='{:.4g}'.format)}"


def shown_leads(leads: np.ndarray) -> np.ndarray:
    """Return all of a few leads; of many the first, every whole day, and the last."""
    if len(leads) <= LEADS_SHOWN:
        return leads
    return leads[(leads % DAY == np.timedelta64(0, "h")) | np.isin(leads, leads[[0, -1]])]
