"""Replay: training steps of one step of the model that start from stored forecasts of earlier ones.

All ranks share a ring of places, each of which stores a forecast. A training step takes the next places, as
many as it has samples, and takes each forecast one step further; after `training.replay_steps` of them the
place starts again, at the next sample's analysis. (Chen et al. 2023, FengWu, arXiv:2304.02948, draw from such
a buffer at random.)

The date of a forecast after any number of training steps is known in advance, so that a sample is read as any
other: the states of its date and the one a step later. The stored forecast replaces the first of these if it
is of the same date; otherwise the analysis stays: in the first round, with another number of ranks, after a
rollback, or if the forecast has blown up.

Shapes: B batch, h states of a window (datasets/field_dataset.py), V variables, H latitudes, W longitudes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from config import Config
from datasets.field_dataset import FieldDataset, window_steps
from datasets.loader import TrainSampler
from datasets.normalization import Normalizer, boundary_cells
from datasets.options import roles_of
from models.weather_model import TokenModel
from parallelisms.parallelize import ParallelModel
from parallelisms.token_shards import TokenShards
from training.due import num_places
from verification.rollout import LARGEST_DEVIATIONS, blown_up

NO_DATE = torch.iinfo(torch.int64).min
GOLDEN = 0.6180339887498949  # its multiples modulo 1 are far apart from their neighbours


def one_step_samples(samples: FieldDataset, num_steps: int, history: int) -> FieldDataset:
    """Split samples with `num_steps` dates after their window: number n R + l is the n-th, l steps later."""
    later = np.arange(num_steps)
    # Columns by their date in steps: a window has its newest state first.
    column = {step: number for number, step in enumerate([*window_steps(history), *(later + 1)])}
    columns = [[column[lead + step] for step in [*window_steps(history), 1]] for lead in later]
    return samples.with_dates(samples.samples[:, columns].reshape(-1, history + 1))


def phases(num_steps: int) -> list[int]:
    """Return the leads at which `num_steps` neighbouring places start: one each, near ones far apart."""
    return np.argsort(np.argsort(np.arange(num_steps) * GOLDEN % 1)).tolist()


class ReplaySampler(TrainSampler):
    """Draws numbers of `one_step_samples`, each a function of the place in the ring and the round."""

    def __init__(self, num_places: int, num_steps: int, *sampler: Any) -> None:
        """sampler: arguments of TrainSampler, the n-th sample of which starts the n-th forecast."""
        super().__init__(*sampler)
        self.num_places, self.num_steps, self.phases = num_places, num_steps, phases(num_steps)

    def local_batch(self, num_samples: int, micro: int) -> list[int]:
        at_once = self.num_ranks * self.local_batch_size
        first = (num_samples // at_once + micro) * at_once + self.rank * self.local_batch_size
        return [self._at(position) for position in range(first, first + self.local_batch_size)]

    def _at(self, position: int) -> int:
        turn, place = divmod(position, self.num_places)
        forecast, lead = divmod(turn + self.phases[place % self.num_steps], self.num_steps)
        return self.sample(forecast * self.num_places + place) * self.num_steps + lead


class Replay:
    """This rank's places of the ring, in host memory, the same on all ranks of a sample."""

    def __init__(self, config: Config, model: ParallelModel, window: tuple[int, ...]) -> None:
        """window: shape (B, h V, H, W) of what a rank takes at once."""
        training = config.training
        self.model, self.step_seconds, self.row = model, config.data.step_hours * 3600, 0
        self.at_once = window[0] * model.mesh.degrees.dp
        self.rows, self.dp_rank = num_places(training, self.at_once) // self.at_once, model.mesh.dp_rank
        weights = np.array(training.rollout_weights or (1.0,) * training.replay_steps)
        self.turn, self.shares_of_turns = 0, shares_of_turns(weights, window[0]).to(model.device)
        self.num_forcing, width = roles_of(config.data).forcing, config.data.boundary_width
        self.boundary = boundary_cells(window[-2:], width).to(model.device) if width else None  # type: ignore[arg-type]
        pinned = model.device.type == "cuda"  # copies do not wait for the device
        self.states = torch.zeros(self.rows, *window, pin_memory=pinned)  # physical
        self.dates = torch.full((self.rows, window[0]), NO_DATE, pin_memory=pinned)

    def start(self, num_samples: int, micro: int, fields: Tensor, times: Tensor) -> Tensor:
        """Return physical fields (B, h + 1, V, H, W) of `times` (B,), with stored forecasts as their windows.

        They are of micro-batch `micro` after `num_samples` samples.
        """
        self.turn, self.row = divmod(num_samples // self.at_once + micro, self.rows)
        history = fields.shape[1] - 1
        state = self.states[self.row].to(fields.device, non_blocking=True).unflatten(1, (history, -1))
        date = self.dates[self.row].to(fields.device, non_blocking=True)
        is_there = (date == times)[:, None, None, None, None]
        if self.boundary is not None:
            is_there = is_there & ~self.boundary
        window = torch.where(is_there, state, fields[:, :history])
        if self.num_forcing:
            window[:, :, -self.num_forcing :] = fields[:, :history, -self.num_forcing :]
        return torch.cat([window, fields[:, history:]], dim=1)

    def weight_targets(self, targets: dict[str, Tensor], relative: bool) -> dict[str, Tensor]:
        """Return targets of the samples that were started last, weighted by `training.rollout_weights`."""
        num_steps, batch = len(self.shares_of_turns), len(self.dates[0])
        first = (self.row * self.at_once + self.dp_rank * batch) % num_steps
        shares = self.shares_of_turns[self.turn % num_steps, first : first + batch]  # (B,), 1 on average
        shares = shares.view(-1, *[1] * (targets["weights"].ndim - 1))
        weighted = {**targets, "weights": targets["weights"] * (shares.square() if relative else shares)}
        if "truth" in targets:  # which is times the root of the weights
            weighted["truth"] = targets["truth"] * shares.sqrt()
        return weighted

    @torch.no_grad()
    def store(self, normalizer: Normalizer, start: Tensor, times: Tensor, outputs: list[Tensor]) -> None:
        """Store the states a step after physical windows `start` (B, h V, H, W) of `times` (B,).

        outputs: this rank's shards of the model's output, of each micro-batch of a pipeline.
        """
        output = gather_fields(self.model, outputs, len(start))
        window = normalizer.advance(normalizer.normalize_window(start), output)
        limit = torch.full_like(window[:, :, 0, 0], LARGEST_DEVIATIONS)
        date = (times + self.step_seconds).masked_fill(blown_up(window, limit).any(dim=1), NO_DATE)
        physical = normalizer.denormalize(window.unflatten(1, (normalizer.history, -1))).flatten(1, 2)
        self.states[self.row].copy_(physical, non_blocking=True)
        self.dates[self.row].copy_(date, non_blocking=True)

    @property
    def names(self) -> tuple[str, str]:
        """Names of states and dates in a checkpoint; another ring or number of ranks has others."""
        part = f"{self.dp_rank}.{self.rows}x{len(self.dates[0])}"
        return f"{part}.states", f"{part}.dates"

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies: the next step writes into the ring before a save has read it all."""
        return dict(zip(self.names, (self.states.clone(), self.dates.clone()), strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what `state_dict` returned; a ring that a checkpoint does not have starts empty."""
        states, dates = self.names
        self.dates.fill_(NO_DATE)
        if dates in state:
            self.states.copy_(state[states])
            self.dates.copy_(state[dates])


def shares_of_turns(weights: np.ndarray, batch: int) -> Tensor:
    """Return the weights of losses in each round of the ring, a column a place: (steps, steps + batch)."""
    num_steps, weight = len(weights), weights / np.mean(weights)
    leads = (np.arange(num_steps)[:, None] + np.resize(phases(num_steps), num_steps + batch)) % num_steps
    return torch.from_numpy(weight[leads].astype(np.float32))


def gather_fields(model: ParallelModel, outputs: list[Tensor], num: int) -> Tensor:
    """Return the outputs (num, V, H, W) of `num` samples on each of their ranks, from shards."""
    # In its first batch a pipeline of torch 2.13 goes through the loss once more before.
    output = torch.cat(outputs)[-num:] if outputs else None
    meta_model, shards = model.meta_model, model.shards
    if model.pipeline:
        assert isinstance(shards, TokenShards) and isinstance(meta_model, TokenModel)
        shape = (num, shards.output_tokens, meta_model.head.out_features)
        output = model.pipeline.of_last_stage(output, shape)
    assert output is not None
    return meta_model.to_fields(shards.gather_output(output))
