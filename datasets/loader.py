"""Samplers, which are pure functions of (seed, sample), and loaders of batches.

Stores that datasets.convert writes, and fields in memory, are read by threads; every other source by
torchdata's StatefulDataLoader in spawned processes. Shapes: B batch, K dates of a sample, V variables, H
latitudes, W longitudes.
"""

import math
import os
import shutil
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from datasets.field_dataset import FieldDataset
from datasets.options import PREFETCH
from datasets.store_reader import Task
from errors import UserError, handle_stop_signals

NEVER = 2**62
BUNDLE = 2**23  # bytes per task of a thread: submitting a task costs as much as decoding 100 kB
# torchdata 0.11, the newest, calls a function that torch 2.13 deprecates, once per loader.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


class TrainSampler(Sampler[list[int]]):
    """Endless local batches. The n-th sample of a run is a function of (seed, n); ranks share each batch.

    Samples are drawn without replacement, epoch after epoch, and a batch may contain two epochs.
    """

    def __init__(
        self, num_samples: int, seed: int, local_batch_size: int, accumulation: int, rank: int, num_ranks: int
    ) -> None:
        self.num_samples, self.seed, self.local_batch_size = num_samples, seed, local_batch_size
        self.accumulation, self.rank, self.num_ranks = accumulation, rank, num_ranks
        self.start, self.shuffle = 0, 0  # samples of earlier steps; number of the order
        self._order: tuple[tuple[int, int], Tensor] = ((-1, -1), torch.empty(0))

    def __iter__(self) -> Iterator[list[int]]:
        start = self.start
        while True:
            for micro in range(self.accumulation):
                yield self.local_batch(start, micro)
            start += self.accumulation * self.num_ranks * self.local_batch_size

    def local_batch(self, start: int, micro: int) -> list[int]:
        """Return this rank's micro-batch number `micro` of the global batch after `start` samples."""
        first = start + (micro * self.num_ranks + self.rank) * self.local_batch_size
        return [self.sample(position) for position in range(first, first + self.local_batch_size)]

    def sample(self, position: int) -> int:
        """Return the sample at a position in the endless sequence of shuffled epochs."""
        epoch, offset = divmod(position, self.num_samples)
        if self._order[0] != (self.shuffle, epoch):
            seed = self.seed * 1_000_003 + self.shuffle * 998_244_353 + epoch
            generator = torch.Generator().manual_seed(seed)
            self._order = (self.shuffle, epoch), torch.randperm(self.num_samples, generator=generator)
        return int(self._order[1][offset])


