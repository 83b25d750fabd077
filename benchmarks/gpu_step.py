"""Parts of benchmarks/gpu.sh: steps of vit1b as train.py takes them, the planner beside them, a rollout step,
and the first step of a process.

    .venv/bin/python benchmarks/gpu_step.py steps|planner|rollout|first [--rehearse]

Fields are random; the step is train.py's: normalise, cut into patches, forward, loss, backward, norm, clip,
judge, fused AdamW.
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu_kernels import attention_kernels, kernel_seconds, of_hopper
from benchmarks.gpu_session import Session, Sizes, start_part
from benchmarks.random_run import RandomRun
from config import (
    ActivationCheckpoint,
    Compile,
    Config,
    Float8,
    Model,
    Optimizer,
    Parallelism,
    Training,
)
from parallelisms.attention_choice import measure_attention
from parallelisms.degrees import Degrees
from planning.architecture import vit_architecture
from planning.calibrate import BlockShape, calibrate
from planning.calibration import save_calibration
from planning.clusters import CALIBRATION, load_cluster
from planning.memory import memory
from planning.step_time import step_time
from planning.workload import Workload
from training.metrics import peak_tflops
from verification.rollout import rollout as roll_out

RESERVED = 2 * 2**30  # bytes of a device that libraries take beside torch's allocator
PRECISIONS = {"": "bf16", "tensorwise": "float8", "rowwise": "float8 by rows"}  # recipe -> its name here
ALONE = Parallelism()
NAMES = ("length", "head", "precision", "mode")  # of a case, in a row
SAFETY = 1.05  # on the planner's peak: the allocator's rounding
CASE_SECONDS = 35.0  # that a case may take, compilation included: with less left no other is begun


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
        values = sizes.variables * sizes.grid[0] * sizes.grid[1]
        channels = (sizes.variables, sizes.variables)
        return Workload(
            vit_architecture(sizes.grid, self.patch, *channels, sizes.dim, sizes.layers, self.heads),
            Degrees(),
            self.batch,
            self.batch,
            field_values=values,
            input_values=values,
            ac_mode=self.mode,
            compiled=sizes.compiled,
            float8=bool(self.float8),
            attention=self.backend,
        )

    def about(self, sizes: Sizes) -> dict[str, Any]:
        precision = PRECISIONS[self.float8]
        return {
            "tokens": sizes.tokens(self.patch),
            "length": sizes.patches.index(
                self.patch
            ),  # an index in the lists of Sizes: the table looks for these
            "head": sizes.heads.index(self.heads),
            "heads": self.heads,
            "head_dim": sizes.dim // self.heads,
            "precision": precision,
            "mode": self.mode,
            "batch": self.batch,
            "backend": self.backend,
        }

    def label(self, sizes: Sizes) -> str:
        about = self.about(sizes)
        shape = f"{about['tokens']} tokens, {self.heads} x {about['head_dim']}"
        return f"{shape}, {about['precision']}, {self.mode}, batch {self.batch}"


def cases(sizes: Sizes) -> list[Case]:
    """What answers most first; the rest as far as the time goes."""
    short, long = sizes.patches
    many, few = sizes.heads
    return [
        Case(short, many),
        Case(short, many, mode="none"),
        Case(long, many),
        Case(short, many, float8="tensorwise"),
        Case(short, few),
        Case(long, few),
        Case(long, many, float8="tensorwise"),
        Case(long, many, mode="none"),
        Case(short, few, mode="none"),
        Case(long, few, mode="none"),
        Case(short, many, float8="tensorwise", mode="none"),
        Case(short, many, float8="rowwise"),
        Case(short, few, float8="tensorwise"),
        Case(long, few, float8="tensorwise"),
    ]


def training_of(
    case: Case, sizes: Sizes, device: torch.device, layout: Parallelism = ALONE, accumulation: int = 1
) -> RandomRun:
    """train.py's model, objective, optimiser and step for one case."""
    float8 = Float8(bool(case.float8), case.float8 or "tensorwise")  # type: ignore[arg-type]
    config = Config(
        model=Model(
            patch_size=case.patch,
            dim=sizes.dim,
            num_layers=sizes.layers,
            num_heads=case.heads,
            attention_backend=case.backend,  # type: ignore[arg-type]
        ),
        optimizer=Optimizer(lr=1e-5),
        training=Training(local_batch_size=case.batch, mixed_precision_param="bfloat16"),
        activation_checkpoint=ActivationCheckpoint(mode=case.mode),  # type: ignore[arg-type]
        compile=Compile(sizes.compiled),
        float8=float8,
        parallelism=layout,
    )
    return RandomRun(config, sizes.grid, sizes.variables, device, drawn_here=True, accumulation=accumulation)


