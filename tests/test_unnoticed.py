"""Numbers that were wrong without a word, found by reading the same data with xarray, scores by hand."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import evaluate as evaluate_py
import forecast
from datasets.archive import open_archive
from datasets.convert import main as convert
from datasets.describe import main as describe
from datasets.statistics import check_static, refuse_fills
from errors import ConfigError, DataError
from tests.forecasts import analyses as scored_analyses
from tests.forecasts import evaluate_one, forecasts, grid, write
from tests.planned import run_train
from tests.sample_archives import analyses, anemoi, weatherbench, zarr_chunked
from tests.started_jobs import small_dataset, small_wave, write_config
from training.config_checks import load_checked
from verification.stores import COMPUTED, open_forecast
from verification.tables import lead_hours

T2M, U10 = "2m_temperature", "10m_u_component_of_wind"


# -- reading


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_fill_value_of_0_of_packed_numbers_means_missing(tmp_path, zarr_format):
    """Unsigned packing leaves 0 for it; Zarr 2's own 0 of values that are not packed is a value."""
    ds = analyses()[[T2M]]
    packing = {"dtype": "uint16", "scale_factor": 0.01, "add_offset": 180.0, "_FillValue": 0}
    path = tmp_path / "packed.zarr"
    ds.to_zarr(path, zarr_format=zarr_format, encoding={T2M: packing}, consolidated=False)
    found = open_archive(str(path)).read(2, [T2M])[0]
    theirs = xr.open_zarr(path)[T2M].values[2]
    assert np.isnan(theirs).any()
    np.testing.assert_allclose(found, theirs, rtol=1e-6)


def test_a_store_that_is_written_again_is_read_again(tmp_path):
    """In one process, as in a notebook: its files were kept open, and decoded with the new offset."""
    source, target, ds = tmp_path / "a.nc", tmp_path / "a.zarr", analyses()[[T2M]].fillna(280)
    for factor in (1, 2):
        (ds * factor).assign_attrs(units="K").to_netcdf(source, engine="h5netcdf")
        shutil.rmtree(target, ignore_errors=True)
        convert([str(source), str(target)])
        found = open_archive(str(target)).read(2, [T2M])[0]
        np.testing.assert_allclose(found, factor * ds[T2M].values[2], rtol=1e-3)


@pytest.mark.parametrize("fill", ["-9999", "none"])
def test_a_fill_value_that_is_text_is_a_number_or_leaves_one_variable_out(tmp_path, fill):
    """The whole file was refused, with an error of struct that named neither variable nor attribute."""
    ds = analyses()[[T2M, "geopotential"]].fillna(-9999)
    ds[T2M].attrs["missing_value"] = fill
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding={T2M: {"_FillValue": None}})
    archive = open_archive(str(tmp_path / "a.nc"))
    assert archive.read(2, ["geopotential:500"]).shape == (1, 6, 8)
    if fill == "none":
        assert "'none' is no number" in archive.unreadable[T2M]
    else:
        assert np.isnan(archive.read(2, [T2M])).sum() == 2


def test_all_dates_that_files_have_in_common_can_be_compared(tmp_path, capsys):
    """Some of sixty dates are compared when a run starts, and the newest."""
    ds = small_dataset({U10: small_wave(60)})
    for name, date in (("a", None), ("b", 20), ("c", 58)):
        changed = ds.copy(deep=True)
        if date:
            changed[U10][date] += 1
        changed.to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
    for names, noticed in (("ab", False), ("ac", True)):
        folder = tmp_path / names
        folder.mkdir()
        for name in names:
            shutil.copy(tmp_path / f"{name}.nc", folder)
        archive = open_archive(str(folder))
        if noticed:
            with pytest.raises(DataError, match="has different values"):
                archive.check([U10])
        else:
            archive.check([U10])
        assert describe([str(folder), "--all"]) == 1
        assert "has different values" in capsys.readouterr().out


