"""Hand-written traces: every moment in one class, what a GPU waits for, and how far from its floor it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import Recording, step_of_a_cpu, two_steps_of_a_gpu
from traces.advice import advice
from traces.classes import CLASSES, kernel_class, operator_class
from traces.events import Interval
from traces.report import report
from traces.timeline import Segment, Timeline, fill
from traces.work import rates_of, work_by_class, work_of


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
    assert "communication: 0.07 ms a step exposed, 0.05 hidden" in report(gpu, rates_of(gpu))


def test_what_a_gpu_waits_for_is_named(gpu):
    assert list(gpu.idle_by_cause) == ["wait of cudaStreamSynchronize (aten::item) after optimizer"]
    text = advice(gpu, rates_of(gpu))
    assert text.startswith("The GPU idles 0.2 ms a step in a wait of cudaStreamSynchronize (aten::item)")
    assert "metrics.log_freq" in text and "data.num_workers" in text and "(up to 23% of a step)" in text


def test_floor_of_a_gpu_is_the_measured_rate(gpu):
    """2 x 1000 x 395 x 1000 FLOPs at 790 TFLOP/s: 1 us."""
    rates = rates_of(gpu)
    assert rates.flops == 790e12
    gemm = work_by_class(gpu, rates)["GEMM"]
    assert gemm.work.flops == 2 * 1000 * 395 * 1000 and gemm.milliseconds == pytest.approx(0.2)
    assert gemm.floor is None  # the other multiplication does not say its shapes
    known = [operator for operator in {p.operator for p in gpu.segments} if operator and work_of(operator)]
    assert len(known) == 2


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
    lengths = [window.end - window.start for window in timeline.windows]
    assert lengths == pytest.approx([650, 600])
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
    assert len(timeline.windows) == 1 and timeline.step_milliseconds == pytest.approx(1.0)


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
    text = advice(timeline, rates_of(timeline))
    assert "gap after optimizer" in text and "data.num_workers" in text


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=12),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_no_moment_is_lost_or_given_twice(layer, lengths):
    free, start = [], 0
    for length in lengths:
        free.append(Interval(float(start), float(start + length)))
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
