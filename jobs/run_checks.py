"""What a run needs: a plan that fits, data that are there and come fast enough, room for its checkpoints."""

import math
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch

from checkpoints.files import check_steps
from checkpoints.identity import check_resume
from config import Checkpoint, Config
from datasets.options import PREFETCH, parse_period
from datasets.plausibility import refuse_fills
from datasets.selection import Selection, open_selection
from jobs.host_memory import host_memory
from jobs.start_checks import check_folder, check_memory, check_model, local_ranks
from jobs.verdicts import FAIL, PASS, WARN, Row, attempt, judged
from models.build import build_model
from models.condition_numbers import num_channels
from models.registry import MODELS
from planning.clusters import load_cluster, machine_known_as
from planning.cost import checkpoint_size, checkpoint_storage
from planning.error_bands import band_line
from planning.hardware import Cluster
from planning.memory import FLOAT32
from planning.search import Plan, capacity, changes_that_fit, check_device, fits, plan
from planning.workload import COPIES_AHEAD, Workload, workload_of

READ_FOR = 2.0  # seconds
WRITTEN = 2**26  # bytes that are written to measure a folder
MOMENTS = 8.0  # bytes of two moments a parameter, where the planner does not know the model
DAY = np.timedelta64(1, "D")
STRETCH = np.timedelta64(30, "D")  # without dates: no gap that was overlooked, but how the archive was made
SAME_DAY = 2  # days of the year by which stretches of every year may differ
TOLERATED = 0.05  # of a period's dates that may be missing: training leaves them out
STALL = 0.1  # of the time between saves that a save may hold training
GIB = 2**30
WRITABLE = "choose another job.dump_folder, or see to its rights, its room and that it is mounted"
READABLE = "see that data.path is there and mounted on every node, and that its files are whole"


@dataclass(frozen=True)
class HostRates:
    """What one host was measured to do; 0: it could not be."""

    dates: float  # a second, read
    written: float  # bytes/s


# -- the plan


