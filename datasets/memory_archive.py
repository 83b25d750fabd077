"""Fields that are small enough to be read once and kept."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from archives.archive import Archive
from archives.field_chunks import Task
from datasets.statistics import stream


class MemoryArchive:
    """Some dates of an archive read once into memory, under the archive's own indices."""

    in_memory = True

    def __init__(self, archive: Archive, variables: Sequence[str], dates: np.ndarray) -> None:
        self.times, self.variables, self.grid = archive.times, list(variables), archive.grid
        self.shown_units = archive.shown_units
        self.files_state, self.file_marks = archive.files_state, archive.file_marks
        self.rows = np.full(len(archive.times), -1)
        self.rows[dates] = np.arange(len(dates))
        self.fields = np.empty((len(dates), len(variables), *archive.grid.shape), np.float32)
        for row, (_, field) in enumerate(stream(archive, variables, dates)):
            self.fields[row] = field

    def read(self, index: int, variables: Sequence[str]) -> np.ndarray:
        """(V, H, W) float32."""
        return self.read_block(index, index + 1, variables)[0]

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        """(n, V, H, W) float32."""
        assert list(variables) == self.variables and self.rows[start] >= 0
        return self.fields[self.rows[start] : self.rows[start] + stop - start]

    def reading(self, start: int, out: np.ndarray, variables: Sequence[str]) -> Iterator[Task]:
        """What fills `out` (n, V, H, W) with the dates from `start` on."""
        yield partial(np.copyto, out, self.read_block(start, start + len(out), variables))

    def by_threads(self, variables: Sequence[str]) -> bool:
        """Threads read it well."""
        return True

    def float16_packing(self, variables: Sequence[str]) -> None:
        """It holds physical values."""


def cache_if_small(
    archive: Archive, variables: Sequence[str], dates: np.ndarray, limit_gib: float
) -> Archive | MemoryArchive:
    """The archive itself, or its dates in memory where they take at most `limit_gib`."""
    size = 4 * len(dates) * len(variables) * archive.grid.shape[0] * archive.grid.shape[1]
    return MemoryArchive(archive, variables, dates) if size <= limit_gib * 2**30 else archive
