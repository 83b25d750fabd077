"""This rank's parts of parameters, gradients and moments, as plain tensors for kernels; AdamW on them; trust
ratios of LAMB and LARS from norms of parameters that are sharded in any way.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from parallelisms.float8 import plain_weight

MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam and its relatives, which also have a "step" in their state
LARGEST = 10.0  # trust ratio; You et al. 2020 leave the bound open, DeepSpeed's LAMB has the same


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part itself, not a copy."""
    tensor = plain_weight(tensor.detach())
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a gradient; tensor parallelism may leave it partial or sharded otherwise."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return local(grad).contiguous()


def with_gradient(group: dict) -> list[nn.Parameter]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def moment_names(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names in the state of a parameter: AdamW's, unless the optimizer has a method for it."""
    names_of = getattr(optimizer, "moment_names", None)
    return names_of(parameter) if names_of else ("step", *MOMENTS)


def zero_moment(parameter: nn.Parameter, name: str) -> Tensor:
    """Return a moment before the first step: zeros, sharded like the parameter."""
    if name == "step":  # the fused kernel wants it on the device of the weights
        return torch.zeros((), device=parameter.device)
    return torch.zeros_like(plain_weight(parameter.detach()), dtype=torch.float32)


def allocate(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Create the states of parameters that have none yet."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        for name in moment_names(optimizer, parameter) if not state else ():
            state[name] = zero_moment(parameter, name)


def adamw_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    group: dict,
    bad: Tensor | None,
    directions: list[Tensor] | None = None,
) -> None:
    """Update parameters with torch's fused AdamW. `bad` is 0 or 1, a float; 1 leaves everything bit-exact.

    directions: the gradients, to be replaced by Adam's directions m / (sqrt(v) + eps), bias-corrected; the
    parameters stay unchanged.
    """
    allocate(optimizer, parameters)
    states = [optimizer.state[parameter] for parameter in parameters]
    # For directions the kernel gets the gradients as weights, too: with a learning rate and a weight decay of
    # -1 it computes gradient - gradient + direction, in the memory of the gradient.
    adamw(
        directions or [local(p) for p in parameters],
        directions or [gradient(p) for p in parameters],
        [local(state[MOMENTS[0]]) for state in states],
        [local(state[MOMENTS[1]]) for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=bad,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=-1.0 if directions else group["lr"],
        weight_decay=-1.0 if directions else group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


# -- trust ratios


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
        self.copies = {}  # ranks that have the same part
        for parameter in parameters.values():
            num_shards = 1
            if isinstance(parameter, DTensor):
                for axis, placement in enumerate(parameter.placements):
                    num_shards *= 1 if placement.is_replicate() else parameter.device_mesh.size(axis)
            self.copies[parameter] = holders / num_shards
        self.tables: dict[tuple[nn.Parameter, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, parameters: Sequence[nn.Parameter], numbers: Tensor) -> Tensor:
        """Return the sums (N, K) over all ranks, float64, of K numbers of each of N parameters.

        All ranks must call it, even those without such a parameter.
        """
        numbers = numbers.double()
        if dist.get_world_size() == 1:
            return numbers
        key = tuple(parameters)
        if key not in self.tables:  # cached on the device: a step must not wait for the host
            rows = torch.tensor([self.rows[p] for p in key], dtype=torch.int64)  # (N,)
            copies = torch.tensor([self.copies[p] for p in key], dtype=torch.float64).view(-1, 1)  # (N, 1)
            self.tables[key] = rows.to(self.device), copies.to(self.device)
        rows, copies = self.tables[key]
        table = torch.zeros(self.number, numbers.shape[1], dtype=torch.float64, device=self.device)
        table.index_copy_(0, rows, numbers.to(self.device) / copies)
        dist.all_reduce(table)
        return table.index_select(0, rows).to(numbers.device)


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
