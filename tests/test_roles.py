"""Variables of all roles: what a model sees and predicts, from training to scores."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from config import Data
from datasets.archive import open_archive
from datasets.channels import Channels
from datasets.loader import LaterFields
from evaluate import main as evaluate
from tests.parity import Layout, SmallRun
from tests.planned import run_export, run_forecast, run_main, run_train
from tests.started_jobs import LATITUDE, LONGITUDE, run_options, small_dataset, write_config
from tests.test_history import SECTIONS

WIND, RAIN, SEA = "10m_u_component_of_wind", "total_precipitation_6hr", "sea_surface_temperature"
LAST = 159


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weather that its forcing drives: w' = w / 2 + f and r' = w - f, f random in time.

    The forcing of the last dates is another one in a second store, and of other dates in a third.
    """
    folder, draw = tmp_path_factory.mktemp("roles"), np.random.default_rng(0)
    waves = np.stack([np.sin(np.deg2rad(LONGITUDE)), np.cos(np.deg2rad(LONGITUDE))])
    pattern = np.cos(np.deg2rad(LATITUDE))[:, None] * waves[:, None]  # (2, H, W)
    sea = np.einsum("tk,khw->thw", draw.normal(size=(LAST + 1, 2)), pattern)
    wind, rain = np.zeros_like(sea), np.zeros_like(sea)
    for t in range(LAST):
        wind[t + 1], rain[t + 1] = wind[t] / 2 + sea[t], wind[t] - sea[t]
    data = small_dataset({WIND: wind, RAIN: rain, SEA: sea})
    data[RAIN].attrs["units"], data[SEA].attrs["units"] = "m", "K"
    roles = {"history": 1, "variables": [WIND], "diagnostic_variables": [RAIN], "forcing_variables": [SEA]}
    write_config(folder, data, **SECTIONS | {"data": SECTIONS["data"] | roles})
    shuffled = data[SEA].copy(data=data[SEA].values[draw.permutation(LAST + 1)])
    data.assign({SEA: shuffled}).to_zarr(folder / "shuffled.zarr", zarr_format=2)
    # Weather that the forcing of the same date drives, and rain that is never negative.
    of_target = {SEA: data[SEA].roll(time=1), RAIN: np.exp(data[RAIN] / 4)}
    data.assign(of_target).to_zarr(folder / "target.zarr", zarr_format=2)
    return folder


def options(folder: Path, *more: str) -> list[str]:
    return run_options(folder / "tiny.toml", folder / "run", *more)


def run(arguments: list[str]) -> dict[str, float]:
    """Train, and return the scores of the validation."""
    return next(each for each in reversed(run_train(*arguments)) if "val/loss" in each)


@pytest.fixture(scope="module")
def scores(folder: Path) -> dict[str, float]:
    return run(options(folder))


def test_a_forcing_is_used_and_not_scored(folder: Path, scores: dict[str, float]) -> None:
    """With the right forcing errors are small at both leads; with a shuffled one they are not."""
    assert not any(SEA in key for key in scores)
    where = ["--job.dump_folder", str(folder / "shuffled"), "--data.path", str(folder / "shuffled.zarr")]
    shuffled = run([*options(folder)[:2], *where])
    for name in (WIND, RAIN):
        for lead in ("", "@12h"):
            assert scores[f"val/rmse/{name}{lead}"] < 0.3 * shuffled[f"val/rmse/{name}{lead}"]


def test_a_diagnostic_variable_is_no_input(one_rank) -> None:
    run = SmallRun(Layout(roles=True, history=2))
    window, times = torch.randn(2, 6, 16, 32), torch.zeros(2, dtype=torch.int64)
    other, conditions, normalizer = window.clone(), run.objective.conditions, run.objective.normalizer

    @torch.no_grad()
    def predict(window: torch.Tensor) -> torch.Tensor:
        return run.model.predict(conditions.append(normalizer.with_known(window, None), times))

    other[:, [1, 4]] += 1
    outputs = [predict(each) for each in (window, other)]
    assert torch.equal(*outputs)
    assert torch.equal(*(normalizer.advance(window, output)[:, :3] for output in outputs))
    other[:, 2] += 1  # the forcing
    assert not torch.equal(predict(other), outputs[0])


