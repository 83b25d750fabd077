"""Samples of a period, and the batches of them that a run reads, in an order that is a function of the seed.

A sample lists the dates of its window (the `data.history` input states of a model, newest first), then the
dates that follow. Its first date is the initial time of a forecast. For a model, a window is one field with
h V channels.

Shapes: B batch, K dates of a sample, h states of a window, R states that follow, V variables, H latitudes,
W longitudes.
"""

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import count
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.nodes import IterableWrapper, ParallelMapper

from datasets.archive import Archive, TrainingStore
from errors import UserError

logger = logging.getLogger("rossby")
NEVER = 2**62  # batches between two snapshots of torchdata: the state of a loader is a number of samples


def split_sample(fields: Tensor, history: int) -> tuple[Tensor, Tensor]:
    """Split fields (B, h + R, V, H, W) into the window (B, h V, H, W) and what follows (B, R, V, H, W)."""
    return fields[:, :history].flatten(1, 2), fields[:, history:]


class FieldDataset(Dataset):
    """Samples of K dates each, read as whole batches. Indices may be negative; a date of -1 is missing.

    If a window lacks a variable, all later states of the sample are set to NaN, so that it counts in no
    loss and no score. Fields have the stored type, float16 where all variables of a training store have it;
    `unpack` converts them to physical values on any device.
    """

    def __init__(
        self, archive: Archive, variables: Sequence[str], samples: np.ndarray, history: int = 1
    ) -> None:
        """samples (n, K): indices of dates, the first `history` of which are the window."""
        self.archive, self.variables, self.samples, self.history = archive, list(variables), samples, history
        self.field_shape = (len(self.variables), *archive.grid.shape)
        # A store's numbers stay as they are if all are float16; scales and offsets (V, 1, 1) float32.
        is_store = isinstance(archive, TrainingStore)
        fields = [archive.find(name)[0][0] for name in self.variables if is_store and archive.find(name)]
        is_packed = bool(fields) and all(field.raw.dtype == np.float16 for field in fields)
        self.dtype, self.scale, self.offset = np.dtype("float16" if is_packed else "float32"), None, None
        if is_packed:
            packing = [(field.decoding.scale, field.decoding.offset) for field in fields]
            self.scale, self.offset = torch.tensor(packing, dtype=torch.float32).view(-1, 2, 1, 1).unbind(1)
        self.free: deque[np.ndarray] = deque()  # memory of batches that nothing uses any more

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return physical fields (B, K, V, H, W), NaN where missing, and first dates (B,), in seconds."""
        fields, times = self.read(indices)
        return self.unpack(fields), times

    def read(self, indices: Sequence[int], pin: bool = False) -> tuple[Tensor, Tensor]:
        """Return fields (B, K, V, H, W) as stored, and first dates (B,), seconds since 1970; threads may call
        it. Memory returns to `free` when no tensor or view uses it: new memory for each batch would cost as
        much in page faults as decoding it.
        """
        dates = self.samples[list(indices)]
        shape = (*dates.shape, *self.field_shape)
        if pin:  # torch reuses pinned memory itself, after copies from it have ended
            fields = torch.empty(shape, dtype=getattr(torch, self.dtype.name), pin_memory=True)
        else:
            memory = None
            with suppress(IndexError):
                memory = self.free.pop()
            if memory is None or len(memory) < shape[0]:
                memory = np.empty(shape, self.dtype)  # of huge pages
            owner = memory[: shape[0]]  # referenced by the storage of the tensor
            weakref.finalize(owner, self.free.append, memory).atexit = False
            fields = torch.from_numpy(owner)
        self.fill(dates, fields.numpy())
        times = self.archive.times[dates[:, 0]].astype("datetime64[s]").astype(np.int64)
        return fields, torch.from_numpy(times)

    def fill(self, dates: np.ndarray, batch: np.ndarray) -> None:
        """Fill `batch` (B, K, V, H, W) with stored fields of dates (B, K), NaN for -1. Raises DataError."""
        first: dict[int, np.ndarray] = {}
        places = batch.reshape(dates.size, *self.field_shape)
        for date, place in zip(dates.ravel().tolist(), places, strict=True):
            if date < 0:
                place.fill(np.nan)
            elif date in first:
                place[...] = first[date]
            else:
                self.archive.fill(date, self.variables, place)
                first[date] = place
        for sample in batch:
            window = sample[: self.history]
            some = np.argwhere(np.isnan(window[..., 0, 0]))  # of most fields the first cell has a value
            if any(np.isnan(window[state, variable]).all() for state, variable in some):
                sample[self.history :] = np.nan

    def with_dates(self, samples: np.ndarray) -> Self:
        """Return a dataset of other samples (n, K) of the same archive."""
        other = copy(self)
        other.samples, other.free = samples, deque()
        return other

    def unpack(self, fields: Tensor) -> Tensor:
        """Return physical values, float32, of (..., V, H, W) of the stored type, on the same device."""
        if self.scale is None or self.offset is None or fields.dtype != torch.float16:
            return fields
        if self.scale.device != fields.device:  # once: a copy from pageable memory waits for the device
            self.scale, self.offset = self.scale.to(fields.device), self.offset.to(fields.device)
        return torch.addcmul(self.offset, fields.float(), self.scale)


class LaterFields:
    """Known fields of later dates of a forecast (`Normalizer.known`), read when the forecast reaches them."""

    def __init__(self, archive: Archive, variables: Sequence[str]) -> None:
        self.archive, self.variables, self.missing = archive, list(variables), np.datetime64("NaT", "s")

    def __call__(self, step: int, times: Tensor) -> Tensor:
        """Return (B, F, H, W) float32 of `times` (B,), seconds since 1970, on their device; NaN: missing."""
        shape = (len(times), len(self.variables), *self.archive.grid.shape)
        fields, dates = np.full(shape, np.nan, np.float32), times.cpu().numpy().astype("datetime64[s]")
        for date in np.unique(dates):
            position = np.flatnonzero(self.archive.times == date)
            if len(position):
                fields[dates == date] = self.archive.read(int(position[0]), self.variables)
            elif np.isnat(self.missing):
                self.missing, names = date, ", ".join(self.variables)
                logger.warning(f"no {names} at {date} in the data: the values of the step before are kept")
        return torch.from_numpy(fields).to(times.device)


class TrainSampler:
    """Endless micro-batches: the n-th sample of a run is a function of (seed, n), and ranks share each batch.
    Samples are drawn without replacement, epoch after epoch, and a batch may contain two epochs.
    """

    def __init__(self, num_samples: int, seed: int, local_batch_size: int, rank: int, num_ranks: int) -> None:
        self.num_samples, self.seed, self.local_batch_size = num_samples, seed, local_batch_size
        self.rank, self.num_ranks = rank, num_ranks
        self.start, self.shuffle = 0, 0
        self._order: tuple[tuple[int, int], Tensor] = ((-1, -1), torch.empty(0))

    def at(self, start: int, shuffle: int = 0) -> Self:
        """Return the sampler after `start` samples, in an order of this number: another after a roll-back."""
        other = copy(self)
        other.start, other.shuffle = start, shuffle
        return other

    def __iter__(self) -> Iterator[list[int]]:
        for micro in count():
            first = self.start + (micro * self.num_ranks + self.rank) * self.local_batch_size
            yield [self.sample(position) for position in range(first, first + self.local_batch_size)]

    def sample(self, position: int) -> int:
        """Return the sample at a position in the endless sequence of shuffled epochs."""
        epoch, offset = divmod(position, self.num_samples)
        if self._order[0] != (self.shuffle, epoch):
            seed = self.seed * 1_000_003 + self.shuffle * 998_244_353 + epoch
            generator = torch.Generator().manual_seed(seed)
            self._order = (self.shuffle, epoch), torch.randperm(self.num_samples, generator=generator)
        return int(self._order[1][offset])


def evaluation_batches(num_samples: int, local_batch_size: int, rank: int, num_ranks: int) -> list[list[int]]:
    """Return batches of every sample once: rank r gets r, r + R, ... and all get as many, -1 at the end."""
    rounds = -(-num_samples // num_ranks)
    samples = [i if i < num_samples else -1 for i in range(rank, rounds * num_ranks, num_ranks)]
    return [samples[i : i + local_batch_size] for i in range(0, rounds, local_batch_size)]


class Loader:
    """The batches of a sampler in order, as `FieldDataset.read` returns them, read ahead by threads."""

    def __init__(
        self, dataset: FieldDataset, sampler: Iterable[list[int]], num_threads: int = 0, pin: bool = False
    ) -> None:
        self.nodes = ParallelMapper(
            IterableWrapper(sampler),
            partial(dataset.read, pin=pin),
            num_threads,  # each reads a batch, and as many wait; 0: read when it is needed
            in_order=True,
            method="thread",
            snapshot_frequency=NEVER,
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches. Raises DataError."""
        self.nodes.reset()
        try:
            while (batch := next(self.nodes, None)) is not None:
                yield batch
        except UserError as error:  # which torchdata wraps: the last line is "DataError: text"
            lines = str(error).strip().splitlines()
            if not lines[0].startswith("Caught"):
                raise
            raise type(error)(lines[-1].partition(": ")[2]) from None
