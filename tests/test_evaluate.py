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
patch_size = [4, 4]
""")

    def call(*options: str, ranks: int = 1, output: str = "out") -> tuple[int, str, Path]:
        program = [sys.executable]
        if ranks > 1:
            program += ["-m", "jobs.launch", "--nproc_per_node", str(ranks)]
        config = ["--job.config_file", str(folder / "tiny.toml"), "--job.dump_folder", str(folder / "run")]
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
    # Persistence, by hand: 10 dates 12 h apart, area weights of half cells at the poles.
    north = truth.latitude.values
    edges = np.deg2rad(np.concatenate([[-90], (north[1:] + north[:-1]) / 2, [90]]))
    weights = np.diff(np.sin(edges))[:, None] * np.ones(24)
    t2m = truth["2m_temperature"].values.astype("f8")
    squares = [np.average((t2m[2 * i] - t2m[2 * i + 4]) ** 2, weights=weights) for i in range(10)]
    assert rows(out, "persistence")["2m_temperature", "", "24"] == pytest.approx(np.mean(squares) ** 0.5)


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
