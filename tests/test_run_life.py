"""Effects of a cluster on a run: folders apart, passing errors, other settings, lost names of checkpoints."""

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import evaluate
from checkpoints import checkpointer as saving
from checkpoints import files
from checkpoints.checkpointer import Checkpointer, find_undamaged
from checkpoints.files import complete_steps, prune, step_folder
from config import Checkpoint, Config, Optimizer
from datasets.remote import NO_OPTIONS
from errors import EXIT_SAVED, ConfigError, RunFailed, UserError
from jobs import torchrun
from jobs.durable_files import Journal
from jobs.heartbeat import LONG_PHASES, activity
from tests.planned import run_train
from tests.started_jobs import (
    last_step,
    records,
    run_options,
    run_program,
    small_dataset,
    small_wave,
    write_config,
)
from tests.test_checkpoint import Run, build  # noqa: F401  (a fixture)
from training import run_folder
from training.metrics import Metrics
from training.run_folder import Restart
from verification import validation


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "READ_SECONDS", (0, 0, 0))
    monkeypatch.setattr(saving, "RETRY_SECONDS", (0, 0))


# -- reading checkpoints


def save_two(folder: Path) -> None:
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", {})
    for step in (1, 2):
        checkpointer.save(step, {"model.weight": torch.full((3,), float(step))})
    checkpointer.close()


def folder_of_rank(run: Path) -> str:
    """Rank 1 sees a checkpoint that rank 0 did not see when it looked."""
    found = find_undamaged(lambda: [step_folder(run, 2), step_folder(run, 1)][dist.get_rank() :])
    assert found
    return found.folder.name


def test_all_ranks_take_the_checkpoint_that_the_first_one_finds(ranks, tmp_path):
    ranks(2).run(save_two, tmp_path)
    assert set(ranks(2).run(folder_of_rank, tmp_path)) == {"step-00000002"}


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("times", [2, 100])
def test_a_passing_read_error_is_no_damage(build, tmp_path, monkeypatch, code, times):  # noqa: F811
    """It set every good checkpoint aside, and the run was refused for ever."""
    Run().step_and_save(build(), 2)
    errors, plain = [OSError(code, os.strerror(code))] * times, files.crc32_of

    def crc32_of(path: Path) -> int:
        if errors:
            raise errors.pop()
        return plain(path)

    monkeypatch.setattr(files, "crc32_of", crc32_of)
    if times == 2:
        assert build().newest() == 2
    else:
        with pytest.raises(RunFailed, match="cannot be read now"):
            build().newest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def message_of(call: Callable[[], Any]) -> str:
    """What a user is told, if the call fails, else what it returns."""
    try:
        return str(call() or "")
    except (UserError, RunFailed) as error:
        return str(error)


def checkpoint_found(run: Path) -> str:
    """What ranks find where rank 1 does not see a file of the newest checkpoint."""
    saving.READ_SECONDS = (0, 0)
    candidates = [Path("step-00000002"), Path("step-00000001")]
    with chdir(run / str(dist.get_rank())):
        return message_of(lambda: find_undamaged(lambda: candidates).folder)  # type: ignore[union-attr]


@pytest.mark.parametrize("on", [(1,), (0, 1)])
def test_a_file_that_one_rank_alone_does_not_see_is_no_damage(ranks, tmp_path, on):
    ranks(2).run(save_two, tmp_path / "both")
    for rank in range(2):
        shutil.copytree(tmp_path / "both", tmp_path / str(rank), dirs_exist_ok=True)
        if rank in on:
            (tmp_path / str(rank) / "step-00000002/config.toml").unlink()
    first, second = ranks(2).run(checkpoint_found, tmp_path)
    assert first == second
    assert ("step-00000001" if on == (0, 1) else "shared by all nodes") in first


def test_candidates_that_were_all_pruned_are_listed_again(one_rank, tmp_path):
    """Of a run with keep_latest_k = 1."""
    save_two(tmp_path)
    listings = iter([[step_folder(tmp_path, 7)], [step_folder(tmp_path, 8), step_folder(tmp_path, 2)]])
    found = find_undamaged(lambda: next(listings, []))
    assert found and found.folder.name == "step-00000002"


def test_a_checkpoint_that_is_read_is_kept_where_locks_need_a_writer(one_rank, tmp_path, monkeypatch):
    """NFS refuses an exclusive lock of a file that is open for reading: what a forecast read was removed."""
    save_two(tmp_path)
    plain = fcntl.flock

    def flock(file: Any, kind: int) -> None:
        if kind & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        plain(file, kind)

    with files.lock(step_folder(tmp_path, 1)):
        monkeypatch.setattr(files.fcntl, "flock", flock)
        prune(tmp_path, 1)
    assert complete_steps(tmp_path) == [1, 2]
    prune(tmp_path, 1)
    assert complete_steps(tmp_path) == [2]


