"""Statistics of the training period, computed by all ranks together: each reads its part of the dates.

Ranks synchronise after each round, so that none waits for another for longer than a round.
"""

from dataclasses import replace
from itertools import chain
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
from jobs.heartbeat import activity
from parallelisms.mesh import cpu_group, from_first_rank, on_all_ranks

ROUND_SECONDS = 5.0


def load_or_count(cache: Path, source: Source, trained: Numbers | None = None) -> Statistics:
    """Return the statistics of a source from the file `cache`; compute and write them if that does not match.

    Called by all ranks. trained: the statistics with which the run's weights were trained; they are used even
    if dates were added since. Raises DataError if the fields of their dates have changed.
    """
    if trained:
        found, dates = from_first_rank(lambda: stored_as_trained(cache, source, trained))
        source = replace(source, dates=dates)
    else:
        found = from_first_rank(lambda: stored_statistics(cache, source))
    if found:
        return found
    statistics = count_together(source)
    if trained:
        statistics = as_trained(statistics, source.variables, trained)
    if dist.get_rank() == 0:
        statistics.write(cache)
    return statistics


def count_together(source: Source) -> Statistics:
    """Compute the statistics on all ranks together; the result is the same on all.

    Raises DataError on all ranks if one of them cannot read a field, or its values are impossible.
    """
    rank, group = dist.get_rank(), cpu_group()  # on the CPU, where the sums are
    shift = from_first_rank(lambda: first_shift(source))
    counting = Counting(source, np.array_split(source.dates, dist.get_world_size())[rank], shift)
    with tqdm(total=len(source.dates), unit="date", disable=rank > 0 or None) as bar:  # on a terminal
        rounds(counting, bar, group)
    add_over_ranks(counting.sums, group)
    dist.destroy_process_group(group)
    return Statistics.from_sums(counting.sums, source.fingerprint)


def rounds(counting: Counting, bar: tqdm, group: dist.ProcessGroup) -> None:
    """Read dates until no rank has any left. A UserError of one rank is raised on all."""
    left, before = 1, counting.left
    while left:
        on_all_ranks(lambda: counting.go_on(ROUND_SECONDS))
        activity.progress()
        state = torch.tensor([counting.left, before - counting.left])
        before = counting.left
        dist.all_reduce(state, group=group)
        left = int(state[0])
        bar.update(int(state[1]))


def add_over_ranks(sums: Sums, group: dist.ProcessGroup) -> None:
    """Add the sums of all ranks. Fields are sent one variable at a time: together they may be large."""
    if group.size() == 1:
        return
    sums.count = sums.count + np.zeros(sums.total.shape, np.int64)
    for v in range(len(sums.total)):
        dist.all_reduce(torch.from_numpy(sums.total[v]), group=group)
        dist.all_reduce(torch.from_numpy(sums.count[v]), group=group)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, (sums.dates, sums.rows), group)
    sums.dates, sums.rows = (list(chain.from_iterable(each)) for each in zip(*parts, strict=True))
