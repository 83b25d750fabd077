"""On a CPU a step's activations are the host's memory: it is kept for the next step."""

import ctypes

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
SETTINGS = {
    M_TRIM_THRESHOLD: 2**31 - 1,  # what is free at the end of the heap, from which on it is given back
    M_TOP_PAD: 2**26,  # what is asked for beyond the need, when the heap grows
    M_MMAP_THRESHOLD: 2**30,  # larger blocks are mapped, and given back when they are free
}


def keep_freed_memory(device: torch.device) -> None:
    """glibc otherwise gives freed memory back to the system, and the next step takes it again page by page.

    Of this process alone: the writer of checkpoints, for one, shall give back what it had. Without effect
    where the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if device.type == "cpu" and mallopt:
        for parameter, value in SETTINGS.items():
            mallopt(parameter, value)
