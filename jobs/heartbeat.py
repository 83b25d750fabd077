"""Activity of this process: step, phase, and when it last made progress."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parent.parent)
TORCH_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
WAITS = {"log", "agree"}  # phases that wait for the device or for an agreement, and so for other ranks
# Limited by comm.timeout_seconds: a new length of rollouts ("stage") compiles again.
LONG_PHASES = {"start", "stage", "validation", "checkpoint", "rollback", "end"}


class Activity:
    """Activity of a rank, set by its main thread. The start and the end of a phase count as progress."""

    def __init__(self) -> None:
        self.long_seconds = 0.0  # in validations and saves so far
        self.start_phase("start", 0)

    def progress(self) -> None:
        """Restart the time that the rank may take."""
        self.since = time.monotonic()

    def start_phase(self, name: str, step: int) -> None:
        """Set the outermost phase: "start", "train" at each step, "end"."""
        self.step, self.phases, self.since = step, (name,), time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase inside the present ones."""
        outer, started = self.phases, time.monotonic()
        self.phases, self.since = outer + (name,), started
        try:
            yield
        finally:
            self.phases, self.since = outer, time.monotonic()
            if name in LONG_PHASES and not LONG_PHASES & set(outer):
                self.long_seconds += self.since - started

    def describe_phase(self) -> str:
        return "/".join(self.phases[1:]) or self.phases[0]

    def waits_for_others(self) -> bool:
        """Return True while the main thread waits for other ranks: in a collective, or for the device."""
        if self.phases[-1] in WAITS:
            return True
        torch: Any = sys.modules.get("torch")  # imported by all code that uses a GPU
        if torch is not None and torch.cuda.is_initialized():
            try:
                # A full queue delays the host; for long only other ranks do so.
                if not torch.cuda.current_stream(int(os.environ.get("LOCAL_RANK", "0"))).query():
                    return True
            except RuntimeError:  # the device has failed: the main thread gets the error
                return False
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame:
            name = frame.f_code.co_filename
            # The innermost line of the project that is not of this file, which surrounds the code of a phase.
            if name.startswith(ROOT) and "site-packages" not in name and name != __file__:
                return False
            if TORCH_DISTRIBUTED in name:
                return True
            frame = frame.f_back
        return False


activity = Activity()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Mark a part of a step: by this name in traces, and in the report of a rank that hangs."""
    from torch.profiler import record_function  # here, because this module is imported without torch, too

    with record_function(name), activity.phase(name):
        yield
