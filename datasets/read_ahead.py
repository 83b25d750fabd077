"""Batches that threads read, some ahead of whoever takes them, straight into memory that is used again.

Shapes: B batch, K dates of a sample, V variables, H latitudes, W longitudes.
"""

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from archives.archive import Archive
from archives.field_chunks import Task
from archives.files import is_url
from datasets.field_dataset import FieldDataset

Copy = tuple[np.ndarray, np.ndarray]  # from, to
READ_HERE = "SingleProcessRead"  # in a trace, as torch's loader calls it when it has no processes
BUNDLE = 2**21  # bytes that a thread fills in one go: handing over a task costs as much as decoding 100 kB
FREE = 3  # references to an array that nobody uses: of the list, of the loop, of the call that counts them


class Buffers:
    """Arrays that are given out again as soon as nobody refers to them, nor to a tensor or view of them.

    New memory has to be cleared by the system, page by page, at the speed of decoding.
    """

    def __init__(self, pin: bool) -> None:
        self.pin, self.kept = pin, []

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, Tensor]:
        """The same memory as an array and as a tensor."""
        if self.pin:  # torch keeps pinned memory itself, until copies from it have ended
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=True)
            return tensor.numpy(), tensor
        array = self._free(shape, dtype)
        return array, torch.from_numpy(array)

    def _free(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        for array in self.kept:
            if array.shape == shape and array.dtype == dtype and sys.getrefcount(array) == FREE:
                return array
        self.kept = [array for array in self.kept if array.shape == shape]  # a last, smaller batch passes
        self.kept.append(np.empty(shape, dtype))
        return self.kept[-1]


@dataclass
class Unfinished:
    """A batch that is being read."""

    fields: Tensor
    times: Tensor
    places: dict[int, np.ndarray]  # date -> (V, H, W)
    copies: list[Copy]  # of states that are in this batch already, or in the one before
    reading: list[Future[None]]


class ThreadedLoader:
    """Iterated, it gives the sampler's batches in order: fields (B, K, V, H, W) as they are stored, and first
    dates (B,), seconds since 1970.

    With no threads a batch is read when it is taken. A state that several samples have is decoded once.
    """

    def __init__(
        self,
        dataset: FieldDataset,
        sampler: Iterable[list[int]],
        num_threads: int,
        ahead: int,
        pin: bool,
    ) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.ahead, self.buffers = ahead if num_threads else 0, Buffers(pin)
        self.pool = ThreadPoolExecutor(num_threads, "loader") if num_threads else None
        field = math.prod(dataset.field_shape[1:]) * dataset.dtype.itemsize
        # Behind a URL it is waiting that takes time: as many requests at once as there are threads.
        behind_url = isinstance(dataset.archive, Archive) and is_url(dataset.archive.path)
        self.together = 1 if behind_url else max(1, BUNDLE // field)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        waiting: deque[Unfinished] = deque()
        places: dict[int, np.ndarray] = {}
        try:
            for indices in self.sampler:
                waiting.append(self._begin(indices, places))
                places = waiting[-1].places
                if len(waiting) > self.ahead:
                    yield self._end(waiting.popleft())
            while waiting:
                yield self._end(waiting.popleft())
        finally:  # whoever takes them goes elsewhere
            for batch in waiting:
                for future in batch.reading:
                    future.cancel()
            self.buffers.kept.clear()  # the next validation is an hour away

    def _begin(self, indices: Sequence[int], before: dict[int, np.ndarray]) -> Unfinished:
        dates = self.dataset.samples[list(indices)]  # (B, K)
        shape = (*dates.shape, *self.dataset.field_shape)
        array, tensor = self.buffers.take(shape, self.dataset.dtype)
        batch = Unfinished(tensor, self.dataset.seconds(dates), {}, [], [])
        for date, place in zip(dates.flat, array.reshape(dates.size, *shape[2:]), strict=True):
            known = batch.places.get(date, before.get(date)) if date >= 0 else None
            if known is not None:
                batch.copies.append((known, place))
            else:
                tasks = list(self.dataset.reading(int(date), place))
                bundles = (tasks[i : i + self.together] for i in range(0, len(tasks), self.together))
                batch.reading += map(self._start, bundles)
            batch.places.setdefault(int(date), place)
        return batch

    def _start(self, tasks: Sequence[Task]) -> Future[None]:
        if self.pool:
            return self.pool.submit(_do_all, tasks)
        done: Future[None] = Future()
        with record_function(READ_HERE):
            _do_all(tasks)
        done.set_result(None)
        return done

    def _end(self, batch: Unfinished) -> tuple[Tensor, Tensor]:
        """DataError: a field cannot be read."""
        for future in batch.reading:
            future.result()
        for known, place in batch.copies:
            place[...] = known
        batch.copies.clear()
        return batch.fields, batch.times


def _do_all(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task()
