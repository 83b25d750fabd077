"""Timeline of the traced steps: each moment belongs to one class, so that the classes add up to the steps.

On a CPU, a moment belongs to the operator of the main thread, else to another thread (autograd, a gloo
collective), else it is idle: Python, dispatch, waiting. On a GPU, it belongs to a kernel that computes, else
to a collective (exposed communication), else to a copy; else it is idle, by the activity of the host that
delayed the next launch.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from traces.classes import (
    CLASSES,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    IDLE,
    SYNCHRONISE,
    WHOLE_PARTS,
    classify_kernel,
    kernel_class,
    working_operator,
)
from traces.events import Event, Interval, Loop, Trace, stretches

LONG = 1000.0  # microseconds without an operator that are a gap, and not merely Python between two operators
Table = Any  # a DataFrame; type checkers cannot use the annotations of pandas' methods
AFTER_WAIT = 20.0  # microseconds between the end of the last kernel and the host's waking from its wait


class Segment(NamedTuple):
    """A stretch of the timeline. Of idle ones `what` is the cause, of others the operator or kernel."""

    start: float  # microseconds
    end: float
    name: str  # its class
    what: str = ""
    operator: Event | None = None  # that computes it; its arguments determine the work


@dataclass(eq=False)
class Timeline:
    """One rank's steps: windows that follow each other, and segments that fill them."""

    trace: Trace
    windows: list[Interval]
    segments: list[Segment]

    @cached_property
    def table(self) -> Table:
        """Return a row a segment: its fields, its length `ms`, and the index `step` of its window."""
        table: Table = pd.DataFrame(self.segments, columns=list(Segment._fields))
        starts = [window.start for window in self.windows]
        step = np.searchsorted(starts, table["start"], side="right") - 1
        return table.assign(ms=(table["end"] - table["start"]) / 1000, step=step)

    @cached_property
    def step_milliseconds(self) -> float:
        """Return the mean over the steps."""
        return sum(window.end - window.start for window in self.windows) / 1000 / len(self.windows)

    @cached_property
    def by_class(self) -> dict[str, float]:
        """Return milliseconds a step; they add up to `step_milliseconds`."""
        total = self.table.groupby("name")["ms"].sum() / len(self.windows)
        return total.reindex(list(CLASSES), fill_value=0.0).to_dict()

    @cached_property
    def idle_by_cause(self) -> dict[str, float]:
        """Return milliseconds a step, the largest first."""
        total = self.table[self.table["name"] == IDLE].groupby("what")["ms"].sum() / len(self.windows)
        return total.sort_values(ascending=False).to_dict()

    @cached_property
    def hidden_communication(self) -> float:
        """Return milliseconds a step in which a collective ran at the same time as computation."""
        computing = [Interval(p.start, p.end) for p in self.segments if p.name in COMPUTE]
        filled, _ = fill(computing, collectives(self.trace))
        return sum(p.end - p.start for p in filled) / 1000 / len(self.windows)


def build_timeline(trace: Trace) -> Timeline:
    windows = step_windows(trace)
    loop = Loop(trace)
    layers = gpu_layers(trace) if trace.on_gpu else cpu_layers(trace, loop)
    free, segments = list(windows), []
    for layer in layers:
        filled, free = fill(free, layer)
        segments += filled
    parts = (part for start, end, _ in free for part in loop.cut(start, end))
    segments += gpu_idle(trace, loop, free) if trace.on_gpu else map(idle, parts)
    return Timeline(trace, windows, sorted(segments, key=lambda segment: segment.start))


def step_windows(trace: Trace) -> list[Interval]:
    """Return windows from the end of one step to the end of the next: on a GPU a step has ended when the host
    has left it and the kernels that it launched so far are done.
    """
    if not trace.on_gpu:
        return [Interval(step.start, step.end) for step in trace.steps]
    launches = [(trace.launched_by(k) or k, k) for k in trace.kernels if k.kind == "kernel"]
    ends = [
        max([end, *(kernel.end for launch, kernel in launches if launch.start < end)])
        for end in (trace.steps[0].start, *(step.end for step in trace.steps))
    ]
    return [Interval(*pair) for pair in pairwise(ends)]


def fill(free: list[Interval], layer: Iterable[Segment]) -> tuple[list[Segment], list[Interval]]:
    """Give free time to the segments of a layer, first come, first served. Return the parts of segments that
    fitted, and the time still free. `free` and `layer` are sorted by start; segments may overlap.
    """
    filled, left, waiting = [], [], deque(free)
    for segment in layer:
        while waiting and waiting[0].end <= segment.start:
            left.append(waiting.popleft())
        while waiting and waiting[0].start < segment.end:
            start, end, _ = waiting.popleft()
            begin, stop = max(start, segment.start), min(end, segment.end)
            if begin > start:
                left.append(Interval(start, begin))
            if stop > begin:
                filled.append(segment._replace(start=begin, end=stop))
            if stop < end:
                waiting.appendleft(Interval(stop, end))
                break
    return filled, [*left, *waiting]


