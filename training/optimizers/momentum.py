"""SGD with momentum, and LARS (You, Gitman and Ginsburg 2017, arXiv:1708.03888), its layer-wise relative.

The gradient that goes into the momentum is g + weight_decay w; LARS multiplies it for each matrix by
min(coefficient |w| / (|g| + weight_decay |w|), cap), norms being those of the whole matrix. The learning rate
stands outside the momentum, as in torch.optim.SGD.
"""

# pyright: reportPrivateImportUsage=false
# torch's foreach and fused kernels are private in name, and what its own optimisers are made of.

import torch
from torch import Tensor, nn

from training.optimizers.shards import allocate, gradient, local, with_gradient
from training.optimizers.shared_sums import SharedSums
from training.optimizers.trust_ratios import squared_norms, trust_ratios


class SGD(torch.optim.Optimizer):
    """Over shards, with torch's fused kernel. A bad step (`found_inf`) changes nothing, to the bit.

    Not torch.optim.SGD itself: when its first step is bad, it goes on from a momentum that nobody wrote.
    """

    buffer = "momentum_buffer"

    def __init__(self, groups: list[dict], momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "weight_decay": 0.0})

    def moments_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return (self.buffer,)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here has a closure
        for group in self.param_groups:
            parameters = with_gradient(group)
            for parameter in parameters:
                allocate(self, parameter, self.moments_of(parameter))
            gradients = self._gradients(parameters, group)
            if parameters:
                self._update(parameters, gradients, group)

    def _gradients(self, parameters: list[nn.Parameter], group: dict) -> list[Tensor]:
        """With what they are multiplied by, and the weight decay."""
        found = [gradient(p) for p in parameters]
        if parameters and group["weight_decay"]:
            torch._foreach_add_(found, [local(p) for p in parameters], alpha=group["weight_decay"])
        return found

    def _update(self, parameters: list[nn.Parameter], gradients: list[Tensor], group: dict) -> None:
        torch._fused_sgd_(
            [local(p) for p in parameters],
            gradients,
            [local(self.state[p][self.buffer]) for p in parameters],
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # which would leave momenta as they are: zeros give the same
            found_inf=getattr(self, "found_inf", None),
        )


class LARS(SGD):
    """`coefficient` and `cap`: of the trust ratio."""

    buffer = "scaled_momentum_buffer"  # no other optimiser's: its gradients are scaled

    def __init__(
        self, groups: list[dict], momentum: float, coefficient: float, cap: float, sums: SharedSums
    ) -> None:
        super().__init__(groups, momentum)
        self.coefficient, self.cap, self.sums = coefficient, cap, sums

    def _gradients(self, parameters: list[nn.Parameter], group: dict) -> list[Tensor]:
        if not group["matrices"]:
            return super()._gradients(parameters, group)
        ratios = self._ratios(parameters, group["weight_decay"])
        found = super()._gradients(parameters, group)
        if parameters:
            torch._foreach_mul_(found, list(ratios.float()))
        return found

    def _ratios(self, parameters: list[nn.Parameter], weight_decay: float) -> Tensor:
        squares = squared_norms([local(p) for p in parameters], [gradient(p) for p in parameters])
        of_weights, of_gradients = self.sums(parameters, squares).sqrt().unbind(1)
        steps = of_gradients + weight_decay * of_weights
        return trust_ratios(of_weights, steps, self.coefficient, self.cap)
