"""Tables that inspect_trace prints: of one timeline, of the ranks of a run, of two traces side by side."""

import json
import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Sequence

import pandas as pd

from command_line import text_table
from errors import DataError
from traces.classes import AROUND, ATTENTION, CLASSES, COMMUNICATION, DATA_WAIT, GEMM, IDLE
from traces.events import Event, Loop, Trace
from traces.timeline import Table, Timeline
from traces.work import ClassWork, Rates, dims, loaded_bytes, operator_table, work_by_class

WAITING = (COMMUNICATION, DATA_WAIT, AROUND, IDLE)  # a step need have none of them
TOP = 8  # rows of a list
SMALL = 0.001  # of a step: causes below it are summed up in one row
MAX_RANKS = 8  # columns


def report(timeline: Timeline, rates: Rates) -> str:
    """Everything about one timeline, as text."""
    blocks = [breakdown(timeline, rates), remarks(timeline, rates), causes(timeline), waits(timeline)]
    blocks += [tasks_table(timeline), memory_table(timeline.trace)]
    return "\n\n".join(filter(None, blocks))


def breakdown(timeline: Timeline, rates: Rates) -> str:
    """Title, time by class, and how far each class is from its floor."""
    steps = [(end - start) / 1000 for start, end in timeline.windows]
    work, whole = work_by_class(timeline, rates), timeline.step_milliseconds
    rows: list[tuple[object, ...]] = [
        ("class", "ms a step", "fraction", "work", "rate", "floor, ms", "x floor")
    ]
    for name, time in timeline.by_class.items():
        label = f"{name}, exposed" if name == COMMUNICATION else name
        rows.append((label, time, percent(time, timeline), *distance(name, time, work)))
    rows.append(("sum", whole, percent(whole, timeline)))
    return (
        f"{timeline.trace.title}\n{whole:.1f} ms a step ({min(steps):.1f} to {max(steps):.1f})\n\n"
        f"{text_table('<24 >10.2f >9 >15 >16 >12.2f >9.2f', rows)}"
    )


def distance(name: str, time: float, work: dict[str, ClassWork]) -> tuple[object, ...]:
    """The last four columns of a class's row."""
    if name in WAITING:
        return "", "", "0"
    known = work[name]
    if not known.work.bytes or not known.milliseconds:
        return ()
    amount, unit = (known.work.flops, "FLOP") if known.work.flops else (known.work.bytes, "B")
    floor = (known.floor, time / known.floor) if known.floor else ("?",)
    return si(amount, unit), si(amount / known.milliseconds * 1e3, unit + "/s"), *floor


def short(name: str) -> str:
    """To the width of the first column of a list."""
    return name if len(name) < 52 else name[:48] + "..."


def percent(milliseconds: float, timeline: Timeline) -> str:
    """Fraction of a step, as text."""
    return f"{100 * milliseconds / timeline.step_milliseconds:.1f} %"


