"""Traces written by hand, in microseconds, of a GPU and of a CPU."""

import json
from pathlib import Path

from traces.events import read_trace
from traces.timeline import Timeline, build_timeline

MAIN, AUTOGRAD = 1, 2  # threads


class Recording:
    """Collects events and writes them as torch.profiler does."""

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


def step_of_a_gpu(trace: Recording, at: float) -> None:
    """1,000 us: 100 waiting for data, 200 + 100 GEMM, 150 attention, 50 elementwise, 40 optimiser, 60 copies,
    120 of a collective, of which 50 beside the GEMM; then a wait of the host, and the GPU idle after it.
    """
    trace.span("data", at, at + 100)
    trace.launch("aten::copy_", at + 95, "Memcpy HtoD", at + 100, at + 160, kind="gpu_memcpy")
    trace.span("forward", at + 110, at + 200)
    trace.launch("aten::mm", at + 120, "nvjet_hsh", at + 160, at + 360, shapes=[[1000, 395], [395, 1000]])
    sdpa = "aten::scaled_dot_product_attention"
    trace.launch(sdpa, at + 140, "cudnn_generated_fort_native_sdpa", at + 360, at + 510)
    trace.launch("Torch-Compiled Region", at + 160, "triton_poi_fused_gelu_0", at + 510, at + 560)
    trace.span("backward", at + 200, at + 300)
    trace.launch("aten::mm", at + 210, "nvjet_hsh", at + 560, at + 660, tid=AUTOGRAD)
    nccl = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    trace.launch("c10d::_reduce_scatter_base_", at + 230, nccl, at + 610, at + 730, stream=20, tid=AUTOGRAD)
    trace.span("optimizer", at + 300, at + 400)
    adam = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::Fused<float>>"
    trace.launch("aten::_fused_adamw_", at + 310, adam, at + 730, at + 770)
    trace.add("aten::item", at + 410, at + 775)
    trace.add("cudaStreamSynchronize", at + 415, at + 772, "cuda_runtime")


def two_steps_of_a_gpu(folder: Path) -> Timeline:
    trace = Recording(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    for number in range(2):
        trace.span(f"ProfilerStep#{number}", 1000 * number, 1000 * (number + 1))
        step_of_a_gpu(trace, 1000.0 * number)
    return trace.write(folder / "step-00000002-rank0.json")


def step_of_a_cpu(trace: Recording) -> None:
    """10,000 us on three threads."""
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
