"""Pipeline parallelism: consecutive blocks on consecutive ranks, micro-batches sent between them.

torch.distributed.pipelining schedules them (GPipe, 1F1B, interleaved, zero-bubble). Shapes: B batch, t
tokens of this rank, D width.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from jobs.heartbeat import span
from models.weather_model import TokenModel, WeatherModel, run_blocks
from parallelisms.degrees import num_stages
from parallelisms.mesh import Mesh

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]  # of the output and tensors of its shape by name
V_SCHEDULES = ("ZBVZeroBubble",)  # the first rank has the first and the last stage
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")  # gradients of inputs first, of weights later


class Stage(nn.Module):
    """Some blocks of a model under their own names; the first has the embedding too, the last the head."""

    def __init__(self, model: TokenModel, first: int, last: int, autocast: torch.autocast) -> None:
        super().__init__()
        self.autocast, self.initial_std, self.checkpoint_every = autocast, model.initial_std, 0
        self.first_block, self.drop_rate = first, model.drop_rate
        if first == 0:
            self.patch_embedding, self.position = model.patch_embedding, model.position
        self.blocks = nn.ModuleDict({str(i): model.blocks[str(i)] for i in range(first, last)})
        if last == len(model.blocks):
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """patches (B, t, C P Q) or tokens (B, t, D) -> tokens (B, t, D) or patches (B, t, V P Q); keys (B,)
        of the samples in training.
        """
        with self.autocast:
            if hasattr(self, "patch_embedding"):
                x = self.position(self.patch_embedding(x))
            x = run_blocks(self, x, keys)
            return self.head(self.norm(x)) if hasattr(self, "head") else x


class TimedStage(PipelineStage):
    """A stage with a profiler span for each pass; the rest of span "pipeline" is waiting time."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


def balance_stages(num_blocks: int, num_stages: int, first_extra: float, last_extra: float) -> list[int]:
    """Return the first block of each stage after the first, so that the most expensive stage is cheapest.

    first_extra, last_extra: cost of embedding and head in units of a block.
    """

    @cache
    def solve(start: int, stages: int) -> tuple[float, list[int]]:
        """Return the smallest possible maximum over stages of the blocks from `start` on, and borders."""
        extra = first_extra if start == 0 else 0.0
        if stages == 1:
            return num_blocks - start + extra + last_extra, []
        options = []
        for border in range(start + 1, num_blocks - stages + 2):
            rest, borders = solve(border, stages - 1)
            options.append((max(border - start + extra, rest), [border, *borders]))
        return min(options)

    return solve(0, num_stages)[1]


def cut_stages(
    model: WeatherModel, mesh: Mesh, schedule: str, autocast: torch.autocast
) -> tuple[list[nn.Module], list[int]]:
    """Return the stages of this rank and their indices; without a pipeline, the whole model."""
    pp = mesh.degrees.pp
    if pp == 1:
        return [model], [0]
    assert isinstance(model, TokenModel)  # a U-Net's skip connections would pass over all stages
    stages, rank = num_stages(schedule, pp), mesh.rank("pp")
    starts = balance_stages(len(model.blocks), stages, *model.ends_in_blocks())
    ends = list(pairwise([0, *starts, len(model.blocks)]))
    indices = [rank, stages - 1 - rank] if schedule in V_SCHEDULES else list(range(rank, stages, pp))
    return [Stage(model, *ends[index], autocast) for index in indices], indices


class Pipeline:
    """The stages of this rank and the schedule that runs them."""

    def __init__(
        self, parts: list[nn.Module], indices: list[int], schedule: str, mesh: Mesh, device: torch.device
    ) -> None:
        self.parts, self.indices, self.schedule_name = parts, indices, schedule
        self.group, self.device, self.num_ranks = mesh.group("pp"), device, mesh.degrees.pp
        self.num_stages = num_stages(schedule, self.num_ranks)
        self.stages = [
            TimedStage(part, index, self.num_stages, device, group=self.group)  # type: ignore[arg-type]
            for part, index in zip(parts, indices, strict=True)
        ]
        self.has_first, self.has_last = 0 in indices, self.num_stages - 1 in indices

    def schedule(self, name: str, num_microbatches: int) -> None:
        """Set the schedule that `step` runs."""

        def scaled(output: Tensor, packed: Tensor) -> Tensor:
            targets = dict(zip(self.names, packed.unbind(1), strict=True))
            return self.loss(output, targets) * self.scale

        kind = get_schedule_class(name)
        stages = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        options = {"loss_fn": scaled, "scale_grads": False}
        self.runner = kind(stages, num_microbatches, **options)  # type: ignore[arg-type]

    def step(
        self,
        inputs: Tensor,
        keys: Tensor | None,
        targets: dict[str, Tensor],
        loss: Loss,
        scale: float | Tensor,
    ) -> Tensor:
        """Run forward and backward of one batch; keys (B,) of its samples or None; targets (B, t, C) each.
        `loss` returns the part of one micro-batch; parts are added.

        Returns the loss on the rank with the last stage, 0 elsewhere.
        """
        self.loss, self.scale, self.names, losses = loss, scale, tuple(targets), []
        arguments = (inputs,) if self.has_first else ()
        options: dict[str, Any] = {} if keys is None else {"keys": keys}  # every stage gets its micro-batch's
        if self.has_last:
            packed = torch.stack(list(targets.values()), dim=1)  # (B, n, t, C): schedules take one tensor
            self.runner.step(*arguments, target=packed, losses=losses, return_outputs=False, **options)
            return torch.stack(losses).sum().detach() / scale
        self.runner.step(*arguments, return_outputs=False, **options)
        return torch.zeros((), device=self.device)

    @torch.no_grad()
    def forward(
        self,
        inputs: Tensor,
        keys: Tensor | None,
        tokens_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
    ) -> Tensor:
        """Return the output on every rank of the pipeline, one stage after the other: for validation."""
        x, last = inputs, self.num_stages - 1
        for index in range(self.num_stages):
            owner = self._owner(index)
            if index in self.indices:
                x = self.parts[self.indices.index(index)](x, keys).float()
                if index < last and self._owner(index + 1) != owner:
                    dist.send(x.contiguous(), group=self.group, group_dst=self._owner(index + 1))
            elif index + 1 in self.indices:
                x = torch.empty(tokens_shape, device=self.device)
                dist.recv(x, group=self.group, group_src=owner)
        # Every rank of the pipeline gets the output of the last stage, float32.
        result = x.contiguous() if self.has_last else torch.empty(output_shape, device=self.device)
        dist.broadcast(result, group=self.group, group_src=self._owner(last))
        return result

    def _owner(self, stage: int) -> int:
        """Return the rank of a stage in the pipeline's group."""
        lap, index = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - index if self.schedule_name in V_SCHEDULES and lap == 1 else index
