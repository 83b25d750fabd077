"""Watchdog: a thread of each rank that ends all ranks in bounded time when one has died, stalls or has left.

Once a second every rank writes its heartbeat to the job's store. Rank 0 judges all of them, the others watch
rank 0; every rank that reads a shutdown reason there ends. A rank may take `comm.timeout_seconds`
before the end of the first step and in long phases, and `comm.train_timeout_seconds` in all other steps.
Process groups wait a little longer than the longest of these, so that the watchdog, which knows the stalled
rank, reports first. The thread gets signals, too: the main thread may be inside C code.
"""

import faulthandler
import importlib
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]

import errors
from config import Comm
from errors import FAILED, print_message
from jobs.durable_files import write_durably
from jobs.heartbeat import LONG_PHASES, activity
from jobs.signals import signal_socket

INTERVAL = 1.0  # seconds between heartbeats
NO_HEARTBEAT = 3.0  # seconds without one, after which a rank counts as silent
STORE_SECONDS = 5.0  # limit for a call of the store, which blocks when a link is cut
AFTER_LOSS_SECONDS = 4.0  # silence after which a rank counts as the cause of a broken connection
EXPLAIN_SECONDS = 15.0  # time that a rank with a broken connection waits for the reason
LINGER_SECONDS = 5.0  # in which the other ranks read the reason, where the store ends with rank 0
NO_REASON = "-"
# Words of torch's backends when the other end of a connection is gone, or takes too long.
LOST = ("gloo", "connection", "nccl", "timed out", "process group", "store")


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, which it sends once a second."""

    rank: int
    host: str = "unknown host"
    pid: int = 0
    step: int = -1
    phase: str = "nothing yet"
    seconds: float = 0.0  # since its last progress
    limit: float = float("inf")  # seconds that it may take
    waits: bool = False  # inside a collective: another rank delays it
    lost: bool = False  # a connection to another rank has broken
    silent: float = 0.0  # seconds since its last heartbeat


def find_stalled_ranks(ranks: Sequence[Heartbeat], silence: float) -> tuple[list[Heartbeat], str] | None:
    """Return the ranks that stop the run and the reason; None while there is none. silence: `Watchdog`'s."""
    if silent := [rank for rank in ranks if rank.silent > silence]:
        longest = max(rank.silent for rank in silent)
        return silent, f"no heartbeat for {longest:.0f} s: stopped, dead, or its host cannot be reached"
    # A rank with a heartbeat is stalled when it is over its limit and does not merely wait for one behind it.
    busy = [rank for rank in ranks if not rank.waits]
    if not busy and any(rank.silent > NO_HEARTBEAT for rank in ranks):
        return None  # the others wait for a silent rank, which the check above will find soon
    candidates = busy or ranks
    behind = [rank for rank in candidates if rank.step == min(other.step for other in candidates)]
    late = [rank for rank in behind if rank.seconds > rank.limit]
    if not late:
        return None
    reason = f"no progress for {max(rank.seconds for rank in late):.0f} s (limit {late[0].limit:.0f} s)"
    if not busy and len(ranks) > 1:
        reason += "; every rank waits for others, so they call different collectives: compare their stacks"
    return late, reason


def format_report(stalled: Sequence[Heartbeat], reason: str) -> str:
    """Return one line: ranks, hosts, step, phase, reason."""
    names = [f"rank {rank.rank}{rank.pid and f' ({rank.host}, pid {rank.pid})' or ''}" for rank in stalled]
    first = stalled[0]
    place = f"in step {first.step}, {first.phase}" if first.step > 0 else "before its first step"
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''} {place}: {reason}; all ranks end"


def is_lost_connection(error: BaseException) -> bool:
    """Return True for an exception that another rank's end causes."""
    is_named = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST)
    return is_named or isinstance(error, dist.DistError)


