"""Measure what one GPU can answer, part by part, and print it next to the best known, limits and goals.

    benchmarks/gpu.sh [--rehearse] [--only steps,planner] [--minutes 8]

Parts of a group share a process, so that torch and CUDA start once; one that fails or takes too long leaves
a line and the rows it has, and a new process goes on with the next. Fields are random; a step is train.py's.
Every row is written when it is measured: to $OUT/gpu.jsonl where OUT is set, else to results/gpu.jsonl, of a
rehearsal to outputs/gpu/gpu.jsonl; calibrated rates to calibration.json. Ends with 1 when a part failed, and
with 2 without a GPU.
"""

import argparse
import faulthandler
import gc
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import checkpoint_stall
from benchmarks.random_run import RandomRun
from benchmarks.results_file import RESULTS, append, parser_of, read_lines
from benchmarks.saved_activations import Case as KeptCase
from benchmarks.saved_activations import units
from benchmarks.step_time import Peer, TimmViT
from command_line import text_table
from config import ActivationCheckpoint, Compile, Config, Float8, Model, Optimizer, Parallelism, Training
from datasets.archive import open_archive
from datasets.loader import FieldDataset, TrainLoader, TrainSampler
from models.attention import HOPPER, activate, attention, check_backend
from models.embeddings import unpatchify
from models.vit import VisionTransformer
from parallelisms.attention_choice import BACKENDS, is_hopper_kernel, measure_attention
from parallelisms.degrees import Degrees, resolve_degrees
from parallelisms.mesh import start_ranks
from planning.architecture import vit_architecture
from planning.calibrate import BlockShape, calibrate
from planning.calibration import attention_flops, matmul_flops, save_calibration
from planning.clusters import CALIBRATION, load_cluster
from planning.memory import memory
from planning.step_time import step_time
from planning.workload import Workload
from tests.started_jobs import Job, losses, records
from training.metrics import peak_tflops
from training.optimizers.build import build_adamw, parameter_groups, set_lr
from verification.rollout import rollout as roll_out

ROOT, TARGETS = Path(__file__).parent.parent, Path(__file__).with_suffix(".toml")
Row = dict[str, Any]


# -- sizes, the clock, and rows that outlive a part that is stopped


@dataclass(frozen=True)
class Sizes:
    """What is measured: vit1b, or something tiny that only shows that the script runs to its end."""

    grid: tuple[int, int] = (1024, 2048)
    patches: tuple[tuple[int, int], ...] = ((16, 32), (16, 16))  # 4,096 and 8,192 tokens
    variables: int = 17
    dim: int = 1536
    layers: int = 48
    heads: tuple[int, int] = (24, 12)  # of 64 and of 128
    largest_batch: int = 8  # more tokens than 32,768 make no step faster, only longer
    steps: tuple[int, int] = (3, 5)  # warm-up, measured
    compiled: bool = True
    products: tuple[tuple[int, int], ...] = ((1536, 4608), (1536, 1536), (1536, 6144), (6144, 1536))  # (K, N)
    rows: int = 32768  # of these products
    optimizer_blocks: int = 12  # with the parameters that an optimiser updates
    stall_dim: int = 1024
    dates: int = 12  # that the loader reads from
    workers: int = 8
    calibration_seconds: float = 15.0

    def tokens(self, patch: tuple[int, int]) -> int:
        return self.grid[0] * self.grid[1] // (patch[0] * patch[1])


TINY = Sizes(
    *((32, 64), ((4, 8), (4, 4)), 3, 64, 2, (4, 2), 2, (1, 2), False, ((64, 192), (256, 64)), 256),
    *(1, 64, 6, 0, 2.0),
)


class Session:
    """One part: where it runs, until when, and where its rows go (None: nowhere)."""

    def __init__(self, part: str, rows: Path | None, run: str, seconds: float, rehearse: bool) -> None:
        self.part, self.rows, self.run, self.rehearse = part, rows, run, rehearse
        self.sizes, self.device = (TINY if rehearse else Sizes()), torch.device("cpu" if rehearse else "cuda")
        self.on_gpu, self.end = self.device.type == "cuda", time.monotonic() + seconds

    def start_ranks(self) -> None:
        """Make a process group of one, where an earlier part has not made it."""
        if not dist.is_initialized():
            start_ranks(600, "auto" if self.on_gpu else "gloo")

    @property
    def left(self) -> float:
        """Seconds until this part is stopped."""
        return self.end - time.monotonic()

    def has_time_for(self, seconds: float) -> bool:
        found = self.left >= (seconds if self.on_gpu else 1.0)
        print("" if found else "  no time for more\n", end="", flush=True)
        return found

    def add(self, what: str, value: float, unit: str, **about: Any) -> None:
        print(f"  {what:<58}{value:>12.5g} {unit}", flush=True)
        self.write({"what": what, "value": value, "unit": unit, **about})

    def attempt(self, what: str, measure: Callable[..., Any], *arguments: Any) -> None:
        """Measure; what fails gives one line and one row, and the rest goes on."""
        try:
            measure(self, what, *arguments)
        except Exception as error:  # of whatever library: it is the answer to the question
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            print(f"  {what:<58}{'failed':>12} {reason}", flush=True)
            self.write({"what": what, "failed": reason})
            if "CUDA error" in reason:  # nothing that this process asks of the GPU works any more
                raise
        self.free()

    def write(self, row: Row) -> None:
        if self.rows:
            append(self.rows, [{"run": self.run, "part": self.part, **row}])

    def earlier(self) -> list[Row]:
        """Return the rows of this run up to now, of all parts."""
        return read_lines(self.rows, run=self.run) if self.rows else []

    def free(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, run: Callable[[], Any], warm_up: int, number: int) -> float:
        """Return the median of `number` calls, on a GPU each between two of its events."""
        for _ in range(warm_up):
            run()
        if not self.on_gpu:
            return statistics.median(clock(run) for _ in range(number))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False))

    def mfu(self, flops: float) -> float | None:
        peak = peak_tflops(self.device) * 1e12
        return flops / peak if peak else None


