"""Numbers of whole parameters, squares of their norms above all, from what each rank has of them."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class SharedSums:
    """Adds up, over all ranks, numbers that each has computed from its parts of parameters.

    One all-reduce for all parameters, of all ranks: of replicas too, which then have the same bits whatever
    machine they run on. What several ranks hold alike is counted once.
    """

    def __init__(
        self, names: Sequence[str], parameters: Mapping[str, nn.Parameter], holders: int, device: torch.device
    ) -> None:
        """names: of the whole model, the same on every rank; parameters: those that this rank updates;
        holders: ranks that update each of them, or a part of it; device: where collectives take place.
        """
        rows = {name: row for row, name in enumerate(names)}
        self.number, self.device = len(names), device
        self.rows = {parameter: rows[name] for name, parameter in parameters.items()}
        self.copies = {parameter: holders / num_parts(parameter) for parameter in parameters.values()}
        self.tables: dict[tuple[nn.Parameter, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, parameters: Sequence[nn.Parameter], numbers: Tensor) -> Tensor:
        """numbers (N, K), K of each of N parameters -> the sums over all ranks (N, K), float64.

        All ranks call it, those too that have no such parameter.
        """
        numbers = numbers.double()
        if dist.get_world_size() == 1:
            return numbers
        rows, copies = self._table(tuple(parameters))
        whole = torch.zeros(self.number, numbers.shape[1], dtype=torch.float64, device=self.device)
        whole.index_copy_(0, rows, numbers.to(self.device) / copies)
        dist.all_reduce(whole)
        return whole.index_select(0, rows).to(numbers.device)

    def _table(self, parameters: tuple[nn.Parameter, ...]) -> tuple[Tensor, Tensor]:
        """Rows (N,) and copies (N, 1) on the device, which a step shall not wait for."""
        if parameters not in self.tables:
            rows = torch.tensor([self.rows[p] for p in parameters], dtype=torch.int64)
            copies = torch.tensor([self.copies[p] for p in parameters], dtype=torch.float64).view(-1, 1)
            self.tables[parameters] = rows.to(self.device), copies.to(self.device)
        return self.tables[parameters]


def num_parts(parameter: nn.Parameter) -> int:
    """Parts that a parameter is cut into, each of which may be held by several ranks."""
    if not isinstance(parameter, DTensor):
        return 1
    parts, mesh = 1, parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        parts *= 1 if placement.is_replicate() else mesh.size(axis)
    return parts