class Watchdog(threading.Thread):
    """Thread that watches this rank and the others, inside the context or until `stop`."""

    def __init__(self, folder: Path, comm: Comm) -> None:
        """folder: the run's; stacks go to hang/ in it."""
        super().__init__(name="watchdog", daemon=True)
        self.folder = folder
        self.long_limit, self.short_limit = comm.timeout_seconds, comm.train_timeout_seconds
        self.group_seconds = self.long_limit + EXPLAIN_SECONDS
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.parent, self.has_launcher = os.getppid(), "TORCHELASTIC_RUN_ID" in os.environ
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.trained = False  # all ranks have compiled, so that `comm.train_timeout_seconds` applies
        self.lost = self.owns_folder = self.is_asked_to_stop = self.is_unwritable = False
        self.comparison: dict[str, float] = {}  # of planned and measured steps, for status.json
        self.selection: Any = None  # of the run's data, for a report of memory that runs out
        self.last: dict[int, tuple[bytes, float]] = {}  # rank -> its last heartbeat, and when it changed
        self.loss: Exception | None = None  # of a connection to another rank
        self.store: Store | None = None
        self.contact = time.monotonic()  # with the store
        self.stopped = threading.Event()
        self.ends = threading.Lock()  # of the thread that ends this process
        self.end_later: tuple[float, str, int] | None = None  # time, message and code

    def __enter__(self) -> "Watchdog":
        activity.start_phase("start", 0)
        self.signals = signal_socket()
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.end_with(error)
        self.stop()

    def stop(self) -> None:
        """Let ranks end from now on. Called after the last barrier."""
        self.stopped.set()
        if self.is_alive():
            if (waker := signal.set_wakeup_fd(-1)) >= 0:
                os.write(waker, b"\0")
            self.join(timeout=2 * STORE_SECONDS)

    def begin(self, step: int) -> None:
        """Start to write status.json: from now on the run's folder is this run's. step: the last one."""
        activity.step, self.owns_folder = step, True
        if self.rank == 0:
            self.write_status(None)

    def write_status(self, exit_code: int | None, message: str = "") -> None:
        """Write status.json, once the run's folder is this run's. exit_code: None while the run goes on."""
        status = {"exit_code": exit_code, "step": activity.step, "message": message.partition("\n")[0]}
        status |= {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        status |= {"restart": int(self.attempt), "ranks": self.world_size} | self.comparison
        try:
            if self.owns_folder:
                write_durably(self.folder / "status.json", json.dumps(status, indent=1) + "\n")
        except OSError as error:
            if not self.is_unwritable:  # said once
                print_message(f"{self.folder}: status.json is not written: {error}")
            self.is_unwritable = True

    def heartbeat(self) -> Heartbeat:
        """Return the state of this rank."""
        is_long = not self.trained or LONG_PHASES & set(activity.phases)
        limit = self.long_limit if is_long else self.short_limit
        if self.world_size == 1 and activity.phases[-1] == "data":
            limit = self.long_limit  # remote data are asked for again; no rank waits for this one
        if self.world_size == 1 and activity.phases == ("start",):
            limit = float("inf")  # while the statistics of a large archive are computed
        host, waits = socket.gethostname(), activity.waits_for_others() or self.lost
        phase, seconds = activity.describe_phase(), time.monotonic() - activity.since
        return Heartbeat(self.rank, host, os.getpid(), activity.step, phase, seconds, limit, waits, self.lost)

    def silence(self, is_lost: bool = False) -> float:
        """Return the seconds without a heartbeat after which a rank is taken for dead."""
        limit = self.short_limit if self.trained else self.long_limit
        if self.is_asked_to_stop:  # perhaps by the launcher, because another rank is dead
            limit = min(limit, EXPLAIN_SECONDS)
        # A connection has broken: one of the ranks probably is dead.
        return min(limit, AFTER_LOSS_SECONDS) if is_lost else limit

    # -- the thread

    def run(self) -> None:
        """Called by `start` in the thread."""
        while not self.stopped.is_set():
            if self.has_launcher and os.getppid() != self.parent:
                errors.exit_now(FAILED)  # the launcher was killed: nothing else would end this rank
            try:
                self.exchange()
                self.contact = time.monotonic()
            except (dist.DistError, OSError) as error:
                self.store = None  # the next heartbeat connects again
                # Without a launcher the store begins with rank 0: before that it is not closed.
                closed = bool(self.last) and isinstance(error, ConnectionRefusedError)
                silent = time.monotonic() - self.contact
                if silent > self.silence(self.lost or closed):
                    host = f"rank 0's host, {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                    reason = f"for {silent:.0f} s: link or host down, or rank 0 has ended"
                    self.end(
                        f"no answer from {host}, {reason}; rank {self.rank} ends in step {activity.step}"
                    )
            if self.end_later and time.monotonic() > self.end_later[0]:
                _, message, code = self.end_later
                self.end(message, code)
            # -- until the next heartbeat, signals, which handlers get here
            if select.select([self.signals], [], [], INTERVAL)[0]:
                for number in filter(None, self.signals.recv(64)):
                    handler = signal.getsignal(number)
                    if callable(handler):
                        handler(number, None)

    def exchange(self) -> None:
        """Write this rank's heartbeat, and end this rank where the store has a reason. Rank 0 reads those of
        all ranks, the others rank 0's. Raises DistError or OSError where the store does not answer.
        """
        mine = self.heartbeat()
        if self.world_size > 1 and self.store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            # Where nobody listens torch would print C++ frames.
            socket.create_connection((host, port), timeout=STORE_SECONDS).close()
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            # Its time-out counts for waiting alone: an answer that never comes would block for ever.
            if descriptor := re.search(r"client=.*?fd=(\d+)", repr(store)):
                with socket.socket(fileno=os.dup(int(descriptor[1]))) as connection:
                    seconds = struct.pack("ll", int(STORE_SECONDS), 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
            store.compare_set(f"watchdog/{self.attempt}/shutdown", "", NO_REASON)
            self.store = PrefixStore(f"watchdog/{self.attempt}", store)
        heartbeats = [mine]
        if self.store:
            self.store.set(f"rank/{self.rank}", json.dumps(asdict(mine)))
            ranks = [0] if self.rank else range(self.world_size)
            for rank in ranks:
                if rank not in self.last:  # a key that is not there would be waited for
                    self.store.compare_set(f"rank/{rank}", "", json.dumps(asdict(Heartbeat(rank))))
            # All in one request: of 300 ranks, too.
            texts = self.store.multi_get(["shutdown"] + [f"rank/{rank}" for rank in ranks])
            if texts[0].decode() != NO_REASON:
                self.end("", int(texts[0].split()[0]))
            heartbeats, now = [], time.monotonic()
            for rank, text in zip(ranks, texts[1:], strict=True):
                if self.last.get(rank, (b"", 0.0))[0] != text:
                    self.last[rank] = (text, now)
                heartbeats.append(replace(Heartbeat(**json.loads(text)), silent=now - self.last[rank][1]))
        # -- rank 0 judges all ranks; the others only whether rank 0 is there
        silence = self.silence(self.lost or any(rank.lost for rank in heartbeats))
        if self.rank == 0 or heartbeats[0].silent > max(silence, NO_HEARTBEAT):
            if problem := find_stalled_ranks(heartbeats, silence):
                stalled, reason = problem
                self.end(f"{format_report(stalled, reason)}; stacks: {self.folder / 'hang'}")

    # -- the end

    def end(self, message: str, code: int = FAILED) -> NoReturn:
        """End this rank and all others. If several ranks have a message, only the first is reported: the one
        that sets the shutdown reason, or the first of its host where the store does not answer.
        """
        if not self.ends.acquire(blocking=False):
            time.sleep(2 * EXPLAIN_SECONDS)  # the other thread of this rank ends the process
        # -- the reason, of the first rank that has one
        is_first = bool(message)
        # Without its host a store may never answer.
        if is_first and self.store and time.monotonic() - self.contact < STORE_SECONDS:
            mine = f"{code} {self.rank}"
            with suppress(dist.DistError):  # it has ended with rank 0
                is_first = self.store.compare_set("shutdown", NO_REASON, mine).decode() == mine
        if is_first and errors.is_reporting_rank():
            print_message(message)
            self.write_status(code, message)
        # -- if the main thread may hang, all stacks, and NCCL's flight recording (torchfrtrace)
        if code == FAILED and threading.current_thread() is self:
            c10d, folder = importlib.import_module("torch._C._distributed_c10d"), self.folder / "hang"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / f"rank-{self.rank}.txt").open("w") as file:
                    if self.loss:  # of the collective that has ended; the main thread is not in it any more
                        text = "".join(traceback.format_exception(self.loss))
                        print(errors.without_secrets(text), file=file, flush=True)
                    faulthandler.dump_traceback(file, all_threads=True)
                if dump := getattr(c10d, "_dump_nccl_trace", None):  # in builds for CUDA
                    (folder / f"nccl_{self.rank}").write_bytes(dump())
            except OSError as error:
                print_message(f"{self.folder}: no stacks written: {error}")
        # -- without a launcher the store is this process or rank 0's, which waits until all have the reason
        if self.store and not self.has_launcher:
            deadline = time.monotonic() + LINGER_SECONDS
            with suppress(dist.DistError):
                number = self.store.add("left", int(self.rank > 0))
                while self.rank == 0 and number < self.world_size - 1 and time.monotonic() < deadline:
                    time.sleep(0.1)
                    number = self.store.add("left", 0)
        if self.store is None and code == errors.EXIT_SAVED and self.world_size > 1:
            errors.exit_now(code)  # not 0, which a launcher would take for the end of this rank alone
        errors.end_process(code)

    def end_with(self, error: Exception) -> None:
        """End this rank and all others with an exception of the main thread. A single rank returns."""
        text, code = errors.one_line(error), errors.exit_code(error)
        message = text or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if self.world_size == 1:
            self.write_status(code, message)
        elif not text:
            if is_lost_connection(error):  # caused by another rank, which the shutdown reason names
                self.lost, self.loss = True, error
                time.sleep(EXPLAIN_SECONDS)  # the thread ends the process as soon as there is a reason
            sys.excepthook(type(error), error, error.__traceback__)  # which hides secrets
            self.end(format_report([self.heartbeat()], message))
        elif not self.stopped.is_set():
            self.end(text, code)
