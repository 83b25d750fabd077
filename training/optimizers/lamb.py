"""LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, scaled for each matrix by the size of its
weights.

The step of a matrix w is lr min(|w| / |u|, cap) u, where u = m / (sqrt(v) + eps) + weight_decay w of bias-
corrected moments, and norms are those of the whole matrix, whatever part of it a rank has. Norms, biases and
positions, which do not decay, are not scaled either: they have AdamW's step.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach and fused kernels are private in name, and what its own optimisers are made of.

import torch
from torch import Tensor, nn

from training.optimizers.fused_adamw import adamw_step
from training.optimizers.shards import MOMENTS, allocate, gradient, local, with_gradient
from training.optimizers.shared_sums import SharedSums
from training.optimizers.trust_ratios import squared_norms, trust_ratios


class LAMB(torch.optim.AdamW):
    """`cap`: of the trust ratio. A bad step (`found_inf`) changes nothing, to the bit."""

    def __init__(
        self, groups: list[dict], betas: tuple[float, float], eps: float, cap: float, sums: SharedSums
    ) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.cap, self.sums = cap, sums

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
        weights = [local(p) for p in parameters]
        directions = [gradient(p) for p in parameters]
        self._turn(parameters, weights, directions, group, bad)
        norms = self.sums(parameters, squared_norms(weights, directions)).sqrt()
        ratios = trust_ratios(norms[:, 0], norms[:, 1], 1.0, self.cap)
        rates = (group["lr"] * ratios).float()
        for weight, direction, rate in zip(weights, directions, rates, strict=True):
            move(weight, direction, rate, bad)

    def _turn(
        self,
        parameters: list[nn.Parameter],
        weights: list[Tensor],
        gradients: list[Tensor],
        group: dict,
        bad: Tensor | None,
    ) -> None:
        """Makes u of gradients, where they lie, and updates the moments.

        AdamW's kernel is told that gradients are the weights: with a learning rate and a weight decay of -1
        it takes each away and puts Adam's direction in its place.
        """
        if not parameters:
            return
        for parameter in parameters:
            allocate(self, parameter, ("step", *MOMENTS))
        steps = [self.state[p]["step"] for p in parameters]
        first, second = ([local(self.state[p][name]) for p in parameters] for name in MOMENTS)
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            gradients,
            gradients,
            first,
            second,
            [],
            steps,
            lr=-1.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=-1.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=bad,
        )
        if bad is not None:
            torch._foreach_sub_(steps, [bad] * len(steps))
        torch._foreach_add_(gradients, weights, alpha=group["weight_decay"])


def move(weight: Tensor, direction: Tensor, rate: Tensor, bad: Tensor | None) -> None:
    """weight -= rate x direction by SGD's kernel, which takes a rate from the device and looks at `bad`."""
    torch._fused_sgd_(
        [weight],
        [direction],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=bad,
    )