# -- steps


def steps(session: Session) -> None:
    """Samples/s, share of the peak and memory of every case that there is time for."""
    session.start_ranks()
    backends: dict[tuple[int, int], str] = {}
    done = [tuple(map(row.get, NAMES)) for row in session.earlier()]
    todo = [
        case for case in cases(session.sizes) if tuple(map(case.about(session.sizes).get, NAMES)) not in done
    ]
    for number, case in enumerate(todo):
        if session.left < (CASE_SECONDS if session.device.type == "cuda" else 1.0):
            print(f"  no time for {len(todo) - number} more cases")
            return
        shape = (session.sizes.tokens(case.patch), session.sizes.dim // case.heads)
        if shape not in backends:
            backends[shape] = fastest_backend(case, session)
        case = with_batch(case, backends[shape], session)
        while case.batch:
            case = time_case(case, session, names=not done and number == 0)


def fastest_backend(case: Case, session: Session) -> str:
    """As model.attention_backend = "auto" chooses."""
    sizes = session.sizes
    shape = (2, case.heads, sizes.tokens(case.patch), sizes.dim // case.heads)
    seconds = measure_attention(shape, torch.bfloat16, session.device)
    return min(seconds, key=lambda name: seconds[name])


def with_batch(case: Case, backend: str, session: Session) -> Case:
    """The largest power of two that fits by the planner's account; 1 where even that does not."""
    batch = session.sizes.largest_batch
    free = 2**40 if session.device.type == "cpu" else torch.cuda.mem_get_info()[0] - RESERVED

    def fits(batch: int) -> bool:
        return SAFETY * memory(replace(case, batch=batch).workload(session.sizes)).peak <= free

    while batch > 1 and not fits(batch):
        batch //= 2
    return replace(case, batch=batch, backend=backend)


def time_case(case: Case, session: Session, names: bool) -> Case:
    """Measures; gives the case to go on with: half the batch where it did not fit, else batch 0."""
    torch._dynamo.reset()
    fits = True

    def run() -> None:
        nonlocal fits
        try:
            time_steps(case, session, names)
        except torch.cuda.OutOfMemoryError:
            fits = False
            if case.batch == 1:
                raise

    session.attempt(case.label(session.sizes), run)
    return replace(case, batch=0 if fits else case.batch // 2)


def time_steps(case: Case, session: Session, names: bool) -> None:
    training, sizes = training_of(case, session.sizes, session.device), session.sizes
    started = time.perf_counter()
    seconds = session.seconds(training.step, *sizes.steps)
    spent = time.perf_counter() - started
    loss = training.loss()
    if loss != loss:
        raise ValueError("the loss is NaN")
    flops = 3 * case.workload(sizes).model.flops() * case.batch / seconds
    peak = peak_tflops(session.device) * 1e12
    held = torch.cuda.max_memory_allocated() if session.device.type == "cuda" else 0
    session.add(
        case.label(sizes),
        case.batch / seconds,
        "samples/s",
        step_seconds=seconds,
        mfu=flops / peak if peak else None,
        tflops=flops / 1e12,
        peak_bytes=held,
        loss=loss,
        with_compilation=spent,
        **case.about(sizes),
    )
    print(f"    {flops / 1e12:.1f} TFLOP/s, MFU {flops / peak if peak else 0:.1%}, {held / 2**30:.1f} GiB")
    if names and session.device.type == "cuda":
        print_kernels(training, session)


def print_kernels(training: RandomRun, session: Session) -> None:
    """Where a step goes, kernel by kernel, and whether its attention is one of Hopper's own."""
    found = kernel_seconds(training.step)
    total = sum(seconds for _, seconds in found)
    for name, seconds in found[:15]:
        print(f"    {seconds / total:>6.1%} {1e3 * seconds:>9.2f} ms  {name[:90]}")
    names = attention_kernels([name for name, _ in found])
    kernels = [[name, seconds] for name, seconds in found[:40]]
    own = float(bool(names) and all(of_hopper([name]) for name in names[:2]))
    session.add("a step's attention is a kernel of this GPU's own", own, "", attention=names, kernels=kernels)


# -- the planner beside them


def planner(session: Session) -> None:
    """Calibrates, then predicts time and memory of the steps that were measured before."""
    sizes, device = session.sizes, session.device
    measured = [row for row in session.earlier() if row["part"] == "steps" and "tokens" in row]
    backends = tuple(sorted({row["backend"] for row in measured})) or ("sdpa",)
    blocks = [
        BlockShape(4, sizes.tokens(patch), sizes.dim, heads, 4 * sizes.dim)
        for patch in sizes.patches
        for heads in sizes.heads
    ]
    threads = torch.get_num_threads()
    rates = calibrate(blocks, backends, device, threads, seconds=sizes.calibration_seconds)
    print("\n".join(rates.table().splitlines()[:2]))
    save_calibration(rates, calibration_path(session))
    cluster = replace(load_cluster("cpu1" if device.type == "cpu" else "h200x1"), measured=rates)
    for row in measured:
        session.attempt(f"planned: {row['what']}", partial(compare, session, row, cluster))


def calibration_path(session: Session) -> Path:
    """Beside the rows where the caller says where these go, or they are a rehearsal's."""
    beside = session.rehearse or "OUT" in os.environ
    return session.rows.path.parent / "calibration.json" if session.rows and beside else CALIBRATION


def compare(session: Session, row: dict[str, Any], cluster: Any) -> None:
    patch = next(p for p in session.sizes.patches if session.sizes.tokens(p) == row["tokens"])
    float8 = next(recipe for recipe, name in PRECISIONS.items() if name == row["precision"])
    case = Case(patch, row["heads"], float8, row["mode"], row["batch"], row["backend"])
    work = case.workload(session.sizes)
    predicted = step_time(work, cluster).total
    error = predicted / row["step_seconds"] - 1
    session.add(f"time, planned: {row['what']}", error, "of measured", seconds=predicted, kind="time")
    if row["peak_bytes"]:
        error = memory(work).peak / row["peak_bytes"] - 1
        session.add(f"peak memory, planned: {row['what']}", error, "of measured", kind="memory")


# -- a rollout step, and the first step


def rollout(session: Session) -> None:
    """Seconds of one step of a forecast from one date: forward in bf16, compiled."""
    session.start_ranks()
    for patch in session.sizes.patches:
        what = f"rollout step, {session.sizes.tokens(patch)} tokens"
        session.attempt(what, partial(time_rollout, session, what, patch))


def time_rollout(session: Session, what: str, patch: tuple[int, int]) -> None:
    sizes, device, number = session.sizes, session.device, 4
    case = Case(patch, sizes.heads[0])
    case = replace(case, backend=fastest_backend(case, session))
    assembly = training_of(replace(case, mode="none"), sizes, device).assembly
    assembly.model.train(False)
    fields = torch.randn(1, sizes.variables, *sizes.grid, device=device)
    times = torch.zeros(1, dtype=torch.int64, device=device)
    parts = (assembly.model.predict, assembly.normalizer, assembly.conditions, 21600)

    def run() -> None:
        for _ in roll_out(*parts, fields, times, number):
            pass

    session.add(what, session.seconds(run, 1, 3) / number, "s", tokens=sizes.tokens(patch))


def first(session: Session) -> None:
    """The first step of a process, compilation included; which cache it finds is the caller's doing."""
    session.start_ranks()
    sizes = replace(session.sizes, compiled=True)
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    cache = "warm" if folder.name and folder.exists() and any(folder.iterdir()) else "cold"
    started = time.perf_counter()
    training = training_of(Case(sizes.patches[0], sizes.heads[0], mode="none"), sizes, session.device)
    if session.device.type == "cuda":
        torch.cuda.synchronize()
    built = time.perf_counter()
    training.loss()
    ended = time.perf_counter()
    about = {"cache": cache, "depth": sizes.layers}
    session.add(f"the model before it, {cache}", built - started, "s", **about)
    session.add(f"first step, {cache}", ended - built, "s", **about)


if __name__ == "__main__":
    start_part(
        __doc__, {"steps": steps, "planner": planner, "rollout": rollout, "first": first}, sys.argv[1:]
    )
