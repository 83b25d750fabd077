"""The training store: Zarr 3, an array for each variable and level, a date a chunk, many chunks an object.

    zarr.json               complete: whether all dates are there; options: what it was made with
    time latitude longitude valid
    geopotential_500/       (time, latitude, longitude), attribute variable = "geopotential:500"
        c/0/0/0             an object: the chunks of `shard_dates` dates
    land_sea_mask/          (latitude, longitude)
    conversion.jsonl        while dates are being written: which, and what is done

An array for a level, because float16 needs an offset and a scale of its own for each, and CF's `scale_factor`
belongs to an array. Objects are written whole, beside, and renamed: what has its name is whole. The bytes are
a function of the fields and the options alone. Shapes: n dates, H latitudes, W longitudes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import MemoryStore

import archives.stores  # noqa: F401  # codecs that refuse what was cut short
from archives.float16 import Packed
from archives.grid import Grid
from archives.layouts import TRAINING_STORE
from durable_files import append_whole, sync_folder, write_durably
from errors import DataError

FORMAT, VERSION = TRAINING_STORE, 1
JOURNAL = "conversion.jsonl"
SHARD_BYTES, SHARD_DATES = 2**28, 512  # at most, of an object that is decoded
COORDINATE_CHUNK = 2**16  # dates of `time` and `valid` in one object, which grows with the store
Shape = tuple[int, ...]
SINCE = "seconds since 1970-01-01"


def array_name(variable: str) -> str:
    """ "geopotential:500" -> "geopotential_500"."""
    return variable.replace(":", "_")


def dates_of_shard(bytes_a_date: int) -> int:
    """A power of two, at most 512: 40 years are thousands of objects, and one fits into memory easily."""
    dates = SHARD_DATES
    while dates > 1 and dates * bytes_a_date > SHARD_BYTES:
        dates //= 2
    return dates


def compressors(dtype: Any) -> list[BytesBytesCodec]:
    """And a checksum: a bit that turned over in a value would be a value."""
    blosc = BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle", typesize=np.dtype(dtype).itemsize)
    return [blosc, Crc32cCodec()]


@dataclass(frozen=True)
class Field:
    """A variable that the store has or gets: its units, and how its numbers are stored."""

    variable: str
    units: str
    packed: Packed | None  # None: float32, as it is

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("float16" if self.packed else "float32")

    def attributes(self) -> dict[str, Any]:
        described: dict[str, Any] = {"variable": self.variable, "units": self.units}
        if self.packed:
            described |= {"scale_factor": self.packed.scale, "add_offset": self.packed.offset}
        return described


def create(
    path: Path,
    fields: Sequence[Field],
    static: Mapping[str, tuple[np.ndarray, str]],
    grid: Grid,
    times: np.ndarray,
    rows: int,
    attributes: Mapping[str, Any],
    run: Mapping[str, Any],
) -> None:
    """All of a store but its fields, which are to be written; `path` is not there, or empty.

    static: name -> (H, W) and units. times: (n,) datetime64[s]. rows: latitudes of a chunk, 0: all. run: as
    `begin` has it.
    """
    root = zarr.create_group(str(path), zarr_format=3, attributes={FORMAT: VERSION, **attributes})
    _coordinate(root, "latitude", grid.latitude, {"units": "degrees_north", "standard_name": "latitude"})
    _coordinate(root, "longitude", grid.longitude, {"units": "degrees_east", "standard_name": "longitude"})
    _create_dates(root, times, [field.variable for field in fields])
    for field in fields:
        chunk = (1, rows or grid.shape[0], grid.shape[1])
        height = -(-grid.shape[0] // chunk[1]) * chunk[1]  # of a shard, which is whole chunks
        dates = dates_of_shard(height * chunk[2] * field.dtype.itemsize)
        _field_array(
            root.store,
            field.dtype,
            (len(times), *grid.shape),
            chunk,
            (dates, height, chunk[2]),
            name=array_name(field.variable),
            dimension_names=["time", "latitude", "longitude"],
            attributes=field.attributes(),
        )
    for name, (values, own_units) in static.items():
        _create_static(root, name, values, own_units)
    _write_header(path, 0, times, run)


def _write_header(path: Path, done: int, times: np.ndarray, run: Mapping[str, Any]) -> None:
    """The journal's first line: dates (n,) are to be written after those that are done."""
    header = {"done": done, "times": _seconds(times).tolist(), "run": run}
    write_durably(path / JOURNAL, json.dumps(header) + "\n")


