"""LAMB and LARS, which scale the step of each matrix by its weights' norm, and SGD with momentum.

LAMB (You et al. 2020, arXiv:1904.00962): the step of a matrix w is lr min(|w| / |u|, LARGEST) u, where u =
m / (sqrt(v) + eps) + weight_decay w of bias-corrected moments. Norms, biases and positions, which do not
decay, have AdamW's step.

SGD and LARS (You, Gitman and Ginsburg 2017, arXiv:1708.03888): the momentum averages g + weight_decay w,
which LARS multiplies for each matrix by min(COEFFICIENT |w| / (|g| + weight_decay |w|), LARGEST). The
learning rate is outside the momentum, as in torch.optim.SGD.

Norms are those of the whole matrix on any layout.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach and fused kernels, which its own optimizers use, have private names.

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.optimizers.shards import adamw_step, allocate, gradient, local, with_gradient

LARGEST = 10.0  # trust ratio; You et al. 2020 leave the bound open, DeepSpeed's LAMB has the same
COEFFICIENT = 1e-3  # of LARS's trust ratio, as in the paper's experiments; optimizer.lr scales it


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
        """Return the sums (N, K) over all ranks, float64, of K numbers of each of N parameters."""
        # All ranks must call it, even those without such a parameter.
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
    norms = torch._foreach_norm(weights + steps)  # type: ignore[reportPrivateImportUsage]
    return torch.stack(norms).view(2, -1).T.double().square()


def trust_ratios(weights: Tensor, steps: Tensor, coefficient: float = 1.0) -> Tensor:
    """Return coefficient |w| / |step|, at most LARGEST, of whole parameters' norms (N,); 1 where one is 0."""
    nonzero = (weights > 0) & (steps > 0)
    return torch.where(nonzero, (coefficient * weights / steps).clamp(max=LARGEST), 1.0)


def sgd_step(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    momentum: float,
    lr: float | Tensor,
    bad: Tensor | None,
) -> None:
    """Update weights with torch's fused SGD, which takes no buffers without momentum; `bad`: `adamw_step`."""
    torch._fused_sgd_(
        weights,
        gradients,
        buffers,
        weight_decay=0.0,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,  # True would not read the momentum: zeros give the same
        found_inf=bad,
    )


class LAMB(torch.optim.AdamW):
    """LAMB on any layout with one all-reduce a step. A bad step (`found_inf`) changes nothing, bit-exact."""

    def __init__(self, groups: list[dict], betas: tuple[float, float], eps: float, sums: SharedSums) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.sums = sums

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not used
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = with_gradient(group)
            if not group["matrices"]:
                adamw_step(self, parameters, group, bad)
                continue
            # Directions in the memory of gradients, the norms of all in one collective, then the weights.
            weights, directions = [local(p) for p in parameters], [gradient(p) for p in parameters]
            if parameters:
                adamw_step(self, parameters, group, bad, directions)
                torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
            norms = self.sums(parameters, squared_norms(weights, directions)).sqrt()
            rates = (group["lr"] * trust_ratios(norms[:, 0], norms[:, 1])).float()
            for weight, direction, rate in zip(weights, directions, rates, strict=True):
                sgd_step([weight], [direction], [], 0.0, rate, bad)  # which reads the rate on the device


class SGD(torch.optim.Optimizer):
    """SGD on shards, with torch's fused kernel. A bad step (`found_inf`) changes nothing, bit-exact."""

    # torch.optim.SGD would continue from uninitialized momentum if its first step is bad.
    buffer = "momentum_buffer"

    def __init__(self, groups: list[dict], momentum: float, sums: SharedSums | None = None) -> None:
        """sums: LARS's, whose momentum averages scaled gradients of matrices."""
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})
        self.sums = sums

    def moment_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return (self.buffer,) if self.defaults["momentum"] else ()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not used
        for group in self.param_groups:
            parameters, decay, momentum = with_gradient(group), group["weight_decay"], group["momentum"]
            allocate(self, parameters)
            weights, gradients = [local(p) for p in parameters], [gradient(p) for p in parameters]
            # -- LARS's ratios of matrices, by the norms of all in one collective, which every rank calls
            ratios = None
            if self.sums and group["matrices"]:
                norms = self.sums(parameters, squared_norms(weights, gradients)).sqrt()
                ratios = trust_ratios(norms[:, 0], norms[:, 1] + decay * norms[:, 0], COEFFICIENT).float()
            if not parameters:
                continue
            # -- the gradients with weight decay, as the momentum averages them, then the weights
            if decay:
                torch._foreach_add_(gradients, weights, alpha=decay)
            if ratios is not None:
                torch._foreach_mul_(gradients, list(ratios))
            buffers = [local(self.state[p][self.buffer]) for p in parameters if momentum > 0]
            sgd_step(weights, gradients, buffers, momentum, group["lr"], getattr(self, "found_inf", None))


class LARS(SGD):
    """LARS on any layout with one all-reduce a step: SGD with `sums`."""

    buffer = "scaled_momentum_buffer"  # differs from SGD's, which averages unscaled gradients
