"""Tables that inspect_trace prints: of one timeline, and of the ranks of a run."""

from bisect import bisect_right
from collections.abc import Sequence

import pandas as pd

from command_line import text_table
from traces.classes import CLASSES, COMMUNICATION
from traces.events import Loop, Trace
from traces.timeline import Table, Timeline
from traces.work import ClassWork, Rates, work_by_class

Row = tuple[object, ...]
TOP = 8  # rows of a list
SMALL = 0.001  # of a step: causes below it are summed up in one row
MAX_RANKS = 8  # columns


def report(timeline: Timeline, rates: Rates) -> str:
    """Return everything about one timeline, as text."""
    blocks = [breakdown(timeline, rates), causes(timeline), memory_table(timeline.trace)]
    return "\n\n".join(filter(None, blocks))


def breakdown(timeline: Timeline, rates: Rates) -> str:
    """Return title, time by class, how far each class is from its floor, and hidden communication."""
    steps = [(window.end - window.start) / 1000 for window in timeline.windows]
    work, whole = work_by_class(timeline, rates), timeline.step_milliseconds
    rows: list[Row] = [("class", "ms a step", "fraction", "work", "rate", "floor, ms", "x floor")]
    for name, time in timeline.by_class.items():
        label = f"{name}, exposed" if name == COMMUNICATION else name
        distance = to_floor(work[name]) if name in work else ("", "", "0")  # of waiting, none is needed
        rows.append((label, time, percent(time, timeline), *distance))
    rows.append(("sum", whole, percent(whole, timeline)))
    lines = [
        f"{timeline.trace.title}\n{whole:.1f} ms a step ({min(steps):.1f} to {max(steps):.1f})\n",
        text_table("<24 >10.2f >9 >15 >16 >12.2f >9.2f", rows),
    ]
    if rates.flops:
        reached = f"{si(rates.flops, 'FLOP/s')} and {si(rates.bytes, 'B/s')} ({rates.source})"
        lines.append(f"\nfloors: {reached}; ?: shapes are not in the trace")
    exposed, hidden = timeline.by_class[COMMUNICATION], timeline.hidden_communication
    if exposed + hidden > SMALL * whole:
        overlapped = f"{hidden:.2f} hidden behind computation ({hidden / (exposed + hidden):.0%} overlapped)"
        lines.append(f"communication: {exposed:.2f} ms a step exposed, {overlapped}")
    return "\n".join(lines)


def to_floor(known: ClassWork) -> Row:
    """Return work, rate, floor and distance from it, the last four columns of a class's row."""
    if not known.work.bytes or not known.milliseconds:
        return ()
    amount, unit = (known.work.flops, "FLOP") if known.work.flops else (known.work.bytes, "B")
    floor = (known.floor, known.time / known.floor) if known.floor else ("?",)
    return si(amount, unit), si(amount / known.milliseconds * 1e3, unit + "/s"), *floor


def percent(milliseconds: float, timeline: Timeline) -> str:
    """Return the fraction of a step, as text."""
    return f"{100 * milliseconds / timeline.step_milliseconds:.1f} %"


def si(value: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def causes(timeline: Timeline) -> str:
    """Return idle time by what the host did."""
    largest = list(timeline.idle_by_cause.items())[:TOP]
    rows = [(name[:51], time, percent(time, timeline)) for name, time in largest]
    nothing = "no kernel runs" if timeline.trace.on_gpu else "no operator runs"
    title = (f"idle ({nothing}), by cause", "ms a step", "fraction")
    return text_table("<52 >10.2f >9", [title, *rows]) if rows else ""


def memory_table(trace: Trace) -> str:
    """Return allocated memory by part of the loop; "" without profiling.enable_memory_snapshot."""
    times, sizes = [time for time, _ in trace.memory], [size / 2**20 for _, size in trace.memory]
    rows = []
    for start, end, name in Loop(trace).parts:
        first, last = bisect_right(times, start), bisect_right(times, end)
        if 0 < first < last:  # nothing is known before the first allocation
            rows.append((name, max(sizes[first - 1 : last]), sizes[last - 1] - sizes[first - 1]))
    if not rows:
        return ""
    table: Table = pd.DataFrame(rows, columns=["part", "peak", "change"])
    table = table.groupby("part", sort=False).agg({"peak": "max", "change": "mean"})
    return text_table(
        "<52 >10.1f >+12.1f",
        [("memory, MiB (on a CPU, of the recording)", "at most", "end - start"), *table.itertuples()],
    )


def ranks_table(timelines: Sequence[Timeline]) -> str:
    """Return milliseconds a step by class, a column a rank. The rank with the least communication, exposed
    and hidden, comes last, and the others wait for it.
    """
    first = timelines[:MAX_RANKS]
    last = min(timelines, key=lambda t: t.by_class[COMMUNICATION] + t.hidden_communication).trace.rank
    rows = [
        ("ms a step", *(f"rank {t.trace.rank}" for t in first)),
        *((name, *(t.by_class[name] for t in first)) for name in CLASSES),
        ("sum", *(t.step_milliseconds for t in first)),
        ("hidden communication", *(t.hidden_communication for t in first)),
    ]
    table = text_table("<22" + " >10.2f" * len(first), rows)
    return f"{table}\nrank {last} waits least in collectives: it comes last, the others wait for it"