def _seconds(times: np.ndarray) -> np.ndarray:
    return times.astype("datetime64[s]").astype(np.int64)


def _coordinate(root: zarr.Group, name: str, values: np.ndarray, attributes: Any) -> None:
    array = root.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype,
        chunks=values.shape,
        dimension_names=[name],
        attributes=attributes,
    )
    array[:] = values


def _create_dates(root: zarr.Group, times: np.ndarray, variables: list[str]) -> None:
    """The dates, and for each which variables have a value somewhere."""
    attributes: Any = {"units": SINCE, "calendar": "proleptic_gregorian", "standard_name": "time"}
    array: Any = root.create_array(
        "time",
        shape=times.shape,
        dtype="int64",
        chunks=(COORDINATE_CHUNK,),
        dimension_names=["time"],
        attributes=attributes,
    )
    array[:] = _seconds(times)
    meaning = "1 where the variable has a value anywhere on that date"
    root.create_array(
        "valid",
        shape=(len(times), len(variables)),
        dtype="uint8",
        chunks=(COORDINATE_CHUNK, len(variables)),
        dimension_names=["time", "variable"],
        attributes={"long_name": meaning, "variables": variables},
    )


def _field_array(
    store: Any, dtype: np.dtype, shape: Shape, chunks: Shape, shards: Shape, **named: Any
) -> Any:
    """As all fields lie, on the disk and in the objects that `encoded` makes for it."""
    return zarr.create_array(
        store,
        shape=shape,
        chunks=chunks,
        shards=shards,
        dtype=dtype,
        compressors=compressors(dtype),
        fill_value=np.nan,
        **named,
    )


def _create_static(root: zarr.Group, name: str, values: np.ndarray, own_units: str) -> None:
    array = root.create_array(
        array_name(name),
        shape=values.shape,
        chunks=values.shape,
        dtype="float32",
        compressors=compressors("float32"),
        fill_value=np.nan,
        dimension_names=["latitude", "longitude"],
        attributes={"variable": name, "units": own_units},
    )
    array[:] = values


