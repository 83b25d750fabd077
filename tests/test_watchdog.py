"""A rank that stalls, stops or leaves: which rank is named, how soon the job ends, report and files."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[reportPrivateImportUsage]

import jobs.heartbeat
from config import Comm
from errors import DataError
from jobs.heartbeat import Activity
from jobs.watchdog import NO_REASON, Heartbeat, Watchdog, find_stalled_ranks, is_lost_connection
from tests.test_launch import launch

TRAINING = Heartbeat(0, "node", 7, step=12, phase="optimizer", seconds=1.0, limit=10.0)


def heartbeats(*changes: dict) -> list[Heartbeat]:
    return [replace(TRAINING, rank=rank, **change) for rank, change in enumerate(changes)]


def stalled(beats: list[Heartbeat], silence: float = 10.0) -> list[int]:
    found = find_stalled_ranks(beats, silence)
    return [beat.rank for beat in found[0]] if found else []


def test_stalled_ranks():
    waiting, late = {"seconds": 12.0, "waits": True}, {"seconds": 12.0, "phase": "data"}
    assert stalled(heartbeats({}, {})) == []
    assert stalled(heartbeats({}, {"silent": 11.0}, waiting)) == [1]
    assert stalled(heartbeats(waiting, late, waiting)) == [1]
    stopped = {**waiting, "seconds": 3.0, "silent": 9.0}  # while it waited: it is named a second later
    assert stalled(heartbeats(waiting, stopped)) == []
    assert stalled(heartbeats(waiting, {**stopped, "silent": 11.0})) == [1]
    assert stalled(heartbeats(waiting, waiting)) == [0, 1]  # nobody is seen to hold up the others
    assert stalled(heartbeats({**late, "step": 13}, {**late, "step": 12})) == [1]  # the other runs ahead
    # Rank 0 may take its time to validate: those who wait for it are over their limit, it is not.
    assert stalled(heartbeats({"seconds": 12.0, "limit": 600.0, "phase": "validation"}, waiting)) == []


def test_a_host_whose_device_is_busy_waits(monkeypatch):
    """A rank that does nothing has an idle device; one that waits for others in a collective has not."""
    activity = Activity()
    activity.start_phase("train", 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for idle in (True, False):
        stream = SimpleNamespace(query=lambda idle=idle: idle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        assert activity.waits_for_others() is not idle
    failed = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "current_stream", failed)
    assert not activity.waits_for_others()


def test_a_lost_connection_is_no_error_of_this_rank():
    gloo = "[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:42"
    assert is_lost_connection(RuntimeError(gloo)) and is_lost_connection(dist.DistNetworkError("reset"))
    assert not is_lost_connection(ValueError("connection")) and not is_lost_connection(RuntimeError("shape"))


def test_the_first_of_many_ranks_hears_all_in_two_requests(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "300")
    monkeypatch.setenv("RANK", "0")
    watchdog, asked = Watchdog(tmp_path, Comm()), []
    store = HashStore()
    store.compare_set("shutdown", "", NO_REASON)
    watchdog.store = recorded(store, asked)  # type: ignore[assignment]
    watchdog.exchange()
    asked.clear()
    watchdog.exchange()
    assert asked == ["set", "multi_get"] and len(watchdog.last) == 300


def recorded(store, asked):
    """A store that notes which of its methods are called."""

    class Recorded:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(store, name)

    return Recorded()


@pytest.mark.parametrize(
    ("world_size", "phase", "limit"), [("1", "data", 600), ("2", "data", 3), ("2", "validation", 600)]
)
def test_a_phase_has_the_limit_of_a_step_or_of_a_save(monkeypatch, tmp_path, world_size, phase, limit):
    """One process was ended while its store was asked again, and groups waited as long as a step may take: a
    rank that drew plots for two minutes ended the job.
    """
    monkeypatch.setenv("WORLD_SIZE", world_size)
    watchdog = Watchdog(tmp_path, Comm(timeout_seconds=600, train_timeout_seconds=3))
    watchdog.trained = True
    jobs.heartbeat.activity.start_phase("train", 2)
    with jobs.heartbeat.activity.phase(phase):
        assert watchdog.heartbeat().limit == limit
    assert watchdog.heartbeat().limit == 3 and watchdog.group_seconds > 600


@pytest.mark.parametrize("what", ["stall", pytest.param("leave", marks=pytest.mark.slow)])
def test_a_rank_that_stalls_or_leaves_is_named(tmp_path, what):
    started = time.monotonic()
    ended = launch(tmp_path, what)
    assert ended.returncode == 1 and time.monotonic() - started < 60
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("rossby: rank 1 (") and "in step 5" in lines[0], ended.stderr
    assert "Traceback" not in ended.stderr and "frame #" not in ended.stderr
    assert len([line for line in lines if line.startswith("rossby:")]) == 1
    if what == "stall":
        assert "in step 5, data: no progress for" in lines[0] and str(tmp_path / "hang") in lines[0]
        assert "time.sleep" not in (tmp_path / "hang/rank-0.txt").read_text()
        assert "in fail" in (tmp_path / "hang/rank-1.txt").read_text()


def test_after_a_stop_signal_a_silent_rank_is_dead_sooner(tmp_path):
    """The launcher sends it when another rank was killed; the others waited half a minute for its save."""
    watchdog = Watchdog(tmp_path, Comm())
    patient = watchdog.silence()
    watchdog.is_asked_to_stop = True
    assert watchdog.silence() == 15 < patient


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "x.zarr"), DataError("x.zarr: no")]
)
def test_status_has_the_exit_code_of_an_error(tmp_path, error):
    """Of a PermissionError on one rank it was 1, and the process ended with 2."""
    watchdog = Watchdog(tmp_path, Comm())
    watchdog.begin(3)
    watchdog.end_with(error)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["exit_code"] == 2 and status["message"].startswith("x.zarr: ")


def test_a_status_that_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "run").touch()
    watchdog = Watchdog(tmp_path / "run", Comm())
    watchdog.begin(0)
    watchdog.write_status(1, "failed")
    assert capsys.readouterr().err.count("status.json is not written") == 1
