"""Watchdog: find a rank that has died, stalled or left, in bounded time, and end all ranks with its name.

Once a second every rank writes its heartbeat to the job's store. Rank 0 checks all; every rank that reads a
shutdown reason there ends. The watchdog alone decides how long a rank may take: `comm.timeout_seconds` before
the end of the first step and in long phases, `comm.train_timeout_seconds` in all others. Process groups wait
a little longer than the longest of these, so that the watchdog, which knows the stalled rank, reports first.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]

from config import Comm
from errors import (
    BAD_INPUT,
    EXIT_SAVED,
    FAILED,
    UserError,
    end_process,
    end_rank,
    is_reporting_rank,
    one_line,
    print_message,
)
from jobs.durable_files import write_durably
from jobs.hang_report import (
    Heartbeat,
    find_stalled_ranks,
    format_report,
    format_table,
    last_collective,
    write_stacks,
)
from jobs.heartbeat import activity

INTERVAL = 1.0  # seconds between heartbeats
STORE_SECONDS = 5.0  # limit for a call of the store, which blocks when a link is cut
AFTER_LOSS_SECONDS = 4.0  # silence after which a rank counts as the cause of a broken connection
EXPLAIN_SECONDS = 15.0  # time that a rank with a broken connection waits for the reason
NO_REASON = "-"
# Words of torch's backends when the other end of a connection is gone, or takes too long.
LOST = ("gloo", "connection", "nccl", "timed out", "process group", "store")


def is_lost_connection(error: BaseException) -> bool:
    """Return True for an exception that another rank's end causes."""
    is_named = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in LOST)
    return is_named or isinstance(error, dist.DistError)


