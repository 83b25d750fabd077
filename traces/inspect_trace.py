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
    """The timelines of a run's newest traces, by rank. Raises DataError."""
    return [build_timeline(read_trace(path)) for path in find_traces(where)]


def print_run(timelines: list[Timeline]) -> None:
    """Print the first rank of a run at length, the other ranks next to it, and advice."""
    first = timelines[0]
    rates = rates_of(first)
    print(report(first, rates))
    if len(timelines) > 1:
        print(f"\n{ranks_table(timelines)}\n\n{collectives_table(timelines)}")
    print("\n" + advice(first, rates, timelines))


def print_comparison(first: list[Timeline], second: list[Timeline]) -> None:
    """Print the differences of two runs, and advice for each."""
    print(comparison(first[0], second[0]))
    for letter, timelines in (("A", first), ("B", second)):
        print(f"\n{letter}: {advice(timelines[0], rates_of(timelines[0]), timelines)}")


def parse(argv: list[str]) -> list[Path]:
    """One folder or file, or two. Raises ConfigError."""
    unknown = [word for word in argv if word.startswith("-")]
    if unknown or len(argv) not in (1, 2):
        what = f"{unknown[0]}: no such option" if unknown else f"{len(argv)} names given"
        raise ConfigError(f"inspect_trace: {what}; name a run's folder or a trace, or two to compare")
    return [Path(word) for word in argv]


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    with one_line_errors():
        runs = [inspect(where) for where in parse(argv)]
        firsts = [run[0] for run in runs]
        if len(runs) == 1:
            print_run(runs[0])
            plotted, name = runs[0][:MAX_RANKS], firsts[0].trace.name
        else:
            print_comparison(*runs)
            plotted, name = firsts, "-against-".join(timeline.trace.run_name for timeline in firsts)
        trace = firsts[0].trace
        picture = (trace.run / "plots" if trace.run else trace.path.parent) / f"trace-{name}.png"
        try:
            plot_breakdown(plotted, picture)
        except OSError as error:
            raise DataError(f"{picture}: cannot be written ({error}); move away what is there") from error
        print(f"\nwritten: {picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
