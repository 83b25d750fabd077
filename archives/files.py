"""Files of analyses, described and read without knowing what is in them: Zarr, NetCDF 3 and 4, HDF5, GRIB.

Arrays are read as slices, straight from zarr, h5py or scipy: a training sample is read thousands of times,
and there xarray's milliseconds an access count. What the arrays mean is archives/layouts.py's affair.
"""

import difflib
import glob
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from archives.chunks import ChunkedArray, LocalObjects, Objects, chunked
from archives.storage_options import NO_OPTIONS, Access
from errors import DataError

METADATA = (".zarray", ".zattrs", "zarr.json")  # of an array of a Zarr store
GRIB_FILES = (".grib", ".grib1", ".grib2", ".grb", ".grb2")
DATA_FILES = (
    ".nc",
    ".nc4",
    ".cdf",
    ".netcdf",
    ".h5",
    ".hdf5",
    ".he5",
    *GRIB_FILES,
)  # what counts in a folder


@dataclass(frozen=True)
class StoredArray:
    """What is known of an array without reading it; `dims` is empty names for plain HDF5."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    attrs: dict[str, Any]
    chunks: tuple[int, ...] | None


@dataclass(eq=False)
class StoredFile:
    """One Zarr store, NetCDF or HDF5 file. It can be pickled: every process opens it anew on first use."""

    path: str
    kind: str
    arrays: dict[str, StoredArray] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)  # arrays that something was said of once
    access: Access = NO_OPTIONS  # how a URL is read

    def fetch(self, name: str, selection: Any = ...) -> np.ndarray:
        """The values of a slice as they are stored: packed, in the file's own order."""
        root, found = _handles(self)
        if (
            self.kind == "netcdf3"
        ):  # not kept: scipy warns on closing a file whose arrays are still referred to
            return np.asarray(root.variables[name][selection])
        if name not in found:  # kept: zarr parses an array's metadata anew at every look-up
            found[name] = root[name]
        return np.asarray(found[name][selection])

    def chunked(self, name: str) -> ChunkedArray | None:
        """An array of a Zarr store by its chunks, where that is possible."""
        root, found = _handles(self)
        key = f"{name} by chunks"
        if key not in found:
            found[key] = chunked(root[name], self._objects())
        return found[key]

    def _objects(self) -> Objects:
        if not is_url(self.path):
            return LocalObjects(self.path)
        from archives.object_store import open_objects

        return open_objects(self.path, self.access)

    def holes(self, name: str, selection: Any, stored: np.ndarray) -> list[Any]:
        """Parts of what was fetched that the store does not have, and that are no values therefore."""
        if self.kind != "zarr" or not isinstance(selection, tuple):
            return []
        return list(missing_chunks(_handles(self)[1][name], selection, stored))


# Open files: (process, file, arrays looked up). They close with the StoredFile, or when too many are open.
_OPEN: weakref.WeakKeyDictionary[StoredFile, tuple[int, Any, dict[str, Any]]] = weakref.WeakKeyDictionary()
MAX_OPEN = 128  # a folder may hold more files than a process may open (1024)


def _handles(file: StoredFile) -> tuple[Any, dict[str, Any]]:
    """The open file and its arrays. A handle inherited through fork would move with the parent's."""
    process, root, found = _OPEN.get(file, (0, None, {}))
    if process != os.getpid():
        while len(_OPEN) >= MAX_OPEN:
            _OPEN.pop(next(iter(_OPEN)), None)
        root, found = _open(file), {}
        _OPEN[file] = os.getpid(), root, found
    return root, found


def _open(file: StoredFile) -> Any:
    """By the library of its kind; each is imported where it is needed, because that takes time."""
    if file.kind == "zarr":
        import zarr

        import archives.stores  # noqa: F401  # which zarr decodes with from here on

        if is_url(file.path):
            from archives.object_store import open_zarr

            return open_zarr(file.path, file.access)
        return zarr.open_group(file.path, mode="r")
    if file.kind == "hdf5":
        import h5py

        return h5py.File(file.path, "r")
    if file.kind == "grib":
        from archives.grib import open_grib

        return open_grib(file.path)
    from scipy.io import netcdf_file

    return netcdf_file(file.path, "r", mmap=True)


