"""evaluate.py as a user calls it: files, tables, gates, other centres' layouts, several ranks."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import evaluate
from tests.forecasts import analyses, forecasts, grid, write
from verification.details import MIDLATITUDES, mean_over_latitudes

ROOT = Path(__file__).parent.parent
LEADS = [6, 12, 24]
RMSE = "rmse/geopotential:500@24h"


@pytest.fixture(scope="module")
def truth() -> xr.Dataset:
    return analyses(grid(12, 24, poles=True), 60)


@pytest.fixture(scope="module")
def run(truth, tmp_path_factory):
    """Calls evaluate.py on a forecast of that truth with the options given; exit code, output, folder."""
    folder = tmp_path_factory.mktemp("evaluation")
    write(truth, folder / "truth.zarr")
    write(forecasts(truth, 10, LEADS), folder / "ours.zarr")
    (folder / "tiny.toml").write_text(f"""
[data]
path = "{folder / "truth.zarr"}"
variables = ["geopotential", "u_component_of_wind", "v_component_of_wind", "2m_temperature"]
levels = [500, 850]
train_period = ["2019-12-25", "2020-01-03"]
[model]
attention_backend = "sdpa"
patch_size = [4, 4]
""")

    def call(
        *options: str, ranks: int = 1, output: str = "out", run: str = "run", data: str = ""
    ) -> tuple[int, str, Path]:
        program = [sys.executable]
        if ranks > 1:
            program += ["-m", "jobs.torchrun", "--nproc-per-node", str(ranks)]
        config = ["--job.config_file", str(folder / "tiny.toml"), "--job.dump_folder", str(folder / run)]
        config += ["--data.path", str(folder / data)] if data else []
        command = [*program, "evaluate.py", *config, "--output", str(folder / output), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout + done.stderr, folder / output

    call.folder = folder  # type: ignore[attr-defined]
    return call


def rows(folder: Path, forecast: str, metric: str = "rmse") -> dict[tuple[str, str, str], float]:
    """(variable, level, lead) -> value of scores.csv."""
    with (folder / "scores.csv").open() as file:
        found = [r for r in csv.DictReader(file) if (r["forecast"], r["metric"]) == (forecast, metric)]
    return {(r["variable"], r["level"], r["lead_hours"]): float(r["value"]) for r in found}


def test_everything_is_written_and_the_gates_judge(run, truth):
    ours = f"--forecast=model={run.folder / 'ours.zarr'}"
    code, said, out = run(ours, "--gate", f"{RMSE}<1e6", "--gate", f"{RMSE}<1")
    assert code == 1, said
    assert "passed: rmse/geopotential:500@24h" in said and "MISSED: rmse/geopotential:500@24h" in said
    assert "gpm" in said and "m2 s-2" in said and "damped persistence" in said
    files = {path.name for path in out.iterdir()}
    assert {"scores.nc", "scores_by_date.nc", "scores.csv", "scorecard.csv"} <= files
    assert {"spectra.csv", "spectra_model.nc", "bias_model.nc", "bias_damped_persistence.nc"} <= files
    plots = {"scorecard.png", "rmse.png", "acc.png", "spectra.png", "bias.png"}
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
    with (out / "scores.csv").open() as file:
        units = {(r["metric"], r["variable"]): r["units"] for r in csv.DictReader(file)}
    assert units["mse", "2m_temperature"] == "K2" and units["acc", "2m_temperature"] == ""
    # Persistence, by hand: 10 dates 12 h apart, area weights of half cells at the poles.
    north = truth.latitude.values
    edges = np.deg2rad(np.concatenate([[-90], (north[1:] + north[:-1]) / 2, [90]]))
    weights = np.diff(np.sin(edges))[:, None] * np.ones(24)
    t2m = truth["2m_temperature"].values.astype("f8")
    squares = [np.average((t2m[2 * i] - t2m[2 * i + 4]) ** 2, weights=weights) for i in range(10)]
    assert rows(out, "persistence")["2m_temperature", "", "24"] == pytest.approx(np.mean(squares) ** 0.5)


def test_maps_and_spectra_are_there_as_numbers(run, truth):
    """At the longest lead; bias by hand, spectra against the mean over latitudes of the stored rows."""
    run(f"--forecast=model={run.folder / 'ours.zarr'}", output="numbers")
    ours = xr.open_zarr(run.folder / "ours.zarr", decode_timedelta=True).load().isel(prediction_timedelta=-1)
    analysed = truth.sel(time=ours.time + np.timedelta64(24, "h")).assign_coords(time=ours.time)
    bias = (ours["2m_temperature"].astype("f8") - analysed["2m_temperature"].astype("f8")).mean("time")
    out = run.folder / "numbers"
    with xr.open_dataset(out / "bias_model.nc") as stored:
        found = stored["2m_temperature"].isel(lead_time=0).sel(latitude=bias.latitude, method="nearest")
        np.testing.assert_allclose(found, bias, atol=1e-12)
        assert stored["num_dates"].values.tolist() == [10]
    with (out / "spectra.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["variable"] == "2m_temperature"]
    assert {r["forecast"] for r in rows} == {"model", "persistence", "damped persistence", "climatology"}
    assert {r["units"] for r in rows} == {"K2 m"} and {r["lead_hours"] for r in rows} == {"6", "12", "24"}
    with xr.open_dataset(out / "spectra_model.nc") as stored:
        mean = mean_over_latitudes(
            stored["2m_temperature"].sel(source="truth").isel(lead_time=-1), MIDLATITUDES
        )
        last = [r for r in rows if (r["forecast"], r["source"], r["lead_hours"]) == ("model", "truth", "24")]
        ours = [float(r["energy"]) for r in last]
        np.testing.assert_allclose(ours, mean.values[1:], rtol=1e-12)


def test_persistence_needs_no_climatology(run):
    ours = f"--forecast=model={run.folder / 'ours.zarr'}"
    code, said, out = run(ours, "--baselines", "persistence", output="simple", run="untouched")
    assert code == 0, said
    assert "no climatology and no ACC: --baselines does not name climatology" in said
    assert not (run.folder / "untouched").exists(), "it was computed all the same"
    assert rows(out, "persistence") and not rows(out, "model", "acc")


def test_leads_beyond_the_truth_have_no_dates(run):
    """A lead of 100 days: a spectrum of nothing could not be drawn on logarithmic axes."""
    ours = xr.open_zarr(run.folder / "ours.zarr", decode_timedelta=True).load().drop_encoding()
    late = ours.isel(prediction_timedelta=[-1])
    late = late.assign_coords(prediction_timedelta=late.prediction_timedelta + np.timedelta64(2400, "h"))
    write(xr.concat([ours, late], "prediction_timedelta"), run.folder / "late.zarr")
    late_one = f"--forecast=model={run.folder / 'late.zarr'}"
    code, said, out = run(late_one, "--baselines", "persistence", output="late")
    assert code == 0, said
    assert "10 initial dates at 6 h, 0 at 2424 h" in said
    with xr.open_dataset(out / "scores.nc") as scores:
        assert scores["num_dates"].sel(forecast="model").values.tolist() == [10, 10, 10, 0]
    with xr.open_dataset(out / "bias_model.nc") as bias:
        assert np.isfinite(bias["2m_temperature"]).all() and bias["num_dates"].values.tolist() == [10]


def test_hours_that_the_climatology_has_not_are_said(run, truth):
    """Training data at 0 and 12 h only: no climatology of 6 h, and the other scores all the same."""
    noons = truth.isel(time=truth.time.dt.hour.isin([0, 12]))
    write(noons, run.folder / "noons.zarr")
    options = [f"--forecast=model={run.folder / 'ours.zarr'}", f"--truth={run.folder / 'truth.zarr'}"]
    steps = ["--data.step_hours", "12", "--validation.lead_hours", "[12]"]
    steps += ["--baselines", "climatology,persistence"]
    code, said, out = run(*options, *steps, output="noons", run="of_noons", data="noons.zarr")
    assert code == 0, said
    assert "has the hours 0, 12, not [6, 18]; add those hours" in said
    assert rows(out, "model")["2m_temperature", "", "6"] and not rows(out, "model", "acc")


def test_the_dates_are_counted_as_here_and_as_in_training(run, truth):
    """Ten forecasts 12 h apart; of the 16 dates of a period of four days 12 have 24 h inside it."""
    ours = f"--forecast=model={run.folder / 'ours.zarr'}"
    period = ["--data.train_period", '["2020-01-01", "2020-01-03"]']
    period += ["--data.validation_period", '["2019-12-25", "2019-12-28"]']
    code, said, _ = run(ours, "--baselines", "", *period, output="counted")
    assert code == 0, said
    assert "initial dates by lead, truth anywhere in the data: 6 h 10, 12 h 10, 24 h 10" in said
    assert "truth inside data.validation_period: 6 h 15, 12 h 14, 24 h 12" in said


def other_layouts(forecast: xr.Dataset, folder: Path) -> dict[str, Path]:
    """The same forecast as other centres write it."""
    names = {"latitude": "lat", "longitude": "lon"}
    pangu = forecast.isel(latitude=slice(None, None, -1), level=slice(None, None, -1))
    single = pangu.assign_coords(latitude=pangu.latitude.astype("f4"))
    turned = forecast.transpose("time", "prediction_timedelta", "level", "longitude", "latitude")
    found = {"pangu": pangu, "graphcast": forecast.rename(names), "float32": single, "neuralgcm": turned}
    return {name: Path(write(ds, folder / f"{name}.zarr")) for name, ds in found.items()}


def test_other_layouts_score_the_same(run, truth):
    paths = other_layouts(forecasts(truth, 10, LEADS), run.folder)
    options = [f"--forecast={name}={path}" for name, path in paths.items()]
    ours = f"--forecast=ours={run.folder / 'ours.zarr'}"
    code, said, out = run(ours, *options, "--baselines", "", output="layouts")
    assert code == 0, said
    expected = rows(out, "ours")
    assert len(expected) >= 7 * 3
    for name in paths:
        assert rows(out, name) == pytest.approx(expected, rel=1e-6), name


@pytest.mark.slow
def test_two_ranks_give_the_same_bits(run):
    ours = f"--forecast=model={run.folder / 'ours.zarr'}"
    run(ours, output="one")
    code, said, out = run(ours, ranks=2, output="two")
    assert code == 0, said
    assert (out / "scores.csv").read_bytes() == (run.folder / "one/scores.csv").read_bytes()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--forecast", "nowhere.zarr"], "'nowhere.zarr': is not there; run forecast.py"),
        (["--gate", "rmse<3"], "write for example rmse/geopotential:500@120h<340"),
        (["--regions", "atlantis"], "'atlantis': there are global"),
        (["--baselines", "luck"], "'luck': there are persistence"),
        (["--datta.path", "x"], "datta: unknown section"),
    ],
)
def test_bad_input_is_one_line(run, monkeypatch, capsys, options, reason):
    config = ["--job.config_file", str(run.folder / "tiny.toml"), "--job.dump_folder", str(run.folder / "no")]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *config, *options])
    with pytest.raises(SystemExit) as end:
        evaluate.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and reason in said