class TrainingStore:
    """One that exists, to be written to: who does has to see to it that nobody else does."""

    def __init__(self, path: Path) -> None:
        """DataError: there is something else at `path`."""
        self.path = path
        self.attributes = read_attributes(path)
        if FORMAT not in self.attributes:
            raise DataError(f"{str(path)!r} is there and no training store: name another TARGET or remove it")
        if self.attributes[FORMAT] != VERSION:
            raise DataError(f"{str(path)!r} is of version {self.attributes[FORMAT]}, this is {VERSION}")
        valid = self._array("valid")
        self.variables = [str(name) for name in valid.attrs["variables"]]  # type: ignore[union-attr]
        first = self._array(array_name(self.variables[0]))
        assert first.shards
        self.grid_shape = first.shape[1:]
        self.shard_dates, self.shard_shape, self.chunks = first.shards[0], first.shards, first.chunks

    @property
    def complete(self) -> bool:
        return bool(self.attributes["complete"])

    @property
    def times(self) -> np.ndarray:
        """(T,) datetime64[s]: all that it has, or is to have."""
        return np.asarray(self._array("time")[:]).astype("datetime64[s]")

    def valid(self) -> np.ndarray:
        """(T, V) bool: which variables have a value on which dates."""
        return np.asarray(self._array("valid")[:]).astype(bool)

    def fields(self) -> list[Field]:
        return [self._field(name) for name in self.variables]

    def _field(self, variable: str) -> Field:
        array = self._array(array_name(variable))
        known = array.attrs
        packed = None
        if array.dtype == np.float16:
            packed = Packed(float(known["scale_factor"]), float(known["add_offset"]))  # type: ignore[arg-type]
        return Field(variable, str(known["units"]), packed)

    def _array(self, name: str) -> zarr.Array:
        return zarr.open_array(str(self.path / name), mode="r+", zarr_format=3)

    # -- objects

    def read_stored(self, variable: str, start: int, stop: int) -> np.ndarray:
        """(n, H, W) as it is stored, without offset and scale."""
        return np.asarray(self._array(array_name(variable))[start:stop])

    def write_shard(self, variable: str, number: int, stored: np.ndarray) -> None:
        """stored (n, H, W) from the shard's first date on, as it is to be stored; whole, or not at all."""
        array = self._array(array_name(variable))
        path = self.path / array_name(variable) / "c" / str(number) / "0" / "0"
        content = encoded(stored, self.shard_shape, self.chunks)
        if content is None:  # nothing but missing values: Zarr keeps no object of them
            path.unlink(missing_ok=True)
            return
        assert array.dtype == stored.dtype
        _write_whole(path, content)

    # -- what is done: the journal's first line says which dates are being written, each other what is

    def begin(self, times: np.ndarray, run: Mapping[str, Any]) -> None:
        """Dates (n,) are to be written after the last. run: what they are made of, plain data, which who goes
        on with it has to name again.
        """
        _write_header(self.path, len(self.times), times, run)

    def begun_run(self) -> dict[str, Any]:
        """The `run` of the dates that are being written."""
        return _whole_lines(self.path / JOURNAL)[0]["run"]

    def resume(self) -> tuple[int, dict[str, Any]]:
        """How many dates had been there before, and the parts that are done since: name -> its summary.

        Brings the arrays to the size that the journal says.
        """
        for leftover in self.path.rglob("*.partial"):  # of zarr, of a process that was killed
            leftover.unlink()
        header, *lines = _whole_lines(self.path / JOURNAL)
        if self.complete:
            self._write_root(complete=False)
        old = header["done"]
        total = old + len(header["times"])
        time = self._array("time")
        if time.shape[0] != total or (np.asarray(time[old:]) != header["times"]).any():
            time.resize((total,))
            time[old:] = header["times"]
        for name in ["valid", *map(array_name, self.variables)]:
            array = self._array(name)
            if array.shape[0] != total:
                array.resize((total, *array.shape[1:]))
        return old, {line["part"]: line["summary"] for line in lines}

    def note(self, part: str, summary: Mapping[str, Any]) -> None:
        """A part of the work is done, and on the disk."""
        append_whole(self.path / JOURNAL, json.dumps({"part": part, "summary": summary}) + "\n")

    def grid(self) -> Grid:
        return Grid(*(np.asarray(self._array(name)[:]) for name in ("latitude", "longitude")))

    def finish(self, valid: np.ndarray, attributes: Mapping[str, Any]) -> None:
        """valid (n, V) of the new dates. The last write says complete, with the metadata of all arrays."""
        array = self._array("valid")
        array[array.shape[0] - len(valid) :] = valid
        self._write_root(complete=True, **attributes)
        (self.path / JOURNAL).unlink()

    def tidy(self) -> None:
        """Removes the journal of a store that is complete: its writer was killed just there."""
        (self.path / JOURNAL).unlink(missing_ok=True)

    def is_begun(self) -> bool:
        """Whether dates are to be written: killed before the first, the store still says complete."""
        if not (self.path / JOURNAL).exists():
            return False
        header = _whole_lines(self.path / JOURNAL)[0]
        return not self.complete or header["done"] + len(header["times"]) != len(self.times)

    def _write_root(self, **attributes: Any) -> None:
        """One file in one write. Not by zarr: it lists the arrays in the order in which they arrive."""
        self.attributes = {**self.attributes, **attributes}
        root: dict[str, Any] = {"attributes": self.attributes, "zarr_format": 3, "node_type": "group"}
        if self.complete:
            found = {path.parent.name: json.loads(path.read_text()) for path in self.path.glob("*/zarr.json")}
            root["consolidated_metadata"] = {
                "kind": "inline",
                "must_understand": False,
                "metadata": dict(sorted(found.items())),
            }
        write_durably(self.path / "zarr.json", json.dumps(root, indent=2))


def _write_whole(path: Path, content: bytes) -> None:
    """Under a name of its own, then renamed: a worker of a cluster may go on with what its client was killed
    over, while another begins the same.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Of a journal; a line that was cut short by a kill is work that is done again."""
    text = path.read_text()
    whole, _, rest = text.rpartition("\n")
    if rest:
        write_durably(path, whole + "\n")
    return [json.loads(line) for line in whole.splitlines()]


def read_attributes(path: Path) -> dict[str, Any]:
    """Of the group at `path`; {} where there is none."""
    try:
        return json.loads((path / "zarr.json").read_text()).get("attributes", {})
    except (OSError, ValueError):
        return {}


def encoded(stored: np.ndarray, shard: Shape, chunks: Shape) -> bytes | None:
    """The object that holds these fields (n, H, W), from the shard's corner on; None: no value in them."""
    objects: dict[str, Any] = {}
    array = _field_array(MemoryStore(objects), stored.dtype, shard, chunks, shard)
    whole = stored
    if stored.shape != shard:
        whole = np.full(shard, np.nan, stored.dtype)
        whole[tuple(map(slice, stored.shape))] = stored
    array[...] = whole
    found = objects.get("c/0/0/0")
    return None if found is None else found.to_bytes()
