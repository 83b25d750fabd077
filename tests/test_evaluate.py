"""evaluate.py as a user calls it: files, tables, what continues and what is refused; damped persistence."""

import json
import shutil
import threading
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import evaluate as program
from datasets.archive import open_archive
from datasets.grid import Grid
from errors import INTERRUPTED, ConfigError
from tests.forecasts import analyses, climatology, forecasts, grid, write
from tests.planned import Ended, run_main
from tests.started_jobs import ROOT, Job, run_options, started_by, write_config
from training.run_folder import lock_folder
from verification import scores_by_date
from verification.baselines import Baseline, fit_damping
from verification.climatology import open_climatology
from verification.scores import REGIONS
from verification.stores import COMPUTED
from verification.tables import lead_hours

LEADS = [12, 24]
T2M = "2m_temperature"
DRAW = program.plot_evaluation


@pytest.fixture(scope="module")
def truth() -> xr.Dataset:
    return analyses(grid(8, 16, poles=False), 48)


@pytest.fixture(scope="module")
def ours(truth: xr.Dataset) -> xr.Dataset:
    """Forecasts from twenty dates, twice a day."""
    return forecasts(truth, 20, LEADS)


@pytest.fixture(scope="module")
def folder(truth: xr.Dataset, ours: xr.Dataset, tmp_path_factory) -> Path:
    """truth.zarr, ours.zarr, means.zarr, a climatology; a configuration."""
    folder = tmp_path_factory.mktemp("evaluation")
    for name, dataset in (("truth", truth), ("ours", ours), ("means", climatology(truth))):
        write(dataset, folder / f"{name}.zarr")
    data = {"variables": list(truth.data_vars), "levels": [500, 850]}
    data |= {"train_period": ["2019-12-25", "2020-01-02"], "static_variables": []}
    write_config(folder, path=str(folder / "truth.zarr"), data=data, model={"patch_size": [4, 4]})
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calls evaluate.py of the run tmp_path / "run", on ours.zarr and without baselines unless words name
    others. Without plots, which take most of the time.
    """
    monkeypatch.setattr(program, "plot_evaluation", lambda *_: None)

    def call(*words: str, forecast: Path = folder / "ours.zarr", code: int = 0) -> Ended:
        words = (f"--forecast=model={forecast}", "--baselines=", *words)
        done = run_main(program.main, *run_options(folder / "tiny.toml", tmp_path / "run", *words))
        assert done.returncode == code, done.stderr
        return done

    return call


def scores_in(folder: Path) -> xr.Dataset:
    return xr.load_dataset(folder / "run/evaluation/scores.nc", engine="h5netcdf", decode_timedelta=True)


def rmse(folder: Path, forecast: str = "model", name: str = T2M, metric: str = "rmse") -> np.ndarray:
    """By lead, and level."""
    return scores_in(folder)[name].sel(forecast=forecast, metric=metric).isel(region=0).values


def scored_dates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list to which the positions of dates are added when they are scored."""
    fill, dates = scores_by_date.fill_statistics, list[int]()
    counted: Any = lambda match, *rest: dates.append(match.date) or fill(match, *rest)  # noqa: E731
    monkeypatch.setattr(scores_by_date, "fill_statistics", counted)
    return dates


