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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[reportPrivateImportUsage]

from benchmarks import results_file
from benchmarks.gpu import TINY, Case, Sizes, describe_error, median_seconds, training_of
from benchmarks.results_file import RESULTS, ROOT, parse, read_lines, record
from config import Parallelism
from errors import ConfigError, end_process, one_line_errors
from jobs.log_setup import start_logging
from jobs.signals import end_at_signals
from parallelisms.degrees import Degrees
from parallelisms.mesh import build_mesh, from_first_rank, start_ranks
from planning.clusters import Cluster, load_cluster, machine_known_as
from planning.network import route, seconds
from planning.search import Plan, best_layouts, plan
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
    cluster: Cluster
    sizes: Sizes

    def is_time(self, share: float) -> bool:
        return from_first_rank(lambda: self.end - time.monotonic() > share * 60 * self.options.minutes)

    def attempt(self, part: str, what: str, measure: Callable[[], Row]) -> None:
        """Measure on all ranks; a failure of one is the row's."""
        row, reason = {}, ""
        try:
            row = measure()
        except Exception as error:  # of whatever library: it is the answer to the question
            reason = describe_error(error)
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
        sizes = TINY if options.rehearse else Sizes()
        run = Run(options, device, world, folder / "cluster.jsonl", end, began, cluster, sizes)
        references: dict[Layout, Outcome] = {}
        # A process group of the first `ranks` at a time; all go on when its parts have ended.
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, attempt = TCPStore(*address, timeout=WAIT), os.environ["TORCHELASTIC_RESTART_COUNT"]
        for ranks in [n for n in (2**k for k in range(world.bit_length())) if n < world] + [world]:
            done = f"cluster/{attempt}/{ranks}"
            if int(os.environ["RANK"]) >= ranks:
                store.wait([done], WAIT)
                continue
            os.environ |= {"WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": f"{attempt}/{ranks}"}
            start_ranks(300, "gloo" if device.type == "cpu" else "auto")
            try:
                parity(run, ranks, references)
                if ranks > 1 and ranks == world:
                    links(run)
                scaling(run, ranks)
                dist.barrier()
            finally:
                dist.destroy_process_group()
                os.environ |= {"WORLD_SIZE": str(world), "TORCHELASTIC_RESTART_COUNT": attempt}
            if os.environ["RANK"] == "0":
                store.set(done, "")
        if os.environ["RANK"] == "0":
            print(f"\nrows: {run.path}\n{table(run.path, run.run)}")
    end_process(0)  # threads of gloo abort now and then in Python's shutdown


def parity(run: Run, ranks: int, references: dict[Layout, Outcome]) -> None:
    """Compare rows of tests/parity.py of as many ranks with what one process gives, which comes first."""

    def compare(layout: Layout) -> Row:
        outcome = three_steps(layout)
        errors = outcome.errors(references[reference_of(layout)]) if dist.get_rank() == 0 else {}
        return {"good": all(error <= layout.tolerance(what) for what, error in errors.items()), **errors}

    # float8 is emulated there.
    rows = {name: row for name, row in TABLE.items() if row.ranks <= run.world and not row.float8}
    rows = {name: TABLE[name] for name in REHEARSED} if run.options.rehearse else rows
    if ranks == 1:
        references |= {layout: three_steps(layout) for layout in {reference_of(row) for row in rows.values()}}
    for name, layout in rows.items():
        if layout.ranks == ranks and run.is_time(1 - PARITY_SHARE):
            run.attempt("parity", name, partial(compare, layout))


