"""evaluate.py as a user calls it: files, tables, several ranks."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import evaluate
from errors import INTERRUPTED
from tests.forecasts import analyses, climatology, forecasts, grid, write
from tests.planned import run_main
from tests.started_jobs import Job, run_options, started_by, write_config
from verification import matching, scores_by_date

LEADS = [6, 12, 24]


@pytest.fixture(scope="module")
def truth() -> xr.Dataset:
    return analyses(grid(12, 24, poles=True), 60)


@pytest.fixture(scope="module")
def run(truth, tmp_path_factory):
    """Calls evaluate.py on a forecast of that truth with the options given; exit code, output, folder."""
    folder = tmp_path_factory.mktemp("evaluation")
    write(truth, folder / "truth.zarr")
    write(forecasts(truth, 10, LEADS), folder / "ours.zarr")
    data = {"variables": list(truth.data_vars), "levels": [500, 850]}
    data |= {"train_period": ["2019-12-25", "2020-01-03"]}
    config_file = write_config(
        folder, path=str(folder / "truth.zarr"), data=data, model={"patch_size": [4, 4]}
    )

    draw = evaluate.plot_evaluation  # most of the time of an evaluation

    def call(
        *options: str, ranks: int = 1, output: str = "out", run: str = "run", data: str = "", plots=False
    ) -> tuple[int, str, Path]:
        words = ["--data.path", str(folder / data)] if data else []
        words += ["--output", str(folder / output), *options]
        if ranks == 1:
            patch.setattr(evaluate, "plot_evaluation", draw if plots else lambda *_: None)
            done = run_main(evaluate.main, *run_options(config_file, folder / run, *words))
            return done.returncode, done.stdout + done.stderr, folder / output
        job = Job(config_file, folder / run, *words, command=started_by("evaluate.py", ranks))
        return job.end(240), job.output, folder / output

    call.folder = folder  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        yield call


def rows(folder: Path, forecast: str, metric: str = "rmse") -> dict[tuple[str, str, str], float]:
    """(variable, level, lead in hours) -> value of scores.nc, those that are finite."""
    with xr.open_dataset(folder / "scores.nc", decode_timedelta=True) as scores:
        if metric not in scores["metric"] or forecast not in scores["forecast"]:
            return {}
        own = scores.sel(forecast=forecast, metric=metric, region="global").drop_vars("num_dates")
    found = {}
    for name, array in own.data_vars.items():
        for each in [array[at] for at in np.ndindex(array.shape) if np.isfinite(array[at])]:
            level = str(each["level"].item()) if "level" in each.coords else ""
            found[str(name), level, str(int(each["lead_time"] / np.timedelta64(1, "h")))] = each.item()
    return found


def test_everything_is_written(run, truth):
    ours = f"--forecast=model={run.folder / 'ours.zarr'}"
    code, said, out = run(ours, plots=True)
    assert code == 0, said
    assert "gpm" in said and "m2 s-2" in said and "damped persistence" in said
    files = {path.name for path in out.iterdir()}
    assert {"scores.nc", "scores_by_date.zarr", "scorecard.csv", "scorecard.html"} <= files
    assert {"spectra_model.nc", "spectra_damped_persistence.nc"} <= files
    plots = {"rmse.png", "maps.png", "spectra.png"}
    assert plots <= files and all((out / name).stat().st_size > 5000 for name in plots)
    with xr.open_dataset(out / "scores.nc") as scores:
        assert set(scores["geopotential"].dims) == {"forecast", "metric", "region", "lead_time", "level"}
        assert list(scores["forecast"].values) == [
            "model",
            "persistence",
            "damped persistence",
            "climatology",
        ]
        assert scores["num_dates"].dims == ("forecast", "lead_time") and (scores["num_dates"] == 10).all()
        assert scores["num_dates"].dtype.kind == "i"
    # Persistence, by hand: 10 dates 12 h apart, area weights of half cells at the poles.
    north = truth.latitude.values
    edges = np.deg2rad(np.concatenate([[-90], (north[1:] + north[:-1]) / 2, [90]]))
    weights = np.diff(np.sin(edges))[:, None] * np.ones(24)
    t2m = truth["2m_temperature"].values.astype("f8")
    squares = [np.average((t2m[2 * i] - t2m[2 * i + 4]) ** 2, weights=weights) for i in range(10)]
    assert rows(out, "persistence")["2m_temperature", "", "24"] == pytest.approx(np.mean(squares) ** 0.5)


def test_leads_beyond_the_truth_have_no_dates_and_persistence_needs_no_climatology(run):
    """A lead of 100 days: a spectrum of nothing could not be drawn on logarithmic axes."""
    ours = xr.open_zarr(run.folder / "ours.zarr", decode_timedelta=True).load().drop_encoding()
    late = ours.isel(prediction_timedelta=[-1])
    late = late.assign_coords(prediction_timedelta=late.prediction_timedelta + np.timedelta64(2400, "h"))
    write(xr.concat([ours, late], "prediction_timedelta"), run.folder / "late.zarr")
    late_one = f"--forecast=model={run.folder / 'late.zarr'}"
    code, printed, out = run(late_one, "--baselines=persistence", output="late", run="untouched", plots=True)
    assert code == 0, printed
    assert not (run.folder / "untouched").exists(), "a climatology was computed"
    assert rows(out, "persistence") and not rows(out, "model", "acc")
    with xr.open_dataset(out / "scores.nc") as scores:
        assert scores["num_dates"].sel(forecast="model").values.tolist() == [10, 10, 10, 0]
    with xr.open_dataset(out / "spectra_model.nc") as spectra:
        assert np.isfinite(spectra["2m_temperature"]).all() and spectra["num_dates"].values.tolist() == [10]


def test_without_all_hours_of_the_day_there_is_no_acc(run, truth):
    """Training data at 0 and 12 h only: no ACC at 6 h, where no climatology is, and all other scores."""
    noons = truth.isel(time=truth.time.dt.hour.isin([0, 12]))
    write(noons, run.folder / "noons.zarr")
    options = [f"--forecast=model={run.folder / 'ours.zarr'}", f"--truth={run.folder / 'truth.zarr'}"]
    steps = ["--data.step_hours", "12", "--validation.lead_hours", "[12]"]
    steps += ["--baselines", "climatology,persistence"]
    code, said, out = run(*options, *steps, output="noons", run="of_noons", data="noons.zarr")
    assert code == 0, said
    assert rows(out, "model")["2m_temperature", "", "6"]
    leads = {lead for variable, _, lead in rows(out, "model", "acc") if variable == "2m_temperature"}
    assert leads == {"12", "24"}


def test_a_coarse_climatology_does_not_coarsen_the_comparison(run, truth):
    """As a baseline it did, and regions were chosen on another grid than they were scored on."""
    coarse = truth.isel(latitude=slice(1, None, 5), longitude=slice(None, None, 6))
    path = write(climatology(coarse), run.folder / "coarse.zarr")
    options = [
        f"--forecast=model={run.folder / 'ours.zarr'}",
        "--regions=global,europe",
        "--climatology",
        path,
    ]
    found = []
    for baselines in ("", "climatology"):
        code, said, out = run(*options, f"--baselines={baselines}", output=f"coarse {baselines}")
        assert code == 0, said
        scores = xr.open_dataset(out / "scores.nc", engine="h5netcdf").load()
        found.append(scores.sel(forecast="model", metric=["rmse", "acc"]))
    assert found[0]["2m_temperature"].notnull().all()
    xr.testing.assert_equal(*found)


def test_what_has_none_of_the_variables_is_no_part_of_a_comparison(run, truth):
    """It was a traceback about a dimension of size 0."""
    path, only = run.folder / "surface.zarr", ["2m_temperature"]
    write(forecasts(truth, 10, LEADS)[only], path)
    clim = write(climatology(truth[["geopotential"]]), run.folder / "heights.zarr")
    options = [f"--forecast=surface={path}", "--climatology", clim, "--baselines=climatology,persistence"]
    code, said, out = run(*options, output="surface")
    assert code == 0 and "climatology is no baseline" in said, said
    assert rows(out, "persistence").keys() == rows(out, "surface").keys()
    write(forecasts(truth, 10, LEADS)[["geopotential"]], run.folder / "upper.zarr")
    code, said, _ = run(*options, f"--forecast=upper={run.folder / 'upper.zarr'}", output="surface")
    assert code == 2 and "'upper': it has none of the variables" in said and said.count("\n") == 1


def test_a_killed_evaluation_continues(run, monkeypatch):
    """In the middle of a date, one lead of which is read at once; no date counts twice."""
    ours = f"--forecast=model={run.folder / 'ours.zarr'}"
    run(ours, output="whole", run="killed")
    monkeypatch.setattr(matching, "BLOCK_BYTES", 10_000)
    fill, dates = scores_by_date.fill_statistics, list[int]()

    def dies(match, *rest):
        dates.append(match.date)
        if match.lead == 1 and len({*dates}) == 3:
            raise KeyboardInterrupt
        fill(match, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(scores_by_date, "fill_statistics", dies)
        assert run(ours, output="killed", run="killed")[0] == INTERRUPTED
    dates.clear()
    monkeypatch.setattr(
        scores_by_date,
        "fill_statistics",
        lambda match, *rest: dates.append(match.date) or fill(match, *rest),
    )
    code, said, out = run(ours, output="killed", run="killed")
    assert code == 0 and {*dates} == {2, 3, 4, 5, 6, 7, 8, 9}, said
    whole = run.folder / "whole"
    xr.testing.assert_identical(xr.open_dataset(out / "scores.nc"), xr.open_dataset(whole / "scores.nc"))
    tables = [xr.open_zarr(folder / "scores_by_date.zarr")["statistics"].load() for folder in (out, whole)]
    xr.testing.assert_identical(*tables)
    for name in ("spectra_model.nc", "spectra_persistence.nc"):
        xr.testing.assert_allclose(xr.open_dataset(out / name), xr.open_dataset(whole / name))
    dates.clear()
    code, said, _ = run(ours, output="killed", run="killed")
    assert code == 0 and not dates and "10 of 10 dates are scored already" in said


@pytest.mark.slow
def test_two_ranks_give_the_same_bits(run):
    ours = f"--forecast=model={run.folder / 'ours.zarr'}"
    run(ours, output="one")
    code, said, out = run(ours, ranks=2, output="two")
    assert code == 0, said
    with xr.open_dataset(out / "scores.nc") as two, xr.open_dataset(run.folder / "one/scores.nc") as one:
        xr.testing.assert_identical(two, one)


def test_two_forecasts_have_no_file_in_common(run):
    ours = run.folder / "ours.zarr"
    code, message, _ = run(f"--forecast=a b={ours}", f"--forecast=a?b={ours}", run="no")
    assert code == 2 and message.count("\n") == 1 and "a?b" in message


@pytest.mark.parametrize(
    "options",
    [
        ["--forecast", "nowhere.zarr"],
        ["--forecast", "persistence=datasets"],  # the name of a baseline
        ["--regions", "atlantis"],
        ["--output", "{folder}/truth.zarr/scores"],
        ["--baselines", "luck"],
        ["--datta.path", "x"],
    ],
)
def test_bad_input_is_one_line(run, options):
    options = [word.replace("{folder}", str(run.folder)) for word in options]
    code, message, _ = run(*options, run="no")
    assert code == 2 and message.count("\n") == 1
    assert options[1].partition("=")[0] in message or "datta" in message
