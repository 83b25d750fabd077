"""What other profilers are given: ranges for Nsight, stacks and allocations, traces for other readers."""

import json
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from config import Profiling
from errors import ConfigError, DataError
from tests.recordings import two_steps_of_a_gpu
from tests.started_jobs import write_config
from traces import profiler as profilers
from traces.classes import COMMUNICATION
from traces.exposed import KEY, Exposed
from traces.holistic import analysis_of
from traces.profiler import Profiler, span


@pytest.fixture
def nsight(monkeypatch):
    """Every call that Nsight Systems would see, in order."""
    heard = []

    @contextmanager
    def nvtx(name):
        heard.append(f"({name}")
        yield
        heard.append(f"{name})")

    monkeypatch.setenv(profilers.NSIGHT, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: heard.append(f"({name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: heard.append(")"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: heard.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: heard.append("stop"))
    return heard


def steps(tmp_path: Path, settings: Profiling, number: int) -> None:
    with Profiler(tmp_path / "traces", settings, 0, 0) as profiler:
        for _ in range(number):
            with span("forward"):
                torch.ones(3).sum()
            profiler.step()


def test_nsight_records_the_steps_that_would_be_traced(tmp_path, nsight):
    """Of every 3 steps the last: 3 and 6; and no trace of torch's, whose profiler would be in its way."""
    steps(tmp_path, Profiling(enable_profiling=True, profile_freq=3, profile_steps=1), 6)
    forward = ["(forward", "forward)", ")"]
    plain, recorded = ["(step 1", *forward, "(step 2", *forward], ["start", "(step 3", *forward, "stop"]
    later = [word.replace("1", "4").replace("2", "5").replace("3", "6") for word in [*plain, *recorded]]
    assert nsight == [*plain, *recorded, *later, "(step 7"]
    assert not list((tmp_path / "traces").glob("*"))


def test_without_nsight_nothing_of_it_is_called(tmp_path, nsight, monkeypatch):
    monkeypatch.delenv(profilers.NSIGHT)
    steps(tmp_path, Profiling(), 2)
    assert nsight == []


def test_holistic_says_what_it_needs(tmp_path, monkeypatch):
    steps(tmp_path, Profiling(enable_profiling=True, profile_freq=2, profile_steps=1), 2)
    with pytest.raises(DataError, match="no kernels of a GPU, without which HolisticTraceAnalysis fails"):
        analysis_of(tmp_path)
    monkeypatch.setattr("traces.events.Trace.on_gpu", True)
    with pytest.raises(ConfigError, match="needs HolisticTraceAnalysis .*pip install"):
        analysis_of(tmp_path)


def found_by(exposed: Exposed) -> dict[str, float]:
    """Once its process has ended."""
    assert exposed.process
    exposed.process.wait(60)
    return exposed.take()


def test_exposed_communication_of_the_newest_trace(tmp_path, capfd):
    timeline, exposed = two_steps_of_a_gpu(tmp_path), Exposed()
    exposed.look_at(tmp_path / "of before")  # makes way for a newer one
    exposed.look_at(timeline.trace.path)
    part = timeline.by_class[COMMUNICATION] / timeline.step_milliseconds
    assert part > 0 and found_by(exposed) == {KEY: pytest.approx(part)}
    assert exposed.take() == {}
    exposed.look_at(tmp_path / "missing")
    assert found_by(exposed) == {} and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_run_of_two_ranks_says_what_of_its_communication_is_exposed(tmp_path, start_job):
    options = ["--profiling.enable_profiling", "true", "--profiling.profile_freq", "20"]
    job = start_job(write_config(tmp_path), tmp_path / "run", *options, NGPU="2")
    metrics, end = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and KEY in metrics.read_text()):
        assert time.monotonic() < end and job.process.poll() is None, job.output
        time.sleep(0.2)
    (line, *_) = [text for text in metrics.read_text().splitlines() if KEY in text]
    assert 0 < json.loads(line)[KEY] < 1
