"""Replay: training steps of one step of the model that start from forecasts of its own, kept from earlier
ones.

A forecast stands in each place of a ring, which all ranks share. A training step takes the next places, as
many as it has samples, and takes each forecast one step further; after `num_steps` of them the place begins
again, at the next sample's analysis. Of any `num_steps` neighbours one stands at each lead, and of a few some
at short and some at long ones. (Chen et al. 2023, FengWu, arXiv:2304.02948, draw from such a buffer at
random.)

Where a forecast is after so many training steps is known without it, so that a sample is read as any other
is: the states of its date, and the one a step later. What is kept takes the place of the first of these where
it is of the same date. Where it is not, the analysis stays: in the first round of the ring, with other ranks,
after going back, or where a forecast has blown up.

Shapes: B batch, h states of a window (datasets/window.py), V variables, H latitudes, W longitudes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets.field_dataset import FieldDataset, window_steps
from datasets.loader import TrainSampler
from datasets.normalization import Normalizer
from models.weather_model import TokenModel
from parallelisms.parallelize import LossPart, ParallelModel
from parallelisms.token_shards import TokenShards
from verification.rollout import LARGEST_DEVIATIONS, blown_up

NOTHING = torch.iinfo(torch.int64).min  # no date
GOLDEN = 0.6180339887498949  # its multiples modulo 1 are far apart from their neighbours


def one_step_samples(samples: FieldDataset, num_steps: int, history: int) -> FieldDataset:
    """Of samples with `num_steps` dates after their window: number n R + l is the n-th, l steps later."""
    later = np.arange(num_steps)
    # Columns by their date in steps: a window has its newest state first.
    column = {step: number for number, step in enumerate([*window_steps(history), *(later + 1)])}
    wanted = [[column[lead + step] for step in [*window_steps(history), 1]] for lead in later]
    return samples.with_dates(samples.samples[:, wanted].reshape(-1, history + 1))


def phases(num_steps: int) -> list[int]:
    """The leads at which `num_steps` neighbouring places begin."""
    return np.argsort(np.argsort(np.arange(num_steps) * GOLDEN % 1)).tolist()


class ReplaySampler(TrainSampler):
    """Numbers of `one_step_samples`: which, is a function of the place in the ring and the round."""

    def __init__(self, num_places: int, num_steps: int, *sampler: Any) -> None:
        """sampler: arguments of TrainSampler; of its samples the n-th of the run begins the n-th forecast."""
        super().__init__(*sampler)
        self.num_places, self.num_steps, self.phases = num_places, num_steps, phases(num_steps)

    def local_batch(self, taken: int, micro: int) -> list[int]:
        at_once = self.num_ranks * self.local_batch_size
        first = (taken // at_once + micro) * at_once + self.rank * self.local_batch_size
        return [self._at(position) for position in range(first, first + self.local_batch_size)]

    def _at(self, position: int) -> int:
        turn, place = divmod(position, self.num_places)
        forecast, lead = divmod(turn + self.phases[place % self.num_steps], self.num_steps)
        return self.sample(forecast * self.num_places + place) * self.num_steps + lead


class Replay:
    """The places of the ring that are this rank's, in host memory, the same on all ranks of a sample."""

    def __init__(
        self,
        num_places: int,
        smallest: int,
        window: tuple[int, ...],
        step_seconds: int,
        model: ParallelModel,
        weights: Sequence[float],
    ) -> None:
        """window: (B, h V, H, W), what a rank takes at once; smallest: samples that all ranks do; weights:
        of the losses of the steps, one a lead.
        """
        self.step_seconds, self.row, self.smallest = step_seconds, 0, smallest
        self.rows, self.dp_rank = num_places // smallest, model.mesh.dp_rank
        self.turn, self.shares_of_turns = 0, shares_of_turns(weights, window[0]).to(model.device)
        pinned = model.device.type == "cuda"  # copies do not wait for the device
        self.states = torch.zeros(self.rows, *window, pin_memory=pinned)  # physical
        self.dates = torch.full((self.rows, window[0]), NOTHING, pin_memory=pinned)

    def start(self, taken: int, micro: int, fields: Tensor, times: Tensor) -> Tensor:
        """Physical fields (B, h + 1, V, H, W) of `times` (B,), micro-batch `micro` after `taken` samples,
        with forecasts in place of their windows.
        """
        self.turn, self.row = divmod(taken // self.smallest + micro, self.rows)
        history = fields.shape[1] - 1
        state = self.states[self.row].to(fields.device, non_blocking=True).unflatten(1, (history, -1))
        date = self.dates[self.row].to(fields.device, non_blocking=True)
        there = (date == times)[:, None, None, None, None]
        return torch.cat([torch.where(there, state, fields[:, :history]), fields[:, history:]], dim=1)

    @property
    def shares(self) -> Tensor:
        """(B,): what the losses of the samples that were started last count, 1 on average over all leads."""
        num_steps = len(self.shares_of_turns)
        batch = len(self.dates[0])
        first = (self.row * self.smallest + self.dp_rank * batch) % num_steps
        return self.shares_of_turns[self.turn % num_steps, first : first + batch]

    @torch.no_grad()
    def keep(
        self,
        normalizer: Normalizer,
        model: ParallelModel,
        start: Tensor,
        times: Tensor,
        outputs: list[Tensor],
    ) -> None:
        """Where a step from physical windows (B, h V, H, W) of `times` led; outputs: this rank's shards."""
        output = whole(model, outputs, len(start))
        window = normalizer.advance(normalizer.normalize_window(start), output)
        limit = torch.full_like(window[:, :, 0, 0], LARGEST_DEVIATIONS)
        date = (times + self.step_seconds).masked_fill(blown_up(window, limit).any(dim=1), NOTHING)
        physical = normalizer.denormalize(window.unflatten(1, (normalizer.history, -1))).flatten(1, 2)
        self.states[self.row].copy_(physical, non_blocking=True)
        self.dates[self.row].copy_(date, non_blocking=True)

    @property
    def names(self) -> tuple[str, str]:
        """Of states and dates in a checkpoint: another ring, or another number of ranks, has others."""
        part = f"{self.dp_rank}.{self.rows}x{len(self.dates[0])}"
        return f"{part}.states", f"{part}.dates"

    def state(self) -> dict[str, Tensor]:
        """Copies: the next step writes into the ring before a save has read it all."""
        return dict(zip(self.names, (self.states.clone(), self.dates.clone()), strict=True))

    def load(self, state: dict[str, Tensor]) -> None:
        """What `state` gave; nothing is kept where a checkpoint has none of these names."""
        states, dates = self.names
        self.dates.fill_(NOTHING)
        if dates in state:
            self.states.copy_(state[states])
            self.dates.copy_(state[dates])


def shares_of_turns(weights: Sequence[float], batch: int) -> Tensor:
    """(num_steps, num_steps + batch): what losses count in each round of the ring, a column a place."""
    num_steps, weight = len(weights), np.array(weights) / np.mean(weights)
    begin = np.resize(phases(num_steps), num_steps + batch)
    leads = (np.arange(num_steps)[:, None] + begin) % num_steps
    return torch.from_numpy(weight[leads].astype(np.float32))


def weighed(expected: list[Tensor], shares: Tensor, *, relative: bool, spectral: bool) -> list[Tensor]:
    """What `Objective.cut` gives after the input, with losses of samples that count `shares` (B,)."""
    target, weights, *further = expected
    shares = shares.view(-1, *[1] * (weights.ndim - 1))
    if spectral:
        further[0] = further[0] * shares.sqrt()
    return [target, weights * (shares.square() if relative else shares), *further]


def watched(part: LossPart, outputs: list[Tensor]) -> LossPart:
    """The same loss, of outputs that are collected."""

    def loss(output: Tensor, *expected: Tensor) -> Tensor:
        outputs.append(output.detach())
        return part(output, *expected)

    return loss


def whole(model: ParallelModel, outputs: list[Tensor], num: int) -> Tensor:
    """Shards of outputs of a pass, of `num` samples -> (num, V, H, W), on every rank of these samples."""
    # In its first batch a pipeline of torch 2.13 goes through the loss once more before.
    output = torch.cat(outputs)[-num:] if outputs else None
    meta_model, shards = model.meta_model, model.shards
    if model.pipeline:
        assert isinstance(shards, TokenShards) and isinstance(meta_model, TokenModel)
        shape = (num, shards.output_tokens, meta_model.head.out_features)
        output = model.pipeline.of_last_stage(output, shape)
    assert output is not None
    return meta_model.to_fields(shards.gather_output(output))
