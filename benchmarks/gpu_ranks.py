"""Part of benchmarks/gpu.sh: one rank of a cluster on one GPU: real kernels, and ranks that are not there.

    .venv/bin/python benchmarks/gpu_ranks.py ranks [--rehearse]

torch's fake process group answers every collective at once, with this rank's own data: what remains of a step
is a rank's computation and its memory, beside what the planner says of both.
"""

import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu_session import Session, start_part
from benchmarks.gpu_step import Case, training_of
from config import Parallelism
from parallelisms.degrees import resolve_degrees
from planning.clusters import load_cluster
from planning.memory import memory
from planning.step_time import step_time

ENOUGH = 12.0  # seconds that a layout takes: with less left no other is begun
LAYOUTS = {
    "FSDP2": Parallelism(),
    "HSDP": Parallelism(data_parallel_replicate_degree=8),
    "tensor parallel 4": Parallelism(tensor_parallel_degree=4),
    "Ulysses 4": Parallelism(context_parallel_degree=4, context_parallel_method="ulysses"),
    "ring 4": Parallelism(context_parallel_degree=4, context_parallel_method="ring"),
}


def ranks(session: Session) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)  # torch's about fake groups
    for world in (64, 8):
        for name, layout in LAYOUTS.items():
            if world == 8 and name == "HSDP":
                continue  # one node of it is DDP
            if session.left < (ENOUGH if session.device.type == "cuda" else 1.0):
                print("  no time for more")
                return
            what = f"a rank of {world}, {name}"
            session.attempt(what, partial(time_rank, session, what, world, layout))


def time_rank(session: Session, what: str, world: int, layout: Parallelism) -> None:
    sizes = replace(session.sizes, compiled=False)
    case = Case(sizes.patches[0], sizes.heads[0], batch=2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        training = training_of(case, sizes, session.device, layout)
        seconds = session.seconds(training.step, *sizes.steps)
    finally:
        dist.destroy_process_group()
    work = case.workload(sizes)
    degrees = resolve_degrees(world, layout)
    method = layout.context_parallel_method
    work = work.replace(degrees=degrees, method=method, global_batch=case.batch * degrees.dp)
    cluster = load_cluster("cpu" if session.device.type == "cpu" else "h200").with_devices(world)
    planned, planned_peak = step_time(work, cluster).computation, memory(work).peak
    about = {"world": world, "planned": planned, "kind": "time", "error": planned / seconds - 1}
    session.add(f"{what}: seconds of computation", seconds, "s", **about)
    if session.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        about = {"world": world, "planned": planned_peak, "kind": "memory", "error": planned_peak / peak - 1}
        session.add(f"{what}: peak memory", peak / 2**30, "GiB", **about)


if __name__ == "__main__":
    start_part(__doc__, {"ranks": ranks}, sys.argv[1:])
