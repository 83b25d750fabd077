"""Agreement of ranks to save and end; the files that the run leaves, and its continuation."""

import hashlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoints.checkpointer import Checkpointer
from checkpoints.files import complete_steps
from config import Comm, wall_time_seconds
from errors import EXIT_SAVED, ConfigError
from jobs.heartbeat import activity, span
from jobs.preemption import Agreement, started_at
from jobs.watchdog import Watchdog
from parallelisms.mesh import cpu_group
from tests.planned import run_train
from tests.started_jobs import last_step, losses, run_options, wait_until, write_config
from train import train
from training.config_checks import load_checked


@pytest.mark.parametrize(("text", "seconds"), [("0:01:30", 90), ("100:00:01", 360_001), ("", float("inf"))])
def test_wall_time(text, seconds):
    assert wall_time_seconds(text) == seconds


def boundaries_with_a_signal() -> list[str]:
    """Rank 1 is told to stop in its third step: what each rank decides at each boundary."""
    decided = []
    with Agreement("", cpu_group(), Watchdog(Path(), Comm())) as agreement:
        for step in range(1, 5):
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            decided.append(agreement.decide())
    return decided


def test_all_ranks_stop_at_the_same_step(ranks):
    expected = ["", "", "", "SIGUSR1 on rank 1"]
    assert ranks(2).run(boundaries_with_a_signal) == [expected, expected]


def test_max_wall_time_leaves_room_for_a_save_or_a_validation(one_rank, monkeypatch):
    """A long validation made every later step look as long, so that a job ended far before its time."""
    monkeypatch.setenv("ROSSBY_STARTED", str(time.time() - 3600))
    with Agreement(
        "1:01:10", cpu_group(), Watchdog(Path(), Comm())
    ) as agreement:  # of 70 s 60 are the margin
        for step in range(4):
            activity.start_phase("train", step)
            with span("validation"):
                time.sleep(0.5 if step == 2 else 0.0)
            assert not agreement.decide()
        assert max(agreement.recent) < 0.4
        assert not agreement.decide(seconds=1.0)
        assert agreement.decide(seconds=20.0) == "training.max_wall_time = 1:01:10"  # of one that is due


def test_a_signal_in_the_last_save_waits_for_it(tmp_path, capsys, monkeypatch):
    """It ended the run with "everything is saved" before that was true."""
    plain = Checkpointer.finish

    def finish(checkpointer: Checkpointer, step: int, tensors: dict) -> str:
        assert not complete_steps(checkpointer.folder)
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(checkpointer, step, tensors)

    monkeypatch.setattr(Checkpointer, "finish", finish)
    slow_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.2) or slow_fsync(file))
    options = ["--training.steps", "2", "--checkpoint.async_mode", "async"]
    with pytest.raises(SystemExit) as ended:
        train(load_checked(run_options(write_config(tmp_path), tmp_path / "run", *options)))
    assert ended.value.code == EXIT_SAVED and complete_steps(tmp_path / "run/checkpoints") == [2]
    assert "SIGTERM on rank 0: the checkpoint of step 2 is complete" in capsys.readouterr().err


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_ends_when_its_time_is_over(tmp_path, monkeypatch, capsys, saves):
    monkeypatch.setenv("ROSSBY_STARTED", str(time.time() - 3600))
    options = run_options(write_config(tmp_path), tmp_path / "run", "--training.max_wall_time", "1:00:00")
    with pytest.raises(SystemExit) as ended:
        train(load_checked([*options, f"--checkpoint.enable={str(saves).lower()}"]))
    assert ended.value.code == EXIT_SAVED
    assert complete_steps(tmp_path / "run/checkpoints") == ([1] if saves else [])
    said = "the checkpoint of step 1 is complete" if saves else "nothing saved: checkpoint.enable is false"
    assert said in capsys.readouterr().err


def test_a_signal_is_said_at_once(one_rank, tmp_path, caplog):
    """While the main thread is in C code, a collective or a save; nothing was said for half a minute."""
    with Watchdog(tmp_path, Comm()) as watchdog:
        with Agreement("", cpu_group(), watchdog) as agreement:
            activity.start_phase("train", 7)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 6_000_000)  # seconds, without the interpreter's lock
            ended = time.time()
            assert agreement.decide() == "SIGTERM on rank 0"
    (said,) = [record for record in caplog.records if "SIGTERM on rank 0 in step 7" in record.getMessage()]
    assert said.created < ended - 0.5


