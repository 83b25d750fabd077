"""evaluate(): the form of what it gives, streaming, ranks, other grids, what the data lack, real data."""

import glob
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from datasets.archive import open_archive
from datasets.regrid import Regridder
from errors import DataError
from tests.forecasts import (
    OneForecast,
    analyses,
    climatology,
    evaluate_one,
    forecasts,
    grid,
    of_one,
    score,
    write,
)
from tests.started_jobs import ROOT
from verification import matching
from verification.baselines import Baseline
from verification.plots import plot_evaluation
from verification.scores_by_date import evaluate
from verification.stores import COMPUTED, DIVERGED, NO_ANALYSIS, open_forecast

GFS = str(ROOT / "../shared/data/gfs_winds_2026/*_2.8125deg.nc")
LEADS, HOUR = [6, 24], np.timedelta64(1, "h")
T2M, Z500, WIND = "2m_temperature", "geopotential:500", "wind_vector"


@pytest.fixture
def truth() -> xr.Dataset:
    """20 analyses on 6 x 8 cells, two of which lack the temperature of one date."""
    truth = analyses(grid(6, 8, poles=False), 20)
    truth[T2M][5, 2, 3:5] = np.nan
    return truth


@pytest.fixture
def forecast(truth: xr.Dataset) -> xr.Dataset:
    """From 7 initial dates."""
    return forecasts(truth.fillna(280), 7, LEADS)


def metric(found: OneForecast, name: str = T2M, metric: str = "rmse") -> np.ndarray:
    return found.scores[name].sel(metric=metric).squeeze().values


def squares(found: OneForecast, name: str = T2M) -> np.ndarray:
    """Squared errors by initial date and lead."""
    return found.by_date.sel(variable=name, score="mse").squeeze().values


def compare(folder: Path, truth: xr.Dataset, **compared: xr.Dataset):
    """The evaluation of several forecasts."""
    opened = {name: open_forecast(write(ds, folder / f"{name}.zarr")) for name, ds in compared.items()}
    return evaluate(opened, open_archive(write(truth, folder / "analyses.zarr")), detail_lead=24)


def test_scores_have_weatherbench2s_form(tmp_path, forecast, truth) -> None:
    found = score(tmp_path, forecast, truth, climatology(truth), regions=["global", "tropics"]).scores
    names = ["geopotential", "u_component_of_wind", "v_component_of_wind", T2M, WIND]
    assert set(found.data_vars) == set(names)
    assert found["geopotential"].dims == ("metric", "region", "lead_time", "level")
    assert found[T2M].dims == ("metric", "region", "lead_time")
    assert found["geopotential"].attrs["units"] == "m2 s-2" and found[WIND].attrs["units"] == "m s-1"
    assert found.lead_time.values.tolist() == [h * 3600 * 10**9 for h in LEADS]
    assert found.level.values.tolist() == [500, 850] and found.num_dates.values.tolist() == [7, 7]
    mse = found.sel(metric="mse")
    xr.testing.assert_allclose(mse[WIND], mse.u_component_of_wind + mse.v_component_of_wind, rtol=1e-15)
    assert np.isnan(found[WIND].sel(metric=["mae", "bias", "acc"])).all()


def test_units_of_a_variable_that_only_the_data_know(tmp_path, forecast, truth) -> None:
    """They are those of its scores, and may not differ."""
    own = [each[[T2M]].rename({T2M: "leaf_wetness"}) for each in (forecast, truth)]
    for each in own:
        each["leaf_wetness"].attrs["units"] = "mm"
    found = score(tmp_path, *own, detail_lead=24)
    assert found.spectra is not None and found.spectra["leaf_wetness"].attrs["units"] == "mm2 m"
    assert found.scores["leaf_wetness"].attrs["units"] == "mm"
    for units in ("furlong d-1", "knots"):
        own[1]["leaf_wetness"].attrs["units"] = units
        with pytest.raises(DataError, match=f"leaf_wetness: .*{units}"):
            score(tmp_path, *own)