def test_forcings_of_the_target(folder: Path, tmp_path: Path) -> None:
    """Wind is predicted from the forcing of its own date alone."""
    base, found = options(folder)[:3], {}
    path = ["--data.path", str(folder / "target.zarr")]
    given = ["--data.forcings_of_target"]
    for name, more in {"with": given, "without": []}.items():
        found[name] = run([*base, str(tmp_path / name), *path, *more])
    assert found["with"][f"val/rmse/{WIND}"] < 0.4 * found["without"][f"val/rmse/{WIND}"]
    words = [*base, str(tmp_path / "with"), *path, *given]
    run_export(words, tmp_path / "model")
    day = ["--forecast.num_steps", "1", "--forecast.period", '["2020-02-01T00:00", "2020-02-01T00:00"]']
    stored = run_forecast([*words, *day], tmp_path / "with/forecast.zarr")
    archive = open_archive(str(folder / "target.zarr"))
    row = int(np.flatnonzero(archive.times == stored.time.values[0])[0])
    state, later = torch.from_numpy(archive.read_block(row, row + 2, [WIND, RAIN, SEA]))[:, None]
    step = torch.export.load(tmp_path / "model/model.pt2").module()
    after = step(state, torch.from_numpy(archive.times[[row]].astype("M8[s]").astype(np.int64)), later=later)
    for position, name in enumerate((WIND, RAIN)):
        np.testing.assert_allclose(after[0, position], stored[name].values[0, 0], rtol=1e-4, atol=1e-5)


def test_forecasts_and_their_scores(folder: Path, scores: dict[str, float]) -> None:
    """Forecasts have the predicted variables, and the scores of the validation; one with the forcing of its
    initial date does not.
    """
    errors = {}
    for persist in ("false", "true"):
        path = folder / f"{persist}.zarr"
        words = options(folder, "--forecast.period", '["2020-02-01", "2020-02-08"]')
        made = run_forecast(words, path, "--forecast.persist_forcings", persist)
        assert set(made.data_vars) == {WIND, RAIN, "forecast_status"}
        own = ["--forecast", f"model={path}", "--baselines", "persistence", "--output", str(folder / persist)]
        assert not run_main(evaluate, *options(folder), *own).returncode
        found = xr.open_dataset(folder / persist / "scores.nc").sel(forecast="model", metric="rmse")
        errors[persist] = found[WIND].isel(region=0).values
    assert errors["false"][0] == pytest.approx(errors["true"][0])  # the first step has the same forcing
    assert errors["false"][1] < 0.3 * errors["true"][1]
    assert errors["false"] == pytest.approx(
        [scores[f"val/rmse/{WIND}"], scores[f"val/rmse/{WIND}@12h"]], rel=0.2
    )


def test_an_exported_step_is_that_of_the_forecast(folder: Path, scores, tmp_path: Path) -> None:
    """What the program is given of a diagnostic variable does not matter; its forcing stays as it is."""
    target = tmp_path / "model"
    run_export(options(folder), target)
    step, archive = torch.export.load(target / "model.pt2").module(), open_archive(str(folder / "wb.zarr"))
    state = torch.from_numpy(archive.read(130, [WIND, RAIN, SEA]))[None]
    times = torch.from_numpy(archive.times[[130]].astype("datetime64[s]").astype(np.int64))
    other = state.clone()
    other[:, 1] += 5
    after = step(state, times)
    assert torch.equal(after, step(other, times)) and torch.allclose(after[:, 2], state[:, 2], atol=1e-5)
    day = str(archive.times[130])[:16]
    words = options(folder, "--forecast.period", f'["{day}", "{day}"]', "--forecast.num_steps", "1")
    stored = run_forecast(words, tmp_path / "one.zarr")
    for position, name in enumerate((WIND, RAIN)):
        np.testing.assert_allclose(after[0, position], stored[name].values[0, 0], atol=1e-4)


def test_later_forcings_are_read_by_date(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = open_archive(str(folder / "shuffled.zarr"))
    read = LaterFields(archive, [SEA])
    dates = torch.from_numpy(archive.times[[3, 3, LAST]].astype(np.int64)) + torch.tensor([0, 0, 21_600])
    found = read(1, dates).numpy()
    np.testing.assert_array_equal(found[:2, 0], archive.read_block(3, 4, [SEA])[[0, 0], 0])
    assert np.isnan(found[2]).all() and "the values of the step before are kept" in caplog.text


def test_names_of_roles() -> None:
    data = Data(
        variables=("temperature",), levels=(500, 850), diagnostic_variables=(RAIN,), forcing_variables=(SEA,)
    )
    channels = Channels.of(data)
    assert channels.variables == ["temperature:500", "temperature:850", RAIN, SEA]
    assert channels.find("diagnostic") == slice(2, 3) and channels.find("forcing") == slice(3, 4)
    assert channels.hidden == [2] and len(channels.predicted) == 3
    older = ["a 6 h before", "b 6 h before", "a 12 h before", "b 12 h before"]  # found by fine-tuning
    data = Data(variables=("a", "b"), static_variables=("s",), forcings=("f",), history=3)
    assert Channels.of(data, 1).inputs == ["a", "b", *older, "s", "f", "noise 0 over 4 points, of a step"]
