"""LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, scaled for each matrix by its weights' norm.

The step of a matrix w is lr min(|w| / |u|, LARGEST) u, where u = m / (sqrt(v) + eps) + weight_decay w of
bias-corrected moments, with norms of the whole matrix on any layout. Norms, biases and positions, which do
not decay, have AdamW's step.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach and fused kernels, which its own optimizers use, have private names.

import torch

from training.optimizers.shards import (
    SharedSums,
    adamw_step,
    gradient,
    local,
    squared_norms,
    trust_ratios,
    with_gradient,
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
                # SGD's kernel reads the rate on the device, and respects `bad`.
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
