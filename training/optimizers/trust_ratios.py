"""Trust ratios of LAMB and LARS, from norms of whole parameters on any layout."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LARGEST = 10.0  # You et al. 2020 leave the bound open; DeepSpeed's LAMB has the same


class SharedSums:
    """Sums over all ranks of numbers computed from each rank's parts of parameters.

    One all-reduce for all parameters over all ranks, including replicas, which therefore get the same bits on
    any machine. A part that several ranks have is counted once.
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
        """Return the sums (N, K) over all ranks, float64, of K numbers of each of N parameters.

        All ranks must call it, even those without such a parameter.
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
        """Return rows (N,) and copies (N, 1) on the device, cached: a step must not wait for the host."""
        if parameters not in self.tables:
            rows = torch.tensor([self.rows[p] for p in parameters], dtype=torch.int64)
            copies = torch.tensor([self.copies[p] for p in parameters], dtype=torch.float64).view(-1, 1)
            self.tables[parameters] = rows.to(self.device), copies.to(self.device)
        return self.tables[parameters]


def num_parts(parameter: nn.Parameter) -> int:
    """Return the number of distinct shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = enumerate(parameter.placements)
    sizes = [parameter.device_mesh.size(axis) for axis, each in axes if not each.is_replicate()]
    return math.prod(sizes)


def squared_norms(weights: list[Tensor], steps: list[Tensor]) -> Tensor:
    """Return |w|^2 and |step|^2 of a rank's part of each parameter, (N, 2), float64."""
    if not weights:
        return torch.zeros(0, 2, dtype=torch.float64)
    norms = torch._foreach_norm([*weights, *steps])  # type: ignore[reportPrivateImportUsage]
    return torch.stack(norms).view(2, -1).T.double().square()


def trust_ratios(weights: Tensor, steps: Tensor, coefficient: float = 1.0) -> Tensor:
    """Return coefficient |w| / |step|, at most LARGEST, of whole parameters' norms (N,); 1 where one is 0."""
    nonzero = (weights > 0) & (steps > 0)
    return torch.where(nonzero, (coefficient * weights / steps).clamp(max=LARGEST), 1.0)
