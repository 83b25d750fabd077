"""Measurements on one GPU, part by part, printed next to the best known values, limits and goals.

    benchmarks/gpu.sh [--rehearse] [--only steps,planner] [--minutes 8]

A part has a process of its own, which ends when its time is up. Fields are random; a step is train.py's.
Every row is written when it is measured (benchmarks/README.md says where). Ends with 1 when a part failed,
and with 2 without a GPU.
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import trainer_overhead
from benchmarks.loader import Shape, measure
from benchmarks.random_run import RandomRun
from benchmarks.results_file import RESULTS, ROOT, clock, parse, read_lines, record
from command_line import text_table
from config import ActivationCheckpoint, Compile, Config, Float8, Model, Optimizer, Parallelism, Training
from models.attention import activate, attention, check_backend, find_obstacle, preferred_backend
from models.embeddings import unpatchify
from parallelisms.degrees import Degrees
from parallelisms.mesh import start_ranks
from planning.clusters import load_cluster
from planning.memory import memory
from planning.step_time import step_time
from planning.workload import Workload, architecture_of
from tests.started_jobs import Job, losses
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
    stall_dim: int = 512  # of 0.45 GB to save: what a rank of 64 has of vit1b, and some more
    dates: int = 12  # that the loader reads from
    workers: int = 8

    def tokens(self, patch: tuple[int, int]) -> int:
        return self.grid[0] * self.grid[1] // (patch[0] * patch[1])


TINY = Sizes((32, 64), ((4, 8), (4, 4)), 3, 64, 2, (4, 2), 2, (1, 2), False, 64, 6, 2)


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
        return Workload(model, Degrees(), self.batch, self.batch, dtype=self.dtype, **about)

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
        activation_checkpoint=ActivationCheckpoint(case.mode),
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


def with_largest_batch(case: Case, session: Session) -> Case:
    """Return a case with the largest batch that fits by the planner."""
    case = replace(case, batch=session.sizes.largest_batch)
    free = torch.cuda.mem_get_info()[0] - RESERVED if session.on_gpu else 2**40
    while case.batch > 1 and SAFETY * memory(case.workload(session.sizes)).peak > free:
        case = replace(case, batch=case.batch // 2)
    return case


def time_steps(session: Session, case: Case, kernels: bool) -> None:
    """Measure a case with the largest batch that fits, and its kernels on a GPU."""
    sizes, started, case = session.sizes, time.perf_counter(), with_largest_batch(case, session)
    training = training_of(case, sizes, session.device)
    seconds = session.seconds(training.step, *sizes.steps)
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


def loader(session: Session) -> None:
    """Measure GB/s of decoded numbers into the device's memory, and of the codec alone."""
    sizes = session.sizes
    shape = Shape(sizes.variables, sizes.grid, "float16", sizes.dates)
    with tempfile.TemporaryDirectory() as folder, session.attempt("loader"):
        rates = measure(Path(folder, "store.zarr"), shape, sizes.workers, session.device, rounds=1)
        for name, (rate,) in rates.items():
            session.add(f"{name}, {sizes.workers} workers", rate, "GB/s")
        of_a_sample = 2 * shape.date_bytes / 1e9  # a state and the next
        session.add("samples that the loader gives", rates["rossby"][0] / of_a_sample, "samples/s")


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
    case = with_largest_batch(Case(patch, sizes.heads[0], mode="none"), session)
    batch = max(case.batch // 2, 1)  # they need more memory
    for (peer, name), taught in itertools.product(PEERS.items(), (True, False)):
        what = f"{name}{TAUGHT * taught}, {sizes.tokens(patch)} tokens, batch {batch}"
        with session.attempt(what):
            with session.device:
                fields = torch.randn(2, batch, sizes.variables, *sizes.grid)
                model = PeerModel(peer, sizes, patch)
            step = peer_step(model, fields, F.mse_loss, "bfloat16", taught)
            seconds = session.seconds(step, 2 if taught else 1, 3)
            about: Row = {"batch": batch, "tokens": sizes.tokens(patch)}
            about["mfu"] = session.mfu(3 * case.workload(sizes).model.flops * batch / seconds)
            session.add(what, batch / seconds, "samples/s", **about)
            fields = model = step = None  # before the next one takes its memory


def peer_step(
    model: nn.Module, fields: Tensor, loss_of: Callable, dtype: str, taught: bool
) -> Callable[[], float]:
    """Return the tutorial's step of a model on fields and a target (2, B, C, H, W).

    taught: as the tutorial ends, with compile and fused Adam.
    """
    predict = torch.compile(model) if taught else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=taught)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(fields.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = loss_of(predict(fields[0]), fields[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def train(session: Session) -> None:
    """Train and validate through NCCL: undisturbed, killed and resumed, in bf16, and on the CPU."""
    config = ROOT / "train_configs/demo.toml"
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, *options: str, **environment: str) -> Job:
            words = [*LISTS["train"]["options"], *options]
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


def run_part(name: str, session: Session) -> int:
    """Run a part in this process, which ends when its time is up; return the exit code."""
    faulthandler.dump_traceback_later(session.left + KILL_AFTER, exit=True)
    torch.manual_seed(0)
    try:
        globals()[PARTS[name]["run"]](session, *PARTS[name].get("words", ()))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def table(rows: list[Row]) -> str:
    """Return the lines of gpu.toml with what was measured, next to the best known values and the goals."""
    rows = [row for row in rows if "failed" not in row]

    def best(part: str, key: str = "value", begin: str = "", **wanted: Any) -> float:
        """Return the largest of the rows of a part that have these values; NaN where there is none."""
        those = [row for row in rows if row["part"] == part and row["what"].startswith(begin)]
        those = [row for row in those if all(row.get(name) == value for name, value in wanted.items())]
        return max((row[key] for row in those if row.get(key) is not None), default=math.nan)

    figures: dict[str, float] = {}
    for length in (0, 1):
        step, windowed = partial(best, "steps", length=length), partial(best, "windows", length=length)
        bf16, float8 = (step(head=0, precision=name) for name in PRECISIONS)
        figures[f"float8 {length}"] = float8 / bf16
        figures[f"windows {length}"] = windowed(windowed=True) / windowed(windowed=False)
        for head in (0, 1):
            figures[f"mfu {length} {head}"] = step("mfu", head=head, precision="bf16")
    step = partial(best, "steps", length=0, head=0, precision="bf16")
    figures["selective"] = step(mode="none") / step(mode="selective") - 1
    for kind in ("time", "memory"):
        errors = [abs(row["value"]) for row in rows if row["part"] == "planner" and row.get("kind") == kind]
        figures[f"worst {kind} planner"] = max(errors, default=math.nan)
        figures[f"mean {kind} planner"] = statistics.mean(errors or [math.nan])
    figures["loader over step"] = best("loader", begin="samples that the loader gives") / step()
    for peer, name in PEERS.items():
        figures[peer] = step() / best("peers", begin=name + TAUGHT)
    lines: list[tuple] = [("", "measured", "best known", "limit", "goal")]
    for what, name, known, limit, goal, form in LISTS["lines"]:
        part, _, begin = name.partition(": ")
        value = best(part, begin=begin) if begin else figures[name]
        sign, _, number = goal.partition(" ")
        shown, verdict = "not measured" if math.isnan(value) else format(value, form), ""
        if goal and not math.isnan(value):
            good = value >= float(number) if sign == ">=" else value <= float(number)
            verdict = "  met" if good else "  missed"
        lines.append((what, shown, known, limit, goal, verdict))
    return text_table("<46 >14 >14 >12 >12 <8", lines)


def main() -> int:
    # The last four are of the processes that it starts.
    own = {"part": "", "rows": Path(), "run": "", "seconds": 0.0}
    options = parse(__doc__, rehearse=False, only=",".join(PARTS), minutes=8.0, **own)
    if name := options.part:
        part = name.removeprefix("more ")
        return run_part(name, Session(part, options.rows, options.run, options.seconds, options.rehearse))
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
    slower = SLOW_CPU if options.rehearse else 1
    end = time.monotonic() + 60 * options.minutes * slower
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # past the `finally` below
    with tempfile.TemporaryDirectory() as scratch:
        # Compilations are kept for this run only.
        caches = {f"{name}_CACHE_DIR": f"{scratch}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
        caches |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if options.rehearse else {}
        for name in [name for name in PARTS if name in chosen]:
            seconds = min(PARTS[name]["seconds"] * slower, end - time.monotonic() - KILL_AFTER)
            print(f"== {name}, {seconds:.0f} s", flush=True)
            if seconds <= 5:
                failed += [] if "spare" in PARTS[name] else [name]
                continue
            command = [sys.executable, __file__, "--part", name, "--rows", str(rows), "--run", run]
            command += ["--seconds", str(seconds), *["--rehearse"] * options.rehearse]
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | caches, start_new_session=True)
            try:
                failed += [name] if process.wait() else []
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its loader's or compiler's workers, too
    measured = read_lines(rows, run=run)
    bad = [f"failed: {row['what']}: {row['failed']}" for row in measured if "failed" in row]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU: figures that mean nothing"
    print(f"\nrows: {rows}\non {where}, torch {torch.__version__}; {len(measured) - len(bad)} figures")
    print("\n".join([*bad, *(f"part {name}: failed" for name in failed), "", table(measured)]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
