"""Damaged bytes and missing chunks: one line with path, variable and date, with every reader."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from numcodecs import LZ4, LZMA, Blosc, Zlib, Zstd
from zarr.codecs import BloscCodec

from datasets.archive import open_archive
from datasets.shards import register_codecs
from errors import DataError
from tests.sample_archives import netcdf

T2M, DATE = "2m_temperature", "2020-01-01T12:00:00"  # the third
HOURS = "hours since 2020-01-01"
AXES = {
    "time": np.arange(0, 30, 6),
    "latitude": np.linspace(75, -75, 6),
    "longitude": np.arange(0, 360, 45.0),
}
CODECS = {"blosc": Blosc(), "zlib": Zlib(), "zstd": Zstd(checksum=True), "lz4": LZ4(), "lzma": LZMA()}
CODECS["raw"] = None


def fields() -> np.ndarray:
    return 280 + np.random.default_rng(0).normal(size=(5, 6, 8)).astype("f4")


def store(path: Path, codec: str) -> Path:
    """A Zarr with a chunk a date; the file of the third. Of "sharded" two are a file."""
    ds = xr.Dataset({T2M: (tuple(AXES), fields())}, AXES)
    ds["time"].attrs["units"] = HOURS
    encoding: dict[str, Any] = {"chunks": (1, 6, 8)} | ({"shards": (2, 6, 8)} if codec == "sharded" else {})
    own = {"compressors": CODECS[codec], "_FillValue": 0.0} if codec in CODECS else {"fill_value": 0.0}
    zarr_format = 2 if codec in CODECS else 3
    ds.to_zarr(path, zarr_format=zarr_format, encoding={T2M: encoding | own}, consolidated=False)
    return path / T2M / {"zarr3": "c/2/0/0", "sharded": "c/1/0/0"}.get(codec, "2.0.0")


@pytest.mark.parametrize("codec", [*CODECS, "zarr3", "sharded"])
def test_a_damaged_chunk_is_one_line(tmp_path, codec):
    chunk = store(tmp_path / "data.zarr", codec)
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    archive = open_archive(str(tmp_path / "data.zarr"))
    archive.read(0, [T2M])
    for read in (lambda: archive.read(2, [T2M]), lambda: archive.read_block(0, 5, [T2M])):
        with pytest.raises(DataError, match=f"^[^\n]*data.zarr: {T2M} at {DATE[:10]}[^\n]*$"):
            read()


def test_damage_that_hdf5_has_a_checksum_against(tmp_path):
    ds = xr.Dataset({"t2m": (tuple(AXES), fields())}, AXES)
    ds["time"].attrs["units"] = HOURS
    path = Path(netcdf(tmp_path, ds, "data.h5", {"t2m": {"chunksizes": (1, 6, 8), "fletcher32": True}}))
    with h5py.File(path) as file:
        field: Any = file["t2m"]
        offset = field.id.get_chunk_info(2).byte_offset
    content = bytearray(path.read_bytes())
    content[offset + 9] ^= 255
    path.write_bytes(bytes(content))
    archive = open_archive(str(path))
    with pytest.raises(DataError, match=r"data.h5: t2m at 2020-01-01T12:00:00 cannot be read"):  # of five
        archive.read_block(0, 5, [T2M])


@pytest.mark.parametrize(("codec", "missing"), [("zlib", [2]), ("zarr3", [2]), ("sharded", [2, 3])])
def test_a_missing_chunk_is_no_field_of_zeros(tmp_path, codec, missing, caplog):
    store(tmp_path / "data.zarr", codec).unlink()
    archive = open_archive(str(tmp_path / "data.zarr"))
    block = archive.read_block(0, 5, [T2M])[:, 0]
    assert np.isnan(block[missing]).all() and np.isfinite(np.delete(block, missing, axis=0)).all()
    archive.read(2, [T2M])
    assert caplog.text.count("are not in the store") == 1


@pytest.mark.parametrize("format", [2, 3])
@pytest.mark.parametrize("keep", [-1, 100])
def test_a_blosc_chunk_that_was_cut_short_is_not_read_past_its_end(tmp_path, format, keep):
    """Where nothing can be compressed, blosc copies as many bytes as there were."""
    root = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=format)
    codec = Blosc() if format == 2 else BloscCodec()
    values = np.random.default_rng(0).integers(0, 2**32, (6, 8)).astype("u4")
    root.create_array("x", data=values, chunks=(6, 8), compressors=codec)
    path = next(p for p in (tmp_path / "a.zarr/x").rglob("*") if p.name in ("0.0", "0") and p.is_file())
    path.write_bytes(path.read_bytes()[:keep])
    register_codecs()
    with pytest.raises(RuntimeError, match="a blosc chunk has"):
        zarr.open_array(str(tmp_path / "a.zarr"), path="x", mode="r")[:]
