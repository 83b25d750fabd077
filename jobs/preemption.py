"""Agreement of all ranks to save and end at a step boundary: by a signal, or short of time.

SIGTERM, SIGUSR1 (Slurm's `--signal`), SIGHUP and Ctrl-C on any rank, and `training.max_wall_time`, end a run
with exit code 75 after a save: "start me again". A second Ctrl-C ends it at once with 130. All ranks take the
largest of their requests: the exchange starts at one step boundary and ends at the next, so that no rank
waits for it.
"""

import logging
import os
import re
import signal
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from config import wall_time_seconds
from errors import ENDED, EXIT_SAVED, FAILED, INTERRUPTED, attempt_folder, refuse
from jobs.heartbeat import activity
from jobs.signals import describe_early_end, handle_stop_signals, is_of_torchelastic
from jobs.watchdog import AFTER_LOSS_SECONDS, Watchdog

logger = logging.getLogger(__name__)
WALL_TIME = 1000  # in the place of a signal's number
RANKS = 2**32  # a reason and a rank in one number: reason x RANKS + rank
LARGEST_MARGIN_SECONDS = 60.0  # between the end of the save and the end of the time
RECENT_STEPS = 100  # the longest of them is the estimate for the next steps


def started_at() -> float:
    """Return when training.max_wall_time began, in seconds since 1970. ConfigError."""
    text = os.environ.get("ROSSBY_STARTED") or str(time.time())
    if not re.fullmatch(r"\d+(\.\d*)?", text):
        refuse("ROSSBY_STARTED", text, "an environment variable: seconds since 1970, as date +%s gives them")
    return float(text)


