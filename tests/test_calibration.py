"""Steps on data.path = "random", measured here, anchor the plans of other configurations."""

import json
from pathlib import Path

import pytest

from planning.known_runs import run_record
from tests.planned import run_plan, run_train
from tests.started_jobs import write_config


def test_measured_steps_anchor_plans(tmp_path: Path) -> None:
    """The plan of what was measured is its time; layouts of the same kind are scaled with it."""
    options = ["--job.config_file", str(write_config(tmp_path)), "--training.global_batch_size=-1"]
    options += ["--data.path=random", "--data.grid_shape=[6,8]", "--checkpoint.enable=false"]
    folder = tmp_path / "calibration"
    run_train(*options, "--training.steps=6", f"--job.dump_folder={folder}")
    record = run_record(folder)
    assert record.ranks == 1 and record.seconds > 0
    planned = run_plan(*options, "--cluster", "cpu1", "--anchor", str(folder), "--json")
    made = json.loads(planned.stdout)
    assert made["step_seconds"] == pytest.approx(record.seconds)
    assert made["error_kind"] == "anchored, data parallel"
