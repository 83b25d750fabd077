"""Measures this machine at the shapes of a model: in under a minute, on a CPU or a GPU.

All operations take turns, so that what else the machine does meets all alike and no operation finds its
operands in the cache because it has just used them.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from errors import ConfigError
from models.attention import attention, check_backend
from models.vit import Block
from planning.calibration import Calibration, Timing, processor_name, torch_version

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
    """Times of a rank of `threads` threads on `device`.

    TF32 is on or off as torch is set. `seconds` are spent on repetitions. `backends` are those of
    models/attention.py; ConfigError where the device has no kernel for one, in no precision.
    """
    for backend in backends:
        if not any(has_kernel(backend, device.type, dtype) for dtype in DTYPES):
            check_backend(backend, device.type, torch.float32)
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
        memory=memory_of(device),
        timings=tuple(timings),
    )


def has_kernel(backend: str, device_type: str, dtype: str) -> bool:
    try:
        check_backend(backend, device_type, DTYPES[dtype])
    except ConfigError:
        return False
    return True


def memory_of(device: torch.device) -> int:
    """Bytes of the GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# -- what is timed


def operations(
    blocks: Sequence[BlockShape], backends: Sequence[str], device: torch.device
) -> Iterator[Operation]:
    """In every precision; shapes that several blocks have are timed once."""
    linears = dict.fromkeys(shape for block in blocks for shape in block.linears)
    attentions = dict.fromkeys((b.batch, b.heads, b.tokens, b.dim // b.heads) for b in blocks)
    activations = dict.fromkeys((b.batch * b.tokens, n) for b in blocks for n in (b.dim, b.mlp_dim))
    for dtype in DTYPES:
        for shape in linears:
            yield from linear_operations(*shape, dtype, device)
        for shape, backend in product(attentions, backends):
            if has_kernel(backend, device.type, dtype):
                yield from attention_operations(*shape, dtype, backend, device)
        for rows, width in activations:
            yield from elementwise_operations(rows, width, dtype, device)
        usual = backends[0] if has_kernel(backends[0], device.type, dtype) else "sdpa"
        for block in blocks:
            yield block_operation(block, dtype, usual, device)
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
    options = {"qkv_bias": True, "qk_norm": False, "drop": 0.0, "backend": backend}
    blocks = nn.Sequential(*(Block(dim, heads, mlp_dim, **options) for _ in range(BLOCKS))).to(device)
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
    times: list[list[float]] = [[] for _ in todo]
    for repetition in range(most):
        if repetition >= least and time.perf_counter() > end:
            break
        for operation, number, found in zip(todo, calls, times, strict=True):
            found.append(seconds_of(operation, number, device))
    return [
        Timing(operation.kind, operation.dtype, operation.sizes, undisturbed(found), statistics.median(found))
        for operation, found in zip(todo, times, strict=True)
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
    """Seconds of one call, the mean of `calls`."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        operation.run()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
