"""The ranks of benchmarks/cluster.sh: parity, bandwidths, scaling, on all ranks and on parts of them.

    NGPU=8 benchmarks/cluster.sh [--cluster h100] [--minutes 20] [--rehearse]

--cluster: of planning/clusters.toml; this GPU's where there is none. --rehearse: gloo on the CPU, tiny sizes,
some layouts. Ranks 0 to n - 1 form a process group of their own for n = 1, 2, 4, ... all; the others wait.
Rows are written by rank 0 as they are measured; one table last.
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

from benchmarks.gpu import TINY, Case, Session, Sizes, training_of
from benchmarks.results_file import RESULTS, ROOT, parse, read_lines, record
from benchmarks.results_file import table as results_table
from command_line import text_table
from config import Parallelism
from errors import ConfigError, end_process, one_line_errors
from jobs.log_setup import start_logging
from jobs.signals import end_at_signals
from parallelisms.degrees import Degrees
from parallelisms.mesh import build_mesh, from_first_rank, start_ranks
from planning.clusters import Cluster, load_cluster, machine_known_as
from planning.network import route, seconds
from planning.search import Plan, best_layouts, plan
from planning.workload import Workload
from tests.parity import TABLE, Layout, Outcome, reference_of, three_steps

WAIT = timedelta(hours=1)  # of ranks that have no part in a size
LAYOUTS_A_SIZE = 2  # that plan.py ranks first
PARITY_SHARE = 0.4  # of the time
PAYLOADS = {"cpu": (2**12, 2**20), "cuda": (2**12, 2**20, 2**26)}  # bytes
REHEARSED = ("fsdp 2", "tp 2", "ulysses 2", "ring 2", "pp 2, 1f1b", "fsdp 2 x tp 2")  # rows of its table
Row = dict[str, Any]


@dataclass
class Run:
    options: argparse.Namespace
    device: torch.device
    world: int
    path: Path
    end: float
    run: str

    @property
    def sizes(self) -> Sizes:
        return TINY if self.options.rehearse else Sizes()

    def clock(self, work: Callable[[], Any], warm_up: int, number: int) -> float:
        return Session("cluster", None, "", 60.0, self.options.rehearse).seconds(work, warm_up, number)

    def is_time(self, share: float) -> bool:
        return from_first_rank(lambda: self.end - time.monotonic() > share * 60 * self.options.minutes)

    def attempt(self, part: str, what: str, measure: Callable[..., Row], *arguments: Any) -> None:
        row, reason = {}, ""
        try:
            row = measure(*arguments)
        except Exception as error:  # of whatever library: it is the answer to the question
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        if failed := next(filter(None, reasons), ""):
            row = {"failed": failed}
        if dist.get_rank() == 0:
            shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print(f"{part:<8} {what:<56}{shown}", flush=True)
            record(self.path, [{"run": self.run, "part": part, "what": what, **row}])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    options = parse(__doc__, cluster="", minutes=20.0, rehearse=False)
    end_at_signals()
    with one_line_errors():
        start_logging(is_first=os.environ["RANK"] == "0")
        warnings.filterwarnings("ignore", message="DTensor random operators")  # on a CPU
        known = "cpu" if options.rehearse else machine_known_as(torch.cuda.get_device_name())
        if not (options.cluster or known):
            raise ConfigError("--cluster: planning/clusters.toml knows no such GPU; name a machine of it")
        cluster, world = load_cluster(options.cluster or known or ""), int(os.environ["WORLD_SIZE"])
        folder = Path(os.environ.get("OUT") or (ROOT / "outputs/cluster" if options.rehearse else RESULTS))
        use_cuda = torch.cuda.is_available() and not options.rehearse
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
        end, began = time.monotonic() + 60 * options.minutes, time.strftime("%Y-%m-%dT%H:%M:%S")
        run = Run(options, device, world, folder / "cluster.jsonl", end, began)
        references: dict[Layout, Outcome] = {}
        for ranks in [n for n in (2**k for k in range(world.bit_length())) if n < world] + [world]:
            on_ranks(run, ranks, cluster, references)
        if os.environ["RANK"] == "0":
            print(f"\nrows: {run.path}\n{table(run.path, run.run)}")
    end_process(0)  # threads of gloo abort now and then in Python's shutdown


def on_ranks(run: Run, ranks: int, cluster: Cluster, references: dict[Layout, Outcome]) -> None:
    """Run all parts in a process group of the first `ranks`; all go on when it has ended."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, attempt = TCPStore(*address, timeout=WAIT), os.environ["TORCHELASTIC_RESTART_COUNT"]
    done = f"cluster/{attempt}/{ranks}"
    if int(os.environ["RANK"]) >= ranks:
        store.wait([done], WAIT)
        return
    os.environ |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": f"{attempt}/{ranks}"}
    start_ranks(300, "gloo" if run.device.type == "cpu" else "auto")
    try:
        parity(run, ranks, references)
        if ranks > 1 and ranks == run.world:
            links(run, cluster)
        scaling(run, ranks, cluster)
        dist.barrier()
    finally:
        dist.destroy_process_group()
        os.environ |= {"WORLD_SIZE": str(run.world), "TORCHELASTIC_RESTART_COUNT": attempt}
    if os.environ["RANK"] == "0":
        store.set(done, "")


def parity(run: Run, ranks: int, references: dict[Layout, Outcome]) -> None:
    """Compare rows of tests/parity.py of as many ranks with what one process gives, which comes first."""

    def compare(layout: Layout) -> Row:
        outcome = three_steps(layout)
        errors = outcome.errors(references[reference_of(layout)]) if dist.get_rank() == 0 else {}
        return {"good": all(error <= layout.tolerance(what) for what, error in errors.items()), **errors}

    # float8 is emulated there.
    rows = {n: each for n, each in TABLE.items() if each.ranks <= run.world and not each.float8}
    rows = {name: TABLE[name] for name in REHEARSED} if run.options.rehearse else rows
    if ranks == 1:
        references |= {each: three_steps(each) for each in {reference_of(row) for row in rows.values()}}
    for name, layout in rows.items():
        if layout.ranks == ranks and run.is_time(1 - PARITY_SHARE):
            run.attempt("parity", name, compare, layout)


