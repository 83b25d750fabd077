"""The table of scores by date: what continues, what is refused; what evaluate.py finds, names and leaves."""

import json
import shutil
import threading
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import evaluate as evaluate_program
from datasets.archive import open_archive
from errors import DataError
from tests.forecasts import analyses, climatology, forecasts, grid, write
from tests.planned import Ended, run_main
from tests.started_jobs import ROOT, run_options, write_config
from training.run_folder import lock_folder
from verification import scores_by_date
from verification.baselines import Baseline, fit_damping
from verification.climatology import open_climatology
from verification.scores_by_date import evaluate
from verification.stores import COMPUTED, open_forecast

LEADS = [12, 24]
T2M = "2m_temperature"


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time of an evaluation; tests/test_evaluate.py has them."""
    monkeypatch.setattr(evaluate_program, "plot_evaluation", lambda *_: None)


@pytest.fixture
def truth() -> xr.Dataset:
    return analyses(grid(8, 16, poles=False), 48)


@pytest.fixture
def folder(tmp_path: Path, truth: xr.Dataset) -> Path:
    """truth.zarr and ours.zarr, forecasts from twenty dates, twice a day; a configuration."""
    write(truth, tmp_path / "truth.zarr")
    write(forecasts(truth, 20, LEADS), tmp_path / "ours.zarr")
    data = {"variables": list(truth.data_vars), "levels": [500, 850]}
    data |= {"train_period": ["2019-12-25", "2020-01-02"], "static_variables": []}
    write_config(tmp_path, path=str(tmp_path / "truth.zarr"), data=data, model={"patch_size": [4, 4]})
    return tmp_path


def run(folder: Path, *words: str, forecast: str = "ours.zarr") -> Ended:
    """evaluate.py of a run without baselines, unless words name some."""
    words = (f"--forecast=model={folder / forecast}", "--baselines=", *words)
    return run_main(evaluate_program.main, *run_options(folder / "tiny.toml", folder / "run", *words))


def scores_in(folder: Path) -> xr.Dataset:
    return xr.load_dataset(folder / "run/evaluation/scores.nc", engine="h5netcdf", decode_timedelta=True)


def scored_dates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list to which the positions of dates are added when they are scored."""
    fill, dates = scores_by_date.fill_statistics, list[int]()
    counted: Any = lambda match, *rest: dates.append(match.date) or fill(match, *rest)  # noqa: E731
    monkeypatch.setattr(scores_by_date, "fill_statistics", counted)
    return dates


# -- what continues ------------------------------------------------------------------------------------


def test_dates_of_an_unfinished_forecast_are_scored_once_they_are_there(folder, truth, monkeypatch) -> None:
    """10 dates of 20, and their RMSE, were those of the finished forecast."""
    stored = xr.open_zarr(folder / "ours.zarr", decode_timedelta=True).load().drop_encoding()
    status = np.full((20, len(LEADS)), COMPUTED, "i8")
    finished = stored.assign(forecast_status=(("time", "prediction_timedelta"), status))
    half = finished.copy(deep=True)
    half["forecast_status"][10:] = 0
    half.where(half["forecast_status"] > 0).assign(forecast_status=half["forecast_status"]).chunk(
        time=1
    ).to_zarr(folder / "part.zarr", zarr_format=2)
    assert run(folder, forecast="part.zarr").returncode == 0
    assert scores_in(folder)["num_dates"].values.tolist() == [[10, 10]]
    finished.isel(time=slice(10, 20)).drop_vars(
        ["level", "latitude", "longitude", "prediction_timedelta"]
    ).to_zarr(folder / "part.zarr", region={"time": slice(10, 20)})
    dates = scored_dates(monkeypatch)
    assert run(folder, forecast="part.zarr").returncode == 0
    assert {*dates} == {*range(10, 20)}  # the others are those of the table
    found = scores_in(folder)
    assert found["num_dates"].values.tolist() == [[20, 20]]
    assert run(folder).returncode == 0
    np.testing.assert_array_equal(found[T2M], scores_in(folder)[T2M])


