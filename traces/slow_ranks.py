"""The rank that the others wait for, by when each of them came to their common collectives.

Who is first in a collective waits in it for the last. What a rank has not waited in a step is its own work,
and a rank whose own work takes longer than that of the others sets the pace of all. On a GPU these are times
of the host: they show a host that is late (its loader, its processor), not a device that computes slowly.
"""

import logging
import os
import socket
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from jobs.hang_report import recorded_collectives

logger = logging.getLogger(__name__)
LOOKED_AT = 256  # of the last calls
EVERY = 10  # logged steps between looks, which take a few milliseconds
SLOWER = 1.25  # own work of a slow rank over that of the others, in the median
WORTH_SAYING = 0.1  # of a step, that the others wait
SHORT = 0.1  # seconds of a step: what is lost in a shorter one is nobody's concern


@dataclass(frozen=True)
class Pace:
    """Of each rank, in seconds a step."""

    step: float  # of all
    own: np.ndarray  # (ranks,): what is not waiting for others
    data: np.ndarray  # (ranks,): of that, waiting for data

    def slow(self) -> int | None:
        """The rank that the others wait for, if there is one."""
        rank = int(self.own.argmax())
        others = float(np.median(np.delete(self.own, rank)))
        late = self.own[rank] > SLOWER * others and self.own[rank] - others > WORTH_SAYING * self.step
        return rank if late and self.step > SHORT else None

    def __str__(self) -> str:
        """Of the slow rank."""
        rank = int(self.own.argmax())
        others = float(np.median(np.delete(self.own, rank)))
        return (
            f"is slow: of {self.step:.3f} s a step its own work takes {self.own[rank]:.3f} s "
            f"({self.data[rank]:.3f} s of it waiting for data), that of the others {others:.3f} s, who wait "
            "for it. Look at its host: another job there, fewer cores, a clock held back, a slower disk"
        )


class SlowRanks:
    """All ranks together; says a rank that was slow in two looks, once, until it is another."""

    def __init__(self) -> None:
        self.looks = 0
        self.suspected: int | None = None
        self.said: int | None = None
        self.who = f"{socket.gethostname()}, pid {os.getpid()}"

    def look(self, num_steps: int, step_seconds: float, data_seconds: float) -> None:
        """On every logging step: `num_steps` steps since the last, what each took, and waited for data."""
        self.looks += 1
        if dist.get_world_size() == 1 or self.looks % EVERY:
            return
        since = time.time_ns() - round(num_steps * step_seconds * 1e9)
        pace = pace_of(arrivals(since), step_seconds, data_seconds)
        rank, before = pace.slow(), self.suspected
        self.suspected = rank
        if rank is not None and rank == before != self.said:
            self._say(rank, pace)
        self.said = self.said if rank is not None else None

    def _say(self, rank: int, pace: Pace) -> None:
        """All judge the same numbers; one says it."""
        self.said, told = rank, [self.who]
        dist.broadcast_object_list(told, src=rank)
        if dist.get_rank() == 0:
            logger.warning(f"rank {rank} ({told[0]}) {pace}")


def arrivals(since: int) -> torch.Tensor:
    """(ranks, calls, 2): checksum of a call's group and number, 0 where there is none, and when it was made,
    in ns since the barrier that is held here, which makes the clocks of all hosts one.
    """
    calls = [call for call in recorded_collectives() if call.created >= since][-LOOKED_AT:]
    dist.barrier()
    now = time.time_ns()
    mine = torch.zeros(LOOKED_AT, 2, dtype=torch.int64)
    for row, call in enumerate(calls):
        mine[row, 0] = zlib.crc32(f"{call.group} {call.number}".encode())
        mine[row, 1] = call.created - now
    return gathered(mine)


def gathered(mine: torch.Tensor) -> torch.Tensor:
    """Of all ranks, in their order, on the CPU; by NCCL where it is: a ring of gloo takes long with many."""
    mine = mine.cuda() if "nccl" in str(dist.get_backend_config()) else mine
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts).cpu()


def pace_of(made: torch.Tensor, step_seconds: float, data_seconds: float) -> Pace:
    """made: what `arrivals` gives."""
    waited, span = waiting(made.numpy())
    share = np.minimum(waited / span, 1) if span else waited  # calls that overlap are waited for once
    data = gathered(torch.tensor([data_seconds], dtype=torch.float64)).flatten()
    return Pace(step_seconds, step_seconds * (1 - share), data.numpy())


def waiting(made: np.ndarray) -> tuple[np.ndarray, float]:
    """made (ranks, calls, 2) -> ns that each rank has waited in calls of several, and ns of all of them."""
    calls: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, own in enumerate(made):
        for key, when in own[own[:, 0] != 0]:
            calls[int(key)][rank] = int(when)
    common = [ranks for ranks in calls.values() if len(ranks) > 1]
    waited = np.zeros(len(made))
    for ranks in common:
        last = max(ranks.values())
        for rank, when in ranks.items():
            waited[rank] += last - when
    times = [when for ranks in common for when in ranks.values()]
    return waited, float(max(times) - min(times)) if times else 0.0
