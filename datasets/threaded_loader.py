"""Batches that threads read ahead, into memory that is used again.

Shapes: B batch, K dates of a sample, V variables, H latitudes, W longitudes.
"""

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from datasets.field_dataset import FieldDataset
from datasets.store_reader import Task

BUNDLE = 2**21  # bytes that a thread fills at once: handing over a task costs as much as decoding 100 kB


class _Lease(np.ndarray):
    """Memory of a pool while a tensor uses it: unlike a plain array it can have a finalizer."""


class Buffers:
    """Memory of batches that is used again; new memory is cleared by the system, as slowly as decoding is.

    A tensor owns its memory through its storage: torch drops the array when the last view of the tensor is
    gone, and the finalizer of that array returns the memory to the pool.
    """

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        self.free: defaultdict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, Tensor]:
        """Return memory as an array, for writing until the tensor is given away, and as a tensor."""
        if self.pin:  # torch keeps pinned memory itself until copies from it have ended
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=True)
            return tensor.numpy(), tensor
        free = self.free[shape, dtype]
        memory = free.pop() if free else np.empty(shape, dtype)
        lease = memory.view(_Lease)
        weakref.finalize(lease, free.append, memory).atexit = False
        return memory, torch.from_numpy(lease)


class Unfinished(NamedTuple):
    """A batch that is being read."""

    fields: Tensor
    times: Tensor
    reads: list[Future[None]]
    copies: list[tuple[np.ndarray, np.ndarray]]  # (source, target) of states that the batch has twice


class ThreadedLoader:
    """The sampler's batches in order: fields (B, K, V, H, W) as stored, first dates (B,), seconds since 1970.

    With no threads a batch is read when it is requested. A state that several samples have is decoded once.
    """

    def __init__(
        self, dataset: FieldDataset, sampler: Iterable[list[int]], num_threads: int, prefetch: int, pin: bool
    ) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.prefetch, self.buffers = prefetch if num_threads else 0, Buffers(pin)
        self.pool = ThreadPoolExecutor(num_threads, "loader") if num_threads else None
        self.tasks_at_once = max(1, BUNDLE // (math.prod(dataset.field_shape[1:]) * dataset.dtype.itemsize))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        unfinished: deque[Unfinished] = deque()
        try:
            for indices in self.sampler:
                unfinished.append(self._start(indices))
                if len(unfinished) > self.prefetch:
                    yield self._finish(unfinished.popleft())
            while unfinished:
                yield self._finish(unfinished.popleft())
        finally:  # the consumer has left
            for future in (future for batch in unfinished for future in batch.reads):
                future.cancel()
            self.buffers.free.clear()  # the next validation may be an hour away

    def _start(self, indices: Sequence[int]) -> Unfinished:
        dates = self.dataset.samples[list(indices)]  # (B, K)
        array, tensor = self.buffers.take((*dates.shape, *self.dataset.field_shape), self.dataset.dtype)
        batch, places = Unfinished(tensor, self.dataset.seconds(dates), [], []), dict[int, np.ndarray]()
        for date, place in zip(dates.flat, array.reshape(dates.size, *array.shape[2:]), strict=True):
            if date in places:
                batch.copies.append((places[date], place))
                continue
            places[date] = place
            tasks = list(self.dataset.tasks(int(date), place))
            for first in range(0, len(tasks), self.tasks_at_once):
                batch.reads.append(self._submit(tasks[first : first + self.tasks_at_once]))
        return batch

    def _submit(self, tasks: Sequence[Task]) -> Future[None]:
        if self.pool:
            return self.pool.submit(_run_all, tasks)
        done: Future[None] = Future()
        with record_function("SingleProcessRead"):  # as torch's loader calls it when it has no processes
            _run_all(tasks)
        done.set_result(None)
        return done

    def _finish(self, batch: Unfinished) -> tuple[Tensor, Tensor]:
        """Wait for a batch. Raises DataError."""
        for future in batch.reads:
            future.result()
        for source, target in batch.copies:
            target[...] = source
        return batch.fields, batch.times


def _run_all(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task()
