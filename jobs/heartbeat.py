"""What this process is doing: the step, the part of it, since when. The watchdog tells the other ranks."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).parent.parent)
TORCH_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
WAITS = "log"  # the part of a step that waits for the device, and so for the other ranks


class Activity:
    """Set by the main thread, read by any. Entering or leaving a phase, and `progress`, are signs of life."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A run begins."""
        self.step, self.phases, self.since = 0, ("start",), time.monotonic()

    def progress(self) -> None:
        """Something was done: the time that a rank may take starts anew."""
        self.since = time.monotonic()

    def chapter(self, name: str, step: int) -> None:
        """The part of the run that all phases lie in: "start", "train" at each step, "end"."""
        self.step, self.phases = step, (name,)
        self.progress()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named part of the run, inside the parts that it lies in."""
        outer, self.phases = self.phases, (*self.phases, name)
        self.progress()
        try:
            yield
        finally:
            self.phases = outer
            self.progress()

    @property
    def seconds(self) -> float:
        """Since the last sign of life."""
        return time.monotonic() - self.since

    def where(self) -> tuple[str, bool]:
        """The innermost line of this project that the main thread is in, and whether it waits for others."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        waits = self.phases[-1] == WAITS or device_is_busy()
        while frame and not _ours(frame):
            waits = waits or TORCH_DISTRIBUTED in frame.f_code.co_filename
            frame = frame.f_back
        if frame is None:
            return "", waits
        name = os.path.relpath(frame.f_code.co_filename, ROOT)
        return f"{name}:{frame.f_lineno} {frame.f_code.co_name}", waits


def leave_sign() -> None:
    """Touches this rank's file in the folder that ROSSBY_HEARTBEAT names: launch/alive.sh looks at its time.

    OSError: it cannot.
    """
    if folder := os.environ.get("ROSSBY_HEARTBEAT"):
        sign = Path(folder, f"rank-{os.environ.get('RANK', '0')}")
        sign.parent.mkdir(parents=True, exist_ok=True)
        sign.touch()


def device_is_busy() -> bool:
    """Whether a GPU has not done yet what this process gave it. Then the host waits for it, wherever it is: a
    full queue holds up any kernel; and a device that is long busy waits for other ranks.
    """
    torch: Any = sys.modules.get("torch")  # which who gives work to a GPU has imported
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        return not torch.cuda.current_stream(int(os.environ.get("LOCAL_RANK", "0"))).query()
    except RuntimeError:  # the device has failed: the main thread hears of it
        return False


def _ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    # Nothing is done in the span around a phase.
    return name.startswith(ROOT) and "site-packages" not in name and name != __file__


activity = Activity()
