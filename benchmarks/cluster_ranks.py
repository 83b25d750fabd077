"""The ranks of benchmarks/cluster.sh: parity, bandwidths, scaling, on all ranks and on parts of them.

    NGPU=8 benchmarks/cluster.sh --cluster h100 [--minutes 20] [--rehearse]

Ranks 0 to n - 1 form a process group of their own for n = 1, 2, 4, ... all; the others wait. Rows are written
by rank 0 as they are measured.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[reportPrivateImportUsage]

from benchmarks.cluster_table import plot, table
from benchmarks.gpu_session import TINY, Session, Sizes
from benchmarks.gpu_step import Case, training_of
from benchmarks.results_file import RESULTS, append
from config import Parallelism
from errors import ConfigError, one_line_errors
from jobs.log_setup import start_logging
from parallelisms.degrees import Degrees
from parallelisms.mesh import build_mesh, from_first_rank, start_ranks
from planning.clusters import load_cluster, machine_known_as
from planning.hardware import Cluster
from planning.network import route, seconds
from planning.search import Plan, best_layouts, plan
from planning.workload import Workload
from tests.parity import TABLE, Layout, Outcome, reference_of, three_steps

ROOT = Path(__file__).parent.parent
WAIT = timedelta(hours=1)  # of ranks that have no part in a size
LAYOUTS_A_SIZE = 2  # that plan.py ranks first
SHARES = {"parity": 0.4, "links": 0.1}  # of the time; scaling has the rest
PAYLOADS = {"cpu": (2**12, 2**20), "cuda": (2**12, 2**20, 2**26)}  # bytes
REHEARSED = (
    "fsdp 2",
    "tp 2",
    "ulysses 2",
    "ring 2",
    "pp 2, 1f1b",
    "fsdp 2 x tp 2",
)  # rows of the parity table


@dataclass
class Run:
    """What all ranks know: where rows go, and until when."""

    options: argparse.Namespace
    device: torch.device
    world: int
    path: Path
    end: float
    run: str = ""

    @property
    def sizes(self) -> Sizes:
        return TINY if self.options.rehearse else Sizes()

    def add(self, part: str, what: str, **figures: Any) -> None:
        if dist.get_rank() == 0:
            print(
                f"{part:<8} {what:<56}" + ", ".join(f"{k} {shown(v)}" for k, v in figures.items()), flush=True
            )
            append(self.path, [{"run": self.run, "part": part, "what": what, **figures}])

    def is_time(self, share: float) -> bool:
        """Whether more than this share of the time is left: rank 0's answer, on all ranks."""
        return from_first_rank(lambda: self.end - time.monotonic() > share * 60 * self.options.minutes)

    def attempt(self, part: str, what: str, measure: Callable[[], dict[str, Any]]) -> None:
        """What fails, on any rank, is a row that says so, and the rest goes on."""
        found, reason = {}, ""
        try:
            found = measure()
        except Exception as error:  # of whatever library: it is the answer to the question
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        failed = next(filter(None, reasons), "")
        self.add(part, what, **({"failed": failed} if failed else found))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    options = read_options()
    with one_line_errors():
        start_logging(is_first=os.environ["RANK"] == "0")
        warnings.filterwarnings("ignore", message="DTensor random operators")  # on a CPU
        world = int(os.environ["WORLD_SIZE"])
        cluster = cluster_of(options)
        folder = Path(os.environ.get("OUT") or (ROOT / "outputs/cluster" if options.rehearse else RESULTS))
        pictures = Path(os.environ.get("OUT") or ROOT / "outputs/cluster")
        use_cuda = torch.cuda.is_available() and not options.rehearse
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
        end = time.monotonic() + 60 * options.minutes
        run = Run(options, device, world, folder / "cluster.jsonl", end, time.strftime("%Y-%m-%dT%H:%M:%S"))
        references: dict[Layout, Outcome] = {}
        for ranks in sizes_up_to(world):
            on_ranks(run, ranks, lambda: all_parts(run, ranks, cluster, references))  # noqa: B023
        if os.environ["RANK"] == "0":
            print(f"\nrows: {run.path}\n{table(run.path, run.run)}")
            print(f"picture: {plot(run.path, run.run, pictures / 'cluster.png')}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cluster", default="", help="a machine of planning/clusters.toml; default: this GPU's"
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rehearse", action="store_true", help="gloo on the CPU, tiny sizes, some layouts")
    return parser.parse_args()


def cluster_of(options: argparse.Namespace) -> Cluster:
    """ConfigError: nobody knows this GPU."""
    known = "cpu" if options.rehearse else machine_known_as(torch.cuda.get_device_name())
    if not (options.cluster or known):
        raise ConfigError("--cluster: planning/clusters.toml knows no such GPU; name a machine of it")
    return load_cluster(options.cluster or known or "")


def sizes_up_to(world: int) -> list[int]:
    return [n for n in (2**k for k in range(world.bit_length())) if n < world] + [world]


def on_ranks(run: Run, ranks: int, work: Callable[[], None]) -> None:
    """Runs `work` in a process group of the first `ranks`; all go on when it has ended."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, attempt = TCPStore(*address, timeout=WAIT), os.environ["TORCHELASTIC_RESTART_COUNT"]
    done = f"cluster/{attempt}/{ranks}"
    if int(os.environ["RANK"]) >= ranks:
        store.wait([done], WAIT)
        return
    os.environ |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": f"{attempt}/{ranks}"}
    start_ranks(300, "gloo" if run.device.type == "cpu" else "auto")
    try:
        work()
        dist.barrier()
    finally:
        dist.destroy_process_group()
        os.environ |= {"WORLD_SIZE": str(run.world), "TORCHELASTIC_RESTART_COUNT": attempt}
    if os.environ["RANK"] == "0":
        store.set(done, "")


def all_parts(run: Run, ranks: int, cluster: Cluster, references: dict[Layout, Outcome]) -> None:
    parity(run, ranks, references)
    if ranks > 1 and ranks == run.world:
        links(run, cluster)
    scaling(run, ranks, cluster)


# -- every layout against one process


def parity(run: Run, ranks: int, references: dict[Layout, Outcome]) -> None:
    """Rows of tests/parity.py with as many ranks; first, on one, what they are held against."""
    rows = {name: layout for name, layout in TABLE.items() if wanted(run, name, layout)}
    if ranks == 1:
        references |= {each: three_steps(each) for each in {reference_of(row) for row in rows.values()}}
    for name, layout in rows.items():
        if layout.ranks != ranks:
            continue
        if not run.is_time(1 - SHARES["parity"]):
            run.add("parity", name, failed="no time left")
            return
        run.attempt("parity", name, lambda layout=layout: held_against(layout, references))


def wanted(run: Run, name: str, layout: Layout) -> bool:
    if run.options.rehearse:
        return name in REHEARSED
    return layout.ranks <= run.world and not layout.float8  # which is emulated there


def held_against(layout: Layout, references: dict[Layout, Outcome]) -> dict[str, Any]:
    outcome = three_steps(layout)
    if dist.get_rank() != 0:
        return {}
    errors = outcome.errors(references[reference_of(layout)])
    good = all(error <= layout.tolerance(what) for what, error in errors.items())
    return {"good": good, **errors}


# -- links


def links(run: Run, cluster: Cluster) -> None:
    """GB/s of an all-reduce over each axis, all of its groups at once, beside the planner's."""
    inside = min(cluster.devices_per_node, run.world)
    for degrees in (Degrees(dp_shard=run.world), Degrees(dp_shard=run.world // inside, tp=inside)):
        mesh = build_mesh(run.device.type, degrees)
        for axis in ("dp_shard", "tp"):
            ranks = getattr(degrees, axis)
            if ranks == 1 or (ranks == run.world and axis == "tp"):
                continue  # all ranks have been measured
            for size in PAYLOADS[run.device.type]:
                what = f"all-reduce, {axis} {ranks} of {run.world}, {size} bytes"
                group = mesh.group(axis)
                run.attempt(
                    "links", what, lambda g=group, a=axis, s=size, d=degrees: link(run, cluster, g, a, s, d)
                )


def link(
    run: Run, cluster: Cluster, group: dist.ProcessGroup, axis: str, size: int, degrees: Degrees
) -> dict[str, Any]:
    session, buffer = session_of(run), torch.zeros(size // 4, device=run.device)
    taken = session.seconds(lambda: dist.all_reduce(buffer, group=group), 3, 10)
    work = workload(run.sizes, degrees, 1)
    planned = seconds("all-reduce", size, route(cluster.with_devices(degrees.world), work, axis))
    return {"gigabytes_per_second": size / taken / 1e9, "seconds": taken, "planned": planned}


def session_of(run: Run) -> Session:
    """For its clock."""
    return Session("cluster", None, 60.0, run.options.rehearse)


# -- scaling


def scaling(run: Run, ranks: int, cluster: Cluster) -> None:
    """Samples/s of the layouts that the planner ranks first: the batch grows with the ranks, or does not."""
    for accumulation in dict.fromkeys((1, run.world // ranks)):
        for made in chosen(run, ranks, accumulation, cluster):
            if not run.is_time(0.0):
                return
            kinds = ["weak"] * (accumulation == 1) + ["strong"] * (ranks * accumulation == run.world)
            what = f"{ranks} ranks, {describe(made.work)}"
            run.attempt("scaling", what, lambda made=made, kinds=kinds: timed(run, made, kinds))


def chosen(run: Run, ranks: int, accumulation: int, cluster: Cluster) -> list[Plan]:
    """For vit1b with one sample a rank and micro-batch, `accumulation` of these a step."""
    work, there = workload(run.sizes, Degrees(dp_shard=ranks), accumulation), cluster.with_devices(ranks)
    found = [
        made for made in best_layouts(work, there, 50) if made.work.accumulation * made.work.local_batch > 0
    ]
    plain = [made for made in found if made.work.degrees.pp == 1]  # whose step has accumulated micro-batches
    alike = [
        made.work.replace(local_batch=1, compiled=run.sizes.compiled, reshard="default") for made in plain
    ]
    return [plan(each, there) for each in alike[:LAYOUTS_A_SIZE]]


def workload(sizes: Sizes, degrees: Degrees, accumulation: int) -> Workload:
    work = Case(sizes.patches[-1], sizes.heads[0]).workload(sizes)
    return work.replace(degrees=degrees, global_batch=degrees.dp * accumulation)


def describe(work: Workload) -> str:
    d = work.degrees
    axes = {"replicate": d.dp_replicate, "shard": d.dp_shard, "cp": d.cp, "tp": d.tp}
    return " x ".join(f"{name} {n}" for name, n in axes.items() if n > 1) or "one"


def timed(run: Run, made: Plan, kinds: list[str]) -> dict[str, Any]:
    sizes, work = run.sizes, made.work
    case = Case(sizes.patches[-1], sizes.heads[0], mode=work.ac_mode, batch=work.local_batch)
    layout = Parallelism(
        data_parallel_replicate_degree=work.degrees.dp_replicate,
        data_parallel_shard_degree=work.degrees.dp_shard,
        context_parallel_degree=work.degrees.cp,
        tensor_parallel_degree=work.degrees.tp,
    )
    training = training_of(case, sizes, run.device, layout, work.accumulation)
    taken = session_of(run).seconds(training.step, *sizes.steps)
    figures = {"samples_per_second": work.global_batch / taken, "planned": made.time.samples_per_second}
    return {
        "kinds": kinds,
        "ranks": work.degrees.world,
        "layout": describe(work),
        "seconds": taken,
        **figures,
    }


if __name__ == "__main__":
    main()
