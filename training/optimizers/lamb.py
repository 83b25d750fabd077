"""LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, scaled for each matrix by its weights' norm.

The step of a matrix w is lr min(|w| / |u|, LARGEST) u, where u = m / (sqrt(v) + eps) + weight_decay w of
bias-corrected moments, with norms of the whole matrix on any layout. Norms, biases and positions, which do
not decay, have AdamW's step.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach and fused kernels, which its own optimizers use, have private names.

import torch
from torch import Tensor, nn

from training.optimizers.shards import MOMENTS, adamw_step, allocate, gradient, local, with_gradient
from training.optimizers.trust_ratios import SharedSums, squared_norms, trust_ratios


class LAMB(torch.optim.AdamW):
    """LAMB on any layout with one all-reduce a step. A bad step (`found_inf`) changes nothing, bit-exact."""

    def __init__(self, groups: list[dict], betas: tuple[float, float], eps: float, sums: SharedSums) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.sums = sums

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not used
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["matrices"]:
                self._step_matrices(with_gradient(group), group, bad)
            else:
                adamw_step(self, with_gradient(group), group, bad)

    def _step_matrices(self, parameters: list[nn.Parameter], group: dict, bad: Tensor | None) -> None:
        """Compute directions in the memory of gradients, all norms in one collective, then the weights."""
        weights, directions = [local(p) for p in parameters], [gradient(p) for p in parameters]
        if parameters:
            self._to_directions(directions, parameters, group, bad)
            torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
        norms = self.sums(parameters, squared_norms(weights, directions)).sqrt()
        rates = (group["lr"] * trust_ratios(norms[:, 0], norms[:, 1])).float()
        for weight, direction, rate in zip(weights, directions, rates, strict=True):
            subtract(weight, direction, rate, bad)

    def _to_directions(
        self, gradients: list[Tensor], parameters: list[nn.Parameter], group: dict, bad: Tensor | None
    ) -> None:
        """Replace gradients by Adam's directions and update the moments.

        AdamW's kernel gets the gradients as weights: a learning rate and a weight decay of -1 cancel each
        gradient and leave Adam's direction in its place.
        """
        for parameter in parameters:
            allocate(self, parameter)
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


def subtract(weight: Tensor, direction: Tensor, rate: Tensor, bad: Tensor | None) -> None:
    """weight -= rate x direction by SGD's kernel, which reads the rate on the device and respects `bad`."""
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
