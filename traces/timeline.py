"""Timeline of the traced steps: each moment belongs to one class, so that the classes add up to the steps.

On a CPU, a moment belongs to the operator of the main thread, else to another thread (autograd, a gloo
collective), else it is idle: Python, dispatch, waiting. On a GPU, it belongs to a kernel that computes, else
to a collective (exposed communication), else to a copy; else it is idle, by the activity of the host that
delayed the next launch. A kernel has the class of the operator that launched it, or where that is not known
(a CUDA graph, a compiled kernel) of its own name.
"""

import math
import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from traces.events import Event, Trace

GEMM, ATTENTION, ELEMENTWISE = "GEMM", "attention", "norm, elementwise"
OPTIMIZER, COMMUNICATION, COPIES = "optimiser", "communication", "copies"
DATA_WAIT, AROUND, IDLE = "data wait", "log, save, validate", "idle"
COMPUTE = (GEMM, ATTENTION, ELEMENTWISE, OPTIMIZER, COPIES)  # what communication can hide behind
CLASSES: tuple[str, ...] = COMPUTE + (COMMUNICATION, DATA_WAIT, AROUND, IDLE)

DATA = "data"  # the part of the loop that waits for a batch; in other people's loops, torch's own span
# The parts of the loop (train.py's spans) that count as a whole, whatever runs in them.
WHOLE_PARTS = {DATA: DATA_WAIT, "log": AROUND, "checkpoint": AROUND, "validation": AROUND}

# Names of operators without "aten::", the first that matches from its beginning. A matrix multiplied in
# batches is attention here: linear layers and patches are plain GEMMs (mm, addmm).
OPERATORS = [
    (COMMUNICATION, r"c10d::|_c10d_functional::|rossby::swap_strips"),
    (OPTIMIZER, r"_fused_(adamw?|sgd|adagrad)_"),
    (ATTENTION, r".*(scaled_dot_product|_attention|attn)|_?softmax|baddbmm|bmm$"),
    (GEMM, r"_?(scaled_|int_)?mm$|_?addmm|addmv|mv$|dot$|mkldnn_(linear|rnn_layer)|(.*_)?convolution"),
    (
        COPIES,
        r"(_foreach_)?copy_|clone|contiguous|cat$|stack|to$|_to_copy|pad$|constant_pad|repeat|roll|flip",
    ),
    (COPIES, r"split_with_sizes_copy|_chunk_cat|index_select|pin_memory|fsdp::"),
]
# Operators that only look at a tensor, allocate one, or hand on to another: their own time is the host's.
HOST = re.compile(
    r"(_unsafe_)?view|_?reshape|t$|transpose|permute|expand|as_strided|detach|select$|slice$|narrow|unflatten"
    r"|(un)?squeeze|unbind|chunk|split(_with_sizes)?$|alias|(new_)?empty|resize|resolve_|lift|item|is_nonzero"
    r"|_local_scalar|linear$|matmul|conv(_transpose)?[123]d$|set_|record_stream|result_type|flatten|movedim"
    r"|zeros?(_like)?$|ones(_like)?$|full(_like)?$|arange|scalar_tensor|tensor_split|size$|stride|numel|is_pinned"
    r"|einsum|tensordot|inner$|bilinear|(lstm|gru|rnn_tanh|rnn_relu)$"
)

# Names of kernels, where the operator is not known.
KERNELS = [
    (COMMUNICATION, r"nccl|all_?reduce|all_?gather|reduce_?scatter|multimem|symm_mem"),
    (ATTENTION, r"flash|fmha|attention|sdpa|softmax"),
    (GEMM, r"gemm|cutlass|cublas|nvjet|wgmma|xmma|_mm(_|$)|addmm|conv|winograd|cudnn"),
    (OPTIMIZER, r"multi_tensor_apply|adam"),
    (COPIES, r"memcpy|memset|copy_kernel|CatArray|copy_device_to_device"),
]
COMPILED = ("## Call CompiledFxGraph", "triton_", "graph_")  # inductor's code: what it runs itself was fused
SYNCHRONISE = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize|(cuda|hip)Memcpy$")
LONG = 1000.0  # microseconds without an operator that are a gap, and not merely Python between two operators
AFTER_WAIT = 20.0  # microseconds between the end of the last kernel and the host's waking from its wait


class Segment(NamedTuple):
    """A time with its class (or a part of the loop), and its operator, kernel, span or cause of idling."""

    start: float  # microseconds
    end: float
    name: str = ""
    what: str = ""


@dataclass
class Timeline:
    """Mean step of one rank, in milliseconds."""

    trace: Trace
    recorded_steps: list[float]  # each step as it was recorded
    by_class: dict[str, float]
    step_milliseconds: float  # the sum of `by_class`
    idle_by_cause: dict[str, float]  # the largest first
    hidden_communication: float  # a collective ran at the same time as computation
    spread_spans: dict[str, tuple[float, int]]  # span -> milliseconds of one, steps in which it counts once