def find_files(path: str) -> list[str]:
    """The files that a path stands for: itself, or what a folder or a glob holds, sorted by name.

    DataError naming the path where nothing is there.
    """
    path = path.removeprefix("file://")
    if is_url(path) or os.path.isfile(path) or is_zarr(path):
        return [path]
    if os.path.isdir(path):
        inside = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        found = [name for name in inside if name.lower().endswith(DATA_FILES) or is_zarr(name)]
        if not found:
            folders = [os.path.basename(name) for name in inside if os.path.isdir(name)]
            hint = f"; it has the folders {', '.join(folders[:5])}" if folders else ""
            raise DataError(f"cannot read {path!r}: the folder holds no Zarr, NetCDF or HDF5{hint}")
        return found
    found = sorted(glob.glob(path))
    if not found:
        raise DataError(f"cannot read {path!r}: there is no such file or folder{_nearest_path(path)}")
    return found


def _nearest_path(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    names = os.listdir(folder) if os.path.isdir(folder) else []
    close = difflib.get_close_matches(os.path.basename(path), names, n=1)
    return f"; nearest: {os.path.join(os.path.dirname(path), close[0])!r}" if close else ""


def is_url(path: str) -> bool:
    """Whether a path goes through fsspec: "gs://...", "memory://...", "simplecache::s3://..."."""
    return "://" in path or "::" in path


def file_lines(path: str, array: str) -> list[bytes]:
    """Name, size and time of change of each file that holds an array; none for a URL."""
    if is_url(path):
        return []
    root, lines = os.path.join(path, array) if os.path.isdir(path) else path, []
    for name in sorted(files_below(root)):
        status, inside = os.stat(name), os.path.relpath(name, os.path.dirname(path))
        line = f"{inside} {status.st_size} {status.st_mtime_ns}\n"
        lines.append(line.encode("utf-8", "surrogateescape"))
    return lines


def files_below(path: str) -> list[str]:
    """All files of a folder; of a file, itself."""
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]


def file_kind(path: str) -> str:
    """One of "zarr", "hdf5", "netcdf3", "grib", from a folder's marker or first bytes; DataError: another."""
    if is_url(path) or is_zarr(path):
        return "zarr"
    if not os.path.isfile(path):  # a pipe or a device: reading it may never end
        raise DataError(f"cannot read {path!r}: it is no regular file")
    with open(path, "rb") as file:
        start = file.read(8)
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5"
    if start[:4] in (b"CDF\x01", b"CDF\x02"):
        return "netcdf3"
    if start[:4] == b"GRIB":
        return "grib"
    known = {
        b"": "it is empty",
        b"PK\x03\x04": "unzip it first",
    }
    reason = known.get(start[:4], f"it is neither Zarr, NetCDF nor HDF5 (begins with {start!r})")
    raise DataError(f"cannot read {path!r}: {reason}")


def is_zarr(path: str) -> bool:
    """Whether a local folder is a Zarr store, of format 2 or 3."""
    return any(
        os.path.exists(os.path.join(path, marker)) for marker in (".zgroup", ".zmetadata", "zarr.json")
    )


def open_file(path: str, access: Access = NO_OPTIONS) -> StoredFile:
    """Describe the arrays of one file; DataError naming the path and the reason where it cannot be read."""
    file = StoredFile(path, file_kind(path), access=access)
    try:
        file.arrays, file.attrs = _DESCRIBERS[file.kind](_handles(file)[0])
    except DataError as error:
        if is_url(path):
            raise  # which says so itself
        raise DataError(f"cannot read {path!r}: {error}") from error
    except (OSError, KeyError, ValueError, TypeError, IndexError, AttributeError, ImportError) as error:
        raise DataError(f"cannot read {path!r}: {_one_line(error)}") from error
    return file


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, DataError) else f"{type(error).__name__}: {text}"


def _plain(attrs: Any) -> dict[str, Any]:
    """Attributes as text and plain numbers, whatever library they come from."""
    plain = {}
    for key, value in attrs.items():
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.reshape(-1)[0]
        plain[key] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return plain


