"""Time of a step by class, from the traces that a run has written: a table, a picture, and advice.

    .venv/bin/python -m traces.inspect_trace outputs/demo           a run's newest traces, all its ranks
    .venv/bin/python -m traces.inspect_trace some/trace.json.gz     a file of torch.profiler, anyone's

A run writes them with --profiling.enable_profiling true --profiling.profile_freq 20. The picture goes into
the run's plots/, or next to the file. docs/profiling.md explains it. Exit codes: 0, 2 bad input.
"""

import sys
from pathlib import Path

from errors import ConfigError, DataError, one_line_errors
from jobs.signals import end_at_signals
from traces.advice import advice
from traces.events import find_traces, read_trace
from traces.plots import plot_breakdown
from traces.report import MAX_RANKS, ranks_table, report
from traces.timeline import Timeline, build_timeline
from traces.work import rates_of


def inspect(where: Path) -> list[Timeline]:
    """Return the timelines of a run's newest traces, by rank. Raises DataError."""
    return [build_timeline(read_trace(path)) for path in find_traces(where)]


def main(argv: list[str]) -> None:
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    end_at_signals()
    with one_line_errors():
        if len(argv) != 1 or argv[0].startswith("-"):
            raise ConfigError(f"inspect_trace {' '.join(argv)}: name a run's folder, or a trace")
        timelines = inspect(Path(argv[0]))
        first, trace = timelines[0], timelines[0].trace
        rates = rates_of(first)
        ranks = [ranks_table(timelines)] if len(timelines) > 1 else []
        print("\n\n".join([report(first, rates), *ranks, advice(first, rates)]))
        name = trace.path.name.partition(".")[0]
        folder = trace.path.parent
        folder = folder.parent / "plots" if folder.name == "traces" else folder
        picture = folder / f"trace-{name}.png"
        try:
            plot_breakdown(timelines[:MAX_RANKS], picture)
        except OSError as error:
            raise DataError(f"{picture}: cannot be written ({error}); move away what is there") from error
        print(f"\nwritten: {picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