def test_everything_is_written(run, truth, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(program, "plot_evaluation", DRAW)
    done = run("--baselines=persistence,damped_persistence,climatology")
    for text in ("gpm", "m2 s-2", "damped persistence"):
        assert text in done.stdout
    out = tmp_path / "run/evaluation"
    files, plots = {path.name for path in out.iterdir()}, {"rmse.png", "maps.png", "spectra.png"}
    assert {"scores.nc", "scores_by_date.zarr", "scorecard.csv", "scorecard.html"} <= files
    assert {"spectra_model.nc", "spectra_damped_persistence.nc"} <= files
    assert plots <= files and all((out / name).stat().st_size > 5000 for name in plots)
    scores = scores_in(tmp_path)
    names = ["model", "persistence", "damped persistence", "climatology"]
    assert list(scores["forecast"].values) == names
    assert scores["num_dates"].dims == ("forecast", "lead_time") and (scores["num_dates"] == 20).all()
    assert scores["num_dates"].dtype.kind == "i"
    # Persistence, by hand: 20 dates 12 h apart, area weights.
    weights = np.diff(np.sin(np.deg2rad(np.linspace(-90, 90, 9))))[:, None] * np.ones(16)
    t2m = truth[T2M].values.astype("f8")
    squares = [np.average((t2m[2 * i] - t2m[2 * i + 4]) ** 2, weights=weights) for i in range(20)]
    assert rmse(tmp_path, "persistence")[1] == pytest.approx(np.mean(squares) ** 0.5)


def test_scores_are_means_of_the_table(run, tmp_path) -> None:
    """By plain xarray, as a user would."""
    run("--regions=tropics")
    table = xr.open_zarr(tmp_path / "run/evaluation/scores_by_date.zarr", decode_timedelta=True)
    mse = table["statistics"].sel(score="mse", variable="geopotential:850", region="tropics")
    found = rmse(tmp_path, name="geopotential")[:, 1]
    np.testing.assert_allclose(found, mse.mean("initial_time")[0] ** 0.5, rtol=1e-14)


# -- what continues ------------------------------------------------------------------------------------


def test_dates_of_an_unfinished_forecast_are_scored_once_they_are_there(
    run, ours, tmp_path, monkeypatch
) -> None:
    """10 dates of 20, and their RMSE, were those of the finished forecast."""
    path = tmp_path / "part.zarr"
    status = np.full((20, len(LEADS)), COMPUTED, "i8")
    finished = ours.assign(forecast_status=(("time", "prediction_timedelta"), status))
    half = finished.copy(deep=True)
    half["forecast_status"][10:] = 0
    half = half.where(half["forecast_status"] > 0).assign(forecast_status=half["forecast_status"])
    half.chunk(time=1).to_zarr(path, zarr_format=2)
    assert "from 10 of its 20 initial dates are not finished" in run(forecast=path).stderr
    assert scores_in(tmp_path)["num_dates"].values.tolist() == [[10, 10]]
    rest = finished.isel(time=slice(10, 20)).drop_vars([dim for dim in ours.coords if dim != "time"])
    rest.to_zarr(path, region={"time": slice(10, 20)})
    dates = scored_dates(monkeypatch)
    run(forecast=path)
    assert {*dates} == {*range(10, 20)}  # the others are those of the table
    assert scores_in(tmp_path)["num_dates"].values.tolist() == [[20, 20]]
    found = rmse(tmp_path)
    run()
    np.testing.assert_array_equal(found, rmse(tmp_path))


def test_other_options_and_other_analyses_are_scored_again(run, truth, tmp_path, monkeypatch) -> None:
    words = ["--truth", write(truth, tmp_path / "truth.zarr")]
    run(*words)
    dates = scored_dates(monkeypatch)
    assert "20 of 20 dates are scored already" in run(*words).stderr and not dates
    run(*words, "--regions=tropics")
    assert len({*dates}) == 20
    dates.clear()
    shutil.rmtree(tmp_path / "truth.zarr")
    write(truth + 1, tmp_path / "truth.zarr")
    run(*words, "--regions=tropics")
    assert len({*dates}) == 20


def test_a_kill_at_any_file_leaves_the_results_of_one_that_was_not_killed(run, tmp_path, monkeypatch) -> None:
    """Four times, in the middle of the numbers of some date."""
    run("--output", str(tmp_path / "whole"))
    write_date, rng = scores_by_date.write_date, np.random.default_rng(0)
    for left in rng.integers(1, 4, 4).tolist():

        def dies(path: Path, date: int, statistics: np.ndarray, digest: int, left: list[int]) -> None:
            left[0] -= 1
            if not left[0]:  # half of the numbers of a date are written
                write_date(path, date, statistics / 2, 0)
                raise KeyboardInterrupt
            write_date(path, date, statistics, digest)

        with monkeypatch.context() as patch:
            patch.setattr(scores_by_date, "write_date", partial(dies, left=[left]))
            run("--output", str(tmp_path / "killed"), code=INTERRUPTED)
    dates = scored_dates(monkeypatch)
    run("--output", str(tmp_path / "killed"))
    assert 10 < len({*dates}) < 20
    for name in ("scores.nc", "spectra_model.nc", "scores_by_date.zarr"):
        open_it = xr.open_zarr if name.endswith("zarr") else xr.open_dataset
        found, whole = (open_it(tmp_path / part / name).load() for part in ("killed", "whole"))
        (xr.testing.assert_allclose if name.startswith("spectra") else xr.testing.assert_equal)(found, whole)


@pytest.mark.slow
def test_two_ranks_give_the_same_bits(run, folder, tmp_path) -> None:
    run()
    words = (f"--forecast=model={folder / 'ours.zarr'}", "--baselines=")
    job = Job(folder / "tiny.toml", tmp_path / "two/run", *words, command=started_by("evaluate.py", 2))
    assert job.end(240) == 0, job.output
    xr.testing.assert_equal(scores_in(tmp_path / "two"), scores_in(tmp_path))


# -- dates, leads, variables, climatology --------------------------------------------------------------


def test_the_dates_of_forecast_period_are_scored(run, tmp_path) -> None:
    """They were ignored: all 20 dates of the forecast were scored."""
    run('--forecast.period=["2019-12-26", "2019-12-27"]')
    assert scores_in(tmp_path)["num_dates"].values.tolist() == [[4, 4]]


def test_leads_beyond_the_truth_have_no_dates(run, ours, tmp_path, monkeypatch) -> None:
    """A spectrum of nothing could not be drawn on logarithmic axes. Persistence needs no climatology."""
    monkeypatch.setattr(program, "plot_evaluation", DRAW)
    leads = np.array([*LEADS, 2400], "m8[h]").astype("m8[ns]")
    late = ours.isel(prediction_timedelta=[0, 1, 1]).assign_coords(prediction_timedelta=leads)
    write(late, tmp_path / "late.zarr")
    run("--baselines=persistence", forecast=tmp_path / "late.zarr")
    assert not (tmp_path / "run/evaluation/climatology.zarr").exists(), "a climatology was computed"
    scores = scores_in(tmp_path)
    assert "acc" not in scores.metric and np.isfinite(rmse(tmp_path, "persistence")[:2]).all()
    assert scores["num_dates"].sel(forecast="model").values.tolist() == [20, 20, 0]
    with xr.open_dataset(tmp_path / "run/evaluation/spectra_model.nc") as spectra:
        assert np.isfinite(spectra[T2M]).all() and spectra["num_dates"].values.tolist() == [20]


def test_leads_between_hours_and_a_dimension_of_the_forecast_alone(run, ours, tmp_path) -> None:
    """12 h and 12 h 10 min were one lead of 12 h; data.select knew the dimensions of data.path only."""
    leads = np.array([720, 730, 1440]) * np.timedelta64(1, "m").astype("timedelta64[ns]")
    named = xr.DataArray(["a", "b"], dims="run", name="run")
    runs = xr.concat([ours.isel(prediction_timedelta=[0, 0, 1])] * 2, named)
    runs = runs.assign_coords(prediction_timedelta=leads)
    write(runs.transpose("run", "time", "prediction_timedelta", ...), tmp_path / "f.zarr")
    run("--data.select", '["run=b"]', "--regions=arctic,global,arctic", forecast=tmp_path / "f.zarr")
    scores = scores_in(tmp_path)
    assert lead_hours(scores) == LEADS and scores.region.values.tolist() == ["global", "arctic"]
    spectra = xr.open_dataset(tmp_path / "run/evaluation/spectra_model.nc")
    assert spectra[T2M].attrs["units"] == "K2 m"


def test_spectra_are_of_the_lead_that_is_asked_for(run, tmp_path) -> None:
    run("--lead=12")
    spectra = xr.open_dataset(tmp_path / "run/evaluation/spectra_model.nc", decode_timedelta=True)
    assert lead_hours(spectra) == [12]


def test_without_all_hours_of_the_day_there_is_no_acc(run, folder, truth, tmp_path) -> None:
    """Training data at 0 and 12 h only: no ACC at 6 h, where no climatology is, and all other scores."""
    write(forecasts(truth, 10, [6, *LEADS]), tmp_path / "six.zarr")
    write(truth.isel(time=truth.time.dt.hour.isin([0, 12])), tmp_path / "noons.zarr")
    words = [f"--truth={folder / 'truth.zarr'}", f"--data.path={tmp_path / 'noons.zarr'}"]
    words += ["--data.step_hours=12", "--validation.lead_hours=[12]", "--baselines=climatology,persistence"]
    run(*words, forecast=tmp_path / "six.zarr")
    assert np.isfinite(rmse(tmp_path)).all()
    assert np.isfinite(rmse(tmp_path, metric="acc")).tolist() == [False, True, True]


def test_a_coarse_climatology_does_not_coarsen_the_comparison(run, truth, tmp_path) -> None:
    """As a baseline it did, and regions were chosen on another grid than they were scored on."""
    coarse = truth.isel(latitude=slice(1, None, 5), longitude=slice(None, None, 6))
    path = write(climatology(coarse), tmp_path / "coarse.zarr")
    found = []
    for baselines in ("", "climatology"):
        run("--regions=global,europe", "--climatology", path, f"--baselines={baselines}")
        found.append(scores_in(tmp_path).sel(forecast="model", metric=["rmse", "acc"]))
    assert found[0][T2M].notnull().all()
    xr.testing.assert_equal(*found)


def test_what_has_none_of_the_variables_is_no_part_of_a_comparison(run, truth, ours, tmp_path) -> None:
    """It was a traceback about a dimension of size 0."""
    write(ours[[T2M]], tmp_path / "surface.zarr")
    write(ours[["geopotential"]], tmp_path / "upper.zarr")
    means = write(climatology(truth[["geopotential"]]), tmp_path / "heights.zarr")
    words = ["--climatology", means, "--baselines=climatology,persistence"]
    assert "climatology is no baseline" in run(*words, forecast=tmp_path / "surface.zarr").stderr
    scores = scores_in(tmp_path)
    assert [*scores.data_vars] == [T2M] and [*scores.forecast.values] == ["model", "persistence"]
    upper = f"--forecast=upper={tmp_path / 'upper.zarr'}"
    done = run(*words, upper, forecast=tmp_path / "surface.zarr", code=2)
    assert "'upper': it has none of the variables" in done.stderr


def test_the_cells_that_are_scored_are_named(run, ours, tmp_path) -> None:
    assert "cells: all that have a truth" in run().stdout
    write(ours.where(ours.latitude < 60), tmp_path / "south.zarr")  # the last row is north of 67.5
    text = run(forecast=tmp_path / "south.zarr").stdout
    assert "cells: those that all forecasts have, 96.2% of the truth's area for" in text


def test_an_ensemble_shows_its_scores_and_members(run, truth, tmp_path) -> None:
    """They were in scores.nc alone, and "RMSE model" did not say that it was that of a mean."""
    write(forecasts(truth, 20, LEADS, members=4), tmp_path / "ensemble.zarr")
    done = run("--baselines=persistence", forecast=tmp_path / "ensemble.zarr")
    assert "model (mean of 4 members)" in done.stdout
    titles = ("continuous ranked probability score", "spread over skill")
    assert all(title in done.stdout for title in titles), done.stdout
    (table,) = [text for text in done.stdout.split("\n\n") if text.startswith(titles[0])]
    assert "persistence" not in table.splitlines()[1]
    assert scores_in(tmp_path)["num_members"].values.tolist() == [4, 1]


# -- files ---------------------------------------------------------------------------------------------


def test_only_files_of_ours_are_removed(run, tmp_path) -> None:
    """A user's spectra_my_thesis.nc was deleted."""
    target = tmp_path / "run/evaluation"
    target.mkdir(parents=True)
    (target / "spectra_my_thesis.nc").write_bytes(b"mine")
    run("--baselines=persistence")
    assert (target / "spectra_persistence.nc").exists() and (target / "scorecard.csv").exists()
    run()
    assert (target / "spectra_my_thesis.nc").read_bytes() == b"mine"
    assert not (target / "spectra_persistence.nc").exists() and not (target / "scorecard.csv").exists()


def test_two_evaluations_in_one_folder(run, tmp_path) -> None:
    """The second ended with FileNotFoundError of a rename: one folder is refused in one line; with another
    --output it waits for the climatology.
    """
    held = lock_folder(tmp_path / "run/evaluation")
    done = run(code=2)
    assert "another evaluate.py" in done.stderr and done.stderr.count("\n") == 1
    timer = threading.Timer(0.5, held.close)
    timer.start()
    run("--baselines=climatology", "--output", str(tmp_path / "other"))
    timer.join()
    assert held.closed and (tmp_path / "run/evaluation/climatology.zarr").exists()
    assert (tmp_path / "other/scores.nc").exists()


def test_the_checkpoint_of_a_forecast_is_named_and_a_newer_one_too(run, ours, tmp_path) -> None:
    """After more training the old forecasts were scored without a word."""
    path, checkpoint = tmp_path / "run/forecast.zarr", tmp_path / "run/checkpoints/step-00000200"
    write(ours.assign_attrs(rossby=json.dumps({"checkpoint": "step-00000100"})), path)
    done = run(forecast=path)
    assert "model (step-00000100)" in done.stdout and "step-00000200" not in done.stderr
    assert scores_in(tmp_path).attrs["scored"] == "model (step-00000100)"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert "is of step-00000100, and the run has step-00000200" in run(forecast=path).stderr


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--forecast nowhere.zarr", "nowhere.zarr"),
        ("--forecast persistence=datasets", "persistence"),  # the name of a baseline
        ("--forecast a_b={folder}/ours.zarr --forecast a?b={folder}/ours.zarr", "a?b"),  # one file for both
        ("--regions atlantis", "atlantis"),
        ("--output {folder}/truth.zarr/scores", "--output"),
        ("--baselines luck", "luck"),
        ("--lead 18", "--lead 18: not one of the leads with a truth, [12, 24]"),
        ('--forecast.period ["2021-12-26","2021-12-27"]', "forecast.period"),
        ("--datta.path x", "datta"),
    ],
)
def test_bad_input_is_one_line(run, folder, words: str, message: str) -> None:
    done = run(*words.replace("{folder}", str(folder)).split(), code=2)
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_folder_that_is_no_table_is_refused_and_left_alone(run, tmp_path) -> None:
    target = tmp_path / "run/evaluation/scores_by_date.zarr"
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("mine")
    assert "is no table of scores" in run(code=2).stderr
    assert (target / "thesis.tex").read_text() == "mine"


