"""The best checkpoint is kept aside whatever is pruned."""

import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from checkpoints.checkpointer import Checkpointer, find_checkpoint
from checkpoints.files import candidates, check_files, complete_steps, read_best
from config import Checkpoint, Config, Job, Training, Validation
from errors import ConfigError
from jobs.heartbeat import LONG_PHASES, activity
from tests.planned import run_train
from tests.started_jobs import VALIDATION, records, run_options, write_config
from training.config_checks import load_checked
from training.validator import Best

SCORE = "val/rmse/10m_u_component_of_wind@24h"


@pytest.fixture
def checkpointer(one_rank, tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", Checkpoint(async_mode="disabled", keep_latest_k=1), "", {})
    yield made
    made.close()


def best_of(checkpointer: Checkpointer, score: str = SCORE, **sections: Any) -> Best:
    job = Job(dump_folder=str(checkpointer.folder.parent))
    best = Best(Config(job=job, checkpoint=Checkpoint(keep_best=score), **sections), checkpointer)
    best.restart(100)
    return best


def validate(best: Best, checkpointer: Checkpointer, step: int, value: float) -> None:
    """Validate as train.py does."""
    checkpointer.save(step, {"model.weight": torch.full((3,), float(step))})
    best.judge(step, {SCORE: value})


def test_the_best_is_kept_when_newer_ones_are_not_better(checkpointer, tmp_path):
    best = best_of(checkpointer)
    for step, value in enumerate([3.0, 1.0, 2.0, math.nan, 1.0], 1):
        validate(best, checkpointer, step, value)
    assert complete_steps(tmp_path / "checkpoints") == [2, 5]  # of which one is kept
    stored = json.loads((tmp_path / "best/best.json").read_text())
    assert (stored["score"], stored["value"], stored["step"]) == (SCORE, 1.0, 2)
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["best.json"]
    (kept,) = candidates(tmp_path / "best")
    check_files(kept)
    resumed = best_of(checkpointer)
    assert (resumed.value, resumed.step) == (best.value, best.step) == (1.0, 2)
    validate(resumed, checkpointer, 6, 0.5)
    assert complete_steps(tmp_path / "checkpoints") == [6]
    assert best_of(checkpointer, "val/loss").value == math.inf  # of another score nothing is known


def test_the_best_is_found_by_the_name_of_its_folder(checkpointer, tmp_path, monkeypatch):
    best = best_of(checkpointer)
    for step, value in ((1, 1.0), (2, 2.0)):
        validate(best, checkpointer, step, value)
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "best"), "best"):
        assert find_checkpoint("forecast.checkpoint", name).folder == tmp_path / "checkpoints/step-00000001"
    (tmp_path / "best/best.json").write_text("{")
    with pytest.raises(ConfigError, match="forecast.checkpoint = .*no checkpoint there"):
        find_checkpoint("forecast.checkpoint", "best")


def test_a_checkpoint_that_could_not_be_saved_is_not_the_best(checkpointer, tmp_path):
    best = best_of(checkpointer)
    validate(best, checkpointer, 1, 2.0)
    best.judge(2, {SCORE: 1.0})  # nothing was saved after step 2
    assert best.value == 2.0 and read_best(tmp_path)["step"] == 1


def test_a_score_that_cannot_be_recorded_is_not_the_best(checkpointer, tmp_path, monkeypatch):
    """A later, worse one was not taken."""
    best = best_of(checkpointer)
    with monkeypatch.context() as full:
        full.setattr(
            "training.validator.write_durably", Mock(side_effect=OSError(28, "No space left on device"))
        )
        validate(best, checkpointer, 1, 1.0)
    assert best.value == math.inf and not read_best(tmp_path)
    validate(best, checkpointer, 2, 2.0)
    assert best.value == 2.0 and read_best(tmp_path)["step"] == 2


def test_waiting_for_the_save_may_take_long(checkpointer, monkeypatch):
    """The watchdog ended healthy runs: "no progress", with 14 s of fsync and a limit of 6 s."""
    best, limits = best_of(checkpointer), []
    plain = checkpointer.wait
    monkeypatch.setattr(checkpointer, "wait", lambda: (limits.append(activity.phases), plain()))
    activity.start_phase("train", 1)
    checkpointer.save(1, {"model.weight": torch.zeros(3)})
    limits.clear()
    best.judge(1, {SCORE: 1.0})
    assert limits and all(LONG_PHASES & set(phases) for phases in limits)