def _describe_zarr(root: Any) -> tuple[dict, dict]:
    arrays = {}
    for name, array in root.arrays():
        attrs = dict(array.attrs)
        dims = attrs.get("_ARRAY_DIMENSIONS") or getattr(array.metadata, "dimension_names", None)
        fill = array.fill_value
        # Zarr 2's fill value means "missing", as in xarray, but for 0: that is what a store gets whose writer
        # said nothing, and would make sea of every land mask NaN.
        if array.metadata.zarr_format == 2 and fill is not None and fill != 0:
            attrs.setdefault("_FillValue", fill)
        dims = tuple(dims or ("",) * array.ndim)
        arrays[name] = StoredArray(dims, array.shape, array.dtype, attrs, array.chunks)
    return arrays, dict(root.attrs)


def _describe_hdf5(root: Any) -> tuple[dict, dict]:
    import h5py

    arrays = {}
    for name, item in root.items():
        if isinstance(item, h5py.Dataset):
            dims = tuple(str(axis[0].name).split("/")[-1] if len(axis) else "" for axis in item.dims)
            if item.is_scale and item.ndim == 1:
                dims = (name,)
            attrs = {
                key: item.attrs[key] for key in item.attrs if key not in ("DIMENSION_LIST", "REFERENCE_LIST")
            }
            arrays[name] = StoredArray(dims, item.shape, item.dtype, _plain(attrs), item.chunks)
    return arrays, _plain(root.attrs)


def _describe_netcdf3(root: Any) -> tuple[dict, dict]:
    arrays = {
        name: StoredArray(array.dimensions, array.shape, array.data.dtype, _plain(array._attributes), None)
        for name, array in root.variables.items()
    }
    return arrays, _plain(root._attributes)


def _describe_grib(root: Any) -> tuple[dict, dict]:
    from archives.grib import attributes_of, dims_of

    arrays = {}
    for name, array in root.items():
        attributes, dtype = attributes_of(name, array), getattr(array, "dtype", np.dtype("f4"))
        arrays[name] = StoredArray(dims_of(name, array), array.shape, dtype, attributes, None)
    return arrays, {}


_DESCRIBERS = {
    "zarr": _describe_zarr,
    "hdf5": _describe_hdf5,
    "netcdf3": _describe_netcdf3,
    "grib": _describe_grib,
}


# -- chunks that a Zarr store does not have, and that read as its fill value: as zeros, most often. Where that
# is NaN they are what they look like; else the store is asked about chunks that begin with the fill value.

Index = tuple[int | slice, ...]


def missing_chunks(array: Any, selection: Sequence[int | slice], stored: np.ndarray) -> Iterator[Index]:
    """Parts of `stored`, which is array[selection], that lie in chunks which are not there."""
    fill = array.fill_value
    if fill is None or (isinstance(fill, float | np.floating) and math.isnan(fill)) or array.shards:
        return
    spans = [_span(*each) for each in zip(selection, array.shape, strict=True)]
    parts = [list(_parts(span, chunk)) for span, chunk in zip(spans, array.chunks, strict=True)]
    kept = [i for i, each in enumerate(selection) if isinstance(each, slice)]  # dims that `stored` has
    for chosen in product(*parts):
        inside = tuple(chosen[i][1] for i in kept)
        if stored[tuple(part.start for part in inside)] == fill and not _is_there(
            array, [c for c, _ in chosen]
        ):
            yield inside


def _span(selected: int | slice, size: int) -> tuple[int, int]:
    if isinstance(selected, slice):
        return selected.indices(size)[:2]
    return int(selected), int(selected) + 1


def _parts(span: tuple[int, int], chunk: int) -> Iterator[tuple[int, slice]]:
    """(number of a chunk, where it lies in what was read) along one dim."""
    first, end = span
    for number in range(first // chunk, -(-end // chunk)):
        yield number, slice(max(number * chunk, first) - first, min((number + 1) * chunk, end) - first)


def _is_there(array: Any, chunk: Sequence[int]) -> bool:
    key = f"{array.store_path.path}/{array.metadata.encode_chunk_key(tuple(chunk))}".lstrip("/")
    from zarr.core.sync import sync

    return sync(array.store_path.store.exists(key))
