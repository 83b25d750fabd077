"""The same forecasts in every centre's layout are read as the same fields, and score the same."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from datasets.archive import open_archive
from errors import DataError
from tests.forecasts import analyses, evaluate_one, forecasts, grid, write
from tests.sample_archives import netcdf
from verification.stores import StoredForecast, open_forecast

LEADS, T2M = [0, 6, 24], "2m_temperature"
NAMES = ["geopotential:500", "geopotential:850", T2M]
KEPT = ["geopotential", "u_component_of_wind", T2M]


def read(opened: StoredForecast, date: int, lead: int, names: list[str]) -> np.ndarray:
    """Fields (V, H, W), or (M, V, H, W), by the positions of date and lead."""
    return opened.read_block(slice(date, date + 1), slice(lead, lead + 1), names)[0, 0]


@pytest.fixture(scope="module")
def truth() -> xr.Dataset:
    return analyses(grid(6, 8, poles=False), 12)[KEPT]


@pytest.fixture(scope="module")
def forecast(truth: xr.Dataset) -> xr.Dataset:
    return forecasts(truth, 3, LEADS)


def in_hours(ds: xr.Dataset, **about: str) -> xr.Dataset:
    hours = (ds.prediction_timedelta.values // np.timedelta64(1, "h")).astype("i4")
    return ds.assign_coords(prediction_timedelta=("prediction_timedelta", hours, about))


def pangu(ds: xr.Dataset) -> xr.Dataset:
    """Latitude and levels descend, leads in hours, none of 0 h."""
    turned = slice(None, None, -1)
    ds = ds.isel(latitude=turned, level=turned, prediction_timedelta=slice(1, None))
    return in_hours(ds, units="hours")


def graphcast(ds: xr.Dataset) -> xr.Dataset:
    """lat, lon, a batch of one, and float32 latitudes."""
    ds = ds.rename(latitude="lat", longitude="lon").expand_dims("batch")
    return ds.assign_coords(lat=ds.lat.astype("f4"), lon=ds.lon.astype("f4"))


def west_first(ds: xr.Dataset) -> xr.Dataset:
    """-180 .. 135 E, `step` in nanoseconds."""
    ds = ds.assign_coords(longitude=(ds.longitude + 180) % 360 - 180).sortby("longitude")
    return ds.rename(prediction_timedelta="step")


LAYOUTS = {
    # Latitude ascends, longitude before latitude, leads as timedeltas.
    "hres": lambda ds: ds.transpose("time", "prediction_timedelta", "level", "longitude", "latitude"),
    "pangu": pangu,
    "graphcast": graphcast,
    # The lead before the initial date, and no units on its hours.
    "neuralgcm": lambda ds: in_hours(ds).transpose("prediction_timedelta", "time", "longitude", ...),
    "west first": west_first,
}


@pytest.mark.parametrize("layout", [*LAYOUTS, "netcdf"])
def test_every_layout_gives_the_same_fields_and_scores(layout: str, truth, forecast, tmp_path) -> None:
    """The truth stays north to south; latitudes of float32 cost less than a millionth."""
    if layout in LAYOUTS:
        path = write(LAYOUTS[layout](forecast), tmp_path / "forecast.zarr")
    else:
        path = netcdf(tmp_path, forecast)
    opened = open_forecast(path)
    missing = layout == "pangu"
    assert (opened.times == forecast.time.values).all() and opened.num_members == 1
    assert opened.leads.astype("timedelta64[h]").astype(int).tolist() == LEADS[missing:]
    assert (np.diff(opened.grid.latitude) < 0).all() and (np.diff(opened.grid.longitude) > 0).all()
    wanted = forecast.isel(latitude=slice(None, None, -1))
    upper, lower = wanted.geopotential, wanted[T2M]
    expected = np.stack([upper.sel(level=500), upper.sel(level=850), lower], axis=2)[:, missing:]
    found = opened.read_block(slice(0, 3), slice(0, 3 - missing), NAMES)
    np.testing.assert_array_equal(found, expected)
    archive = open_archive(write(truth.isel(latitude=slice(None, None, -1)), tmp_path / "truth.zarr"))
    reference = open_forecast(write(forecast, tmp_path / "reference.zarr"))
    options = {"lead_hours": [6, 24], "regions": ["global", "tropics", "europe"]}
    scores = evaluate_one(opened, archive, **options).scores
    assert set(scores.data_vars) == set(KEPT)
    xr.testing.assert_allclose(scores, evaluate_one(reference, archive, **options).scores, rtol=1e-6)


@pytest.mark.parametrize("dim", ["number", "realization"])
def test_ensembles(dim: str, truth: xr.Dataset, tmp_path: Path) -> None:
    """Members in front of the dates, as in WeatherBench2's IFS ensemble, or after the leads."""
    ensemble = forecasts(truth, 2, LEADS, members=3).rename(number=dim)
    ensemble = ensemble.transpose(dim, ...) if dim == "number" else ensemble
    opened = open_forecast(write(ensemble, tmp_path / "ens.zarr"))
    assert opened.num_members == 3
    found = read(opened, 1, 2, [T2M])
    wanted = ensemble[T2M].isel(time=1, prediction_timedelta=2, latitude=slice(None, None, -1))
    np.testing.assert_array_equal(found[:, 0], wanted.values)
    single = open_forecast(write(ensemble.isel({dim: [0]}), tmp_path / "one.zarr"))
    assert single.num_members == 1 and read(single, 0, 0, [T2M]).shape == (1, 6, 8)


def test_one_initial_date_without_a_dimension(forecast: xr.Dataset, tmp_path: Path) -> None:
    opened = open_forecast(write(forecast.isel(time=1), tmp_path / "single.zarr"))
    assert opened.times.tolist() == [forecast.time.values[1].astype("datetime64[s]").item()]
    assert read(opened, 0, 1, [T2M]).shape == (1, 6, 8)


def test_what_is_no_forecast_is_refused(truth, forecast, tmp_path: Path) -> None:
    """By valid time they were scored as if by initial time: a perfect one had an error of 7 K."""
    days = ("prediction_timedelta", LEADS, {"units": "fortnights"})
    starts = (forecast.time - forecast.prediction_timedelta).variable
    ensemble = forecasts(truth, 2, LEADS, members=2)
    stored = {
        "analyses": truth,
        "descending": forecast.isel(time=[1, 0]),
        "units": forecast.assign_coords(prediction_timedelta=days),
        "valid times": forecast.rename(time="valid_time"),
        "forecasts by valid times": forecast.assign_coords(forecast_reference_time=starts),
        "1 members": ensemble.assign({T2M: ensemble[T2M].isel(number=0, drop=True)}),
    }
    for name, dataset in stored.items():
        with pytest.raises(DataError, match=name):
            open_forecast(write(dataset, tmp_path / f"{name}.zarr"))
    forecast = forecast.copy(deep=True)
    forecast[T2M][1, 0, :2] = -9999  # a fill that is not declared
    opened = open_forecast(write(forecast, tmp_path / "good.zarr"))
    for lead, name, words in ((1, "geopotential:700", "geopotential:700"), (0, T2M, "-9999")):
        with pytest.raises(DataError, match=words):
            read(opened, 1, lead, [name])
