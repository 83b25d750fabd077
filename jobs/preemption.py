"""Agreement of all ranks to save and end at a step boundary: by a signal, or short of time.

SIGTERM, SIGUSR1 (Slurm's `--signal`) and Ctrl-C on any rank, and `training.max_wall_time`, end a run with
exit code 75 after a save: "start me again". A second Ctrl-C ends it at once with 130. All ranks take the
largest of their requests: the exchange starts at one step boundary and ends at the next, so that no rank
waits for it.
"""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from config import wall_time_seconds
from errors import EXIT_SAVED, INTERRUPTED, refuse

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
WALL_TIME = 1000  # in the place of a signal's number
RANKS = 2**32  # a reason and a rank in one number: reason x RANKS + rank
LARGEST_MARGIN_SECONDS = 60.0  # between the end of the save and the end of the time


def started_at() -> float:
    """Return when training.max_wall_time began, in seconds since 1970. ConfigError."""
    text = os.environ.get("ROSSBY_STARTED") or str(time.time())
    if not re.fullmatch(r"\d+(\.\d*)?", text):
        refuse("ROSSBY_STARTED", text, "an environment variable: seconds since 1970, as date +%s gives them")
    return float(text)


def exit_message(stop: str, step: int, saved: bool) -> str:
    """Return the last line of a run that ends early."""
    done = f"the checkpoint of step {step} is complete; start again to go on"
    lost = f"ended after step {step}, nothing saved: checkpoint.enable is false"
    return f"{stop}: {done if saved else lost} (code {EXIT_SAVED})"


class Agreement:
    """Context around the loop, which asks it at each step boundary, `at`, on all ranks together."""

    def __init__(self, max_wall_time: str, timeout_seconds: int) -> None:
        """max_wall_time: "hours:minutes:seconds" from ROSSBY_STARTED on."""
        self.rank, self.is_single = dist.get_rank(), dist.get_world_size() == 1
        # Of its own: two exchanges at a time in one group of gloo would be taken for each other.
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self.limit_text, self.limit = max_wall_time, wall_time_seconds(max_wall_time)
        self.run_started = time.monotonic() - max(time.time() - started_at(), 0.0)
        self.boundary = time.monotonic()
        self.num_steps, self.longest_step = 0, 0.0  # seconds; without the first step, which compiles
        self.request, self.stop = 0, ""  # this rank's reason to stop; all ranks' reason
        self.in_loop = self.after_loop = False
        self.asked = torch.zeros((), dtype=torch.int64)  # the largest request of any rank
        self.exchange: dist.Work | None = None
        self.watchdog: Any = None
        self.previous: dict[int, Any] = {}

    def listen(self, watchdog: Any) -> "Agreement":
        """Handle signals from now on. Outside the loop they end the run through `watchdog.end_all`."""
        self.watchdog = watchdog
        self.previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def close(self) -> None:
        """Ignore further signals of a run that has saved; restore the former handlers otherwise."""
        for number, handler in self.previous.items():
            signal.signal(number, signal.SIG_IGN if self.stop else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.request:
            print("rossby: interrupted again: ended without a save", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        self.request = self.request or number * RANKS + self.rank
        if not self.in_loop and not self.stop:
            state = "everything is saved" if self.after_loop else "before the first step: nothing to save"
            self.watchdog.end_all(f"{self._reason(self.request)}, {state}", EXIT_SAVED)

    def __enter__(self) -> "Agreement":
        self.in_loop, self.boundary = True, time.monotonic()
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is None:  # else the watchdog ends this rank
            self.in_loop, self.after_loop = False, True
            if self.exchange:
                self.exchange.wait()  # a process that ends meanwhile would break the others' connections

    def decide(self, save_seconds: float = 0.0) -> str:
        """Return why all ranks save and end after this step, as any of them requested after the step before;
        empty: they go on.

        save_seconds: duration of the last save, for which time is left.
        """
        now = time.monotonic()
        self.num_steps += 1
        self.longest_step = max(now - self.boundary, self.longest_step if self.num_steps > 2 else 0.0)
        self.boundary = now
        if self.is_single:
            self.asked = self._requested(now, save_seconds)
        if self.exchange:
            self.exchange.wait()  # raises where another rank is gone
            self.exchange = None
        asked = int(self.asked)
        self.stop = self._reason(asked) if asked else ""
        if not self.stop and not self.is_single:
            self.asked = self._requested(now, save_seconds)
            self.exchange = dist.all_reduce(self.asked, dist.ReduceOp.MAX, self.group, async_op=True)
        return self.stop

    def _requested(self, now: float, save_seconds: float) -> torch.Tensor:
        """Return this rank's request, 0 for none. The clock of rank 0 decides for all."""
        if self.rank == 0:
            # Two steps: the present one, and the one after which the answer comes.
            needed = 2 * self.longest_step + save_seconds + min(LARGEST_MARGIN_SECONDS, self.limit / 10)
            if now + needed > self.run_started + self.limit:
                self.request = self.request or WALL_TIME * RANKS
        return torch.tensor(self.request, dtype=torch.int64)

    def _reason(self, request: int) -> str:
        reason, rank = divmod(request, RANKS)
        if reason == WALL_TIME:
            return f"training.max_wall_time = {self.limit_text}"
        return f"{signal.Signals(reason).name} on rank {rank}"
