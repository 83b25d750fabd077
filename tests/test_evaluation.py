"""evaluate_one(): the form of what it gives, streaming, missing dates, ranks, other grids, real data."""

import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from datasets.archive import Archive, open_archive
from datasets.regrid import Regridder
from errors import ConfigError, DataError
from tests.forecasts import OneForecast, analyses, climatology, evaluate_one, forecasts, grid, of_one, write
from tests.started_jobs import ROOT
from verification import matching
from verification.baselines import Baseline
from verification.climatology import open_climatology
from verification.plots import plot_evaluation
from verification.scores_by_date import evaluate
from verification.stores import open_forecast

GFS = str(ROOT / "../shared/data/gfs_winds_2026/*_2.8125deg.nc")
LEADS = [6, 24]
WIND = "wind_vector"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """truth.zarr, forecast.zarr, ensemble.zarr and climatology.zarr on 6 x 8 cells, 7 initial dates."""
    folder = tmp_path_factory.mktemp("evaluation")
    truth = analyses(grid(6, 8, poles=False), 20)
    truth["2m_temperature"][5, 2, 3:5] = np.nan
    write(truth, folder / "truth.zarr")
    write(forecasts(truth, 7, LEADS), folder / "forecast.zarr")
    write(forecasts(truth, 7, LEADS, members=4), folder / "ensemble.zarr")
    write(climatology(truth), folder / "climatology.zarr")
    return folder


def opened(folder: Path, name: str = "forecast") -> tuple[Any, Archive, Any]:
    paths = [str(folder / f"{each}.zarr") for each in (name, "truth", "climatology")]
    return open_forecast(paths[0]), open_archive(paths[1]), open_climatology(paths[2])


def test_scores_have_weatherbench2s_form(folder: Path) -> None:
    found = evaluate_one(*opened(folder), regions=["global", "tropics"], detail_lead=24)
    names = ["geopotential", "u_component_of_wind", "v_component_of_wind", "2m_temperature", WIND]
    assert set(found.scores.data_vars) == set(names)
    assert found.scores["geopotential"].dims == ("metric", "region", "lead_time", "level")
    assert found.scores["2m_temperature"].dims == ("metric", "region", "lead_time")
    assert (
        found.scores["geopotential"].attrs["units"] == "m2 s-2"
        and found.scores[WIND].attrs["units"] == "m s-1"
    )
    assert found.scores.lead_time.values.tolist() == [h * 3600 * 10**9 for h in LEADS]
    assert found.scores.level.values.tolist() == [500, 850]
    assert found.scores.num_dates.values.tolist() == [7, 7]
    mse = found.scores.sel(metric="mse")
    total = mse.u_component_of_wind + mse.v_component_of_wind
    xr.testing.assert_allclose(mse[WIND], total, rtol=1e-15)
    assert np.isnan(found.scores[WIND].sel(metric=["mae", "bias", "acc"])).all()
    assert found.by_date["geopotential"].dims == ("time", "metric", "region", "lead_time", "level")
    assert found.by_date.region.values.tolist() == ["global"]


def test_units_of_a_variable_that_only_the_data_know(folder: Path) -> None:
    names = {"2m_temperature": "leaf_wetness"}
    for name in ("truth", "forecast"):
        stored = xr.open_zarr(folder / f"{name}.zarr", decode_timedelta=True).load().drop_encoding()
        stored = stored[list(names)].rename(names)
        stored["leaf_wetness"].attrs["units"] = "mm"
        write(stored, folder / f"wet_{name}.zarr")
    forecast = open_forecast(str(folder / "wet_forecast.zarr"))
    found = evaluate_one(forecast, open_archive(str(folder / "wet_truth.zarr")), detail_lead=24)
    assert found.spectra is not None
    units = [each["leaf_wetness"].attrs["units"] for each in (found.scores, found.by_date, found.spectra)]
    assert units == ["mm", "mm", "mm2 m"]


