"""Traces: every moment in one class, on a CPU and on a GPU; stalls that are found and named; bad input.

Most are written by hand, in microseconds; one is of a run with stalls planted in it.
"""

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from datasets.loader import FieldDataset
from tests.planned import run_train
from tests.started_jobs import run_options, write_config
from traces.events import read_trace
from traces.inspect_trace import inspect, main, operator_times, ranks_table, report
from traces.timeline import CLASSES, COMPUTE, Timeline, build_timeline, kernel_class, operator_class
from training.metrics import Metrics
from training.objective import Objective

STALL = 0.03  # seconds that are planted in each step, thrice
MAIN, AUTOGRAD = 1, 2  # threads


class Recording:
    """Events as torch.profiler writes them."""

    def __init__(self, **record) -> None:
        self.record, self.events, self.launches = {"traceEvents": [], **record}, [], 0

    def add(self, name, start, end, cat="cpu_op", tid=MAIN, pid=10, **args) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": 1e12 + start}
        self.events.append({**event, "dur": end - start, "args": args})

    def span(self, name, start, end, tid=MAIN) -> None:
        self.add(name, start, end, "user_annotation", tid)

    def launch(self, op, at, kernel, start, end, stream=7, tid=MAIN, shapes=(), kind="kernel") -> None:
        """An operator of 10 us that launches a kernel."""
        self.launches += 1
        arguments = {"Input Dims": list(shapes), "Input type": ["c10::BFloat16"] * len(shapes)}
        self.add(op, at, at + 10, tid=tid, **arguments)
        self.add("cudaLaunchKernel", at + 2, at + 6, "cuda_runtime", tid, correlation=self.launches)
        self.add(kernel, start, end, kind, stream, pid=0, correlation=self.launches, device=0)

    def write(self, path: Path) -> Timeline:
        path.write_text(json.dumps({**self.record, "traceEvents": self.events}))
        return build_timeline(read_trace(path), {})


