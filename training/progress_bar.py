"""Progress bars, on a terminal and in a log file."""

import sys

from tqdm import tqdm

LINE_SECONDS = 30.0  # between lines of a bar that is written to a file


def progress_bar(total: int, unit: str, is_drawn: bool, *, desc: str = "", done: int = 0) -> tqdm:
    """Return a bar, drawn if `is_drawn`, for one rank. With `desc` it is a part of a longer task and
    removed at its end; such a bar writes nothing into a file unless the part takes long.
    """
    seconds = 0.0 if sys.stderr.isatty() else LINE_SECONDS
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        desc=desc or None,
        leave=not desc,
        disable=not is_drawn,
        delay=seconds if desc else 0.0,
        dynamic_ncols=True,
        mininterval=max(seconds, 0.1),
    )
