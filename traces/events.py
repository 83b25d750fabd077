"""Reader of a torch.profiler trace into nested events, each with its time, thread and parent.

Times are microseconds, as in the file. Chrome's format: one JSON object, `traceEvents` a list of
{"ph": "X", "cat": "cpu_op", "name", "pid", "tid", "ts", "dur", "args"}.
"""

import gzip
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from errors import DataError

STEP_NAME = re.compile(r"ProfilerStep#\d+")
DATA = "data"  # the part of the loop that waits for a batch; in other people's loops, torch's own span
START = "at the start of the step"
# Chrome's categories -> what they are here; others ("python_function", "gpu_user_annotation") are left out.
KINDS = {"cpu_op": "op", "user_annotation": "span", "cuda_runtime": "call", "cuda_driver": "call"}
KINDS |= {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
FILE_NAME = re.compile(r"step-(\d+)-rank(\d+)\.json\.gz")
HOW_TO = (
    "write one with --profiling.enable_profiling true --profiling.profile_freq 20 (a trace every 20 steps)"
)


@dataclass(slots=True, eq=False)
class Event:
    """An operator or span on a thread of the host, a call of the CUDA runtime, or a kernel or copy on a
    stream.
    """

    name: str
    kind: str
    thread: Hashable
    start: float  # microseconds
    end: float
    args: dict[str, Any]
    parent: "Event | None" = None  # the innermost event on the same thread that contains it

    def chain(self) -> Iterator["Event"]:
        """Yield the event itself, the event around it, and so on outwards."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


class Interval(NamedTuple):
    """A time of the trace; as a part of the loop it has the name of a span, or "after" one."""

    start: float
    end: float
    name: str = ""


@dataclass
class Trace:
    """One rank's recording of a few steps."""

    path: Path
    rank: int
    world_size: int
    device: str  # name of the GPU, or "CPU"
    steps: list[Event]
    threads: dict[Hashable, list[Event]]  # operators, spans and calls of the host by thread, in order
    kernels: list[Event]  # kernels and copies of the GPU, in order; empty on a CPU
    calls: dict[int, Event]  # correlation -> the call that launched it
    memory: list[tuple[float, int]]  # (time, bytes allocated then), in order

    @property
    def on_gpu(self) -> bool:
        return bool(self.kernels)

    @property
    def loop_events(self) -> list[Event]:
        return self.threads[self.steps[0].thread]

    @property
    def title(self) -> str:
        first, last = self.step_number(0), self.step_number(len(self.steps) - 1)
        which = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{self.path}: rank {self.rank} of {self.world_size}, {self.device}, {which}"

    def step_number(self, index: int) -> int:
        """Return the number of a recorded step: the run's, by its file's name, or else the profiler's."""
        if match := FILE_NAME.fullmatch(self.path.name):
            return int(match[1]) - len(self.steps) + 1 + index
        return int(self.steps[index].name.partition("#")[2])

    def launched_by(self, kernel: Event) -> Event | None:
        """Return the call of the host that launched a kernel or copy, if it was recorded."""
        return self.calls.get(kernel.args.get("correlation", -1))

    def host_events(self) -> Iterator[Event]:
        return chain.from_iterable(self.threads.values())


def find_traces(where: Path) -> list[Path]:
    """Return the newest traces of a run's folder, by rank; or the one file that is named.

    Raises DataError if there is none.
    """
    if where.is_file():
        return [where]
    matches = [(FILE_NAME.fullmatch(path.name), path) for path in where.glob("traces/*")]
    found = sorted((int(match[1]), int(match[2]), path) for match, path in matches if match)
    if not found:
        raise DataError(f"{where}: no trace is there; {HOW_TO}")
    return [path for step, _, path in found if step == found[-1][0]]


def read_trace(path: Path) -> Trace:
    """Read one rank's trace. Raises DataError for what is no trace, or one without a whole step."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            record = json.load(file)
        events, memory = list(_events(record["traceEvents"])), _memory(record["traceEvents"])
        devices = {gpu["id"]: str(gpu["name"]) for gpu in record.get("deviceProperties") or []}
        distributed = dict(record.get("distributedInfo") or {})
    except (OSError, EOFError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: cannot be read as a trace of torch.profiler ({error!r})") from error
    threads: dict[Hashable, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in ("op", "span", "call"):
            threads[event.thread].append(event)
    for thread in threads.values():
        nest(thread)
    busy = {id(outer) for operator in events if operator.kind == "op" for outer in operator.chain()}
    steps = [e for e in events if e.kind == "span" and STEP_NAME.fullmatch(e.name)]
    steps.sort(key=lambda e: e.start)
    if steps and id(steps[-1]) not in busy:
        steps.pop()  # begun when the loop had ended
    if not any(step.end > step.start for step in steps):
        raise DataError(f"{path}: no step was recorded in it (no span ProfilerStep#<number>)")
    kernels = sorted((e for e in events if e.kind in ("kernel", "copy")), key=lambda e: e.start)
    device, match = kernels[0].args.get("device", 0) if kernels else None, FILE_NAME.fullmatch(path.name)
    return Trace(
        path,
        int(match[2]) if match else distributed.get("rank", 0),
        distributed.get("world_size", 1),
        devices.get(device, "GPU") if kernels else "CPU",
        steps,
        dict(threads),
        kernels,
        {e.args["correlation"]: e for e in events if e.kind == "call" and "correlation" in e.args},
        memory[kernels != []],
    )


def _events(records: Iterable[dict[str, Any]]) -> Iterator[Event]:
    for record in records:
        kind = KINDS.get(record.get("cat", ""))
        if kind and record.get("ph") == "X":
            thread, name = (str(record["pid"]), str(record["tid"])), str(record["name"])
            start, length = float(record["ts"]), float(record["dur"])
            if not (math.isfinite(start) and 0 <= length < math.inf):
                raise ValueError(f"{name} at {start} has a duration of {length} us")
            yield Event(name, kind, thread, start, start + length, dict(record.get("args") or {}))


def _memory(records: Iterable[dict[str, Any]]) -> dict[bool, list[tuple[float, int]]]:
    """Return what is allocated after each allocation and release: of the host (False), of GPUs (True)."""
    found: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
    for record in records:
        if record.get("name") == "[memory]":
            counts = record["args"]
            found[counts["Device Type"] != 0].append((float(record["ts"]), int(counts["Total Allocated"])))
    return {device: sorted(counts) for device, counts in found.items()}


def nest(events: list[Event]) -> None:
    """Sort the events of one thread and give each its parent; an event that outlives its parent is cut."""
    events.sort(key=lambda e: (e.start, -e.end))
    open_events: list[Event] = []
    for event in events:
        while open_events and open_events[-1].end <= event.start:
            open_events.pop()
        if open_events:
            event.parent = open_events[-1]
            event.end = min(event.end, open_events[-1].end)
        open_events.append(event)


def stretches(events: list[Event]) -> Iterator[tuple[float, float, Event]]:
    """Yield the times of a thread, (start, end, innermost event), in order; `events` have been nested."""
    open_events: list[Event] = []
    now = 0.0
    for event in [*events, None]:
        until = event.start if event else float("inf")
        while open_events and open_events[-1].end <= until:
            innermost = open_events.pop()
            if innermost.end > now:
                yield now, innermost.end, innermost
                now = innermost.end
        if event:
            if open_events and event.start > now:
                yield now, event.start, open_events[-1]
            now = event.start
            open_events.append(event)


class Loop:
    """Parts of the loop on the main thread, by time: spans and the time after each."""

    def __init__(self, trace: Trace) -> None:
        self.parts: list[Interval] = []
        for step in trace.steps:
            now, before = step.start, START
            for span in (e for e in trace.loop_events if e.kind == "span" and e.parent is step):
                name = DATA if span.name.startswith("enumerate(DataLoader)") else span.name.strip("# ")
                self.parts += [Interval(now, span.start, before), Interval(span.start, span.end, name)]
                now, before = span.end, f"after {name}"
            self.parts.append(Interval(now, step.end, before))
        self.parts = [part for part in self.parts if part.end > part.start]
        self.starts = [part.start for part in self.parts]

    def cut(self, start: float, end: float) -> Iterator[Interval]:
        """Yield an interval cut where one part ends and another begins."""
        # What comes before the first part, or after the last one (the GPU is late), belongs to it.
        begins, ends = [-math.inf, *self.starts[1:]], [*self.starts[1:], math.inf]
        first, last = bisect_right(begins, start) - 1, bisect_left(begins, end)
        for i in range(first, last):
            yield Interval(max(start, begins[i]), min(end, ends[i]), self.parts[i].name)
