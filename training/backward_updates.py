"""`optimizer.in_backward`: a parameter is updated as soon as its gradient is there, while backward goes on.

No gradient outlives its update, so that they take the memory of a block, not of the model. The price: nothing
sees all gradients before weights change. There is no clipping and no accumulation, and whether a step is bad
is said before backward, by the loss of all ranks.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoints.checkpointer import Checkpointer
from errors import ConfigError
from training.bad_steps import BadSteps, step_unless
from training.gradients import summed

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class BackwardUpdates:
    """Hooks on `parameters`, of which `optimizer` updates one at a time.

    `share`, the loss to be given to forward_backward, judges the step. ConfigError: gradients accumulate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        bad_steps: BadSteps,
        loss: Loss,
        accumulation: int,
    ) -> None:
        if accumulation > 1:
            raise ConfigError(
                f"optimizer.in_backward = true: the global batch is made of {accumulation} micro-batches a "
                "rank, whose gradients would have to be added up; set it to false, or take more ranks"
            )
        self.optimizer, self.bad_steps, self.loss = optimizer, bad_steps, loss
        self.step, self.bad = 0, torch.zeros(())
        self.norms: list[Tensor] = []
        self.group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin(self, step: int, checkpointer: Checkpointer | None) -> None:
        """Before forward. The save in flight gets its copies first."""
        if checkpointer:
            checkpointer.before_update()
        self.step = step
        self.norms.clear()

    def share(self, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        """This rank's share of the loss, after which it is known whether the step is bad."""
        share = self.loss(output, target, weights)
        total = share.detach().clone()
        dist.all_reduce(total)  # not finite where that of one rank is not
        self.bad = self.bad_steps.judge(self.step, share.detach(), total, overflow_is_normal=False)
        return share

    @property
    def grad_norm(self) -> Tensor:
        """Of all gradients of the step, a plain scalar."""
        return summed(torch.linalg.vector_norm(torch.stack(self.norms)))

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.norms.append(torch.linalg.vector_norm(parameter.grad))
        groups, own = self.optimizer.param_groups, self.group_of[parameter]
        everything = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter] if group is own else []
        step_unless(self.bad, self.optimizer)
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = parameters
        parameter.grad = None
