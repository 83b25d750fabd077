"""Hand-written traces: every moment in one class, what a GPU waits for, and the operators of its kernels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import Recording, step_of_a_cpu, two_steps_of_a_gpu
from traces.events import read_trace
from traces.inspect_trace import operator_times, report
from traces.timeline import CLASSES, Segment, Timeline, build_timeline, fill, kernel_class, operator_class


@pytest.fixture
def gpu(tmp_path) -> Timeline:
    return two_steps_of_a_gpu(tmp_path)


def test_time_of_a_gpu_by_class(gpu):
    expected = dict.fromkeys(CLASSES, 0.0)
    expected |= {"GEMM": 0.3, "attention": 0.15, "norm, elementwise": 0.05, "optimiser": 0.04, "copies": 0.06}
    expected |= {"communication": 0.07, "data wait": 0.1, "idle": 0.23}
    assert gpu.by_class == pytest.approx(expected)
    assert gpu.step_milliseconds == pytest.approx(1.0) == sum(gpu.by_class.values())
    assert gpu.hidden_communication == pytest.approx(0.05)
    assert "communication: 0.07 ms a step exposed, 0.05 hidden" in report(gpu)


def test_what_a_gpu_waits_for_is_named(gpu):
    assert list(gpu.idle_by_cause) == ["wait of cudaStreamSynchronize (aten::item) after optimizer"]


def test_operators_of_a_gpu_have_the_time_of_their_kernels(gpu):
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
    (tmp_path / "traces").mkdir()
    timeline = trace.write(tmp_path / "traces/step-00000019-rank0.json")
    assert len(timeline.recorded_steps) == 1 and timeline.step_milliseconds == pytest.approx(1.0)


def test_time_of_a_cpu_by_class(tmp_path):
    trace = Recording()
    step_of_a_cpu(trace)
    timeline = trace.write(tmp_path / "cpu.json")
    milliseconds = {"GEMM": 900 + 300 + 800, "attention": 900, "norm, elementwise": 600, "copies": 90}
    milliseconds |= {"optimiser": 600, "communication": 500, "data wait": 1000, "log, save, validate": 500}
    milliseconds["idle"] = 10_000 - sum(milliseconds.values())
    assert timeline.by_class == pytest.approx({name: us / 1000 for name, us in milliseconds.items()})
    assert timeline.hidden_communication == pytest.approx(0.2)
    assert timeline.idle_by_cause["gap after optimizer"] == pytest.approx(2.5)
    assert sum(timeline.by_class.values()) == pytest.approx(timeline.recorded_steps[0])


def steps_with_a_save(trace: Recording) -> None:
    """Two steps of 1,000 us on a CPU, one with a line of a log and a save after it."""
    trace.span("ProfilerStep#7", 0, 1000)
    trace.add("aten::mm", 0, 900)
    trace.span("ProfilerStep#8", 1000, 3000)
    trace.add("aten::mm", 1000, 1900)
    trace.span("log", 1900, 1910)
    trace.span("checkpoint", 2000, 3000)
    trace.add("aten::copy_", 2000, 2500)


def test_a_save_counts_once_in_its_interval(tmp_path):
    """It counted as half a save a step: 500 us in place of 10, and the step took 1500 us in place of 1010."""
    trace = Recording()
    steps_with_a_save(trace)
    trace.write(tmp_path / "a.json")
    recorded, counted = (
        build_timeline(read_trace(tmp_path / "a.json"), intervals)
        for intervals in ({}, {"checkpoint": 100, "log": 1, "validation": 0})
    )
    assert recorded.by_class["log, save, validate"] == pytest.approx((1.0 + 0.01) / 2)
    assert recorded.step_milliseconds == pytest.approx(1.5)
    assert counted.by_class["log, save, validate"] == pytest.approx(1.0 / 100 + 0.01)
    assert counted.step_milliseconds == pytest.approx(1.015) == sum(counted.by_class.values())
    for name in set(CLASSES) - {"log, save, validate"}:
        assert counted.by_class[name] == recorded.by_class[name]
    assert "span checkpoint: one of 1.0 ms counts once in 100 steps" in report(counted)


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


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=12),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_no_moment_is_lost_or_given_twice(layer, lengths):
    free, start = [], 0
    for length in lengths:
        free.append(Segment(float(start), float(start + length)))
        start += length + (length % 2)
    segments = [Segment(float(a), float(a + n), "GEMM") for a, n in sorted(layer)]
    taken, left = fill(free, segments)
    moments = sorted((p.start, p.end) for p in [*taken, *left])
    assert all(first[1] <= second[0] for first, second in zip(moments, moments[1:], strict=False))
    assert sum(b - a for a, b in moments) == sum(p.end - p.start for p in free)
    covered = {m for a, n in layer for m in range(a, a + n)}
    inside = {m for p in free for m in range(int(p.start), int(p.end))}
    assert sum(p.end - p.start for p in taken) == len(covered & inside)


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
