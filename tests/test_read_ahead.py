"""Batches that threads read: the same as one by one, into memory that nobody else uses any more."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from zarr.codecs import ZstdCodec

from archives.archive import Archive, open_archive
from archives.chunks import KEPT_FILES, LocalObjects
from archives.field_chunks import chunks_of
from datasets.field_dataset import FieldDataset
from datasets.read_ahead import Buffers, ThreadedLoader
from datasets.store_advice import conversion_advice
from errors import DataError
from tests.sample_archives import (
    EXACT,
    NAMES,
    analyses,
    cds_old,
    one_level_a_chunk,
    packed_zarr,
    values,
    weatherbench,
    zarr_chunked,
)

SAMPLES = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
BATCHES = [[2, 0], [3, 1], [0, 0], [1, 3], [2]]


def plain(dataset: FieldDataset) -> list[torch.Tensor]:
    return [dataset.__getitems__(batch)[0] for batch in BATCHES]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(torch.isnan(one), torch.isnan(other)) and torch.equal(
        one.nan_to_num(), other.nan_to_num()
    )


@pytest.mark.parametrize("layout", [weatherbench, one_level_a_chunk])
@pytest.mark.parametrize(("threads", "ahead"), [(0, 0), (1, 1), (3, 4)])
def test_threads_read_what_is_read_one_by_one(tmp_path, layout, threads, ahead):
    dataset = FieldDataset(open_archive(layout(tmp_path, analyses())), NAMES, SAMPLES)
    assert dataset.by_threads
    taken = [fields.clone() for fields, _ in ThreadedLoader(dataset, BATCHES, threads, ahead, pin=False)]
    assert all(same(a, b) for a, b in zip(taken, plain(dataset), strict=True))


def test_a_batch_that_is_kept_stays_as_it_was(tmp_path):
    dataset = FieldDataset(open_archive(weatherbench(tmp_path, analyses())), NAMES, SAMPLES)
    loader = ThreadedLoader(dataset, BATCHES[:4], 2, 2, pin=False)
    kept = [fields[:, 0] for fields, _ in loader]  # views of them all
    assert all(same(a, b[:, 0]) for a, b in zip(kept, plain(dataset), strict=False))
    for fields, _ in loader:
        del fields
        assert len(loader.buffers.kept) <= 4  # one that is let go serves again: 3 in flight and this one
    assert not loader.buffers.kept


def test_a_buffer_is_given_out_again_when_nobody_has_it():
    buffers, kind = Buffers(pin=False), np.dtype("float32")
    array, tensor = buffers.take((2, 3), kind)
    place = array.ctypes.data
    view = tensor[1:]
    del array, tensor
    assert buffers.take((2, 3), kind)[0].ctypes.data != place  # a view is left
    del view
    assert buffers.take((2, 3), kind)[0].ctypes.data == place


def test_a_state_of_several_samples_is_decoded_once(tmp_path, monkeypatch):
    archive = open_archive(weatherbench(tmp_path, analyses()))
    read: list[int] = []
    reading = Archive.reading

    def counted(self: Archive, start: int, out: np.ndarray, variables: Any) -> Any:
        read.append(start)
        return reading(self, start, out, variables)

    monkeypatch.setattr(Archive, "reading", counted)
    dataset = FieldDataset(archive, NAMES, SAMPLES)
    in_order = [fields.clone() for fields, _ in ThreadedLoader(dataset, [[0, 1], [2, 3]], 1, 2, pin=False)]
    assert sorted(read) == [0, 1, 2, 3, 4]
    assert same(torch.cat(in_order), dataset.__getitems__([0, 1, 2, 3])[0])


def test_a_date_that_is_not_there_is_missing_values(tmp_path):
    archive = open_archive(weatherbench(tmp_path, analyses()))
    dataset = FieldDataset(archive, NAMES, np.array([[0, -1]]))
    (fields, _), *_ = ThreadedLoader(dataset, [[0]], 2, 1, pin=False)
    assert torch.isnan(fields[0, 1]).all() and torch.isfinite(fields[0, 0]).any()


def test_going_elsewhere_starts_anew(tmp_path):
    dataset = FieldDataset(open_archive(weatherbench(tmp_path, analyses())), NAMES, SAMPLES)
    loader = ThreadedLoader(dataset, BATCHES, 2, 3, pin=False)
    next(iter(loader))
    assert all(same(fields, b) for (fields, _), b in zip(loader, plain(dataset), strict=True))


# -- stores of float16


def packed_store(path: Path, scale: float, offset: float, **options: Any) -> tuple[str, np.ndarray]:
    """A shard of all dates, a chunk a date; what it holds as float32."""
    stored = np.random.default_rng(0).normal(size=(5, 6, 8)).astype("f2")
    stored[1, 2, 3] = np.nan
    root = zarr.open_group(str(path), mode="w", zarr_format=3)
    dims = ("time", "latitude", "longitude")
    array = root.create_array(
        "t2m",
        shape=(5, 6, 8),
        chunks=(1, 6, 8),
        dtype="f2",
        fill_value=np.nan,
        dimension_names=dims,
        **options,
    )
    array[:] = stored
    array.attrs.update({"scale_factor": scale, "add_offset": offset})
    coordinates = {"time": np.arange(0, 30, 6), "latitude": np.linspace(75, -75, 6)}
    for name in dims:
        data = coordinates.get(name, np.arange(0, 360, 45.0))
        made = root.create_array(name, data=data, dimension_names=(name,))
        made.attrs.update({"units": "hours since 2020-01-01"} if name == "time" else {})
    return str(path), (stored.astype(np.float64) * scale + offset).astype(np.float32)


@pytest.mark.parametrize("sharded", [True, False])
def test_float16_stays_packed_until_it_is_unpacked(tmp_path, sharded):
    """With a scale that is a power of two both ways round once, to the same bits."""
    options = {"shards": (4, 6, 8)} if sharded else {}
    path, truth = packed_store(tmp_path / "packed.zarr", 16.0, 281.25, **options)
    archive = open_archive(path)
    dataset = FieldDataset(archive, ["2m_temperature"], np.arange(5)[:, None])
    assert dataset.dtype == np.float16
    fields = torch.cat([batch for batch, _ in ThreadedLoader(dataset, [[0, 1, 2], [3, 4]], 2, 1, pin=False)])
    assert fields.dtype == torch.float16
    np.testing.assert_array_equal(dataset.unpack(fields)[:, 0, 0].numpy(), truth)
    np.testing.assert_array_equal(archive.read_block(0, 5, ["2m_temperature"])[:, 0], truth)


def test_a_shard_that_was_cut_short_is_one_line(tmp_path):
    path, _ = packed_store(tmp_path / "packed.zarr", 16.0, 281.25, shards=(4, 6, 8))
    shard = tmp_path / "packed.zarr" / "t2m" / "c" / "0" / "0" / "0"
    content = shard.read_bytes()
    for left in (0, len(content) // 2, len(content) - 1):
        shard.write_bytes(content[:left])
        with pytest.raises(DataError, match="t2m at 2020-01-01T.* cannot be read"):
            open_archive(path).read(0, ["2m_temperature"])


def test_a_chunk_that_a_shard_does_not_hold_is_missing(tmp_path):
    path, _ = packed_store(
        tmp_path / "packed.zarr", 16.0, 281.25, shards=(4, 6, 8), compressors=[ZstdCodec()]
    )
    root: Any = zarr.open_group(path, mode="r+")
    root["t2m"][2] = np.nan  # zarr-python leaves such a chunk out
    assert np.isnan(open_archive(path).read(2, ["2m_temperature"])).all()


# -- which stores are read so


def test_layouts_that_chunks_serve(tmp_path):
    """Of those of users: Zarr in the usual order; and nothing else."""
    served = set()
    for layout in [*EXACT, packed_zarr, cds_old]:
        folder = tmp_path / layout.__name__
        folder.mkdir()
        archive = open_archive(layout(folder, analyses()))
        if all(chunks_of(field) for name in NAMES for _, field, _ in archive._find(name)):
            served.add(layout.__name__)
        np.testing.assert_allclose(archive.read_block(0, 5, NAMES), values(analyses()), rtol=1e-3, atol=0.02)
    zarrs = {"weatherbench", "one_level_a_chunk", "arco", "zarr3", "fill_in_zarr3", "packed_zarr"}
    assert zarrs <= served and not served & {"weatherbench_transposed", "cds_new", "cds_old"}


def test_no_more_memory_is_taken_than_a_file_has_bytes(tmp_path):
    """A shard's index without a checksum may say anything of its chunks' sizes."""
    (tmp_path / "shard").write_bytes(bytes(range(100)))
    objects = LocalObjects(str(tmp_path))
    assert bytes(objects.read("shard", 90, 2**62) or b"") == bytes(range(90, 100))
    assert bytes(objects.read("shard", 2**40, 2**40) or b"") == b""
    assert bytes(objects.read("shard", -10) or b"") == bytes(range(90, 100))


# -- what a conversion would gain


def test_chunks_of_many_dates_are_told_of(tmp_path):
    """On one of five dates a chunk: five times the decoding, and zarr-python's own time."""
    rng = np.random.default_rng(0)
    times = np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h")
    noise = rng.normal(280, 9, (8, 256, 512)).astype("f4")
    grid = {"latitude": np.linspace(89, -89, 256), "longitude": np.arange(512) * 360 / 512}
    ds = xr.Dataset({"2m_temperature": (("time", "latitude", "longitude"), noise)}, {"time": times, **grid})
    many = zarr_chunked(tmp_path / "many.zarr", ds, {"time": 8})
    told = conversion_advice(open_archive(many), ["2m_temperature"], np.arange(8))
    assert re.search(
        r"times faster; its chunks hold 8 dates, of which one is wanted: python -m datasets", told
    )


def test_files_of_a_store_are_kept_open_and_not_all_of_them(tmp_path: Path) -> None:
    def opened() -> int:
        listed = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(str(tmp_path) in os.readlink(each) for each in listed if os.path.lexists(each))

    for number in range(KEPT_FILES + 9):
        (tmp_path / str(number)).write_bytes(b"%03d" % number)
    objects = LocalObjects(str(tmp_path))
    for _ in range(2):
        for number in range(KEPT_FILES + 9):
            assert bytes(objects.read(str(number)) or b"") == b"%03d" % number
    with ThreadPoolExecutor(8) as threads:  # however many threads: a process may have a thousand files open
        list(threads.map(objects.read, map(str, range(KEPT_FILES + 9))))
    assert opened() == KEPT_FILES
    del objects
    assert opened() == 0