def test_a_checkpoint_that_is_removed_while_it_is_checked_is_no_damage(build, tmp_path, monkeypatch, caplog):  # noqa: F811
    """By hand, or by another run; the log named a folder that was not there."""
    Run().step_and_save(build(), 2)
    plain = files.check_files

    def check_files(folder: Path, *arguments: int) -> None:
        if folder == step_folder(tmp_path, 2):
            shutil.rmtree(folder)
        plain(folder, *arguments)

    monkeypatch.setattr(files, "check_files", check_files)
    assert build().newest() == 1
    assert "removed by another process" in caplog.text and "set aside" not in caplog.text


def fail_to_remove(folder: Path) -> str:
    """What each rank gets where rank 0 cannot remove later checkpoints, or read metrics.jsonl."""
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", {})
    metrics = Metrics.__new__(Metrics)
    metrics.is_first, metrics.journal = dist.get_rank() == 0, Journal(folder)  # no file
    with patch("os.replace", side_effect=OSError(errno.EIO, "Input/output error")):
        problems = message_of(lambda: checkpointer.restart(1)) + message_of(lambda: metrics.restart(1))
    checkpointer.close()
    return problems


def test_errors_of_rank_0_alone_are_one_line_of_all_ranks(ranks, tmp_path):
    """They were tracebacks, and the other ranks waited."""
    ranks(2).run(save_two, tmp_path)
    first, second = ranks(2).run(fail_to_remove, tmp_path)
    assert first == second and "Input/output error" in first and "Is a directory" in first


# -- writing them


def test_a_last_save_that_fails_after_its_rename_is_there(build, tmp_path, monkeypatch):  # noqa: F811
    """All further tries ended with "Directory not empty", and the run with 1."""
    run, plain, failed = Run(), saving.sync_folder, []

    def sync_folder(path: Path) -> None:
        if path == tmp_path and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        plain(path)

    monkeypatch.setattr(saving, "sync_folder", sync_folder)
    checkpointer = build()
    run.step()
    run.save(checkpointer)
    assert checkpointer.finish(1, run.state.state_dict()) == "" and failed
    assert complete_steps(tmp_path) == [1] and build().newest() == 1


def test_a_rollback_goes_to_the_oldest_checkpoint_and_may_take_long(build, monkeypatch):  # noqa: F811
    """With few checkpoints kept there was "no checkpoint to go back to"; a load of minutes was killed."""
    run, checkpointer = Run(), build(keep=2)
    run.step_and_save(checkpointer, 6)
    run.state.bad_steps.first, run.state.bad_steps.diagnosis = 4, "11 of the last 100 steps"
    restart = Restart(checkpointer, run.state)
    run.state.progress.step = 6
    with activity.phase("rollback"):
        assert LONG_PHASES & set(activity.phases)
        restart.roll_back()
    assert run.state.progress.step == 5
    activity.start_phase("stage", 7)
    assert LONG_PHASES & set(activity.phases)


# -- several nodes