def test_static_fields_are_checked_like_others(caplog):
    mask = np.eye(4, 6, dtype="f4")
    check_static({"land_sea_mask": mask}, "a.nc")
    assert not caplog.messages
    with pytest.raises(DataError, match="land_sea_mask is infinite in 1 cells"):
        check_static({"land_sea_mask": np.where(np.arange(24).reshape(4, 6) == 7, np.inf, mask)}, "a.nc")
    with pytest.raises(DataError, match="land_sea_mask is -9999 in 4 cells"):
        check_static({"land_sea_mask": np.where(mask > 0, -9999, 0)}, "a.nc")
    with pytest.raises(DataError, match="land_sea_mask is missing in all cells"):
        check_static({"land_sea_mask": mask * np.nan}, "a.nc")
    check_static({"land_sea_mask": np.where(mask > 0, np.nan, mask)}, "a.nc")
    assert "16.7 % of its cells are missing" in caplog.text


# -- weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[str], Path]:
    """Options of a run with a land-sea mask, and the folder of its data."""
    folder = tmp_path_factory.mktemp("static")
    ds = small_dataset({U10: small_wave(60)})
    rng = np.random.default_rng(0)
    for name in ("mask", "other"):
        field = xr.DataArray(rng.random((6, 8)).astype("f4").round(), ds.drop_dims("time").coords)
        field.to_dataset(name="land_sea_mask").to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
    (folder / "data").mkdir()
    path = weatherbench(folder / "data", ds)
    options = ["--job.config_file", str(write_config(folder)), "--data.path", path]
    options += ['--data.static_variables=["land_sea_mask"]', "--training.steps=2"]
    options += ["--job.dump_folder", str(folder / "run")]
    run_train(*options, "--data.static_path", str(folder / "mask.nc"))
    return options, folder


def test_another_static_field_is_another_meaning_of_the_weights(trained):
    options, folder = trained
    with pytest.raises(ConfigError, match="the field land_sea_mask = .*was trained with"):
        run_train(*options, "--data.static_path", str(folder / "other.nc"), "--training.steps=4")
    run_train(*options, "--data.static_path", str(folder / "mask.nc"), "--training.steps=3")


# -- forecasts


def forecast_of(options: list[str], folder: Path, *more: str) -> int:
    words = [*options, "--forecast.path", str(folder / "f.zarr"), "--forecast.num_steps=1"]
    words += ['--forecast.period=["2020-01-03","2020-01-04"]', *more]
    return forecast.forecast(load_checked(words))


def test_a_store_of_other_initial_states_is_not_finished(trained):
    """The same path, dates and variables, but corrected values: the old forecasts were taken for these."""
    options, folder = trained
    options = [*options, "--data.static_path", str(folder / "mask.nc")]
    assert forecast_of(options, folder) == 0
    assert forecast_of(options, folder) == 0  # finished, and the same
    path = Path(options[options.index("--data.path") + 1])
    ds = xr.open_zarr(path).load().drop_encoding()
    shutil.move(path, folder / "before.zarr")
    zarr_chunked(path, ds + 1, {"time": 1})
    try:
        with pytest.raises(ConfigError, match="another forecast: states is CRC-32"):
            forecast_of(options, folder)
    finally:
        shutil.rmtree(path)
        shutil.move(folder / "before.zarr", path)


# -- scores