@cache
def operator_class(name: str) -> str | None:
    """Return the class of an operator by its name; None for one that computes nothing itself."""
    if "::" not in name or name.startswith(("autograd::", "torch::")):
        return None
    short = name.removeprefix("aten::")
    other = None if HOST.match(short) else ELEMENTWISE
    return next((class_name for class_name, pattern in OPERATORS if re.match(pattern, short)), other)


@cache
def kernel_class(name: str) -> str:
    """Return the class of a kernel by its own name."""
    matches = (class_name for class_name, pattern in KERNELS if re.search(pattern, name, re.IGNORECASE))
    return next(matches, ELEMENTWISE)


def working_operator(event: Event | None) -> tuple[str | None, str]:
    """Return the class of the work inside `event`, and the name of the operator that does it: the outermost
    one that computes (the bias copied inside addmm is GEMM), unless it is inside the optimiser's step.
    """
    class_name, operator, in_optimizer = None, "", False
    for outer in event.chain() if event else ():
        if outer.kind == "op" and (outer_class := operator_class(outer.name)):
            class_name, operator = outer_class, outer.name
        in_optimizer = in_optimizer or outer.name.strip("# ").startswith(("optimizer", "Optimizer.step#"))
    if class_name is None and event and event.name.startswith(COMPILED):
        # Code of inductor: fused operators, or a GEMM or softmax, which the name of a Triton kernel tells.
        class_name, operator = ELEMENTWISE, event.name
        if not event.name.startswith("##") and kernel_class(event.name) in (GEMM, ATTENTION):
            class_name = kernel_class(event.name)
    if in_optimizer and class_name not in (None, COMMUNICATION):
        class_name = OPTIMIZER
    return class_name, operator


def build_timeline(trace: Trace, intervals: dict[str, int]) -> Timeline:
    """Return the timeline of a trace.

    `intervals` has the number of steps from one save of the run to the next, by the name of its span, and so
    for logging and validation. A trace of two steps with a save in it would count half a save a step, where
    the run has one in a hundred: such a span counts once in its interval, others as they were recorded.
    """
    # The loop on the main thread: spans and the time after each, without a gap. The first begins and the last
    # ends at infinity, because kernels may run before the first or after the last.
    parts: list[Segment] = []
    for step in trace.steps:
        now, before = step.start, "at the start of the step"
        for span in trace.host_events:
            if span.kind == "span" and span.parent is step:
                name = DATA if span.name.startswith("enumerate(DataLoader)") else span.name.strip("# ")
                parts += [Segment(now, span.start, before), Segment(span.start, span.end, name)]
                now, before = span.end, f"after {name}"
        parts.append(Segment(now, step.end, before))
    parts = [part for part in parts if part.end > part.start]
    borders = pairwise([-math.inf, *(part.start for part in parts[1:]), math.inf])
    parts = [
        Segment(start, end, part.name, part.name) for part, (start, end) in zip(parts, borders, strict=True)
    ]

    windows = [Segment(step.start, step.end) for step in trace.steps]
    if trace.kernels:
        # A step has ended when the host has left it and the kernels that it launched so far are done.
        launches = [(trace.calls.get(k.correlation, k), k) for k in trace.kernels if k.kind == "kernel"]
        ends = []
        for host_end in (trace.steps[0].start, *(step.end for step in trace.steps)):
            kernel_ends = (kernel.end for launch, kernel in launches if launch.start < host_end)
            ends.append(max(host_end, max(kernel_ends, default=host_end)))
        windows = [Segment(start, end) for start, end in pairwise(ends)]

    # -- what runs, in layers, each of which takes the time that those before it have left free
    whole_parts, computing, other_threads, collectives, copies = [], [], [], [], []
    for kernel in trace.kernels:
        launch = trace.calls.get(kernel.correlation)
        spans = [outer.name for outer in launch.chain() if outer.name in WHOLE_PARTS] if launch else []
        class_name, _ = working_operator(launch)
        what, named = kernel.name, kernel_class(kernel.name)
        if spans and WHOLE_PARTS[spans[0]] == AROUND:
            class_name, what = AROUND, spans[0]
        elif named == COMMUNICATION:
            class_name = COMMUNICATION
        elif class_name in (None, COMMUNICATION):  # not known, or launched by a collective next to its kernel
            class_name = COPIES if kernel.kind == "copy" else named
        layer = {COMMUNICATION: collectives, COPIES: copies}.get(class_name, computing)
        layer.append(Segment(kernel.start, kernel.end, class_name, what))
    if not trace.kernels:
        whole_parts = [p._replace(name=WHOLE_PARTS[p.name]) for p in parts if p.name in WHOLE_PARTS]
        gloo = [e for e in trace.host_events if e.kind == "span" and e.name.startswith("gloo:")]
        collectives = [Segment(event.start, event.end, COMMUNICATION, event.name) for event in gloo]
        gloo_threads = {event.thread for event in gloo}
        for start, end, event in trace.stretches:
            class_name, operator = working_operator(event)
            if class_name and event.thread not in gloo_threads:
                layer = computing if event.thread == trace.steps[0].thread else other_threads
                layer.append(Segment(start, end, class_name, operator))
    free, segments = windows, []
    for layer in (whole_parts, computing, other_threads, collectives, copies):
        filled, free = fill(free, sorted(layer))
        segments += filled
    hidden, _ = fill(sorted(s for s in segments if s.name in COMPUTE), sorted(collectives))

    segments += idle_segments(trace, parts, free)

    # -- milliseconds a step
    total: dict[tuple[str, str], float] = defaultdict(float)  # of a class and an operator, span or cause
    for start, end, class_name, what in segments:
        total[class_name, what] += (end - start) / 1000 / len(windows)
    spread_spans = {}
    for span, steps in intervals.items():
        number = sum(part.name == span for part in parts)
        if number and steps:
            milliseconds = total[AROUND, span] * len(windows) / number
            total[AROUND, span] = milliseconds / steps
            spread_spans[span] = (milliseconds, steps)
    by_class = {name: sum(ms for (other, _), ms in total.items() if other == name) for name in CLASSES}
    largest_first = sorted(total.items(), key=lambda item: -item[1])
    idle_by_cause = {what: ms for (name, what), ms in largest_first if name == IDLE}
    recorded = [(window.end - window.start) / 1000 for window in windows]
    hidden_ms = sum(overlap.end - overlap.start for overlap in hidden) / 1000 / len(windows)
    step = sum(by_class.values())
    return Timeline(trace, recorded, by_class, step, idle_by_cause, hidden_ms, spread_spans)


