"""Tables that inspect_trace prints: of one timeline, of the ranks of a run, of two traces side by side."""

import re
import statistics
from bisect import bisect_right
from collections.abc import Sequence

import pandas as pd

from command_line import text_table
from jobs.journal import read_records
from traces.classes import AROUND, ATTENTION, CLASSES, COMMUNICATION, DATA_WAIT, GEMM, IDLE
from traces.events import Event, Loop, Trace
from traces.timeline import Table, Timeline
from traces.work import ClassWork, Rates, dims, operator_table, work_by_class

Row = tuple[object, ...]
TOP = 8  # rows of a list
SMALL = 0.001  # of a step: causes below it are summed up in one row
MAX_RANKS = 8  # columns


def report(timeline: Timeline, rates: Rates) -> str:
    """Return everything about one timeline, as text."""
    blocks = [breakdown(timeline, rates), remarks(timeline, rates), causes(timeline), waits(timeline)]
    blocks += [tasks_table(timeline), memory_table(timeline.trace)]
    return "\n\n".join(filter(None, blocks))


def breakdown(timeline: Timeline, rates: Rates) -> str:
    """Return title, time by class, and how far each class is from its floor."""
    steps = [(window.end - window.start) / 1000 for window in timeline.windows]
    work, whole = work_by_class(timeline, rates), timeline.step_milliseconds
    rows: list[Row] = [("class", "ms a step", "fraction", "work", "rate", "floor, ms", "x floor")]
    for name, time in timeline.by_class.items():
        label = f"{name}, exposed" if name == COMMUNICATION else name
        distance = to_floor(work[name]) if name in work else ("", "", "0")  # of waiting, none is needed
        rows.append((label, time, percent(time, timeline), *distance))
    rows.append(("sum", whole, percent(whole, timeline)))
    return (
        f"{timeline.trace.title}\n{whole:.1f} ms a step ({min(steps):.1f} to {max(steps):.1f})\n\n"
        f"{text_table('<24 >10.2f >9 >15 >16 >12.2f >9.2f', rows)}"
    )


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


def remarks(timeline: Timeline, rates: Rates) -> str:
    """Return the source of the floors and hidden communication."""
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
    exposed, hidden = timeline.by_class[COMMUNICATION], timeline.hidden_communication
    if exposed + hidden > SMALL * timeline.step_milliseconds:
        lines.append(
            f"communication: {exposed:.2f} ms a step exposed, {hidden:.2f} hidden behind computation"
            f" ({hidden / (exposed + hidden):.0%} overlapped)"
        )
    return "\n".join(lines)


def logged_milliseconds(trace: Trace) -> float | None:
    """Return the median step of the run that wrote the trace, by its metrics.jsonl."""
    records = read_records(trace.run / "metrics.jsonl") if trace.run else []
    seconds = [record["step_seconds"] for record in records if record.get("step_seconds")]
    return 1e3 * statistics.median(seconds) if seconds else None


def causes(timeline: Timeline) -> str:
    """Return idle time by what the host did."""
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
    """Return allocated memory by part of the loop; "" without profiling.enable_memory_snapshot."""
    times, sizes = [time for time, _ in trace.memory], [size / 2**20 for _, size in trace.memory]
    rows = []
    for start, end, name in Loop(trace).parts:
        first, last = bisect_right(times, start), bisect_right(times, end)
        if 0 < first < last:  # nothing is known before the first allocation
            rows.append((name, max(sizes[first - 1 : last]), sizes[last - 1] - sizes[first - 1]))
    if not rows:
        return ""
    title = "memory, MiB" if trace.on_gpu else "memory, MiB more than when the recording began"
    table: Table = pd.DataFrame(rows, columns=["part", "peak", "change"])
    table = table.groupby("part", sort=False).agg({"peak": "max", "change": "mean"})
    return text_table("<52 >10.1f >+12.1f", [(title, "at most", "end - start"), *table.itertuples()])


def waits(timeline: Timeline) -> str:
    """Return places outside logging, saving and validation where the host waits for the device."""
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
    """Return operators with their shapes, on a GPU kernels, the longest first. Columns: milliseconds (`ms`)
    and `calls` of a step, and `gflops` a second (0 where they are not known).
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
    """Return an operator with its shapes, or a kernel without its template arguments."""
    if on_gpu:
        while (bare := re.sub(r"<[^<>]*>|\([^()]*\)", "", what)) != what:
            what = bare
        return what.removeprefix("void ").strip()[:60]
    if operator and name in (GEMM, ATTENTION):
        shapes = ["x".join(map(str, shape)) for shape in dims(operator) if len(shape) > 1]
        return f"{what} {', '.join(shapes[:2])}"
    return "compiled graph" if what.startswith("##") else what


def short(name: str) -> str:
    """Return a name cut to the width of the first column of a list."""
    return name if len(name) < 52 else name[:48] + "..."


def tasks_table(timeline: Timeline) -> str:
    what = "kernels" if timeline.trace.on_gpu else "operators"
    rows: list[Row] = [(f"{what} that take the time", "ms a step", "fraction", "calls", "GFLOP/s")]
    for name, time, calls, gflops in tasks(timeline)[:TOP].itertuples():
        rows.append((short(name), time, percent(time, timeline), calls, gflops or None))
    return text_table("<52 >10.2f >9 >8.0f >10.0f", rows)


def ranks_table(timelines: Sequence[Timeline]) -> str:
    """Return milliseconds a step by class, a column a rank."""
    first = timelines[:MAX_RANKS]
    rows = [
        ("ms a step", *(f"rank {t.trace.rank}" for t in first)),
        *((name, *(t.by_class[name] for t in first)) for name in CLASSES),
        ("sum", *(t.step_milliseconds for t in first)),
    ]
    return text_table("<22" + " >10.2f" * len(first), rows)


def collectives_table(timelines: Sequence[Timeline]) -> str:
    """Return milliseconds a step that ranks spend in collectives; the one with the least comes last."""
    ranks = sorted((t.collective_milliseconds, t.trace.rank) for t in timelines)
    rows: list[Row] = [(f"rank {rank}", time, time - ranks[0][0]) for time, rank in ranks]
    if ranks[-1][0] - ranks[0][0] > SMALL * timelines[0].step_milliseconds:
        rows[0] += ("  comes last, the others wait for it",)
    if len(rows) > MAX_RANKS:
        rows[MAX_RANKS // 2 : -MAX_RANKS // 2] = [("...",)]
    return text_table("<22 >10.2f >+10.2f <0", [("in collectives", "ms a step", "+ ms"), *rows])


def comparison(first: Timeline, second: Timeline) -> str:
    """Return two timelines side by side: classes, then the operators that differ most."""
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


def difference(name: str, a: float, b: float) -> Row:
    return short(name), a, b, b - a, b / a if a > 0.005 else None
