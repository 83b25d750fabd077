"""Time of a step by class, from the traces that a run has written, and its longest operators.

    .venv/bin/python -m traces.inspect_trace outputs/demo           a run's newest traces, all its ranks
    .venv/bin/python -m traces.inspect_trace some/trace.json.gz     a file of torch.profiler, anyone's

A run writes them with --profiling.enable_profiling true --profiling.profile_freq 20; ui.perfetto.dev draws
them. docs/profiling.md explains the tables. Exit codes: 0, 2 bad input.
"""

from jobs.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import OneLineParser, load_config, text_table
from errors import one_line_errors
from traces.events import Trace, find_traces, read_trace
from traces.timeline import CLASSES, COMMUNICATION, Timeline, build_timeline

ROWS = 10  # of causes, and of operators
MAX_RANKS = 8  # columns


def inspect(where: Path) -> list[Timeline]:
    """Return the timelines of a run's newest traces, by rank. Raises ConfigError, DataError."""
    paths = find_traces(where)
    # A run's configuration has its steps between two saves; a trace elsewhere counts as it was recorded.
    intervals = {}
    folder = paths[0].absolute().parent
    if folder.name == "traces" and (folder.parent / "config.toml").is_file():
        config = load_config(["--job.dump_folder", str(folder.parent)])
        intervals["checkpoint"] = config.checkpoint.interval
        intervals["validation"] = config.validation.interval
        intervals["log"] = config.metrics.log_freq
    return [build_timeline(read_trace(path), intervals) for path in paths]


def report(timeline: Timeline) -> str:
    """Return the tables of one rank: time by class, idle time by cause, and its longest operators."""
    trace = timeline.trace
    step = timeline.step_milliseconds
    fastest, slowest = min(timeline.recorded_steps), max(timeline.recorded_steps)
    lines = [trace.title, f"{step:.1f} ms a step ({fastest:.1f} to {slowest:.1f} in the trace)", ""]

    # -- time by class, and communication
    rows: list[Sequence[object]] = [("class", "ms a step", "fraction")]
    for name, time in timeline.by_class.items():
        rows.append((f"{name}, exposed" if name == COMMUNICATION else name, time, f"{time / step:.1%}"))
    rows.append(("sum", step, "100.0%"))
    lines.append(text_table("<24 >10.2f >9", rows))
    for span, (time, steps) in timeline.spread_spans.items():
        if steps > 1:
            lines.append(f"span {span}: one of {time:.1f} ms counts once in {steps} steps")
    exposed, hidden = timeline.by_class[COMMUNICATION], timeline.hidden_communication
    if exposed + hidden > 0.001 * step:  # less is not worth a line
        overlapped = f"{hidden:.2f} hidden behind computation ({hidden / (exposed + hidden):.0%} overlapped)"
        lines.append(f"communication: {exposed:.2f} ms a step exposed, {overlapped}")

    # -- idle time by what the host did
    device = "GPU" if trace.kernels else "CPU"
    rows = [(f"idle {device}, by cause", "ms a step", "fraction")]
    for cause, time in list(timeline.idle_by_cause.items())[:ROWS]:
        rows.append((cause[:51], time, f"{time / step:.1%}"))
    lines += ["", text_table("<52 >10.2f >9", rows)]

    # -- operators
    times = {name: time for name, time in operator_times(trace).items() if time.self_ms > 0}
    all_operators = sum(time.self_ms for time in times.values())
    rows = [(f"longest operators, {device} time of the trace", "self, ms", "fraction", "total, ms", "calls")]
    for name, time in sorted(times.items(), key=lambda item: -item[1].self_ms)[:ROWS]:
        share = f"{time.self_ms / all_operators:.1%}"
        rows.append((name[:51], time.self_ms, share, time.total_ms, time.calls))
    return "\n".join(lines + ["", text_table("<52 >10.2f >9 >10.2f >7", rows)])


@dataclass
class OperatorTime:
    self_ms: float = 0.0  # without the operators and calls that it calls
    total_ms: float = 0.0
    calls: int = 0


def operator_times(trace: Trace) -> dict[str, OperatorTime]:
    """Return the time of each operator in the trace, as torch.profiler's key_averages() sums it up: of the
    processor, or on a GPU of the kernels that it launched.
    """
    times: dict[str, OperatorTime] = defaultdict(OperatorTime)
    for event in trace.host_events:
        milliseconds = 0.0 if trace.kernels else (event.end - event.start) / 1000
        outer = event.parent if event.parent and event.parent.kind == "op" else None
        if event.kind == "op":
            times[event.name].self_ms += milliseconds
            # aten::sum calls aten::sum with other arguments: one call, as in key_averages().
            if not outer or outer.name != event.name:
                times[event.name].calls += 1
                times[event.name].total_ms += milliseconds
        if outer:
            times[outer.name].self_ms -= milliseconds
    for kernel in trace.kernels:
        launch = trace.calls.get(kernel.correlation)
        operators = [event.name for event in launch.chain() if event.kind == "op"] if launch else []
        for depth, name in enumerate(dict.fromkeys(operators)):
            times[name].self_ms += (kernel.end - kernel.start) / 1000 * (depth == 0)
            times[name].total_ms += (kernel.end - kernel.start) / 1000
    return times


def ranks_table(timelines: Sequence[Timeline]) -> str:
    """Return milliseconds a step by class, a column a rank. The rank with the least communication, exposed
    and hidden, comes last, and the others wait for it.
    """
    columns = timelines[:MAX_RANKS]
    last = min(timelines, key=lambda t: t.by_class[COMMUNICATION] + t.hidden_communication).trace.rank
    rows: list[Sequence[object]] = [["ms a step"] + [f"rank {t.trace.rank}" for t in columns]]
    rows += [[name] + [t.by_class[name] for t in columns] for name in CLASSES]
    rows.append(["sum"] + [t.step_milliseconds for t in columns])
    rows.append(["hidden communication"] + [t.hidden_communication for t in columns])
    table = text_table("<22" + " >10.2f" * len(columns), rows)
    return f"{table}\nrank {last} waits least in collectives: it comes last, the others wait for it"


def main(argv: list[str]) -> None:
    with one_line_errors():
        parser = OneLineParser("traces.inspect_trace", __doc__)
        parser.add_argument("where", metavar="RUN", type=Path, help="the folder of a run, or a trace")
        timelines = inspect(parser.parse_args(argv).where)
        print(report(timelines[0]))
        if len(timelines) > 1:
            print(f"\n{ranks_table(timelines)}")


if __name__ == "__main__":
    main(sys.argv[1:])
