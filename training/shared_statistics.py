"""Statistics of the training period, counted by all ranks together: each reads its part of the dates.

What is counted is kept in the run's folder every minute, so that a job that is killed goes on from there,
on any number of ranks. No rank waits for another for longer than a round.
"""

import logging
import shutil
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from datasets.statistics import (
    Counting,
    Numbers,
    Source,
    Statistics,
    Sums,
    as_trained,
    first_shift,
    stored_as_trained,
    stored_statistics,
)
from errors import UserError
from jobs.durable_files import replacing
from jobs.heartbeat import activity
from parallelisms.mesh import cpu_group, from_first_rank
from training.progress_bar import progress_bar

logger = logging.getLogger("rossby")
ROUND_SECONDS, SAVE_SECONDS = 5.0, 60.0
SAVED = "saved_statistics"  # folder in the run's: what unfinished attempts have counted


def load_or_count(cache: Path, source: Source, trained: Numbers | None = None) -> Statistics:
    """Return the statistics of a source from the file `cache`; if it is of other data, count and write them.

    Called by all ranks. trained: those that the run's weights were trained with; they stay, whatever dates
    were added since. Raises DataError if the fields of their dates have changed.
    """
    if trained:
        found, dates = from_first_rank(lambda: stored_as_trained(cache, source, trained))
        source = replace(source, dates=dates)
    else:
        found = from_first_rank(lambda: stored_statistics(cache, source))
    if found:
        return found
    statistics = count_together(source, cache)
    if trained:
        statistics = as_trained(statistics, source.variables, trained)
    if dist.get_rank() == 0:
        statistics.write(cache)
        shutil.rmtree(cache.parent / SAVED, ignore_errors=True)
    return statistics


def count_together(source: Source, cache: Path) -> Statistics:
    """Called by all ranks, which end with the same statistics.

    DataError, on all ranks: a field that one of them cannot read, or that is no weather.
    """
    rank, folder = dist.get_rank(), cache.parent / SAVED
    group = cpu_group()  # on the CPU, where the sums are
    earlier: list[Sums] = []  # on rank 0
    fingerprint, attempt, shift, done = from_first_rank(lambda: begin(folder, source, earlier))
    left = source.dates[~np.isin(source.fields.times[source.dates], done)]
    counting = Counting(source, np.array_split(left, dist.get_world_size())[rank], shift)
    own = folder / f"{fingerprint}.{attempt}.{rank}.npz"
    done_before = len(source.dates) - len(left)
    with progress_bar(len(source.dates), "date", rank == 0, desc="statistics", done=done_before) as bar:
        rounds(counting, own, bar, group)
    sums = counting.sums
    for each in earlier:
        sums.merge(each)
    add_over_ranks(sums, group)
    dist.destroy_process_group(group)
    return Statistics.from_sums(sums, fingerprint)


def begin(folder: Path, source: Source, earlier: list[Sums]) -> tuple[str, int, np.ndarray, np.ndarray]:
    """Return, on rank 0, the fingerprint, the number of this attempt, the shift (V,) and the dates counted.

    The sums over the dates that killed attempts have counted are appended, as one, to `earlier`.
    """
    saved = sorted(folder.glob(f"{source.fingerprint}.*.*.npz"))
    for sums in map(read_sums, saved):
        if sums and earlier:
            earlier[0].merge(sums)
        elif sums:
            earlier.append(sums)
    done = np.array(earlier[0].dates if earlier else [], "datetime64[s]")
    if len(done):
        logger.info(f"statistics: {len(done)} of {len(source.dates)} dates are counted already")
    attempt = 1 + max((int(path.name.split(".")[1]) for path in saved), default=0)
    shift = earlier[0].shift if earlier else first_shift(source)
    return source.fingerprint, attempt, shift, done


def read_sums(path: Path) -> Sums | None:
    """Return the sums that `save` wrote, None from a damaged file: its dates are counted again."""
    try:
        with np.load(path) as stored:
            arrays: dict[str, Any] = {name: stored[name] for name in stored}
            arrays.update(dates=list(arrays["dates"]), rows=list(arrays["rows"]))
            return Sums(**arrays)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def rounds(counting: Counting, own: Path, bar: tqdm, group: dist.ProcessGroup) -> None:
    """Until no rank has a date left. UserError, on all ranks: what one of them met."""
    num_counted, saved_at, save_every, failure = 0, time.monotonic(), SAVE_SECONDS, None
    while True:
        try:
            counting.go_on(ROUND_SECONDS)
        except UserError as error:
            failure = type(error), str(error)  # as from_first_rank sends it
        activity.progress()
        state = torch.tensor([counting.left, counting.num_counted - num_counted, failure is not None])
        num_counted = counting.num_counted
        dist.all_reduce(state, group=group)
        bar.update(int(state[1]))
        if state[2]:
            kind, text = next(filter(None, gather_objects(failure, group)))
            raise kind(text)
        if not state[0]:
            return
        if time.monotonic() - saved_at > save_every:
            started = time.monotonic()
            save(counting.sums, own)
            saved_at = time.monotonic()
            save_every = max(SAVE_SECONDS, 20 * (saved_at - started))


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks, in their order."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


def save(sums: Sums, path: Path) -> None:
    """Write the sums so far; a full disk is only logged here."""
    arrays: dict[str, Any] = vars(sums) | {"dates": np.array(sums.dates), "rows": np.array(sums.rows)}
    try:
        with replacing(path) as partial:
            np.savez(partial, **arrays)
    except OSError as error:
        logger.warning(f"{path}: not written ({error}): a job that is killed now counts again")


def add_over_ranks(sums: Sums, group: dist.ProcessGroup) -> None:
    """Give every rank the sums of all. Fields are sent one variable at a time: together they may be large."""
    if group.size() == 1:
        return
    sums.count = sums.count + np.zeros(sums.total.shape, np.int64)
    for v in range(len(sums.total)):
        dist.all_reduce(torch.from_numpy(sums.total[v]), group=group)
        dist.all_reduce(torch.from_numpy(sums.count[v]), group=group)
    for rank, (dates, rows) in enumerate(gather_objects((sums.dates, sums.rows), group)):
        if rank != group.rank():
            sums.dates += dates
            sums.rows += rows
