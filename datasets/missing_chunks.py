"""Chunks that a Zarr store does not have, and that read as its fill value: as zeros, most often.

Where the fill value is NaN a missing chunk is what it looks like. Otherwise only the store can tell it from
numbers; it is asked about chunks that begin with the fill value, and about no others.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from zarr.core.sync import sync

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
    return sync(array.store_path.store.exists(key))
