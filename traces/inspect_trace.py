"""Time of a step by class, from the traces that a run has written: a table, a picture, and advice.

    .venv/bin/python -m traces.inspect_trace outputs/demo           a run's newest traces, all its ranks
    .venv/bin/python -m traces.inspect_trace outputs/a outputs/b    two runs (or files) side by side
    .venv/bin/python -m traces.inspect_trace some/trace.json.gz     a file of torch.profiler, anyone's

A run writes them with --profiling.enable_profiling true --profiling.profile_freq 20. The picture goes into
the run's plots/, or next to the file. docs/profiling.md explains it. Exit codes: 0, 2 bad input.
"""

import sys
from pathlib import Path

from errors import ConfigError, DataError, one_line_errors
from traces.advice import advice
from traces.events import find_traces, read_trace
from traces.plots import plot_breakdown
from traces.report import MAX_RANKS, collectives_table, comparison, ranks_table, report
from traces.timeline import Timeline, build_timeline
from traces.work import rates_of


def inspect(where: Path) -> list[Timeline]:
    """Return the timelines of a run's newest traces, by rank. Raises DataError."""
    return [build_timeline(read_trace(path)) for path in find_traces(where)]


def print_run(timelines: list[Timeline]) -> None:
    """Print the first rank of a run at length, the other ranks next to it, and advice."""
    first = timelines[0]
    rates = rates_of(first)
    print(report(first, rates))
    if len(timelines) > 1:
        print(f"\n{ranks_table(timelines)}\n\n{collectives_table(timelines)}")
    print("\n" + advice(first, rates))


def print_comparison(first: Timeline, second: Timeline) -> None:
    """Print the differences of two runs, and advice for each."""
    print(comparison(first, second))
    for letter, timeline in (("A", first), ("B", second)):
        print(f"\n{letter}: {advice(timeline, rates_of(timeline))}")


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    with one_line_errors():
        if len(argv) not in (1, 2) or any(word.startswith("-") for word in argv):
            raise ConfigError(f"inspect_trace {' '.join(argv)}: name a run's folder or a trace, or two")
        runs = [inspect(Path(word)) for word in argv]
        firsts = [run[0] for run in runs]
        trace = firsts[0].trace
        if len(runs) == 1:
            print_run(runs[0])
            plotted, name = runs[0][:MAX_RANKS], trace.path.name.partition(".")[0]
        else:
            print_comparison(*firsts)
            plotted, name = firsts, "-against-".join(timeline.trace.run_name for timeline in firsts)
        picture = (trace.run / "plots" if trace.run else trace.path.parent) / f"trace-{name}.png"
        try:
            plot_breakdown(plotted, picture)
        except OSError as error:
            raise DataError(f"{picture}: cannot be written ({error}); move away what is there") from error
        print(f"\nwritten: {picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
