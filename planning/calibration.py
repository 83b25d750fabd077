"""Rates of the machine at hand: measured in under a minute at the shapes of a model, stored as JSON, read at
any size.

Rates depend on the shape, on a CPU by factors, so every measured shape keeps its own time; a shape in between
takes the rate of its neighbours. All operations take turns: what else the machine does is in all alike, and
no operation finds its operands in the cache because it has just used them.
"""

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Model
from errors import DataError
from jobs.durable_files import write_durably
from models.attention import attention, check_backend, find_obstacle
from models.vit import Block
from planning.hardware import PRECISION, Cluster, Device
from training.process_settings import host_memory

NEIGHBOURS = 4  # measured shapes that a rate is taken from
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Larger products and tensors have the rates of these, and would take minutes.
MAX_FLOPS = {"cpu": 2e10, "cuda": 4e12}  # of one product, or of one attention
MAX_VALUES = {"cpu": 2**24, "cuda": 2**29}  # of a tensor that elementwise operations work on
BLOCKS = 3  # that are run one after the other
SECONDS = 30.0  # of repetitions
REPETITIONS = (3, 25)  # at least, whatever they take; at most
# A repetition that takes so many times the fastest was disturbed: on a busy machine operations on two threads
# wait for the scheduler's 8 ms, and a median of all is up to 30 x too long.
DISTURBED = 1.25
TIMED_SECONDS = 2e-4  # an operation that takes less is timed several times over


@dataclass(frozen=True)
class Timing:
    """One operation of one shape.

    kind                                             sizes                      work
    matmul/<forward|input_gradient|weight_gradient>  (m, k, n) of the product   2 m k n FLOP
    attention/<backend>/<forward|backward>           (batch, heads, T, E)       4 (8) batch heads T^2 E FLOP
    elementwise/<operation>                          (bytes read and written,)  bytes
    blocks/<backend>, forward and backward           (number, batch, T, D, heads, M)    blocks

    With x (rows, inputs) and a weight (outputs, inputs), "forward" is x w^T, (m, k, n) = (rows, inputs,
    outputs); "input_gradient" is dy w, (rows, outputs, inputs); "weight_gradient" is dy^T x, (outputs, rows,
    inputs). The order of their operands in memory differs, and so do their rates.
    """

    kind: str
    dtype: str  # torch's name
    sizes: tuple[int, ...]
    seconds: float  # median of the repetitions that nothing disturbed

    @property
    def rate(self) -> float:
        """Work a second."""
        return work_of(self.kind, self.sizes) / self.seconds


def work_of(kind: str, sizes: tuple[int, ...]) -> float:
    """Return FLOPs, bytes or blocks; what a backward pass recomputes earns nothing."""
    if kind.startswith("matmul/"):
        return 2.0 * math.prod(sizes)
    if kind.startswith("attention/"):
        batch, heads, tokens, head_dim = sizes
        return (8.0 if kind.endswith("/backward") else 4.0) * batch * heads * tokens**2 * head_dim
    return float(sizes[0])


@dataclass(frozen=True)
class Calibration:
    """Times on one machine, of a rank of `threads` threads."""

    torch_version: str
    device_type: str  # "cpu" or "cuda"
    device_name: str  # "cpu", or torch's name of the GPU
    processor: str  # of the host
    cores: int  # of the host
    threads: int  # of a rank
    memory: int  # bytes: of the GPU, or of the host
    timings: tuple[Timing, ...]
    float8: float = 1.0  # rate of products over that in bfloat16: not measured, the data sheet's of a device

    def linear_seconds(self, rows: int, inputs: int, outputs: int, dtype: str, backward: bool) -> float:
        """A linear layer's forward, or both products of its backward."""
        if dtype == "float8":
            return self.linear_seconds(rows, inputs, outputs, "bfloat16", backward) / self.float8
        if not backward:
            return self._seconds("matmul/forward", dtype, (rows, inputs, outputs))
        of_input = self._seconds("matmul/input_gradient", dtype, (rows, outputs, inputs))
        return of_input + self._seconds("matmul/weight_gradient", dtype, (outputs, rows, inputs))

    def attention_seconds(
        self, batch: int, heads: int, tokens: int, head_dim: int, dtype: str, backward: bool, backend: str
    ) -> float:
        """Seconds of attention between q, k, v of (batch, heads, tokens, head_dim), or of its backward."""
        kind = f"attention/{backend.replace('auto', 'sdpa')}/{'backward' if backward else 'forward'}"
        return self._seconds(kind, dtype, (batch, heads, tokens, head_dim))

    def elementwise_seconds(self, size: float, dtype: str = "float32", operation: str = "copy") -> float:
        """Seconds of an operation that reads and writes `size` bytes in all: as long as copying where
        planning/calibration.py does not measure it, nothing for norms, which were measured as they are.
        """
        if operation == "norm cast":
            return 0.0
        operation = "copy" if operation.startswith(("exchange", "float8")) else operation
        return self._seconds(f"elementwise/{operation}", dtype, (max(round(size), 1),))

    def _seconds(self, kind: str, dtype: str, sizes: tuple[int, ...]) -> float:
        rows = [row for row in self.timings if (row.kind, row.dtype) == (kind, dtype)]
        if not rows:
            there = sorted({f"{row.kind} in {row.dtype}" for row in self.timings})
            raise DataError(f"calibration: no {kind} in {dtype}, only {', '.join(there)}; calibrate for it")
        return work_of(kind, sizes) / interpolated_rate(rows, sizes)


