"""The best checkpoint is kept aside whatever is pruned."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import check_files, complete_steps, read_tensors
from config import Checkpoint, Config, Job, Training, Validation
from tests.planned import run_train
from tests.started_jobs import write_config
from training.best import Best, basis_of, link_folder, read_best
from training.config_checks import load_checked

SCORE = "val/rmse/10m_u_component_of_wind@24h"
VALIDATION = ["--validation.enable", "--data.validation_period", '["2020-01-10", "2020-01-12"]']


@pytest.fixture
def checkpointer(one_rank, tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", Checkpoint(async_mode="disabled", keep_latest_k=1), "", {})
    yield made
    made.close()


def best_of(folder: Path, score: str = SCORE) -> Best:
    best = Best(Config(job=Job(dump_folder=str(folder)), checkpoint=Checkpoint(keep_best=score)))
    best.restart(100)
    return best


def validate(best: Best, checkpointer: Checkpointer, folder: Path, step: int, value: float) -> None:
    """Validate as train.py does."""
    checkpointer.save(step, {"model.weight": torch.full((3,), float(step))})
    best.judge(step, {SCORE: value}, checkpointer)


def test_the_best_is_kept_when_newer_ones_are_not_better(checkpointer, tmp_path):
    best = best_of(tmp_path)
    for step, value in enumerate([3.0, 1.0, 2.0, math.nan, 1.0], 1):
        validate(best, checkpointer, tmp_path, step, value)
    assert complete_steps(tmp_path / "checkpoints") == [5] and complete_steps(tmp_path / "best") == [2]
    stored = json.loads((tmp_path / "best/best.json").read_text())
    assert (stored["score"], stored["value"], stored["step"]) == (SCORE, 1.0, 2)
    kept = tmp_path / "best/step-00000002"
    check_files(kept)  # every byte is there, though the original is pruned
    resumed = best_of(tmp_path)
    assert (resumed.value, resumed.step) == (best.value, best.step) == (1.0, 2)
    assert best_of(tmp_path, "val/loss").value == math.inf  # of another score nothing is known


def test_a_checkpoint_that_could_not_be_saved_is_not_the_best(checkpointer, tmp_path):
    best = best_of(tmp_path)
    validate(best, checkpointer, tmp_path, 1, 2.0)
    best.judge(2, {SCORE: 1.0}, checkpointer)  # nothing was saved after step 2
    assert best.value == 2.0 and complete_steps(tmp_path / "best") == [1]


def test_a_score_without_its_checkpoint_is_not_the_best(checkpointer, tmp_path, monkeypatch):
    """It was recorded before the copy was there, and a later, worse one was not taken."""
    best = best_of(tmp_path)
    with monkeypatch.context() as full:
        full.setattr("training.best.link_folder", Mock(side_effect=OSError(28, "No space left on device")))
        validate(best, checkpointer, tmp_path, 1, 1.0)
    assert best.value == math.inf and not complete_steps(tmp_path / "best")
    validate(best, checkpointer, tmp_path, 2, 2.0)
    assert best.value == 2.0 and complete_steps(tmp_path / "best") == [2]


def test_values_of_another_loss_are_not_compared(checkpointer, tmp_path):
    """A run that went on with mse after mae kept a worse model, and never improved after going back."""

    def best(loss: str) -> Best:
        training = Training(loss=loss)  # type: ignore[arg-type]
        checkpoint, job = Checkpoint(keep_best="val/loss"), Job(dump_folder=str(tmp_path))
        best = Best(Config(job=job, checkpoint=checkpoint, training=training))
        best.restart(2)
        return best

    checkpointer.save(1, {"model.weight": torch.zeros(3)})
    best("mae").judge(1, {"val/loss": 0.1}, checkpointer)
    assert best("mae").value == 0.1
    other = best("mse")
    assert (other.value, other.step) == (math.inf, -1)


def test_a_damaged_file_starts_again(tmp_path, caplog):
    (tmp_path / "best.json").write_text("{")
    assert read_best(tmp_path / "best.json", SCORE, "") == (math.inf, -1) and "is damaged" in caplog.text


def test_going_back_forgets_a_best_of_later_steps(checkpointer, tmp_path):
    """It stayed with scores of weights that were done again; a step done again found its place taken."""
    best = best_of(tmp_path)
    for step, value in enumerate([3.0, 2.0, 2.5], 1):
        validate(best, checkpointer, tmp_path, step, value)
    best.restart(2)
    assert (best.step, complete_steps(tmp_path / "best")) == (2, [2])
    best.restart(1)
    assert best.value == math.inf and not complete_steps(tmp_path / "best")
    assert not (tmp_path / "best/best.json").exists()


def test_a_step_that_is_done_again_replaces_the_best_of_its_number(checkpointer, tmp_path):
    for value, score in ((1.0, 2.0), (5.0, 1.0)):
        best = best_of(tmp_path)
        checkpointer.save(1, {"model.weight": torch.full((3,), value)})
        best.judge(1, {SCORE: score}, checkpointer)
        checkpointer.restart(0)
    assert json.loads((tmp_path / "best/best.json").read_text())["value"] == 1.0
    found = {"model.weight": torch.zeros(3)}
    read_tensors(tmp_path / "best/step-00000001", found)
    assert found["model.weight"].tolist() == [5.0] * 3


def test_links_replace_what_a_kill_left_half_made(tmp_path):
    source, target = tmp_path / "step-00000001", tmp_path / "best/step-00000001"
    source.mkdir()
    (source / "manifest.json").write_text("whole")
    (tmp_path / "best/step-00000001.incomplete").mkdir(parents=True)
    (tmp_path / "best/step-00000001.incomplete/part").write_text("half")
    link_folder(source, target)
    assert [path.name for path in target.iterdir()] == ["manifest.json"]
    assert (target / "manifest.json").stat().st_nlink == 2


@pytest.mark.parametrize(
    ("interval", "options", "message"),
    [
        ("5", ["--checkpoint.keep_best", "val/rmse/10m_u_component_of_wind@42h"], "did you mean"),
        ("0", ["--checkpoint.keep_best", "val/loss"], "a validation.interval above 0"),
    ],
)
def test_what_cannot_be_judged_is_said_before_training(tmp_path, interval, options, message):
    validation = [*VALIDATION, "--validation.interval", interval]
    with pytest.raises(ValueError, match=message):
        load_checked(["--job.config_file", str(write_config(tmp_path)), *validation, *options])


def test_a_score_of_the_validation_is_accepted(tmp_path):
    config_file, validation = str(write_config(tmp_path)), [*VALIDATION, "--validation.interval", "5"]
    for name in ("val/loss", "val/rmse/10m_u_component_of_wind", SCORE):
        load_checked(["--job.config_file", config_file, *validation, "--checkpoint.keep_best", name])


def test_members_are_what_values_have_in_common():
    """RMSE of a mean of 64 members is lower than that of 2, for the same weights."""
    two, many = (Config(training=Training(loss="crps", members=n), checkpoint=Checkpoint()) for n in (2, 64))
    assert basis_of(two) != basis_of(many)
    assert basis_of(two) == basis_of(replace(many, validation=Validation(members=2)))


def test_a_validation_that_a_kill_took_is_made_up(tmp_path):
    """Of the step that a run resumes from: its checkpoint was complete, and could not become the best."""
    words = [*VALIDATION, "--validation.interval=2", "--validation.lead_hours=[6]"]
    words += [
        "--checkpoint.interval=2",
        "--checkpoint.async_mode=disabled",
        "--checkpoint.keep_best=val/loss",
    ]
    files = ["--job.config_file", str(write_config(tmp_path)), "--job.dump_folder", str(tmp_path / "run")]
    words += ["--validation.plots=false"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.validator.Validator._score", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit, match="killed"):
            run_train(*files, *words, "--training.steps=4")
    run_train(*files, *words, "--training.steps=4")
    assert validated(tmp_path) == [2, 4] and complete_steps(tmp_path / "run/best")
    run_train(*files, *words, "--training.steps=4")  # ended, and validated again
    assert validated(tmp_path) == [2, 4]


def test_plots_that_cannot_be_written_end_no_run(tmp_path, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verification.plots.plot_run", fail)
    words = [*VALIDATION, "--validation.lead_hours=[6]", "--training.steps=2", "--checkpoint.enable=false"]
    run_train(
        "--job.config_file", str(write_config(tmp_path)), f"--job.dump_folder={tmp_path / 'run'}", *words
    )
    assert "plots of step 2 are not written" in caplog.text and validated(tmp_path) == [2]


def validated(folder: Path) -> list[int]:
    """The steps in metrics.jsonl that have scores."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "val/loss" in record]