def fill(free: list[Segment], layer: Iterable[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Give free time to the segments of a layer, first come, first served. Return the parts of segments that
    fitted, and the time still free. `free` and `layer` are sorted by start; segments may overlap.
    """
    filled, left, waiting = [], [], deque(free)
    for segment in layer:
        while waiting and waiting[0].end <= segment.start:
            left.append(waiting.popleft())
        while waiting and waiting[0].start < segment.end:
            interval = waiting.popleft()
            begin, stop = max(interval.start, segment.start), min(interval.end, segment.end)
            if begin > interval.start:
                left.append(Segment(interval.start, begin))
            if stop > begin:
                filled.append(segment._replace(start=begin, end=stop))
            if stop < interval.end:
                waiting.appendleft(Segment(stop, interval.end))
                break
    return filled, [*left, *waiting]


def idle_segments(trace: Trace, parts: list[Segment], free: list[Segment]) -> Iterator[Segment]:
    """Yield the time in which nothing runs by its cause. On a GPU, before the launch of the next kernel the
    host is late, because it waited or was busy; after the launch the kernel is late.
    """
    kernel_starts = [kernel.start for kernel in trace.kernels]
    waits = [e for e in trace.host_events if e.kind == "call" and SYNCHRONISE.match(e.name)]
    waits.sort(key=lambda wait: wait.end)
    for start, end, _, _ in free:
        launched, following = end, bisect_left(kernel_starts, end - 0.01)
        if following < len(kernel_starts):
            if launch := trace.calls.get(trace.kernels[following].correlation):
                launched = min(max(launch.end, start), end)
        # The wait that ended when the GPU ran out of work, and from which the host launched too late, is
        # named by its call, the outermost operator that made the call, and the part of the loop.
        cause, place = "", ""
        after = bisect_left(waits, start - AFTER_WAIT, key=lambda wait: wait.end)
        for wait in waits[after : after + 1]:
            if wait.end <= launched and wait.start <= start:
                operators = [event.name for event in wait.chain() if event.name.startswith("aten::")]
                cause = f"wait of {wait.name}" + (f" ({operators[-1]})" if operators else "")
                place = next(part.name for part in parts if wait.start < part.end)
        # -- the host is late until the launch, the device after it
        for part in fill([Segment(start, launched)], parts)[0]:
            if part.name in WHOLE_PARTS:
                yield part._replace(name=WHOLE_PARTS[part.name])
                continue
            reason = cause or ("Python and dispatch" if part.end - part.start < LONG else "gap")
            where = place or part.name
            where = where if where.startswith(("after ", "at ")) else f"in {where}"
            yield Segment(part.start, part.end, IDLE, f"{reason} {where}")
        if end > launched:
            yield Segment(launched, end, IDLE, "launched, not yet started")
