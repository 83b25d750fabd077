"""On a CPU a step's activations are the host's memory: it is kept for the next step, and only for that."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
KEPT = {
    M_TRIM_THRESHOLD: 2**31 - 1,  # what is free at the end of the heap, from which on it is given back
    M_TOP_PAD: 2**26,  # what is asked for beyond the need, when the heap grows
    M_MMAP_THRESHOLD: 2**30,  # larger blocks are mapped, and given back when they are free
}
ROOM = 8e9  # bytes of the host for a rank, below which a fifth more that the heap keeps may be too much
GIVEN_BACK = {M_TRIM_THRESHOLD: 2**27, M_TOP_PAD: 2**17, M_MMAP_THRESHOLD: 2**25}


def keep_freed_memory(device: torch.device) -> None:
    """glibc otherwise gives freed memory back to the system, and the next step takes it again page by page.

    Of this process alone: the writer of checkpoints, for one, shall give back what it had. Without effect
    where the C library is another. Where ranks have little memory each, it goes back: their steps are slower.
    """
    if device.type == "cpu" and host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > ROOM:
        _set(KEPT)


def host_memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def giving_memory_back(device: torch.device) -> Iterator[None]:
    """What steps have left goes back to the system, and so does what is freed inside: it is another thing.

    Steps are alike and fill the gaps that the one before left. Fields of other sizes do not, and the heap
    would hold both: 10 GB for 6 in a validation of 65 fields at 721 x 1440.
    """
    if device.type != "cpu":
        yield
        return
    _set(GIVEN_BACK)
    _trim()
    yield
    _trim()
    keep_freed_memory(device)


def _set(settings: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for parameter, value in settings.items():
            mallopt(parameter, value)


def _trim() -> None:
    """What is free between blocks in use goes back, too."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
