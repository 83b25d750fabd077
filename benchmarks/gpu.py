"""Measurements on one GPU, part by part, printed next to the best known values, limits and goals.

    benchmarks/gpu.sh [--rehearse] [--only steps,planner] [--minutes 8]

Parts of a group share a process, so that torch and CUDA start once; after one that fails or takes too long a
new process goes on with the next. Fields are random; a step is train.py's. Every row is written when it is
measured (benchmarks/README.md says where). Ends with 1 when a part failed, and with 2 without a GPU.
"""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

from benchmarks import trainer_overhead
from benchmarks.random_run import RandomRun
from benchmarks.results_file import RESULTS, ROOT, clock, parse, read_lines, record
from command_line import text_table
from config import ActivationCheckpoint, Compile, Config, Float8, Model, Optimizer, Parallelism, Training
from datasets.archive import open_archive
from datasets.loader import FieldDataset, TrainLoader, TrainSampler
from models.attention import activate, attention, check_backend, find_obstacle, preferred_backend
from models.embeddings import unpatchify
from models.initialization import init_weights
from models.vit import VisionTransformer
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.degrees import Degrees
from parallelisms.mesh import start_ranks
from planning.clusters import load_cluster
from planning.memory import block_activations, memory, unit_bytes
from planning.step_time import step_time
from planning.workload import Workload, architecture_of
from tests.odd_data import rewrite
from tests.started_jobs import Job, losses
from tests.storages import bytes_alive
from training.metrics import peak_tflops
from verification.rollout import rollout as roll_out

LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements: vit1b, or a tiny model to test the script."""

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
    stall_dim: int = 512  # of 0.45 GB to save: what a rank of 64 has of vit1b, and some more
    dates: int = 12  # that the loader reads from
    workers: int = 8

    def tokens(self, patch: tuple[int, int]) -> int:
        return self.grid[0] * self.grid[1] // (patch[0] * patch[1])


TINY = Sizes(
    *((32, 64), ((4, 8), (4, 4)), 3, 64, 2, (4, 2), 2, (1, 2), False, ((64, 192), (256, 64)), 256),
    *(64, 6, 0),
)


def median_seconds(run: Callable[[], Any], warm_up: int, number: int, device: torch.device) -> float:
    """Return the median of `number` calls, on a GPU each between two of its events."""
    for _ in range(warm_up):
        run()
    if device.type == "cpu":
        return statistics.median(clock(run) for _ in range(number))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


class Session:
    """One part: where it runs, until when, and where its rows go."""

    def __init__(self, part: str, rows: Path, run: str, seconds: float, rehearse: bool) -> None:
        self.part, self.rows, self.run, self.rehearse = part, rows, run, rehearse
        self.sizes, self.device = (TINY if rehearse else Sizes()), torch.device("cpu" if rehearse else "cuda")
        self.on_gpu, self.end = self.device.type == "cuda", time.monotonic() + seconds

    def start_ranks(self) -> None:
        if not dist.is_initialized():
            start_ranks(600, "auto" if self.on_gpu else "gloo")

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def seconds(self, run: Callable[[], Any], warm_up: int, number: int) -> float:
        return median_seconds(run, warm_up, number, self.device)

    def add(self, what: str, value: float, unit: str, **about: Any) -> None:
        print(f"  {what:<58}{value:>12.5g} {unit}", flush=True)
        self.write({"what": what, "value": value, "unit": unit, **about})

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Report a failure in one line and one row; the other parts continue."""
        try:
            yield
        except Exception as error:  # of whatever library: it is the answer to the question
            reason = describe_error(error)
            print(f"  {what:<58}{'failed':>12} {reason}", flush=True)
            self.write({"what": what, "failed": reason})
            if "CUDA error" in reason:  # nothing that this process asks of the GPU works any more
                raise
        self.free()

    def write(self, row: Row) -> None:
        record(self.rows, [{"run": self.run, "part": self.part, **row}])

    def free(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def mfu(self, flops: float) -> float | None:
        peak = peak_tflops(self.device) * 1e12
        return flops / peak if peak else None


RESERVED = 2 * 2**30  # bytes of a device that libraries take in addition to torch's allocator
PRECISIONS = ("bf16", "float8")  # names of a case with and without float8
NAMES = ("length", "head", "precision", "mode")  # of a case, in a row
EVERY_N = 2  # blocks as one, where a mode says so
SAFETY = 1.05  # on the planner's peak: the allocator's rounding
CASE_SECONDS = 35.0  # that a case may take, compilation included


@dataclass(frozen=True)
class Case:
    patch: tuple[int, int]
    heads: int
    float8: Any = False  # rows of earlier versions have a name here
    mode: Any = "selective"
    batch: int = 1
    backend: Any = "sdpa"
    dtype: Any = "bfloat16"
    windows: Any = ()  # model.attention_windows

    def workload(self, sizes: Sizes) -> Workload:
        channels, values = sizes.variables, sizes.variables * math.prod(sizes.grid)
        shape = ("vit", self.patch, sizes.dim, sizes.layers, self.heads)
        model = architecture_of(Model(*shape, attention_windows=self.windows), sizes.grid, channels, channels)
        about = {"field_values": values, "input_values": values, "ac_mode": self.mode}
        about |= {"compiled": sizes.compiled, "float8": bool(self.float8), "attention": self.backend}
        about |= {"dtype": self.dtype, "every_n": EVERY_N}
        return Workload(model, Degrees(), self.batch, self.batch, **about)

    def about(self, sizes: Sizes) -> Row:
        """Return the names and numbers of a row; length and head are places in the lists of Sizes."""
        lengths = {"tokens": sizes.tokens(self.patch), "length": sizes.patches.index(self.patch)}
        heads = {"head": sizes.heads.index(self.heads), "head_dim": sizes.dim // self.heads}
        kind = {"precision": PRECISIONS[self.float8], "windowed": bool(self.windows)}
        return asdict(self) | lengths | heads | kind

    def label(self, sizes: Sizes) -> str:
        shape = f"{sizes.tokens(self.patch)} tokens, {self.heads} x {sizes.dim // self.heads}"
        kind = f"{PRECISIONS[self.float8]}, {self.mode}, {self.backend}"
        return f"{shape}, {kind}{', in windows' if self.windows else ''}"


def training_of(
    case: Case, sizes: Sizes, device: torch.device, layout: Parallelism | None = None, accumulation: int = 1
) -> RandomRun:
    shape = ("vit", case.patch, sizes.dim, sizes.layers, case.heads)
    config = Config(
        model=Model(*shape, attention_backend=case.backend, attention_windows=case.windows),
        optimizer=Optimizer(lr=1e-5),
        training=Training(local_batch_size=case.batch, mixed_precision_param=case.dtype),
        activation_checkpoint=ActivationCheckpoint(case.mode, EVERY_N),
        compile=Compile(sizes.compiled),
        float8=Float8(case.float8),
        parallelism=layout or Parallelism(),
    )
    return RandomRun(config, sizes.grid, sizes.variables, device, drawn_here=True, accumulation=accumulation)


def steps(session: Session) -> None:
    """Measure samples/s, share of the peak and memory of every case that there is time for."""
    session.start_ranks()
    sizes, (short, long), (many, few) = session.sizes, session.sizes.patches, session.sizes.heads
    # In order of importance.
    fast, plain = partial(Case, float8=True), partial(Case, mode="none")
    cases = [Case(short, many), plain(short, many), Case(long, many), fast(short, many), Case(short, few)]
    cases += [Case(long, few), fast(long, many), plain(long, many), plain(short, few), plain(long, few)]
    cases += [fast(short, many, mode="none"), fast(short, few), fast(long, few)]
    earlier = read_lines(session.rows, run=session.run, part="steps")
    done = [tuple(map(row.get, NAMES)) for row in earlier]
    for case in [case for case in cases if tuple(map(case.about(sizes).get, NAMES)) not in done]:
        if session.left < (CASE_SECONDS if session.on_gpu else 1.0):
            return
        case = replace(case, backend=backend_of(case, session))
        with session.attempt(case.label(sizes)):
            time_steps(session, case, kernels=not done)


def windows(session: Session) -> None:
    """Measure steps with attention to all tokens, and in bands of rows, then strips of columns."""
    session.start_ranks()
    sizes, kernels = session.sizes, ("flash4", "cudnn") if session.on_gpu else ("sdpa",)
    for patch, backend, heads in itertools.product(sizes.patches[::-1], kernels, sizes.heads[::-1]):
        if find_obstacle(backend, session.device.type, torch.bfloat16):
            continue
        rows, columns = (points // size for points, size in zip(sizes.grid, patch, strict=True))
        for shapes in ((), ((rows // 8, 0), (0, columns // 8))):
            if session.left < (CASE_SECONDS if session.on_gpu else 1.0):
                return
            case = Case(patch, heads, backend=backend, windows=shapes)
            with session.attempt(case.label(sizes)):
                time_steps(session, case, kernels=True)


def backend_of(case: Case, session: Session) -> str:
    """Return the kernel of model.attention_backend = "auto"."""
    tokens, head_dim = session.sizes.tokens(case.patch), session.sizes.dim // case.heads
    return preferred_backend(session.device, torch.bfloat16, tokens, head_dim)


def time_steps(session: Session, case: Case, kernels: bool) -> None:
    """Measure a case with the largest batch that fits, and its kernels on a GPU."""
    sizes, training, seconds, started = session.sizes, None, 0.0, time.perf_counter()
    case = replace(case, batch=sizes.largest_batch)
    free = torch.cuda.mem_get_info()[0] - RESERVED if session.on_gpu else 2**40
    while case.batch > 1 and SAFETY * memory(case.workload(sizes)).peak > free:
        case = replace(case, batch=case.batch // 2)
    while training is None:
        try:
            training = training_of(case, sizes, session.device)
            seconds = session.seconds(training.step, *sizes.steps)
        except torch.cuda.OutOfMemoryError:
            if case.batch == 1:
                raise
            training, case = None, replace(case, batch=case.batch // 2)
        if training is None:
            session.free()  # not while the error is handled, which refers to the tensors
            started = time.perf_counter()
    spent, loss = time.perf_counter() - started, training.loss()
    if math.isnan(loss):
        raise ValueError("the loss is NaN")
    flops = 3 * case.workload(sizes).model.flops * case.batch / seconds
    peak = torch.cuda.max_memory_allocated() if session.on_gpu else 0
    about = {"step_seconds": seconds, "mfu": session.mfu(flops), "tflops": flops / 1e12, "peak_bytes": peak}
    about |= {"loss": loss, "with_compilation": spent} | case.about(sizes)
    session.add(f"{case.label(sizes)}, batch {case.batch}", case.batch / seconds, "samples/s", **about)
    print(f"    {flops / 1e12:.1f} TFLOP/s, MFU {about['mfu'] or 0:.1%}, {peak / 2**30:.1f} GiB")
    if not (kernels and session.on_gpu):
        return
    # Where the step goes, kernel by kernel, and whether its attention is one of Hopper's own.
    recorded = kernel_seconds(training.step)
    total = sum(seconds for _, seconds in recorded)
    for name, seconds in recorded[:15]:
        print(f"    {seconds / total:>6.1%} {1e3 * seconds:>9.2f} ms  {name[:90]}")
    words = ("flash", "fmha", "sdpa", "attention", "attn", "cudnn")
    names = [name for name, _ in recorded if any(word in name.lower() for word in words)]
    about = {"attention": names, "kernels": [[name, seconds] for name, seconds in recorded[:40]]}
    is_own = bool(names) and all(map(of_hopper, names[:2]))
    session.add("a step's attention is a kernel of this GPU's own", float(is_own), "", **about)


def planner(session: Session) -> None:
    """The first step anchors the plans of the others, as plan.py --anchor does."""
    cluster = load_cluster("h200x1" if session.on_gpu else "cpu1")
    rows = [row for row in read_lines(session.rows, run=session.run, part="steps") if "tokens" in row]

    def work_of(row: Row) -> Workload:
        settings: Row = {name: row[name] for name in ("heads", "float8", "mode", "batch", "backend")}
        return Case(tuple(row["patch"]), **settings).workload(session.sizes)

    for row in rows:
        with session.attempt(row["what"]):
            factor = rows[0]["step_seconds"] / step_time(work_of(rows[0]), cluster).total
            predicted = factor * step_time(work_of(row), cluster).total
            about = {"seconds": predicted, "factor": factor, "kind": "time"}
            error = predicted / row["step_seconds"] - 1
            session.add(f"time, planned: {row['what']}", error, "of measured", **about)
            if row["peak_bytes"]:
                error = memory(work_of(row)).peak / row["peak_bytes"] - 1
                session.add(f"peak memory, planned: {row['what']}", error, "of measured", kind="memory")


def rollout(session: Session) -> None:
    session.start_ranks()
    sizes, device, number = session.sizes, session.device, 4
    for place, patch in enumerate(sizes.patches):
        what = f"rollout step {place}, {sizes.tokens(patch)} tokens"
        with session.attempt(what):
            case = Case(patch, sizes.heads[0], mode="none")
            case = replace(case, backend=backend_of(case, session))
            assembly = training_of(case, sizes, device).assembly
            assembly.model.train(False)
            fields = torch.randn(1, sizes.variables, *sizes.grid, device=device)
            times = torch.zeros(1, dtype=torch.int64, device=device)
            model = (assembly.model.predict, assembly.normalizer, assembly.conditions, 21600)
            run = partial(lambda *arguments: [*roll_out(*arguments)] and None, *model, fields, times, number)
            session.add(what, 1e3 * session.seconds(run, 1, 3) / number, "ms")
            assembly = model = run = None  # before the next one takes its memory


def first(session: Session) -> None:
    """Measure the first step of a process, compilation included; the caller chooses the cache it finds."""
    session.start_ranks()
    sizes = replace(session.sizes, compiled=True)
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    cache = "warm" if folder.name and folder.exists() and any(folder.iterdir()) else "cold"
    training = training_of(Case(sizes.patches[0], sizes.heads[0], mode="none"), sizes, session.device)
    if session.on_gpu:
        torch.cuda.synchronize()
    session.add(f"first step, {cache}", clock(training.loss), "s", cache=cache, depth=sizes.layers)


BACKENDS = {"cpu": ("sdpa", "math"), "cuda": ("sdpa", "cudnn", "flash", "flash4", "flash_attn")}
# In names of kernels for Hopper: cuDNN's, FlashAttention-3's and -4's; torch's flash kernel is for Ampere.
HOPPER_KERNELS = ("cudnn", "sm90", "flash_fwd_hopper", "flash_attncute")


def attention_kernels(session: Session) -> None:
    """Measure every kernel that runs here: the rates that CHOICES of models/attention.py quotes."""
    sizes, kernels = session.sizes, BACKENDS[session.device.type]
    for patch, heads, backend in [(p, h, k) for p in sizes.patches for h in sizes.heads for k in kernels]:
        batch, tokens, head_dim = 2, sizes.tokens(patch), sizes.dim // heads
        what = f"{backend}, {tokens} tokens, {heads} x {head_dim}"
        with session.attempt(what):
            check_backend(backend, session.device.type, torch.bfloat16)
            attend = partial(attention, backend=activate(backend))
            # Parts of one tensor as in models/vit.py: kernels that want them otherwise copy them.
            shape = (batch, tokens, heads, 3, head_dim)
            qkv = torch.randn(shape, dtype=torch.bfloat16, device=session.device)
            q, k, v = (x.detach().requires_grad_() for x in qkv.permute(3, 0, 2, 1, 4).unbind(0))
            out = attend(q, k, v)
            gradient, unit = torch.randn_like(out), batch * heads * tokens**2 * head_dim
            differentiate = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
            runs = {"forward": (4, partial(attend, q, k, v)), "backward": (8, differentiate)}  # FLOPs a unit
            for way, (flops, run) in runs.items():
                rate = flops * unit / session.seconds(run, *sizes.steps) / 1e12
                names = [name for name, _ in kernel_seconds(run)[:3]] if session.on_gpu else []
                about = {"kind": way, "sizes": (batch, heads, tokens, head_dim), "kernels": names}
                session.add(f"{what}, {way}", rate, "TFLOP/s", **about)
                if names:
                    print(f"    {names[0][:100]}{'' if of_hopper(names[0]) else '  NOT ONE OF HOPPER'}")


def kernel_seconds(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return kernels and their seconds in one call, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    seconds = [(event.key, event.device_time_total / 1e6) for event in recorded.key_averages()]
    return sorted(seconds, key=lambda pair: -pair[1])


def of_hopper(kernel: str) -> bool:
    """True on other GPUs, which have no kernels of their own."""
    is_own = any(part in kernel.lower() for part in HOPPER_KERNELS)
    return is_own or torch.cuda.get_device_capability()[0] != 9


def products(session: Session) -> None:
    one, m = torch.ones((), device=session.device), session.sizes.rows
    for (k, n), precision in itertools.product(session.sizes.products, PRECISIONS):
        what = f"{precision}, M {m}, K {k}, N {n}"
        with session.attempt(what):
            kind = torch.float8_e4m3fn if precision == "float8" else torch.bfloat16
            x, w = (torch.randn(size, device=session.device).to(kind) for size in ((m, k), (n, k)))
            run = partial(torch.matmul, x, w.t())
            if precision == "float8":
                scales = (one, one, None, None, torch.bfloat16, True)
                run = partial(torch.ops.aten._scaled_mm, x, w.t(), *scales)
            session.add(what, 2.0 * m * k * n / session.seconds(run, 3, 10) / 1e12, "TFLOP/s", inputs=k)


def optimizers(session: Session) -> None:
    sizes = session.sizes
    number = Case(sizes.patches[0], sizes.heads[0]).workload(sizes).model.parameters
    parameter = torch.randn(min(number, 2**29), device=session.device).requires_grad_()
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    rate = 28 * parameter.numel() / session.seconds(optimizer.step, *sizes.steps)
    session.add("AdamW fused, whole model", 28 * number / rate, "s", gigabytes_per_second=rate / 1e9)


def activations(session: Session) -> None:
    """Count what a block keeps for its backward pass, in tokens x width numbers of bf16: half of what four
    keep beyond two, and on a GPU of the difference between two batches, on which autocast's copies of weights
    do not depend.
    """
    dim, grid, compiled = max(session.sizes.dim, 64), (32, 32), session.sizes.compiled
    settings = Model("vit", (1, 1), dim, 2, dim // 64, attention_backend="sdpa")
    work = Workload(architecture_of(settings, grid, 2, 2), Degrees(), 2, 2)

    def kept_bytes(mode: Any, layers: int, batch: int) -> int:
        model = VisionTransformer(2, 2, grid, replace(settings, num_layers=layers))
        init_weights(model, 0)
        model.to(session.device)
        apply_activation_checkpoint(model, ActivationCheckpoint(mode, EVERY_N), compiled=compiled)
        if compiled:
            apply_compile(model)
        x = torch.randn(batch, math.prod(grid), 2, device=session.device)
        if not session.on_gpu:
            return bytes_alive(model, x, True)
        for _ in range(2):  # the first compiles, and makes the gradients
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
            del loss
        return kept

    for mode in ("none", "selective"):
        what = f"units of T d kept, {mode}"
        with session.attempt(what):
            torch._dynamo.reset()
            of_batch = [kept_bytes(mode, 4, batch) - kept_bytes(mode, 2, batch) for batch in (2, 4)]
            size = (of_batch[1] - of_batch[0] if session.on_gpu else of_batch[0]) / 2
            planned = block_activations(work, mode) / unit_bytes(work)
            session.add(what, size / unit_bytes(work), "", planned=planned)


def loader(session: Session) -> None:
    """Measure GB/s into the device's memory, from fields a date a chunk, without compression."""
    sizes, (height, width), number, batch = session.sizes, session.sizes.grid, 12, 4
    times = np.datetime64("2020-01-01T00", "ns") + np.arange(sizes.dates) * np.timedelta64(6, "h")
    latitude = 90 - (np.arange(height) + 0.5) * 180 / height
    coords = {"time": times, "latitude": latitude, "longitude": np.arange(width) * 360 / width}
    values = np.random.default_rng(0).standard_normal((sizes.dates, height, width), dtype=np.float32)
    ds = xr.Dataset({f"field_{i}": ([*coords], values) for i in range(sizes.variables)}, coords)
    encoding: Any = {n: {"chunks": (1, height, width), "compressors": None} for n in ds.data_vars}
    with tempfile.TemporaryDirectory() as folder, session.attempt("loader"):
        ds.to_zarr(f"{folder}/fields.zarr", zarr_format=2, encoding=encoding, consolidated=True)
        archive = open_archive(f"{folder}/fields.zarr")
        pairs = np.stack([np.arange(sizes.dates - 1), np.arange(1, sizes.dates)], axis=1)
        dataset = FieldDataset(archive, archive.variables, pairs)
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


def save(session: Session) -> None:
    """Measure the excess of ten steps after a save, by mode, as benchmarks/trainer_overhead.py does."""
    session.start_ranks()
    training = trainer_overhead.Saving(session.sizes.stall_dim, session.device)
    with tempfile.TemporaryDirectory() as folder:
        excess, step = trainer_overhead.measure_excess(training, Path(folder), 1 if session.rehearse else 2)
    for mode, seconds in excess.items():
        session.add(f"excess of ten steps after a save, {mode}", seconds, "s", mode=mode, step_seconds=step)


TAUGHT = ", compiled, fused Adam"  # the last rung of the tutorial
PEERS = {"tutorial": "tutorial's way", "timm": "timm"}


class PeerModel(nn.Module):
    """A ViT on fields (B, C, H, W): timm's, or as tutorials write it, of torch's own layers."""

    def __init__(self, peer: str, sizes: Sizes, patch: tuple[int, int]) -> None:
        super().__init__()
        self.grid, self.patch, dim, heads = sizes.grid, patch, sizes.dim, sizes.heads[0]
        if peer == "timm":
            from timm.models.vision_transformer import VisionTransformer  # type: ignore[import-not-found]

            shape = {"img_size": sizes.grid, "patch_size": patch, "in_chans": sizes.variables}
            shape |= {"embed_dim": dim, "depth": sizes.layers, "num_heads": heads, "num_classes": 0}
            self.trunk = VisionTransformer(**shape, class_token=False, global_pool="")
        else:
            self.embed = nn.Conv2d(sizes.variables, dim, patch, patch)
            self.position = nn.Parameter(torch.zeros(1, sizes.tokens(patch), dim))
            about: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
            block = partial(nn.TransformerEncoderLayer, dim, heads, 4 * dim, **about)
            self.blocks = nn.Sequential(*(block() for _ in range(sizes.layers)), nn.LayerNorm(dim))
        self.head = nn.Linear(dim, sizes.variables * math.prod(patch))

    def forward(self, fields: Tensor) -> Tensor:
        if hasattr(self, "blocks"):
            tokens = self.blocks(self.embed(fields).flatten(2).transpose(1, 2) + self.position)  # (B, T, D)
        else:
            tokens = self.trunk.forward_features(fields)
        return unpatchify(self.head(tokens), self.grid, self.patch)


def peers(session: Session) -> None:
    """Their usual step, autocast and Adam, and the last rung of the tutorial: compiled, with fused Adam."""
    sizes, patch = session.sizes, session.sizes.patches[0]
    for (peer, name), taught in itertools.product(PEERS.items(), (True, False)):
        what = f"{name}{TAUGHT * taught}, {sizes.tokens(patch)} tokens"
        with session.attempt(what):
            for batch in (4, 2, 1):  # the largest that fits
                try:
                    seconds = peer_seconds(session, peer, patch, batch, taught)
                    flops = 3 * Case(patch, sizes.heads[0]).workload(sizes).model.flops * batch / seconds
                    about = {"mfu": session.mfu(flops), "batch": batch, "tokens": sizes.tokens(patch)}
                    session.add(f"{what}, batch {batch}", batch / seconds, "samples/s", **about)
                    break
                except torch.cuda.OutOfMemoryError:
                    if batch == 1:
                        raise
                session.free()


def peer_seconds(session: Session, peer: str, patch: tuple[int, int], batch: int, taught: bool) -> float:
    with session.device:
        fields, target = torch.randn(2, batch, session.sizes.variables, *session.sizes.grid)
        model = PeerModel(peer, session.sizes, patch)
    predict = torch.compile(model) if taught else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=taught)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(session.device.type, torch.bfloat16):
            loss = F.mse_loss(predict(fields), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return session.seconds(step, 2 if taught else 1, 3)


def train(session: Session) -> None:
    """Train and validate through NCCL: undisturbed, killed and resumed, in bf16, and on the CPU."""
    config, data = ROOT / "train_configs/demo.toml", ["--training.local_batch_size", "2"]
    for folder in (ROOT / ".gpu/data", ROOT.parent / "shared/data"):  # carried along, or where the project is
        if (folder / LISTS["train"]["winds"]).exists():
            data = ["--data.path", str(folder / LISTS["train"]["winds"])]
            rewrite(folder)  # the land-sea mask, to where the configuration has it
            config = ROOT / "tests/configs/gfs_winds.toml"
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, *options: str, **environment: str) -> Job:
            words = [*data, *LISTS["train"]["options"], *options]
            return Job(config, Path(folder, name), *words, NGPU="1", **environment)

        jobs = {"cpu": start("cpu", CUDA_VISIBLE_DEVICES=""), "undisturbed": start("undisturbed")}
        jobs |= {"bf16": start("bf16", "--training.mixed_precision_param", "bfloat16")}
        jobs["killed"] = start("killed")
        try:
            jobs["killed"].wait_for_step(20, session.left)
            jobs["killed"].kill_all()
            jobs["killed"] = start("killed")
            for name, job in jobs.items():
                ended = job.end(max(session.left, 1.0))
                print(job.output[-3000:] if ended else "", end="")
                session.add(f"train.py, {name}: exit code", float(ended), "")
        finally:
            for job in jobs.values():
                job.kill_all()
        for name in jobs:
            with session.attempt(f"losses, {name}"):
                ours, reference = losses(jobs[name].folder), losses(jobs["cpu"].folder)
                if name == "killed":
                    same = float(ours == losses(jobs["undisturbed"].folder))
                    session.add("killed and resumed: the undisturbed run's losses, bit-exact", same, "")
                error = max(abs(ours[step] / reference[step] - 1) for step in reference)
                session.add(f"largest difference from the CPU's losses, {name}", error, "of them")


def run_tests(_: Session, which: str) -> None:
    import pytest

    if pytest.main(["-vv", "--import-mode=importlib", "tests/test_gpu.py", "-k", which]):
        raise RuntimeError("tests failed")


SLOW_CPU = 4  # times as long may a part take in a rehearsal, on a machine that does other things too
KILL_AFTER = 10  # seconds beyond its time that a part has to end by itself
PARTS: dict[str, Row] = LISTS["parts"]


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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its loader's or compiler's workers, too
        ended = {row["name"]: row["good"] for row in read_lines(rows, run=run, what="part")}
        last = next((name for name in waiting if not ended.get(name)), "")
        failed += [last] if last else []
        waiting = waiting[waiting.index(last) + 1 :] if last else []
    return failed


def run_parts(names: list[str], rows: Path, run: str, end: float, rehearse: bool) -> int:
    """Run parts in this process until one fails, because the GPU may then be in any state."""
    parent = os.getppid()
    for name in names:
        part = PARTS[name]
        seconds = part["seconds"] * (SLOW_CPU if rehearse else 1)
        seconds = min(seconds, end - time.monotonic() - KILL_AFTER)
        print(f"== {name}", flush=True)
        if os.getppid() != parent:
            return 1  # the script that started it has ended
        session, good = Session(name.removeprefix("more ").split()[0], rows, run, seconds, rehearse), True
        torch.manual_seed(0)
        if seconds <= 5:
            print("  no time left")
            good = "spare" in part
        else:
            faulthandler.dump_traceback_later(seconds + KILL_AFTER, exit=True)
            try:
                globals()[part["run"]](session, *part.get("words", ()))
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


def table(rows: list[Row]) -> str:
    """Return the lines of gpu.toml with what was measured, next to the best known values and the goals."""
    rows = [row for row in rows if "failed" not in row]

    def best(part: str, key: str = "value", begin: str = "", **wanted: Any) -> float | None:
        """Return the largest of the rows of a part that have these values; None where there is none."""
        those = [row for row in rows if row["part"] == part and row["what"].startswith(begin)]
        those = [row for row in those if all(row.get(name) == value for name, value in wanted.items())]
        return max((row[key] for row in those if row.get(key) is not None), default=None)

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    figures: dict[str, float | None] = {}
    for length in (0, 1):
        step = partial(best, "steps", length=length)
        figures[f"float8 {length}"] = ratio(*(step(head=0, precision=name) for name in PRECISIONS[::-1]))
        pair = (best("windows", length=length, windowed=windowed) for windowed in (True, False))
        figures[f"windows {length}"] = ratio(*pair)
        for head in (0, 1):
            figures[f"mfu {length} {head}"] = step("mfu", head=head, precision="bf16")
    step = partial(best, "steps", length=0, head=0, precision="bf16")
    selective = ratio(step(mode="none"), step(mode="selective"))
    figures["selective"] = selective and selective - 1
    for kind in ("time", "memory"):
        errors = [abs(row["value"]) for row in rows if row["part"] == "planner" and row.get("kind") == kind]
        figures[f"worst {kind} planner"] = max(errors, default=None)
        figures[f"mean {kind} planner"] = statistics.mean(errors) if errors else None
    figures["loader over step"] = ratio(best("loader", begin="samples that the loader gives"), step())
    for peer, name in PEERS.items():
        figures[peer] = ratio(step(), best("peers", begin=name + TAUGHT))
    lines: list[tuple] = [("", "measured", "best known", "limit", "goal")]
    for what, name, known, limit, goal, form in LISTS["lines"]:
        part, _, begin = name.partition(": ")
        value = best(part, begin=begin) if begin else figures[name]
        sign, _, number = goal.partition(" ")
        verdict = ""
        if value is not None and goal:
            good = value >= float(number) if sign == ">=" else value <= float(number)
            verdict = "  met" if good else "  missed"
        shown = "not measured" if value is None else format(value, form)
        lines.append((what, shown, known, limit, goal, verdict))
    return text_table("<46 >14 >14 >12 >12 <8", lines)


def main() -> int:
    # The last four are of the processes that it starts.
    own = {"parts": "", "rows": Path(), "run": "", "end": 0.0}
    options = parse(__doc__, rehearse=False, only=",".join(PARTS), minutes=8.0, **own)
    if options.parts:
        return run_parts(options.parts.split(","), options.rows, options.run, options.end, options.rehearse)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        print(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if not options.rehearse and not torch.cuda.is_available():
        print("benchmarks/gpu.sh: no GPU here; --rehearse runs it on the CPU", file=sys.stderr)
        return 2
    # Figures of a rehearsal mean nothing and are not kept among the results.
    folder = Path(os.environ.get("OUT") or (ROOT / "outputs/gpu" if options.rehearse else RESULTS))
    rows, run, failed = folder / "gpu.jsonl", time.strftime("%Y-%m-%dT%H:%M:%S"), []
    end = time.monotonic() + 60 * options.minutes * (SLOW_CPU if options.rehearse else 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # past the `finally` of run_group
    groups: dict[str, list[str]] = {}
    for name in PARTS:
        groups.setdefault(PARTS[name].get("group", "timings"), []).extend([name] if name in chosen else [])
    with tempfile.TemporaryDirectory() as scratch:
        for group in filter(None, groups.values()):
            failed += run_group(group, rows, run, end, options.rehearse, Path(scratch))
    measured = read_lines(rows, run=run)
    bad = [f"failed: {row['what']}: {row['failed']}" for row in measured if "failed" in row]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU: figures that mean nothing"
    print(f"\nrows: {rows}\non {where}, torch {torch.__version__}; {len(measured) - len(bad)} figures")
    print("\n".join([*bad, *(f"part {name}: failed" for name in failed), "", table(measured)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
