"""Settings of a process that trains: deterministic kernels, the heap of the C library."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jobs import machine

# On a CPU the activations of a step are in the heap.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
RETAIN = {
    M_TRIM_THRESHOLD: 2**31 - 1,  # free bytes at the end of the heap, above which they are given back
    M_TOP_PAD: 2**26,  # bytes that are asked for beyond the need when the heap grows
    M_MMAP_THRESHOLD: 2**30,  # larger blocks are mapped, and given back when they are free
}
RETURN = {M_TRIM_THRESHOLD: 2**27, M_TOP_PAD: 2**17, M_MMAP_THRESHOLD: 2**25}
ENOUGH = 8e9  # bytes of the host for a rank, below which a fifth more in the heap may be too much


def set_determinism(deterministic: bool) -> None:
    """Allow TF32; with `deterministic`, refuse kernels with sums that depend on the order of threads."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)


def retain_memory(device: torch.device) -> None:
    """Keep freed memory for the next step; glibc would return it, and a step would fault its pages again."""
    # Only in this process, and only where each rank has enough memory. No effect with another C library.
    if device.type == "cpu" and machine.memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > ENOUGH:
        set_heap(RETAIN)


@contextmanager
def return_memory(device: torch.device) -> Iterator[None]:
    """Return the freed memory of steps to the system, and memory that is freed inside the context."""
    # Steps reuse each other's memory. Fields of other sizes do not, and the heap would keep both: 10 GB
    # instead of 6 in a validation of 65 fields at 721 x 1440.
    if device.type != "cpu":
        yield
        return
    set_heap(RETURN)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    trim(0)
    yield
    trim(0)
    retain_memory(device)


def set_heap(settings: dict[int, int]) -> None:
    """Set parameters of glibc's malloc; another C library may have no such function."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter, value in settings.items():
            mallopt(parameter, value)
