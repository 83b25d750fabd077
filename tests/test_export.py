"""Exported models: their program equals the project's own forecast, and forecast.py takes the folder back."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tomli
import torch
import xarray as xr
from safetensors.torch import load_file

from errors import UserError
from tests.planned import run_export, run_forecast, run_train
from tests.started_jobs import VALIDATION, run_options, write_config
from training.config_checks import load_checked

PROGRAM = """
import sys, numpy, torch
program = torch.export.load(sys.argv[1]).module()
states = torch.from_numpy(numpy.load(sys.argv[2]))
for batch in (1, 3):
    state, leads = states[:batch], []
    for step in range(4):
        seconds = 1578355200 + 6 * 3600 * step  # from 2020-01-07
        state = program(state, torch.full((batch,), seconds))
        leads.append(state[:, :1].numpy())
    numpy.save(f"{sys.argv[3]}-{batch}.npy", numpy.stack(leads, axis=1))
assert not {"config", "models", "datasets", "verification"} & set(sys.modules)
"""
HISTORY = ["--data.history", "2", "--model.position", "rotary"]
UNET = ["--model.name", "unet", "--model.width", "8", "--model.levels", "2"]
NAME = "10m_u_component_of_wind"


class Exported(NamedTuple):
    options: list[str]  # of the run
    model: Path


@pytest.fixture(
    scope="module",
    params=[
        "vit",
        pytest.param("unet", marks=pytest.mark.slow),
        pytest.param("history", marks=pytest.mark.slow),
    ],
)
def exported(request, tmp_path_factory) -> Exported:
    """A short run with forcings, by a model of either kind, in the folder of its configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    options = run_options(write_config(folder), folder / "run")
    options += ["--training.steps", "2", "--training.ema_decay", "0.9", *VALIDATION]
    options += ["--data.forcings", '["sin_local_time", "toa_incident_solar_radiation"]']
    options += ["--model.conserve", f'["{NAME}"]']  # which tests/test_conservation.py has of forecasts
    options += UNET if request.param == "unet" else []
    options += HISTORY if request.param == "history" else []
    run_train(*options)
    run_export(options, folder / "model")
    return Exported(options, folder / "model")


def forecast_of(options: list[str], target: Path, *more: str) -> np.ndarray:
    """Return the wind (4, H, W) of a forecast of four steps."""
    words = ["--forecast.period", '["2020-01-07", "2020-01-07T00"]', "--forecast.num_steps", "4", *more]
    return run_forecast(options, target, *words)[NAME].values[0]


def test_the_program_runs_with_torch_alone_and_equals_the_forecast(exported, tmp_path):
    expected = forecast_of(exported.options, tmp_path / "forecast.zarr")
    archive = exported.model.parent / "wb.zarr"
    dates = ["2020-01-07T00", "2020-01-06T18"][: load_checked(exported.options).data.history]
    start = xr.open_zarr(archive)[NAME].sel(time=dates).values  # (h, H, W)
    np.save(tmp_path / "states.npy", np.stack([start, start + 1, start]))  # (3, h, H, W)
    names = [str(exported.model / "model.pt2"), str(tmp_path / "states.npy"), str(tmp_path / "leads")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", PROGRAM, *names], cwd=tmp_path, env=environment, check=True)
    for batch in (1, 3):
        leads = np.load(tmp_path / f"leads-{batch}.npy")[:, :, 0]  # (B, 4, H, W)
        assert leads.shape == (batch, *expected.shape)
        for row in range(0, batch, 2):
            np.testing.assert_allclose(leads[row], expected, atol=1e-5 * expected.std())


def test_the_folder_is_complete(exported):
    about = json.loads((exported.model / "model.json").read_text())
    (variable,) = about["variables"]
    assert variable["name"] == NAME and variable["units"] == "m s-1" and variable["role"] == "prognostic"
    assert variable["std"] > 0 and variable["change_std"] > 0
    assert about["step_hours"] == 6 and about["latitude"][0] == 75 and about["checkpoint"] == "step-00000002"
    assert tomli.loads((exported.model / "config.toml").read_text())["data"]["step_hours"] == 6
    assert len({path.stat().st_mode for path in exported.model.iterdir()}) == 1  # 0600 of the weights alone
    tensors = load_file(exported.model / "model.safetensors")
    assert all(torch.isfinite(tensor).all() and tensor.dtype == torch.float32 for tensor in tensors.values())
    extra = {"model.json": ""}
    torch.export.load(exported.model / "model.pt2", extra_files=extra)
    assert json.loads(extra["model.json"]) == about


def test_the_folder_is_a_checkpoint(exported, tmp_path):
    expected = forecast_of(exported.options, tmp_path / "run.zarr")
    own = ["--job.dump_folder", str(tmp_path / "other")]
    named = ["--forecast.checkpoint", str(exported.model)]
    found = forecast_of(exported.options, tmp_path / "model.zarr", *own, *named)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * expected.std())
    tuned = [*exported.options, *own, "--training.steps", "1"]
    run_train(*tuned, "--checkpoint.initial_load_path", str(exported.model))


def test_a_damaged_or_other_model_is_refused(exported, tmp_path):
    copy = shutil.copytree(exported.model, tmp_path / "copy")
    own = ["--job.dump_folder", str(tmp_path / "other"), "--forecast.checkpoint", str(copy)]
    with pytest.raises(UserError, match="data.step_hours"):
        forecast_of(exported.options, tmp_path / "a.zarr", *own, "--data.step_hours", "12")
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-1] + b"?")
    with pytest.raises(UserError, match="damaged"):
        forecast_of(exported.options, tmp_path / "b.zarr", *own)
