"""The micro-batches of each step on the device, wherever the run's progress stands."""

import logging
import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from config import Config
from datasets.field_dataset import FieldDataset
from datasets.loader import TrainLoader, TrainSampler
from traces.profiler import span
from training.due import ONE_STEP, GlobalBatch, Rollouts, num_places
from training.replay import Replay, ReplaySampler, one_step_samples
from training.state import Progress, TrainState

logger = logging.getLogger(__name__)
# Fields (B, h + R, V, H, W) float32, NaN where missing: windows (datasets/window.py), then what follows in R
# steps of the model; dates (B,) of the windows, seconds.
Batch = tuple[Tensor, Tensor]


def build_batches(
    samples: FieldDataset,
    config: Config,
    run: TrainState,
    parts: tuple[int, int],
    global_batch: GlobalBatch,
    device: torch.device,
) -> "Batches":
    """parts: which part of each global batch this rank takes, and of how many."""
    training, data = config.training, config.data
    first = global_batch.micro_batches(1)
    sampler = (len(samples), training.seed, training.local_batch_size, first, *parts)
    order = TrainSampler(*sampler)
    if run.replay:
        samples = one_step_samples(samples, training.replay_steps, data.history)
        order = ReplaySampler(num_places(training, global_batch.smallest), training.replay_steps, *sampler)
    loader = TrainLoader(samples, order, data.num_workers, pin=device.type == "cuda")
    rollouts = Rollouts.of(training)
    start = (rollouts, data.history, run.replay)
    return Batches(loader, run.progress, device, global_batch, *start, frozen=config.lora.enable)


class Batches:
    """Iterated once a step, it gives the micro-batches that `progress` says come next.

    Where the run has gone back, the loader goes there by itself.
    """

    def __init__(
        self,
        loader: TrainLoader,
        progress: Progress,
        device: torch.device,
        global_batch: GlobalBatch,
        rollouts: Rollouts = ONE_STEP,
        history: int = 1,
        replay: Replay | None = None,
        frozen: bool = False,
    ) -> None:
        self.loader, self.progress, self.device, self.rollouts = loader, progress, device, rollouts
        self.global_batch, self.history, self.iterator = global_batch, history, iter(())
        self.replay, self.frozen = replay, frozen
        # Samples and rollbacks that the iterator goes on from, steps of the model, and micro-batches.
        self.at: tuple[int, int, int, int] | None = None
        self.length = self.samples = 0  # steps of the model in the last step, and its samples of all ranks
        self.passes = 0  # forward passes that a sample of the last step is worth
        self.seconds, self.bytes = 0.0, 0  # waited for the loader in the last step, and what it gave

    def __len__(self) -> int:
        """Micro-batches of the next step."""
        return self.global_batch.micro_batches(self.progress.step + 1)

    @property
    def epoch(self) -> float:
        """How often the run has seen its samples."""
        return self.progress.samples / self.loader.sampler.num_samples

    def __iter__(self) -> Iterator[Batch]:
        progress, step, number = self.progress, self.progress.step + 1, len(self)
        length, samples = self.rollouts.at(step), self.global_batch.at(step)
        if length != self.length and self.rollouts.longest > 1:
            logger.info(f"rollouts of {length} steps from step {step} on")
        if samples != self.samples and len(self.global_batch.stages) > 1:
            logger.info(f"{samples} samples a step from step {step} on: {number} micro-batches a rank")
        self.length, self.samples = length, samples
        if self.at != (progress.samples, progress.rollbacks, length, number):
            where = (progress.samples, progress.rollbacks)
            batches = self.loader.iterate(*where, num_dates=self.history + length, accumulation=number)
            self.iterator = on_device(batches, self.device)
        self.at, self.seconds, self.bytes = None, 0.0, 0
        self.passes = self.rollouts.passes(length, self.frozen)
        for micro in range(number):
            fields, times = self._next()
            if self.replay:
                fields = self.replay.start(progress.samples, micro, fields, times)
            yield fields, times
        self.at = progress.samples + samples, progress.rollbacks, length, number

    def _next(self) -> Batch:
        with span("data"):
            started = time.perf_counter()
            fields, times = next(self.iterator)
            self.seconds += time.perf_counter() - started
            self.bytes += fields.nbytes
            return self.loader.dataset.unpack(fields), times


COPIES_AHEAD = 2


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches on the device. On a GPU copies have a stream of their own and are two batches ahead:
    they travel while the batch before them is computed.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream, waiting = torch.cuda.Stream(device), deque()
    for fields, times in batches:
        with torch.cuda.stream(stream):
            copies = fields.to(device, non_blocking=True), times.to(device, non_blocking=True)
        waiting.append((copies, stream.record_event()))
        if len(waiting) > COPIES_AHEAD:
            yield _arrived(*waiting.popleft())


def _arrived(copies: Batch, copied: torch.cuda.Event) -> Batch:
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for tensor in copies:  # its memory is not given out again while this stream may read it
        tensor.record_stream(current)
    return copies
