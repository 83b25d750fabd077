"""Exported models give, with torch alone, what the project's own forecast gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from safetensors import safe_open

import forecast
from tests.started_jobs import write_config
from train import train
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


@pytest.fixture(scope="module", params=["vit", "unet", "history"])
def options(request, tmp_path_factory) -> list[str]:
    """Of a short run with forcings, by a model of either kind, in the folder of its configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    options = ["--job.config_file", str(write_config(folder)), "--job.dump_folder", str(folder / "run")]
    options += ["--training.steps", "2", "--training.ema_decay", "0.9"]
    options += ["--data.forcings", '["sin_local_time", "toa_incident_solar_radiation"]']
    options += UNET if request.param == "unet" else []
    options += HISTORY if request.param == "history" else []
    train(load_checked(options))
    return options


def export(options: list[str], target: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["forecast.py", *options, "--export", str(target)])
    forecast.main()


def test_the_program_runs_with_torch_alone_and_equals_the_forecast(options, tmp_path, monkeypatch):
    export(options, tmp_path / "model.pt2", monkeypatch)
    forecasts = ["--forecast.period", '["2020-01-07", "2020-01-07T00"]', "--forecast.num_steps", "4"]
    forecasts += ["--forecast.path", str(tmp_path / "forecast.zarr")]
    assert forecast.forecast(load_checked([*options, *forecasts])) == 0
    name, archive = "10m_u_component_of_wind", Path(options[1]).parent / "wb.zarr"
    expected = xr.open_zarr(tmp_path / "forecast.zarr")[name].values[0]  # (4, H, W)
    dates = ["2020-01-07T00", "2020-01-06T18"][: load_checked(options).data.history]
    start = xr.open_zarr(archive)[name].sel(time=dates).values  # (h, H, W)
    np.save(tmp_path / "states.npy", np.stack([start, start + 1, start]))  # (3, h, H, W)
    names = [str(tmp_path / name) for name in ("model.pt2", "states.npy", "leads")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", PROGRAM, *names], cwd=tmp_path, env=environment, check=True)
    for batch in (1, 3):
        leads = np.load(tmp_path / f"leads-{batch}.npy")[:, :, 0]  # (B, 4, H, W)
        assert leads.shape == (batch, *expected.shape)
        for row in range(0, batch, 2):
            np.testing.assert_allclose(leads[row], expected, atol=1e-5 * expected.std())


def test_safetensors_hold_the_weights_and_say_what_they_are(options, tmp_path, monkeypatch):
    export(options, tmp_path / "model.safetensors", monkeypatch)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        texts = file.metadata()
    about = json.loads(texts["model.json"])
    assert about["variables"] == ["10m_u_component_of_wind"] and about["units"] == ["m s-1"]
    assert about["step_hours"] == 6 and about["latitude"][0] == 75 and about["checkpoint"] == "step-00000002"
    assert "forcings = [" in texts["config.toml"]
    assert all(torch.isfinite(tensor).all() and tensor.dtype == torch.float32 for tensor in tensors.values())
    assert "head.weight" in tensors


def test_bad_targets_are_one_line(tmp_path, monkeypatch, capsys):
    options = ["--job.config_file", str(write_config(tmp_path)), "--job.dump_folder", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop:
        export(options, tmp_path / "model.onnx", monkeypatch)
    assert stop.value.code == 2
    assert "end the name in .pt2 (a program), .safetensors (weights) or in nothing" in capsys.readouterr().err
