"""What a store holds, and how to train on it: variables, levels, grid, period, gaps, chunks, size, read rate.

    .venv/bin/python -m datasets.describe STORE
    .venv/bin/python -m datasets.describe STORE --select member=0

STORE is what data.path takes. Variables have the names that a configuration takes; the last lines are the
[data] section of one. The read rate is measured here, for two seconds. Exit codes: 0, 2 bad input.
"""

import sys
from argparse import Namespace

from command_line import OneLineParser
from errors import end_when_interrupted, one_line_errors


def parse(argv: list[str]) -> Namespace:
    """Raises ConfigError."""
    known = OneLineParser("datasets.describe", __doc__)
    known.add_argument("store", metavar="STORE", help="what data.path takes: file, folder, glob or URL")
    known.add_argument(
        "--select", nargs="+", default=[], metavar="DIM=LABEL", help="as data.select: member=0"
    )
    return known.parse_args(argv)


def main(argv: list[str]) -> None:
    """Raises ConfigError, DataError."""
    options = parse(argv)
    from conversion.description import describe  # here: torch takes seconds, a misspelt option none

    print(describe(options.store, options.select))


if __name__ == "__main__":
    end_when_interrupted()
    with one_line_errors():
        main(sys.argv[1:])