def links(run: Run) -> None:
    """Measure an all-reduce over each axis, all of its groups at once, next to the planner's seconds."""

    def reduce(group: dist.ProcessGroup, axis: str, size: int, degrees: Degrees) -> Row:
        buffer = torch.zeros(size // 4, device=run.device)
        taken = median_seconds(lambda: dist.all_reduce(buffer, group=group), 3, 10, run.device)
        planned = seconds("all-reduce", size, route(run.cluster.with_devices(degrees.world), degrees, axis))
        return {"gigabytes_per_second": size / taken / 1e9, "seconds": taken, "planned": planned}

    inside = min(run.cluster.devices_per_node, run.world)
    for degrees in (Degrees(dp_shard=run.world), Degrees(dp_shard=run.world // inside, tp=inside)):
        mesh = build_mesh(run.device.type, degrees)
        for axis in ("dp_shard", "tp"):
            ranks = getattr(degrees, axis)
            if ranks == 1 or (ranks == run.world and axis == "tp"):
                continue  # all ranks have been measured
            for size in PAYLOADS[run.device.type]:
                what = f"all-reduce, {axis} {ranks} of {run.world}, {size} bytes"
                run.attempt("links", what, partial(reduce, mesh.group(axis), axis, size, degrees))


def scaling(run: Run, ranks: int) -> None:
    """Measure the layouts that the planner ranks first: the batch grows with the ranks, or does not."""
    sizes, cluster = run.sizes, run.cluster.with_devices(ranks)
    largest = Case(sizes.patches[-1], sizes.heads[0])

    def time_layout(made: Plan, kinds: list[str], layout: str) -> Row:
        work, d = made.work, made.work.degrees
        case = Case(largest.patch, largest.heads, mode=work.ac_mode, batch=work.local_batch)
        parallelism = Parallelism(
            data_parallel_replicate_degree=d.dp_replicate,
            data_parallel_shard_degree=d.dp_shard,
            context_parallel_degree=d.cp,
            tensor_parallel_degree=d.tp,
        )
        training = training_of(case, sizes, run.device, parallelism, work.accumulation)
        taken = median_seconds(training.step, *sizes.steps, run.device)
        row: Row = {"kinds": kinds, "ranks": d.world, "layout": layout, "seconds": taken}
        rate = work.global_batch / taken
        return row | {"samples_per_second": rate, "planned": made.time.samples_per_second}

    for accumulation in dict.fromkeys((1, run.world // ranks)):
        degrees = Degrees(dp_shard=ranks)
        work = largest.workload(sizes).replace(degrees=degrees, global_batch=degrees.dp * accumulation)
        works = [layout.work for layout in best_layouts(work, cluster, 50)]
        # Pipelines have no step with accumulated micro-batches.
        plain = [work for work in works if work.accumulation * work.local_batch > 0 and work.degrees.pp == 1]
        for work in plain[:LAYOUTS_A_SIZE]:
            if not run.is_time(0.0):
                return
            made = plan(work.replace(local_batch=1, compiled=sizes.compiled, reshard="default"), cluster)
            kinds = ["weak"] * (accumulation == 1) + ["strong"] * (ranks * accumulation == run.world)
            d = made.work.degrees
            axes = {"replicate": d.dp_replicate, "shard": d.dp_shard, "cp": d.cp, "tp": d.tp}
            layout = " x ".join(f"{name} {n}" for name, n in axes.items() if n > 1) or "one"
            run.attempt("scaling", f"{ranks} ranks, {layout}", partial(time_layout, made, kinds, layout))


def table(path: Path, run: str) -> str:
    rows = read_lines(path, run=run)
    good = [row for row in rows if "failed" not in row]
    compared, links = ([row for row in good if row["part"] == part] for part in ("parity", "links"))
    bad = [f"\nout of tolerance: {row['what']}" for row in compared if not row["good"]]
    text = f"{len(compared)} layouts against one process, {len(bad)} out of tolerance{''.join(bad)}"
    columns = ("what", "gigabytes_per_second", "seconds", "planned")
    text += "\n\n" + results_file.table(links, *columns) if links else ""
    for kind in ("weak", "strong"):
        measured = [row for row in good if kind in row.get("kinds", ())]
        # Samples/s a rank over those of the best layout of the fewest ranks.
        rates = [(row["ranks"], row["samples_per_second"] / row["ranks"]) for row in measured]
        best = max(rate for ranks, rate in rates if ranks == min(rates)[0]) if rates else 1.0
        for row, (_, rate) in zip(measured, rates, strict=True):
            row |= {"error": row["planned"] / row["samples_per_second"] - 1, "efficiency": rate / best}
        columns = ("ranks", "layout", "samples_per_second", "planned", "error", "efficiency")
        text += f"\n\n{kind} scaling\n{results_file.table(measured, *columns)}" if measured else ""
    failed = [f"\nfailed: {row['part']}, {row['what']}: {row['failed']}" for row in rows if "failed" in row]
    return text + "".join(failed)


if __name__ == "__main__":
    main()