def test_other_options_and_other_analyses_are_scored_again(folder, truth, monkeypatch) -> None:
    assert run(folder).returncode == 0
    dates = scored_dates(monkeypatch)
    assert run(folder).returncode == 0 and not dates
    assert run(folder, "--regions=tropics").returncode == 0 and len({*dates}) == 20
    dates.clear()
    shutil.rmtree(folder / "truth.zarr")
    write(truth + 1, folder / "truth.zarr")
    assert run(folder, "--regions=tropics").returncode == 0 and len({*dates}) == 20


def test_a_kill_at_any_file_leaves_the_table_of_one_that_was_not_killed(folder, monkeypatch) -> None:
    """Four times, in the middle of the numbers of some date."""
    archive, forecast = open_archive(str(folder / "truth.zarr")), open_forecast(str(folder / "ours.zarr"))
    whole = evaluate({"f": forecast}, archive, path=folder / "whole.zarr").by_date.load()
    write_date, rng = scores_by_date.write_date, np.random.default_rng(0)
    for left in rng.integers(1, 4, 4).tolist():

        def dies(path: Path, date: int, statistics: np.ndarray, digest: int, left: list[int]) -> None:
            left[0] -= 1
            if not left[0]:  # half of the numbers of a date are written
                write_date(path, date, statistics / 2, 0)
                raise KeyboardInterrupt
            write_date(path, date, statistics, digest)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(scores_by_date, "write_date", partial(dies, left=[left]))
            evaluate({"f": forecast}, archive, path=folder / "killed.zarr")
            raise KeyboardInterrupt  # all dates were scored before
    found = evaluate({"f": forecast}, archive, path=folder / "killed.zarr").by_date.load()
    xr.testing.assert_identical(found["statistics"], whole["statistics"])


def test_a_folder_that_is_no_table_is_refused_and_left_alone(folder: Path) -> None:
    target = folder / "run/evaluation/scores_by_date.zarr"
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("mine")
    done = run(folder)
    assert done.returncode == 2 and "is no table of scores" in done.stderr
    assert (target / "thesis.tex").read_text() == "mine"


def test_scores_are_means_of_the_table(folder: Path) -> None:
    """By plain xarray, as a user would."""
    assert run(folder, "--regions=global,tropics").returncode == 0
    table = xr.open_zarr(folder / "run/evaluation/scores_by_date.zarr", decode_timedelta=True)
    mse = table["statistics"].sel(score="mse", variable="geopotential:850", region="tropics")
    found = scores_in(folder)["geopotential"].sel(metric="rmse", level=850, region="tropics")
    np.testing.assert_allclose(found, mse.mean("initial_time") ** 0.5, rtol=1e-14)


# -- which dates, forecasts and climatology ------------------------------------------------------------


def test_the_dates_of_forecast_period_are_scored(folder: Path) -> None:
    """They were ignored: all 20 dates of the forecast were scored."""
    done = run(folder, '--forecast.period=["2019-12-26", "2019-12-27"]')
    assert done.returncode == 0 and scores_in(folder)["num_dates"].values.tolist() == [[4, 4]]
    done = run(folder, '--forecast.period=["2021-12-26", "2021-12-27"]')
    assert done.returncode == 2 and "forecast.period" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["a dimension", "a coordinate"])
def test_forecasts_by_valid_time_are_refused(folder: Path, truth: xr.Dataset, kind: str) -> None:
    """They were scored as if by initial time: a perfect one had an error of 7 K."""
    times, leads = truth.time.values[8:20], np.array(LEADS, "m8[h]").astype("m8[ns]")
    perfect = truth[[T2M]].sel(time=times).expand_dims(prediction_timedelta=leads, axis=1)
    if kind == "a dimension":
        perfect = perfect.rename(time="valid_time")
    else:
        both = ("time", "prediction_timedelta"), times[:, None] - leads
        perfect = perfect.assign_coords(forecast_reference_time=both)
    with pytest.raises(DataError, match="valid times"):
        open_forecast(write(perfect, folder / "valid.zarr"))


