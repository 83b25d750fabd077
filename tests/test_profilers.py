"""Recordings of the profiler, on a schedule, and readers of other programs."""

import gzip
import json
from pathlib import Path

import torch

from config import Config, Job, Profiling
from jobs.heartbeat import activity, span
from training.metrics import Profiler


def steps(folder: Path, number: int, **settings: int | bool) -> None:
    config = Config(job=Job(dump_folder=str(folder)), profiling=Profiling(**settings))  # type: ignore[arg-type]
    with Profiler(config) as profiler:
        for step in range(1, number + 1):
            with span("forward"):
                torch.ones(3).sum()
            profiler.step(step)


def test_a_recording_has_the_spans_of_its_steps(one_rank, tmp_path):
    """Of every 3 steps the last: 3 and 6."""
    steps(tmp_path, 7, enable_profiling=True, profile_freq=3, profile_steps=1)
    names = ["step-00000003-rank0.json.gz", "step-00000006-rank0.json.gz"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == names
    events = json.loads(gzip.open(tmp_path / "traces" / names[1]).read())["traceEvents"]
    assert [event["name"] for event in events if event["name"] == "forward"] == ["forward"]


def test_a_trace_that_cannot_be_written_ends_no_run(one_rank, tmp_path, monkeypatch, caplog):
    def fail(self: object, path: str) -> None:
        Path(path).write_text("torn")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", fail)
    steps(tmp_path, 4, enable_profiling=True, profile_freq=3, profile_steps=1)
    assert "No space left" in caplog.text and not list((tmp_path / "traces").iterdir())


def test_nothing_is_written_while_it_is_disabled(one_rank, tmp_path):
    steps(tmp_path, 3)
    assert not (tmp_path / "traces").exists()


def test_a_span_is_the_phase_of_this_process():
    with span("data"):
        assert activity.phases[-1] == "data"
    assert activity.phases[-1] != "data"