@pytest.mark.parametrize("region", [(), (60, 0, 0, 60), (52, 10, -17, 100)])
def test_a_forecast_of_cell_means_is_perfect_in_any_region(tmp_path, region):
    """The truth is finer; in a region it has fewer points than the forecast, which is not refined for it."""
    rng, time = np.random.default_rng(0), np.arange("2020-01-01", "2020-01-04", dtype="datetime64[D]")
    latitude, longitude = np.linspace(86.25, -86.25, 24), np.arange(48) * 7.5
    field = rng.normal(size=(3, 24, 48)).astype("f4")
    axes = ("time", "latitude", "longitude")
    truth = xr.Dataset(
        {T2M: (axes, field)},
        {"time": time.astype("datetime64[ns]"), "latitude": latitude, "longitude": longitude},
    )
    edges = np.sin(np.deg2rad(np.linspace(90, -90, 25)))
    area = (edges[:-1] - edges[1:])[:, None] * np.ones(48)
    blocks = lambda x: x.reshape(*x.shape[:-2], 12, 2, 24, 2).sum((-3, -1))  # noqa: E731
    means = blocks(field * area) / blocks(area)
    made = xr.Dataset(
        {T2M: (("time", "prediction_timedelta", *axes[1:]), means[1:, None].astype("f4"))},
        {
            "time": time[:2].astype("datetime64[ns]"),
            "prediction_timedelta": np.array([24], "timedelta64[h]").astype("timedelta64[ns]"),
            "latitude": np.linspace(82.5, -82.5, 12),
            "longitude": longitude.reshape(24, 2).mean(1),
        },
    )
    source = open_archive(write(truth, tmp_path / "truth.zarr"), region=region)
    scores = evaluate_one(open_forecast(write(made, tmp_path / "f.zarr")), source).scores
    assert scores[T2M].sel(metric="num_dates").max() == 2
    assert scores[T2M].sel(metric="rmse", region="global").max() < 1e-6


@pytest.mark.parametrize("is_ours", [True, False])
def test_cells_that_the_initial_analysis_lacks_are_scored_as_in_training(tmp_path, is_ours):
    """There persistence has no value, and Rossby's own forecast one that it started from the mean: the model
    lost to persistence in evaluate.py and won in train.py, by other cells.
    """
    time = np.arange("2020-01-01", "2020-01-04", dtype="datetime64[D]").astype("datetime64[ns]")
    values = np.zeros((3, 2, 3), "f4")
    values[0, 0, 0] = np.nan  # at the start of the first forecast
    axes, coords = ("time", "latitude", "longitude"), grid(2, 3, poles=False)
    truth = xr.Dataset({T2M: (axes, values)}, {"time": time, **coords})
    made = np.ones((2, 1, 2, 3), "f4")
    made[0, 0, 0, 0] = 100
    leads = np.array([24], "timedelta64[h]").astype("timedelta64[ns]")
    ds = xr.Dataset(
        {T2M: (("time", "prediction_timedelta", *axes[1:]), made)},
        {"time": time[:2], "prediction_timedelta": leads, **coords},
    )
    if is_ours:
        ds["forecast_status"] = (ds[T2M].dims[:2], np.full((2, 1), COMPUTED, "i1"))
    path = write(ds, tmp_path / "f.zarr")
    scores = evaluate_one(open_forecast(path), open_archive(write(truth, tmp_path / "t.zarr"))).scores
    found = float(scores[T2M].sel(metric="rmse", region="global").squeeze())
    assert (found == pytest.approx(1.0)) == is_ours


# -- coordinates, fills, and what evaluate.py is given


def refused(source: str | Path, match: str, *names: str) -> None:
    with pytest.raises(DataError, match=match):
        archive = open_archive(str(source))
        refuse_fills(archive.read(2, names), names, archive.times[2], archive.path)


def test_an_undeclared_fill_is_one_in_any_units(tmp_path):
    """-9999 degC became -9725.85 K, on which a run trained."""
    ds = analyses()[[T2M]].fillna(280)
    values = ds[T2M].values - 273.15
    values[2, 1, :3] = -9999
    source = ds.assign({T2M: (ds[T2M].dims, values, {"units": "degC"})})
    source.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    refused(tmp_path / "a.nc", "a missing value that is not declared", T2M)