def si(value: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def remarks(timeline: Timeline, rates: Rates) -> str:
    """Source of the floors, hidden communication, rate of the data."""
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
        lines.append(
            f"communication: {seen:.2f} ms a step exposed, {hidden:.2f} hidden behind computation"
            f" ({hidden / (seen + hidden):.0%} overlapped)"
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
    try:
        records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); move it away to inspect the trace") from error
    seconds = [record["step_seconds"] for record in records if record.get("step_seconds")]
    return 1e3 * statistics.median(seconds) if seconds else None


def causes(timeline: Timeline) -> str:
    """Idle time by what the host did."""
    least = SMALL * timeline.step_milliseconds
    found = timeline.idle_by_cause
    largest = {short(name): time for name, time in list(found.items())[:TOP] if time > least}
    if not largest:
        return ""
    if (rest := sum(found.values()) - sum(largest.values())) > least:
        largest["others"] = rest
    nothing = "no kernel runs" if timeline.trace.on_gpu else "no operator runs"
    rows = [(name, time, percent(time, timeline)) for name, time in largest.items()]
    return text_table("<52 >10.2f >9", [(f"idle ({nothing}), by cause", "ms a step", "fraction"), *rows])


def memory_table(trace: Trace) -> str:
    """Allocated memory by part of the loop; "" where profiling.enable_memory_snapshot was off."""
    times, sizes = [time for time, _ in trace.memory], [size / 2**20 for _, size in trace.memory]
    peaks: dict[str, float] = {}
    changes: dict[str, list[float]] = {}
    for start, end, name in Loop(trace).parts:
        first, last = bisect_right(times, start), bisect_right(times, end)
        if first == 0 or first == last:  # nothing is known before the first allocation
            continue
        peaks[name] = max(peaks.get(name, -math.inf), *sizes[first - 1 : last])
        changes.setdefault(name, []).append(sizes[last - 1] - sizes[first - 1])
    if not peaks:
        return ""
    title = "memory, MiB" if trace.on_gpu else "memory, MiB more than when the recording began"
    rows = [(name, peak, statistics.mean(changes[name])) for name, peak in peaks.items()]
    return text_table("<52 >10.1f >+12.1f", [(title, "at most", "end - start"), *rows])


def waits(timeline: Timeline) -> str:
    """Places outside logging, saving and validation where the host waits for the device."""
    if not timeline.waits:
        return ""
    steps, on_gpu = len(timeline.windows), timeline.trace.on_gpu
    title = "waits for the device" if on_gpu else "values read by Python (a GPU would be waited for)"
    rows = [
        (short(f"{w.what} {w.where}"), w.count / steps, w.waited / steps, w.idle / steps)
        for w in timeline.waits[:TOP]
    ]
    columns = "<52 >10.1f >11.2f" + " >11.2f" * on_gpu  # on a CPU nothing idles for it
    return text_table(columns, [(title, "a step", "ms a step", "GPU idle"), *rows])


def tasks(timeline: Timeline) -> Table:
    """Operators with their shapes, on a GPU kernels, the longest first. Columns: milliseconds (`ms`) and
    `calls` of a step, and `gflops` a second (0 where they are not known).
    """
    table, steps = timeline.table, len(timeline.windows)
    table = table[~table["name"].isin([DATA_WAIT, AROUND, IDLE])]
    rows = zip(table["name"], table["what"], table["operator"], strict=True)
    names = [task_name(*row, timeline.trace.on_gpu) for row in rows]
    # Where several kernels do what an operator has to, the first counts, which is the large one.
    flops = table["operator"].map(operator_table(timeline)["flops"])
    flops = flops.where(~table["operator"].duplicated(), 0.0).fillna(0.0)
    call = table["kernel"].combine_first(table["operator"]).combine_first(table["start"])
    columns: Table = pd.DataFrame({"task": names, "ms": table["ms"], "calls": call, "gflops": flops})
    found = columns.groupby("task").agg({"ms": "sum", "calls": "nunique", "gflops": "sum"})
    found["gflops"] /= found["ms"] * 1e6
    found[["ms", "calls"]] /= steps
    return found.sort_values("ms", ascending=False)


def task_name(name: str, what: str, operator: Event | None, on_gpu: bool) -> str:
    if on_gpu:
        return short_kernel(what)
    if operator and name in (GEMM, ATTENTION):
        shapes = ["x".join(map(str, shape)) for shape in dims(operator) if len(shape) > 1]
        return f"{what} {', '.join(shapes[:2])}"
    return "compiled graph" if what.startswith("##") else what


def short_kernel(name: str) -> str:
    """Without its template arguments."""
    while (bare := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = bare
    return name.removeprefix("void ").strip()[:60]


def tasks_table(timeline: Timeline) -> str:
    what = "kernels" if timeline.trace.on_gpu else "operators"
    rows: list[tuple[object, ...]] = [
        (f"{what} that take the time", "ms a step", "fraction", "calls", "GFLOP/s")
    ]
    for name, time, calls, gflops in tasks(timeline)[:TOP].itertuples():
        rows.append((short(name), time, percent(time, timeline), calls, gflops or None))
    return text_table("<52 >10.2f >9 >8.0f >10.0f", rows)


def ranks_table(timelines: Sequence[Timeline]) -> str:
    """Milliseconds a step by class, a column a rank."""
    first = timelines[:MAX_RANKS]
    rows = [
        ("ms a step", *(f"rank {t.trace.rank}" for t in first)),
        *((name, *(t.by_class[name] for t in first)) for name in CLASSES),
        ("sum", *(t.step_milliseconds for t in first)),
    ]
    return text_table("<22" + " >10.2f" * len(first), rows)


def collectives_table(timelines: Sequence[Timeline]) -> str:
    """Milliseconds a step that ranks spend in collectives, the least first: all wait there for the last."""
    ranks = sorted(timelines, key=lambda timeline: timeline.collective_milliseconds)
    times = [timeline.collective_milliseconds for timeline in ranks]
    least, notes = times[0], [""] * len(ranks)
    if times[-1] - least > SMALL * ranks[0].step_milliseconds:
        notes[0], notes[-1] = "  comes last, the others wait for it", "  comes first, and waits longest"
    rows: list[tuple[object, ...]] = [
        (f"rank {t.trace.rank}", time, time - least, note)
        for t, time, note in zip(ranks, times, notes, strict=True)
    ]
    if len(rows) > MAX_RANKS:
        rows[MAX_RANKS // 2 : -MAX_RANKS // 2] = [("...",)]
    head = ("in collectives", "ms a step", "+ ms", "")
    return text_table("<22 >10.2f >+10.2f <0", [head, *rows])


def comparison(first: Timeline, second: Timeline) -> str:
    """Two timelines side by side: classes, then the operators that differ most."""
    both: Table = pd.DataFrame({"a": tasks(first)["ms"], "b": tasks(second)["ms"]}).fillna(0.0)
    differing = both.loc[(both["b"] - both["a"]).abs().sort_values(ascending=False).index[:TOP]]
    rows = [
        ("ms a step", "A", "B", "B - A", "B / A"),
        *(difference(name, first.by_class[name], second.by_class[name]) for name in CLASSES),
        difference("sum", first.step_milliseconds, second.step_milliseconds),
        (),
        ("what differs most",),
        *(difference(*row) for row in differing.itertuples()),
    ]
    titles = [
        f"{letter}  {t.trace.title}, {t.step_milliseconds:.1f} ms a step"
        for letter, t in (("A", first), ("B", second))
    ]
    return "\n".join([*titles, "", text_table("<52 >10.2f >10.2f >+10.2f >8.2f", rows)])


def difference(name: str, a: float, b: float) -> tuple[object, ...]:
    return short(name), a, b, b - a, b / a if a > 0.005 else None
