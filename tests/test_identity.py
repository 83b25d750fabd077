"""The identity of weights is saved with them, and other uses are refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

import evaluate
from checkpoints.files import complete_steps, read_manifest
from errors import ConfigError, DataError, RunFailed
from planning.start_checks import open_checked
from tests.planned import run_forecast, run_train
from tests.sample_archives import weatherbench
from tests.started_jobs import run_options, small_dataset, small_wave, write_config
from training.config_checks import load_checked
from training.run_folder import lock_folder
from verification.climatology import compute_climatology

NAMES = ("10m_u_component_of_wind", "10m_v_component_of_wind")


def waves(num_dates: int = 80) -> xr.Dataset:
    return small_dataset({NAMES[0]: small_wave(num_dates), NAMES[1]: small_wave(num_dates, 3, 5.0)})


SECTIONS: dict[str, Any] = {
    "data": {"train_period": ["2020-01-01", "2020-01-12"]},
    "lr_scheduler": {"warmup_steps": 2},
    "training": {"steps": 4},
    "checkpoint": {"interval": 2, "async_mode": "disabled"},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """(options of a run of 4 steps that has ended, its folder, its data); no test changes them."""
    folder = tmp_path_factory.mktemp("identity")
    options = run_options(write_config(folder, waves(), **SECTIONS), folder / "run")
    run_train(*options)
    return options, folder / "run", folder / "wb.zarr"


@pytest.fixture
def trained(ended, tmp_path):
    """A copy of them."""
    options, folder, path = ended
    shutil.copytree(folder, tmp_path / "run")
    shutil.copytree(path, tmp_path / "wb.zarr")
    copied = [*options[:2], "--data.path", str(tmp_path / "wb.zarr"), "--job.dump_folder"]
    return [*copied, str(tmp_path / "run")], tmp_path / "run", tmp_path / "wb.zarr"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_says_what_its_weights_mean(ended):
    manifest = read_manifest(ended[1] / "checkpoints/step-00000004")
    identity = manifest["identity"]
    assert identity["units"] == dict.fromkeys(NAMES, "m s-1")
    assert identity["grid"]["latitude"] == [75, 45, 15, -15, -45, -75]
    assert set(identity["statistics"]) == {"mean", "std", "change_std"}
    assert "48 dates, 2020-01-01T00:00:00 to 2020-01-12T18:00:00, SHA-256" in identity["data"]


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [
        ("model.num_layers", "3", "2"),
        ("model.predict", "state", "'change'"),
        ("data.variables", '["10m_v_component_of_wind", "10m_u_component_of_wind"]', "['10m_u"),
        ("data.step_hours", "12", "6"),
        ("data.history", "2", "1"),
        ("data.forcings", '["sin_local_time"]', "[]"),
    ],
)
def test_another_meaning_is_refused_before_a_byte_changes(ended, key, value, was):
    options, folder, _ = ended
    before = contents(folder)
    words = [*options, "--training.steps", "6", "--validation.lead_hours", "[12]", f"--{key}", value]
    with pytest.raises(ConfigError) as error:
        run_train(*words)
    text = str(error.value)
    assert text.startswith(f"{key} = ") and f"was trained with {was}" in text and "job.dump_folder" in text
    assert contents(folder) == before
    with pytest.raises(ConfigError):  # and before any rank starts
        open_checked(load_checked(words))


def test_other_data_under_the_same_dates_and_other_units_are_refused(trained):
    options, folder, path = trained
    before = contents(folder)
    store: Any = zarr.open_group(str(path), mode="r+")
    store[NAMES[0]][20:22] = store[NAMES[0]][20:22] + 3
    with pytest.raises(DataError, match="mean of 10m_u_component_of_wind is .* here and was"):
        run_train(*options, "--training.steps", "6")
    assert contents(folder) == before
    store[NAMES[1]].attrs["units"] = "K"
    zarr.consolidate_metadata(str(path), zarr_format=2)
    with pytest.raises(DataError, match="10m_v_component_of_wind.*: its units 'K' cannot be .*'m s-1'"):
        run_train(*options, "--training.steps", "6")


def test_an_emptied_configuration_is_damage_and_not_another_run(trained, caplog):
    """Without a line it is TOML of all defaults."""
    options, run, _ = trained
    (run / "checkpoints/step-00000004/config.toml").write_text("")
    run_train(*options, "--training.steps", "6")
    assert "config.toml" in caplog.text and complete_steps(run / "checkpoints")[-1] == 6
    assert (run / "checkpoints/step-00000004.damaged").is_dir()


def test_data_that_have_grown_keep_the_statistics(tmp_path):
    config = write_config(tmp_path, waves(60), **SECTIONS)
    options = run_options(config, tmp_path / "run", "--data.train_period", "[]")
    run_train(*options)
    before = (tmp_path / "run/statistics.npz").read_bytes()
    shutil.rmtree(tmp_path / "wb.zarr")
    weatherbench(tmp_path, waves(80))
    run_train(*options, "--training.steps", "6")
    with np.load(tmp_path / "run/statistics.npz") as stored:
        assert len(stored["dates"]) == 60
    assert before and complete_steps(tmp_path / "run/checkpoints")[-1] == 6


def test_fine_tuning_needs_the_same_model(ended, tmp_path):
    options, folder, _ = ended
    fresh = [*options, "--job.dump_folder", str(tmp_path / "fine")]
    fresh += ["--checkpoint.initial_load_path", str(folder)]
    for key, value in (("num_layers", "1"), ("num_heads", "4"), ("predict", "state")):
        with pytest.raises(ConfigError, match=f"model.{key} = .*was trained with.*initial_load_path"):
            run_train(*fresh, f"--model.{key}", value)
    run_train(*fresh, "--model.num_layers", "3")


def test_a_second_run_is_refused_without_checkpoints_too(trained, monkeypatch, tmp_path):
    """Nor may one that saves nothing replace the records of one that does."""
    monkeypatch.setattr("training.run_folder.PATIENCE", 0.0)
    options, folder, _ = trained
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"checkpoint.enable = False: .* has checkpoints up to step 4"):
        run_train(*options, "--checkpoint.enable", "false")
    assert contents(folder) == before
    shutil.rmtree(folder / "checkpoints")
    lock = lock_folder(folder)
    with pytest.raises(RunFailed, match="another run writes there"):
        run_train(*options, "--checkpoint.enable", "false")
    lock.close()


def test_evaluating_changes_nothing_of_the_run(trained, capsys):
    """Not even with other variables, which have other statistics."""
    options, folder, _ = trained
    period = ["--forecast.period", '["2020-01-13", "2020-01-14"]', "--forecast.num_steps", "2"]
    run_forecast(options, folder / "forecast.zarr", *period)
    before = contents(folder)
    argv = [*options, "--data.variables", '["10m_v_component_of_wind"]', "--baselines", "damped_persistence"]
    own, rest = evaluate.parse_options(argv)
    evaluate.run(load_checked(rest), own)
    after = contents(folder)
    assert before.items() <= after.items()
    assert all(name.startswith("evaluation/") for name in after.keys() - before.keys())


def test_the_climatology_is_that_of_its_period(one_rank, trained):
    options, folder, _ = trained

    def climatology(*more: str) -> float:
        config = load_checked([*options, *more])
        selection = open_checked(config)
        path = folder / "evaluation/climatology.zarr"
        compute_climatology(selection.archive, selection.variables, selection.train, path)
        return float(abs(xr.open_zarr(path)[NAMES[0]]).mean())

    whole = climatology()
    assert climatology() == whole
    assert climatology("--data.train_period", '["2020-01-01", "2020-01-03"]') != whole
    assert climatology() == whole
