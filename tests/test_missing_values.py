"""Scores of incomplete data: other units, missing dates and cells, unfinished forecasts, histories."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import forecast as forecast_program
from config import Config
from datasets.archive import Archive, open_archive
from datasets.grid import Grid
from datasets.remote import NO_OPTIONS
from errors import ConfigError, DataError
from evaluate import choose_regions, open_forecasts
from tests.forecasts import analyses, climatology, evaluate_one, forecasts, grid, write
from verification.baselines import Baseline
from verification.climatology import open_climatology
from verification.scores import REGIONS
from verification.scores_by_date import evaluate
from verification.stores import COMPUTED, DIVERGED, NO_ANALYSIS, ForecastStore, StoredForecast, open_forecast
from verification.tables import build_scorecard

LEADS = [6, 24]
HOUR = np.timedelta64(1, "h")


@pytest.fixture
def truth() -> xr.Dataset:
    return analyses(grid(6, 8, poles=False), 20)


@pytest.fixture
def opened(tmp_path: Path, truth: xr.Dataset) -> tuple[StoredForecast, Archive]:
    """Forecasts from four dates, and that truth."""
    forecast = open_forecast(write(forecasts(truth, 4, LEADS), tmp_path / "forecast.zarr"))
    return forecast, open_archive(write(truth, tmp_path / "truth.zarr"))


def rmse(scores: xr.Dataset, name: str) -> np.ndarray:
    return scores[name].sel(metric="rmse").squeeze().values


# -- units ---------------------------------------------------------------------------------------------


def stores(folder: Path, truth: xr.Dataset, units: dict[str, str]) -> list[Any]:
    """Forecast, truth and climatology of a variable that the project does not know, in units of their own."""
    parts = {"forecast": forecasts(truth, 4, LEADS), "truth": truth, "climatology": climatology(truth)}
    for name, part in parts.items():
        gust = part[["2m_temperature"]].rename({"2m_temperature": "gust"})
        gust["gust"].attrs["units"] = units.get(name, "m s-1")
        write(gust, folder / f"{name}.zarr")
    paths = [str(folder / f"{name}.zarr") for name in parts]
    return [open_forecast(paths[0]), open_archive(paths[1]), open_climatology(paths[2])]


@pytest.mark.parametrize("units", ["furlong d-1", "knots"])
def test_other_units_of_unknown_variables_are_refused(tmp_path: Path, truth: xr.Dataset, units: str) -> None:
    with pytest.raises(DataError, match=f"gust: .*{units}"):
        evaluate_one(*stores(tmp_path, truth, {"truth": units}))


# -- dates and cells that are missing ------------------------------------------------------------------


def persisted(truth: xr.Dataset, path: Path) -> tuple[Baseline, Archive]:
    archive = open_archive(write(truth, path))
    leads = np.array(LEADS, "m8[h]").astype("m8[s]")
    return Baseline(archive, archive.variables, archive.times[:8], leads), archive


def test_a_missing_date_or_cell_leaves_only_itself_out(tmp_path: Path, truth: xr.Dataset) -> None:
    whole = evaluate_one(*persisted(truth, tmp_path / "whole.zarr"))
    lacking = truth.copy(deep=True)
    lacking["2m_temperature"][3] = np.nan
    found = evaluate_one(*persisted(lacking, tmp_path / "lacking.zarr"))
    # Neither as the initial state of date 3 nor as the truth 6 h after date 2.
    kept = whole.by_date["2m_temperature"].sel(metric="mse").squeeze().values
    dates = [[0, 1, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6, 7]]
    expected = [kept[rows, lead].mean() ** 0.5 for lead, rows in enumerate(dates)]
    np.testing.assert_allclose(rmse(found.scores, "2m_temperature"), expected, rtol=1e-12)
    counts = found.scores["2m_temperature"].sel(metric="num_dates").squeeze()
    assert counts.values.tolist() == [6, 7]
    np.testing.assert_array_equal(rmse(found.scores, "geopotential"), rmse(whole.scores, "geopotential"))
    cell = truth.copy(deep=True)
    cell["2m_temperature"][3, 2, 5] = np.nan
    found = evaluate_one(*persisted(cell, tmp_path / "cell.zarr")).scores
    assert found["2m_temperature"].sel(metric="num_dates").squeeze().values.tolist() == [8, 8]
    np.testing.assert_allclose(rmse(found, "2m_temperature"), rmse(whole.scores, "2m_temperature"), rtol=0.01)


def test_a_cell_that_the_climatology_lacks_has_no_anomaly(opened, tmp_path: Path, truth: xr.Dataset) -> None:
    means = climatology(truth)
    means["2m_temperature"][..., 1, 1] = np.nan
    found = evaluate_one(*opened, climatology=open_climatology(write(means, tmp_path / "means.zarr"))).scores
    plain = evaluate_one(*opened).scores
    np.testing.assert_array_equal(rmse(found, "2m_temperature"), rmse(plain, "2m_temperature"))
    assert np.isfinite(found["2m_temperature"].sel(metric=["acc", "truth_activity"])).all()


def test_a_variable_or_day_that_the_climatology_lacks_costs_its_acc(opened, tmp_path, truth) -> None:
    """It ended the evaluation; the forecasts are of 25 to 28 December."""
    means = climatology(truth)
    whole = evaluate_one(*opened, climatology=open_climatology(write(means, tmp_path / "whole.zarr")))
    part = means.drop_vars("2m_temperature").sel(dayofyear=slice(1, 360))  # until 26 December
    found = evaluate_one(*opened, climatology=open_climatology(write(part, tmp_path / "part.zarr")))
    assert found.scores["2m_temperature"].sel(metric="acc").isnull().all()
    np.testing.assert_array_equal(rmse(found.scores, "2m_temperature"), rmse(whole.scores, "2m_temperature"))
    early = whole.by_date["geopotential"].sel(
        metric="acc", lead_time=HOUR * 6, time=slice(None, "2019-12-26")
    )
    scores = found.scores["geopotential"].sel(metric="acc", lead_time=HOUR * 6)
    np.testing.assert_allclose(scores, early.mean("time"), rtol=1e-12)


def test_spectra_leave_out_rows_with_missing_values(opened, tmp_path: Path, truth: xr.Dataset) -> None:
    lacking = truth.copy(deep=True)
    lacking["2m_temperature"][5, 2, 3] = np.nan
    archive = open_archive(write(lacking, tmp_path / "lacking.zarr"))
    whole = evaluate_one(*opened, detail_lead=24).spectra
    found = evaluate_one(opened[0], archive, detail_lead=24).spectra
    assert found is not None and whole is not None and found.sizes["lead_time"] == 1
    assert np.isfinite(found["2m_temperature"]).all()
    same = found.latitude != truth.latitude.values[2]
    xr.testing.assert_allclose(found.isel(latitude=same), whole.isel(latitude=same), rtol=1e-12)


# -- forecasts that are not there ----------------------------------------------------------------------


def with_status(stored: xr.Dataset, *of_dates: int) -> xr.Dataset:
    """Return forecasts of which these dates have a status, as forecast.py writes it, and all others none."""
    status = np.zeros((stored.sizes["time"], len(LEADS)), "i1")
    status[: len(of_dates)] = np.array(of_dates)[:, None]
    return stored.assign(forecast_status=(("time", "prediction_timedelta"), status))


def test_forecasts_that_are_not_finished_are_not_scored(
    tmp_path: Path, truth: xr.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    stored = with_status(forecasts(truth, 4, LEADS), COMPUTED, COMPUTED)
    path = write(stored, tmp_path / "forecast.zarr")
    with caplog.at_level(logging.WARNING):
        opened = open_forecasts([path], tmp_path, {}, NO_OPTIONS)["forecast"]
    assert len(caplog.messages) == 1
    assert "from 2 of its 4 initial dates are not finished" in caplog.text
    archive = open_archive(write(truth, tmp_path / "truth.zarr"))
    assert evaluate_one(opened, archive).scores.num_dates.values.tolist() == [2, 2]


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_a_forecast_that_blew_up_is_not_left_out(tmp_path: Path, truth: xr.Dataset, suffix: str) -> None:
    """The status is part of the store: as NetCDF the diverged date dropped out of its scores."""
    archive = open_archive(write(truth, tmp_path / "truth.zarr"))
    for name, status in (("missing", NO_ANALYSIS), ("diverged", DIVERGED)):
        stored = with_status(forecasts(truth, 4, LEADS), COMPUTED, status, COMPUTED, COMPUTED)
        stored["forecast_status"][1, 0] = COMPUTED
        stored["2m_temperature"][1, 1] = np.nan
        path = tmp_path / f"{name}.{suffix}"
        write(stored, path) if suffix == "zarr" else stored.to_netcdf(path, engine="h5netcdf")
        found = evaluate_one(open_forecast(str(path)), archive).scores
        assert np.isfinite(rmse(found, "2m_temperature")).tolist() == [True, name == "missing"]


# -- exports that would replace something --------------------------------------------------------------


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("another's")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("another's")
    for name in ("model", "folder", "new.pt2"):
        with pytest.raises(ConfigError, match=f"--export .*{name}"):
            forecast_program.export(Config(), tmp_path / name)
    assert (tmp_path / "model").read_text() == "another's"


# -- what is too little --------------------------------------------------------------------------------


def test_regions_without_a_point_are_refused_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    europe = Grid(np.arange(70.0, 35, -1.0), np.arange(-10.0, 40))
    with pytest.raises(ConfigError, match="--regions tropics"):
        choose_regions(["tropics"], europe)
    with caplog.at_level(logging.INFO):
        assert choose_regions(["tropics", "europe", "ausnz"], europe) == ["europe"]
    there = ["global", "extra-tropics", "northern-hemisphere", "europe", "arctic"]
    assert choose_regions(list(REGIONS), Grid(np.arange(60.0, 29, -3), np.arange(0, 31, 3.0))) == there
    assert len(caplog.messages) == 2 and "tropics, ausnz" in caplog.text


def test_few_dates_are_never_significant(tmp_path: Path, truth: xr.Dataset) -> None:
    archive = open_archive(write(truth, tmp_path / "truth.zarr"))
    stored = forecasts(truth, 8, LEADS)
    worse = stored.assign(geopotential=stored["geopotential"] + 500)
    both = {
        name: open_forecast(write(each, tmp_path / f"{name}.zarr"))
        for name, each in (("model", stored), ("worse", worse))
    }
    card = build_scorecard(evaluate(both, archive).by_date, "model", "worse")
    assert card.attrs["dates_needed"] == 60  # six times five days, twice a day
    assert min(card["percent"].tolist()) < 0 and True not in card["significant"].tolist()


@pytest.mark.parametrize("content", [b"", b"{", b"\x82", b"{}"])
def test_damaged_metadata_of_an_array_of_a_forecast_are_one_line(tmp_path, content: bytes):
    area, dates = Grid(np.array([30.0, -30.0]), np.arange(0, 360, 90.0)), np.array(["2020-01-01"], "M8[s]")
    store = ForecastStore(tmp_path / "forecast.zarr", ["2m_temperature"], area, dates, [6])
    store.create({"weights": 1})
    (store.path / "2m_temperature/zarr.json").write_bytes(content)
    with pytest.raises(ConfigError, match="forecast.zarr"):
        store.create({"weights": 1})


def test_hours_of_a_climatology_that_cannot_be_read_are_one_line(tmp_path):
    hours = {"hour": [0, 6], "latitude": [30.0, -30.0], "longitude": np.arange(0, 360, 90.0)}
    field = xr.DataArray(
        np.zeros((2, 2, 4), "f4"), hours, ("hour", "latitude", "longitude"), "2m_temperature"
    )
    field.to_dataset().to_zarr(tmp_path / "c.zarr", zarr_format=2)
    (tmp_path / "c.zarr/hour/0").write_bytes(b"")
    with pytest.raises(DataError, match="cannot read .*c.zarr"):
        open_climatology(str(tmp_path / "c.zarr"))
