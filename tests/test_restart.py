"""Objects that continue from a step: in a new run, a resumed one, and after a rollback."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import train
from checkpoints.checkpointer import Checkpointer, find_undamaged
from checkpoints.files import step_folder
from config import Checkpoint
from tests.parity import Layout, SmallRun
from tests.planned import run_train
from tests.resharding import KINDS
from tests.started_jobs import run_options, small_dataset, small_wave, write_config
from training.run_folder import Restart, load

PERIODS = {"train_period": ["2020-01-01", "2020-01-09"], "validation_period": ["2020-01-11", "2020-01-12"]}
FOLDERS = {"train", "training", "checkpoints", "verification", "parallelisms", "models", "datasets"}
# Classes with numbers that change from step to step -> attributes that need not be as they were at that step:
# clocks, what the last step did, and what counts that the run went back.
REMEMBER: dict[str, set[str]] = {
    "Progress": {"rollbacks", "went_back_to"},
    "BadSteps": {"skipped", "total", "first", "diagnosis", "losses", "bad", "seen_here"},
    "Checkpointer": {"last_seconds"},
    "Metrics": {"interval_started", "resume_step", "last_line", "data_seconds"},
    "Batches": {"seconds", "position"},
    "Best": set(),
    "Validator": {"seconds", "validated"},
    "Profiler": set(),
    "Fingerprints": {"last_equal"},  # one rank compares nothing
    "EMA": set(),
}
STEPLESS = {"ParallelModel", "TrainState"}  # whose weights and parts are loaded


def objects() -> Iterator[Any]:
    for each in gc.get_objects():
        if str(type(each).__module__).partition(".")[0] in FOLDERS and hasattr(each, "__dict__"):
            if not isinstance(each, torch.nn.Module):  # its weights are loaded
                yield each


def numbers(value: Any) -> Any:
    """What can be compared of an attribute, None of other objects."""
    if isinstance(value, Tensor):
        return value.detach().double().nan_to_num().sum().item() if value.numel() < 10_000 else None
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    return value if isinstance(value, int | float | str | set | tuple) else None


def snapshot() -> dict[str, dict[str, Any]]:
    """Class -> attribute -> value, of classes of which there is one object."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in objects():
        values = {name: numbers(value) for name, value in vars(each).items()}
        found.setdefault(type(each).__name__, []).append(values)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() & other.keys() if str(one[name]) != str(other[name])}


@pytest.fixture
def run_with_a_bad_step(tmp_path, monkeypatch) -> list[dict[str, dict[str, Any]]]:
    """Snapshots before step 6, before step 8, and before step 6 that is done again."""
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", 0)
    u = small_wave(60)
    config = write_config(
        tmp_path,
        small_dataset({"10m_u_component_of_wind": u}),
        data=PERIODS,
        training={"steps": 10, "ema_decay": 0.9, "global_batch_size": 4},
        checkpoint={"interval": 5, "keep_best": "val/loss", "async_mode": "disabled"},
        validation={"enable": True, "interval": 5, "lead_hours": [6]},
    )
    taken, plain = [], train.train_step

    def train_step(run: Any, step: int, batches: Any) -> Any:
        rollbacks = run.state.progress.rollbacks
        if step == 6 or (step == 8 and not rollbacks):
            taken.append(snapshot())
        result = plain(run, step, batches)
        if step == 8 and not rollbacks:
            run.state.bad_steps.bad[step] = True
        return result

    monkeypatch.setattr(train, "train_step", train_step)
    gc.freeze()  # gc.get_objects() lists nothing that other tests left
    try:
        run_train(*run_options(config, tmp_path / "run"))
    finally:
        gc.unfreeze()
    assert len(taken) == 3
    return taken


def test_all_that_remembers_steps_restarts(run_with_a_bad_step):
    """A class that is not in REMEMBER and changes from step to step belongs into run_folder.Restart."""
    at_step, later, again = run_with_a_bad_step
    remembers = {name for name in at_step if changed(at_step[name], later.get(name, {}))}
    assert remembers <= REMEMBER.keys() | STEPLESS, remembers - REMEMBER.keys() - STEPLESS
    for name in remembers - STEPLESS:
        left = changed(at_step[name], again[name]) - REMEMBER[name]
        assert not left, (name, {each: (at_step[name][each], again[name][each]) for each in left})


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
