"""The sampler is a function of (seed, step); threads read from converted stores what zarr-python reads."""

import json
import os
import resource
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

from datasets import convert
from datasets.archive import TrainingStore, open_archive
from datasets.loader import FieldDataset, Loader, TrainSampler, evaluation_batches
from errors import DataError
from tests.sample_archives import NAMES, analyses, training_store, weatherbench


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


NAME = "2m_temperature"


BATCHES = [[2, 0], [3, 1], [0, 0], [1, 3], [2]]


def write_store(path: Path, dtype: str = "f2") -> tuple[str, np.ndarray]:
    """Convert five dates in shards of four; return the path and the values as float32."""
    source = weatherbench(path.parent, ds := analyses()[[NAME]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "SHARD_DATES", 4)
        training_store(source, path, "--dtype", "float16" if dtype == "f2" else "float32")
    return str(path), (xr.open_zarr(path) if dtype == "f2" else ds)[NAME].values.astype("f4")


@pytest.fixture
def dataset(tmp_path) -> FieldDataset:
    return FieldDataset(open_archive(write_store(tmp_path / "a.zarr")[0]), [NAME], SAMPLES)


def read_plainly(dataset: FieldDataset) -> list[torch.Tensor]:
    return [dataset.__getitems__(batch)[0] for batch in BATCHES]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_fields_equal_those_of_zarr_python(tmp_path, dtype):
    """Scales that are a power of two round once either way, so that values are equal bit by bit."""
    path, truth = write_store(tmp_path / "a.zarr", dtype)
    archive = open_archive(path)
    assert isinstance(archive, TrainingStore)
    np.testing.assert_array_equal(archive.read_block(0, 5, [NAME])[:, 0], truth)
    dataset = FieldDataset(archive, [NAME], SAMPLES)
    for (fields, times), batch in zip(Loader(dataset, BATCHES, 2), BATCHES, strict=True):
        assert fields.dtype == (torch.float16 if dtype == "f2" else torch.float32)
        np.testing.assert_array_equal(dataset.unpack(fields)[:, :, 0].numpy(), truth[SAMPLES[batch]])
        dates = np.datetime64("2019-12-31T06", "s") + SAMPLES[batch, 0] * np.timedelta64(6, "h")
        np.testing.assert_array_equal(times, dates.astype(int))
    part = open_archive(path, region=(70.0, 40.0, -50.0, 280.0)).read_block(0, 5, [NAME])[:, 0]
    np.testing.assert_array_equal(part, truth[:, 1:5, 1:7])


USES = {
    "the batch": lambda fields: fields,
    "a view": lambda fields: fields[:, 0],
    "an array": lambda fields: fields.numpy()[..., 1:],
    "saved for a gradient": lambda fields: (torch.ones(1, requires_grad=True) * fields.float()).grad_fn,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_that_are_in_use_are_not_overwritten(tmp_path, threads, use):
    """With float32 stores, of which `float` makes no copy."""
    archive = open_archive(write_store(tmp_path / "a.zarr", "f4")[0])
    dataset = FieldDataset(archive, [NAME], SAMPLES)
    used = [USES[use](fields) for fields, _ in Loader(dataset, BATCHES, threads)]
    for each, batch in zip(used, read_plainly(dataset), strict=True):
        found = each._saved_other if use.startswith("saved") else torch.as_tensor(each)
        assert equal(found, torch.as_tensor(USES[use](batch)) if "saved" not in use else batch)


def test_memory_of_a_batch_is_used_again_when_nothing_refers_to_it(dataset):
    places = set()
    for fields, _ in Loader(dataset, 20 * BATCHES[:4], 2):
        places.add(fields.data_ptr())
    assert len(places) <= 4 + 3 + 2  # read ahead; in use, given before, begun; just filled by a thread


def test_a_state_of_several_samples_is_decoded_once(dataset, monkeypatch):
    read, fill = list[int](), TrainingStore.fill
    counted: Any = lambda store, date, *rest: read.append(date) or fill(store, date, *rest)  # noqa: E731
    monkeypatch.setattr(TrainingStore, "fill", counted)
    fields, _ = next(iter(Loader(dataset, [[0, 1, 2, 3]], 1)))
    assert sorted(read) == [0, 1, 2, 3, 4]
    assert equal(dataset.unpack(fields), dataset.__getitems__([0, 1, 2, 3])[0])


def test_a_missing_date_is_missing_values(dataset):
    (fields, _), *_ = Loader(dataset.with_dates(np.array([[0, -1]])), [[0]], 2)
    assert torch.isnan(fields[0, 1]).all() and torch.isfinite(fields[0, 0]).any()


def test_a_loader_that_was_left_starts_again(dataset):
    loader = Loader(dataset, BATCHES, 2)
    next(iter(loader))
    expected = read_plainly(dataset)
    assert all(equal(dataset.unpack(fields), b) for (fields, _), b in zip(loader, expected, strict=True))


def test_scales_are_copied_to_a_device_once(dataset):
    """A copy from pageable memory makes the host wait for the device."""
    on_meta = torch.empty((1, 2, 1, 6, 8), dtype=torch.float16, device="meta")
    dataset.unpack(on_meta)
    scale = dataset.scale
    dataset.unpack(on_meta)
    assert dataset.scale is scale and scale.device.type == "meta"


def test_damaged_shards_are_one_line(tmp_path):
    path, _ = write_store(tmp_path / "a.zarr")
    shard = tmp_path / "a.zarr/2m_temperature/c/0/0/0"
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[10] ^= 4
    for damaged in (b"", content[: len(content) // 2], content[:-1], bytes(flipped)):
        shard.write_bytes(damaged)
        with pytest.raises(
            DataError, match="^[^\n]*2m_temperature at 2019-12-31T[^\n]* cannot be read[^\n]*$"
        ):
            list(Loader(FieldDataset(open_archive(path), [NAME], SAMPLES), BATCHES, 2))
    with pytest.raises(ValueError, match="checksum"):  # zarr-python looks, too: lz4 unpacks another number
        zarr.open_array(f"{path}/{NAME}", mode="r")[0]


def test_chunks_that_are_missing_are_missing_values_and_shards_an_error(tmp_path):
    """A copy of a store that was interrupted lacks files: its dates are not taken as missing."""
    path, truth = write_store(tmp_path / "a.zarr")
    root: Any = zarr.open_group(path, mode="r+")
    root[NAME][2] = np.nan  # zarr-python leaves such a chunk out
    (tmp_path / f"a.zarr/{NAME}/c/1/0/0").unlink()
    block = open_archive(path).read_block(0, 4, [NAME])[:, 0]
    assert np.isnan(block[2]).all()
    np.testing.assert_array_equal(block[[0, 1, 3]], truth[[0, 1, 3]])
    with pytest.raises(DataError, match="2m_temperature at .* cannot be read.*No such file"):
        open_archive(path).read(4, [NAME])


@pytest.mark.parametrize("change", ["big endian", "a fill value", "no mark of ours"])
def test_only_arrays_of_this_format_are_read_by_the_fast_reader(tmp_path, change):
    """Others are read by zarr-python."""
    path, truth = write_store(tmp_path / "a.zarr", "f4")
    root, array = (json.loads(Path(path, name, "zarr.json").read_text()) for name in ("", NAME))
    root.pop("consolidated_metadata")
    if change == "no mark of ours":
        del root["attributes"]["rossby_training_store"]
    elif change == "a fill value":
        array["fill_value"] = 3.0
    else:
        array["codecs"][0]["configuration"]["codecs"][0]["configuration"]["endian"] = "big"
    for name, about in (("", root), (NAME, array)):
        Path(path, name, "zarr.json").write_text(json.dumps(about))
    archive = open_archive(path)
    assert not isinstance(archive, TrainingStore)
    if change == "no mark of ours":
        np.testing.assert_array_equal(archive.read_block(0, 5, [NAME])[:, 0], truth)


def test_forty_arrays_are_read_with_few_open_files(tmp_path):
    """An epoch over 40 variables as separate arrays, a date a chunk: a file each, for both threads."""
    ds = analyses()[[NAME]]
    store = training_store(
        weatherbench(tmp_path, ds.assign({f"own_{i}": ds[NAME] + i for i in range(39)})), tmp_path / "store"
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))  # other tests of this process have left some
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 64, limits[1]))
    try:
        dataset = FieldDataset(store, store.variables, np.arange(5)[:, None])
        assert len(list(islice(Loader(dataset, TrainSampler(5, 0, 1, 0, 1), 2), 10))) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
