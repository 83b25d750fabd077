"""Fixtures that several test files share."""

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported, because tests run at the same time as other tests and the ranks that they spawn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")  # as run_train.sh sets it

import pytest
import torch
import torch.distributed as dist
import xarray as xr

import errors
from datasets.archive import Archive, open_archive
from datasets.convert import read_attributes
from errors import STOP_SIGNALS
from parallelisms.mesh import start_ranks
from tests.distributed import Ranks
from tests.sample_archives import analyses, weatherbench
from tests.started_jobs import ROOT, Job

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what runs in the background
errors.exit_now = sys.exit  # programs that a test calls in its own process
HANDLERS = {number: signal.getsignal(number) for number in STOP_SIGNALS}


def memory_kib(process: int | str = "self") -> int:
    """Memory of a process in KiB without mapped files, which does not depend on other processes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than half a minute")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove stores that earlier tests have left: pytest gives the names of its folders again."""
    if hasattr(session.config, "workerinput"):
        return
    for store in Path(ROOT, "outputs/stores").glob("*.zarr"):
        sources = read_attributes(store).get("options", {}).get("source", [])
        if any(source.startswith(tempfile.gettempdir()) for source in sources):
            shutil.rmtree(store, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start jobs come first, then those with many tests: two workers take a file each, and who
    begins a long one last ends alone.
    """
    starting = {item.path for item in items if "start_job" in getattr(item, "fixturenames", ())}
    numbers = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in starting, -numbers[item.path]))


@pytest.fixture(scope="module")
def truth() -> xr.Dataset:
    return analyses()


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Of these analyses."""
    return open_archive(weatherbench(tmp_path, analyses()))


@pytest.fixture
def start_job() -> Iterator[Callable[..., Job]]:
    """Starts jobs through run_train.sh; those that still run at the end of a test are killed."""
    jobs: list[Job] = []

    def start(*arguments: Any, **settings: Any) -> Job:
        jobs.append(Job(*arguments, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill_all()


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A run inside a test would leave its process group and its signal handlers to the next test."""
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def no_compilations() -> Iterator[None]:
    """Compilations belong to the process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[torch.device]:
    """A process group of this process alone, as train.py makes it."""
    device = start_ranks(60, "gloo")
    yield device
    dist.destroy_process_group()


STARTED: dict[int, Ranks] = {}  # by number


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], Ranks]:
    """Gloo ranks by number, spawned when first asked for and shared by all tests."""

    def get(world: int) -> Ranks:
        if world not in STARTED:
            STARTED[world] = Ranks(world)
        return STARTED[world]

    return get


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks that wait look for messages all the time: a dozen of them take a core from other tests."""
    if "ranks" not in getattr(nextitem, "fixturenames", ()):
        while STARTED:
            STARTED.popitem()[1].stop()