def test_means_over_dates_are_those_of_the_dates(folder: Path) -> None:
    found = evaluate_one(*opened(folder))
    for name in found.by_date.data_vars:
        mean = found.by_date[name].mean("time")
        scores = found.scores[name]
        for metric in ("mse", "mae", "bias", "acc", "rmse_sqrt_before_time_avg"):
            xr.testing.assert_allclose(mean.sel(metric=metric), scores.sel(metric=metric), rtol=1e-14)
        np.testing.assert_allclose(scores.sel(metric="rmse") ** 2, mean.sel(metric="mse"), rtol=1e-14)
        product = mean.sel(metric="forecast_anomaly_square") * mean.sel(metric="truth_anomaly_square")
        ratio = mean.sel(metric="anomaly_covariance") / product**0.5
        np.testing.assert_allclose(scores.sel(metric="acc_ratio_of_means"), ratio, rtol=1e-14)


def test_ensembles_score_their_mean_and_their_spread(folder: Path) -> None:
    """Against the mean written as a forecast of its own; CRPS and variance have loops in test_scores.py."""
    ensemble, truth, means = opened(folder, "ensemble")
    stored = xr.open_zarr(folder / "ensemble.zarr", decode_timedelta=True).load().drop_encoding()
    write(stored.astype("f8").mean("number"), folder / "mean.zarr")
    found = evaluate_one(ensemble, truth, means, detail_lead=6).scores
    single = evaluate_one(open_forecast(str(folder / "mean.zarr")), truth, means).scores
    xr.testing.assert_allclose(found.sel(metric=single.metric), single, rtol=1e-5)
    more = ["crps", "spread", "spread_skill_ratio", "unbiased_spread_skill_ratio"]
    assert found.metric.values.tolist() == [*single.metric.values, *more]
    ratio = found.geopotential.sel(metric="spread") / found.geopotential.sel(metric="rmse")
    np.testing.assert_allclose(found.geopotential.sel(metric="spread_skill_ratio"), ratio, rtol=1e-15)


