"""Gloo ranks spawned once and given many checks: starting one takes longer than stepping a tiny model."""

import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallelisms.degrees import Degrees
from parallelisms.mesh import Mesh, build_mesh

Check = Callable[..., Any]  # a top-level function: what it returns on rank 0 comes back


def _serve(rank: int, world: int, port: int, inbox: Any, outbox: Any) -> None:
    """One rank: joins the group, then runs checks until it is told to stop."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()} | {"MASTER_ADDR": "127.0.0.1"})
    from parallelisms.mesh import start_ranks

    torch.set_num_threads(1)
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start DCP's process
    start_ranks(120, "gloo")
    while (task := inbox.get()) is not None:
        check, arguments = task
        try:
            outbox.put((rank, True, check(*arguments)))
        except Exception:
            outbox.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


def own_device() -> torch.device:
    """Of this rank: a GPU where ranks talk through NCCL."""
    on_gpu = "nccl" in str(dist.get_backend_config())
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")


def shared_mesh(degrees: Degrees) -> Mesh:
    """One for all checks: every group of a mesh has threads that look for messages all the time."""
    return _mesh_of(dist.group.WORLD, degrees)


@cache
def _mesh_of(world: dist.ProcessGroup | None, degrees: Degrees) -> Mesh:
    return build_mesh(own_device().type, degrees)


class Ranks:
    """`run(check, *arguments)` runs a check on all ranks; what each returns, by rank. Failures are raised."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.start()

    def start(self) -> None:
        context = mp.get_context("forkserver")  # ranks are forks of a process that has imported torch
        context.set_forkserver_preload(["train", "pytest", "tests.parity"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.inboxes, self.outbox = [context.Queue() for _ in range(self.world)], context.Queue()
        self.processes = [
            context.Process(target=_serve, args=(rank, self.world, port, inbox, self.outbox), daemon=True)
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def run(self, check: Check, *arguments: Any, timeout: float = 120) -> list[Any]:
        """What the check returns on each rank. AssertionError: it failed on one of them.

        Gloo's own thread has ended a rank with SIGSEGV once in a dozen runs of all tests (torch 2.13,
        gloo_tcp_loop in malloc): such a check is tried once more, and pytest shows a warning.
        """
        try:
            return self._run(check, arguments, timeout)
        except AssertionError as error:
            if not self.crashed:
                raise
            warnings.warn(f"a rank was ended by a signal, tried again: {error}", stacklevel=2)
            return self._run(check, arguments, timeout)

    @property
    def crashed(self) -> bool:
        """Return True if a rank's process was ended by a signal that the tests do not send."""
        return any(process.exitcode == -signal.SIGSEGV for process in self.processes)

    def _run(self, check: Check, arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        if not all(process.is_alive() for process in self.processes):
            self.start()  # a check that failed ended them: the next one shall not fail for it
        for inbox in self.inboxes:
            inbox.put((check, arguments))
        answers: dict[int, Any] = {}
        for _ in self.inboxes:
            rank, succeeded, answer = self._next_answer(time.monotonic() + timeout)
            if not succeeded:
                self.stop()  # others may wait for this one
                raise AssertionError(f"rank {rank} of {self.world}:\n{answer}")
            answers[rank] = answer
        return [answers[rank] for rank in sorted(answers)]

    def _next_answer(self, until: float) -> tuple[int, bool, Any]:
        while time.monotonic() < until:
            with suppress(Empty):
                return self.outbox.get(timeout=1)
            for rank, process in enumerate(self.processes):
                if not process.is_alive():
                    return rank, False, f"ended with exit code {process.exitcode}"
        return -1, False, "no rank has answered in time"

    def stop(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
