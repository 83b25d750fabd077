"""Samples of a period: which dates each has, and how they are read.

Shapes: B batch, K dates of a sample (datasets/window.py), V variables, H latitudes, W longitudes.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from archives.archive import Archive
from archives.field_chunks import Task
from datasets.memory_archive import MemoryArchive


class FieldDataset(Dataset):
    """Samples of K dates each, read as whole batches. Negative indices count from the end; a date of -1 is
    not there.

    Where threads read them, fields come as they are stored: `unpack` makes physical values of them, wherever
    they are by then.
    """

    def __init__(
        self, archive: Archive | MemoryArchive, variables: Sequence[str], samples: np.ndarray
    ) -> None:
        self.archive, self.variables, self.samples = archive, list(variables), samples  # (n, K) indices
        self.own = self.variables  # that are read here
        self.field_shape = (len(self.own), *archive.grid.shape)
        self.by_threads = archive.by_threads(self.variables)
        packing = archive.float16_packing(self.variables) if self.by_threads else None
        self.dtype = np.dtype("float16" if packing else "float32")
        columns = [torch.from_numpy(numbers).view(-1, 1, 1) for numbers in packing or ()]
        self.scale, self.offset = columns or (None, None)  # (V, 1, 1) float32

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Physical fields (B, K, V, H, W) float32, NaN where missing, and first dates (B,), seconds since
        1970.
        """
        dates = self.samples[list(indices)]
        batch = np.stack([[self._read(int(i)) for i in row] for row in dates])
        return torch.from_numpy(batch), self.seconds(dates)

    def first_dates(self, number: int) -> Self:
        """The same samples without their dates after the first `number`."""
        return self.with_dates(self.samples[:, :number])

    def with_dates(self, samples: np.ndarray) -> Self:
        """Others of the same archive, read in the same way: dates (n, K)."""
        other = copy(self)
        other.samples = samples
        return other

    def seconds(self, dates: np.ndarray) -> Tensor:
        """(B,) since 1970, of the first of each row of `dates` (B, K)."""
        return torch.from_numpy(self.archive.times[dates[:, 0]].astype("datetime64[s]").astype(np.int64))

    def reading(self, date: int, out: np.ndarray) -> Iterator[Task]:
        """What fills `out` (own V, H, W) with a date's fields as they are stored; NaN for a date that is not
        there.
        """
        if date < 0:
            out.fill(np.nan)
        else:
            yield from self.archive.reading(date, out[None], self.own)

    def unpack(self, fields: Tensor) -> Tensor:
        """(..., V, H, W) as they are stored -> physical values, float32, on the same device."""
        if self.scale is None or self.offset is None or fields.dtype != torch.float16:
            return fields
        scale, offset = self.scale.to(fields.device), self.offset.to(fields.device)
        return torch.addcmul(offset, fields.float(), scale)

    def _read(self, date: int) -> np.ndarray:
        """(V, H, W); NaN for a date that is not there."""
        if date >= 0:
            return self.archive.read(date, self.variables)
        return np.full(self.field_shape, np.nan, np.float32)