# -- what runs


def cpu_layers(trace: Trace, loop: Loop) -> Iterator[list[Segment]]:
    """Yield parts that count as a whole; operators of the main thread; of other threads; collectives."""
    yield [Segment(*p[:2], WHOLE_PARTS[p.name], p.name) for p in loop.parts if p.name in WHOLE_PARTS]
    yield operators(trace.loop_events)
    others = (events for thread, events in trace.threads.items() if thread != trace.steps[0].thread)
    elsewhere = (operators(events) for events in others if not any(map(is_gloo, events)))
    yield sorted(chain.from_iterable(elsewhere), key=lambda p: p.start)
    yield collectives(trace)


def gpu_layers(trace: Trace) -> Iterator[list[Segment]]:
    """Yield kernels that compute; collectives; copies."""
    segments = []
    for kernel in trace.kernels:
        name, operator = classify_kernel(kernel, trace.launched_by(kernel))
        segments.append(Segment(kernel.start, kernel.end, name, kernel.name, operator))
    yield [p for p in segments if p.name not in (COMMUNICATION, COPIES)]
    yield [p for p in segments if p.name == COMMUNICATION]
    yield [p for p in segments if p.name == COPIES]


def operators(events: list[Event]) -> list[Segment]:
    """Return the segments in which a thread of the host computes."""
    found = [(start, end, *working_operator(event)) for start, end, event in stretches(events)]
    return [Segment(start, end, name, op.name, op) for start, end, name, op in found if name and op]


def collectives(trace: Trace) -> list[Segment]:
    """Return segments of collectives on the GPU, or on gloo's threads."""
    if trace.on_gpu:
        found = [k for k in trace.kernels if kernel_class(k.name) == COMMUNICATION]
    else:
        found = [event for event in trace.host_events() if is_gloo(event)]
    segments = (Segment(e.start, e.end, COMMUNICATION, e.name) for e in found)
    return sorted(segments, key=lambda segment: segment.start)


def is_gloo(event: Event) -> bool:
    return event.kind == "span" and event.name.startswith("gloo:")


# -- what does not run, and why


def idle(part: Interval) -> Segment:
    """Return a segment in which nothing runs: Python between two operators, or a gap."""
    what = "Python and dispatch" if part.end - part.start < LONG else "gap"
    return Segment(part.start, part.end, IDLE, f"{what} {with_preposition(part.name)}")


def with_preposition(part: str) -> str:
    return part if part.startswith(("after ", "at ")) else f"in {part}"


def gpu_idle(trace: Trace, loop: Loop, free: list[Interval]) -> Iterator[Segment]:
    """Yield idle time by its cause: before the launch of the next kernel the host is late, because it waited
    or was busy; after the launch the kernel is late.
    """
    starts, waits = [kernel.start for kernel in trace.kernels], find_waits(trace)
    for start, end, _ in free:
        following = bisect_left(starts, end - 0.01)
        launch = trace.launched_by(trace.kernels[following]) if following < len(starts) else None
        launched = min(max(launch.end, start), end) if launch else end
        # The wait that ended when the GPU ran out of work, and from which the host launched too late.
        after = bisect_left(waits, start - AFTER_WAIT, key=lambda wait: wait.end)
        late = [wait for wait in waits[after : after + 1] if wait.end <= launched and wait.start <= start]
        for part in loop.cut(start, launched):
            if part.name in WHOLE_PARTS:
                yield Segment(*part[:2], WHOLE_PARTS[part.name], part.name)
            elif late:
                where = with_preposition(next(loop.cut(late[0].start, late[0].end)).name)
                yield Segment(*part[:2], IDLE, f"wait of {call_name(late[0])} {where}")
            else:
                yield idle(part)
        if end > launched:
            yield Segment(launched, end, IDLE, "launched, not yet started")


def find_waits(trace: Trace) -> list[Event]:
    """Return the calls of the runtime in which the host waits for the GPU, by their end."""
    calls = (e for e in trace.host_events() if e.kind == "call" and SYNCHRONISE.match(e.name))
    return sorted(calls, key=lambda wait: wait.end)


def call_name(call: Event) -> str:
    """Return the name of a call of the runtime, with the outermost operator that made it."""
    outer = [event.name for event in call.chain() if event.name.startswith("aten::")]
    return f"{call.name} ({outer[-1]})" if outer else call.name
