"""Limited areas: weather enters through the boundary, which is neither predicted nor scored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from datasets.normalization import boundary_cells
from evaluate import main as evaluate
from tests.planned import run_export, run_forecast, run_main, run_train
from tests.started_jobs import records, run_options, write_config

WIND, WIDTH, STEPS, NUM_DATES = "10m_u_component_of_wind", 2, 6, 200
SECTIONS: dict[str, Any] = {
    "data": {
        "train_period": ["2020-01-01", "2020-02-09"],
        "validation_period": ["2020-02-10", "2020-02-18"],
    },
    "model": {"name": "unet", "width": 8, "levels": 1},
    "optimizer": {"lr": 1e-2},
    "lr_scheduler": {"warmup_steps": 25, "decay_type": "cosine"},
    "training": {"steps": 100, "local_batch_size": 8},
    "validation": {"enable": True, "lead_hours": [6, 36], "plots": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Random weather that moves a cell eastwards each step: what comes in is not known before."""
    folder, draw = tmp_path_factory.mktemp("area"), np.random.default_rng(0)
    latitude, longitude = np.arange(35.0, -36, -10), np.arange(0, 160, 10.0)
    weather = draw.normal(size=(len(latitude), NUM_DATES + len(longitude)))
    dates = [weather[:, NUM_DATES - t : NUM_DATES - t + len(longitude)] for t in range(NUM_DATES)]
    axes = {"time": np.datetime64("2020-01-01", "ns") + np.arange(NUM_DATES) * np.timedelta64(6, "h")}
    axes |= {"latitude": latitude, "longitude": longitude}
    data = xr.Dataset({WIND: (tuple(axes), np.stack(dates).astype("f4"))}, axes)
    write_config(folder, data, **SECTIONS)
    return folder


def test_a_map_has_no_forecast_on_the_boundary(folder, stores, monkeypatch):
    """The error there is 0, which made that of the map smaller than that of the scores."""
    examples: list[Any] = []

    def plot(run: Path, scores: Any, example: Any, *_: Any) -> dict[str, Path]:
        examples.append(example)
        return {}

    monkeypatch.setattr("verification.plots.plot_run", plot)
    run_train(*options(folder, WIDTH), "--validation.plots", "true")  # has ended, and validates again
    truth, forecast = examples[-1][1][WIND]
    boundary = boundary_cells(truth.shape, WIDTH).numpy()
    assert (np.isnan(forecast) == boundary).all() and np.isfinite(truth).all()


def options(folder: Path, width: int) -> list[str]:
    return run_options(folder / "tiny.toml", folder / f"run{width}", "--data.boundary_width", str(width))


@pytest.fixture(scope="module")
def stores(folder: Path) -> dict[int, xr.DataArray]:
    """Width of the boundary -> forecasts (time, lead, latitude, longitude) of a run with it."""
    found = {}
    for width in (0, WIDTH):
        run_train(*options(folder, width))
        words = ["--forecast.num_steps", str(STEPS), "--forecast.period", '["2020-02-10", "2020-02-15"]']
        found[width] = run_forecast(options(folder, width), folder / f"run{width}/forecast.zarr", *words)[
            WIND
        ]
    return found


def truth_of(folder: Path, store: xr.DataArray) -> np.ndarray:
    truth = xr.open_zarr(folder / "wb.zarr")[WIND]
    dates = store.time.values[:, None] + store.prediction_timedelta.values
    return truth.sel(time=dates.ravel()).values.reshape(store.shape)


def test_weather_enters_through_the_boundary(folder: Path, stores) -> None:
    boundary, errors = boundary_cells((8, 16), WIDTH).numpy(), {}
    for width, store in stores.items():
        difference = store.values - truth_of(folder, store)
        errors[width] = np.sqrt(np.square(difference[..., ~boundary]).mean((0, 2)))  # (leads,)
        if width:
            assert np.abs(difference[..., boundary]).max() < 1e-5
    assert errors[WIDTH][0] < 0.3 and errors[WIDTH][-1] < 0.6 * errors[0][-1]


def test_scores_are_of_what_lies_inside(folder: Path, stores) -> None:
    store = stores[WIDTH]
    inside = (slice(None), 5, slice(WIDTH, -WIDTH), slice(WIDTH, -WIDTH))
    squares = np.square(store.values - truth_of(folder, store))[inside]
    edges = np.sin(np.deg2rad(np.arange(20, -21, -10)))  # of the rows inside
    expected = np.sqrt((squares.mean((0, 2)) * -np.diff(edges)).sum() / -np.diff(edges).sum())
    own = ["--forecast", f"model={folder / f'run{WIDTH}/forecast.zarr'}", "--output", str(folder / "scores")]
    words = [*options(folder, WIDTH), *own, "--baselines", "persistence"]
    assert not run_main(evaluate, *words).returncode
    scores = xr.open_dataset(folder / "scores/scores.nc")[WIND].sel(forecast="model", metric="rmse")
    assert float(scores.sel(region="global")[-1]) == pytest.approx(expected, rel=1e-4)
    record = next(each for each in reversed(records(folder / f"run{WIDTH}")) if "val/loss" in each)
    assert record[f"val/rmse/{WIND}@36h"] == pytest.approx(expected, rel=0.2)  # of some dates more


def test_the_exported_step_takes_the_boundary(folder: Path, stores) -> None:
    target = folder / "model"
    run_export(options(folder, WIDTH), target)
    step, store = torch.export.load(target / "model.pt2").module(), stores[WIDTH]
    truth = xr.open_zarr(folder / "wb.zarr")[WIND]
    fields = torch.from_numpy(truth.sel(time=store.time.values[:2]).values)
    state, later = fields[None, :1], fields[None, 1:]
    after = step(state, torch.zeros(1, dtype=torch.int64), later=later)
    np.testing.assert_allclose(after[0, 0], store.values[0, 0], atol=1e-5)