def test_ensembles_score_their_mean_and_their_spread(tmp_path, truth) -> None:
    """Against the mean written as a forecast of its own; CRPS and variance have loops in test_scores.py."""
    ensemble, means = forecasts(truth, 7, LEADS, members=4), climatology(truth)
    found = score(tmp_path, ensemble, truth, means, detail_lead=6).scores
    single = score(tmp_path, ensemble.astype("f8").mean("number"), truth, means).scores
    xr.testing.assert_allclose(found.sel(metric=single.metric), single, rtol=1e-5)
    more = ["crps", "spread", "spread_skill_ratio", "unbiased_spread_skill_ratio"]
    assert found.metric.values.tolist() == [*single.metric.values, *more]
    ratio = found.geopotential.sel(metric="spread") / found.geopotential.sel(metric="rmse")
    np.testing.assert_allclose(found.geopotential.sel(metric="spread_skill_ratio"), ratio, rtol=1e-15)


def test_it_streams_to_the_same_bits(tmp_path, forecast, truth, monkeypatch) -> None:
    """One field at a time, and nothing kept, as where memory is short."""
    expected = score(tmp_path, forecast, truth, climatology(truth))
    for limit in ("BLOCK_BYTES", "KEPT_BYTES"):
        monkeypatch.setattr(matching, limit, 1)
    found = score(tmp_path, forecast, truth, climatology(truth))
    xr.testing.assert_identical(found.scores, expected.scores)
    xr.testing.assert_identical(found.by_date, expected.by_date)


def score_on_ranks(folder: Path, forecast: xr.Dataset, truth: xr.Dataset) -> OneForecast:
    means = climatology(truth)
    return score(folder, forecast, truth, means, regions=["global", "europe"], detail_lead=6)


def test_ranks_give_the_bits_of_one(ranks, tmp_path, forecast, truth) -> None:
    """7 dates do not divide by 4; every rank has the whole result."""
    alone = score_on_ranks(tmp_path, forecast, truth)
    for found in ranks(4).run(score_on_ranks, tmp_path, forecast, truth):
        xr.testing.assert_identical(found.scores, alone.scores)
        xr.testing.assert_identical(found.by_date, alone.by_date)
        xr.testing.assert_allclose(found.spectra, alone.spectra, rtol=1e-13)


def test_only_what_is_asked_for(tmp_path, forecast, truth) -> None:
    seen: list[int] = []
    options = {"variables": [T2M], "lead_hours": [24], "dates": forecast.time.values[2:5].astype("M8[s]")}
    found = score(tmp_path, forecast, truth, progress=seen.append, **options)
    assert sum(seen) == 3 and list(found.scores.data_vars) == [T2M]
    assert found.by_date.sizes["initial_time"] == 3 and found.scores.sizes["lead_time"] == 1
    metrics = {*found.scores.metric.values}
    assert metrics >= {"num_dates", "common_area", "rmse", "bias"} and not metrics & {"acc", "crps", "spread"}
    assert found.spectra is None


# -- grids ---------------------------------------------------------------------------------------------


def test_other_grids_are_regridded_to_the_coarser_one(tmp_path, forecast, truth) -> None:
    """A fine forecast against a coarse truth, and the other way round."""
    fine_truth = analyses(grid(19, 24, poles=True), 20, seed=5)
    coarse = open_archive(write(truth, tmp_path / "coarse.zarr"))
    fine = open_forecast(write(forecasts(fine_truth, 4, LEADS), tmp_path / "fine.zarr"))
    found = evaluate_one(fine, coarse, variables=[Z500])
    field = fine.read_block(slice(0, 4), slice(0, 1), [Z500])[:, 0, 0]
    regridded = Regridder(fine.grid, coarse.grid)(torch.from_numpy(field)).numpy()
    expected = truth.geopotential.sel(time=fine.times.astype("M8[ns]") + 6 * HOUR, level=500)[:, ::-1].values
    area = np.sin(np.deg2rad(coarse.grid.latitude + 15)) - np.sin(np.deg2rad(coarse.grid.latitude - 15))
    bias = np.average((regridded - expected).mean(axis=(0, 2)), weights=area)
    assert metric(found, "geopotential", "bias")[0] == pytest.approx(bias, rel=1e-5)
    assert np.isfinite(metric(score(tmp_path, forecast, fine_truth), "geopotential")).all()


