"""scripts/sweep.py: trials, continuing a study, and what it refuses."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints.files import complete_steps
from tests.started_jobs import ROOT, last_step, records, run_program, wait_until, write_config

optuna = pytest.importorskip("optuna", reason="requirements-extras.txt")
TrialState = optuna.trial.TrialState
PERIODS = ('["2020-01-01", "2020-01-07"]', '["2020-01-08", "2020-01-10"]')
OPTIONS = [f"--data.train_period={PERIODS[0]}", f"--data.validation_period={PERIODS[1]}"]
OPTIONS += ["--validation.enable", "true", "--validation.plots=false", "--checkpoint.async_mode=disabled"]


def start(folder: Path, trials: int, *options: str) -> subprocess.Popen:
    config = folder / "tiny.toml"
    command = [sys.executable, ROOT / "scripts" / "sweep.py"]
    command += [config if config.exists() else write_config(folder)]
    command += ["--trials", str(trials), "--folder", folder / "sweep", *OPTIONS, *options]
    output: Any = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"NGPU": "1"}, **output)


def trials_of(folder: Path) -> list[Any]:
    storage = f"sqlite:///{folder / 'sweep' / 'optuna.db'}"
    return optuna.load_study(study_name="sweep", storage=storage).trials


def test_a_stopped_sweep_continues_its_open_trial_and_adds_another(tmp_path: Path) -> None:
    """A score is that of the run's last validation."""
    process, run = start(tmp_path, 1, "--training.steps=100000"), tmp_path / "sweep" / "trial-0000"
    wait_until(lambda: last_step(run) >= 3, 120)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75 and trials_of(tmp_path)[0].state == TrialState.RUNNING
    (saved,) = complete_steps(run / "checkpoints")
    out, error = start(tmp_path, 2, f"--training.steps={saved + 2}").communicate(timeout=250)
    trials = trials_of(tmp_path)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2 and "best: trial" in out, error
    assert out.count("trial 0: complete") == 1
    assert f"resumed from {run / 'checkpoints'}" in Path(f"{run}.log").read_text()
    for trial in trials:
        folder = tmp_path / "sweep" / f"trial-{trial.number:04d}"
        scores = {record["step"]: record["val/loss"] for record in records(folder) if "val/loss" in record}
        assert trial.value == scores[saved + 2] and trial.intermediate_values == scores
        assert f"lr = {trial.params['optimizer.lr']}" in (folder / "config.toml").read_text()


def test_a_run_above_the_median_is_pruned_and_one_without_a_last_score_has_none(monkeypatch, tmp_path):
    """Optuna takes no value of a pruned trial; of [.., None] the value before counted. The runs write these
    scores, one per validation, in place of train.py.
    """
    runs = [[0.5, 0.4], [0.6, 0.7], [0.4, None], [0.3, 0.2]]
    spec = importlib.util.spec_from_file_location("sweep", ROOT / "scripts" / "sweep.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[-1].partition("=")[2])
folder.mkdir()
for step, score in enumerate(json.loads(sys.argv[1])[int(folder.name[-4:])]):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "val/loss": score}) + chr(10))
time.sleep(1)
"""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(module, "PRUNER", optuna.pruners.MedianPruner(n_startup_trials=1))
    (tmp_path / "sweep").mkdir()
    assert module.sweep([sys.executable, "-c", program, json.dumps(runs)], len(runs), tmp_path / "sweep") == 0
    first, second, third, fourth = trials_of(tmp_path)
    assert first.state == fourth.state == TrialState.COMPLETE and fourth.value == 0.2
    assert second.state == TrialState.PRUNED and third.state == TrialState.FAIL and third.value is None


def test_bad_input_ends_the_sweep_in_one_line(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "--optimizer.bta1=0.9")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and "optimizer.bta1: unknown key" in error.splitlines()[-1]


def test_without_optuna_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "optuna.py").write_text("raise ImportError")
    command = [sys.executable, "scripts/sweep.py", "train_configs/demo.toml"]
    found = run_program(*command, PYTHONPATH=str(tmp_path))
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1 and ".[sweep]" in found.stderr
