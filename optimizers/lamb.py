"""LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, scaled for each matrix by the size of its
weights.

The step of a matrix w is lr min(|w| / |u|, cap) u, where u = m / (sqrt(v) + eps) + weight_decay w of bias-
corrected moments, and norms are those of the whole matrix, whatever part of it a rank has. Norms, biases and
positions, which do not decay, are not scaled either: they have AdamW's step.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach and fused kernels are private in name, and what its own optimisers are made of.

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optimizers.fused_adamw import adamw_step
from optimizers.shards import MOMENTS, allocate, gradient, local, with_gradient
from optimizers.shared_sums import SharedSums
from optimizers.trust_ratios import trust_ratios

# Numbers that are updated at once: weights, gradients, moments and directions of so many stay in the cache
# together, so that five kernels read memory as often as one (L2 of a server's core 2 MB, of an A100 40 MB).
PORTION = {"cpu": 2**16, "cuda": 2**21}


class Piece(NamedTuple):
    """Some numbers of a parameter, flat."""

    parameter: int  # its place among those of the step
    begin: int
    end: int


class LAMB(torch.optim.AdamW):
    """`cap`: of the trust ratio. A bad step (`found_inf`) changes nothing, to the bit."""

    def __init__(
        self, groups: list[dict], betas: tuple[float, float], eps: float, cap: float, sums: SharedSums
    ) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.cap, self.sums = cap, sums
        self.portions: dict[tuple[nn.Parameter, ...], list[tuple[list[Piece], Tensor]]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here has a closure
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["matrices"]:
                self._step_matrices(with_gradient(group), group, bad)
            else:
                adamw_step(self, with_gradient(group), group, bad)

    def _step_matrices(self, parameters: list[nn.Parameter], group: dict, bad: Tensor | None) -> None:
        """Directions of all, which take the place of gradients; one collective; then the weights."""
        if not parameters:
            self.sums(parameters, torch.zeros(0, 2))  # other ranks wait for this one
            return
        for parameter in parameters:
            allocate(self, parameter, ("step", *MOMENTS))
        weights = [local(p) for p in parameters]
        directions = [gradient(p).contiguous() for p in parameters]
        squares = self._directions(parameters, weights, directions, group, bad)
        norms = self.sums(parameters, squares).sqrt()
        ratios = trust_ratios(norms[:, 0], norms[:, 1], 1.0, self.cap)
        factors = (ratios if bad is None else ratios * (1 - bad)) * group["lr"]
        torch._foreach_addcmul_(weights, directions, list(factors.float()), value=-1.0)

    def _directions(
        self,
        parameters: list[nn.Parameter],
        weights: list[Tensor],
        gradients: list[Tensor],
        group: dict,
        bad: Tensor | None,
    ) -> Tensor:
        """Overwrites gradients; returns the squares of this rank's |w| and |u|, (parameters, 2)."""
        steps = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, 1)
        first, second = ([local(self.state[p][name]).view(-1) for p in parameters] for name in MOMENTS)
        flat = [[tensor.view(-1) for tensor in tensors] for tensors in (weights, gradients)]
        squares = torch.zeros(len(parameters), 2, dtype=torch.float64, device=steps[0].device)
        for portion, places in self._portions(parameters, flat[0]):
            cut = ([tensors[i][begin:end] for i, begin, end in portion] for tensors in (*flat, first, second))
            found = direction(*cut, [steps[i] for i, _, _ in portion], group, bad)
            squares.index_add_(0, places, found)  # a parameter has one piece of a portion at most: no race
        if bad is not None:
            torch._foreach_sub_(steps, [bad] * len(steps))
        return squares

    def _portions(
        self, parameters: list[nn.Parameter], weights: list[Tensor]
    ) -> list[tuple[list[Piece], Tensor]]:
        """Portions and the places of their parameters on the device, which a step shall not wait for."""
        key = tuple(parameters)
        if key not in self.portions:
            device = weights[0].device
            cut = portions([len(weight) for weight in weights], PORTION[device.type])
            self.portions[key] = [
                (portion, torch.tensor([i for i, _, _ in portion], device=device)) for portion in cut
            ]
        return self.portions[key]


def direction(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    group: dict,
    bad: Tensor | None,
) -> Tensor:
    """Moments are updated, u takes the place of gradients; the squares of |w| and |u|, (pieces, 2).

    AdamW's fused kernel with a learning rate of -1 adds Adam's direction to what it takes for weights.
    """
    found = torch._foreach_mul(weights, group["weight_decay"])
    torch._fused_adamw_(
        found,
        gradients,
        first,
        second,
        [],
        steps,
        lr=-1.0,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=bad,
    )
    norms = [torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, found)]
    torch._foreach_copy_(gradients, found)
    return torch.stack(norms, dim=1).double().square()


def portions(sizes: list[int], most: int) -> Iterator[list[Piece]]:
    """Every number of every parameter once, about `most` of them at a time."""
    portion, room = [], most
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(begin + room, size)
            portion.append(Piece(number, begin, end))
            room, begin = room - (end - begin), end
            if room == 0:
                yield portion
                portion, room = [], most
    if portion:
        yield portion
