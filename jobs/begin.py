"""Six questions (data, variables, resolution, hardware, goal, output) and a configuration that trains.

    .venv/bin/python -m jobs.begin
    .venv/bin/python -m jobs.begin --data era5.zarr --variables all --hardware a100x64 --goal baseline
    .venv/bin/python -m jobs.begin --data era5.zarr --resolution 32x64 --output small.toml

On a terminal it asks what no option says, each question with its answer in brackets that Enter takes; else
the answers in brackets are taken, and --data has to be named. It shows what the data hold, plans the run,
writes a configuration that says of each key why it has its value, looks at this machine where the run is to
be here (jobs.preflight), and ends with the command to start. Nothing is overwritten, nothing is trained.
docs/first_run.md goes through one. Exit codes: 0, 2 bad input, or something that has to be mended first.
"""

import sys
from argparse import Namespace

from command_line import OneLineParser
from errors import end_when_interrupted, one_line_errors
from first_steps.goals import GOALS


def parse(argv: list[str]) -> Namespace:
    """Raises ConfigError."""
    known = OneLineParser("jobs.begin", __doc__)
    add = known.add_argument
    add("--data", metavar="PATH", help="what data.path takes: file, folder, glob or URL; or simulated")
    add(
        "--variables",
        nargs="+",
        metavar="NAME",
        help='to be predicted, "all", or "usual": a customary choice',
    )
    add("--resolution", metavar="HxW", help="that of the data, or a coarser grid, 32x64, to be made of them")
    add("--hardware", metavar="NAME", help="here, or a machine of planning/clusters.toml: a100x64")
    add("--goal", choices=tuple(GOALS), help="; ".join(f"{name}: {what}" for name, what in GOALS.items()))
    add("--output", metavar="FILE", help="the configuration to write, which must not be there yet")
    add("--select", nargs="+", default=[], metavar="DIM=LABEL", help="as data.select: member=0")
    add(
        "--no_preflight", action="store_true", help="does not look at this machine, which takes half a minute"
    )
    return known.parse_args(argv)


def main(argv: list[str]) -> int:
    """The exit code. Raises ConfigError, DataError."""
    options = parse(argv)
    from first_steps.questions import ask_all  # here: torch takes seconds, a misspelt option none
    from first_steps.written import begin

    return begin(ask_all(options, sys.stdin.isatty()), not options.no_preflight)


if __name__ == "__main__":
    end_when_interrupted()
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