def test_values_of_another_loss_are_not_compared(checkpointer):
    """A run that went on with mse after mae kept a worse model, and never improved after going back."""
    checkpointer.save(1, {"model.weight": torch.zeros(3)})
    best_of(checkpointer, "val/loss", training=Training(loss="mae")).judge(1, {"val/loss": 0.1})
    assert best_of(checkpointer, "val/loss", training=Training(loss="mae")).value == 0.1
    other = best_of(checkpointer, "val/loss", training=Training(loss="mse"))
    assert (other.value, other.step) == (math.inf, -1)


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"step": "a", "value": 1}', '{"value": 1.0}'])
def test_a_damaged_file_starts_again(checkpointer, tmp_path, caplog, content):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/best.json").write_text(content)
    assert best_of(checkpointer).value == math.inf
    assert "is damaged" in caplog.text
    assert not list(candidates(tmp_path / "best"))


def test_going_back_forgets_a_best_of_later_steps(checkpointer, tmp_path):
    """It stayed with scores of weights that were done again; a step done again found its place taken."""
    best = best_of(checkpointer)
    for step, value in enumerate([3.0, 2.0, 2.5], 1):
        validate(best, checkpointer, step, value)
    for step, expected in ((2, 2.0), (1, math.inf)):
        checkpointer.restart(step)
        best.restart(step)
        assert best.value == expected
    assert not (tmp_path / "best/best.json").exists() and not complete_steps(tmp_path / "checkpoints")


def test_a_step_that_is_done_again_replaces_the_best_of_its_number(checkpointer, tmp_path):
    for value, score in ((1.0, 2.0), (5.0, 1.0)):
        best = best_of(checkpointer)
        checkpointer.save(1, {"model.weight": torch.full((3,), value)})
        best.judge(1, {SCORE: score})
        checkpointer.restart(0)
        if score == 2.0:
            assert best_of(checkpointer).value == math.inf  # without its checkpoint
    assert json.loads((tmp_path / "best/best.json").read_text())["value"] == 1.0


def test_a_score_of_the_validation_is_accepted(tmp_path):
    words = run_options(write_config(tmp_path), tmp_path, *VALIDATION, "--validation.interval", "5")
    for name in ("val/loss", "val/rmse/10m_u_component_of_wind", SCORE):
        load_checked([*words, "--validation.lead_hours=[6,24]", "--checkpoint.keep_best", name])


def test_members_are_what_values_have_in_common(checkpointer):
    """RMSE of a mean of 64 members is lower than that of 2, for the same weights."""
    two, many, as_validated = (
        best_of(checkpointer, training=Training(loss="crps", members=n), validation=Validation(members=m))
        for n, m in ((2, 0), (64, 0), (64, 2))
    )
    assert two.basis != many.basis and two.basis == as_validated.basis


def test_a_validation_that_a_kill_took_is_made_up(tmp_path):
    """Of the step that a run resumes from: its checkpoint was complete, and could not become the best."""
    words = [*VALIDATION, "--validation.interval=2", "--checkpoint.interval=2"]
    words += ["--checkpoint.keep_best=val/loss"]
    words = run_options(write_config(tmp_path), tmp_path / "run", *words, "--training.steps=4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.validator.Validation.run", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit, match="killed"):
            run_train(*words)
    run_train(*words)
    assert validated(tmp_path) == [2, 4] and read_best(tmp_path / "run")
    run_train(*words)  # ended, and validated again
    assert validated(tmp_path) == [2, 4]


def test_plots_that_cannot_be_written_end_no_run(tmp_path, monkeypatch, caplog):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("verification.plots.plot_run", full)
    words = [*VALIDATION, "--validation.plots", "--training.steps=2", "--checkpoint.enable=false"]
    run_train(*run_options(write_config(tmp_path), tmp_path / "run", *words))
    assert "plots of step 2 are not written" in caplog.text and validated(tmp_path) == [2]


def validated(folder: Path) -> list[int]:
    """The steps in metrics.jsonl that have scores."""
    return [record["step"] for record in records(folder / "run") if "val/loss" in record]
