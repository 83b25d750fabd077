"""The best checkpoint is kept aside whatever is pruned."""

import json
import math
from pathlib import Path

import pytest
import torch

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import check_files, complete_steps
from config import Checkpoint, Config, Job
from tests.started_jobs import write_config
from training.best import Best, link_folder
from training.config_checks import load_checked

SCORE = "val/rmse/10m_u_component_of_wind@24h"
VALIDATION = ["--validation.enable", "--data.validation_period", '["2020-01-10", "2020-01-12"]']


@pytest.fixture
def checkpointer(one_rank, tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", Checkpoint(async_mode="disabled", keep_latest_k=1), "", {})
    yield made
    made.close()


def best_of(folder: Path, score: str = SCORE) -> Best:
    return Best(Config(job=Job(dump_folder=str(folder)), checkpoint=Checkpoint(keep_best=score)))


def validate(best: Best, checkpointer: Checkpointer, folder: Path, step: int, value: float) -> None:
    """What train.py does at a validation."""
    checkpointer.save(step, {"model.weight": torch.full((3,), float(step))})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, SCORE: value if math.isfinite(value) else None}) + "\n")
    best.judge(step, {SCORE: value}, checkpointer)


def test_the_best_is_kept_when_newer_ones_are_not_better(checkpointer, tmp_path):
    best = best_of(tmp_path)
    for step, value in enumerate([3.0, 1.0, 2.0, math.nan, 1.0], 1):
        validate(best, checkpointer, tmp_path, step, value)
    assert complete_steps(tmp_path / "checkpoints") == [5] and complete_steps(tmp_path / "best") == [2]
    assert json.loads((tmp_path / "best/best.json").read_text()) == {"score": SCORE, "value": 1.0, "step": 2}
    kept = tmp_path / "best/step-00000002"
    check_files(kept)  # every byte is there, though the original is pruned


def test_the_best_so_far_is_known_after_a_resume(checkpointer, tmp_path):
    best = best_of(tmp_path)
    for step, value in ((10, 2.0), (20, 1.0), (30, 1.5)):
        validate(best, checkpointer, tmp_path, step, value)
    resumed = best_of(tmp_path)
    assert (resumed.value, resumed.step) == (1.0, 20)
    validate(resumed, checkpointer, tmp_path, 40, 1.2)
    assert complete_steps(tmp_path / "best") == [20]
    assert best_of(tmp_path, "val/loss").value == math.inf  # of another score nothing is known


def test_a_checkpoint_that_could_not_be_saved_is_not_the_best(checkpointer, tmp_path):
    best = best_of(tmp_path)
    validate(best, checkpointer, tmp_path, 1, 2.0)
    best.judge(2, {SCORE: 1.0}, checkpointer)  # nothing was saved after step 2
    assert best.value == 2.0 and complete_steps(tmp_path / "best") == [1]


def test_a_damaged_best_file_is_replaced_by_the_checkpoint_beside_it(checkpointer, tmp_path):
    validate(best_of(tmp_path), checkpointer, tmp_path, 10, 2.0)
    (tmp_path / "best/best.json").write_text("{")
    assert (best_of(tmp_path).value, best_of(tmp_path).step) == (2.0, 10)


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