def links(run: Run, cluster: Cluster) -> None:
    """Measure an all-reduce over each axis, all of its groups at once, next to the planner's seconds."""
    inside = min(cluster.devices_per_node, run.world)

    def reduce(group: dist.ProcessGroup, axis: str, size: int, degrees: Degrees) -> Row:
        buffer = torch.zeros(size // 4, device=run.device)
        taken = run.clock(lambda: dist.all_reduce(buffer, group=group), 3, 10)
        way = route(cluster.with_devices(degrees.world), degrees, axis)
        planned = seconds("all-reduce", size, way)
        return {"gigabytes_per_second": size / taken / 1e9, "seconds": taken, "planned": planned}

    for degrees in (Degrees(dp_shard=run.world), Degrees(dp_shard=run.world // inside, tp=inside)):
        mesh = build_mesh(run.device.type, degrees)
        for axis in ("dp_shard", "tp"):
            ranks = getattr(degrees, axis)
            if ranks == 1 or (ranks == run.world and axis == "tp"):
                continue  # all ranks have been measured
            for size in PAYLOADS[run.device.type]:
                what = f"all-reduce, {axis} {ranks} of {run.world}, {size} bytes"
                run.attempt("links", what, reduce, mesh.group(axis), axis, size, degrees)


def scaling(run: Run, ranks: int, cluster: Cluster) -> None:
    """Measure the layouts that the planner ranks first: the batch grows with the ranks, or does not."""
    there, own = cluster.with_devices(ranks), {"local_batch": 1, "compiled": run.sizes.compiled}
    for accumulation in dict.fromkeys((1, run.world // ranks)):
        work = workload(run.sizes, Degrees(dp_shard=ranks), accumulation)
        found = [each.work for each in best_layouts(work, there, 50)]
        # Pipelines have no step with accumulated micro-batches.
        plain = [each for each in found if each.accumulation * each.local_batch > 0 and each.degrees.pp == 1]
        for each in plain[:LAYOUTS_A_SIZE]:
            if not run.is_time(0.0):
                return
            made = plan(each.replace(**own, reshard="default"), there)
            kinds = ["weak"] * (accumulation == 1) + ["strong"] * (ranks * accumulation == run.world)
            run.attempt("scaling", f"{ranks} ranks, {describe(made.work)}", time_layout, run, made, kinds)


def workload(sizes: Sizes, degrees: Degrees, accumulation: int) -> Workload:
    work = Case(sizes.patches[-1], sizes.heads[0]).workload(sizes)
    return work.replace(degrees=degrees, global_batch=degrees.dp * accumulation)


def describe(work: Workload) -> str:
    d = work.degrees
    axes = {"replicate": d.dp_replicate, "shard": d.dp_shard, "cp": d.cp, "tp": d.tp}
    return " x ".join(f"{name} {n}" for name, n in axes.items() if n > 1) or "one"


def time_layout(run: Run, made: Plan, kinds: list[str]) -> Row:
    sizes, work, d = run.sizes, made.work, made.work.degrees
    case = Case(sizes.patches[-1], sizes.heads[0], mode=work.ac_mode, batch=work.local_batch)
    layout = Parallelism(
        data_parallel_replicate_degree=d.dp_replicate,
        data_parallel_shard_degree=d.dp_shard,
        context_parallel_degree=d.cp,
        tensor_parallel_degree=d.tp,
    )
    training = training_of(case, sizes, run.device, layout, work.accumulation)
    taken = run.clock(training.step, *sizes.steps)
    row: Row = {"kinds": kinds, "ranks": d.world, "layout": describe(work), "seconds": taken}
    return row | {"samples_per_second": work.global_batch / taken, "planned": made.time.samples_per_second}


def table(path: Path, run: str) -> str:
    rows = read_lines(path, run=run)
    good = [row for row in rows if "failed" not in row]
    compared, links = ([row for row in good if row["part"] == part] for part in ("parity", "links"))
    bad = [f"\nout of tolerance: {row['what']}" for row in compared if not row["good"]]
    text = f"{len(compared)} layouts against one process, {len(bad)} out of tolerance{''.join(bad)}"
    columns = {"what": "<48", "gigabytes_per_second": ">22.3g", "seconds": ">12.3g", "planned": ">12.3g"}
    text += "\n\n" + results_table(links, **columns) if links else ""
    lines: list[tuple] = [("scaling", "ranks", "  layout", "samples/s", "planned", "error", "efficiency")]
    for kind in ("weak", "strong"):
        found = [row for row in good if kind in row.get("kinds", ())]
        for row in found:
            rate, fewest = row["samples_per_second"], min(each["ranks"] for each in found)
            # Samples/s a rank over those of the best layout of the fewest ranks.
            best = max(each["samples_per_second"] for each in found if each["ranks"] == fewest) / fewest
            figures = (rate, row["planned"], row["planned"] / rate - 1, rate / row["ranks"] / best)
            lines.append((kind, row["ranks"], "  " + row["layout"], *figures))
    if lines[1:]:
        text += "\n\n" + text_table("<8 >6 <34 >11.4g >11.4g >+8.0% >11.1%", lines)
    failed = [f"\nfailed: {row['part']}, {row['what']}: {row['failed']}" for row in rows if "failed" in row]
    return text + "".join(failed)


if __name__ == "__main__":
    main()