def test_a_signal_before_the_first_step_ends_a_run_at_once(one_rank, tmp_path, capsys):
    Agreement("", cpu_group(), Watchdog(tmp_path, Comm()))
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert ended.value.code == EXIT_SAVED and "nothing to save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "whom", "number"),
    [
        (1, "all", signal.SIGINT),  # as a terminal does
        pytest.param(2, "rank 1", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(2, "the launcher", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(2, "the launcher", signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_ends_all_and_is_no_crash(start_job, tmp_path, ranks, whom, number):
    config_file, run = write_config(tmp_path), tmp_path / "run"
    settings = {"NGPU": str(ranks), "MAX_RESTARTS": "2"}
    job = start_job(config_file, run, "--data.num_workers", "1", **settings)
    job.wait_for_step(10)
    if whom == "rank 1":
        job.kill_rank(1, number)
    elif whom == "all":
        os.killpg(job.process.pid, number)
    else:
        os.kill(job.process.pid, number)
    told = time.monotonic()
    assert job.end() == EXIT_SAVED, job.output
    step = last_step(run)
    assert time.monotonic() - told < 30 and complete_steps(run / "checkpoints") == [step]
    status = json.loads((run / "status.json").read_text())
    assert (status["exit_code"], status["step"]) == (EXIT_SAVED, step) and number.name in status["message"]
    rank = 1 if whom == "rank 1" else "."  # of the launcher, the one that hears it first
    line = rf"{number.name} on rank {rank}: the checkpoint of step {step} is complete"
    assert re.search(line, job.output), job.output
    assert job.output.count(number.name) == 2, job.output  # at once, and at the end
    assert "restart" not in job.output and "Traceback" not in job.output

    run_train(*run_options(config_file, run, "--training.steps", str(step + 3)))
    assert sorted(losses(run)) == list(range(1, step + 4))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_ranks_at_once(start_job, tmp_path):
    """Rank 1 is stopped, so that no save can end."""
    run = tmp_path / "run"
    job = start_job(write_config(tmp_path), run, NGPU="2")
    job.wait_for_step(5)
    ranks = job.ranks()
    job.kill_rank(1, signal.SIGSTOP)
    for _ in range(2):
        os.kill(job.process.pid, signal.SIGINT)
        time.sleep(0.5)
    assert job.end(10) == 130 and job.output.count("rossby: interrupted again") == 1, job.output
    time.sleep(1)
    ended = [Path(f"/proc/{pid}/stat") for pid in ranks.values()]
    assert all(not stat.exists() or ") Z " in stat.read_text() for stat in ended)
    assert not complete_steps(run / "checkpoints")
    status = json.loads((run / "status.json").read_text())
    assert status["exit_code"] == 130 and "interrupted again" in status["message"]


@pytest.mark.slow
def test_a_second_ctrl_c_after_the_save_changes_nothing(start_job, tmp_path):
    """It killed the ranks while they ended, with "ended without a save" behind "is complete"."""
    job = start_job(write_config(tmp_path), tmp_path / "run", NGPU="2")
    job.wait_for_step(5)
    os.kill(job.process.pid, signal.SIGINT)
    wait_until(lambda: "is complete" in job.output)
    while job.process.poll() is None:
        os.kill(job.process.pid, signal.SIGINT)
        time.sleep(0.01)
    assert job.end() == EXIT_SAVED and job.output.count("rossby:") == 1, job.output


def test_a_signal_during_the_check_of_the_command_line_leaves_nobody(start_job, tmp_path):
    job = start_job(write_config(tmp_path), tmp_path / "run", NGPU="2")
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
    wait_until(children.read_text)
    pids = children.read_text().split()
    time.sleep(0.5)
    job.process.terminate()
    assert job.end(20) == EXIT_SAVED, job.output
    time.sleep(1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in job.output


def test_a_start_that_is_no_time_is_one_line(monkeypatch):
    monkeypatch.setenv("ROSSBY_STARTED", "abc")
    with pytest.raises(ConfigError, match="ROSSBY_STARTED = 'abc': .* seconds since 1970"):
        started_at()