Rates = Device | Calibration  # what gives the seconds of operations


def interpolated_rate(rows: Sequence[Timing], sizes: tuple[int, ...]) -> float:
    """Work a second at `sizes`: the nearest shapes' rates, weighted by 1/distance^2, all in logarithms."""
    logs = [math.log(size) for size in sizes]
    near = sorted((math.dist([math.log(size) for size in row.sizes], logs), row.rate) for row in rows)
    if near[0][0] == 0:
        return near[0][1]
    weights = [(distance**-2, rate) for distance, rate in near[:NEIGHBOURS]]
    return math.exp(sum(w * math.log(rate) for w, rate in weights) / sum(w for w, _ in weights))


# -- on the cluster


def calibrated(cluster: Cluster, measured: Calibration, devices: int | None = None) -> Cluster:
    """`cluster` with the rates that were measured, and `devices` devices (None: a node's)."""
    if cluster.shared:  # ranks that share the cores of this host, not those of clusters.toml
        own = {"devices_per_node": measured.cores, "host_memory": measured.memory, "devices": measured.cores}
        cluster = dataclasses.replace(cluster, **own).with_devices(max(measured.cores // measured.threads, 1))
        peak: dict[str, float] = {}  # no data sheet has that of some cores: the best product measured
        for row in measured.timings:
            if row.kind.startswith("matmul/"):
                peak[PRECISION[row.dtype]] = max(row.rate, peak.get(PRECISION[row.dtype], 0.0))
        device = dataclasses.replace(cluster.device, peak=peak, memory=measured.memory // cluster.devices)
        cluster = dataclasses.replace(cluster, device=device)
    rates = cluster.device.matmul
    measured = dataclasses.replace(measured, float8=rates.get("fp8", rates["bf16"]) / rates["bf16"])
    device = dataclasses.replace(cluster.device, name=f"{cluster.device.name}, calibrated")
    cluster = dataclasses.replace(cluster, device=device, measured=measured)
    return cluster if devices is None else cluster.with_devices(devices)


# -- the file


def save_calibration(calibration: Calibration, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(dataclasses.asdict(calibration), indent=1) + "\n")


def load_calibration(path: Path) -> Calibration:
    """Read a file of save_calibration. DataError: not there, not whole, or of another torch or processor."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        timings = tuple(Timing(**row | {"sizes": tuple(row["sizes"])}) for row in values.pop("timings"))
        measured = Calibration(**values, timings=timings)
        if measured.torch_version != torch_version():
            raise ValueError(f"measured with torch {measured.torch_version}, this is {torch_version()}")
        if measured.device_type == "cpu" and measured.processor != processor_name():
            raise ValueError(f"measured on {measured.processor}, this is {processor_name()}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"calibration {path}: cannot be used ({error})"
        raise DataError(f"{reason}; measure with plan.py --calibrate again") from error
    return measured


def torch_version() -> str:
    """Version of the installed torch, without its seconds of importing."""
    return version("torch")


def processor_name() -> str:
    """Name of the processor by Linux, with the number of cores: "AMD EPYC, 2 cores"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


# -- measuring


@dataclass(frozen=True)
class BlockShape:
    """A block of the ViT: its operations are measured."""

    batch: int
    tokens: int
    dim: int
    heads: int
    mlp_dim: int

    @property
    def linears(self) -> list[tuple[int, int, int]]:
        """(rows, inputs, outputs) of its linear layers."""
        d, m = self.dim, self.mlp_dim
        return [(self.batch * self.tokens, k, n) for k, n in ((d, 3 * d), (d, d), (d, m), (m, d))]


@dataclass(frozen=True)
class Operation:
    """Something to time, with what it is filed under."""

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    run: Callable[[], Any]


def calibrate(
    blocks: Sequence[BlockShape],
    backends: Sequence[str],
    device: torch.device,
    threads: int,
    seconds: float = SECONDS,
) -> Calibration:
    """Measure a rank of `threads` threads on `device`; `seconds` are spent on repetitions.

    TF32 is on or off as torch is set. `backends` are those of models/attention.py; ConfigError where the
    device has no kernel for one in bfloat16.
    """
    for backend in backends:
        check_backend(backend, device.type, torch.bfloat16)
    usual, on_gpu = torch.get_num_threads(), device.type == "cuda"
    torch.set_num_threads(threads)
    try:
        timings = in_turns(list(operations(blocks, backends, device)), device, seconds)
    finally:
        torch.set_num_threads(usual)
    return Calibration(
        torch_version=torch_version(),
        device_type=device.type,
        device_name=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        threads=threads,
        memory=torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory(),
        timings=tuple(timings),
    )


# -- what is timed


def operations(
    blocks: Sequence[BlockShape], backends: Sequence[str], device: torch.device
) -> Iterator[Operation]:
    """In every precision; shapes that several blocks have are timed once."""
    linears = dict.fromkeys(shape for block in blocks for shape in block.linears)
    attentions = dict.fromkeys((b.batch, b.heads, b.tokens, b.dim // b.heads) for b in blocks)
    activations = dict.fromkeys((b.batch * b.tokens, n) for b in blocks for n in (b.dim, b.mlp_dim))
    for dtype in DTYPES:
        possible = [each for each in backends if not find_obstacle(each, device.type, DTYPES[dtype])]
        for shape in linears:
            yield from linear_operations(*shape, dtype, device)
        for shape, backend in product(attentions, possible):
            yield from attention_operations(*shape, dtype, backend, device)
        for rows, width in activations:
            yield from elementwise_operations(rows, width, dtype, device)
        for block in blocks:
            yield block_operation(block, dtype, (possible or ["sdpa"])[0], device)
    yield adamw_operation(sum(inputs * outputs for _, inputs, outputs in linears), device)


def linear_operations(
    rows: int, inputs: int, outputs: int, dtype: str, device: torch.device
) -> Iterator[Operation]:
    """x w^T + b, and the two products of its backward, as torch.autograd has them."""
    rows = max(min(rows, int(MAX_FLOPS[device.type] / (2 * inputs * outputs))), 1)
    x, w, b, dy = tensors([(rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)], dtype, device)
    yield Operation("matmul/forward", dtype, (rows, inputs, outputs), lambda: F.linear(x, w, b))
    yield Operation("matmul/input_gradient", dtype, (rows, outputs, inputs), lambda: dy @ w)
    yield Operation("matmul/weight_gradient", dtype, (outputs, rows, inputs), lambda: dy.t() @ x)


def attention_operations(
    batch: int, heads: int, tokens: int, head_dim: int, dtype: str, backend: str, device: torch.device
) -> Iterator[Operation]:
    """q, k and v are parts of one tensor as in models/vit.py: kernels that want them otherwise copy them."""
    whole = int(MAX_FLOPS[device.type] / (8 * tokens**2 * head_dim))  # heads of which a backward may be timed
    heads = min(heads, max(whole, 1))
    batch = min(batch, max(whole // heads, 1))
    (qkv,) = tensors([(batch, tokens, heads, 3, head_dim)], dtype, device)
    q, k, v = (x.detach().requires_grad_() for x in qkv.permute(3, 0, 2, 1, 4).unbind(0))
    out = attention(q, k, v, backend)
    gradient, sizes = torch.randn_like(out), (batch, heads, tokens, head_dim)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    yield Operation(f"attention/{backend}/forward", dtype, sizes, lambda: attention(q, k, v, backend))
    yield Operation(f"attention/{backend}/backward", dtype, sizes, backward)


def elementwise_operations(rows: int, width: int, dtype: str, device: torch.device) -> Iterator[Operation]:
    """Operations between the products of a block; sizes are bytes read and written, without parameters."""
    rows = max(min(rows, MAX_VALUES[device.type] // width), 1)
    x, y, weight, bias = tensors([(rows, width)] * 2 + [(width,)] * 2, dtype, device)
    other = torch.bfloat16 if dtype == "float32" else torch.float32
    unit = x.numel() * x.element_size()
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (x, weight, bias))
    norm, gelu = F.layer_norm(leaves[0], (width,), leaves[1], leaves[2]), F.gelu(leaves[0])

    def backward(out: Tensor, of: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, of, y, retain_graph=True)

    runs: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2 * unit, lambda: x.clone()),
        "cast": (x.numel() * 6, lambda: x.to(other)),
        "add": (3 * unit, lambda: x + y),
        "sum": (unit, lambda: x.sum(0)),  # gradients of biases
        "gelu": (2 * unit, lambda: F.gelu(x)),
        "gelu_backward": (3 * unit, lambda: backward(gelu, leaves[:1])),
        "layer_norm": (2 * unit, lambda: F.layer_norm(x, (width,), weight, bias)),
        "layer_norm_backward": (3 * unit, lambda: backward(norm, leaves)),
    }
    for name, (size, run) in runs.items():
        yield Operation(f"elementwise/{name}", dtype, (size,), run)


def block_operation(block: BlockShape, dtype: str, backend: str, device: torch.device) -> Operation:
    """Forward and backward of blocks one after the other, as in a model."""
    tokens, dim, heads, mlp_dim = block.tokens, block.dim, block.heads, block.mlp_dim
    batch = max(min(block.batch, MAX_VALUES[device.type] // (tokens * mlp_dim)), 1)
    model = Model(dim=dim, num_heads=heads, mlp_dim=mlp_dim, attention_backend=backend)  # type: ignore[arg-type]
    blocks = nn.Sequential(*(Block(model, 0.0) for _ in range(BLOCKS))).to(device)
    (x,) = tensors([(batch, tokens, dim)], "float32", device)
    autocast = torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32")
    x = (x if dtype == "float32" else x.to(DTYPES[dtype])).requires_grad_()

    def run() -> None:
        with autocast:
            out = blocks(x)
        out.backward(torch.ones_like(out))
        blocks.zero_grad()
        x.grad = None

    return Operation(f"blocks/{backend}", dtype, (BLOCKS, batch, tokens, dim, heads, mlp_dim), run)


def adamw_operation(number: int, device: torch.device) -> Operation:
    """Fused, on `number` float32 parameters: four tensors are read and three written."""
    (parameter,) = tensors([(min(number, MAX_VALUES[device.type]),)], "float32", device)
    parameter.requires_grad_()
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    return Operation("elementwise/adamw", "float32", (28 * parameter.numel(),), optimizer.step)


def tensors(shapes: list[tuple[int, ...]], dtype: str, device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, dtype=DTYPES[dtype], device=device) for shape in shapes]


# -- timing


def in_turns(todo: list[Operation], device: torch.device, seconds: float) -> list[Timing]:
    """Time each operation in turn, round after round: the least number of repetitions, and more of them until
    `seconds` have passed. The first two calls are not counted.
    """
    calls = [calls_for(operation, device) for operation in todo]
    end, (least, most) = time.perf_counter() + seconds, REPETITIONS
    times: list[list[float]] = []
    while len(times) < least or (len(times) < most and time.perf_counter() < end):
        times.append([seconds_of(each, number, device) for each, number in zip(todo, calls, strict=True)])
    return [
        Timing(each.kind, each.dtype, each.sizes, undisturbed(found))
        for each, found in zip(todo, zip(*times, strict=True), strict=True)
    ]


def undisturbed(times: Sequence[float]) -> float:
    """Median of the times near the fastest: of all, on a machine that does nothing else."""
    limit = DISTURBED * min(times)
    return statistics.median([seconds for seconds in times if seconds <= limit])


def calls_for(operation: Operation, device: torch.device) -> int:
    """Number of calls of an operation in one timing, from its second call."""
    seconds_of(operation, 1, device)
    return math.ceil(TIMED_SECONDS / max(seconds_of(operation, 1, device), 1e-7))


def seconds_of(operation: Operation, calls: int, device: torch.device) -> float:
    """Return the seconds of one call, the mean of `calls`."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        operation.run()
    wait()
    return (time.perf_counter() - start) / calls