class Agreement:
    """Context around the loop, which calls `decide` at each step boundary, on all ranks together."""

    def __init__(self, max_wall_time: str, group: dist.ProcessGroup, watchdog: Watchdog) -> None:
        """Handle signals from now on. Outside the loop they end the run through `watchdog.end`.

        max_wall_time: "hours:minutes:seconds" from ROSSBY_STARTED on; group: all ranks, for this object alone
        because gloo would mix up two simultaneous exchanges in one group.
        """
        self.rank, self.is_single, self.group = dist.get_rank(), dist.get_world_size() == 1, group
        self.limit_text, self.limit = max_wall_time, wall_time_seconds(max_wall_time)
        self.deadline, self.watchdog = started_at() + self.limit, watchdog
        self.num_steps, self.recent = 0, deque[float](maxlen=RECENT_STEPS)  # seconds, without the first step
        self.request, self.stop = 0, ""  # this rank's reason to stop; all ranks' reason
        self.is_waiting = False  # a request waits for a step boundary or the last save; else it ends the run
        self.ending: tuple[str, int] | None = None  # last line and exit code after the last save
        self.asked = torch.zeros((), dtype=torch.int64)  # the largest request of any rank
        self.exchange: dist.Work | None = None
        handle_stop_signals(self._on_signal)

    def close(self) -> None:
        """Ignore further signals: the run has ended, and its exit code is known."""
        handle_stop_signals(signal.SIG_IGN)
        if folder := attempt_folder():
            (folder / ENDED).touch()  # the launcher does not kill what ends by itself

    def _on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Called by the watchdog's thread, or without one by Python in the main thread."""
        watchdog, reason = self.watchdog, self._reason(number * RANKS + self.rank)
        if watchdog.is_alive() and threading.current_thread() is not watchdog:
            return
        if number == signal.SIGINT and self.request:
            watchdog.end("interrupted again: ended without a save", INTERRUPTED)
        # -- in the loop: the next step boundary
        if self.is_waiting:
            if not self.request and not is_of_torchelastic(number):
                logger.info(f"{reason} in step {activity.step}: the run saves and ends")
            self.request = self.request or number * RANKS + self.rank
            watchdog.is_asked_to_stop = True
            return
        # -- outside of it: the end
        message, code = self.ending or describe_early_end(number)
        message = f"{reason}: {message}" if self.ending else message
        watchdog.is_asked_to_stop = True
        if is_of_torchelastic(number) and watchdog.is_alive():
            watchdog.lost = True  # so that a rank that has failed is found and named first
            watchdog.end_later = time.monotonic() + AFTER_LOSS_SECONDS + 2.0, message, code
        else:
            watchdog.end(message, code)

    def __enter__(self) -> "Agreement":
        self.is_waiting, self.boundary = True, time.monotonic() - activity.long_seconds
        return self

    def __exit__(self, kind: Any, error: object, trace: object) -> None:
        if kind is None and self.exchange:  # else the watchdog ends this rank
            self.exchange.wait()  # a process that ends meanwhile would break the others' connections

    def after_last_save(self, step: int, saves: bool, unsaved: str) -> tuple[str, int]:
        """Return the last line and the exit code of a run after its last save; end it if a signal has come.

        step: the last one; saves: False if the run makes no checkpoints; unsaved: why the last is missing.
        """
        if unsaved:
            return unsaved, FAILED
        done = f"the checkpoint of step {step} is complete; start again to go on"
        lost = f"ended after step {step}, nothing saved: checkpoint.enable is false"
        self.ending = f"{done if saves else lost} (code {EXIT_SAVED})", EXIT_SAVED
        self.is_waiting = bool(self.stop)  # else a signal ends the run from here on
        if self.request and not self.stop:
            self.watchdog.end(f"{self._reason(self.request)}: {self.ending[0]}", EXIT_SAVED)
        return (f"{self.stop}: {self.ending[0]}", EXIT_SAVED) if self.stop else ("done", 0)

    def decide(self, seconds: float = 0.0) -> str:
        """Return why all ranks save and end after this step, if one requested it after the previous step, or
        "". seconds: duration of saves and validations until the step boundary after the next.
        """
        # -- seconds of a step, without validations and saves
        started, self.boundary = self.boundary, time.monotonic() - activity.long_seconds
        self.num_steps += 1
        if self.num_steps == 1:  # which compiles, on some ranks for longer
            dist.barrier(self.group)
            self.watchdog.trained = True
        if self.num_steps == 2:
            self.recent.clear()
        self.recent.append(self.boundary - started)
        # -- the answer to what all ranks requested at the last step boundary
        if self.exchange:
            self.exchange.wait()  # raises if another rank has ended
            self.exchange = None
        own = self._requested(seconds)
        if self.is_single:
            self.asked = own
        self.stop = self._reason(int(self.asked))
        if self.stop and not self.request:  # of another rank, or of the time: not logged yet
            logger.info(f"{self.stop} in step {activity.step}: the run saves and ends")
        # -- the requests of this one, answered at the next
        if not self.stop and not self.is_single:
            self.asked = own
            self.exchange = dist.all_reduce(self.asked, dist.ReduceOp.MAX, self.group, async_op=True)
        return self.stop

    def ends_validation(self) -> bool:
        """Return True on all ranks if one of them was asked to stop, or the time is over: the run has saved
        before the validation, ends at once, and validates after the next start.
        """
        if self.exchange:  # of the last step boundary; `decide` reads the answer
            self.exchange.wait()
            self.exchange = None
        asked = self._requested(0.0)
        dist.all_reduce(asked, dist.ReduceOp.MAX, self.group)
        self.stop = self._reason(int(asked))
        return bool(self.stop)

    def _requested(self, seconds: float) -> torch.Tensor:
        """Return this rank's request, 0 for none. The clock of rank 0 decides for all."""
        # Two steps: the present one, and the one after which the answer comes.
        needed = 2 * max(self.recent) + seconds + min(LARGEST_MARGIN_SECONDS, self.limit / 10)
        is_late = self.rank == 0 and time.time() + needed > self.deadline
        return torch.tensor(self.request or is_late * WALL_TIME * RANKS, dtype=torch.int64)

    def _reason(self, request: int) -> str:
        reason, rank = divmod(request, RANKS)
        if reason == WALL_TIME:
            return f"training.max_wall_time = {self.limit_text}"
        return f"{signal.Signals(reason).name} on rank {rank}" if reason else ""