class Watchdog:
    """Threads that watch this rank and the others, inside the context or until `stop`."""

    def __init__(self, folder: Path, comm: Comm) -> None:
        """folder: the run's; stacks go to hang/ in it."""
        self.folder = folder
        self.long_limit, self.short_limit = comm.timeout_seconds, comm.train_timeout_seconds
        self.group_seconds = self.long_limit + EXPLAIN_SECONDS
        self.rank, self.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.parent, self.has_launcher = os.getppid(), "TORCHELASTIC_RUN_ID" in os.environ
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.trained = self.lost = self.store_closed = self.owns_folder = self.is_asked_to_stop = False
        self.comparison: dict[str, float] = {}  # of planned and measured steps, for status.json
        self.selection: Any = None  # of the run's data, for a report of memory that runs out
        self.last: dict[int, tuple[bytes, float]] = {}  # rank -> its last heartbeat, and when it changed
        self.contact = time.monotonic()  # with the store
        self.store: Store | None = None
        self.stopped = threading.Event()
        # A call of the store may block for ever when a link is cut: another thread watches the time.
        loops = (self._watch, self._sync) if self.world_size > 1 else (self._watch,)
        self.threads = [threading.Thread(target=loop, name="watchdog", daemon=True) for loop in loops]

    def __enter__(self) -> "Watchdog":
        activity.restart()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.end_with(error)
        self.stop()

    def stop(self) -> None:
        """Let ranks end from now on. Called before the last barrier."""
        self.stopped.set()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(timeout=2 * STORE_SECONDS)

    def begin(self, step: int) -> None:
        """Start to write status.json: from now on the run's folder is this run's. step: the last one."""
        activity.step, self.owns_folder = step, True
        if self.rank == 0:
            self.write_status(None)

    def write_status(self, exit_code: int | None, message: str = "") -> None:
        """Write status.json, once the run's folder is this run's. exit_code: None while the run goes on."""
        if not self.owns_folder:
            return
        status = {"exit_code": exit_code, "step": activity.step, "message": message.partition("\n")[0]}
        status |= {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        status |= {"restart": int(self.attempt), "ranks": self.world_size} | self.comparison
        try:
            write_durably(self.folder / "status.json", json.dumps(status, indent=1) + "\n")
        except OSError as error:
            print_message(f"{self.folder}: status.json is not written: {error}")

    def step_done(self, group: dist.ProcessGroup) -> None:
        """Apply `comm.train_timeout_seconds` once all ranks have compiled, with the first step."""
        if not self.trained:
            dist.barrier(group)
            self.trained = True

    def heartbeat(self) -> Heartbeat:
        """Return the state of this rank."""
        where, waits = activity.where()
        waits, seconds = waits or self.lost, activity.seconds
        limit = activity.limit(self.short_limit if self.trained else self.long_limit, self.long_limit)
        if self.world_size == 1 and activity.phases == ("start",):
            limit = float("inf")  # no rank waits while the statistics of a large archive are computed
        call = last_collective() if waits and (self.lost or seconds > limit / 2) else ""
        own = (self.rank, socket.gethostname(), os.getpid(), activity.step, activity.describe_phase())
        return Heartbeat(*own, seconds, limit, where, waits, self.lost, call)

    # -- the threads

    def _watch(self) -> None:
        while not self.stopped.wait(INTERVAL):
            if self.has_launcher and os.getppid() != self.parent:
                end_rank(FAILED)  # the launcher was killed: nothing else would end this rank
            silent = time.monotonic() - self.contact
            if self.world_size == 1:
                self._judge([self.heartbeat()])
            elif silent > self.silence(self.lost or self.store_closed):
                where = f"rank 0's host, {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                reason = f"no answer from {where} for {silent:.0f} s: link or host down, or it has ended"
                self.end(format_report([self.heartbeat()], reason))

    def _sync(self) -> None:
        while not self.stopped.is_set():
            try:
                self._exchange()
                self.contact = time.monotonic()
            except (dist.DistError, OSError) as error:
                self.store = None  # the next heartbeat connects again
                # Without a launcher the store begins with rank 0: before that it is not closed.
                self.store_closed = bool(self.last) and isinstance(error, ConnectionRefusedError)
            self.stopped.wait(INTERVAL)

    def _exchange(self) -> None:
        """Write this rank's heartbeat. Rank 0 checks all; the others do so if rank 0 is silent."""
        if self.store is None:
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            socket.create_connection(address, timeout=STORE_SECONDS).close()  # torch would print C++ frames
            store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            store.compare_set(f"watchdog/{self.attempt}/shutdown", "", NO_REASON)
            self.store = PrefixStore(f"watchdog/{self.attempt}", store)
        mine = self.heartbeat()
        self.store.set(f"rank/{self.rank}", json.dumps(asdict(mine)))
        if self.rank:
            [first] = self._read_heartbeats([0])
            if first.silent <= max(self.silence(mine.lost or first.lost), 3 * INTERVAL):
                return
        self._judge(self._read_heartbeats(range(self.world_size)))

    def _read_heartbeats(self, ranks: Sequence[int]) -> list[Heartbeat]:
        """Return the last heartbeats, in one request. Ends this rank where the store has a reason."""
        assert self.store is not None
        for rank in ranks:
            if rank not in self.last:
                self.store.compare_set(f"rank/{rank}", "", json.dumps(asdict(Heartbeat(rank))))
        reason, *texts = self.store.multi_get(["shutdown", *(f"rank/{rank}" for rank in ranks)])
        if reason.decode() != NO_REASON:
            self.end("", int(reason.split()[0]))
        found, now = [], time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            if self.last.get(rank, (b"", 0.0))[0] != text:
                self.last[rank] = (text, now)
            found.append(replace(Heartbeat(**json.loads(text)), silent=now - self.last[rank][1]))
        return found

    def silence(self, is_lost: bool = False) -> float:
        """Return the seconds without a heartbeat after which a rank is taken for dead.

        is_lost: a connection has broken, so that one of the ranks probably is.
        """
        limit = self.short_limit if self.trained else self.long_limit
        if self.is_asked_to_stop:  # perhaps by the launcher, because another rank is dead
            limit = min(limit, EXPLAIN_SECONDS)
        return min(limit, AFTER_LOSS_SECONDS) if is_lost else limit

    def _judge(self, ranks: list[Heartbeat]) -> None:
        if found := find_stalled_ranks(ranks, self.silence(any(each.lost for each in ranks))):
            lines = [f"{format_report(*found)}; all ranks end", format_table(ranks)]
            self.end("\n".join([*lines, f"  stacks: {self.folder / 'hang'}"]))

    # -- the end

    def end(self, message: str, code: int = FAILED) -> NoReturn:
        """End this rank and all others. If several ranks have a message, only the first is reported.

        Where a thread of the watchdog calls it, the main thread may hang: its stack is written.
        """
        is_first = bool(message) and self._is_first(code)
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_first:
            print_message(message)
            self.write_status(code, message)
        if code == FAILED and not is_main_thread:
            try:
                write_stacks(self.folder / "hang", self.rank)
            except OSError as error:
                print_message(f"{self.folder}: no stacks written: {error}")
        if self.world_size == 1 and is_main_thread:
            end_process(code)
        if self.store is None and code == EXIT_SAVED:
            os._exit(code)  # not 0, which a launcher would take for the end of this rank alone
        if is_first and self.store and not self.has_launcher:
            time.sleep(2 * INTERVAL)  # the store may be this process: the others have to read it first
        end_rank(code)

    def _is_first(self, code: int) -> bool:
        """Return True where this rank sets the shutdown reason; without a store, on one rank of each host."""
        # The call creates a marker file, so that the launcher prints only details.
        is_first_of_host, reason = is_reporting_rank(), f"{code} {self.rank}"
        # Without its host a store may never answer.
        if self.store is None or time.monotonic() - self.contact > STORE_SECONDS:
            return is_first_of_host
        try:
            return self.store.compare_set("shutdown", NO_REASON, reason).decode() == reason
        except dist.DistError as error:
            print_message(f"the other hosts do not get the reason: {error}")
            return is_first_of_host

    def end_with(self, error: Exception) -> None:
        """End this rank and all others with an exception of the main thread. A single rank returns.

        A broken connection is caused by another rank, which the shutdown reason names.
        """
        text = one_line(error)
        message = text or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        code = BAD_INPUT if isinstance(error, UserError) else FAILED
        if self.world_size == 1:
            self.write_status(code, message)
        elif not text:
            if is_lost_connection(error):
                self.lost = True
                time.sleep(EXPLAIN_SECONDS)  # a thread ends the process as soon as there is a reason
            sys.excepthook(type(error), error, error.__traceback__)  # which hides secrets
            self.end(f"{format_report([self.heartbeat()], message)}; all ranks end")
        elif not self.stopped.is_set():
            self.end(text, code)
