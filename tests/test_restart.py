"""Objects that continue from a step: in a new run, a resumed one, and after a rollback."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train
from checkpoints.checkpointer import Checkpointer, find_undamaged
from checkpoints.files import step_folder
from config import Checkpoint
from tests.parity import Layout, SmallRun
from tests.planned import run_train
from tests.resharding import KINDS
from tests.started_jobs import run_options, small_dataset, small_wave, write_config
from training.run_folder import Restart, load


def test_a_run_that_goes_back_leaves_each_step_once(tmp_path, monkeypatch):
    """Step 8 is bad: metrics, validations and the best checkpoint go on from step 5, too."""
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", 0)
    taken, plain = [], train.train_step

    def train_step(run: Any, step: int, batches: Any) -> Any:
        taken.append(step)
        result = plain(run, step, batches)
        if step == 8 and not run.state.progress.rollbacks:
            run.state.bad_steps.bad[step] = True
        return result

    monkeypatch.setattr(train, "train_step", train_step)
    periods = {
        "train_period": ["2020-01-01", "2020-01-09"],
        "validation_period": ["2020-01-11", "2020-01-12"],
    }
    config_file = write_config(
        tmp_path,
        small_dataset({"10m_u_component_of_wind": small_wave(60)}),
        data=periods,
        training={"steps": 10, "ema_decay": 0.9, "global_batch_size": 4},
        checkpoint={"interval": 5, "keep_best": "val/loss"},
        validation={"enable": True, "interval": 5, "lead_hours": [6], "plots": False},
    )
    lines = run_train(*run_options(config_file, tmp_path / "run"))
    assert taken == [*range(1, 9), *range(6, 11)]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    scores = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert list(scores) == [5, 10]
    best = json.loads((tmp_path / "run/best/best.json").read_text())
    assert best["value"] == min(scores.values()) == scores[best["step"]]


def losses_after_going_back(layout: Layout, folder: Path) -> tuple[float, float]:
    """Loss of step 2, and of step 2 after two further steps and going back."""
    small = SmallRun(layout)
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", {})
    small.step(0)
    checkpointer.save(1, small.state.state_dict())
    expected = small.step(1)[0]
    small.step(2)
    load(checkpointer, 1, small.state)
    Restart(checkpointer, small.state)
    again = small.step(1)[0]
    checkpointer.close()
    return expected, again


@pytest.mark.parametrize("name", ["fsdp 2, float8 gathered", "zero-1 2"])
def test_going_back_takes_the_scales_of_float8_along(ranks, tmp_path, name):
    for expected, again in ranks(2).run(losses_after_going_back, KINDS[name], tmp_path):
        assert again == expected


def folder_of_rank(run: Path) -> str:
    """Rank 1 sees a checkpoint that rank 0 did not see when it looked."""
    found = find_undamaged(lambda: [step_folder(run, 2), step_folder(run, 1)][dist.get_rank() :])
    assert found
    return found.folder.name


def test_all_ranks_take_the_checkpoint_that_the_first_one_finds(ranks, tmp_path):
    ranks(2).run(save_two, tmp_path)
    assert set(ranks(2).run(folder_of_rank, tmp_path)) == {"step-00000002"}


def save_two(folder: Path) -> None:
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", {})
    for step in (1, 2):
        checkpointer.save(step, {"model.weight": torch.full((3,), float(step))})
    checkpointer.close()
