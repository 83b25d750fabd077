"""Ensembles from end to end: a run, its validation, its forecasts, their scores; refusals; what they cost."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from datasets.grid import area_weights
from errors import UserError
from planning.memory import memory
from planning.workload import workload_of
from tests.parity import Layout, config_of
from tests.planned import run_export, run_forecast, run_train
from tests.started_jobs import records, run_options, write_config
from tests.test_planning import memory_of
from training.config_checks import load_checked

NAME = "10m_u_component_of_wind"
ENSEMBLE = ["--training.loss", "crps", "--training.members", "3", "--model.noise_dim", "4"]
RUN = ["--training.steps=6", "--training.rollout_steps=[1, 2]"]
RUN += ["--checkpoint.interval=3", "--checkpoint.async_mode=disabled"]
VALIDATION = ["--validation.enable", "--validation.lead_hours=[6, 12]", "--validation.plots=false"]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def options(request, tmp_path_factory) -> list[str]:
    """Of a run of six steps, the last three of which are rollouts, by a model that sees one state, or two;
    its folder holds two checkpoints.
    """
    folder = tmp_path_factory.mktemp("ensemble")
    config = write_config(folder)
    archive = xr.open_zarr(folder / "wb.zarr").load()
    archive[NAME][37, 2] = np.nan  # in the validation period
    archive.to_zarr(folder / "holes.zarr", zarr_format=2)
    data = [f"--data.path={folder / 'holes.zarr'}", f"--data.history={request.param}"]
    data += ['--data.train_period=["2020-01-01", "2020-01-08"]']
    data += ['--data.validation_period=["2020-01-09", "2020-01-10"]']
    found = run_options(config, folder / "run", *RUN, *VALIDATION, *ENSEMBLE, *data)
    run_train(*found)
    return found


def run_folder(options: list[str]) -> Path:
    return Path(options[3])


def make_forecast(options: list[str], target: Path, *more: str) -> xr.DataArray:
    """(time, lead, number, latitude, longitude) from the dates of the validation."""
    return run_forecast(options, target, "--forecast.num_steps", "2", *more)[NAME]


def test_validation_scores_are_those_of_the_forecasts(options, tmp_path):
    """The same seed, date and member have the same noise; all scores written out with loops in float64."""
    found, history = records(run_folder(options))[-1], load_checked(options).data.history
    members = make_forecast(options, tmp_path / "f.zarr", "--forecast.num_members", "3")
    archive = xr.open_zarr(run_folder(options).parent / "holes.zarr")[NAME].sel(latitude=members.latitude)
    area = area_weights(members.latitude.values)[:, None]
    for lead, suffix in enumerate(("", "@12h")):
        rows = []
        for date in members.time.values[history - 1 :]:  # windows of a validation keep to its period
            if (valid := date + (lead + 1) * np.timedelta64(6, "h")) not in archive.time:
                continue
            truth, start = archive.sel(time=[valid, date]).transpose("time", "latitude", ...).values
            x = members.sel(time=date).isel(prediction_timedelta=lead).values.astype(np.float64)
            skill = np.abs(x - truth).mean(axis=0)
            apart = sum(np.abs(x[i] - x[j]) for i in range(3) for j in range(3)) / (2 * 3 * 2)
            of_cells = (skill - apart, x.var(0, ddof=1), (x.mean(0) - truth) ** 2)
            weights = area * np.isfinite(truth + start)
            rows.append([np.average(np.nan_to_num(each), weights=weights) for each in of_cells])
        assert len(rows) == 8 - history - lead
        crps, variance, square = np.mean(rows, axis=0)
        expected = {"crps": crps, "rmse": square**0.5, "spread_skill": (square / variance - 1 / 3) ** -0.5}
        scores = {name: found[f"val/{name}/{NAME}{suffix}"] for name in expected}
        assert scores == pytest.approx(expected, rel=1e-5)
        assert found[f"val/rmse_persistence/{NAME}{suffix}"] > 0


def test_members_repeat_from_the_seed_and_differ_from_each_other(options, tmp_path):
    def members(name: str, *words: str) -> xr.DataArray:
        return make_forecast(options, tmp_path / name, *words)

    first = members("first", "--forecast.num_members=4")
    again = members("again", "--forecast.num_members=2", "--validation.local_batch_size=3")
    np.testing.assert_allclose(again, first.isel(number=[0, 1]), atol=1e-5)
    np.testing.assert_allclose(members("single"), first.isel(number=0), atol=1e-5)
    other = members("other", "--forecast.num_members=4", "--training.seed=1")
    for one, two in ((0, 1), (0, 3), (2, 3)):
        apart = abs(first.isel(number=one) - first.isel(number=two))
        assert (apart.max(("latitude", "longitude")) > 1e-3).all()
    assert (abs(first - other).max(("latitude", "longitude")) > 1e-3).all()


def test_a_run_starts_from_the_weights_of_one_without_noise(options, tmp_path, caplog):
    plain = [*options, "--training.loss", "mse", "--training.members", "1", "--model.noise_dim", "0"]
    run_train(*plain, "--job.dump_folder", str(tmp_path / "plain"))
    finer = [*options, "--job.dump_folder", str(tmp_path / "finer")]
    run_train(*finer, "--checkpoint.initial_load_path", str(tmp_path / "plain"))
    names = [f"noise 0 over {size} points, {kept}" for size in (4, 16) for kept in ("of a step", "kept")]
    assert f"new channels, initialised: {', '.join(names)}" in caplog.text
    with pytest.raises(UserError, match=r"model.noise_dim = 2.*was trained with 4"):
        run_train(*options, "--model.noise_dim", "2")


PROGRAM = """
import sys, numpy, torch
program = torch.export.load(sys.argv[1]).module()
state = torch.from_numpy(numpy.load(sys.argv[2]))
times = torch.full((len(state),), 1578355200)
found = [program(state, times, torch.arange(len(state)) + first) for first in (0, 0, 10)]
assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
assert not torch.equal(found[0][0], found[0][1])
assert not {"config", "models", "datasets", "verification"} & set(sys.modules)
"""


@pytest.mark.slow
def test_an_exported_program_takes_keys(options, tmp_path):
    target = tmp_path / "model"
    run_export(options, target)
    history = load_checked(options).data.history
    np.save(tmp_path / "state.npy", np.zeros((3, history, 6, 8), np.float32))
    command = [sys.executable, "-c", PROGRAM, str(target / "model.pt2"), str(tmp_path / "state.npy")]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_the_best_checkpoint_may_be_that_of_the_best_crps():
    best = ["--checkpoint.enable", "true", "--validation.interval", "10", "--checkpoint.keep_best"]
    load_checked([*ENSEMBLE, *best, "val/crps/geopotential:300@24h"])
    with pytest.raises(UserError, match="no such score"):
        load_checked([*best, "val/crps/geopotential:300@24h"])


# -- what they cost


@pytest.mark.filterwarnings("ignore")  # of the profiler
def test_memory_of_an_ensemble(monkeypatch) -> None:
    """The dry run within 7 % of what the allocator counts, the planner within 5 %."""
    layout = Layout(rollout=2, history=3, members=4)
    tracked, work, counted = memory_of(monkeypatch, layout)
    assert tracked == pytest.approx(counted, rel=0.07)
    assert memory(work).peak == pytest.approx(counted, rel=0.05)


def test_flops_and_micro_batches_count_all_members(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    plain, ensemble = (workload_of(config_of(Layout(members=n), 0), 1, (16, 32), 3) for n in (1, 4))
    assert ensemble.states_at_once == 4 * plain.states_at_once and ensemble.micro_batch == plain.micro_batch
    noise = 2 * 3 * 32 * (4 * 4) * 3 * plain.model.tokens  # 3 channels of patches of 16 points, to width 32
    assert ensemble.sample_flops == pytest.approx(4 * (plain.sample_flops + noise), rel=1e-12)
    assert ensemble.input_values == plain.input_values + 3 * 16 * 32
