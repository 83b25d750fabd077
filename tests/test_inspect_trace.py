"""Traces: classes that add up to the step, on a CPU and on a GPU; stalls that are found and named."""

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from datasets.loader import FieldDataset
from tests.recordings import Recording, two_steps_of_a_gpu
from tests.started_jobs import write_config
from traces.events import read_trace
from traces.inspect_trace import inspect, main, operator_times, ranks_table
from traces.timeline import COMPUTE, Timeline, build_timeline
from train import train
from training.config_checks import load_checked
from training.metrics import Metrics
from training.objective import Objective

STALL = 0.03  # seconds that are planted in each step, thrice


@pytest.fixture
def gpu(tmp_path) -> Timeline:
    return two_steps_of_a_gpu(tmp_path)


def products() -> torch.Tensor:
    """Of every kind that a model here has, forward and backward."""
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    weights, bias = torch.randn(8, 7, requires_grad=True), torch.randn(7)
    linear = torch.addmm(bias, attended.reshape(-1, 8), weights)
    return linear.sum() + torch.bmm(query[0], query[1].mT).sum()


def test_operator_times_are_those_of_key_averages(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        with record_function("ProfilerStep#0"):
            products().backward()
    recorded.export_chrome_trace(str(tmp_path / "a.json"))
    times = operator_times(read_trace(tmp_path / "a.json"))
    averages = {row.key: row for row in recorded.key_averages()}
    for name, operator in times.items():
        row = averages[name]  # in microseconds
        assert operator.calls == row.count
        assert operator.total_ms == pytest.approx(row.cpu_time_total / 1000, abs=1e-3)
        assert operator.self_ms == pytest.approx(row.self_cpu_time_total / 1000, abs=1e-3)
    assert {"aten::addmm", "aten::bmm", "aten::mm"} <= set(times)


# -- a run as it is, with stalls planted in it


class SlowDataset(FieldDataset):
    def read(self, *arguments, **options):  # once a batch, in the thread that takes it
        time.sleep(STALL)
        return super().read(*arguments, **options)


def run_with_stalls(folder: Path, *options: str) -> Path:
    """A run with a sleep in its loader, one in its loop, and a value read in each step; its folder."""
    cut, count = Objective.cut, Metrics.count_step

    def cut_and_read(self, window, *others):
        float(window.nansum())
        return cut(self, window, *others)

    def wait_and_count(self):
        time.sleep(STALL)
        return count(self)

    files = ["--job.config_file", str(write_config(folder)), "--job.dump_folder", str(folder / "run")]
    settings = "--training.steps 6 --checkpoint.enable false --metrics.log_freq 100"
    traced = "--profiling.enable_profiling true --profiling.profile_freq 6"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.FieldDataset", SlowDataset)
        patch.setattr(Objective, "cut", cut_and_read)
        patch.setattr(Metrics, "count_step", wait_and_count)
        train(load_checked([*files, *settings.split(), *traced.split(), *options]))
    return folder / "run"


@pytest.fixture(scope="module")
def stalled(tmp_path_factory) -> Path:
    return run_with_stalls(tmp_path_factory.mktemp("stalled"))


def test_classes_of_a_run_add_up_to_its_steps(stalled):
    (timeline,) = inspect(stalled)
    assert len(timeline.recorded_steps) == 3 and timeline.trace.title.endswith("steps 4 to 6")
    steps = sum(step.end - step.start for step in timeline.trace.steps) / 3000
    assert sum(build_timeline(timeline.trace, {}).by_class.values()) == pytest.approx(steps, rel=1e-6)
    assert all(timeline.by_class[name] > 0 for name in COMPUTE)


def test_planted_stalls_are_found_and_named(stalled, capsys):
    (timeline,) = inspect(stalled)
    assert timeline.by_class["data wait"] > STALL * 1e3
    assert timeline.idle_by_cause["gap after optimizer"] > STALL * 1e3
    main([str(stalled)])
    printed = capsys.readouterr().out
    assert "data wait" in printed and "gap after optimizer" in printed
    assert printed.partition("longest operators")[2].count("aten::") > 5


def test_the_rank_that_comes_last_waits_least(gpu, tmp_path):
    """A step of the trace has 120 us of a collective, hidden or not."""
    assert gpu.by_class["communication"] + gpu.hidden_communication == pytest.approx(0.12)
    path = tmp_path / "step-00000002-rank0.json"
    ranks = [build_timeline(read_trace(path), {}) for _ in range(12)]
    for number, timeline in enumerate(ranks):
        timeline.trace.rank, timeline.hidden_communication = number, 12.0 - number
    *_, times, last = ranks_table(ranks).splitlines()
    assert times.split()[:4] == ["hidden", "communication", "12.00", "11.00"] and last.startswith("rank 11 ")


# -- bad input


def check_refused(argv: list[str], capsys: pytest.CaptureFixture, word: str = "") -> None:
    """Exit code 2 and one line that has a word, or the first argument."""
    with pytest.raises(SystemExit) as error:
        main(argv)
    message = capsys.readouterr().err
    assert error.value.code == 2 and message.startswith("rossby: ") and message.count("\n") == 1
    assert (word or "".join(argv[:1])) in message


def test_bad_input_is_one_line(tmp_path, capsys):
    for argv in ([], [str(tmp_path)], [str(tmp_path / "absent")], ["--color", "x"]):
        check_refused(argv, capsys)
    whole = gzip.compress(b'{"traceEvents": []}' * 100)
    (tmp_path / "a.json.gz").write_bytes(whole[: len(whole) // 2])
    check_refused([str(tmp_path / "a.json.gz")], capsys)


def test_what_is_no_trace_is_one_line(tmp_path, capsys):
    texts = ["", '{"traceEvents": [', '{"traceEvents": []}', '{"loss": 1}', "[]", "[" * 100_000]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.json").write_text(text)
        check_refused([str(tmp_path / f"{number}.json")], capsys)
    changed = bytearray(gzip.compress(b'{"traceEvents": []}' * 100))
    changed[12:20] = b"********"
    (tmp_path / "a.json.gz").write_bytes(changed)
    check_refused([str(tmp_path / "a.json.gz")], capsys)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("nvjet_hsh", "correlation", []),
        ("nvjet_hsh", "ts", float("nan")),
        ("aten::mm", "dur", -5),
        ("aten::mm", "dur", "x"),
        ("", "rank", []),
    ],
)
def test_fields_of_wrong_types_are_one_line(gpu, tmp_path, capsys, name, field, value):
    """A list as correlation or rank was a traceback, as it cannot be hashed."""
    content = json.loads((tmp_path / "step-00000002-rank0.json").read_text())
    content["distributedInfo"] = {"rank": 1, "world_size": 2}
    target = next((e for e in content["traceEvents"] if e["name"] == name), content["distributedInfo"])
    (target["args"] if field == "correlation" else target)[field] = value
    (tmp_path / "a.json").write_text(json.dumps(content))
    check_refused([str(tmp_path / "a.json")], capsys)


def test_the_interval_of_saves_is_that_of_the_run(tmp_path, capsys):
    """A file elsewhere counts as it was recorded."""
    trace = Recording()
    trace.span("ProfilerStep#0", 0, 3000)
    trace.add("aten::mm", 0, 1000)
    trace.span("checkpoint", 1000, 3000)
    (tmp_path / "traces").mkdir()
    recorded = trace.write(tmp_path / "traces/step-00000100-rank0.json")
    text = (tmp_path / "traces/step-00000100-rank0.json").read_bytes()
    (tmp_path / "traces/step-00000100-rank0.json.gz").write_bytes(gzip.compress(text))
    (tmp_path / "config.toml").write_text("[checkpoint]\ninterval = 100\n")
    assert recorded.step_milliseconds == pytest.approx(3.0)
    (timeline,) = inspect(tmp_path)
    assert timeline.step_milliseconds == pytest.approx(1.02)
    (tmp_path / "config.toml").write_text("[checkpoint]\ninterval = 'often'\n")
    check_refused([str(tmp_path)], capsys, "checkpoint.interval")
