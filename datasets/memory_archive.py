"""Fields that are small enough to be read once and kept, in memory that loader processes share."""

import math
import os
import weakref
from collections.abc import Sequence
from mmap import mmap
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from archives.archive import Archive
from datasets.statistics import stream


class SharedFields:
    """Numbers that loader processes map instead of copying them: a memfd, which is memory without a name.

    Not /dev/shm: a container keeps that at 64 MB, and what dies leaves its files there.
    """

    def __init__(self, *shape: int) -> None:
        self._map(os.memfd_create("rossby-fields"), shape)

    def _map(self, descriptor: int, shape: tuple[int, ...]) -> None:
        self.descriptor, self.shape, size = descriptor, shape, 4 * math.prod(shape)
        os.ftruncate(descriptor, max(size, 1))
        weakref.finalize(self, os.close, descriptor)
        self.values = np.frombuffer(mmap(descriptor, max(size, 1)), np.float32, math.prod(shape)).reshape(
            shape
        )

    def __getstate__(self) -> tuple[Any, tuple[int, ...]]:
        return DupFd(self.descriptor), self.shape

    def __setstate__(self, state: tuple[Any, tuple[int, ...]]) -> None:
        self._map(state[0].detach(), state[1])


class MemoryArchive:
    """Some dates of an archive read once into shared memory, under the archive's own indices."""

    in_memory = True

    def __init__(self, archive: Archive, variables: Sequence[str], dates: np.ndarray) -> None:
        self.times, self.variables, self.grid = archive.times, list(variables), archive.grid
        self.shown_units = archive.shown_units
        self.files_state, self.file_marks = archive.files_state, archive.file_marks
        self.rows = np.full(len(archive.times), -1)
        self.rows[dates] = np.arange(len(dates))
        self.fields = SharedFields(len(dates), len(variables), *archive.grid.shape)
        for row, (_, field) in enumerate(stream(archive, variables, dates)):
            self.fields.values[row] = field

    def read(self, index: int, variables: Sequence[str]) -> np.ndarray:
        """(V, H, W) float32."""
        return self.read_block(index, index + 1, variables)[0]

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray:
        """(n, V, H, W) float32."""
        assert list(variables) == self.variables and self.rows[start] >= 0
        return self.fields.values[self.rows[start] : self.rows[start] + stop - start]


def cache_if_small(
    archive: Archive, variables: Sequence[str], dates: np.ndarray, limit_gib: float
) -> Archive | MemoryArchive:
    """The archive itself, or its dates in memory where they take at most `limit_gib`."""
    size = 4 * len(dates) * len(variables) * archive.grid.shape[0] * archive.grid.shape[1]
    return MemoryArchive(archive, variables, dates) if size <= limit_gib * 2**30 else archive
