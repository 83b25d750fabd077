"""Samples that several ranks need at once: each reads some of the variables, and gets the others from them.

Tensor, context and pipeline parallel ranks, and those that have a tile each, work on the same samples: each
for itself would read and decode the same chunks. Shapes: B batch, K dates of a sample, V variables,
H latitudes, W longitudes.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from archives.archive import Archive
from datasets.field_dataset import FieldDataset


class SharedDataset(FieldDataset):
    """The same samples on all ranks of a group, which unpack each batch together.

    A rank reads its share of the variables, and at most one chunk more.
    """

    def __init__(
        self, archive: Archive, variables: Sequence[str], samples: np.ndarray, group: dist.ProcessGroup
    ) -> None:
        """The archive's variables are to be read by threads."""
        super().__init__(archive, variables, samples)
        assert self.by_threads
        together = archive.stored_together(variables, in_chunks=True)
        self.group, self.parts = group, even_parts(together, group.size())
        self.own = self.parts[group.rank()]
        self.field_shape = (len(self.own), *archive.grid.shape)
        gathered = [name for part in self.parts for name in part]
        self.order = [gathered.index(name) for name in self.variables]

    def unpack(self, fields: Tensor) -> Tensor:
        """This rank's fields (B, K, own V, H, W) as they are stored -> those of all, physical, float32."""
        return super().unpack(self._gather(fields))

    def _gather(self, fields: Tensor) -> Tensor:
        most = max(map(len, self.parts))
        padded = fields.new_zeros((*fields.shape[:2], most, *fields.shape[3:]))
        padded[:, :, : fields.shape[2]] = fields
        gathered = [torch.empty_like(padded) for _ in self.parts]
        dist.all_gather(gathered, padded, group=self.group)
        pieces = [piece[:, :, : len(part)] for piece, part in zip(gathered, self.parts, strict=True)]
        together = torch.cat(pieces, dim=2)
        return together if self.order == sorted(self.order) else together[:, :, self.order]


def even_parts(groups: Sequence[Sequence[str]], count: int) -> list[list[str]]:
    """Names in `count` parts: no part has more than its share and one group, none of which is divided."""
    parts: list[list[str]] = [[] for _ in range(count)]
    before, total = 0, sum(map(len, groups))
    for group in groups:
        middle = before + len(group) / 2
        parts[int(middle * count / total)].extend(group)
        before += len(group)
    return parts
