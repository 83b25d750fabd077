"""Ranks agree to save, or to save and end, at a step boundary: told to by a signal, or short of time.

SIGTERM, SIGUSR1 (Slurm's `--signal`) and Ctrl-C, on any rank, end a run with exit code 75 after a save:
"start me again"; a second Ctrl-C ends it at once. So does `training.max_wall_time`. Each rank's flags are
numbers, of which all ranks take the largest (jobs/rank_tree.py): the exchange is started at one step boundary
and read at the next, so that nobody waits for it, nor for the device.
"""

import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from config import wall_time_seconds
from errors import INTERRUPTED, refuse
from jobs.rank_tree import RankTree

EXIT_SAVED = 75  # EX_TEMPFAIL of sysexits.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
HEARD = (*STOP_SIGNALS, signal.SIGINT)
WALL_TIME = 1000  # stands where a signal's number would
RANKS = 2**32  # a reason and a rank in one number: reason x RANKS + rank
LARGEST_MARGIN_SECONDS = 60.0  # between the end of the save and the end of the time


def started_at() -> float:
    """When training.max_wall_time began, seconds since 1970. ConfigError: ROSSBY_STARTED is no time."""
    text = os.environ.get("ROSSBY_STARTED") or str(time.time())
    try:
        started = float(text)
    except ValueError:
        started = math.nan
    if not math.isfinite(started):
        refuse("ROSSBY_STARTED", text, "an environment variable: seconds since 1970, as date +%s gives them")
    return started


def farewell(stop: str, step: int, saved: bool) -> str:
    """The last line of a run that ends early."""
    if saved:
        return f"{stop}: the checkpoint of step {step} is complete; start again to go on (code {EXIT_SAVED})"
    return f"{stop}: ended after step {step}, nothing saved: checkpoint.enable is false (code {EXIT_SAVED})"


@dataclass(frozen=True)
class Decision:
    """What all ranks do at a step boundary."""

    save: bool = False
    stop: str = ""  # why the run ends after a save; empty: it goes on


class Agreement:
    """Asked by the loop once a step, `at`; in between a context that the loop lies in."""

    def __init__(self, max_wall_time: str, interval_minutes: float, timeout_seconds: int) -> None:
        """max_wall_time: "hours:minutes:seconds", counted from ROSSBY_STARTED; interval_minutes, 0: never."""
        self.rank, self.alone = dist.get_rank(), dist.get_world_size() == 1
        self.ranks = RankTree(timeout_seconds)
        self.limit_text, self.limit = max_wall_time, wall_time_seconds(max_wall_time)
        self.run_started = time.monotonic() - max(time.time() - started_at(), 0.0)
        self.interval = 60 * interval_minutes or float("inf")
        self.saved_at = self.boundary = time.monotonic()
        self.num_steps, self.longest_step = 0, 0.0  # seconds; the first step, which compiles, is forgotten
        self.asked, self.stop = 0, ""  # this rank's reason to stop; all ranks' reason
        self.looping = self.looped = False
        self.flags = torch.zeros(2, dtype=torch.int64)  # reason to stop, whether to save
        self.exchange: Future | None = None
        self.watchdog: Any = None
        self.previous = {}

    def listen(self, watchdog: Any) -> "Agreement":
        """From now on signals are heard. Outside the loop they end the run through `watchdog.end_all`."""
        self.watchdog = watchdog
        self.previous = {
            number: signal.signal(number, self._hear) for number in (*STOP_SIGNALS, signal.SIGINT)
        }
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher keeps them back until now
        return self

    def close(self) -> None:
        """The run is over. One that has saved is leaving; else signals mean again what they meant before."""
        for number, handler in self.previous.items():
            signal.signal(number, signal.SIG_IGN if self.stop else handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked:
            print("rossby: interrupted again: ended without a save", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        self.asked = self.asked or number * RANKS + self.rank
        if not self.looping and not self.stop:
            state = "everything is saved" if self.looped else "before the first step: nothing to save"
            self.watchdog.end_all(f"{self._words(self.asked)}, {state}", EXIT_SAVED)

    def __enter__(self) -> "Agreement":
        self.looping, self.boundary = True, time.monotonic()
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        self.looping, self.looped = False, True
        if self.exchange and kind is None:
            self.exchange.result()  # a process that leaves meanwhile would break the others' connections

    def at(self, save_seconds: float = 0.0) -> Decision:
        """After a step, on every rank: what all do now, asked for by any of them at the boundary before.

        save_seconds: how long the last save took, for which time is left.
        """
        now = time.monotonic()
        self.num_steps += 1
        self.longest_step = max(now - self.boundary, self.longest_step if self.num_steps > 2 else 0.0)
        self.boundary = now
        if self.alone:
            self.flags = self._asked_for(now, save_seconds)
        agreed = self._read()
        if not agreed.stop and not self.alone:
            self.flags = self._asked_for(now, save_seconds)
            self.exchange = Future()
            threading.Thread(target=self._take_largest, args=(self.exchange,), daemon=True).start()
        return agreed

    def saved(self) -> None:
        """A checkpoint was made: the minutes to the next count from here."""
        self.saved_at = time.monotonic()

    def _read(self) -> Decision:
        if self.exchange:
            self.exchange.result()
            self.exchange = None
        stop, save = self.flags.tolist()
        self.stop = self._words(stop) if stop else ""
        return Decision(bool(save), self.stop)

    def _take_largest(self, exchange: Future) -> None:
        try:
            exchange.set_result(self.ranks.all_reduce(self.flags, dist.ReduceOp.MAX))
        except Exception as error:  # another rank is gone: raised at the next boundary
            exchange.set_exception(error)

    def _asked_for(self, now: float, save_seconds: float) -> torch.Tensor:
        """This rank's flags. The clock of rank 0 decides for all."""
        save = False
        if self.rank == 0:
            if save := now - self.saved_at >= self.interval:
                self.saved_at = now
            # Two steps: one that is being asked for, one that the answer comes after.
            needed = 2 * self.longest_step + save_seconds + min(LARGEST_MARGIN_SECONDS, self.limit / 10)
            if now + needed > self.run_started + self.limit:
                self.asked = self.asked or WALL_TIME * RANKS
        return torch.tensor([self.asked, save], dtype=torch.int64)

    def _words(self, asked: int) -> str:
        reason, rank = divmod(asked, RANKS)
        if reason == WALL_TIME:
            return f"training.max_wall_time = {self.limit_text}"
        return f"{signal.Signals(reason).name} on rank {rank}"
