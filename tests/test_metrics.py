"""Lines of metrics.jsonl, and peaks."""

import json
from types import SimpleNamespace

import pytest
import torch

from training.metrics import Metrics, dense_line, forget_after

CONTRACT = list[str](
    "step loss grad_norm lr samples_per_second step_seconds data_seconds memory_gib tflops mfu "
    "data_gb_per_second".split()
)


def log(folder, steps, resume_step=0, loss=1.0):
    metrics = Metrics(
        folder, resume_step=resume_step, steps=10, tensorboard=True, flops_per_sample=1e9, peak=0.0
    )
    for step in steps:
        metrics.count(8, SimpleNamespace(seconds=0.001, bytes=0))  # type: ignore[arg-type]
        metrics.log_step(step, torch.tensor(loss), torch.tensor(0.5), 1e-3, torch.device("cpu"))
    metrics.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_objects_have_the_keys_of_the_contract(one_rank, tmp_path):
    record = log(tmp_path, [1])[0]
    assert list(record) == CONTRACT
    assert record["mfu"] is None and record["samples_per_second"] > 0
    assert record["tflops"] == pytest.approx(record["samples_per_second"] * 1e9 / 1e12)
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_resumed_run_replaces_the_steps_it_repeats(one_rank, tmp_path):
    log(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    assert [r["step"] for r in log(tmp_path, [3, 4], resume_step=2)] == [1, 2, 3, 4]
    forget_after(tmp_path / "absent.jsonl", 0)


def test_not_a_number_becomes_null(one_rank, tmp_path):
    assert log(tmp_path, [1], loss=float("nan"))[0]["loss"] is None


def test_dense_line():
    record = dict(zip(CONTRACT, [10, 0.5, 1.0, 1e-3, 100.0, 0.1, 0.02, 1.5, 0.3, 0.4, 1.0], strict=True))
    assert "data wait 20.0%" in dense_line(record) and "mfu 40.0%" in dense_line(record)


def test_a_full_disk_costs_a_line_and_not_the_run(one_rank, tmp_path, caplog):
    metrics = Metrics(tmp_path, resume_step=0, steps=1, tensorboard=False, flops_per_sample=1.0, peak=0.0)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics.write({"step": 1, "loss": 1.0})
    assert "step 1 is missing from" in caplog.text