def test_forecasts_are_compared_on_one_grid(tmp_path, forecast) -> None:
    """The same forecast on half the cells had an error of its own grid: significantly better by half."""
    truth = analyses(grid(12, 16, poles=False), 20, seed=3)
    coarse = analyses(grid(6, 8, poles=False), 20)
    fine = forecasts(truth, 7, LEADS)
    halved = forecast.copy(deep=True)
    of_fine, of_halved = (open_archive(write(ds, tmp_path / str(ds.sizes))).grid for ds in (truth, coarse))
    regridder = Regridder(of_fine, of_halved)
    for name, array in halved.items():
        values = fine[name].values[..., ::-1, :].copy()
        halved[name] = array.dims, regridder(torch.from_numpy(values)).numpy()[..., ::-1, :].copy()
    found = compare(tmp_path, truth, fine=fine, coarse=halved)
    xr.testing.assert_allclose(of_one(found, "fine").scores, of_one(found, "coarse").scores, rtol=1e-4)


@pytest.mark.parametrize("region", [(), (60, 0, 0, 60), (52, 10, -17, 100)])
def test_a_forecast_of_cell_means_is_perfect_in_any_region(tmp_path, region) -> None:
    """The truth is finer; in a region it has fewer points than the forecast, which is not refined for it."""
    fine, coarse = grid(24, 48, poles=False), grid(12, 24, poles=False)
    coarse["longitude"] = coarse["longitude"] + 3.75
    truth, made = analyses(fine, 4)[[T2M]], forecasts(analyses(coarse, 4), 2, [6])[[T2M]]
    area = np.diff(np.sin(np.deg2rad(np.linspace(-90, 90, 25))))[:, None] * np.ones(48)
    blocks = lambda x: x.reshape(*x.shape[:-2], 12, 2, 24, 2).sum((-3, -1))  # noqa: E731
    made[T2M].values[:, 0] = (blocks(truth[T2M].values * area) / blocks(area))[[1, 3]]
    source = open_archive(write(truth, tmp_path / "truth.zarr"), region=region)
    scores = evaluate_one(open_forecast(write(made, tmp_path / "f.zarr")), source).scores[T2M]
    assert scores.sel(metric="num_dates").max() == 2
    assert scores.sel(metric="rmse", region="global").max() < 1e-6


# -- what the truth lacks ------------------------------------------------------------------------------


def test_dates_and_leads_without_truth_are_left_out(tmp_path, forecast, truth) -> None:
    """The truth ends after 20 x 6 h; one of its dates is taken out."""
    gone = forecast.time.values[2] + 24 * HOUR  # 6 h after no initial date
    found, whole = (score(tmp_path, forecast, each) for each in (truth.drop_sel(time=gone), truth))
    assert found.scores.num_dates.values.tolist() == metric(found, metric="num_dates").tolist() == [7, 6]
    for name in (T2M, "wind_vector:500"):
        expected = squares(whole, name).copy()
        expected[2, 1] = np.nan
        np.testing.assert_array_equal(squares(found, name), expected)
    np.testing.assert_allclose(metric(found) ** 2, np.nanmean(squares(found), axis=0), rtol=1e-14)
    late = truth.assign_coords(time=truth.time + np.timedelta64(9999, "D"))
    with pytest.raises(DataError, match="no analysis"):
        score(tmp_path, forecast, late)


def test_a_missing_date_or_cell_leaves_only_itself_out(tmp_path, truth) -> None:
    """Neither as the initial state of date 3 nor as the truth 6 h after date 2."""

    def persisted(truth: xr.Dataset, name: str) -> OneForecast:
        archive = open_archive(write(truth, tmp_path / name))
        leads = np.array(LEADS, "m8[h]").astype("m8[s]")
        return evaluate_one(Baseline(archive, archive.variables, archive.times[:8], leads), archive)

    whole, lacking, cell = truth.fillna(280), truth.fillna(280), truth.fillna(280)
    lacking[T2M][3] = np.nan
    cell[T2M][3, 2, 5] = np.nan
    expected, found = persisted(whole, "whole"), persisted(lacking, "lacking")
    rows = [[0, 1, 4, 5, 6, 7], [0, 1, 2, 4, 5, 6, 7]]
    mse = [squares(expected)[dates, lead].mean() for lead, dates in enumerate(rows)]
    np.testing.assert_allclose(metric(found) ** 2, mse, rtol=1e-12)
    assert metric(found, metric="num_dates").tolist() == [6, 7]
    np.testing.assert_array_equal(metric(found, "geopotential"), metric(expected, "geopotential"))
    found = persisted(cell, "cell")
    assert metric(found, metric="num_dates").tolist() == [8, 8]
    np.testing.assert_allclose(metric(found), metric(expected), rtol=0.01)


