"""Lines of metrics.jsonl, peaks, and recordings of the profiler."""

import errno
import gzip
import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from config import Config, Job, Profiling, Training
from config import Metrics as Settings
from jobs.durable_files import Journal, read_records
from jobs.heartbeat import span
from training.metrics import Metrics, Profiler, peak_tflops
from training.step import StepResult

CONTRACT = (
    "step loss grad_norm lr samples_per_second step_seconds data_seconds memory_gib tflops mfu epoch".split()
)
CONTRACT += ["skipped_steps"]


def open_metrics(folder: Path, resume_step: int = 0, **settings: Any) -> Metrics:
    """Metrics of a run of 10 steps whose batches have 8 samples, worth three forward passes each."""
    config = Config(
        job=Job(dump_folder=str(folder)), metrics=Settings(**settings), training=Training(steps=10)
    )
    model = SimpleNamespace(device=torch.device("cpu"), mesh=SimpleNamespace(degrees=SimpleNamespace(dp=1)))
    assembly = SimpleNamespace(model=model, meta_model=SimpleNamespace(flops=lambda: 1e9))
    progress, bad_steps = SimpleNamespace(step=resume_step), SimpleNamespace(skipped=0)
    state = SimpleNamespace(progress=progress, bad_steps=bad_steps)
    run: Any = SimpleNamespace(assembly=assembly, state=state, learning_rate=lambda step: 1e-3)
    batches: Any = SimpleNamespace(seconds=0.001, epoch=1.5, passes=3, global_batch=8)
    metrics = Metrics(config, run, batches)
    metrics.restart(resume_step)
    return metrics


def log(folder: Path, steps: list[int], resume_step: int = 0, loss: float = 1.0) -> list[dict[str, Any]]:
    metrics = open_metrics(folder, resume_step)
    for step in steps:
        metrics.count_step()
        metrics.log_step(step, StepResult(torch.tensor(loss), torch.tensor(0.5)))
    metrics.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_objects_have_the_keys_of_the_contract(one_rank, tmp_path):
    record = log(tmp_path, [1], loss=float("nan"))[0]
    assert list(record) == CONTRACT
    assert record["mfu"] is None is record["loss"] and record["samples_per_second"] > 0
    assert record["tflops"] == pytest.approx(record["samples_per_second"] * 3e9 / 1e12)  # three passes
    assert list((tmp_path / "tensorboard").iterdir())


def test_measured_steps_are_compared_with_the_plan_once(one_rank, tmp_path, caplog):
    """After the steps that warm up; memory is compared on GPUs alone."""
    metrics = open_metrics(tmp_path, resume_step=3)
    metrics.planned = (0.5, 0.0)
    with caplog.at_level("INFO"):
        for step in (4, 22, 23, 24):
            metrics.count_step()
            metrics.log_step(step, StepResult(torch.tensor(1.0), torch.tensor(0.5)))
            assert bool(metrics.comparison) == (step >= 23)
    metrics.close()
    record = next(r for r in read_records(tmp_path / "metrics.jsonl") if r["step"] == 23)
    expected = {"step_seconds": record["step_seconds"], "planned_step_seconds": 0.5}
    assert metrics.comparison == expected
    assert sum("0.500 planned" in line for line in caplog.messages) == 1


def test_lines_on_a_terminal_are_seconds_apart_but_for_the_last(one_rank, tmp_path, caplog):
    with caplog.at_level("INFO"):
        log(tmp_path, [7, 8, 9, 10])
    assert [line.split("/")[0] for line in caplog.messages if "loss" in line] == ["step  7", "step 10"]


def test_a_resumed_run_replaces_the_steps_it_repeats(one_rank, tmp_path):
    log(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    assert [r["step"] for r in log(tmp_path, [3, 4], resume_step=2)] == [1, 2, 3, 4]
    Journal(tmp_path / "absent.jsonl").forget_after(0)


def test_a_peak_is_that_of_the_device(monkeypatch):
    peaks = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 NVL": 835, "NVIDIA GB200": 2500}
    for name, peak in (peaks | {"NVIDIA A100-SXM4-80GB": 312, "NVIDIA RTX A1000": 0}).items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_tflops(torch.device("cuda", 0)) == peak


def test_torn_lines_are_left_out_and_said(tmp_path, caplog):
    """Incomplete lines after a full disk and a kill: in the middle, at the end, without an end of line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n[1]\n{"step": 3, "loss": 1.0}\n{"step": 4')
    assert [record["step"] for record in read_records(path)] == [1, 3] and "3 incomplete lines" in caplog.text
    Journal(path).forget_after(2)
    assert path.read_text() == '{"step": 1, "loss": 2.0}\n'


def test_a_full_disk_keeps_the_records_of_steps_that_are_done_again(tmp_path, monkeypatch, caplog):
    path, text = tmp_path / "metrics.jsonl", '{"step": 1}\n{"step": 2}\n'
    path.write_text(text)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("jobs.durable_files.write_durably", full)
    assert Journal(path).forget_after(1) == 2 and path.read_text() == text
    assert "No space left on device" in caplog.text


def test_a_full_disk_loses_no_line(tmp_path, caplog):
    """A line that fits only in part is not written at all."""
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = Journal(path)
    journal.write({"step": 1})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        for step in (2, 3):
            journal.write({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b'{"step": 1}\n' and caplog.text.count("File too large") == 1
    journal.write({"step": 4})
    journal.close()
    assert path.read_bytes() == b"".join(b'{"step": %d}\n' % step for step in (1, 2, 3, 4))


# -- recordings of the profiler, on a schedule


def steps(folder: Path, number: int, **settings: int | bool) -> None:
    config = Config(job=Job(dump_folder=str(folder)), profiling=Profiling(**settings))  # type: ignore[arg-type]
    with Profiler(config) as profiler:
        for step in range(1, number + 1):
            with span("forward"):
                torch.ones(3).sum()
            profiler.step(step)


def test_a_recording_has_the_spans_of_its_steps(one_rank, tmp_path):
    """Of every 4 steps the last three: 2 to 4 and 6 to 8."""
    steps(tmp_path, 8, enable_profiling=True, profile_freq=4)
    names = ["step-00000004-rank0.json.gz", "step-00000008-rank0.json.gz"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == names
    events = json.loads(gzip.open(tmp_path / "traces" / names[1]).read())["traceEvents"]
    assert [event["name"] for event in events if event["name"] == "forward"] == ["forward"] * 3


def test_a_trace_that_cannot_be_written_ends_no_run(one_rank, tmp_path, monkeypatch, caplog):
    def fail(self: object, path: str) -> None:
        Path(path).write_text("torn")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", fail)
    steps(tmp_path, 4, enable_profiling=True, profile_freq=4)
    assert "No space left" in caplog.text and not list((tmp_path / "traces").iterdir())