def test_a_folder_with_several_climatologies_is_refused(folder: Path, truth: xr.Dataset) -> None:
    """The first of them was taken without a word."""
    (folder / "several").mkdir()
    for name in "ab":
        write(climatology(truth), folder / f"several/{name}.zarr")
    with pytest.raises(DataError, match="2 files: name one"):
        open_climatology(str(folder / "several"))


def test_a_level_without_a_value_in_one_forecast_keeps_others_scores(folder, truth, caplog) -> None:
    """A store has NaN on levels that its model does not predict: nobody had scores there."""
    stored = xr.open_zarr(folder / "ours.zarr", decode_timedelta=True).load().drop_encoding()
    stored["geopotential"].loc[{"level": 500}] = np.nan
    write(stored, folder / "part.zarr")
    both = {name: open_forecast(str(folder / f"{name}.zarr")) for name in ("ours", "part")}
    archive = open_archive(str(folder / "truth.zarr"))
    with caplog.at_level("INFO"):
        found = evaluate(both, archive).scores["geopotential"].sel(metric="rmse", region="global")
    alone = evaluate({"ours": both["ours"]}, archive).scores["geopotential"].sel(metric="rmse")
    np.testing.assert_array_equal(found.sel(forecast="ours"), alone.sel(forecast="ours", region="global"))
    assert found.sel(forecast="part", level=500).isnull().all()
    assert found.sel(forecast="part", level=850).notnull().all()
    assert "part has no value of geopotential:500" in caplog.text


# -- files ---------------------------------------------------------------------------------------------


def test_only_files_of_ours_are_removed(folder: Path) -> None:
    """A user's spectra_my_thesis.nc was deleted."""
    target = folder / "run/evaluation"
    target.mkdir(parents=True)
    (target / "spectra_my_thesis.nc").write_bytes(b"mine")
    assert run(folder, "--baselines=persistence").returncode == 0
    assert (target / "spectra_persistence.nc").exists() and (target / "scorecard.csv").exists()
    assert run(folder).returncode == 0
    assert (target / "spectra_my_thesis.nc").read_bytes() == b"mine"
    assert not (target / "spectra_persistence.nc").exists() and not (target / "scorecard.csv").exists()


def test_two_evaluations_in_one_folder(folder: Path) -> None:
    """The second ended with FileNotFoundError of a rename: one folder is refused in one line; with another
    --output it waits for the climatology.
    """
    held = lock_folder(folder / "run/evaluation")
    done = run(folder)
    assert done.returncode == 2 and "another evaluate.py" in done.stderr and done.stderr.count("\n") == 1
    timer = threading.Timer(0.5, held.close)
    timer.start()
    words = ["--baselines=climatology", "--output", str(folder / "other")]
    done = run(folder, *words)
    timer.join()
    assert done.returncode == 0 and held.closed, done.stderr
    assert (folder / "run/evaluation/climatology.zarr").exists() and (folder / "other/scores.nc").exists()


def test_the_checkpoint_of_a_forecast_is_named_and_a_newer_one_too(folder: Path) -> None:
    """After more training the old forecasts were scored without a word."""
    path = folder / "run/forecast.zarr"
    path.parent.mkdir()
    stored = xr.open_zarr(folder / "ours.zarr", decode_timedelta=True).load().drop_encoding()
    write(stored.assign_attrs(rossby=json.dumps({"checkpoint": "step-00000100"})), path)
    done = run(folder, forecast="run/forecast.zarr")
    assert "model (step-00000100)" in done.stdout and "step-00000200" not in done.stderr
    assert scores_in(folder).attrs["scored"] == "model (step-00000100)"
    checkpoint = folder / "run/checkpoints/step-00000200"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    done = run(folder, forecast="run/forecast.zarr")
    assert "is of step-00000100, and the run has step-00000200" in done.stderr


def test_an_ensemble_shows_its_scores_and_members(folder: Path, truth: xr.Dataset) -> None:
    """They were in scores.nc alone, and "RMSE model" did not say that it was that of a mean."""
    write(forecasts(truth, 20, LEADS, members=4), folder / "ensemble.zarr")
    done = run(folder, "--baselines=persistence", forecast="ensemble.zarr")
    assert "model (mean of 4 members)" in done.stdout
    titles = ("continuous ranked probability score", "spread over skill")
    assert all(title in done.stdout for title in titles), done.stdout
    (table,) = [text for text in done.stdout.split("\n\n") if text.startswith(titles[0])]
    assert "persistence" not in table.splitlines()[1]
    assert scores_in(folder)["num_members"].values.tolist() == [4, 1]