@pytest.mark.parametrize("is_ours", [True, False])
def test_cells_that_the_initial_analysis_lacks_are_scored_as_in_training(tmp_path, is_ours) -> None:
    """There persistence has no value, and Rossby's own forecast one that it started from the mean: the model
    lost to persistence in evaluate.py and won in train.py, by other cells.
    """
    truth = analyses(grid(2, 3, poles=False), 7) * 0
    truth, made = truth[[T2M]], forecasts(truth, 2, [24])[[T2M]] * 0 + 1
    truth[T2M][0, 0, 0] = np.nan  # at the start of the first forecast
    made[T2M][0, 0, 0, 0] = 100
    found = score(tmp_path, with_status(made, COMPUTED, COMPUTED) if is_ours else made, truth)
    assert (float(metric(found)) == pytest.approx(1.0)) == is_ours


def test_spectra_leave_out_rows_with_missing_values(tmp_path, forecast, truth) -> None:
    whole = score(tmp_path, forecast, truth.fillna(280), detail_lead=24).spectra
    found = score(tmp_path, forecast, truth, detail_lead=24).spectra
    assert found is not None and whole is not None and found.sizes["lead_time"] == 1
    assert np.isfinite(found[T2M]).all()
    same = found.latitude != truth.latitude.values[2]
    xr.testing.assert_allclose(found.isel(latitude=same), whole.isel(latitude=same), rtol=1e-12)


def test_no_row_without_a_missing_cell_has_no_plot_of_spectra(tmp_path, forecast, truth) -> None:
    truth[T2M][..., 3] = np.nan
    for names, drawn in (([T2M], False), ([T2M, "geopotential"], True)):
        folder = tmp_path / str(drawn)
        plot_evaluation(compare(folder, truth, model=forecast[names]), None, folder)
        assert (folder / "spectra.png").exists() == drawn


# -- what the climatology lacks ------------------------------------------------------------------------


def test_a_cell_that_the_climatology_lacks_has_no_anomaly(tmp_path, forecast, truth) -> None:
    means = climatology(truth)
    means[T2M][..., 1, 1] = np.nan
    found = score(tmp_path, forecast, truth, means)
    np.testing.assert_array_equal(metric(found), metric(score(tmp_path, forecast, truth)))
    assert np.isfinite(found.scores[T2M].sel(metric=["acc", "truth_activity"])).all()


def test_a_variable_or_day_that_the_climatology_lacks_costs_its_acc(tmp_path, forecast, truth) -> None:
    """It ended the evaluation; the forecasts are of 25 to 28 December."""
    means = climatology(truth)
    whole = score(tmp_path, forecast.sel(time=slice("2019-12-26")), truth, means)
    part = means.drop_vars(T2M).sel(dayofyear=slice(1, 360))  # until 26 December
    found = score(tmp_path, forecast, truth, part)
    assert np.isnan(metric(found, metric="acc")).all() and np.isfinite(metric(found)).all()
    acc = [metric(each, "geopotential", "acc")[0] for each in (found, whole)]  # after 6 h
    np.testing.assert_allclose(*acc, rtol=1e-12)


# -- what forecasts lack -------------------------------------------------------------------------------