def cluster_here(name: str, files: Sequence[str], world: int) -> Cluster | None:
    """The cluster that a run here has, with nodes of as many ranks as there are; None: nobody knows its GPU.

    ConfigError for a name that is not known.
    """
    on_gpu, local = torch.cuda.is_available(), local_ranks()[1]
    name = name or (machine_known_as(torch.cuda.get_device_name(), files) or "" if on_gpu else "cpu")
    if not name:
        return None
    found = load_cluster(name, files).with_devices(local)
    if found.shared:
        device = replace(found.device, memory=host_memory() // local)
        found = replace(found, device=device, host_memory=host_memory())
    return replace(found, devices_per_node=local, devices=world)


def workload_here(config: Config, selection: Selection, cluster: Cluster | None, world: int) -> Workload:
    """ConfigError where the planner knows no closed form."""
    work = workload_of(config, world, selection.archive.grid.shape, len(selection.variables))
    return work.replace(copies_ahead=COPIES_AHEAD if cluster and not cluster.shared else 0)


def planned(
    config: Config, selection: Selection, cluster: Cluster | None, world: int
) -> tuple[Plan | None, list[Row]]:
    """The plan of a step, where there can be one, and its verdict."""
    known = MODELS[config.model.name].planned
    if not known or config.training.spectral_fraction:
        what = "a spectral loss" if known else f"model.name = {config.model.name}"
        found = f"closed forms know nothing of {what}: neither memory nor time is planned"
        return None, [Row("plan", WARN, found, "plan.py --dry_run measures its memory")]
    if cluster is None:
        found = "planning/clusters.toml does not know this GPU"
        return None, [Row("plan", WARN, found, "name a machine with --cluster, or add yours with --clusters")]
    work, refused = attempt("plan", workload_here, config, selection, cluster, world)
    refused = refused or attempt("plan", check_device, work, cluster)[1]
    if refused:
        return None, refused
    made = plan(work, cluster)
    return made, [plan_row(made, cluster)]


def plan_row(made: Plan, cluster: Cluster) -> Row:
    held = f"{made.memory.peak / GIB:.2f} of {capacity(cluster) / GIB:.2f} GiB a rank"
    if not fits(made, cluster):
        changes = [name for name, _ in changes_that_fit(made.work, cluster)]
        return Row("plan", FAIL, f"does not fit: {held}", " or ".join(changes) or "plan.py --layout auto")
    step = f"{made.time.total:.3g} s a step, {made.time.samples_per_second:,.1f} samples/s on {cluster.name}"
    return Row("plan", PASS, f"fits: {held}; {step}; {band_line(made.work, cluster, made.time.total)}")


# -- data


def open_data(config: Config) -> tuple[Selection | None, list[Row]]:
    """On every host: one may not have mounted them."""
    leads = config.validation.lead_hours if config.validation.enable else ()
    what = (config.data, config.model.patch_size, leads, config.training.states_ahead)
    selection, refused = attempt("data", open_selection, *what, fix=READABLE)
    if refused:
        return None, refused
    archive = selection.archive
    (rows, columns), number = archive.grid.shape, len(selection.variables)
    found = f"{number} variables on {rows} x {columns} points, {len(archive.times)} dates"
    return selection, [Row("data", PASS, f"{found}, {archive.times[0]} to {archive.times[-1]}")]


def period_rows(config: Config, selection: Selection) -> list[Row]:
    """Dates that the periods name and that are not there, with all variables."""
    archive = selection.archive
    there = archive.times[archive.has(selection.variables)]
    named = {"train": config.data.train_period, "validation": config.data.validation_period}
    return [
        period_row(f"data, {period}", there, bounds(dates, there))
        for period, dates in named.items()
        if dates or period == "train"
    ]


def bounds(period: tuple[str, ...], there: np.ndarray) -> tuple[np.datetime64, np.datetime64]:
    """First and last instant of a period; of all dates where it is not named."""
    span = parse_period("", period)
    return (np.datetime64(span[0], "s"), np.datetime64(span[1], "s")) if span else (there[0], there[-1])


def period_row(name: str, there: np.ndarray, period: tuple[np.datetime64, np.datetime64]) -> Row:
    """Dates as far apart as they usually are; a last day counts as far as the data go. Training leaves out
    what is missing.
    """
    if np.timedelta64(0, "s") < period[1] - there[-1] < DAY:
        period = (period[0], there[-1])
    steps, counts = np.unique(np.diff(there), return_counts=True)
    gaps, stretches = missing_dates(there, period, steps[counts.argmax()])
    inside = there[(there >= period[0]) & (there <= period[1])]
    found, number = f"{len(inside)} dates", sum(len(gap) for gap in gaps)
    fix = "datasets.describe shows all gaps; fetch what is missing, or name other periods"
    if gaps:
        shown = ", ".join(str(gap[0]) + (f" and {len(gap) - 1} more" * (len(gap) > 1)) for gap in gaps[:3])
        found += f"; {number} missing: {shown}{' ...' if len(gaps) > 3 else ''}"
    if stretches:
        longest = max(stretches, key=len)
        found += f"; none at all from {longest[0]} to {longest[-1]}"
    if not gaps and not stretches:
        return Row(name, PASS, f"{found}, none missing")
    too_many = number > TOLERATED * (len(inside) + number)
    return Row(name, FAIL if too_many else WARN, found, fix)


def missing_dates(
    there: np.ndarray, period: tuple[np.datetime64, np.datetime64], step: np.timedelta64
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Dates of the period that are not among those `there`, in gaps, and in stretches of a month or more.

    Stretches that begin on the same day of two years or more are how the archive was made: not given.
    """
    first = period[0] + (there[0] - period[0]) % step  # on the archive's own hours
    wanted = np.arange(first, period[1] + np.timedelta64(1, "s"), step)
    absent = wanted[~np.isin(wanted, there)]
    runs = [run for run in np.split(absent, np.flatnonzero(np.diff(absent) > step) + 1) if len(run)]
    ends = day_of_year(there[:-1][np.diff(there) >= STRETCH] + step)
    long = [run for run in runs if len(run) * step >= STRETCH]
    usual = [run for run in long if (np.abs(ends - day_of_year(run[:1])) <= SAME_DAY).sum() > 1]
    stretches = [run for run in long if not any(run is each for each in usual)]
    return [run for run in runs if len(run) * step < STRETCH], stretches


def day_of_year(dates: np.ndarray) -> np.ndarray:
    return (dates.astype("datetime64[D]") - dates.astype("datetime64[Y]")).astype(int)


def loader_bytes(config: Config, selection: Selection) -> int:
    """That batches of all loader processes of this host take in /dev/shm; 0 where threads read."""
    data, training = config.data, config.training
    if (
        not data.num_workers
        or selection.archive.reads_by_threads(selection.variables)
        or is_kept(config, selection)
    ):
        return 0
    states = data.history + max(training.rollout_steps)
    batch = FLOAT32 * training.local_batch_size * states * state_values(selection)
    return local_ranks()[1] * data.num_workers * PREFETCH * batch


def state_values(selection: Selection) -> int:
    return len(selection.variables) * math.prod(selection.archive.grid.shape)


def is_kept(config: Config, selection: Selection) -> bool:
    """Whether the fields of both periods are read once, into memory."""
    dates = len(selection.train) + len(selection.validation)
    return FLOAT32 * state_values(selection) * dates / GIB <= config.data.cache_gib


def read_rate(config: Config, selection: Selection, seed: int) -> tuple[float, list[str]]:
    """Dates a second that the readers of all ranks of this host get, at random, and those that lack values.

    As many threads as there are readers; one where only processes read side by side, times their number.
    DataError: a chunk is damaged, or a value is none.
    """
    archive, names = selection.archive, selection.variables
    readers = local_ranks()[1] * max(config.data.num_workers, 1)
    threads = readers if archive.reads_by_threads(names) else 1
    order = np.random.default_rng(seed).permutation(np.concatenate([selection.train, selection.validation]))
    begun, empty = time.perf_counter(), set()

    def read(reader: int) -> int:
        for count, date in enumerate(np.roll(order, -reader * len(order) // readers), start=1):
            field = archive.read(int(date), names)
            refuse_fills(field, names, archive.times[date])
            for name in (name for name, own in zip(names, field, strict=True) if np.isnan(own).all()):
                empty.add(f"{name} at {archive.times[date]}")
            if time.perf_counter() - begun > READ_FOR:
                return count
        return len(order)

    with ThreadPoolExecutor(threads) as pool:
        count = sum(pool.map(read, range(threads)))
    beside = 1 if threads == readers else min(readers, len(os.sched_getaffinity(0)))
    return count * beside / (time.perf_counter() - begun), sorted(empty)


def values_row(empty: Sequence[str]) -> Row:
    """Of the dates that were read."""
    found = f"{len(empty)} fields without any value: {empty[0]} ..." if empty else "all fields have some"
    fix = "python -m datasets.describe SOURCE --all names them all; training leaves these dates out"
    return judged("data, values", bool(empty), found, fix, WARN)


def feed_row(config: Config, selection: Selection, rates: Sequence[float], made: Plan | None) -> Row:
    """Whether all hosts together read as fast as the planned step eats."""
    rate, size = sum(rates), FLOAT32 * state_values(selection)
    found = f"{rate:,.0f} dates/s, {rate * size / 1e9:.2g} GB/s as float32"
    if is_kept(config, selection):
        return Row("data, speed", PASS, f"{found}; read once, then from memory (data.cache_gib)")
    if made is None:
        return Row("data, speed", PASS, f"{found}; what is needed nobody knows")
    needed = made.work.states_read * made.time.samples_per_second
    found += f"; the planned step needs {needed:,.0f} dates/s"
    fix = "more data.num_workers, or a store of datasets.convert"
    verdict = FAIL if rate < needed / 2 else WARN
    return judged("data, speed", rate < needed, found, fix, verdict)


# -- model and resume


def model_rows(config: Config, selection: Selection) -> list[Row]:
    """What start_checks refuses of a model on this grid, and of the checkpoints that are there."""
    grid, number = selection.archive.grid, len(selection.variables)
    checks = [(check_model, (config, grid)), (check_memory, (config, number, grid))]
    for check, what in checks:
        if refused := attempt("model", check, *what)[1]:
            return refused
    before, refused = attempt("resume", check_resume, config, selection)
    if config.checkpoint.enable and not refused:
        done = config.dump_folder / "checkpoints"
        refused = attempt("resume", check_steps, done, config.training.steps)[1]
    found = f"from {before.folder}" if before else "nothing to resume from"
    return refused or [Row("resume", PASS, found)]


# -- checkpoints


def folder_rows(folder: Path) -> tuple[float, list[Row]]:
    """(bytes/s, what is wrong) of this host's writing to the run's folder. Leaves nothing there."""
    _, refused = attempt("run folder", check_folder, "job.dump_folder", folder, fix=WRITABLE)
    if refused:
        return 0.0, refused
    rate, refused = attempt("run folder", write_rate, existing(folder), fix=WRITABLE)
    found = f"{folder} can be written to"
    return (0.0, refused) if refused else (rate, [Row("run folder", PASS, found)])


def existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def write_rate(folder: Path) -> float:
    """Bytes/s of a file that is flushed to the disk, of at most a quarter of what is free. OSError."""
    size = min(WRITTEN, shutil.disk_usage(folder).free // 4)
    chunk = np.random.default_rng(0).bytes(2**20)  # nothing that a file system could compress
    with TemporaryFile(dir=folder) as file:
        begun, written = time.perf_counter(), 0
        while written < size:
            written += file.write(chunk[: size - written])
        file.flush()
        os.fsync(file.fileno())
        return written / max(time.perf_counter() - begun, 1e-9)


def save_bytes(config: Config, selection: Selection, made: Plan | None) -> int:
    """Of one checkpoint: weights, averaged weights, moments."""
    if made:
        return checkpoint_size(made.work)
    with torch.device("meta"):
        grid = selection.archive.grid
        further = len(config.data.static_variables) + len(config.data.forcings) + config.model.noise_dim
        further += (config.data.history - 1) * len(selection.variables)
        further += num_channels(config.model.conditions)
        model = build_model(config.model, len(selection.variables), further, grid.shape, grid.periodic)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return round((FLOAT32 + MOMENTS + FLOAT32 * (config.training.ema_decay > 0)) * numbers)


def save_rows(config: Config, size: int, rates: Sequence[float], made: Plan | None) -> list[Row]:
    """Room and speed for the checkpoints of a run, each of so many bytes."""
    if not config.checkpoint.enable:
        return [Row("checkpoints", PASS, "checkpoint.enable = false: a run that is stopped begins again")]
    rows = [room_row(config, size, shutil.disk_usage(existing(config.dump_folder)).free)]
    if min(rates, default=0.0) > 0:
        rows.append(save_speed_row(config.checkpoint, size, rates, made))
    return rows


def room_row(config: Config, size: int, free: int) -> Row:
    """For those that are kept and the one being written, less what lies there already."""
    settings, steps = config.checkpoint, config.training.steps
    most = checkpoint_storage(size, settings.keep_latest_k, steps, settings.interval)
    held = sum(path.stat().st_size for path in (config.dump_folder / "checkpoints").glob("step-*/*"))
    missing = most - held - free
    needed = f"{in_gib(max(most - held, 0))} needed for {most // max(size, 1)} of {in_gib(size)}"
    found = f"{in_gib(free)} free, {needed}"
    fix = "make room there, name another job.dump_folder, or lower checkpoint.keep_latest_k"
    return judged("checkpoints", missing > 0, found, fix)


def in_gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def save_speed_row(settings: Checkpoint, size: int, rates: Sequence[float], made: Plan | None) -> Row:
    """A save ends before the next begins, and holds training little where it is not asynchronous."""
    taken = size / sum(rates)
    found = f"{sum(rates) / 1e9:.3g} GB/s: a save is written in {taken:.3g} s"
    if made is None:
        return Row("checkpoints, speed", PASS, found)
    intervals = (settings.interval * made.time.total, 60 * settings.interval_minutes)
    interval = min(filter(None, intervals))
    share = taken / interval
    found += f", every {timedelta(seconds=round(interval))}" + f" ({share:.1%} of it)"
    if share > 1:
        return Row(
            "checkpoints, speed", FAIL, found, "raise checkpoint.interval, or write to a faster folder"
        )
    stalls = settings.async_mode == "disabled" and share > STALL
    fix = 'raise checkpoint.interval, or checkpoint.async_mode = "async_with_pinned_mem"'
    return judged("checkpoints, speed", stalls, found, fix, WARN)