def test_it_streams_to_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One field at a time, and nothing kept, as where memory is short."""
    expected = evaluate_one(*opened(folder))
    monkeypatch.setattr(matching, "BLOCK_BYTES", 1)
    monkeypatch.setattr(matching, "KEPT_BYTES", 1)
    found = evaluate_one(*opened(folder))
    xr.testing.assert_identical(found.scores, expected.scores)
    xr.testing.assert_identical(found.by_date, expected.by_date)


def test_dates_and_leads_without_truth_are_left_out(folder: Path) -> None:
    """The truth ends after 20 x 6 h; one of its dates is taken out."""
    forecast, _, means = opened(folder)
    stored = xr.open_zarr(folder / "truth.zarr").load().drop_encoding()
    gone = forecast.times[2] + np.timedelta64(24, "h")  # 6 h after no initial date
    truth = open_archive(write(stored.drop_sel(time=gone.astype("M8[ns]")), folder / "gap.zarr"))
    found, whole = evaluate_one(forecast, truth, means), evaluate_one(*opened(folder))
    assert found.scores.num_dates.values.tolist() == [7, 6]
    assert (found.scores["2m_temperature"].sel(metric="num_dates", region="global") == [7, 6]).all()
    for name in ("2m_temperature", "wind_vector"):
        there, before = found.by_date[name].sel(metric="mse"), whole.by_date[name].sel(metric="mse")
        expected = before.copy(deep=True)
        expected[2, :, 1] = np.nan
        np.testing.assert_array_equal(there.values, expected.values)
        np.testing.assert_allclose(found.scores[name].sel(metric="mse"), expected.mean("time"), rtol=1e-14)


def test_a_wind_vector_has_no_date_that_a_component_lacks(folder: Path) -> None:
    forecast, truth, means = opened(folder)
    stored = xr.open_zarr(folder / "forecast.zarr", decode_timedelta=True).load().drop_encoding()
    stored["v_component_of_wind"][2] = np.nan
    found = evaluate_one(open_forecast(write(stored, folder / "less.zarr")), truth, means).by_date
    expected = evaluate_one(forecast, truth, means).by_date[WIND].sel(metric="mse").values
    expected[2] = np.nan
    np.testing.assert_array_equal(found[WIND].sel(metric="mse").values, expected)


def test_only_what_is_asked_for(folder: Path) -> None:
    forecast, truth, _ = opened(folder)
    seen: list[int] = []
    options: dict[str, Any] = {
        "variables": ["2m_temperature"],
        "lead_hours": [24],
        "dates": forecast.times[2:5],
    }
    found = evaluate_one(forecast, truth, progress=seen.append, **options)
    assert sum(seen) == 3 and list(found.scores.data_vars) == ["2m_temperature"]
    assert found.by_date.sizes["time"] == 3 and found.scores.sizes["lead_time"] == 1
    metrics = {*found.scores.metric.values}
    assert metrics >= {"num_dates", "common_area", "rmse", "bias"} and not metrics & {"acc", "crps", "spread"}
    assert found.spectra is None


def test_no_row_without_a_missing_cell_has_no_plot_of_spectra(folder: Path, tmp_path: Path) -> None:
    stored = xr.open_zarr(folder / "truth.zarr").load().drop_encoding()
    stored["2m_temperature"][..., 3] = np.nan
    write(stored, tmp_path / "holes.zarr")
    truth = open_archive(str(tmp_path / "holes.zarr"))
    for variables, drawn in ((["2m_temperature"], False), (["2m_temperature", "geopotential:500"], True)):
        forecast = opened(folder)[0]
        found = evaluate({"model": forecast}, truth, variables=variables, detail_lead=24)
        plot_evaluation(found, None, tmp_path)
        assert (tmp_path / "spectra.png").exists() == drawn


def test_forecasts_of_other_variables_are_plotted_together(folder: Path, tmp_path: Path) -> None:
    stored = xr.open_zarr(folder / "forecast.zarr", decode_timedelta=True).load().drop_encoding()
    write(stored[["2m_temperature"]], tmp_path / "warm.zarr")
    both = {"all": opened(folder)[0], "warm": open_forecast(str(tmp_path / "warm.zarr"))}
    names = ["2m_temperature", "geopotential:500"]
    plot_evaluation(evaluate(both, opened(folder)[1], variables=names, detail_lead=24), None, tmp_path)
    assert (tmp_path / "spectra.png").exists()


def test_what_is_not_there_is_said_in_one_line(folder: Path) -> None:
    forecast, truth, means = opened(folder)
    with pytest.raises(ConfigError, match="'arctics'"):
        evaluate_one(forecast, truth, means, regions=["arctics"])
    late = xr.open_zarr(folder / "truth.zarr").load().drop_encoding()
    late = late.assign_coords(time=late.time + np.timedelta64(9999, "D"))
    with pytest.raises(DataError):
        evaluate_one(forecast, open_archive(write(late, folder / "late.zarr")))


def test_other_grids_are_regridded_to_the_coarser_one(folder: Path) -> None:
    """A fine forecast against a coarse truth, and the other way round."""
    coarse = open_archive(str(folder / "truth.zarr"))
    fine_truth = analyses(grid(19, 24, poles=True), 20, seed=5)
    fine = open_forecast(write(forecasts(fine_truth, 4, LEADS), folder / "fine.zarr"))
    found = evaluate_one(fine, coarse, variables=["geopotential:500"]).scores.geopotential.sel(metric="bias")
    field = fine.read_block(slice(0, 4), slice(0, 1), ["geopotential:500"])[:, 0, 0]
    forecast = Regridder(fine.grid, coarse.grid)(torch.from_numpy(field)).numpy()
    times = [coarse.index(time + np.timedelta64(6, "h")) for time in fine.times]
    truth = np.stack([coarse.read(i, ["geopotential:500"])[0] for i in times])
    area = np.sin(np.deg2rad(coarse.grid.latitude + 15)) - np.sin(np.deg2rad(coarse.grid.latitude - 15))
    expected = np.average((forecast - truth).mean(axis=(0, 2)), weights=area)
    assert float(found.isel(region=0, lead_time=0, level=0)) == pytest.approx(expected, rel=1e-5)
    back = evaluate_one(
        open_forecast(str(folder / "forecast.zarr")), open_archive(write(fine_truth, folder / "f.zarr"))
    )
    assert np.isfinite(back.scores.geopotential.sel(metric="rmse")).all()


def test_forecasts_are_compared_on_one_grid(folder: Path, tmp_path: Path) -> None:
    """The same forecast on half the cells had an error of its own grid: significantly better by half."""
    forecast, _, means = opened(folder)
    fine_truth = analyses(grid(12, 16, poles=False), 20, seed=3)
    stored = forecasts(fine_truth, 7, LEADS)
    fine = open_forecast(write(stored, tmp_path / "fine.zarr"))
    truth = write(fine_truth, tmp_path / "truth.zarr")
    regridder = Regridder(fine.grid, forecast.grid)
    halved = xr.open_zarr(folder / "forecast.zarr", decode_timedelta=True).load().drop_encoding()
    for name, array in halved.items():
        dims = [*array.dims[:-2], "latitude", "longitude"]
        values = stored[name].transpose(*dims).sel(latitude=slice(None, None, -1)).values
        halved[name] = dims, regridder(torch.from_numpy(values.copy())).numpy()[..., ::-1, :].copy()
    coarse = open_forecast(write(halved, tmp_path / "coarse.zarr"))
    found = evaluate({"fine": fine, "coarse": coarse}, open_archive(truth))
    xr.testing.assert_allclose(of_one(found, "fine").scores, of_one(found, "coarse").scores, rtol=1e-4)


def test_a_forecast_of_the_surface_alone_is_written_with_one_on_levels(folder: Path, tmp_path: Path) -> None:
    """It has no coordinate of levels, and the end of the evaluation was a traceback of xarray."""
    forecast, truth, _ = opened(folder)
    stored = xr.open_zarr(folder / "forecast.zarr", decode_timedelta=True).load().drop_encoding()
    path = write(stored[["2m_temperature"]], tmp_path / "surface.zarr")
    found = evaluate({"whole": forecast, "surface": open_forecast(path)}, truth)
    whole = found.scores.sel(metric="rmse", region="global")
    assert whole["geopotential"].sel(forecast="whole").notnull().all()
    assert whole["geopotential"].sel(forecast="surface").isnull().all()
    assert np.ptp(whole["2m_temperature"].values, axis=0).max() == 0 and whole["num_dates"].shape == (2, 2)


def test_forecasts_are_compared_on_the_cells_that_all_have(folder: Path, tmp_path: Path) -> None:
    """A forecast without its tropics was better than itself, significantly."""
    forecast, truth, means = opened(folder)
    stored = xr.open_zarr(folder / "forecast.zarr", decode_timedelta=True).load().drop_encoding()
    tropics = abs(stored.latitude) < 20
    path = write(stored.where(~tropics), tmp_path / "outside.zarr")
    found = evaluate({"whole": forecast, "outside": open_forecast(path)}, truth, means)
    xr.testing.assert_identical(of_one(found, "whole").scores, of_one(found, "outside").scores)
    area = of_one(found, "whole").scores["geopotential"].sel(metric="common_area", region="global")
    np.testing.assert_allclose(area, 1 - np.sin(np.deg2rad(30)), rtol=1e-12)


def evaluate_on_ranks(folder: Path) -> OneForecast:
    return evaluate_one(*opened(folder), regions=["global", "europe"], detail_lead=6)


def test_ranks_give_the_bits_of_one(ranks, folder: Path) -> None:
    """7 dates do not divide by 4; every rank has the whole result."""
    alone = evaluate_on_ranks(folder)
    for found in ranks(4).run(evaluate_on_ranks, folder):
        xr.testing.assert_identical(found.scores, alone.scores)
        xr.testing.assert_identical(found.by_date, alone.by_date)
        xr.testing.assert_allclose(found.spectra, alone.spectra, rtol=1e-13)


@pytest.mark.skipif(not glob.glob(GFS), reason="needs ../shared/data")
def test_persistence_on_real_analyses_scores_what_the_data_page_says() -> None:
    """../shared/data/README.md, 2.8125 degrees: +6 h 1.878 / 2.180, +24 h 3.855 / 4.605 m/s."""
    truth = open_archive(glob.glob(GFS)[0])
    leads = np.array(LEADS, "m8[h]").astype("m8[s]")
    source = Baseline(truth, truth.variables, truth.times, leads)
    scores = evaluate_one(source, truth).scores.sel(metric="rmse", region="global")
    assert np.round(scores["10m_u_component_of_wind"].values, 3).tolist() == [1.878, 3.855]
    assert np.round(scores["10m_v_component_of_wind"].values, 3).tolist() == [2.18, 4.605]
