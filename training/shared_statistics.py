"""Statistics of the training period, counted by all ranks together: each reads its part of the dates.

What is counted is kept in the run's folder every minute, so that a job that is killed goes on from there,
on any number of ranks. No rank waits for another for longer than a round.
"""

import logging
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
from jobs.heartbeat import activity
from jobs.saved_parts import SavedParts
from parallelisms.mesh import cpu_group, from_first_rank
from training.progress_bar import progress_bar

logger = logging.getLogger("rossby")
ROUND_SECONDS = 5.0
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
        saved_parts(cache, source).remove()
    return statistics


def count_together(source: Source, cache: Path) -> Statistics:
    """Called by all ranks, which end with the same statistics.

    DataError, on all ranks: a field that one of them cannot read, or that is no weather.
    """
    rank, group = dist.get_rank(), cpu_group()  # on the CPU, where the sums are
    saved, earlier = saved_parts(cache, source), list[Sums]()  # on rank 0

    def begin() -> tuple[int, np.ndarray, np.ndarray]:
        earlier.extend(map(sums_of, saved.read()))
        dates = [date for sums in earlier for date in sums.dates]
        shift = earlier[0].shift if earlier else first_shift(source)
        return saved.attempt, shift, np.array(dates, "datetime64[s]")

    saved.attempt, shift, done = from_first_rank(begin)
    left = source.dates[~np.isin(source.fields.times[source.dates], done)]
    if len(done):
        logger.info(f"statistics: {len(done)} of {len(source.dates)} dates are counted already")
    counting = Counting(source, np.array_split(left, dist.get_world_size())[rank], shift)
    done_before = len(source.dates) - len(left)
    with progress_bar(len(source.dates), "date", rank == 0, desc="statistics", done=done_before) as bar:
        rounds(counting, saved, bar, group)
    sums = counting.sums
    for each in earlier:
        sums.merge(each)
    add_over_ranks(sums, group)
    dist.destroy_process_group(group)
    return Statistics.from_sums(sums, source.fingerprint)


def saved_parts(cache: Path, source: Source) -> SavedParts:
    """Return the files of unfinished attempts to count a source."""
    return SavedParts(cache.parent / SAVED / source.fingerprint, dist.get_rank())


def arrays_of(sums: Sums) -> dict[str, Any]:
    return vars(sums) | {"dates": np.array(sums.dates), "rows": np.array(sums.rows)}


def sums_of(arrays: dict[str, Any]) -> Sums:
    """Return the sums of which `arrays_of` made these arrays."""
    lists: dict[str, Any] = {name: list(arrays[name]) for name in ("dates", "rows")}
    return Sums(**arrays | lists)


def rounds(counting: Counting, saved: SavedParts, bar: tqdm, group: dist.ProcessGroup) -> None:
    """Until no rank has a date left. UserError, on all ranks: what one of them met."""
    num_counted, failure = 0, None
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
        saved.write_if_due(lambda: arrays_of(counting.sums))


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks, in their order."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


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