def test_spectra_are_of_the_lead_that_is_asked_for(folder: Path) -> None:
    assert run(folder, "--lead=12").returncode == 0
    spectra = xr.open_dataset(folder / "run/evaluation/spectra_model.nc", decode_timedelta=True)
    assert (spectra["lead_time"].values / np.timedelta64(1, "h")).tolist() == [12]
    done = run(folder, "--lead=18")
    assert done.returncode == 2 and "--lead 18" in done.stderr and "[12, 24]" in done.stderr


# -- damped persistence --------------------------------------------------------------------------------


def test_damped_persistence_decays_to_the_climatology_of_the_date(folder: Path, truth: xr.Dataset) -> None:
    """It decayed to the mean of the training period. Each state is read once for all leads."""
    means = open_climatology(write(climatology(truth), folder / "means.zarr"))
    archive, names = open_archive(str(folder / "truth.zarr")), [T2M, "geopotential:500"]
    samples = np.arange(10)[:, None] + np.array([0, 2, 4])
    factors = fit_damping(archive, names, samples, means.field)
    area = np.diff(np.sin(np.deg2rad(np.linspace(-90, 90, 9))))[:, None]
    anomalies = [archive.read(i, names) - means.field(archive.times[i], names) for i in range(48)]
    for row, steps in enumerate((2, 4)):
        x, y = (np.stack(anomalies[first : first + 10]).astype("f8") for first in (0, steps))
        expected = (area * x * y).sum((0, 2, 3)) / (area * x * x).sum((0, 2, 3))
        np.testing.assert_allclose(factors[row], expected, rtol=1e-6)
    leads, reads = np.array(LEADS, "m8[h]").astype("m8[s]"), []

    def read(time: np.datetime64, names: Any) -> np.ndarray:
        reads.append(archive.index(time))
        return archive.read(reads[-1], names)

    damping = factors, means.field, cache(read)
    for baseline in ((None, None, damping[-1]), damping):
        source = Baseline(archive, names, archive.times[:3], leads, *baseline)
        block = source.read_block(slice(0, 3), slice(0, 2), names)
    assert reads == [0, 1, 2]
    time = archive.times[1] + leads[1]
    expected = means.field(time, names) + factors[1][:, None, None] * anomalies[1]
    np.testing.assert_allclose(block[1, 1], expected, rtol=1e-6)


def test_what_damped_persistence_decays_to_is_named(folder: Path, truth: xr.Dataset) -> None:
    path = write(climatology(truth), folder / "means.zarr")
    done = run(folder, "--baselines=damped_persistence", "--climatology", path)
    assert "damped persistence decays to the climatology of the date" in done.stderr
    found = scores_in(folder)
    done = run(folder, "--baselines=damped_persistence")
    assert "damped persistence decays to the mean of the training period" in done.stderr
    assert not (folder / "run/damping.json").exists()
    both = [
        each[T2M].sel(forecast="damped persistence", metric="rmse") for each in (found, scores_in(folder))
    ]
    assert (both[0] != both[1]).all()


def test_the_sample_of_the_documentation_runs(folder: Path, truth: xr.Dataset, monkeypatch) -> None:
    """It named functions that it did not import, and an evaluation that was not there."""
    text = (ROOT / "docs/verification.md").read_text()
    sample = text.partition("```python\n")[2].partition("```")[0]
    for name, dataset in (
        ("hres", forecasts(truth, 20, LEADS)),
        ("other", forecasts(truth, 20, LEADS, seed=2)),
    ):
        write(dataset, folder / f"{name}.zarr")
    shutil.move(folder / "truth.zarr", folder / "era5.zarr")
    write(climatology(truth), folder / "climatology.zarr")
    monkeypatch.chdir(folder)
    exec(sample, {})