def test_packed_coordinates_are_unpacked(tmp_path):
    """Dates, degrees and hPa were read as they are stored (CF 8.1)."""
    ds = analyses()[["temperature"]]
    packing = {"latitude": (0.5, 3.0), "longitude": (0.5, 0.0), "level": (10.0, 0.0), "time": (0.25, 0.0)}
    stored = ds.assign_coords(time=np.arange(5.0))
    attrs: dict[str, dict[str, Any]] = {
        name: {"scale_factor": scale, "add_offset": offset} for name, (scale, offset) in packing.items()
    }
    attrs["time"]["units"] = "days since 2019-12-31T06:00:00"
    for name, (scale, offset) in packing.items():
        values = stored[name].values if name == "time" else (stored[name].values - offset) / scale
        stored = stored.assign_coords({name: (name, values.astype("f8"), attrs[name])})
    stored.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    found, plain = open_archive(str(tmp_path / "a.nc")), open_archive(weatherbench(tmp_path, analyses()))
    assert found.grid.same_as(plain.grid)
    assert found.variables == [name for name in plain.variables if name.startswith("temperature")]
    assert (found.times == plain.times).all()


def test_cells_of_a_rotated_grid_are_no_rows(tmp_path):
    path = anemoi(tmp_path, analyses())
    group: Any = zarr.open_group(path, mode="r+")
    group["latitudes"][:] = group["latitudes"][:] + 0.1 * group["longitudes"][:]
    refused(path, "regrid", T2M)


@pytest.fixture
def scored(tmp_path) -> tuple[xr.Dataset, xr.Dataset]:
    """Truth and forecasts of the tests of scores."""
    truth = scored_analyses(grid(8, 16, False), 24)
    write(truth, tmp_path / "truth.zarr")
    return truth, forecasts(truth, 4, [12, 24])


@pytest.fixture
def options(tmp_path) -> list[str]:
    source = write_config(tmp_path)
    periods = ["--data.train_period", '["2019-12-25", "2019-12-29"]', "--validation.enable", "false"]
    names = ["--data.variables", '["2m_temperature"]', "--data.static_variables", "[]", "--data.levels", "[]"]
    place = ["--data.path", str(tmp_path / "truth.zarr"), "--job.dump_folder", str(tmp_path / "run")]
    return ["--job.config_file", str(source), *place, *periods, *names, "--model.patch_size", "[4,4]"]


def test_an_undeclared_fill_of_a_forecast_is_refused(tmp_path, scored):
    scored[1][T2M][1, 0, :2] = -9999
    opened = open_forecast(write(scored[1], tmp_path / "f.zarr"))
    with pytest.raises(DataError, match="-9999"):
        opened.read_block(slice(0, 4), slice(0, 2), [T2M])


def test_members_that_one_variable_lacks_are_one_line(tmp_path, scored):
    ensemble = forecasts(scored[0], 4, [12, 24], members=2)
    ensemble[T2M] = ensemble[T2M].isel(number=0, drop=True)
    with pytest.raises(DataError, match="1 members"):
        open_forecast(write(ensemble, tmp_path / "f.zarr"))


def test_leads_between_hours_and_a_dimension_of_the_forecast_alone(tmp_path, scored, options):
    """12 h and 12 h 10 min were one lead of 12 h; data.select knew the dimensions of data.path only."""
    leads = np.array([720, 730, 1440]) * np.timedelta64(1, "m").astype("timedelta64[ns]")
    runs = xr.concat(
        [scored[1].isel(prediction_timedelta=[0, 0, 1])] * 2, xr.DataArray(["a", "b"], dims="run", name="run")
    )
    runs = runs.assign_coords(prediction_timedelta=leads)
    path = write(runs.transpose("run", "time", "prediction_timedelta", ...), tmp_path / "f.zarr")
    words = [
        "--forecast",
        path,
        "--data.select",
        '["run=b"]',
        "--baselines",
        "",
        "--regions",
        "arctic,global,arctic",
    ]
    words += ["--truth", str(tmp_path / "truth.zarr"), "--output", str(tmp_path / "out")]
    own, rest = evaluate_py.parse_options([*options, *words])
    evaluate_py.run(load_checked(rest), own)
    scores = xr.open_dataset(tmp_path / "out/scores.nc", decode_timedelta=True)
    assert lead_hours(scores) == [12, 24] and scores.region.values.tolist() == ["global", "arctic"]
    assert xr.open_dataset(next((tmp_path / "out").glob("spectra_*.nc")))[T2M].attrs["units"] == "K2 m"
