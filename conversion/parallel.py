"""Parts of a long piece of work, by Dask: in this process, in some of this machine, or on a cluster.

Progress with the time left stands on a terminal; elsewhere a line every half minute.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, Protocol

import dask.base
from dask.callbacks import Callback
from dask.delayed import delayed
from tqdm import tqdm

from errors import ConfigError, RunFailed, tell

EVERY = 30.0  # seconds between two lines of progress
PR_SET_PDEATHSIG = 1
WAIT_FOR_SCHEDULER = 20  # seconds


class Part(Protocol):
    @property
    def name(self) -> str: ...


Done = Callable[[str, Any], None]  # the name of a part, and what its work returned


def run_parts(
    work: Callable[[Any], Any], parts: Sequence[Part], done: Done, workers: int, scheduler: str = ""
) -> None:
    """work(part) for each part, and done(name, result) in this process as soon as one is.

    workers: processes on this machine, 1: this one. scheduler: address of one of dask.distributed instead.
    What the work raises is raised here; RunFailed where a worker is lost.
    """
    tasks = [delayed(work, name="part", pure=False)(part, dask_key_name=part.name) for part in parts]
    if scheduler:
        _on_cluster(tasks, done, scheduler)
    elif workers > 1:
        _in_processes(tasks, done, workers)
    else:
        with _Told(done):
            dask.base.compute(*tasks, scheduler="synchronous")


class _Told(Callback):
    """Dask's word for each task that has ended."""

    def __init__(self, done: Done) -> None:
        super().__init__()
        self.done = done

    def _posttask(self, key: Any, result: Any, *_: Any) -> None:
        self.done(key, result)


def _in_processes(tasks: Sequence[Any], done: Done, workers: int) -> None:
    """Not threads: HDF5 has one lock for all of a process, and packing holds Python's."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, partial(_end_with, os.getpid()))
    try:
        with _Told(done):
            dask.base.compute(*tasks, scheduler="processes", pool=pool, chunksize=1)
    except BrokenProcessPool:
        why = "a worker was killed, perhaps by the kernel when memory ran out: then take fewer --workers"
        raise RunFailed(f"{why}; the same command goes on where this stopped") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _end_with(parent: int) -> None:
    """A worker ends with its parent, however that ends, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _on_cluster(tasks: Sequence[Any], done: Done, address: str) -> None:
    try:
        from distributed import Client, as_completed  # type: ignore[reportMissingImports]  # an extra
    except ImportError:
        fix = "pip install -r requirements-extras.txt, or its line with distributed"
        raise ConfigError(f"--scheduler {address}: the package distributed is not there; {fix}") from None
    try:
        client = Client(address, timeout=WAIT_FOR_SCHEDULER)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--scheduler {address}: no scheduler answers there ({reason})") from None
    with client:
        for future, result in as_completed(client.compute(list(tasks)), with_results=True):
            done(future.key, result)


class Progress:
    """How many parts of all are done, and how long the others take."""

    def __init__(self, total: int, before: int = 0) -> None:
        """before: parts that an earlier run has done."""
        self.total, self.before, self.count = total, before, before
        self.start = self.told = time.monotonic()
        shown = sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=before, unit="part", disable=not shown) if shown else None

    def advance(self) -> None:
        self.count += 1
        if self.bar is not None:
            self.bar.update()
        elif time.monotonic() - self.told >= EVERY:
            self.told = time.monotonic()
            tell(f"{self.count} of {self.total} parts, {self.left()} left")

    def left(self) -> str:
        """h:mm:ss at the rate so far."""
        rate = (self.count - self.before) / max(time.monotonic() - self.start, 1e-9)
        seconds = round((self.total - self.count) / rate) if rate else 0
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
