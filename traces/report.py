"""What inspect_trace prints: tables of one timeline, of the ranks of a run, of two traces side by side."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from traces.classes import (
    AROUND,
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    DATA_WAIT,
    GEMM,
    IDLE,
)
from traces.events import Event, Trace
from traces.timeline import Piece, Timeline
from traces.work import ClassWork, Rates, dims, loaded_bytes, work_by_class, work_of

WAITING = (COMMUNICATION, DATA_WAIT, AROUND, IDLE)  # a step need have none of them
TOP = 8  # rows of a list
SMALL = 0.001  # of a step: causes below it are summed up in one row
MAX_RANKS = 8  # columns


class Task(NamedTuple):
    """An operator or kernel with its shapes, in all its calls."""

    name: str
    milliseconds: float  # a step
    calls: float  # a step
    gflops: float  # a second; 0 where it is not known


def report(timeline: Timeline, rates: Rates) -> str:
    """Everything about one timeline, as text."""
    blocks = [breakdown(timeline, rates), remarks(timeline, rates), causes(timeline), waits(timeline)]
    return "\n\n".join(block for block in [*blocks, tasks_table(timeline)] if block)


def breakdown(timeline: Timeline, rates: Rates) -> str:
    """Title, time by class, and how far each class is from its floor."""
    steps = [(end - start) / 1000 for start, end in timeline.windows]
    work = work_by_class(timeline, rates)
    lines = [
        timeline.trace.title,
        f"{timeline.step_milliseconds:.1f} ms a step ({min(steps):.1f} to {max(steps):.1f})",
        "",
        f"{'class':<24}{'ms a step':>10}{'share':>9}{'work':>15}{'rate':>16}{'floor, ms':>12}{'x floor':>9}",
    ]
    for name in CLASSES:
        label = f"{name}, exposed" if name == COMMUNICATION else name
        time = timeline.by_class[name]
        lines.append(f"{label:<24}{time:>10.2f}{share(time, timeline):>9}{distance(name, time, work)}")
    total = sum(timeline.by_class.values())
    lines.append(f"{'sum':<24}{total:>10.2f}{share(total, timeline):>9}")
    return "\n".join(line.rstrip() for line in lines)


def cut(name: str) -> str:
    """To the width of the first column of a list."""
    return f"{name if len(name) < 52 else name[:48] + '...':<52}"


def share(milliseconds: float, timeline: Timeline) -> str:
    return f"{100 * milliseconds / timeline.step_milliseconds:.1f} %"


def distance(name: str, time: float, work: dict[str, ClassWork]) -> str:
    """The last four columns of a class's row."""
    if name in WAITING:
        return f"{'':>15}{'':>16}{'0':>12}"
    known = work[name]
    if not known.work.bytes or not known.milliseconds:
        return ""
    amount, unit = (known.work.flops, "FLOP") if known.work.flops else (known.work.bytes, "B")
    floor = f"{known.floor:>12.2f}{time / known.floor:>9.2f}" if known.floor else f"{'?':>12}"
    return f"{si(amount, unit):>15}{si(amount / known.milliseconds * 1e3, unit + '/s'):>16}{floor}"


def si(value: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def remarks(timeline: Timeline, rates: Rates) -> str:
    """Where floors are from, how much communication is hidden, how fast data came."""
    lines = []
    if logged := logged_milliseconds(timeline.trace):
        lines.append(
            f"the run logs {logged:.1f} ms a step (median); more in a trace is the profiler's own cost"
        )
    if rates.flops:
        memory = f" and {si(rates.bytes, 'B/s')}" if rates.bytes else ""
        lines.append(
            f"floors: {si(rates.flops, 'FLOP/s')}{memory} ({rates.source}); ?: shapes are not in the trace"
        )
    seen, hidden = timeline.by_class[COMMUNICATION], timeline.hidden_communication
    if seen + hidden > SMALL * timeline.step_milliseconds:
        part = hidden / (seen + hidden)
        lines.append(
            f"communication: {seen:.2f} ms a step exposed, {hidden:.2f} hidden behind computation"
            f" ({part:.0%} overlapped)"
        )
    loaded, waited = loaded_bytes(timeline.trace), timeline.by_class[DATA_WAIT]
    if loaded and waited:
        lines.append(
            f"data: {si(loaded, 'B')} a step, waited {waited:.2f} ms for: {si(loaded / waited * 1e3, 'B/s')}"
        )
    return "\n".join(lines)


def logged_milliseconds(trace: Trace) -> float | None:
    """The median step of the run that wrote the trace, by its metrics.jsonl."""
    path = trace.run / "metrics.jsonl" if trace.run else None
    if not path or not path.is_file():
        return None
    records = (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))
    seconds = [record["step_seconds"] for record in records if record.get("step_seconds")]
    return 1e3 * statistics.median(seconds) if seconds else None


def causes(timeline: Timeline) -> str:
    """Idle time by what the host did."""
    found = timeline.idle_by_cause
    shown = {k: v for k, v in list(found.items())[:TOP] if v > SMALL * timeline.step_milliseconds}
    if not shown:
        return ""
    nothing = "no kernel runs" if timeline.trace.on_gpu else "no operator runs"
    lines = [f"{f'idle ({nothing}), by cause':<52}{'ms a step':>10}{'share':>9}"]
    lines += [f"{cut(name)}{time:>10.2f}{share(time, timeline):>9}" for name, time in shown.items()]
    if (rest := sum(found.values()) - sum(shown.values())) > SMALL * timeline.step_milliseconds:
        lines.append(f"{'others':<52}{rest:>10.2f}{share(rest, timeline):>9}")
    return "\n".join(lines)


