"""Batches that threads read from converted stores: equal to zarr-python's."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from datasets import store_reader
from datasets.archive import Archive, open_archive
from datasets.field_dataset import FieldDataset
from datasets.loader import ThreadedLoader, TrainLoader, TrainSampler
from datasets.store_reader import find_reader
from errors import DataError
from tests.sample_archives import EXACT, NAMES, analyses, cds_old, packed_zarr, weatherbench

NAME = "2m_temperature"
SAMPLES = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
BATCHES = [[2, 0], [3, 1], [0, 0], [1, 3], [2]]
CODECS = [BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=2), Crc32cCodec()]


def write_store(
    path: Path, scale: float = 16.0, offset: float = 281.25, dtype: str = "f2", south_first: bool = False
) -> tuple[str, np.ndarray]:
    """Write shards of four dates as datasets.convert does; return the path and the values as float32."""
    stored = np.random.default_rng(0).normal(size=(5, 6, 8)).astype(dtype)
    stored[1, 2, 3] = np.nan
    root = zarr.open_group(str(path), mode="w", zarr_format=3)
    dims = ("time", "latitude", "longitude")
    options: dict[str, Any] = {"shards": (4, 6, 8), "compressors": CODECS, "dimension_names": dims}
    array = root.create_array(
        "t2m", shape=(5, 6, 8), chunks=(1, 6, 8), dtype=dtype, fill_value=np.nan, **options
    )
    array[:] = stored
    if dtype == "f2":
        array.attrs.update({"scale_factor": scale, "add_offset": offset})
    latitude = np.linspace(75, -75, 6) * (-1 if south_first else 1)
    coordinates = {"time": np.arange(0, 30, 6), "latitude": latitude, "longitude": np.arange(0, 360, 45.0)}
    for name, data in coordinates.items():
        made = root.create_array(name, data=data, dimension_names=(name,))
        made.attrs.update({"units": "hours since 2020-01-01"} if name == "time" else {})
    truth = (stored.astype(np.float64) * scale + offset).astype(np.float32) if dtype == "f2" else stored
    return str(path), truth[:, ::-1] if south_first else truth


@pytest.fixture
def dataset(tmp_path) -> FieldDataset:
    return FieldDataset(open_archive(write_store(tmp_path / "a.zarr")[0]), [NAME], SAMPLES)


def read_plainly(dataset: FieldDataset) -> list[torch.Tensor]:
    return [dataset.__getitems__(batch)[0] for batch in BATCHES]


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("south_first", [False, True])
@pytest.mark.parametrize("region", [(), (70.0, 40.0, -50.0, 280.0)])
def test_fields_equal_those_of_zarr_python(tmp_path, dtype, south_first, region):
    """Scales that are a power of two round once either way, so that values are equal bit by bit."""
    path, truth = write_store(tmp_path / "a.zarr", dtype=dtype, south_first=south_first)
    archive = open_archive(path, region=region)
    rows, columns = (slice(1, 5), slice(1, 7)) if region else (slice(None), slice(None))
    assert find_reader(archive.field_of(NAME))
    np.testing.assert_array_equal(archive.read_block(0, 5, [NAME])[:, 0], truth[:, rows, columns])
    dataset = FieldDataset(archive, [NAME], np.arange(5)[:, None])
    fields = torch.cat([batch for batch, _ in ThreadedLoader(dataset, [[0, 1, 2], [3, 4]], 2, 1, pin=False)])
    assert fields.dtype == (torch.float16 if dtype == "f2" else torch.float32)
    np.testing.assert_array_equal(dataset.unpack(fields)[:, 0, 0].numpy(), truth[:, rows, columns])


@pytest.mark.parametrize(("threads", "prefetch"), [(0, 0), (1, 1), (3, 4)])
def test_threads_read_the_batches_of_the_sampler(dataset, threads, prefetch):
    loader = ThreadedLoader(dataset, BATCHES, threads, prefetch, pin=False)
    batches = [dataset.unpack(fields).clone() for fields, _ in loader]
    assert all(equal(a, b) for a, b in zip(batches, read_plainly(dataset), strict=True))


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
    archive = open_archive(write_store(tmp_path / "a.zarr", dtype="f4")[0])
    dataset = FieldDataset(archive, [NAME], SAMPLES)
    used = [USES[use](fields) for fields, _ in ThreadedLoader(dataset, BATCHES, threads, 2, pin=False)]
    for each, batch in zip(used, read_plainly(dataset), strict=True):
        found = each._saved_other if use.startswith("saved") else torch.as_tensor(each)
        assert equal(found, torch.as_tensor(USES[use](batch)) if "saved" not in use else batch)


def test_memory_of_a_batch_is_used_again_when_nothing_refers_to_it(dataset):
    places = set()
    for fields, _ in ThreadedLoader(dataset, 20 * BATCHES[:4], 2, 2, pin=False):
        places.add(fields.data_ptr())
    assert len(places) <= 2 + 3 + 2  # read ahead; in use, given before, begun; just filled by a thread


def test_a_state_of_several_samples_is_decoded_once(dataset, monkeypatch):
    read: list[int] = []
    tasks = Archive.tasks

    def count(self: Archive, start: int, out: np.ndarray, variables: Any) -> Any:
        read.append(start)
        return tasks(self, start, out, variables)

    monkeypatch.setattr(Archive, "tasks", count)
    fields, _ = next(iter(ThreadedLoader(dataset, [[0, 1, 2, 3]], 1, 2, pin=False)))
    assert sorted(read) == [0, 1, 2, 3, 4]
    assert equal(dataset.unpack(fields), dataset.__getitems__([0, 1, 2, 3])[0])


def test_a_missing_date_is_missing_values(dataset):
    (fields, _), *_ = ThreadedLoader(dataset.with_dates(np.array([[0, -1]])), [[0]], 2, 1, pin=False)
    assert torch.isnan(fields[0, 1]).all() and torch.isfinite(fields[0, 0]).any()


def test_a_loader_that_was_left_starts_again(dataset):
    loader = ThreadedLoader(dataset, BATCHES, 2, 3, pin=False)
    next(iter(loader))
    expected = read_plainly(dataset)
    assert all(equal(dataset.unpack(fields), b) for (fields, _), b in zip(loader, expected, strict=True))


def test_damaged_shards_are_one_line(tmp_path):
    path, _ = write_store(tmp_path / "a.zarr")
    shard = tmp_path / "a.zarr/t2m/c/0/0/0"
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[10] ^= 4
    for damaged in (b"", content[: len(content) // 2], content[:-1], bytes(flipped)):
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match="t2m at 2020-01-01T.* cannot be read") as error:
            open_archive(path).read(0, [NAME])
        assert "\n" not in str(error.value)


def test_chunks_and_shards_that_are_missing_are_missing_values(tmp_path):
    path, truth = write_store(tmp_path / "a.zarr")
    root: Any = zarr.open_group(path, mode="r+")
    root["t2m"][2] = np.nan  # zarr-python leaves such a chunk out
    (tmp_path / "a.zarr/t2m/c/1/0/0").unlink()
    block = open_archive(path).read_block(0, 5, [NAME])[:, 0]
    assert np.isnan(block[[2, 4]]).all()
    np.testing.assert_array_equal(block[[0, 1, 3]], truth[[0, 1, 3]])


def test_only_stores_of_this_format_are_read_by_threads(tmp_path):
    for layout in [*EXACT, packed_zarr, cds_old]:
        folder = tmp_path / layout.__name__
        folder.mkdir()
        assert not open_archive(layout(folder, analyses())).reads_by_threads(NAMES)


def test_few_files_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(store_reader, "_open", lru_cache(5)(FileIO))
    for number in range(12):
        (tmp_path / str(number)).write_bytes(b"%03d" % number)

    def read(number: int) -> bytes:
        return bytes(store_reader._read(store_reader._open(str(tmp_path / str(number))), 0, 3))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, [*range(12), *range(12)])) == [b"%03d" % (i % 12) for i in range(24)]
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert sum(str(tmp_path) in os.readlink(link) for link in links if os.path.lexists(link)) == 5


def test_forty_arrays_are_read_with_256_open_files(tmp_path):
    """An epoch over 40 variables as separate arrays, a date a chunk."""
    ds = analyses()[["2m_temperature"]]
    ds = ds.assign({f"own_{i}": ds["2m_temperature"] + i for i in range(39)})
    path = weatherbench(tmp_path, ds)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        archive = open_archive(path)
        dataset = FieldDataset(archive, archive.variables, np.arange(5)[:, None])
        batches = TrainLoader(dataset, TrainSampler(5, 0, 1, 1, 0, 1), 2, False).iterate(0, num_dates=1)
        assert len([next(batches) for _ in range(10)]) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