@pytest.fixture
def gpu(tmp_path) -> Timeline:
    """Two steps of 1,000 us: 100 waiting for data, 200 + 100 GEMM, 150 attention, 50 elementwise, 40 the
    optimiser, 60 copies, 120 of a collective, of which 50 beside the GEMM; then the host waits, and the GPU
    is idle after it.
    """
    trace = Recording(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    for at in (0.0, 1000.0):
        trace.span(f"ProfilerStep#{at / 1000:.0f}", at, at + 1000)
        trace.span("data", at, at + 100)
        trace.launch("aten::copy_", at + 95, "Memcpy HtoD", at + 100, at + 160, kind="gpu_memcpy")
        trace.span("forward", at + 110, at + 200)
        trace.launch("aten::mm", at + 120, "nvjet_hsh", at + 160, at + 360, shapes=[[1000, 395], [395, 1000]])
        sdpa = "aten::scaled_dot_product_attention"
        trace.launch(sdpa, at + 140, "cudnn_generated_fort_native_sdpa", at + 360, at + 510)
        trace.launch("Torch-Compiled Region", at + 160, "triton_poi_fused_gelu_0", at + 510, at + 560)
        trace.span("backward", at + 200, at + 300)
        trace.launch("aten::mm", at + 210, "nvjet_hsh", at + 560, at + 660, tid=AUTOGRAD)
        nccl, op = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "c10d::_reduce_scatter_base_"
        trace.launch(op, at + 230, nccl, at + 610, at + 730, stream=20, tid=AUTOGRAD)
        trace.span("optimizer", at + 300, at + 400)
        adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::Fused<float>>"
        trace.launch("aten::_fused_adamw_", at + 310, adam, at + 730, at + 770)
        trace.add("aten::item", at + 410, at + 775)
        trace.add("cudaStreamSynchronize", at + 415, at + 772, "cuda_runtime")
    return trace.write(tmp_path / "step-00000002-rank0.json")


def test_time_of_a_gpu_by_class(gpu):
    expected = dict.fromkeys(CLASSES, 0.0)
    expected |= {"GEMM": 0.3, "attention": 0.15, "norm, elementwise": 0.05, "optimiser": 0.04, "copies": 0.06}
    expected |= {"communication": 0.07, "data wait": 0.1, "idle": 0.23}
    assert gpu.by_class == pytest.approx(expected)
    assert gpu.step_milliseconds == pytest.approx(1.0) == sum(gpu.by_class.values())
    assert gpu.hidden_communication == pytest.approx(0.05)
    assert "communication: 0.07 ms a step exposed, 0.05 hidden" in report(gpu)
    assert list(gpu.idle_by_cause) == ["wait of cudaStreamSynchronize (aten::item) after optimizer"]
    # Operators have the time of their kernels.
    times = operator_times(gpu.trace)
    assert times["aten::mm"].self_ms == pytest.approx(2 * (0.2 + 0.1)) and times["aten::mm"].calls == 4
    assert times["aten::item"].self_ms == 0
    longest = report(gpu).partition("longest operators")[2].splitlines()[1].split()
    assert longest == ["aten::mm", "0.60", "41.7%", "0.60", "4"]


def test_a_kernel_that_was_launched_in_time_is_no_fault_of_the_host(tmp_path):
    trace = Recording()
    trace.span("ProfilerStep#0", 0, 1000)
    trace.launch("aten::mm", 10, "sm90_xmma_gemm", 100, 400)
    trace.launch("aten::mm", 30, "sm90_xmma_gemm", 500, 1000)
    idle = trace.write(tmp_path / "a.json").idle_by_cause
    assert idle["launched, not yet started"] == pytest.approx(0.184)  # 16 to 100, and 400 to 500
    assert idle["Python and dispatch at the start of the step"] == pytest.approx(0.016)


def test_steps_of_a_gpu_end_when_their_kernels_have_ended(tmp_path):
    """The host runs ahead: it has left two steps of 600 us of kernels each after 200 us."""
    trace = Recording()
    for number in range(2):
        trace.span(f"ProfilerStep#{number}", 100 * number, 100 * (number + 1))
        trace.launch("aten::mm", 100 * number + 10, "gemm", 50 + 600 * number, 650 + 600 * number)
    timeline = trace.write(tmp_path / "a.json")
    assert timeline.recorded_steps == pytest.approx([0.65, 0.6])
    assert timeline.by_class["GEMM"] == pytest.approx(0.6)
    assert timeline.by_class["idle"] == pytest.approx(0.025)


def test_a_step_that_the_end_of_the_loop_cut_off_is_left_out(tmp_path):
    """It was averaged in: 500 us a step in place of 1000."""
    trace = Recording()
    trace.span("ProfilerStep#17", 0, 1000)
    trace.launch("aten::mm", 10, "gemm", 100, 900)
    trace.span("ProfilerStep#18", 1000, 1002)
    timeline = trace.write(tmp_path / "a.json")
    assert len(timeline.recorded_steps) == 1 and timeline.step_milliseconds == pytest.approx(1.0)


def test_time_of_a_cpu_by_class(tmp_path):
    """10,000 us on three threads."""
    trace = Recording()
    trace.span("ProfilerStep#7", 0, 10_000)
    trace.span("data", 0, 1000)
    trace.span("enumerate(DataLoader)#_StatefulMultiProcessingDataLoaderIter.__next__", 0, 900)
    trace.add("aten::item", 10, 20)  # the sampler's: never on a device
    trace.span("forward", 1000, 4000)
    trace.add("aten::linear", 1000, 2000)
    trace.add("aten::addmm", 1100, 2000)  # 100 us of linear are dispatch
    trace.add("aten::copy_", 1100, 1300)  # its bias: GEMM
    trace.add("aten::matmul", 2000, 3000)
    trace.add("aten::bmm", 2000, 2900)
    trace.add("aten::reshape", 2900, 3000)
    trace.add("aten::copy_", 2910, 3000)
    trace.span("## Call CompiledFxGraph f ##", 3000, 3900)
    trace.add("aten::addmm", 3100, 3400)
    trace.span("backward", 4000, 6000)
    trace.add("autograd::engine::evaluate_function: MmBackward0", 4100, 5000, tid=AUTOGRAD)
    trace.add("aten::mm", 4200, 5000, tid=AUTOGRAD)
    trace.span("gloo:all_reduce", 4800, 5500, tid=3)
    trace.span("optimizer", 6000, 7000)
    trace.add("aten::_fused_adamw_", 6100, 6600)
    trace.add("aten::item", 6150, 6160)
    trace.add("aten::mul_", 6600, 6700)
    trace.add("aten::item", 7000, 7010)  # ours
    trace.add("aten::_local_scalar_dense", 7001, 7009)
    trace.span("log", 9500, 10_000)
    timeline = trace.write(tmp_path / "cpu.json")
    milliseconds = {"GEMM": 900 + 300 + 800, "attention": 900, "norm, elementwise": 600, "copies": 90}
    milliseconds |= {"optimiser": 600, "communication": 500, "data wait": 1000, "log, save, validate": 500}
    milliseconds["idle"] = 10_000 - sum(milliseconds.values())
    assert timeline.by_class == pytest.approx({name: us / 1000 for name, us in milliseconds.items()})
    assert timeline.hidden_communication == pytest.approx(0.2)
    assert timeline.idle_by_cause["gap after optimizer"] == pytest.approx(2.5)
    assert sum(timeline.by_class.values()) == pytest.approx(timeline.recorded_steps[0])


def test_a_save_counts_once_in_the_interval_of_its_run(tmp_path, capsys):
    """It counted as half a save a step: 500 us in place of 10, and the step took 1500 us in place of 1010. A
    file elsewhere counts as it was recorded.
    """
    trace = Recording()
    trace.span("ProfilerStep#7", 0, 1000)
    trace.add("aten::mm", 0, 900)
    trace.span("ProfilerStep#8", 1000, 3000)
    trace.add("aten::mm", 1000, 1900)
    trace.span("log", 1900, 1910)
    trace.span("checkpoint", 2000, 3000)
    trace.add("aten::copy_", 2000, 2500)
    (tmp_path / "traces").mkdir()
    recorded, path = trace.write(tmp_path / "a.json"), tmp_path / "traces/step-00000100-rank0.json.gz"
    path.write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    settings = "[checkpoint]\ninterval = 100\n[metrics]\nlog_freq = 1\n"
    (tmp_path / "config.toml").write_text(settings)
    (counted,) = inspect(tmp_path)
    assert recorded.by_class["log, save, validate"] == pytest.approx((1.0 + 0.01) / 2)
    assert recorded.step_milliseconds == pytest.approx(1.5)
    assert counted.by_class["log, save, validate"] == pytest.approx(1.0 / 100 + 0.01)
    assert counted.step_milliseconds == pytest.approx(1.015) == sum(counted.by_class.values())
    for name in set(CLASSES) - {"log, save, validate"}:
        assert counted.by_class[name] == recorded.by_class[name]
    assert "span checkpoint: one of 1.0 ms counts once in 100 steps" in report(counted)
    (tmp_path / "config.toml").write_text(settings.replace("100", "'often'"))
    check_refused([str(tmp_path)], capsys, "checkpoint.interval")


def test_a_save_on_a_gpu_counts_once_in_its_interval(tmp_path):
    """Its kernels and the time in which it keeps the GPU waiting."""
    trace = Recording()
    for number in range(2):
        trace.span(f"ProfilerStep#{number}", 1000 * number, 1000 * (number + 1))
        trace.launch("aten::mm", 1000 * number + 10, "gemm", 1000 * number + 20, 1000 * number + 600)
    trace.span("checkpoint", 1600, 2000)
    trace.launch("aten::copy_", 1700, "Memcpy DtoH", 1710, 1800, kind="gpu_memcpy")
    trace.launch("aten::copy_", 1980, "elementwise_kernel", 1988, 2000)
    trace.write(tmp_path / "a.json")
    timeline = build_timeline(read_trace(tmp_path / "a.json"), {"checkpoint": 50})
    save = timeline.by_class["log, save, validate"]
    milliseconds, steps = timeline.spread_spans["checkpoint"]
    assert steps == 50 and save == pytest.approx(milliseconds / 50)
    assert 0.3 < milliseconds <= 0.4


OPERATORS = {
    "GEMM": "aten::addmm aten::_scaled_mm aten::convolution_backward",
    "attention": "aten::bmm aten::_scaled_dot_product_flash_attention_for_cpu_backward aten::_softmax",
    "norm, elementwise": "aten::native_layer_norm_backward aten::sum",
    "copies": "aten::to fsdp::split_with_sizes_copy",
    "communication": "c10d::allreduce_ _c10d_functional::wait_tensor",
    "optimiser": "aten::_fused_adamw_",
    None: "aten::linear aten::transpose aten::view AddmmBackward0 autograd::engine::evaluate_function",
}
KERNELS = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)": "GEMM",
    "flash_fwd_kernel": "attention",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDA>": "norm, elementwise",
    "triton_per_fused_native_layer_norm_2": "norm, elementwise",
    "Memcpy DtoH (Device -> Pageable)": "copies",
}


