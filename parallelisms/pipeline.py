"""Pipeline parallelism: consecutive blocks on consecutive ranks, micro-batches passed between them.

torch.distributed.pipelining schedules them (GPipe, 1F1B, interleaved, zero-bubble). Shapes: B batch, t
tokens of this rank, D width.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from config import Parallelism
from jobs.heartbeat import span
from models.weather_model import TokenModel, WeatherModel
from parallelisms.degrees import num_stages
from parallelisms.mesh import Mesh

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]  # of the output and tensors of its shape by name
V_SCHEDULES = ("ZBVZeroBubble",)  # the first rank has the first stage and the last
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")  # gradients of inputs first, of weights later


class Stage(nn.Module):
    """Some blocks of a model under their own names; the first has the embedding too, the last the head."""

    def __init__(self, model: TokenModel, first: int, last: int, autocast: torch.autocast) -> None:
        super().__init__()
        self.autocast, self.initial_std = autocast, model.initial_std
        if first == 0:
            self.patch_embedding, self.position = model.patch_embedding, model.position
        self.blocks = nn.ModuleDict({str(i): model.blocks[str(i)] for i in range(first, last)})
        if last == len(model.blocks):
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """patches (B, t, C P Q) or tokens (B, t, D) -> tokens (B, t, D) or patches (B, t, V P Q)."""
        with self.autocast:
            if hasattr(self, "patch_embedding"):
                x = self.position(self.patch_embedding(x))
            for block in self.blocks.values():
                x = block(x)
            return self.head(self.norm(x)) if hasattr(self, "head") else x


class TimedStage(PipelineStage):
    """One that says which part of a step it is in. What "pipeline" takes longer than both is waiting."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


def split_points(model: TokenModel, num_stages: int, named: Sequence[int] = ()) -> list[tuple[int, int]]:
    """First and one past the last block of each stage: as `named` (the first block of every stage but the
    first), or balanced by FLOPs, embedding and head counted. parallelisms/layout_checks.py has checked both.
    """
    num_blocks = len(model.blocks)
    borders = [0, *(named or balanced_splits(num_blocks, num_stages, *model.ends_in_blocks())), num_blocks]
    assert len(borders) == num_stages + 1 and borders == sorted(set(borders)), borders
    return list(pairwise(borders))


def balanced_splits(num_blocks: int, num_stages: int, first_extra: float, last_extra: float) -> list[int]:
    """Borders after which the largest stage is as small as can be; extras in units of a block."""
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}

    def solve(start: int, stages: int) -> tuple[float, list[int]]:
        """The least maximum over `stages` stages for the blocks from `start` on."""
        if (start, stages) not in best:
            extra = first_extra if start == 0 else 0.0
            if stages == 1:
                best[start, stages] = (num_blocks - start + extra + last_extra, [])
            else:
                options = []
                for border in range(start + 1, num_blocks - stages + 2):
                    rest, borders = solve(border, stages - 1)
                    options.append((max(border - start + extra, rest), [border, *borders]))
                best[start, stages] = min(options)
        return best[start, stages]

    return solve(0, num_stages)[1]


def stages_of_rank(schedule: str, rank: int, num_ranks: int, num_stages: int) -> list[int]:
    """Which stages a rank holds: one, several in turn, or for V schedules one down and one back."""
    if schedule in V_SCHEDULES:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, num_ranks))


def cut_stages(
    model: WeatherModel, mesh: Mesh, parallelism: Parallelism, autocast: torch.autocast
) -> tuple[list[nn.Module], list[int]]:
    """The stages of this rank and their indices in the pipeline; without one, the model itself."""
    pp, schedule = mesh.degrees.pp, parallelism.pipeline_parallel_schedule
    if pp == 1:
        return [model], [0]
    assert isinstance(model, TokenModel)  # a U-Net's skip connections would pass over all stages
    stages = num_stages(schedule, pp)
    spans = split_points(model, stages, parallelism.pipeline_parallel_splits)
    indices = stages_of_rank(schedule, mesh.rank("pp"), pp, stages)
    return [Stage(model, *spans[index], autocast) for index in indices], indices


class Pipeline:
    """The stages of this rank and the schedule that runs them."""

    def __init__(
        self, parts: list[nn.Module], indices: list[int], num_stages: int, mesh: Mesh, device: torch.device
    ):
        self.parts, self.indices, self.num_stages = parts, indices, num_stages
        self.mesh, self.device = mesh, device
        group = mesh.group("pp")
        self.stages = [
            TimedStage(part, index, num_stages, device, group=group)  # type: ignore[arg-type]
            for part, index in zip(parts, indices, strict=True)
        ]
        self.is_v = len(indices) == 2 and indices[0] + indices[1] == num_stages - 1
        self.has_first, self.has_last = 0 in indices, num_stages - 1 in indices

    def schedule(self, name: str, num_microbatches: int) -> None:
        """Sets what `step` runs."""

        def scaled(output: Tensor, packed: Tensor) -> Tensor:
            targets = dict(zip(self.names, packed.unbind(1), strict=True))
            return self.loss(output, targets) * self.scale

        kind = get_schedule_class(name)
        stages = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        options = {"loss_fn": scaled, "scale_grads": False}
        self.runner = kind(stages, num_microbatches, **options)  # type: ignore[arg-type]

    def step(self, inputs: Tensor, targets: dict[str, Tensor], loss: Loss, scale: float) -> Tensor:
        """Forward and backward of one batch; targets (B, t, C) each. `loss` returns a micro-batch's part:
        parts are added.

        Returns the loss on the rank with the last stage, 0 elsewhere.
        """
        self.loss, self.scale, self.names, losses = loss, scale, tuple(targets), []
        arguments = (inputs,) if self.has_first else ()
        if self.has_last:
            packed = torch.stack(list(targets.values()), dim=1)  # (B, n, t, C): schedules take one tensor
            self.runner.step(*arguments, target=packed, losses=losses)
            return torch.stack(losses).sum().detach() / scale
        self.runner.step(*arguments)
        return torch.zeros((), device=self.device)

    @torch.no_grad()
    def forward(self, inputs: Tensor, tokens_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Tensor:
        """The output on every rank of the pipeline, one stage after the other: for validation."""
        x, group = inputs, self.mesh.group("pp")
        for index in range(self.num_stages):
            owner, following = self._owner(index), self._owner(index + 1)
            if index in self.indices:
                x = self.parts[self.indices.index(index)](x).float()
                if following not in (None, owner):
                    dist.send(x.contiguous(), group=group, group_dst=following)
            elif following is not None and index + 1 in self.indices:
                x = torch.empty(tokens_shape, device=self.device)
                dist.recv(x, group=group, group_src=owner)
        return self.of_last_stage(x, output_shape)

    def of_last_stage(self, output: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Its output, float32, on every rank of the pipeline."""
        if self.has_last:
            assert output is not None
            shared = output.float().contiguous()
        else:
            shared = torch.empty(shape, device=self.device)
        last = self._owner(self.num_stages - 1)
        dist.broadcast(shared, group=self.mesh.group("pp"), group_src=last)
        return shared

    def _owner(self, stage: int) -> int | None:
        """The rank in the pipeline that holds a stage."""
        if stage >= self.num_stages:
            return None
        ranks = self.mesh.degrees.pp
        turn, index = divmod(stage, ranks)
        return ranks - 1 - index if self.is_v and turn == 1 else index
