"""Tables from a small Dataset of scores."""

from typing import Any

import numpy as np
import xarray as xr

from verification.tables import as_text, score_table, variable_names


def scores(factor: float = 1.0) -> xr.Dataset:
    """RMSE and ACC at 6, 12 and 120 h: z500 100, 200, 3000 x factor; t2m 1, 2, 3 x factor."""
    leads = np.array([6, 12, 120], "timedelta64[h]").astype("timedelta64[ns]")
    dims = ("metric", "region", "lead_time")
    z, t = (factor * np.array(rmse) for rmse in ([100, 200, 3000], [1, 2, 3]))
    z, t = (
        np.array([[rmse], [[0.9, 0.8, 0.7]], [dates], [rmse**2]])
        for rmse, dates in ((z, [47, 47, 7]), (t, [47, 46, 7]))
    )
    z = np.stack([z, np.full_like(z, np.nan)], axis=-1)
    variables = {"geopotential": ((*dims, "level"), z, {"units": "m2 s-2"})}
    axes = {"metric": ["rmse", "acc", "num_dates", "mse"], "region": ["global"], "lead_time": leads}
    axes |= {"level": [500, 850], "num_dates": ("lead_time", [47, 47, 7])}
    return xr.Dataset(variables | {"2m_temperature": (dims, t, {"units": "K"})}, axes)


def combine(scores_of: dict[str, xr.Dataset]) -> xr.Dataset:
    """One after the other along the dimension `forecast`."""
    forecasts = xr.DataArray(list(scores_of), dims="forecast", name="forecast")
    how: Any = {"join": "outer", "data_vars": "all", "coords": "minimal", "compat": "override"}
    return xr.concat(list(scores_of.values()), forecasts, **how)


def table(scores: xr.Dataset, title: str = "") -> str:
    return as_text(score_table(scores, "rmse", title))


def test_table_gives_geopotential_metres():
    lines = table(combine({"model": scores(), "persistence": scores(2)}), "10 dates").splitlines()
    assert lines[0] == "10 dates"
    rows = [line.split() for line in lines[2:]]
    assert ["geopotential:500", "6", "h", "47", "100", "200", "m2", "s-2"] in rows
    assert ["geopotential:500", "120", "h", "7", "305.9", "611.8", "gpm"] in rows  # 3000 / 9.80665
    assert ["2m_temperature", "12", "h", "46", "2", "4", "K"] in rows
    assert not any("geopotential:850" in line for line in lines)
    assert variable_names(scores()) == ["geopotential:500", "2m_temperature"]


def test_of_many_variables_the_table_has_the_customary_ones():
    levels = np.arange(30) * 25 + 25
    many = scores().isel(level=[0] * 30).assign_coords(level=levels)
    lines = table(combine({"model": many}), "10 dates").splitlines()
    assert lines[0] == "10 dates; 8 of 31 variables"
    shown = {line.split()[0] for line in lines[2:]}
    assert len(shown) == 8 and {"geopotential:500", "2m_temperature"} <= shown


def test_leads_that_a_forecast_lacks_are_nan_and_leads_without_dates_have_no_row():
    text = table(combine({"model": scores(), "other": scores(2).isel(lead_time=[0, 2])}))
    assert "NaN" in [line for line in text.splitlines() if "2m_temperature" in line and "12 h" in line][0]
    late = scores()
    for name in ("2m_temperature", "geopotential"):
        late[name].loc[{"metric": "num_dates", "lead_time": np.timedelta64(120, "h")}] = 0
    lines = table(combine({"model": late})).splitlines()
    assert any(" 12 h " in line for line in lines) and not any("120 h" in line for line in lines)
    rows = [line.split() for line in table(combine({"model": scores(), "other": late})).splitlines()]
    assert ["2m_temperature", "120", "h", "0-7"] in [row[:4] for row in rows]


def test_the_first_lead_every_whole_day_and_the_last_are_shown():
    """40 leads of 6 h: linspace picked 6, 54, 96 ... and never 24 h."""
    leads = np.arange(1, 42) * np.timedelta64(6, "h").astype("timedelta64[ns]")
    many = scores().isel(lead_time=[0] * 41).assign_coords(lead_time=leads)
    for number, hours in ((41, [6, *range(24, 241, 24), 246]), (6, [6, 12, 18, 24, 30, 36])):
        text = table(combine({"model": many.isel(lead_time=slice(number))}), "41 leads")
        rows = [line.split() for line in text.splitlines() if "2m_temperature" in line]
        assert [int(row[1]) for row in rows] == hours
