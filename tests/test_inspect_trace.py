"""Traces: classes that add up to the step, on a CPU and on a GPU; stalls that are found and named."""

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from datasets.field_dataset import FieldDataset
from tests.recordings import two_steps_of_a_gpu
from tests.started_jobs import write_config
from traces.classes import COMPUTE
from traces.events import read_trace
from traces.inspect_trace import inspect, main
from traces.report import memory_table, ranks_table
from traces.timeline import Timeline, build_timeline
from traces.work import work_of
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


def test_memory_is_given_by_part_of_the_loop(tmp_path):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with record_function("ProfilerStep#0"):
            before = torch.ones(2**18)  # 1 MiB of float32
            with record_function("forward"):
                saved = torch.ones(2**21)
            with record_function("backward"):
                temporary = torch.ones(2**20)
                del temporary, saved
    recorded.export_chrome_trace(str(tmp_path / "a.json"))
    rows = [line.split() for line in memory_table(read_trace(tmp_path / "a.json")).splitlines()[1:]]
    found = {row[0]: (float(row[-2]), float(row[-1])) for row in rows}
    assert found["forward"] == (9.0, 8.0) and found["backward"] == (13.0, -8.0)
    assert before.nbytes == 2**20


def test_flops_are_those_of_torchs_counter(tmp_path):
    with FlopCounterMode(display=False) as counter:
        products().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        with record_function("ProfilerStep#0"):
            products().backward()
    recorded.export_chrome_trace(str(tmp_path / "a.json"))
    timeline = build_timeline(read_trace(tmp_path / "a.json"))
    found = {
        operator: work_of(operator) for operator in {p.operator for p in timeline.segments if p.operator}
    }
    # Torch 2.13 does not count the CPU's kernel, 2.15 counts the products that its backward repeats, too.
    counted = counter.get_flop_counts()["Global"].items()
    products_of_matrices = sum(number for operator, number in counted if "attention" not in str(operator))
    attention = (2 + 4) * 2 * (2 * 3 * 16 * 16 * 8)
    assert sum(work.flops for work in found.values() if work) == products_of_matrices + attention


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
    traced = "--profiling.enable_profiling true --profiling.profile_freq 6 --profiling.profile_steps 3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.batches.FieldDataset", SlowDataset)
        patch.setattr(Objective, "cut", cut_and_read)
        patch.setattr(Metrics, "count_step", wait_and_count)
        train(load_checked([*files, *settings.split(), *traced.split(), *options]))
    return folder / "run"


@pytest.fixture(scope="module")
def stalled(tmp_path_factory) -> Path:
    return run_with_stalls(tmp_path_factory.mktemp("stalled"))


def test_classes_of_a_run_add_up_to_its_steps(stalled):
    (timeline,) = inspect(stalled)
    assert len(timeline.windows) == 3 and timeline.trace.title.endswith("steps 4 to 6")
    steps = sum(step.end - step.start for step in timeline.trace.steps) / 3000
    assert sum(timeline.by_class.values()) == pytest.approx(steps, rel=1e-6)
    assert all(timeline.by_class[name] > 0 for name in COMPUTE)


def test_planted_stalls_are_found_and_named(stalled, capsys):
    (timeline,) = inspect(stalled)
    assert timeline.by_class["data wait"] > STALL * 1e3
    assert timeline.idle_by_cause["gap after optimizer"] > STALL * 1e3
    main([str(stalled)])
    told = capsys.readouterr().out
    assert "for data (span data): read ahead with more threads" in told
    assert "ms a step in a gap after optimizer" in told
    assert (stalled / "plots/trace-step-00000006-rank0.png").stat().st_size > 10_000


def test_the_rank_that_comes_last_waits_least(gpu):
    """A step of the trace has 120 us of a collective, hidden or not."""
    assert gpu.by_class["communication"] + gpu.hidden_communication == pytest.approx(0.12)
    ranks = [build_timeline(read_trace(gpu.trace.path)) for _ in range(12)]
    for number, timeline in enumerate(ranks):
        timeline.trace.rank, timeline.hidden_communication = number, 12.0 - number
    *_, times, last = ranks_table(ranks).splitlines()
    assert times.split()[:4] == ["hidden", "communication", "12.00", "11.00"] and last.startswith("rank 11 ")


# -- bad input

STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 5, "dur": 9}


def check_refused(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    """Exit code 2 and one line that names the first argument."""
    with pytest.raises(SystemExit) as error:
        main(argv)
    message = capsys.readouterr().err
    assert error.value.code == 2 and message.startswith("rossby: ") and message.count("\n") == 1
    assert not argv or argv[0] in message


def test_bad_input_is_one_line(tmp_path, capsys):
    for argv in ([], [str(tmp_path)], [str(tmp_path / "absent")], ["--color", "x"]):
        check_refused(argv, capsys)
    whole = gzip.compress(b'{"traceEvents": []}' * 100)
    (tmp_path / "a.json.gz").write_bytes(whole[: len(whole) // 2])
    check_refused([str(tmp_path / "a.json.gz")], capsys)


DAMAGES = [  # ... removes a key
    *({"dur": value} for value in (None, -5, 0)),
    {"ts": "NaN"},
    {"name": "forward"},
    {"name": "ProfilerStep#one"},
    *({key: ...} for key in ("name", "pid", "tid", "ts", "dur")),
]


def damaged(changes: dict) -> str:
    changed = {key: value for key, value in {**STEP, **changes}.items() if value is not ...}
    return json.dumps({"traceEvents": [changed]})


def test_what_is_no_trace_is_one_line(tmp_path, capsys):
    texts = ['{"traceEvents": [', '{"traceEvents": []}', '{"loss": 1}', "[]", *map(damaged, DAMAGES)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.json").write_text(text)
        check_refused([str(tmp_path / f"{number}.json")], capsys)