def clock(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# -- steps of vit1b


RESERVED = 2 * 2**30  # bytes of a device that libraries take in addition to torch's allocator
PRECISIONS = {"": "bf16", "tensorwise": "float8", "rowwise": "float8 by rows"}  # recipe -> its name here
NAMES = ("length", "head", "precision", "mode")  # of a case, in a row
SAFETY = 1.05  # on the planner's peak: the allocator's rounding
CASE_SECONDS, RANK_SECONDS = 35.0, 12.0  # that a case, and a layout of ranks, may take, compilation included


@dataclass(frozen=True)
class Case:
    """One way to train vit1b."""

    patch: tuple[int, int]
    heads: int
    float8: str = ""  # the recipe
    mode: str = "selective"
    batch: int = 1
    backend: str = "sdpa"

    def workload(self, sizes: Sizes) -> Workload:
        channels, values = sizes.variables, sizes.variables * math.prod(sizes.grid)
        model = vit_architecture(
            *(sizes.grid, self.patch, channels, channels, sizes.dim, sizes.layers, self.heads)
        )
        about = {"field_values": values, "input_values": values, "ac_mode": self.mode}
        about |= {"compiled": sizes.compiled, "float8": bool(self.float8), "attention": self.backend}
        return Workload(model, Degrees(), self.batch, self.batch, **about)

    def about(self, sizes: Sizes) -> Row:
        """Return the names and numbers of a row; length and head are places in the lists of Sizes."""
        lengths = {"tokens": sizes.tokens(self.patch), "length": sizes.patches.index(self.patch)}
        heads = {"head": sizes.heads.index(self.heads), "head_dim": sizes.dim // self.heads}
        return asdict(self) | lengths | heads | {"precision": PRECISIONS[self.float8]}

    def label(self, sizes: Sizes) -> str:
        shape = f"{sizes.tokens(self.patch)} tokens, {self.heads} x {sizes.dim // self.heads}"
        return f"{shape}, {PRECISIONS[self.float8]}, {self.mode}, batch {self.batch}"


def cases(sizes: Sizes) -> list[Case]:
    """Return what answers most first; the rest is measured as far as the time goes."""
    short, long = sizes.patches
    many, few = sizes.heads
    fast, plain = partial(Case, float8="tensorwise"), partial(Case, mode="none")
    first = [Case(short, many), plain(short, many), Case(long, many), fast(short, many), Case(short, few)]
    second = [Case(long, few), fast(long, many), plain(long, many), plain(short, few), plain(long, few)]
    last = [Case(short, many, float8="rowwise"), fast(short, few), fast(long, few)]
    return [*first, *second, fast(short, many, mode="none"), *last]


def training_of(
    case: Case, sizes: Sizes, device: torch.device, layout: Parallelism | None = None, accumulation: int = 1
) -> RandomRun:
    """Return train.py's model, objective, optimiser and step for one case."""
    backend: Any = case.backend
    model = Model("vit", case.patch, sizes.dim, sizes.layers, sizes.heads[0])
    mode: Any = case.mode
    recipe: Any = case.float8 or "tensorwise"
    config = Config(
        model=replace(model, num_heads=case.heads, attention_backend=backend),
        optimizer=Optimizer(lr=1e-5),
        training=Training(local_batch_size=case.batch, mixed_precision_param="bfloat16"),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
        compile=Compile(sizes.compiled),
        float8=Float8(bool(case.float8), recipe),
        parallelism=layout or Parallelism(),
    )
    return RandomRun(config, sizes.grid, sizes.variables, device, drawn_here=True, accumulation=accumulation)


def steps(session: Session) -> None:
    """Measure samples/s, share of the peak and memory of every case that there is time for."""
    session.start_ranks()
    sizes, backends = session.sizes, {}
    done = [tuple(map(row.get, NAMES)) for row in session.earlier()]
    todo = [case for case in cases(sizes) if tuple(map(case.about(sizes).get, NAMES)) not in done]
    for number, case in enumerate(todo):
        if not session.has_time_for(CASE_SECONDS):
            return
        shape = (case.patch, case.heads)
        backends[shape] = backends.get(shape) or fastest_backend(case, session)
        case = with_batch(replace(case, backend=backends[shape]), session)
        fitted: list[bool] = []
        while case.batch and True not in fitted:
            torch._dynamo.reset()
            session.attempt(case.label(sizes), time_steps, case, not done and number == 0, fitted)
            case = replace(case, batch=case.batch // 2)
            if fitted[-1:] != [False]:
                break  # it was measured, or failed for another reason than memory


def fastest_backend(case: Case, session: Session) -> str:
    """Choose as model.attention_backend = "auto" does."""
    sizes = session.sizes
    shape = (2, case.heads, sizes.tokens(case.patch), sizes.dim // case.heads)
    seconds = measure_attention(shape, torch.bfloat16, session.device)
    return min(seconds, key=lambda name: seconds[name])


def with_batch(case: Case, session: Session) -> Case:
    """Take the largest power of two that fits by the planner's account; 1 where even that does not."""
    free = torch.cuda.mem_get_info()[0] - RESERVED if session.on_gpu else 2**40
    case = replace(case, batch=session.sizes.largest_batch)
    while case.batch > 1 and SAFETY * memory(case.workload(session.sizes)).peak > free:
        case = replace(case, batch=case.batch // 2)
    return case


def time_steps(session: Session, what: str, case: Case, kernels: bool, fitted: list[bool]) -> None:
    """Measure a case; `fitted` gets False where memory did not suffice and a smaller batch is left."""
    sizes, started = session.sizes, time.perf_counter()
    try:
        training = training_of(case, sizes, session.device)
        seconds = session.seconds(training.step, *sizes.steps)
        spent, loss = time.perf_counter() - started, training.loss()
    except torch.cuda.OutOfMemoryError:
        if case.batch > 1:
            fitted.append(False)
            return
        raise
    if math.isnan(loss):
        raise ValueError("the loss is NaN")
    fitted.append(True)
    flops = 3 * case.workload(sizes).model.flops() * case.batch / seconds
    peak = torch.cuda.max_memory_allocated() if session.on_gpu else 0
    about = {"step_seconds": seconds, "mfu": session.mfu(flops), "tflops": flops / 1e12, "peak_bytes": peak}
    about |= {"loss": loss, "with_compilation": spent} | case.about(sizes)
    session.add(what, case.batch / seconds, "samples/s", **about)
    print(f"    {flops / 1e12:.1f} TFLOP/s, MFU {about['mfu'] or 0:.1%}, {peak / 2**30:.1f} GiB")
    if kernels and session.on_gpu:
        print_kernels(session, training)


def print_kernels(session: Session, training: RandomRun) -> None:
    """Print where a step goes, kernel by kernel, and whether its attention is one of Hopper's own."""
    found = kernel_seconds(training.step)
    total = sum(seconds for _, seconds in found)
    for name, seconds in found[:15]:
        print(f"    {seconds / total:>6.1%} {1e3 * seconds:>9.2f} ms  {name[:90]}")
    words = ("flash", "fmha", "sdpa", "attention", "attn", "cudnn")
    names = [name for name, _ in found if any(part in name.lower() for part in words)]
    own = float(bool(names) and all(map(of_hopper, names[:2])))
    about = {"attention": names, "kernels": [[name, seconds] for name, seconds in found[:40]]}
    session.add("a step's attention is a kernel of this GPU's own", own, "", **about)


# -- the planner next to them, a rollout step, and the first step of a process


def planner(session: Session) -> None:
    """Calibrate, then predict time and memory of the steps that were measured before."""
    sizes, device = session.sizes, session.device
    measured = [row for row in session.earlier() if row["part"] == "steps" and "tokens" in row]
    backends = tuple(sorted({row["backend"] for row in measured})) or ("sdpa",)
    shapes = [(patch, heads) for patch in sizes.patches for heads in sizes.heads]
    blocks = [BlockShape(4, sizes.tokens(p), sizes.dim, heads, 4 * sizes.dim) for p, heads in shapes]
    threads = torch.get_num_threads()
    rates = calibrate(blocks, backends, device, threads, seconds=sizes.calibration_seconds)
    print("\n".join(rates.table().splitlines()[:2]))
    # With the rows where the caller says where these go, or they are a rehearsal's.
    near = session.rows and (session.rehearse or "OUT" in os.environ)
    save_calibration(
        rates, session.rows.parent / "calibration.json" if near and session.rows else CALIBRATION
    )
    cluster = replace(load_cluster("h200x1" if session.on_gpu else "cpu1"), measured=rates)
    for row in measured:
        session.attempt(row["what"], compare_planned, row, cluster)


def compare_planned(session: Session, what: str, row: Row, cluster: Any) -> None:
    own: Row = {name: row[name] for name in ("heads", "float8", "mode", "batch", "backend")}
    case = Case(tuple(row["patch"]), **own)
    work = case.workload(session.sizes)
    predicted = step_time(work, cluster).total
    error = predicted / row["step_seconds"] - 1
    session.add(f"time, planned: {what}", error, "of measured", seconds=predicted, kind="time")
    if row["peak_bytes"]:
        error = memory(work).peak / row["peak_bytes"] - 1
        session.add(f"peak memory, planned: {what}", error, "of measured", kind="memory")


def rollout(session: Session) -> None:
    """Measure one step of a forecast from one date: forward in bf16, compiled."""
    session.start_ranks()
    for patch in session.sizes.patches:
        session.attempt(f"rollout step, {session.sizes.tokens(patch)} tokens", time_rollout, patch)


def time_rollout(session: Session, what: str, patch: tuple[int, int]) -> None:
    sizes, device, number = session.sizes, session.device, 4
    case = Case(patch, sizes.heads[0], mode="none")
    case = replace(case, backend=fastest_backend(case, session))
    assembly = training_of(case, sizes, device).assembly
    assembly.model.train(False)
    fields = torch.randn(1, sizes.variables, *sizes.grid, device=device)
    times = torch.zeros(1, dtype=torch.int64, device=device)
    parts = (assembly.model.predict, assembly.normalizer, assembly.conditions, 21600)
    taken = session.seconds(lambda: [*roll_out(*parts, fields, times, number)] and None, 1, 3)
    session.add(what, taken / number, "s", tokens=sizes.tokens(patch))


def first(session: Session) -> None:
    """Measure the first step of a process, compilation included; the caller chooses the cache it finds."""
    session.start_ranks()
    sizes = replace(session.sizes, compiled=True)
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    cache = "warm" if folder.name and folder.exists() and any(folder.iterdir()) else "cold"
    started = time.perf_counter()
    training = training_of(Case(sizes.patches[0], sizes.heads[0], mode="none"), sizes, session.device)
    if session.on_gpu:
        torch.cuda.synchronize()
    built = time.perf_counter()
    training.loss()
    ended, about = time.perf_counter(), {"cache": cache, "depth": sizes.layers}
    session.add(f"the model before it, {cache}", built - started, "s", **about)
    session.add(f"first step, {cache}", ended - built, "s", **about)


# -- kernels alone


def attention_kernels(session: Session) -> None:
    """Measure TFLOP/s forward and backward at both head sizes, and find the kernel that ran."""
    sizes = session.sizes
    for patch in sizes.patches:
        for heads in sizes.heads:
            shape = (2, heads, sizes.tokens(patch), sizes.dim // heads)
            for name in BACKENDS[session.device.type]:
                session.attempt(
                    f"{name}, {shape[2]} tokens, {heads} x {shape[3]}", time_attention, name, shape
                )


def time_attention(session: Session, what: str, backend: str, shape: tuple[int, int, int, int]) -> None:
    """q, k and v are parts of one tensor, as in the model."""
    batch, heads, tokens, size = shape
    qkv = torch.randn(batch, tokens, heads, 3, size, dtype=torch.bfloat16, device=session.device)
    q, k, v = inputs = [x.detach().requires_grad_() for x in qkv.permute(3, 0, 2, 1, 4).unbind(0)]
    check_backend(backend, session.device.type, qkv.dtype)
    activate(backend)
    forward = lambda: attention(q, k, v, backend)  # noqa: E731
    out = forward()
    gradient = torch.randn_like(out)
    backward = lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)  # noqa: E731
    for direction, run in (("forward", forward), ("backward", backward)):
        seconds = session.seconds(run, *session.sizes.steps)
        rate = attention_flops(batch, heads, tokens, size, direction == "backward") / seconds / 1e12
        kernels = [name for name, _ in kernel_seconds(run)[:3]] if session.on_gpu else []
        about = {"backend": backend, "tokens": tokens, "head_dim": size, "direction": direction}
        session.add(f"{what}, {direction}", rate, "TFLOP/s", kernels=kernels, **about)
        if kernels:
            print(f"    {kernels[0][:100]}{'' if of_hopper(kernels[0]) else '  NOT ONE OF HOPPER'}")


def kernel_seconds(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return (kernel, seconds) of one call on the GPU, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    found = [(event.key, event.device_time_total / 1e6) for event in record.key_averages()]
    return sorted(found, key=lambda pair: -pair[1])


def of_hopper(kernel: str) -> bool:
    """Return whether it is a kernel of Hopper's own; true on other GPUs, which have none."""
    return torch.cuda.get_device_capability() != HOPPER or is_hopper_kernel(kernel)


def products(session: Session) -> None:
    """Measure TFLOP/s of x w^T at the shapes of a block, in bf16 and in float8."""
    for inputs, outputs in session.sizes.products:
        for precision in ("bf16", "float8"):
            shape = (session.sizes.rows, inputs, outputs)
            what = f"{precision}, M {shape[0]}, K {inputs}, N {outputs}"
            session.attempt(what, time_product, precision == "float8", shape)


def time_product(session: Session, what: str, float8: bool, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    kind, one = torch.float8_e4m3fn if float8 else torch.bfloat16, torch.ones((), device=session.device)
    x, w = (torch.randn(size, device=session.device).to(kind) for size in ((m, k), (n, k)))
    scaled_mm = torch.ops.aten._scaled_mm

    def run() -> Tensor:
        return scaled_mm(x, w.t(), one, one, None, None, torch.bfloat16, True) if float8 else x @ w.t()

    rate = matmul_flops(m, k, n) / session.seconds(run, 3, 10) / 1e12
    session.add(what, rate, "TFLOP/s", inputs=k)


def optimizers(session: Session) -> None:
    # On a CPU the compiler takes half a minute for the last.
    for name in ("fused", "8-bit (torchao)") if session.on_gpu else ("fused",):
        session.attempt(f"AdamW {name}", time_optimizer)


def time_optimizer(session: Session, what: str) -> None:
    """Measure an update of some blocks' parameters, and what that takes for all of the model."""
    sizes = session.sizes
    with torch.device(session.device):
        shape = Model("vit", sizes.patches[0], sizes.dim, sizes.optimizer_blocks, sizes.heads[0])
        model = VisionTransformer(sizes.variables, sizes.variables, sizes.grid, shape)
    parameters: Any = dict(model.named_parameters())
    if "8-bit" in what:
        from torchao.optim import AdamW8bit

        optimizer: Any = AdamW8bit(parameter_groups(parameters, 0.05), lr=1e-6)
    else:
        optimizer = build_adamw(parameters, (0.9, 0.95), 1e-8, 0.05)
        set_lr(optimizer, 1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    seconds = session.seconds(optimizer.step, *sizes.steps)
    # Bytes of a parameter: four float32 tensors read, three written.
    rate = 28 * sum(p.numel() for p in model.parameters()) / seconds / 1e9
    whole = seconds * sizes.layers / sizes.optimizer_blocks
    session.add(f"{what}, whole model", whole, "s", gigabytes_per_second=rate)


def activations(session: Session) -> None:
    """Count the units of T d that a block of vit1b's width keeps, compiled under autocast."""

    def count(session: Session, what: str, case: KeptCase) -> None:
        session.add(what, units(case, session.device), "", stated=case.stated, planned=case.planned)

    for mode in ("none", "selective"):
        case = KeptCase(max(session.sizes.dim, 64), 2, mode, compiled=session.sizes.compiled)
        session.attempt(f"units of T d kept, {mode}", count, case)


# -- the loader, a save, and how others write vit1b


def loader(session: Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        session.attempt("loader", time_loader, Path(folder) / "fields.zarr")


def time_loader(session: Session, _what: str, path: Path) -> None:
    """Measure GB/s into the device's memory, and of one process that reads and does nothing else."""
    sizes, number, batch = session.sizes, 12, 4
    write_store(path, sizes)
    archive = open_archive(str(path))
    pairs = np.stack([np.arange(sizes.dates - 1), np.arange(1, sizes.dates)], axis=1)
    dataset = FieldDataset(archive, archive.variables, pairs)
    size = dataset.__getitems__([0])[0].nbytes
    alone = [clock(lambda i=i: dataset.__getitems__([i])) for i in range(min(len(dataset), 6))]
    session.add("reading in one process", size / statistics.median(alone) / 1e9, "GB/s")
    sampler = TrainSampler(len(dataset), 0, batch, 1, 0, 1)
    batches = TrainLoader(dataset, sampler, sizes.workers, pin=session.on_gpu).iterate(0)
    for _ in range(max(sizes.workers, 1)):
        next(batches)  # until all workers are there
    started, size = time.perf_counter(), 0
    for _ in range(number):
        size += next(batches)[0].to(session.device, non_blocking=True).nbytes
    if session.on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    session.add(f"loader, {sizes.workers} workers", size / seconds / 1e9, "GB/s")
    session.add("samples that the loader gives", number * batch / seconds, "samples/s")


def write_store(path: Path, sizes: Sizes) -> None:
    """Write fields as WeatherBench2 stores them, a date a chunk, without compression."""
    height, width = sizes.grid
    times = np.datetime64("2020-01-01T00", "ns") + np.arange(sizes.dates) * np.timedelta64(6, "h")
    latitude = 90 - (np.arange(height) + 0.5) * 180 / height
    coords = {"time": times, "latitude": latitude, "longitude": np.arange(width) * 360 / width}
    values = np.random.default_rng(0).standard_normal((sizes.dates, height, width), dtype=np.float32)
    dataset = xr.Dataset({f"field_{i}": ([*coords], values) for i in range(sizes.variables)}, coords)
    encoding: Any = {n: {"chunks": (1, height, width), "compressors": None} for n in dataset.data_vars}
    dataset.to_zarr(path, zarr_format=2, encoding=encoding, consolidated=True)


def save(session: Session) -> None:
    """Measure the excess of ten steps after a save, by mode, as benchmarks/checkpoint_stall.py does."""
    session.start_ranks()
    training = checkpoint_stall.Training(session.sizes.stall_dim, session.device)
    for _ in range(3):
        training.step()
    with tempfile.TemporaryDirectory() as folder:
        rounds = 1 if session.rehearse else 2
        seconds = checkpoint_stall.measure(training, Path(folder), rounds, session.device)
    copy, size = checkpoint_stall.floor(training)
    base = seconds.pop("")
    for mode, times in seconds.items():
        excess = statistics.median(t - b for t, b in zip(times, base, strict=True))
        about = {
            "mode": mode,
            "bytes": size,
            "step_seconds": statistics.median(base) / checkpoint_stall.STEPS,
        }
        session.add(f"excess of ten steps after a save, {mode}", excess, "s", **about)
    session.add(f"one copy of these {size / 2**20:.0f} MiB", copy, "s")


class TutorialBlock(nn.Module):
    """Pre-norm block: three projections, SDPA, MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        split = lambda layer: layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = map(split, (self.q, self.k, self.v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class TutorialViT(nn.Module):
    """A ViT as tutorials write it. fields (B, C, H, W) -> fields (B, C, H, W)."""

    def __init__(self, grid: Any, patch: Any, channels: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.grid, self.patch = grid, patch
        self.embed = nn.Conv2d(channels, dim, patch, patch)
        self.position = nn.Parameter(torch.zeros(1, math.prod(grid) // math.prod(patch), dim))
        self.blocks = nn.Sequential(*(TutorialBlock(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, channels * math.prod(patch))

    def forward(self, fields: Tensor) -> Tensor:
        tokens = self.embed(fields).flatten(2).transpose(1, 2) + self.position  # (B, T, D)
        return unpatchify(self.head(self.norm(self.blocks(tokens))), self.grid, self.patch)


def peers(session: Session) -> None:
    """Their step is their habit: autocast, no compile, three layers for q, k and v, for-loop Adam."""
    for name, build in {"tutorial's way": TutorialViT, "timm": TimmViT}.items():
        patch = session.sizes.patches[0]
        session.attempt(f"{name}, {session.sizes.tokens(patch)} tokens", time_peer, build, patch)


def time_peer(session: Session, what: str, build: type[nn.Module], patch: tuple[int, int]) -> None:
    """The largest batch that fits counts."""
    sizes = session.sizes
    shape = (sizes.grid, patch, sizes.variables, sizes.dim, sizes.layers, sizes.heads[0])
    for batch in (4, 2, 1):
        try:
            with session.device:
                fields, target = torch.randn(2, batch, sizes.variables, *sizes.grid)
                peer = Peer(build(*shape), F.mse_loss, fields, target, "bfloat16")
            seconds = session.seconds(peer, 1, 3)
            break
        except torch.cuda.OutOfMemoryError:
            peer = None
            session.free()
            if batch == 1:
                raise
    flops = 3 * Case(patch, sizes.heads[0]).workload(sizes).model.flops() * batch / seconds
    about = {"mfu": session.mfu(flops), "batch": batch, "tokens": sizes.tokens(patch)}
    session.add(f"{what}, batch {batch}", batch / seconds, "samples/s", **about)


# -- one rank of a cluster: real kernels, and ranks that are not there


LAYOUTS = {
    "FSDP2": Parallelism(),
    "HSDP": Parallelism(data_parallel_replicate_degree=8),
    "tensor parallel 4": Parallelism(tensor_parallel_degree=4),
    "Ulysses 4": Parallelism(context_parallel_degree=4, context_parallel_method="ulysses"),
    "ring 4": Parallelism(context_parallel_degree=4, context_parallel_method="ring"),
}


def ranks(session: Session) -> None:
    """Measure what is left of a step where collectives are answered at once, with this rank's data."""
    warnings.filterwarnings("ignore", category=UserWarning)  # torch's about fake groups
    for world in (64, 8):
        for name, layout in LAYOUTS.items():
            if world == 8 and name == "HSDP":
                continue  # one node of it is DDP
            if not session.has_time_for(RANK_SECONDS):
                return
            session.attempt(f"a rank of {world}, {name}", time_rank, world, layout)


def time_rank(session: Session, what: str, world: int, layout: Parallelism) -> None:
    sizes = replace(session.sizes, compiled=False)
    case = Case(sizes.patches[0], sizes.heads[0], batch=2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        training = training_of(case, sizes, session.device, layout)
        seconds = session.seconds(training.step, *sizes.steps)
    finally:
        dist.destroy_process_group()
    degrees = resolve_degrees(world, layout)
    way: Row = {"method": layout.context_parallel_method, "global_batch": case.batch * degrees.dp}
    work = case.workload(sizes).replace(degrees=degrees, **way)
    cluster = load_cluster("h200" if session.on_gpu else "cpu").with_devices(world)
    planned, planned_peak = step_time(work, cluster).computation, memory(work).peak
    about: Row = {"world": world, "planned": planned, "kind": "time", "error": planned / seconds - 1}
    session.add(f"{what}: seconds of computation", seconds, "s", **about)
    if session.on_gpu:
        peak = torch.cuda.max_memory_allocated()
        about = {"world": world, "planned": planned_peak, "kind": "memory", "error": planned_peak / peak - 1}
        session.add(f"{what}: peak memory", peak / 2**30, "GiB", **about)


# -- train.py as a user starts it, on the GPU and on the CPU


STEPS, SAVED, KILLED_FROM = 30, 10, 20
WINDS = "gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc"
OPTIONS = f"""
    --training.steps {STEPS} --training.deterministic true --lr_scheduler.warmup_steps 5
    --checkpoint.enable true --checkpoint.interval {SAVED} --validation.interval {KILLED_FROM}
    --metrics.log_freq 1 --metrics.enable_tensorboard false --profiling.enable_profiling false
    --model.name vit --model.dim 128 --model.attention_backend sdpa --optimizer.lr 1e-3
    --training.global_batch_size 8
""".split()


def train(session: Session) -> None:
    """Train and validate through NCCL: undisturbed, killed and resumed, in bf16, and on the CPU."""
    config, data = ROOT / "train_configs/demo.toml", ["--training.local_batch_size", "2"]
    for folder in (ROOT / ".gpu/data", ROOT.parent / "shared/data"):  # carried along, or where the project is
        if (folder / WINDS).exists():
            data = [
                "--data.path",
                str(folder / WINDS),
                "--data.static_path",
                str(folder / "static/landsea.nc"),
            ]
            config = ROOT / "train_configs/gfs_winds.toml"
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()

        def start(name: str, *options: str, **environment: str) -> Job:
            return Job(config, Path(folder, name), *data, *OPTIONS, *options, NGPU="1", **environment)

        jobs = {"cpu": start("cpu", CUDA_VISIBLE_DEVICES=""), "undisturbed": start("undisturbed")}
        jobs |= {"bf16": start("bf16", "--training.mixed_precision_param", "bfloat16")}
        jobs["killed"] = start("killed")
        try:
            jobs["killed"].wait_for_step(KILLED_FROM, session.left)
            jobs["killed"].kill_all()
            killed_at = max(losses(jobs["killed"].folder))
            jobs["killed"] = start("killed")
            for name, job in jobs.items():
                ended = job.end(max(session.left, 1.0))
                print(job.output[-3000:] if ended else "", end="")
                session.add(f"train.py, {name}: exit code", float(ended), "")
        finally:
            for job in jobs.values():
                job.kill_all()
        session.add("seconds of four runs and a resume", time.perf_counter() - started, "s")
        session.add("step that the kill came after", float(killed_at), "")
        for name in jobs:
            session.attempt(f"losses, {name}", compare_losses, name, jobs)
            session.attempt(f"scores, {name}", score_run, name, jobs)


def compare_losses(session: Session, _: str, name: str, jobs: dict[str, Job]) -> None:
    found, reference = losses(jobs[name].folder), losses(jobs["cpu"].folder)
    session.add(f"train.py, {name}: losses", float(sum(map(math.isfinite, found.values()))), "")
    if name == "killed":
        same = found == losses(jobs["undisturbed"].folder)
        session.add("killed and resumed: the undisturbed run's losses, bit-exact", float(same), "")
    apart = max(abs(found[step] / reference[step] - 1) for step in reference)
    session.add(f"largest difference from the CPU's losses, {name}", apart, "of them")


def score_run(session: Session, _: str, name: str, jobs: dict[str, Job]) -> None:
    """RMSE of the last validation over persistence's, a mean over variables, at the first lead."""
    last = next(record for record in reversed(records(jobs[name].folder)) if "val/loss" in record)
    ours = {k.split("/")[-1]: rmse for k, rmse in last.items() if k.startswith("val/rmse/") and "@" not in k}
    ratios = [rmse / last[f"val/rmse_persistence/{variable}"] for variable, rmse in ours.items()]
    session.add(f"RMSE after {STEPS} steps, {name}", statistics.mean(ratios), "of persistence's")


def run_tests(which: str, _: Session) -> None:
    import pytest

    if pytest.main(["-vv", "--import-mode=importlib", "tests/test_gpu.py", "-k", which]):
        raise RuntimeError("tests failed")


# -- the parts, in the order of what is worth most; 480 s with what is spare


SLOW_CPU = 4  # times as long may a part take in a rehearsal, on a machine that does other things too
KILL_AFTER = 10  # seconds beyond its time that a part has to end by itself
COMPILES = "compiled or graphs"


@dataclass(frozen=True)
class Part:
    """What runs, the seconds it may take, and the group of parts that share its process."""

    run: Callable[[Session], None]
    seconds: float
    group: str = "timings"
    spare: bool = False  # takes the time that the others have left, if any


PARTS = {
    "train": Part(train, 75, "train"),
    "steps": Part(steps, 130),
    "attention": Part(attention_kernels, 25),
    "save": Part(save, 20),
    "loader": Part(loader, 20),
    "peers": Part(peers, 25),
    "rollout": Part(rollout, 20),
    "planner": Part(planner, 25),
    "products": Part(products, 10),
    "optimizers": Part(optimizers, 10),
    "activations": Part(activations, 10),
    "tests": Part(partial(run_tests, f"not rehearsal and not ({COMPILES})"), 40, "tests"),
    "ranks": Part(ranks, 50, "ranks"),
    "first cold": Part(first, 40, "cold"),
    "first warm": Part(first, 25, "warm"),
    "compiled": Part(partial(run_tests, COMPILES), 40, "compiled"),
    "more steps": Part(steps, 600, "more", spare=True),
}


def run_group(names: list[str], rows: Path, run: str, end: float, rehearse: bool, folder: Path) -> list[str]:
    """Run parts in one process, and in a new one after each that ends it; return those that failed."""
    # Compilations are kept for this run only; a first step finds nothing but what the last one left.
    kept = "first" if names[0].startswith("first") else "others"
    caches = {f"{name}_CACHE_DIR": str(folder / f"{kept}-{name}") for name in ("TORCHINDUCTOR", "TRITON")}
    caches |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if rehearse else {}
    command = [sys.executable, __file__, "--rows", str(rows), "--run", run, "--end", str(end)]
    waiting, failed = names, []
    while waiting:
        words = [*command, *["--rehearse"] * rehearse, "--parts", ",".join(waiting)]
        process = subprocess.Popen(words, cwd=ROOT, env=os.environ | caches, start_new_session=True)
        try:
            process.wait()
        finally:
            end_session(process.pid)  # its loader's or compiler's workers, too
        ended = {row["name"]: row["good"] for row in read_lines(rows, run=run, what="part")}
        last = next((name for name in waiting if not ended.get(name)), "")
        failed += [last] if last else []
        waiting = waiting[waiting.index(last) + 1 :] if last else []
    return failed


def end_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run_parts(names: list[str], rows: Path, run: str, end: float, rehearse: bool) -> int:
    """Run parts in this process, which the first that is not good ends: the GPU may be in any state."""
    parent = os.getppid()
    for name in names:
        part = PARTS[name]
        seconds = min(part.seconds * (SLOW_CPU if rehearse else 1), end - time.monotonic() - KILL_AFTER)
        print(f"== {name}", flush=True)
        if os.getppid() != parent:
            return 1  # the script that started it has ended
        session, good = Session(name.removeprefix("more ").split()[0], rows, run, seconds, rehearse), True
        torch.manual_seed(0)
        if seconds <= 5:
            print("  no time left")
            good = part.spare
        else:
            faulthandler.dump_traceback_later(seconds + KILL_AFTER, exit=True)
            try:
                part.run(session)
            except Exception:
                traceback.print_exc()
                good = False
            faulthandler.cancel_dump_traceback_later()
        taken = max(seconds - session.left, 0.0)
        session.write({"what": "part", "name": name, "value": taken, "unit": "s", "good": good})
        print(f"  {taken:.0f} s{'' if good else ', not well'}", flush=True)
        if not good:
            return 1
    return 0


# -- the table


def measured(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if "failed" not in row and all(row.get(k) == v for k, v in wanted.items())]


def named(rows: list[Row], what: str, part: str) -> float | None:
    """Return the value of the first row of a part that has a name which begins so."""
    found = measured(rows, part=part)
    return next((row["value"] for row in found if row["what"].startswith(what)), None)


def best_step(rows: list[Row], length: int, head: int, key: str = "value", **wanted: str) -> float | None:
    """Return a figure of the fastest step at a length and a head size, by their places in Sizes."""
    wanted = {"precision": "bf16"} | wanted
    found = measured(rows, part="steps", length=length, head=head, **wanted)
    return max(found, key=lambda row: row["value"])[key] if found else None


def ratio(above: float | None, below: float | None, less: float = 0.0) -> float | None:
    return above / below - less if above and below else None


def figures(rows: list[Row]) -> dict[str, float | None]:
    """Return the figures that gpu.toml names; None: not measured."""
    apart, saved = (
        "largest difference from the CPU's losses, ",
        "excess of ten steps after a save, async_with",
    )
    begins = {"float32 losses": (f"{apart}, undist", "train"), "bf16 losses": (f"{apart}, bf16", "train")}
    begins |= {"resumed": ("killed and resumed", "train"), "units": ("units of T d kept, sel", "activations")}
    begins |= {name: (f"first step, {name}", "first") for name in ("cold", "warm")}
    begins |= {
        "save": (saved, "save"),
        "loader": ("loader,", "loader"),
        "adamw": ("AdamW fused", "optimizers"),
    }
    found = {name: named(rows, *each) for name, each in begins.items()}
    bf16 = [best_step(rows, length, 0) for length in (0, 1)]
    for length in (0, 1):
        fast = best_step(rows, length, 0, precision="float8")
        found |= {f"float8 {length}": ratio(fast, bf16[length])}
        found |= {f"mfu {length} {head}": best_step(rows, length, head, "mfu") for head in (0, 1)}
    none, selective = (best_step(rows, 0, 0, mode=mode) for mode in ("none", "selective"))
    found["selective"] = ratio(none, selective, 1.0)
    rolled = [
        (row["tokens"], 1e3 * row["value"]) for row in measured(rows, part="rollout") if "tokens" in row
    ]
    found |= {f"rollout {place}": ms for place, (_, ms) in enumerate(sorted(rolled))}
    for kind, (part, key) in itertools.product(
        ("time", "memory"), (("planner", "value"), ("ranks", "error"))
    ):
        errors = [abs(row[key]) for row in measured(rows, part=part, kind=kind)]
        found[f"worst {kind} {part}"] = max(errors, default=None)
        if errors and (kind, part) == ("time", "planner"):
            found["mean time"] = statistics.mean(errors)
    found["loader over step"] = ratio(named(rows, "samples that the loader gives", "loader"), bf16[0])
    found |= {name: ratio(bf16[0], named(rows, name, "peers")) for name in ("tutorial", "timm")}
    return found


def table(rows: list[Row]) -> str:
    found = figures(rows)
    lines: list[tuple] = [("", "measured", "best known", "limit", "goal")]
    for what, name, known, limit, goal, form in tomllib.loads(TARGETS.read_text())["lines"]:
        value, (sign, _, number) = found.get(name), goal.partition(" ")
        verdict = ""
        if value is not None and goal:
            good = value >= float(number) if sign == ">=" else value <= float(number)
            verdict = "  met" if good else "  missed"
        shown = "not measured" if value is None else format(value, form)
        lines.append((what, shown, known, limit, goal, verdict))
    return text_table("<46 >14 >14 >12 >12 <8", lines)


def main() -> int:
    parser = parser_of(__doc__)
    names = list(PARTS)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU, in four minutes")
    parser.add_argument("--only", default=names, type=lambda text: text.split(","), help="names of parts")
    parser.add_argument("--minutes", type=float, default=8.0, help="that all parts together may take")
    parser.add_argument("--parts", type=lambda text: text.split(","), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts:
        return run_parts(options.parts, options.rows, options.run, options.end, options.rehearse)
    if unknown := set(options.only) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(names)}")
    if not options.rehearse and not torch.cuda.is_available():
        print("benchmarks/gpu.sh: no GPU here; --rehearse runs it on the CPU", file=sys.stderr)
        return 2
    # Figures of a rehearsal mean nothing and are not kept among the results.
    folder = Path(os.environ.get("OUT") or (ROOT / "outputs/gpu" if options.rehearse else RESULTS))
    rows, run, failed = folder / "gpu.jsonl", time.strftime("%Y-%m-%dT%H:%M:%S"), []
    end = time.monotonic() + 60 * options.minutes * (SLOW_CPU if options.rehearse else 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # past the `finally` of run_group
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(PARTS[name].group, []).extend([name] if name in options.only else [])
    with tempfile.TemporaryDirectory() as scratch:
        for group in filter(None, groups.values()):
            failed += run_group(group, rows, run, end, options.rehearse, Path(scratch))
    found = read_lines(rows, run=run)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU: figures that mean nothing"
    print(f"\nrows: {rows}\non {where}, torch {torch.__version__}; {len(measured(found))} figures")
    for row in found:
        if "failed" in row:
            print(f"failed: {row['what']}: {row['failed']}")
        if row["what"].startswith("a step's attention") and not row["value"]:
            print(f"warning: attention ran on {row['attention']}: none of Hopper's kernels was the fastest")
    print("\n".join([f"part {name}: failed" for name in failed] + ["", table(found)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
