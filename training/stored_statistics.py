"""The file statistics.npz of a run's folder: written with a checksum, which is compared before it is used."""

import hashlib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from datasets.statistics import Source, Statistics
from durable_files import replacing
from errors import DataError

CHECKSUM = "checksum"


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def write_statistics(statistics: Statistics, path: Path) -> None:
    """Write the statistics atomically. Raises OSError."""
    arrays: dict[str, Any] = {
        each.name: np.asarray(getattr(statistics, each.name)) for each in fields(statistics)
    }
    arrays[CHECKSUM] = np.array(digest(arrays))
    with replacing(path) as partial:
        np.savez(partial, **arrays)


def check_statistics(path: Path, source: Source) -> None:
    """Raise DataError if a file has other numbers than were written, or is of another shape.

    One that is no archive of arrays is left to `read_statistics`, one of an older version has no checksum.
    """
    way_out = "remove it, and the next start computes the statistics again"
    if path.is_dir():
        raise DataError(f"{path}: is a folder; {way_out}")
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return
    checksum = arrays.pop(CHECKSUM, None)
    if checksum is not None and str(checksum) != digest(arrays):
        raise DataError(f"{path}: its numbers are not those that were written (SHA-256); {way_out}")
    shapes = {name: (len(source.variables),) for name in ("mean", "std", "change_std")}
    shapes |= {"mean_field": (len(source.variables), len(source.weights))}
    for name, shape in shapes.items():
        found = arrays[name].shape[: len(shape)] if name in arrays else shape
        if found != shape and str(arrays.get("fingerprint")) == source.fingerprint:
            raise DataError(f"{path}: {name} has the shape {list(found)}, {list(shape)} expected; {way_out}")
