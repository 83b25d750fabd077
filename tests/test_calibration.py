"""plan.py --calibrate: steps that are measured here anchor the plans of other configurations."""

import json
from pathlib import Path

import pytest

from planning import calibration
from planning.known_runs import run_record
from tests.planned import run_plan
from tests.started_jobs import write_config


def test_measured_steps_anchor_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of what was measured is its time; twice the samples take about twice as long."""
    folder = tmp_path / "calibration"
    monkeypatch.setattr(calibration, "SECONDS", 0.0)
    monkeypatch.setattr(calibration, "CALIBRATION", folder)
    options = ("--job.config_file", str(write_config(tmp_path)), "--training.global_batch_size=64")
    done = run_plan(*options, "--calibrate", "--cluster", "a100x64")  # measured on one rank here
    assert done.returncode == 0 and f"--anchor {folder}" in done.stdout, done.stderr
    record = run_record(folder)
    seconds = record.seconds
    assert record.ranks == 1 and seconds > 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == calibration.FEWEST
    alone = ("--training.global_batch_size=-1", "--cluster", "cpu1", "--anchor", str(folder), "--json")
    made = json.loads(run_plan(*options, *alone).stdout)
    assert made["step_seconds"] == pytest.approx(seconds) and made["error_kind"] == "anchored, data parallel"
