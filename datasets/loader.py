"""From dates to batches: a sampler that is a pure function of (seed, step), and the loader around it.

Shapes: B batch, K dates of a sample (datasets/window.py), V variables, H latitudes, W longitudes.
"""

import math
import os
import shutil
import signal
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from datasets.field_dataset import FieldDataset
from datasets.read_ahead import ThreadedLoader
from errors import UserError

NEVER = 2**62
# torchdata 0.11 calls what torch 2.13 deprecates, once a loader; there is no newer torchdata.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


class TrainSampler(Sampler[list[int]]):
    """Endless local batches. What the n-th sample of a run is, is a function of (seed, n): ranks only decide
    who takes which part.

    The samples are drawn without replacement, epoch after epoch, and a batch may straddle two epochs.
    """

    def __init__(
        self, num_samples: int, seed: int, local_batch_size: int, accumulation: int, rank: int, num_ranks: int
    ) -> None:
        self.num_samples, self.seed, self.local_batch_size = num_samples, seed, local_batch_size
        self.accumulation, self.rank, self.num_ranks = accumulation, rank, num_ranks
        self.taken, self.shuffle = 0, 0  # samples of earlier steps; which of many orders
        self._order: tuple[tuple[int, int], Tensor] = ((-1, -1), torch.empty(0))

    def __iter__(self) -> Iterator[list[int]]:
        taken = self.taken
        while True:
            for micro in range(self.accumulation):
                yield self.local_batch(taken, micro)
            taken += self.accumulation * self.num_ranks * self.local_batch_size

    def local_batch(self, taken: int, micro: int) -> list[int]:
        """What this rank takes as micro-batch `micro` of the global batch after `taken` samples."""
        first = taken + (micro * self.num_ranks + self.rank) * self.local_batch_size
        return [self.sample(position) for position in range(first, first + self.local_batch_size)]

    def sample(self, position: int) -> int:
        """The sample at a position in the endless sequence of shuffled epochs."""
        epoch, offset = divmod(position, self.num_samples)
        if self._order[0] != (self.shuffle, epoch):
            seed = self.seed * 1_000_003 + self.shuffle * 998_244_353 + epoch
            generator = torch.Generator().manual_seed(seed)
            self._order = (self.shuffle, epoch), torch.randperm(self.num_samples, generator=generator)
        return int(self._order[1][offset])


class EvaluationSampler(Sampler[list[int]]):
    """Every sample once: rank r takes r, r + R, and so on.

    All ranks yield equally many samples, so that none waits for another; -1 fills the gap (it reads as the
    last).
    """

    def __init__(self, num_samples: int, local_batch_size: int, rank: int, num_ranks: int) -> None:
        rounds = -(-num_samples // num_ranks)
        own = range(rank, rounds * num_ranks, num_ranks)
        mine = [sample if sample < num_samples else -1 for sample in own]
        self.batches = [mine[i : i + local_batch_size] for i in range(0, rounds, local_batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


Loader = ThreadedLoader | StatefulDataLoader


class TrainLoader:
    """Endless batches from any sample on. Its state is a number of samples: resuming costs no replay."""

    def __init__(
        self, dataset: FieldDataset, sampler: TrainSampler, num_workers: int, prefetch: int, pin: bool
    ):
        self.dataset, self.sampler = dataset, sampler
        self.build = partial(build_loader, num_workers=num_workers, prefetch=prefetch, pin=pin)
        self.loader, self.num_dates = None, 0

    def iterate(
        self, taken: int, shuffle: int = 0, num_dates: int = 2, accumulation: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches after `taken` samples, `accumulation` a step: fields (B, num_dates, V, H, W) that
        `dataset.unpack` makes physical, first dates (B,). `shuffle` numbers the order of samples: another one
        after going back.
        """
        self.sampler.taken, self.sampler.shuffle, self.sampler.accumulation = taken, shuffle, accumulation
        if self.loader is None or num_dates != self.num_dates:
            self.loader, self.num_dates = None, num_dates  # the processes of the last one end
            self.loader = self.build(self.dataset.first_dates(num_dates), self.sampler)
        return in_one_line(self.loader)


def build_loader(
    dataset: FieldDataset,
    sampler: Sampler[list[int]],
    num_workers: int = 0,
    prefetch: int = 2,
    pin: bool = False,
) -> Loader:
    """A loader that reads whole batches: by threads where these serve, else by processes, which stay; with
    `num_workers` 0 it reads in this thread.
    """
    if dataset.by_threads:
        return ThreadedLoader(dataset, sampler, num_workers, prefetch, pin)
    fits = not num_workers or _fits(dataset, sampler, num_workers * (prefetch + 1))
    workers = (
        {
            "prefetch_factor": prefetch,
            "multiprocessing_context": "spawn",  # zarr's event loop and HDF5's locks do not survive a fork
            "worker_init_fn": ignore_interrupts,
            "persistent_workers": True,  # a start takes seconds, and there is one at every validation
        }
        if num_workers
        else {}
    )
    return StatefulDataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_read if fits else _as_arrays,
        pin_memory=pin,
        # Of its own: torch's would be drawn from at every start, and a resumed run would not repeat.
        generator=torch.Generator(),
        # The default takes a snapshot of every worker at every step; the sampler needs no more than a step
        # number.
        snapshot_every_n_steps=NEVER,
        **workers,
    )


def in_one_line(batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as tensors. DataError: what a loader process could not read, without torch's traceback around
    it.
    """
    try:
        for fields, times in batches:
            yield torch.as_tensor(fields), torch.as_tensor(times)
    except UserError as error:
        lines = str(error).strip().splitlines()
        if not lines[0].startswith("Caught"):
            raise
        raise type(error)(lines[-1].partition(": ")[2]) from None
    except (ConnectionError, EOFError) as error:  # it died while it handed a batch over
        raise RuntimeError(f"DataLoader worker exited unexpectedly ({type(error).__name__})") from None


def ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the trainer saves, and needs its batches until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _as_read(batch: Any) -> Any:
    return batch  # FieldDataset has made a batch of it already


def _as_arrays(batch: Any) -> Any:
    return tuple(part.numpy() for part in batch)  # through a pipe: slower, and at home everywhere


def _fits(dataset: FieldDataset, sampler: Any, num_batches: int) -> bool:
    """Whether the batches that loader processes read ahead find room in /dev/shm, where torch puts them:
    those of all ranks of this host.
    """
    samples = getattr(sampler, "local_batch_size", 0) or len(sampler.batches[0])
    batch = 4 * samples * dataset.samples.shape[1] * math.prod(dataset.field_shape)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ranks * batch * num_batches < shutil.disk_usage("/dev/shm").free
