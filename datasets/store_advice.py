"""What a conversion would gain: an archive's rate of reading against that of a training store, measured."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from archives.archive import Archive
from archives.stores import COMPRESSOR

WORTH_TELLING = 1.5  # times faster
AT_ONCE = 1e-4  # seconds a date: nobody waits for that


def conversion_advice(archive: Archive, variables: Sequence[str], dates: np.ndarray) -> str:
    """One line about an archive that is read date by date; "" where a conversion would gain little.

    dates: indices of those that are read; a date in the middle is read twice, and decoded as a training store
    holds it: a chunk a field.
    """
    date = int(dates[len(dates) // 2])
    fields = archive.read(date, variables)  # (V, H, W); opens files, too
    packed = [COMPRESSOR.encode(field) for field in fields]
    out = np.empty_like(fields[0])
    reading = _seconds(lambda: archive.read(date, variables))
    decoding = _seconds(lambda: [COMPRESSOR.decode(field, out=out) for field in packed])
    times = reading / max(decoding, 1e-9)
    if times < WORTH_TELLING or reading < AT_ONCE:
        return ""
    rates = f"a date takes {1e3 * reading:.2g} ms to read, {1e3 * decoding:.2g} ms from a training store"
    many = archive.time_chunk(variables)
    chunks = f"; its chunks hold {many} dates, of which one is wanted" if many > 1 else ""
    return f"data.path: {rates}, {times:.1f} times faster{chunks}: python -m datasets.convert makes one"


def _seconds(what: Callable[[], object]) -> float:
    """The shortest of two runs, or of as many as a twentieth of a second has room for."""
    found, until = [], time.perf_counter() + 0.05
    while len(found) < 2 or time.perf_counter() < until:
        started = time.perf_counter()
        what()
        found.append(time.perf_counter() - started)
    return min(found)
