"""Check a run before it starts: data, memory, room for checkpoints. NGPU and NNODES say on how many ranks.

    .venv/bin/python -m planning.preflight train_configs/demo.toml [--section.key value]

--cluster NAME     machine of planning/clusters.toml to compare with (default: that of this GPU, or cpu)
--clusters FILE    your own machines, in the same form; may be given several times

Prints a table with pass, warn or fail and the fix. Exit codes: 0 nothing fails, 2 a check fails, 1 it did not
end.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from command_line import answer_early, own_options, split_options, start
from training.config_checks import check

OPTIONS = own_options(cluster="", clusters=[])


def named_first(argv: list[str]) -> list[str]:
    """Return the arguments with --job.config_file before a file that is first."""
    return ["--job.config_file", *argv] if argv and not argv[0].startswith("-") else argv


if __name__ == "__main__":
    sys.argv[1:] = named_first(sys.argv[1:])
    answer_early(__doc__, check, OPTIONS)

import numpy as np
import torch

from command_line import text_table
from config import Config
from datasets.dates import usual_hours
from datasets.options import parse_period
from datasets.plausibility import refuse_fills
from datasets.selection import Selection
from errors import BAD_INPUT, UserError, end_process, module_command, one_line_errors, without_secrets
from models.registry import registered
from parallelisms.degrees import num_ranks
from planning.constants import GIB
from planning.cost import checkpoint_size, checkpoint_storage
from planning.hardware import Cluster
from planning.search import Plan, capacity, change_text, changes_that_fit, check_device, fits, plan
from planning.start_checks import available_memory, cluster_here, open_checked, workload_here

PASS, WARN, FAIL = "pass", "warn", "fail"
READ_SECONDS = 2.0
LONG_GAP = np.timedelta64(30, "D")


@dataclass(frozen=True)
class Row:
    name: str
    result: str
    found: str
    fix: str = ""


def plan_row(config: Config, selection: Selection, cluster: Cluster | None) -> tuple[Row, Plan | None]:
    """Compare the planned peak with the memory of a rank."""
    if not registered(config.model.name).planned or cluster is None:
        found = "closed forms do not know this model, its loss, or this GPU: memory is not planned"
        return Row("memory", WARN, found, "plan.py --dry_run measures it; --clusters adds a GPU"), None
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]  # other programs may have some of the device
        device = replace(cluster.device, memory=min(cluster.device.memory, free))
        cluster = replace(cluster, device=device)
    work = workload_here(config, selection, cluster, num_ranks())
    check_device(work, cluster)
    found = plan(work, cluster)
    text = f"{found.memory.peak / GIB:.2f} of {capacity(cluster) / GIB:.2f} GiB a rank"
    if fits(found, cluster):
        return Row("memory", PASS, text), found
    changes = [(change_text(name, less.work, config), less) for name, less in changes_that_fit(work, cluster)]
    fixes = [f"{change} ({less.memory.peak / GIB:.2f} GiB)" for change, less in changes]
    return Row("memory", FAIL, f"does not fit: {text}", " or ".join(fixes) or "more devices"), found


# -- data


def data_rows(config: Config, selection: Selection) -> Iterator[Row]:
    """Read dates at random, and look for missing ones in the periods of training and validation."""
    dates, number = read_dates(selection, config.training.seed)
    yield Row("data", PASS, f"{number} variables, {dates:,.0f} dates/s read by one thread")
    times = selection.archive.times[selection.archive.has(selection.variables)]
    for name in ("train", "validation"):
        if span := parse_period("", getattr(config.data, f"{name}_period")):
            first, last = (np.datetime64(end, "s") for end in span)
            yield period_row(f"data, {name}", times, first, last)


def read_dates(selection: Selection, seed: int) -> tuple[float, int]:
    """Return dates a second and the number of variables. DataError: a chunk is damaged, a value is none."""
    archive, names = selection.archive, selection.variables
    order = np.random.default_rng(seed).permutation(np.concatenate([selection.train, selection.validation]))
    count, started = 0, time.perf_counter()
    while count < len(order) and time.perf_counter() - started < READ_SECONDS:
        date = order[count]
        refuse_fills(archive.read(int(date), names), names, archive.times[date], archive.path)
        count += 1
    return count / (time.perf_counter() - started), len(names)


def period_row(name: str, times: np.ndarray, first: np.datetime64, last: np.datetime64) -> Row:
    """Count the dates (T,) of a period and the missing ones; a long gap is how the archive was made."""
    inside = times[(times >= first) & (times <= last)]
    if len(inside) < 2:
        found = f"{len(inside)} dates from {first} to {last}"
        return Row(name, FAIL, found, "name a period that the data have")
    found = f"{len(inside)} dates from {inside[0]} to {inside[-1]}"
    steps, usual = np.diff(inside), np.timedelta64(round(3600 * usual_hours(inside)), "s")
    gaps = (steps > usual) & (steps < LONG_GAP)
    if not gaps.any():
        return Row(name, PASS, found)
    found += f", {(steps[gaps] // usual - 1).sum()} missing, the first after {inside[:-1][gaps][0]}"
    fix = f"{module_command('datasets.describe')} lists the gaps; training leaves them out"
    return Row(name, WARN, found, fix)


# -- disk


def disk_row(config: Config, made: Plan | None) -> Row:
    """Compare the room with that of all checkpoints, less those that are there."""
    folder, settings = config.dump_folder, config.checkpoint
    if not settings.enable or made is None:
        return Row("checkpoints", PASS, "none are saved, or their size is not planned")
    size = checkpoint_size(made.work)
    most = checkpoint_storage(size, settings, config.training.steps)
    there = sum(path.stat().st_size for path in (folder / "checkpoints").glob("step-*/*"))
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    found = f"{free / GIB:,.3f} GiB free, {max(most - there, 0) / GIB:,.3f} needed, {size / GIB:,.3f} each"
    fix = "make room, name another job.dump_folder, or lower checkpoint.keep_latest_k"
    return Row("checkpoints", FAIL if most - there > free else PASS, found, fix)


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row, and one with the fix where it does not pass."""
    cells = []
    for row in rows:
        cells.append((row.result, row.name, row.found))
        if row.result != PASS:
            cells.append(("", "", f"fix: {row.fix}"))
    return text_table("<6 <20 <1", cells)


def attempt(name: str, check: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows of a check, or one that fails with the user's mistake, or the machine's."""
    try:
        return check()
    except (UserError, OSError) as error:
        found, _, fix = without_secrets(" ".join(str(error).split())).partition("; ")
        return [Row(name, FAIL, found, fix or "see the message")]


def preflight(config: Config, cluster: Cluster | None) -> list[Row]:
    """Return the rows of this host."""
    opened: list[Selection] = []
    rows = attempt("start", lambda: opened.append(open_checked(config)) or [])
    if not opened:
        return rows
    rows = attempt("data", lambda: list(data_rows(config, opened[0])))

    def planned() -> list[Row]:
        row, made = plan_row(config, opened[0], cluster)
        return [row, *attempt("checkpoints", lambda: [disk_row(config, made)])]

    return rows + attempt("memory", planned)


def main(argv: list[str]) -> None:
    with one_line_errors():
        own, rest = split_options(argv, OPTIONS)
        config = start(rest, __doc__, check)
        cluster = cluster_here(own.cluster, own.clusters, num_ranks(), available_memory())
        rows = preflight(config, cluster)
        print(table(rows))
        end_process(BAD_INPUT if any(row.result == FAIL for row in rows) else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
