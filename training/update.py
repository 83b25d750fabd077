"""From gradients to new weights. Two ways with one interface: after backward, or while it goes on.

`begin(step)` comes before forward, `loss_part` and `loss_scale` are what forward_backward is given, and
`finish(step, loss)` comes after backward and returns the norm of all gradients.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from errors import ConfigError
from parallelisms.parallelize import LossPart, ParallelModel
from traces.profiler import span
from training.bad_steps import step_unless
from training.gradients import add_up, clip, summed, total_norm
from training.no_checkpoints import Saves
from training.optimizers.build import set_lr
from training.optimizers.noise_scale import NoiseScale
from training.state import TrainState


class Update:
    """All gradients first: their norm, clipping, whether the step is bad, then one step of the optimiser."""

    def __init__(
        self,
        model: ParallelModel,
        run: TrainState,
        saves: Saves,
        rate: Callable[[int], float],
        loss_part: LossPart,
        max_norm: float,
        noise: NoiseScale | None = None,
    ) -> None:
        """rate: step -> learning rate; max_norm: gradients are clipped to it, 0: not at all."""
        self.model, self.run, self.saves, self.noise = model, run, saves, noise
        self.rate, self.loss_part, self.max_norm, self.lr = rate, loss_part, max_norm, 0.0

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward, in fp16."""
        return self.run.scaler.factor

    def begin(self, step: int) -> None:
        self.lr = self.rate(step)
        set_lr(self.run.optimizer, self.lr)

    def finish(self, step: int, loss: Tensor) -> Tensor:
        """loss: this rank's part of it."""
        parameters, scaler = self.model.parameters.values(), self.run.scaler
        with span("optimizer"):
            add_up(parameters)
            scaler.unscale(parameters)
            norm = total_norm(parameters, self.model.pipeline_group)
            clip(parameters, self.max_norm, norm)
            norm = norm.to(loss.device)  # offloaded gradients, and with them their norm, are on the host
            if self.noise:
                self.noise.step(norm, scaler.factor)
            self.saves.wait_for_staging()  # the window of losses is saved too
            bad = self.run.bad_steps.judge(step, loss, norm, overflow_is_normal=scaler.enabled)
            if scaler.good(norm):
                step_unless(bad, self.run.optimizer)
                weights_have_changed(self.model, self.run, step)
        return norm


class UpdateInBackward:
    """A parameter is updated as soon as its gradient is there, while backward goes on.

    No gradient outlives its update, so that they take the memory of a block, not of the model. The price:
    nothing sees all gradients before weights change. There is no clipping and no accumulation, and whether a
    step is bad is decided before backward, by the loss of all ranks.
    """

    loss_scale = 1.0  # config_checks refuses fp16
    noise = None

    def __init__(
        self,
        model: ParallelModel,
        run: TrainState,
        saves: Saves,
        rate: Callable[[int], float],
        loss_part: LossPart,
        accumulation: int,
    ) -> None:
        """ConfigError where gradients are accumulated."""
        if accumulation > 1:
            raise ConfigError(
                f"optimizer.in_backward = true: the global batch is made of {accumulation} micro-batches a "
                "rank, whose gradients would have to be added up; set it to false, or take more ranks"
            )
        self.model, self.run, self.saves = model, run, saves
        self.rate, self.plain_loss_part = rate, loss_part
        self.step, self.lr, self.bad = 0, 0.0, torch.zeros(())
        self.norms: list[Tensor] = []
        self.group_of = {p: group for group in run.optimizer.param_groups for p in group["params"]}
        for parameter in self.group_of:
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin(self, step: int) -> None:
        self.step, self.lr = step, self.rate(step)
        set_lr(self.run.optimizer, self.lr)
        self.saves.wait_for_staging()
        self.norms.clear()

    def loss_part(self, output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the loss, after which it is known whether the step is bad."""
        part = self.plain_loss_part(output, target, weights)
        total = part.detach().clone()
        dist.all_reduce(total)  # not finite where that of one rank is not
        self.bad = self.run.bad_steps.judge(self.step, part.detach(), total, overflow_is_normal=False)
        return part

    def finish(self, step: int, loss: Tensor) -> Tensor:
        with span("optimizer"):
            norm = summed(torch.linalg.vector_norm(torch.stack(self.norms)))
            weights_have_changed(self.model, self.run, step)
        return norm

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        add_up([parameter])
        assert parameter.grad is not None
        self.norms.append(torch.linalg.vector_norm(parameter.grad))
        groups, own = self.run.optimizer.param_groups, self.group_of[parameter]
        everything = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter] if group is own else []
        step_unless(self.bad, self.run.optimizer)
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = parameters
        parameter.grad = None


def weights_have_changed(model: ParallelModel, run: TrainState, step: int) -> None:
    """What follows an update: other ranks' parameters, scales of float8 weights, averages."""
    model.after_update()
    if run.average:
        run.average.update(step)
