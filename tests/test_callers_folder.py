"""Calls from another folder: paths on the command line are relative to it, others to the project."""

import os
import sys
from pathlib import Path

import pytest
import tomli

from command_line import to_toml
from config import DEFAULT_CONFIG, PATHS, in_project
from datasets.convert import SIMULATED_PATH
from tests.started_jobs import ROOT, run_program, write_config
from training.config_checks import load_checked

PERIOD = '--forecast.period ["2020-01-01","2020-01-02"]'


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with my.toml and era5.zarr, and with modules of its own that are named like ours."""
    write_config(tmp_path).rename(tmp_path / "my.toml")
    (tmp_path / "wb.zarr").rename(tmp_path / "era5.zarr")
    for name in ("config.py", "datasets.py", "train.py"):
        (tmp_path / name).write_text("raise ImportError('not the project')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_run_from_another_folder(elsewhere: Path) -> None:
    """Two ranks, so that the check, the launcher and the ranks all find the same."""
    files = ["--job.config_file", "my.toml", "--data.path", "era5.zarr", "--job.dump_folder", "run"]
    options = [*files, "--training.steps=2", "--checkpoint.enable=false"]
    done = run_program(ROOT / "run_train.sh", *options, cwd=elsewhere, NGPU="2")
    assert done.returncode == 0, done.stderr
    written = tomli.loads((elsewhere / "run/config.toml").read_text())
    assert written["data"]["path"] == str(elsewhere / "era5.zarr")
    assert written["job"]["dump_folder"] == str(elsewhere / "run")


def test_a_link_to_the_door_leads_to_the_project(elsewhere: Path) -> None:
    link = elsewhere / "rossby-train"
    link.symlink_to(ROOT / "run_train.sh")
    shown = run_program(link, "--training.stepz=3", cwd=elsewhere, NGPU="1")
    assert shown.returncode == 2 and "training.steps" in shown.stderr


@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        ("forecast.py", f"--job.config_file my.toml --data.path era5.zarr {PERIOD}", f"{ROOT}/outputs/my"),
        ("plan.py", "--cluster here1 --clusters machines.toml", "machines.toml"),
    ],
)
def test_verbs_from_another_folder(elsewhere: Path, verb: str, arguments: str, said: str) -> None:
    done = run_program(sys.executable, ROOT / verb, *arguments.split(), cwd=elsewhere)
    # With torch 2.15 Triton's nanobind adds, as Python ends, what it takes for leaks.
    lines = done.stderr.partition("nanobind: leaked")[0].splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert said in done.stderr


def test_paths_of_a_file_begin_at_the_project(elsewhere: Path) -> None:
    """Written and read again they name the same place, from the project's folder too."""
    (elsewhere / "my.toml").write_text("""
[job]
dump_folder = "runs/a"
[data]
path = "../shared/era5.nc"
static_path = "gs://bucket/static.zarr"
variables = ["2m_temperature"]
""")
    argv = ["--job.config_file", "my.toml", "--forecast.checkpoint", "run"]
    config = load_checked(argv)
    assert config.data.path == f"{ROOT}/../shared/era5.nc"
    assert config.data.static_path == "gs://bucket/static.zarr"
    assert config.dump_folder == ROOT / "runs/a" and config.forecast.checkpoint == "run"
    (elsewhere / "again.toml").write_text(to_toml(config))
    os.chdir(ROOT)
    again = load_checked(["--job.config_file", str(elsewhere / "again.toml")])
    assert again.data.path == config.data.path and again.dump_folder == config.dump_folder
    assert again.forecast.checkpoint == str(elsewhere / "run")


def test_what_the_project_has_is_found_from_anywhere(elsewhere: Path) -> None:
    config = load_checked([])
    assert config.job.config_file == str(ROOT / DEFAULT_CONFIG) and config.data.path == "simulated"
    assert config.dump_folder == ROOT / "outputs/demo"
    assert in_project(SIMULATED_PATH) == str(ROOT / SIMULATED_PATH)
    os.chdir(ROOT)
    assert load_checked([]).dump_folder == Path("outputs/demo")


def test_every_key_that_is_a_path_is_known() -> None:
    """By its name: one that is added later has to be listed, or to be no path."""
    keys = [(section, key) for section, cls in vars(load_checked([])).items() for key in vars(cls)]
    endings = ("path", "paths", "folder", "checkpoint", "file")
    named = {pair for pair in keys if pair[1].split("_")[-1] in endings}
    assert named == {*PATHS, ("job", "config_file")}
