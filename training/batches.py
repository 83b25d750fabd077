"""Micro-batches of each step of a run on the device, a function of its progress."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from config import Config, Training
from datasets.loader import FieldDataset, Loader, TrainSampler
from datasets.options import COPIES_AHEAD
from errors import ConfigError
from jobs.heartbeat import span
from parallelisms.parallelize import ParallelModel
from training.due import Rollouts
from training.state import Progress, TrainState

logger = logging.getLogger("rossby")


class Batch(NamedTuple):
    """A micro-batch: windows (datasets/loader.py) and the states of the next R model steps."""

    fields: Tensor  # (B, h + R, V, H, W) physical, float32, NaN where a value is missing
    times: Tensor  # (B,) dates of the windows, seconds since 1970


class Batches:
    """Iterable of the micro-batches of the next step, by `progress`, for one iteration per step."""

    def __init__(
        self,
        dataset: FieldDataset,
        config: Config,
        state: TrainState,
        model: ParallelModel,
        global_batch: int,
    ) -> None:
        """dataset: samples with as many later states as the longest rollout has steps."""
        training, degrees = config.training, model.mesh.degrees
        self.progress, self.history = state.progress, config.data.history
        self.device, self.global_batch, self.frozen = model.device, global_batch, config.lora.rank > 0
        self.rollouts = Rollouts.of(training)
        self.micro_batches = global_batch // (training.local_batch_size * degrees.dp)
        self.dataset, self.num_threads = dataset, config.data.num_workers
        self.sampler = TrainSampler(
            len(dataset), training.seed, training.local_batch_size, model.mesh.dp_rank, degrees.dp
        )
        self.iterator: Iterator[Batch] = iter(())
        self.position: tuple[int, int, int] | None = None  # samples, rollbacks, steps that the iterator is at
        self.rollout_steps, self.passes = 0, 0  # of the last step; a sample's cost in forward passes
        self.seconds = 0.0  # time that the last step waited for the loader

    def restart(self, step: int) -> None:
        """Load again, from the position in `progress`."""
        self.position = None

    def __len__(self) -> int:
        """Micro-batches of a step."""
        return self.micro_batches

    @property
    def epoch(self) -> float:
        """Return the number of passes through the samples."""
        return self.progress.samples / self.sampler.num_samples

    def __iter__(self) -> Iterator[Batch]:
        # -- where the loader has to be
        progress, step = self.progress, self.progress.step + 1
        length = self.rollouts.at(step)
        if length != self.rollout_steps and self.rollouts.longest > 1:
            logger.info(f"rollouts of {length} steps from step {step} on")
        if self.position != (progress.samples, progress.rollbacks, length):
            sampler = self.sampler.at(progress.samples, progress.rollbacks)
            dataset = self.dataset.with_dates(self.dataset.samples[:, : self.history + length])
            loader = Loader(dataset, sampler, self.num_threads, pin=self.device.type == "cuda")
            self.iterator = on_device(iter(loader), self.device)
        # -- the micro-batches of one step
        self.position, self.seconds = None, 0.0
        self.rollout_steps, self.passes = length, self.rollouts.passes(length, self.frozen)
        for _ in range(self.micro_batches):
            with span("data"):
                started = time.perf_counter()
                fields, times = next(self.iterator)
                self.seconds += time.perf_counter() - started
                batch = Batch(self.dataset.unpack(fields), times)
            yield batch
            del batch, fields  # their memory is free before the next ones are unpacked
        self.position = progress.samples + self.global_batch, progress.rollbacks, length


def on_device(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[Batch]:
    """Yield batches on the device. On a GPU copies have a stream of their own and are two batches ahead."""
    if device.type != "cuda":
        yield from (Batch(fields, times) for fields, times in batches)
        return
    stream, waiting = torch.cuda.Stream(device), deque()
    for fields, times in batches:
        with torch.cuda.stream(stream):
            copies = Batch(fields.to(device, non_blocking=True), times.to(device, non_blocking=True))
        waiting.append((copies, stream.record_event()))
        if len(waiting) > COPIES_AHEAD:
            copies, is_copied = waiting.popleft()
            current = torch.cuda.current_stream()
            current.wait_event(is_copied)
            for tensor in copies:  # do not reuse its memory while this stream may read it
                tensor.record_stream(current)
            yield copies


def choose_global_batch(training: Training, smallest: int, progress: Progress) -> int:
    """Return the samples of each step. -1: those of the checkpoint, or else `smallest`, the samples of one
    micro-batch on all ranks. Raises ConfigError if the number in the checkpoint is no multiple of it.
    """
    stored = progress.global_batch
    if training.global_batch_size == -1 and stored % smallest:
        raise ConfigError(
            f"training.global_batch_size = -1: the checkpoint's {stored} samples a step are no multiple of "
            f"local_batch_size x data-parallel ranks = {smallest}; change training.local_batch_size, or set "
            "training.global_batch_size to what you want from here on"
        )
    chosen = (stored or smallest) if training.global_batch_size == -1 else training.global_batch_size
    if stored and chosen != stored:
        logger.info(f"the global batch was {stored} samples so far and is {chosen} from here on")
    return chosen