def waits(timeline: Timeline) -> str:
    """Places outside logging, saving and validation where the host waits for the device."""
    if not timeline.waits:
        return ""
    steps, on_gpu = len(timeline.windows), timeline.trace.on_gpu
    title = "waits for the device" if on_gpu else "values read by Python (a GPU would be waited for)"
    lines = [f"{title:<52}{'a step':>10}{'ms a step':>11}" + (f"{'GPU idle':>11}" if on_gpu else "")]
    for wait in timeline.waits[:TOP]:
        idle = f"{wait.idle / steps:>11.2f}" if on_gpu else ""
        lines.append(
            f"{cut(f'{wait.what} {wait.where}')}{wait.count / steps:>10.1f}{wait.waited / steps:>11.2f}{idle}"
        )
    return "\n".join(lines)


def tasks(timeline: Timeline) -> list[Task]:
    """What takes the time: operators with their shapes, on a GPU kernels; the longest first."""
    steps = len(timeline.windows)
    time: dict[str, float] = defaultdict(float)
    calls: dict[str, set[Event | float]] = defaultdict(set)
    flops: dict[str, float] = defaultdict(float)
    counted: set[Event] = set()
    for piece in timeline.pieces:
        if piece.name in WAITING and piece.name != COMMUNICATION:
            continue
        name, operator = task_name(piece, timeline.trace.on_gpu), piece.operator
        time[name] += piece.milliseconds
        calls[name].add(piece.kernel or operator or piece.start)
        if operator and operator not in counted and (work := work_of(operator)):
            counted.add(operator)  # where several kernels do it, the first, which is the large one
            flops[name] += work.flops
    found = [
        Task(name, ms / steps, len(calls[name]) / steps, flops[name] / ms / 1e6) for name, ms in time.items()
    ]
    return sorted(found, key=lambda task: -task.milliseconds)


def task_name(piece: Piece, on_gpu: bool) -> str:
    if on_gpu:
        return short_kernel(piece.what)
    if piece.operator and piece.name in (GEMM, ATTENTION):
        shapes = ["x".join(map(str, shape)) for shape in dims(piece.operator) if len(shape) > 1]
        return f"{piece.what} {', '.join(shapes[:2])}"
    return "compiled graph" if piece.what.startswith("##") else piece.what


def short_kernel(name: str) -> str:
    """Without its template arguments."""
    while (bare := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = bare
    return name.removeprefix("void ").strip()[:60]


def tasks_table(timeline: Timeline) -> str:
    what = "kernels" if timeline.trace.on_gpu else "operators"
    head = f"{f'{what} that take the time':<52}{'ms a step':>10}{'share':>9}{'calls':>8}{'GFLOP/s':>10}"
    rows = [head]
    for task in tasks(timeline)[:TOP]:
        rate = f"{task.gflops:>10.0f}" if task.gflops else ""
        time = f"{task.milliseconds:>10.2f}{share(task.milliseconds, timeline):>9}{task.calls:>8.0f}"
        rows.append(f"{cut(task.name)}{time}{rate}")
    return "\n".join(rows)


def ranks_table(timelines: Sequence[Timeline]) -> str:
    """Milliseconds a step by class, a column a rank."""
    shown = timelines[:MAX_RANKS]
    rows = [f"{'ms a step':<22}" + "".join(f"{f'rank {t.trace.rank}':>10}" for t in shown)]
    for name in CLASSES:
        rows.append(f"{name:<22}" + "".join(f"{t.by_class[name]:>10.2f}" for t in shown))
    return "\n".join([*rows, f"{'sum':<22}" + "".join(f"{t.step_milliseconds:>10.2f}" for t in shown)])


def comparison(first: Timeline, second: Timeline) -> str:
    """Two timelines side by side: classes, then the operators that differ most."""
    lines = [f"A  {describe(first)}", f"B  {describe(second)}", ""]
    lines.append(f"{'ms a step':<52}{'A':>10}{'B':>10}{'B - A':>10}{'B / A':>8}")
    a, b = first.by_class, second.by_class
    lines += [difference(name, a[name], b[name]) for name in CLASSES]
    lines.append(difference("sum", first.step_milliseconds, second.step_milliseconds))
    mine, other = ({task.name: task.milliseconds for task in tasks(t)} for t in (first, second))
    names = sorted(mine | other, key=lambda n: -abs(other.get(n, 0.0) - mine.get(n, 0.0)))
    lines += ["", "what differs most"]
    lines += [difference(name, mine.get(name, 0.0), other.get(name, 0.0)) for name in names[:TOP]]
    return "\n".join(lines)


def describe(timeline: Timeline) -> str:
    return f"{timeline.trace.title}, {timeline.step_milliseconds:.1f} ms a step"


def difference(name: str, a: float, b: float) -> str:
    ratio = f"{b / a:>8.2f}" if a > 0.005 else ""
    return f"{cut(name)}{a:>10.2f}{b:>10.2f}{b - a:>+10.2f}{ratio}"