def test_regions_without_a_point_are_refused_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    europe = Grid(np.arange(70.0, 35, -1.0), np.arange(-10.0, 40))
    with pytest.raises(ConfigError, match="--regions tropics"):
        program.choose_regions(["tropics"], europe)
    with caplog.at_level("INFO"):
        assert program.choose_regions(["tropics", "europe", "ausnz"], europe) == ["europe"]
    assert "tropics, ausnz" in caplog.text
    there = ["global", "extra-tropics", "northern-hemisphere", "europe", "arctic"]
    small = Grid(np.arange(60.0, 29, -3), np.arange(0, 31, 3.0))
    assert program.choose_regions(list(REGIONS), small) == there


# -- damped persistence --------------------------------------------------------------------------------


def test_damped_persistence_decays_to_the_climatology_of_the_date(folder, truth, tmp_path) -> None:
    """It decayed to the mean of the training period. Each state is read once for all leads. The factors are
    those of least squares, over cells with a value.
    """
    means, names = open_climatology(str(folder / "means.zarr")), [T2M, "geopotential:500"]
    truth = truth.copy(deep=True)
    truth[T2M][3:5, 2, 3] = np.nan
    archive = open_archive(write(truth, tmp_path / "holes.zarr"))
    factors = fit_damping(archive, names, np.arange(10)[:, None] + np.array([0, 2, 4]), means.field)
    area = np.diff(np.sin(np.deg2rad(np.linspace(-90, 90, 9))))[:, None]
    anomalies = [archive.read(i, names) - means.field(archive.times[i], names) for i in range(48)]
    for row, steps in enumerate((2, 4)):
        x, y = (np.stack(anomalies[first : first + 10]).astype("f8") for first in (0, steps))
        weights = area * np.isfinite(x + y)
        for v, factor in enumerate(factors[row]):
            some, root = weights[:, v] > 0, np.sqrt(weights[:, v])
            left, right = ((root * each[:, v])[some] for each in (x, y))
            expected = np.linalg.lstsq(left[:, None], right, rcond=None)[0][0]
            assert factor == pytest.approx(expected, rel=1e-6)
    leads, reads = np.array(LEADS, "m8[h]").astype("m8[s]"), []

    def read(time: np.datetime64, names: Any) -> np.ndarray:
        reads.append(archive.index(time))
        return archive.read(reads[-1], names)

    source = Baseline(archive, names, archive.times[:3], leads, factors, means.field, cache(read))
    block = source.read_block(slice(0, 3), slice(0, 2), names)
    assert reads == [0, 1, 2]
    time = archive.times[1] + leads[1]
    expected = means.field(time, names) + factors[1][:, None, None] * anomalies[1]
    np.testing.assert_allclose(block[1, 1], expected, rtol=1e-6)


def test_what_damped_persistence_decays_to_is_named(run, folder, tmp_path) -> None:
    found = []
    for words, center in (
        (["--climatology", str(folder / "means.zarr")], "climatology of the date"),
        ([], "mean of the training period"),
    ):
        done = run("--baselines=damped_persistence", *words)
        assert f"damped persistence decays to the {center}" in done.stderr
        found.append(rmse(tmp_path, "damped persistence"))
    assert (found[0] != found[1]).all()


def test_the_sample_of_the_documentation_runs(truth, ours, tmp_path, monkeypatch) -> None:
    """It named functions that it did not import, and an evaluation that was not there."""
    text = (ROOT / "docs/verification.md").read_text()
    other = {"hres": ours, "other": forecasts(truth, 20, LEADS, seed=2), "era5": truth}
    for name, dataset in (other | {"climatology": climatology(truth)}).items():
        write(dataset, tmp_path / f"{name}.zarr")
    monkeypatch.chdir(tmp_path)
    exec(text.partition("```python\n")[2].partition("```")[0], {})