class EvaluationSampler(Sampler[list[int]]):
    """Every sample once: rank r gets r, r + R, and so on.

    All ranks yield the same number of samples, so that none waits; missing ones are -1 (the last sample).
    """

    def __init__(self, num_samples: int, local_batch_size: int, rank: int, num_ranks: int) -> None:
        rounds = -(-num_samples // num_ranks)
        own = range(rank, rounds * num_ranks, num_ranks)
        samples = [sample if sample < num_samples else -1 for sample in own]
        self.batches = [samples[i : i + local_batch_size] for i in range(0, rounds, local_batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Unfinished(NamedTuple):
    """A batch that is being read."""

    fields: Tensor
    times: Tensor
    reads: list[Future[None]]
    copies: list[tuple[np.ndarray, np.ndarray]]  # (source, target) of states that the batch has twice


def take_memory(free: deque[np.ndarray], shape: tuple[int, ...], dtype: np.dtype, pin: bool) -> Tensor:
    """Return a tensor in memory from `free`, to which the memory returns when no tensor or view uses it.

    New memory for each batch would cost as much in page faults as decoding it.
    """
    if pin:  # torch reuses pinned memory itself, after copies from it have ended
        return torch.empty(shape, dtype=getattr(torch, dtype.name), pin_memory=True)
    memory = free.pop() if free else None
    if memory is None or len(memory) < shape[0]:
        memory = np.empty(shape, dtype)  # of huge pages
    owner = memory[: shape[0]]  # referenced by the storage of the tensor
    weakref.finalize(owner, free.append, memory).atexit = False
    return torch.from_numpy(owner)


class ThreadedLoader:
    """The sampler's batches in order: fields (B, K, V, H, W) as stored, first dates (B,), seconds since 1970.

    With no threads a batch is read when it is requested. A state that several samples have is decoded once.
    """

    def __init__(
        self, dataset: FieldDataset, sampler: Iterable[list[int]], num_threads: int, prefetch: int, pin: bool
    ) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.prefetch, self.pin = prefetch if num_threads else 0, pin
        self.pool = ThreadPoolExecutor(num_threads, "loader") if num_threads else None
        self.tasks_at_once = max(1, BUNDLE // (math.prod(dataset.field_shape[1:]) * dataset.dtype.itemsize))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        unfinished: deque[Unfinished] = deque()
        free: deque[np.ndarray] = deque()  # memory of batches that nothing uses any more
        try:
            for indices in self.sampler:
                unfinished.append(self._start(indices, free))
                if len(unfinished) > self.prefetch:
                    yield self._finish(unfinished.popleft())
            while unfinished:
                yield self._finish(unfinished.popleft())
        finally:  # the consumer has stopped
            for future in (future for batch in unfinished for future in batch.reads):
                future.cancel()

    def _start(self, indices: Sequence[int], free: deque[np.ndarray]) -> Unfinished:
        dates = self.dataset.samples[list(indices)]  # (B, K)
        shape = (*dates.shape, *self.dataset.field_shape)
        tensor = take_memory(free, shape, self.dataset.dtype, self.pin)
        places, first = tensor.numpy().reshape(dates.size, *shape[2:]), dict[int, np.ndarray]()
        batch = Unfinished(tensor, self.dataset.seconds(dates), [], [])
        for date, place in zip(dates.flat, places, strict=True):
            if date in first:
                batch.copies.append((first[date], place))
                continue
            first[date] = place
            tasks = list(self.dataset.tasks(int(date), place))
            for i in range(0, len(tasks), self.tasks_at_once):
                batch.reads.append(self._submit(tasks[i : i + self.tasks_at_once]))
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
        self.dataset.drop_incomplete(batch.fields.numpy())
        return batch.fields, batch.times


def _run_all(tasks: Sequence[Task]) -> None:
    for task in tasks:
        task()


class TrainLoader:
    """Endless batches from any sample on. Its state is a number of samples: resuming needs no replay."""

    def __init__(self, dataset: FieldDataset, sampler: TrainSampler, num_workers: int, pin: bool) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.build = partial(build_loader, num_workers=num_workers, pin=pin)
        self.loader, self.num_dates = None, 0

    def iterate(
        self, start: int, shuffle: int = 0, num_dates: int = 2, accumulation: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield micro-batches after `start` samples, `accumulation` a step, and their first dates (B,).

        Fields (B, num_dates, V, H, W) become physical by `dataset.unpack`. shuffle: number of the order of
        samples, another one after a roll-back.
        """
        self.sampler.start, self.sampler.shuffle, self.sampler.accumulation = start, shuffle, accumulation
        if self.loader is None or num_dates != self.num_dates:
            self.loader, self.num_dates = None, num_dates  # the processes of the last one end
            dataset = self.dataset.with_dates(self.dataset.samples[:, :num_dates])
            self.loader = self.build(dataset, self.sampler)
        return unwrap_errors(self.loader)


def build_loader(
    dataset: FieldDataset,
    sampler: Sampler[list[int]],
    num_workers: int = 0,
    prefetch: int = PREFETCH,
    pin: bool = False,
) -> ThreadedLoader | StatefulDataLoader:
    """Return a loader of whole batches: by threads if they read side by side, else by processes; by this
    thread with `num_workers` 0.
    """
    if dataset.by_threads:
        return ThreadedLoader(dataset, sampler, num_workers, prefetch, pin)
    fits = not num_workers or _fits_shared_memory(dataset, sampler, num_workers * (prefetch + 1))
    workers: dict[str, Any] = {
        "prefetch_factor": prefetch,
        "multiprocessing_context": "spawn",  # zarr's event loop and HDF5's locks do not survive a fork
        "worker_init_fn": ignore_stop_signals,
        "persistent_workers": True,  # a start takes seconds, and there is one at every validation
    }
    return StatefulDataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_return_batch if fits else _to_arrays,
        pin_memory=pin,
        # Its own generator: every start would draw from torch's, and a resumed run would not be bit-exact.
        generator=torch.Generator(),
        # The default takes a snapshot of every worker at every step; the sampler needs only a sample number.
        snapshot_every_n_steps=NEVER,
        **(workers if num_workers else {}),
    )


def unwrap_errors(batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches as tensors; a DataError of a process is raised without torch's traceback around it."""
    try:
        for fields, times in batches:
            yield torch.as_tensor(fields), torch.as_tensor(times)
    except UserError as error:
        lines = str(error).strip().splitlines()
        if not lines[0].startswith("Caught"):
            raise
        raise type(error)(lines[-1].partition(": ")[2]) from None
    except (ConnectionError, EOFError) as error:  # the process died while sending a batch
        raise RuntimeError(f"DataLoader worker exited unexpectedly ({type(error).__name__})") from None


def ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals, which a terminal or Slurm sends to all processes: a save may need more batches.

    Except SIGTERM, with which the trainer ends its loader processes.
    """
    handle_stop_signals(signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _return_batch(batch: Any) -> Any:
    return batch  # FieldDataset has made a batch of it already


def _to_arrays(batch: Any) -> Any:
    return tuple(part.numpy() for part in batch)  # through a pipe: slower, but needs no shared memory


def _fits_shared_memory(dataset: FieldDataset, sampler: Any, num_batches: int) -> bool:
    """Return True if the batches that the loader processes of this host read ahead fit in /dev/shm."""
    samples = getattr(sampler, "local_batch_size", 0) or len(sampler.batches[0])
    batch = 4 * samples * dataset.samples.shape[1] * math.prod(dataset.field_shape)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ranks * batch * num_batches < shutil.disk_usage("/dev/shm").free