def test_classes_of_operators_and_kernels():
    for expected, names in OPERATORS.items():
        assert {operator_class(name) for name in names.split()} == {expected}
    assert {name: kernel_class(name) for name in KERNELS} == KERNELS


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


@pytest.fixture(scope="module")
def stalled(tmp_path_factory) -> Path:
    """A run with a sleep in its loader, one in its loop, and a value read in each step; its folder."""
    folder = tmp_path_factory.mktemp("stalled")
    cut, count = Objective.cut, Metrics.count_step

    def cut_and_read(self, window, *others):
        float(window.nansum())
        return cut(self, window, *others)

    def wait_and_count(self):
        time.sleep(STALL)
        return count(self)

    settings = "--training.steps 6 --checkpoint.enable false --metrics.log_freq 100"
    traced = "--profiling.enable_profiling true --profiling.profile_freq 6"
    words = run_options(write_config(folder), folder / "run", *settings.split(), *traced.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.FieldDataset", SlowDataset)
        patch.setattr(Objective, "cut", cut_and_read)
        patch.setattr(Metrics, "count_step", wait_and_count)
        run_train(*words)
    return folder / "run"


def test_planted_stalls_are_found_and_named(stalled, capsys):
    (timeline,) = inspect(stalled)
    assert len(timeline.recorded_steps) == 3 and timeline.trace.title.endswith("steps 4 to 6")
    steps = sum(step.end - step.start for step in timeline.trace.steps) / 3000
    assert sum(build_timeline(timeline.trace, {}).by_class.values()) == pytest.approx(steps, rel=1e-6)
    assert all(timeline.by_class[name] > 0 for name in COMPUTE)
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
    texts = ["", '{"traceEvents": [', '{"traceEvents": []}', '{"loss": 1}', "[]", "[" * 100_000]
    whole = gzip.compress(b'{"traceEvents": []}' * 100)
    contents = {f"{number}.json": text.encode() for number, text in enumerate(texts)}
    contents |= {"short.json.gz": whole[: len(whole) // 2], "a.json.gz": whole[:12] + 8 * b"*" + whole[20:]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        check_refused([str(tmp_path / name)], capsys)


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
