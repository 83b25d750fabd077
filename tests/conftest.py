"""Fixtures that several test files share."""

import os
from collections.abc import Iterator

# Before torch is imported: tests run beside each other and beside the ranks they spawn.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch.distributed as dist

from parallelisms.mesh import start_ranks


@pytest.fixture
def one_rank() -> Iterator[torch.device]:
    """A process group of this process alone, as train.py makes it."""
    device = start_ranks("gloo", timeout_seconds=60)
    yield device
    dist.destroy_process_group()