def with_status(stored: xr.Dataset, *of_dates: int) -> xr.Dataset:
    """Return forecasts of whose dates and leads forecast.py has written these statuses."""
    status = np.repeat(np.array(of_dates, "i1")[:, None], stored.sizes["prediction_timedelta"], axis=1)
    return stored.assign(forecast_status=(("time", "prediction_timedelta"), status))


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
def test_a_forecast_that_blew_up_is_not_left_out(tmp_path, truth, suffix: str) -> None:
    """The status is part of the store: as NetCDF the diverged date dropped out of its scores."""
    archive = open_archive(write(truth, tmp_path / "truth.zarr"))
    for name, status in (("missing", NO_ANALYSIS), ("diverged", DIVERGED)):
        stored = with_status(forecasts(truth.fillna(280), 4, LEADS), COMPUTED, status, COMPUTED, COMPUTED)
        stored["forecast_status"][1, 0] = COMPUTED
        stored[T2M][1, 1] = np.nan
        path = tmp_path / f"{name}.{suffix}"
        write(stored, path) if suffix == "zarr" else stored.to_netcdf(path, engine="h5netcdf")
        found = evaluate_one(open_forecast(str(path)), archive)
        assert np.isfinite(metric(found)).tolist() == [True, name == "missing"]


def test_a_wind_vector_has_no_date_that_a_component_lacks(tmp_path, forecast, truth) -> None:
    lacking = forecast.copy(deep=True)
    lacking["v_component_of_wind"][2] = np.nan
    found, whole = (squares(score(tmp_path, each, truth), f"{WIND}:500") for each in (lacking, forecast))
    np.testing.assert_array_equal(found, np.where(np.arange(7)[:, None] == 2, np.nan, whole))


def test_a_level_without_a_value_in_one_forecast_keeps_others_scores(
    tmp_path, forecast, truth, caplog
) -> None:
    """A store has NaN on levels that its model does not predict: nobody had scores there."""
    part = forecast.copy(deep=True)
    part["geopotential"].loc[{"level": 500}] = np.nan
    with caplog.at_level("INFO"):
        found = compare(tmp_path, truth, ours=forecast, part=part)
    alone = metric(score(tmp_path, forecast, truth), "geopotential")
    np.testing.assert_array_equal(metric(of_one(found, "ours"), "geopotential"), alone)
    has = np.isfinite(metric(of_one(found, "part"), "geopotential"))
    assert has.tolist() == [[False, True]] * 2
    assert "part has no value of geopotential:500" in caplog.text


def test_a_forecast_of_the_surface_alone_is_compared_with_one_on_levels(tmp_path, forecast, truth) -> None:
    """It has no coordinate of levels, and the end of the evaluation was a traceback of xarray."""
    found = compare(tmp_path, truth, whole=forecast, surface=forecast[[T2M]])
    whole = found.scores.sel(metric="rmse", region="global")
    assert whole["geopotential"].sel(forecast="whole").notnull().all()
    assert whole["geopotential"].sel(forecast="surface").isnull().all()
    assert np.ptp(whole[T2M].values, axis=0).max() == 0 and whole["num_dates"].shape == (2, 2)
    plot_evaluation(found, None, tmp_path)
    assert (tmp_path / "spectra.png").exists()


def test_forecasts_are_compared_on_the_cells_that_all_have(tmp_path, forecast, truth) -> None:
    """A forecast without its tropics was better than itself, significantly."""
    found = compare(tmp_path, truth, whole=forecast, outside=forecast.where(abs(forecast.latitude) > 20))
    xr.testing.assert_identical(of_one(found, "whole").scores, of_one(found, "outside").scores)
    area = metric(of_one(found, "whole"), "geopotential", "common_area")
    np.testing.assert_allclose(area, 1 - np.sin(np.deg2rad(30)), rtol=1e-12)


@pytest.mark.skipif(not glob.glob(GFS), reason="needs ../shared/data")
def test_persistence_on_real_analyses_scores_what_the_data_page_says() -> None:
    """../shared/data/README.md, 2.8125 degrees: +6 h 1.878 / 2.180, +24 h 3.855 / 4.605 m/s."""
    truth = open_archive(glob.glob(GFS)[0])
    leads = np.array(LEADS, "m8[h]").astype("m8[s]")
    found = evaluate_one(Baseline(truth, truth.variables, truth.times, leads), truth)
    assert np.round(metric(found, "10m_u_component_of_wind"), 3).tolist() == [1.878, 3.855]
    assert np.round(metric(found, "10m_v_component_of_wind"), 3).tolist() == [2.18, 4.605]
