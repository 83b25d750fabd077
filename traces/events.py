"""Reader of a torch.profiler trace into nested events, each with its time, thread and parent.

Times are microseconds, as in the file. Chrome's format: one JSON object, `traceEvents` a list of
{"ph": "X", "cat": "cpu_op", "name", "pid", "tid", "ts", "dur", "args"}.
"""

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from errors import DataError

STEP_NAME = re.compile(r"ProfilerStep#\d{1,18}")
# Chrome's categories -> what they are here; others ("python_function", "gpu_user_annotation") are left out.
KINDS = {"cpu_op": "op", "user_annotation": "span", "cuda_runtime": "call", "cuda_driver": "call"}
KINDS |= {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
FILE_NAME = re.compile(r"step-(\d+)-rank(\d+)\.json\.gz")
# What a damaged file raises: gzip zlib.error for changed bytes, json RecursionError for 1,000 brackets,
# float() OverflowError for an integer of 400 digits; the others a field that is absent or of a wrong type.
UNREADABLE = (OSError, EOFError, zlib.error, RecursionError, OverflowError)
UNREADABLE += (ValueError, KeyError, TypeError, AttributeError)


@dataclass(slots=True, eq=False)
class Event:
    """An operator, span or call of the CUDA runtime on the host, or a kernel or copy on a stream."""

    name: str
    kind: str
    thread: tuple[str, str]  # process and thread, or device and stream
    start: float  # microseconds
    end: float
    correlation: int  # the number that a kernel shares with the call that launched it; -1: none
    parent: "Event | None" = None  # the innermost event on the same thread that contains it

    def chain(self) -> Iterator["Event"]:
        """Yield the event itself, the event around it, and so on outwards."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass
class Trace:
    """One rank's recording of a few steps."""

    title: str  # file, rank, device and steps
    rank: int
    steps: list[Event]
    host_events: list[Event]  # operators, spans and calls, by thread and in order
    stretches: list[tuple[float, float, Event]]  # of all threads: start, end, innermost event at that time
    kernels: list[Event]  # kernels and copies of the GPU, in order; empty on a CPU
    calls: dict[int, Event]  # correlation -> the call that launched it


def find_traces(where: Path) -> list[Path]:
    """Return the newest traces of a run's folder, by rank; or the file that is named. Raises DataError."""
    if where.is_file():
        return [where]
    matches = [(FILE_NAME.fullmatch(path.name), path) for path in where.glob("traces/*")]
    traces = sorted((int(match[1]), int(match[2]), path) for match, path in matches if match)
    if not traces:
        raise DataError(
            f"{where}: no trace is there; write one with --profiling.enable_profiling true "
            "--profiling.profile_freq 20 (a trace every 20 steps)"
        )
    return [path for step, _, path in traces if step == traces[-1][0]]


def read_trace(path: Path) -> Trace:
    """Read one rank's trace. Raises DataError for what is no trace, or one without a whole step."""
    threads: dict[tuple[str, str], list[Event]] = defaultdict(list)
    kernels: list[Event] = []
    # Every field is converted here, so that nothing after it meets a list where it needs a number.
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            content = json.load(file)
        for record in content["traceEvents"]:
            kind = KINDS.get(record.get("cat", ""))
            if not kind or record.get("ph") != "X":
                continue
            name = str(record["name"])
            thread = (str(record["pid"]), str(record["tid"]))
            start, length = float(record["ts"]), float(record["dur"])
            if not (math.isfinite(start) and 0 <= length < math.inf):
                raise ValueError(f"{name} at {start} has a duration of {length} us")
            correlation = int((record.get("args") or {}).get("correlation", -1))
            event = Event(name, kind, thread, start, start + length, correlation)
            (kernels if kind in ("kernel", "copy") else threads[thread]).append(event)
        gpu_names = {str(gpu["id"]): str(gpu["name"]) for gpu in content.get("deviceProperties") or []}
        distributed = dict(content.get("distributedInfo") or {})
        rank, world_size = int(distributed.get("rank", 0)), int(distributed.get("world_size", 1))
    except UNREADABLE as error:
        raise DataError(f"{path}: cannot be read as a trace of torch.profiler ({error!r})") from error

    # Events of a thread in order, each with its parent, and cut where it outlives that. A thread's time is in
    # stretches: (start, end, innermost event).
    stretches: list[tuple[float, float, Event]] = []
    for events in threads.values():
        events.sort(key=lambda event: (event.start, -event.end))
        open_events: list[Event] = []
        now = 0.0
        for event in [*events, None]:
            until = event.start if event else math.inf
            while open_events and open_events[-1].end <= until:
                innermost = open_events.pop()
                if innermost.end > now:
                    stretches.append((now, innermost.end, innermost))
                    now = innermost.end
            if event:
                if open_events:
                    event.parent = open_events[-1]
                    event.end = min(event.end, event.parent.end)
                    if event.start > now:
                        stretches.append((now, event.start, event.parent))
                now = event.start
                open_events.append(event)
    host_events = [event for events in threads.values() for event in events]
    busy = {outer for event in host_events if event.kind == "op" for outer in event.chain()}
    steps = [event for event in host_events if event.kind == "span" and STEP_NAME.fullmatch(event.name)]
    steps.sort(key=lambda event: event.start)
    if steps and steps[-1] not in busy:
        steps.pop()  # begun when the loop had ended
    if not any(step.end > step.start for step in steps):
        raise DataError(f"{path}: no step was recorded in it (no span ProfilerStep#<number>)")
    kernels.sort(key=lambda kernel: kernel.start)
    calls = {e.correlation: e for e in host_events if e.kind == "call" and e.correlation >= 0}
    # The number of a step is the profiler's; the file of a run has the run's.
    last = int(steps[-1].name.partition("#")[2])
    if match := FILE_NAME.fullmatch(path.name):
        last, rank = int(match[1]), int(match[2])
    device = gpu_names.get(kernels[0].thread[0], "GPU") if kernels else "CPU"
    numbers = f"steps {last - len(steps) + 1} to {last}" if len(steps) > 1 else f"step {last}"
    title = f"{path}: rank {rank} of {world_size}, {device}, {numbers}"
    return Trace(title, rank, steps, host_events, stretches, kernels, calls)
