"""A bar of what a verb does, as its terminal or its log file can take it."""

import sys

from tqdm import tqdm

LINE_SECONDS = 30.0  # into a file, a line so often


def progress_bar(total: int, unit: str, shown: bool, *, desc: str = "", done: int = 0) -> tqdm:
    """Drawn where `shown`, which one rank says. With a name it is of a part of something longer, and is gone
    at its end; into a file such a bar writes nothing at all unless it takes long.
    """
    seconds = 0.0 if sys.stderr.isatty() else LINE_SECONDS
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        desc=desc or None,
        leave=not desc,
        disable=not shown,
        delay=seconds if desc else 0.0,
        dynamic_ncols=True,
        mininterval=max(seconds, 0.1),
    )
