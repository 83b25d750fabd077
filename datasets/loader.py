"""Samplers, which are pure functions of (seed, sample), and loaders of batches."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import Sampler
from torchdata.nodes import ParallelMapper, SamplerWrapper

from datasets.field_dataset import FieldDataset
from errors import UserError

NEVER = 2**62  # batches between two snapshots of torchdata: the state of a loader is a number of samples


class TrainSampler(Sampler[list[int]]):
    """Endless local batches. The n-th sample of a run is a function of (seed, n); ranks share each batch.

    Samples are drawn without replacement, epoch after epoch, and a batch may contain two epochs.
    """

    def __init__(
        self, num_samples: int, seed: int, local_batch_size: int, accumulation: int, rank: int, num_ranks: int
    ) -> None:
        self.num_samples, self.seed, self.local_batch_size = num_samples, seed, local_batch_size
        self.accumulation, self.rank, self.num_ranks = accumulation, rank, num_ranks
        self.start, self.shuffle = 0, 0  # samples of earlier steps; number of the order
        self._order: tuple[tuple[int, int], Tensor] = ((-1, -1), torch.empty(0))

    def __iter__(self) -> Iterator[list[int]]:
        start = self.start
        while True:
            for micro in range(self.accumulation):
                yield self.local_batch(start, micro)
            start += self.accumulation * self.num_ranks * self.local_batch_size

    def local_batch(self, start: int, micro: int) -> list[int]:
        """Return this rank's micro-batch number `micro` of the global batch after `start` samples."""
        first = start + (micro * self.num_ranks + self.rank) * self.local_batch_size
        return [self.sample(position) for position in range(first, first + self.local_batch_size)]

    def sample(self, position: int) -> int:
        """Return the sample at a position in the endless sequence of shuffled epochs."""
        epoch, offset = divmod(position, self.num_samples)
        if self._order[0] != (self.shuffle, epoch):
            seed = self.seed * 1_000_003 + self.shuffle * 998_244_353 + epoch
            generator = torch.Generator().manual_seed(seed)
            self._order = (self.shuffle, epoch), torch.randperm(self.num_samples, generator=generator)
        return int(self._order[1][offset])


class EvaluationSampler(Sampler[list[int]]):
    """Every sample once: rank r gets r, r + R, and so on.

    All ranks yield the same number of samples, so that none waits; missing ones are -1 (the last sample).
    """

    def __init__(self, num_samples: int, local_batch_size: int, rank: int, num_ranks: int) -> None:
        rounds = -(-num_samples // num_ranks)
        samples = [i if i < num_samples else -1 for i in range(rank, rounds * num_ranks, num_ranks)]
        self.batches = [samples[i : i + local_batch_size] for i in range(0, rounds, local_batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Loader:
    """The batches of a sampler in order, as `FieldDataset.read` returns them.

    They are read by threads; with no threads a batch is read when it is requested.
    """

    def __init__(
        self, dataset: FieldDataset, sampler: Sampler[list[int]], num_threads: int = 0, pin: bool = False
    ) -> None:
        self.sampler, self.nodes, self.read = sampler, None, partial(dataset.read, pin=pin)
        if num_threads:  # each reads a batch, and as many wait
            self.nodes = ParallelMapper(
                SamplerWrapper(sampler),
                self.read,
                num_threads,
                in_order=True,
                method="thread",
                snapshot_frequency=NEVER,
            )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches. Raises DataError."""
        if self.nodes is None:
            for indices in self.sampler:
                with record_function("SingleProcessRead"):  # as torch's loader without workers calls it
                    batch = self.read(indices)
                yield batch
            return
        self.nodes.reset()
        try:
            while True:
                try:
                    batch = next(self.nodes)
                except StopIteration:
                    return
                yield batch
        except UserError as error:  # which torchdata wraps: the last line is "DataError: text"
            lines = str(error).strip().splitlines()
            if not lines[0].startswith("Caught"):
                raise
            raise type(error)(lines[-1].partition(": ")[2]) from None


class TrainLoader:
    """Endless batches from any sample on. Its state is a number of samples: resuming needs no replay."""

    def __init__(self, dataset: FieldDataset, sampler: TrainSampler, num_threads: int, pin: bool) -> None:
        self.dataset, self.sampler, self.num_threads, self.pin = dataset, sampler, num_threads, pin

    def iterate(
        self, start: int, shuffle: int = 0, num_dates: int = 2, accumulation: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield micro-batches after `start` samples, `accumulation` a step, and their first dates (B,).

        Fields (B, num_dates, V, H, W) become physical by `dataset.unpack`. shuffle: number of the order of
        samples, another one after a roll-back.
        """
        self.sampler.start, self.sampler.shuffle, self.sampler.accumulation = start, shuffle, accumulation
        dataset = self.dataset.with_dates(self.dataset.samples[:, :num_dates])
        return iter(Loader(dataset, self.sampler, self.num_threads, self.pin))
