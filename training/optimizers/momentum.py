"""SGD with momentum, and LARS (You, Gitman and Ginsburg 2017, arXiv:1708.03888), its layer-wise relative.

The momentum averages g + weight_decay w, which LARS multiplies for each matrix by
min(COEFFICIENT |w| / (|g| + weight_decay |w|), LARGEST), with norms of the whole matrix. The learning rate is
outside the momentum, as in torch.optim.SGD.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach and fused kernels, which its own optimizers use, have private names.

import torch
from torch import Tensor, nn

from training.optimizers.shards import (
    SharedSums,
    allocate,
    gradient,
    local,
    squared_norms,
    trust_ratios,
    with_gradient,
)

COEFFICIENT = 1e-3  # of the trust ratio, as in the paper's experiments; optimizer.lr scales it


class SGD(torch.optim.Optimizer):
    """SGD on shards, with torch's fused kernel. A bad step (`found_inf`) changes nothing, bit-exact.

    torch.optim.SGD would continue from uninitialized momentum if its first step is bad.
    """

    buffer = "momentum_buffer"

    def __init__(self, groups: list[dict], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})

    def moment_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return (self.buffer,) if self.defaults["momentum"] else ()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not used
        for group in self.param_groups:
            parameters = with_gradient(group)
            allocate(self, parameters)
            gradients = self.decayed_gradients(parameters, group)
            if parameters:
                # The kernel takes no buffers without momentum.
                has_momentum = group["momentum"] > 0
                torch._fused_sgd_(
                    [local(p) for p in parameters],
                    gradients,
                    [local(self.state[p][self.buffer]) for p in parameters] if has_momentum else [],
                    weight_decay=0.0,
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,  # True would not read the momentum: zeros give the same
                    found_inf=getattr(self, "found_inf", None),
                )

    def decayed_gradients(self, parameters: list[nn.Parameter], group: dict) -> list[Tensor]:
        """Return the gradients with weight decay, as the momentum averages them."""
        gradients = [gradient(p) for p in parameters]
        if parameters and group["weight_decay"]:
            torch._foreach_add_(gradients, [local(p) for p in parameters], alpha=group["weight_decay"])
        return gradients


class LARS(SGD):
    """LARS on any layout with one all-reduce a step."""

    buffer = "scaled_momentum_buffer"  # differs from SGD's, which averages unscaled gradients

    def __init__(self, groups: list[dict], momentum: float, sums: SharedSums) -> None:
        super().__init__(groups, momentum)
        self.sums = sums

    def decayed_gradients(self, parameters: list[nn.Parameter], group: dict) -> list[Tensor]:
        if not group["matrices"]:
            return super().decayed_gradients(parameters, group)
        squares = squared_norms([local(p) for p in parameters], [gradient(p) for p in parameters])
        weight_norms, gradient_norms = self.sums(parameters, squares).sqrt().unbind(1)
        steps = gradient_norms + group["weight_decay"] * weight_norms
        ratios = trust_ratios(weight_norms, steps, COEFFICIENT)
        gradients = super().decayed_gradients(parameters, group)
        if parameters:
            torch._foreach_mul_(gradients, list(ratios.float()))
        return gradients
