"""The sampler is a function of (seed, step); the loader adds nothing to it."""

from itertools import islice

import numpy as np
import pytest
import torch

from datasets.loader import FieldDataset, Loader, TrainSampler, evaluation_batches
from tests.sample_archives import NAMES, analyses, training_store, values


def global_batch(step: int, local: int, accumulation: int, ranks: int) -> list[int]:
    samplers = [TrainSampler(37, 5, local, rank, ranks).at(step * 8) for rank in range(ranks)]
    of_ranks = [list(islice(sampler, accumulation)) for sampler in samplers]
    return [i for micro in zip(*of_ranks, strict=True) for batch in micro for i in batch]


@pytest.mark.parametrize("step", [0, 3, 100_000])
def test_global_batch_is_independent_of_ranks_and_accumulation(step):
    reference = global_batch(step, 8, 1, 1)
    for local, accumulation, ranks in ((4, 2, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8), (1, 8, 1)):
        assert global_batch(step, local, accumulation, ranks) == reference


def test_every_epoch_draws_every_sample_once():
    sampler = TrainSampler(37, 5, 1, 0, 1)
    epochs = [[sampler.sample(37 * epoch + i) for i in range(37)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert TrainSampler(37, 6, 1, 0, 1).sample(0) != sampler.sample(0)


def test_evaluation_visits_every_sample_once_on_any_number_of_ranks():
    for num_samples in (1, 5, 19, 24):
        for ranks in (1, 2, 3, 8):
            samplers = [evaluation_batches(num_samples, 4, rank, ranks) for rank in range(ranks)]
            seen = sorted(i for s in samplers for batch in s for i in batch if i >= 0)
            assert seen == list(range(num_samples))
            assert len({len(s) for s in samplers}) == 1  # none waits for another


SAMPLES = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])


def test_dataset_reads_whole_batches(archive):
    fields, times = FieldDataset(archive, NAMES, SAMPLES).__getitems__([2, 0, -1])
    truth = values(analyses())
    np.testing.assert_array_equal(fields.numpy(), truth[SAMPLES[[2, 0, 3]]])
    first = np.datetime64("2019-12-31T06", "s").astype(int)
    assert times.tolist() == [first + 2 * 21600, first, first + 3 * 21600]


def first_batches(source, num_workers: int, step: int, count: int) -> list[torch.Tensor]:
    """Fields without missing values, and times, of `count` batches from step `step` on."""
    sampler = TrainSampler(len(SAMPLES), 0, 2, 0, 1).at(2 * step)
    batches = iter(Loader(FieldDataset(source, NAMES, SAMPLES), sampler, num_workers))
    return [tensor.nan_to_num() for _ in range(count) for tensor in next(batches)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_loader_continues_the_sequence(archive, tmp_path, num_workers):
    """Of a store as of the source that it was converted from."""
    store = training_store(archive.path, tmp_path / "store")
    complete = first_batches(archive, 0, step=0, count=7)
    rest = first_batches(store, num_workers, step=4, count=3)
    assert all(torch.equal(a, b) for a, b in zip(complete[8:], rest, strict=True))