def shared_problem(run: Path) -> str:
    run_folder.SHARED_SECONDS = 0.5
    with chdir(run / str(dist.get_rank())):
        return message_of(lambda: run_folder.check_shared(Path("run")))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_dump_folder_that_ranks_do_not_share_is_refused(ranks, tmp_path, is_shared):
    """Both ranks printed "saved step-6", and no checkpoint could be used."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0/run").mkdir()
    (tmp_path / "1/run").symlink_to(tmp_path / "0/run") if is_shared else (tmp_path / "1/run").mkdir()
    first, second = ranks(2).run(shared_problem, tmp_path)
    assert first == second
    assert first == "" if is_shared else "job.dump_folder" in first and "rank 1" in first
    assert not (tmp_path / "0/run/.shared").exists()


class MadeUp:
    """The parts of a selection that ranks compare."""

    def __init__(self, value: float) -> None:
        self.train, self.validation, self.variables = np.arange(3), np.arange(3, 4), ["t"]
        self.archive = SimpleNamespace(times=np.arange(4).astype("datetime64[s]"), read=self.read)
        self.value = value

    def read(self, date: int, variables: list[str]) -> np.ndarray:
        return np.full((1, 2, 3), self.value, np.float32)


def other_settings(lr: float, value: float) -> str:
    rank = dist.get_rank()
    config, selection = Config(optimizer=Optimizer(lr=lr if rank else 1e-3)), MadeUp(value if rank else 0.0)
    return message_of(lambda: run_folder.compare_ranks(config, selection))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lr", "value", "key"), [(2e-3, 0, "optimizer.lr"), (1e-3, 1, "data.path"), (1e-3, 0, "")]
)
def test_ranks_with_other_settings_or_data_are_refused(ranks, lr, value, key):
    """They trained on silently."""
    first, second = ranks(2).run(other_settings, lr, float(value))
    assert first == second and key in first and bool(first) == bool(key)


def test_a_name_that_leads_to_this_node_alone_is_refused(monkeypatch):
    """The other nodes waited 900 s."""
    monkeypatch.setattr(torchrun.socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(ConfigError, match="RDZV_ENDPOINT.*127.0.1.1"):
        torchrun.run_ranks(["--nnodes=2", "--node-rank=0", "--rdzv-endpoint=node0:29500", "train.py"])


def test_gpus_that_are_not_visible_are_not_counted(tmp_path):
    """CUDA_VISIBLE_DEVICES=0,1 on a node of eight was refused with a number that nobody had set."""
    for name, text in (("nvidia-smi", "seq -f 'GPU %g' 8"), ("python", 'echo "$NGPU"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ROSSBY_PYTHON": str(tmp_path / "python")}
    for more, number in (
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "2"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "1"),
        ({}, "8"),
    ):
        done = run_program("./run_train.sh", **settings | more)
        assert done.stdout.split()[:1] == [number], done


# -- a second start


def test_a_second_start_says_what_has_changed(tmp_path, caplog):
    """Another learning rate "resumed" silently, also where nothing was left to train."""
    checkpoint = {"interval": 2, "async_mode": "disabled"}
    config = write_config(tmp_path, training={"steps": 2}, checkpoint=checkpoint)
    words, run = run_options(config, tmp_path / "run"), tmp_path / "run"
    run_train(*words, "--optimizer.lr", "0.008")
    before = (run / "config.toml").read_text()
    run_train(*words, "--optimizer.lr", "0.002")
    assert "nothing left to train" in caplog.text and (run / "config.toml").read_text() == before
    run_train(*words, "--optimizer.lr", "0.002", "--training.steps", "3")
    assert "optimizer.lr 0.008 -> 0.002 from step 2 on" in caplog.text
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert starts[-1]["changed"] == {"optimizer.lr": [0.008, 0.002], "training.steps": [2, 3]}
    assert "changed" not in starts[0]
    (run / "metrics.jsonl").unlink()
    run_train(*words, "--optimizer.lr", "0.002", "--training.steps", "4")
    assert "the lines of steps 1 to 3 are missing" in caplog.text
    overlap = ["--data.train_period", '["2020-01-01", "2020-01-03"]', "--training.steps", "5"]
    overlap += ["--data.validation_period", '["2020-01-05", "2020-01-06"]']
    with pytest.raises(ConfigError, match="data.validation_period.*overlaps data.train_period"):
        run_train(*words, *overlap)


@pytest.mark.parametrize("cause", ["signal", "time"])
def test_a_signal_or_the_time_ends_a_validation_between_batches(tmp_path, monkeypatch, cause):
    """It waited for all of it, minutes at scale, with nothing saved since the last interval."""
    periods = {
        "train_period": ["2020-01-01", "2020-01-05"],
        "validation_period": ["2020-01-06", "2020-01-09"],
    }
    config = write_config(
        tmp_path,
        small_dataset({"10m_u_component_of_wind": small_wave(40)}),
        data=periods,
        training={"steps": 5},
        checkpoint={"interval": 100, "async_mode": "disabled"},
        validation={"enable": True, "interval": 2, "local_batch_size": 1, "lead_hours": [6], "plots": False},
    )
    calls, plain = [], validation.date_statistics

    def date_statistics(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 3 and cause == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        return plain(*arguments)

    now = time.time
    monkeypatch.setattr(validation, "date_statistics", date_statistics)
    monkeypatch.setattr(time, "time", lambda: now() + (2 < len(calls) < 8 and cause == "time") * 3600)
    run = tmp_path / "run"
    words = run_options(config, run, "--training.max_wall_time=0:30:00")
    with pytest.raises(SystemExit) as end:
        run_train(*words)
    assert end.value.code == EXIT_SAVED and len(calls) < 6
    assert complete_steps(run / "checkpoints") == [2] and last_step(run) == 2
    run_train(*words)
    assert [record["step"] for record in records(run) if "val/loss" in record] == [2, 4, 5]


def test_a_run_folder_with_an_equals_sign_is_evaluated(tmp_path, monkeypatch):
    """The name of a forecast ended at the last one: '0.1/forecast.zarr' does not exist."""
    path = tmp_path / "lr=0.1/forecast.zarr"
    path.mkdir(parents=True)
    opened = lambda path, *_: SimpleNamespace(path=path, status=None, checkpoint="")  # noqa: E731
    monkeypatch.setattr(evaluate, "open_forecast", opened)
    for texts, name in (([], "model"), ([str(path)], "forecast"), ([f"mine={path}"], "mine")):
        found = evaluate.open_forecasts(texts, path.parent, {}, NO_OPTIONS)
        assert {key: str(stored.path) for key, stored in found.items()} == {name: str(path)}
