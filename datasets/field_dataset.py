"""Samples of a period: the dates of each, and how they are read.

A sample lists the dates of its window (the `data.history` input states of a model, newest first), then the
dates that follow. Its first date is the initial time of a forecast. For a model, a window is one field with
h V channels.

Shapes: B batch, K dates of a sample, h states of a window, R states that follow, V variables, H latitudes,
W longitudes.
"""

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from datasets.archive import Archive

logger = logging.getLogger("rossby")


def window_steps(history: int) -> range:
    """Return the times of the states of a window in steps of the model: 0, -1, ..."""
    return range(0, -history, -1)


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
        packing = archive.float16_packing(self.variables)
        self.dtype = np.dtype("float16" if packing else "float32")
        columns = [torch.from_numpy(numbers).view(-1, 1, 1) for numbers in packing or ()]
        self.scale, self.offset = columns or (None, None)  # (V, 1, 1) float32
        self.free: deque[np.ndarray] = deque()  # memory of batches that nothing uses any more

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return physical fields (B, K, V, H, W), NaN where missing, and first dates (B,), in seconds."""
        fields, times = self.read(indices)
        return self.unpack(fields), times

    def read(self, indices: Sequence[int], pin: bool = False) -> tuple[Tensor, Tensor]:
        """Return fields (B, K, V, H, W) as stored, and first dates (B,), seconds since 1970.

        Threads may call it at once. Memory returns to `free` when no tensor or view uses it: new memory for
        each batch would cost as much in page faults as decoding it.
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
        """Fill `batch` (B, K, V, H, W) with fields as stored of dates (B, K); NaN for a date of -1.

        A state that several samples have is read once. Raises DataError.
        """
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
        """Return (B, F, H, W) float32 of `times` (B,), seconds since 1970, on their device; NaN for dates
        that the archive lacks.
        """
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
