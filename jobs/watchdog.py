"""Notices a rank that died, stalls or left, in bounded time, and ends all ranks with a message that names it.

Once a second every rank says in a store, which the launcher holds and which outlives the ranks, in which step
it is, what it does and since when. The lowest rank that is heard of judges; its verdict is the first that the
store keeps, and every rank that reads it leaves. `comm.timeout_seconds` holds before the end of the first
step and in long parts (validation, checkpoint, the end); `comm.train_timeout_seconds` in all others.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import _set_pg_timeout

from config import Comm, Config
from errors import RunFailed, UserError, is_lost_loader
from jobs.hang_report import Beat, accusation, leave_traces, mismatch, process_state, table, to_blame
from jobs.heartbeat import activity, leave_sign
from jobs.log_setup import start_logging
from jobs.rank_tree import RankTree
from traces.collective_record import last_calls

if TYPE_CHECKING:  # the launcher imports this module, and neither opens data nor plans memory
    from datasets.selection import Selection

logger = logging.getLogger(__name__)
FAILED = 1  # exit code
BEAT_SECONDS = 1.0
STORE_SECONDS = 5.0  # that a call of the store may take: it stands still when a link is cut
AFTER_LOSS_SECONDS = 4.0  # a rank that is silent so long when a connection broke is the one that broke it
EXPLAIN_SECONDS = 15.0  # that a rank with a broken connection waits for the verdict that explains it
LONG_PHASES = {"start", "replicas", "validation", "checkpoint", "end"}
OPEN = "-"  # the verdict while there is none
# What torch's backends say when the other end of a connection is gone, or takes too long.
LOST = ("gloo", "connection", "nccl", "timed out", "process group", "store")


def open_store(host: str, port: int, attempt: str) -> Store:
    """The part of a job's store that beats and the verdict of an attempt stand in.

    OSError, DistError: out of reach.
    """
    socket.create_connection((host, port), timeout=STORE_SECONDS).close()  # torch would print C++ frames
    client = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    store = PrefixStore(f"watchdog/{attempt}", client)
    store.compare_set("verdict", "", OPEN)
    return store


def announce(store: Store, text: str, node: int, code: int = FAILED) -> bool:
    """Makes this the verdict, unless there is one: then false. node: where it is said, -1: nowhere yet."""
    mine = json.dumps({"text": text, "node": node, "code": code})
    return store.compare_set("verdict", OPEN, mine).decode() == mine


def read_verdict(store: Store) -> dict | None:
    """{"text", "node", "code"} of who spoke first; None before that."""
    return verdict_of(store.get("verdict"))


def verdict_of(said: bytes) -> dict | None:
    return None if said.decode() == OPEN else json.loads(said)


def read_beat(store: Store, rank: int) -> Beat:
    """The last of a rank that has said one."""
    return Beat(**json.loads(store.get(f"beat/{rank}")))


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone, rather than what is wrong here."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in LOST)
    )


def launched() -> bool:
    """Whether jobs/launch.py started this rank."""
    return "ROSSBY_LAUNCHER" in os.environ


@contextmanager
def watched(config: Config) -> Iterator["Watchdog"]:
    """What a rank runs in: its log, the watchdog, and words for memory that runs out."""
    from training.out_of_memory import memory_explained  # here: it takes the launcher two seconds

    start_logging(is_first=os.environ.get("RANK", "0") == "0")
    watchdog = Watchdog(config.dump_folder, config.comm)
    with watchdog, memory_explained(config, lambda: watchdog.selection):
        yield watchdog


class Watchdog:
    """Watches this rank and the others from a thread of its own, as a context, or until `stop`."""

    def __init__(self, folder: Path, comm: Comm) -> None:
        """folder: the run's; stacks go to hang/ in it."""
        self.folder = folder / "hang"
        self.long_limit, self.short_limit = comm.timeout_seconds, comm.train_timeout_seconds
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.node, self.parent = int(os.environ.get("GROUP_RANK", 0)), os.getppid()
        self.trained = self.lost = False
        self.selection: Selection | None = None  # of the run's data, once they are open
        self.heard: dict[int, tuple[str, float]] = {}  # rank -> its last beat, and when that was new
        self.contact = time.monotonic()
        self.store: Store | None = None
        self.stopped = threading.Event()
        # A call of the store can stand still for ever when a link is cut: another thread minds the time.
        loops = (self._watch, self._converse) if self.world > 1 else (self._watch,)
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
        """From here on ranks may leave. Called before the last barrier."""
        self.stopped.set()
        for thread in self.threads:
            if thread.is_alive():
                thread.join(timeout=2 * STORE_SECONDS)

    def step_done(self, ranks: RankTree, groups: Iterable[dist.ProcessGroup]) -> None:
        """After each step. Once all ranks have compiled, with the first, `comm.train_timeout_seconds` holds.

        The groups give up a little later, so that the watchdog speaks first: it knows who is to blame.
        """
        if self.trained:
            return
        ranks.barrier()
        self.trained = True
        for group in groups:
            _set_pg_timeout(timedelta(seconds=self.short_limit + EXPLAIN_SECONDS), group)

    @property
    def silence(self) -> float:
        """Seconds after which a rank that is not heard of counts as gone."""
        return self.short_limit if self.trained else self.long_limit

    def beat(self) -> Beat:
        """What this rank does now."""
        phases, (where, waits) = activity.phases, activity.where()
        name = "/".join(phases[1:]) or phases[0]
        limit = self.short_limit if self.trained and not LONG_PHASES & set(phases) else self.long_limit
        if self.world == 1 and phases == ("start",):
            limit = float("inf")  # nobody waits while the statistics of a large archive are computed
        me = (self.rank, self.node, socket.gethostname(), os.getpid())
        doing = (activity.step, name, activity.seconds)
        beat = Beat(*me, *doing, limit=limit, where=where, waits=waits or self.lost, lost=self.lost)
        stands = beat.waits and (
            self.lost or beat.seconds > limit / 2
        )  # a moment's work, for a rank that has time
        return replace(beat, calls=last_calls()) if stands else beat

    # -- the threads

    def _watch(self) -> None:
        while not self.stopped.wait(BEAT_SECONDS):
            try:
                leave_sign()
            except OSError as error:
                print(f"rossby: ROSSBY_HEARTBEAT: {error}", file=sys.stderr, flush=True)
            if launched() and os.getppid() != self.parent:
                self._leave("", traces=False)  # the launcher was killed: nobody would end this rank
            if self.world == 1:
                self._judge([self.beat()])
            elif time.monotonic() - self.contact > min(AFTER_LOSS_SECONDS, self.silence):
                self._without_store()

    def _converse(self) -> None:
        while not self.stopped.is_set():
            try:
                self._talk()
                self.contact = time.monotonic()
            except (dist.DistError, OSError):
                self.store = None  # the next beat connects anew; `_watch` knows since when
            self.stopped.wait(BEAT_SECONDS)

    def _talk(self) -> None:
        """Says how this rank is, and hears how the others are."""
        mine = self.beat()
        if self.store is None:
            attempt = os.environ.get("ROSSBY_ATTEMPT", "0")
            self.store = open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), attempt)
        self.store.set(f"beat/{self.rank}", mine.to_json())
        before: list[Beat] = []
        for rank in range(self.rank):  # usually the first is heard of, and judges
            before += self._listen([rank])
            if before[-1].silent <= max(self._patience(before), 3 * BEAT_SECONDS):
                return
        self._judge([*before, mine, *self._listen(range(self.rank + 1, self.world))])

    def _listen(self, ranks: Sequence[int]) -> list[Beat]:
        """The last beats of these ranks, in one request; ends this rank where there is a verdict."""
        assert self.store is not None
        for rank in ranks:
            if rank not in self.heard:
                self.store.compare_set(f"beat/{rank}", "", Beat(rank).to_json())  # in place of its first beat
        verdict, *texts = self.store.multi_get(["verdict", *(f"beat/{rank}" for rank in ranks)])
        if said := verdict_of(verdict):
            self._leave("", said["code"])
        return [self._hear(rank, text.decode()) for rank, text in zip(ranks, texts, strict=True)]

    def _hear(self, rank: int, text: str) -> Beat:
        now = time.monotonic()
        if self.heard.get(rank, ("", 0.0))[0] != text:
            self.heard[rank] = (text, now)
        return replace(Beat(**json.loads(text)), silent=now - self.heard[rank][1])

    def _patience(self, beats: list[Beat]) -> float:
        lost = self.lost or any(beat.lost for beat in beats)
        return min(self.silence, AFTER_LOSS_SECONDS) if lost else self.silence

    def _judge(self, beats: list[Beat]) -> None:
        found = to_blame(beats, self._patience(beats))
        if found is None:
            return
        culprits, reason = found
        if culprits[0].node == self.node and culprits[0].silent:
            state = process_state(culprits[0].pid)
            reason = f"{state}, {reason.partition(':')[0]}" if state else reason
        lines = [f"rossby: {accusation(culprits, reason)}; all ranks end", table(beats)]
        self._leave("\n".join([*lines, *mismatch(beats), f"  stacks: {self.folder}"]))

    def _without_store(self) -> None:
        """The store does not answer: its host, that of rank 0, is off, or its launcher has ended."""
        silent = time.monotonic() - self.contact
        if silent <= self.silence and not self.lost and not self._launcher_is_gone():
            return
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        mine = self.beat()
        reason = f"rank 0's host, whose launcher listens at {where}, is not heard of for {silent:.0f} s"
        text = f"rossby: {reason} (link or host down, or it has ended); {mine.name} ends\n{table([mine])}"
        self._leave(text)

    def _launcher_is_gone(self) -> bool:
        """Whether the host of the store answers, and says that nobody listens there any more."""
        try:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(address, timeout=STORE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    # -- the end

    def _leave(self, text: str, code: int = FAILED, traces: bool = True) -> NoReturn:
        """Ends this process. Who makes `text` the verdict speaks it; without the store, one rank a host."""
        in_touch = self.store and time.monotonic() - self.contact < STORE_SECONDS
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        if text and in_touch and self.store:  # without its host a store may never answer
            try:
                speaks = announce(self.store, text, self.node, code)
            except dist.DistError as error:
                text += f"\n  (not told to the other hosts: {error})"
        if text and speaks:
            print(text, file=sys.stderr, flush=True)
        if code == FAILED and traces:
            try:
                leave_traces(self.folder, self.rank)
            except OSError as error:
                print(f"rossby: {self.folder}: no stacks written: {error}", file=sys.stderr)
        if text and speaks and not launched():
            time.sleep(2 * BEAT_SECONDS)  # the store may be this process: the others have to read it first
        sys.stdout.flush()
        os._exit(code)

    def end_all(self, text: str, code: int) -> None:
        """All ranks leave with this exit code, after one line. Alone, this process ends as Python ends."""
        if self.world == 1 or self.store is None:
            print(f"rossby: {text}", file=sys.stderr, flush=True)
            sys.exit(code)
        self._leave(f"rossby: {text}", code)

    def end_with(self, error: Exception) -> None:
        """What the main thread does with an exception that ends this rank while there are others.

        A genuine error is told with its traceback, here only. A broken connection is the other end's doing:
        the verdict says whose. Returns where this process is alone.
        """
        if self.world == 1 or not self.threads[0].is_alive():
            return
        if isinstance(error, RunFailed | UserError) or is_lost_loader(error):
            return  # the guard of the program says it, once a host, and the launcher tells the others
        if is_lost_connection(error):
            self.lost = True
            time.sleep(EXPLAIN_SECONDS)  # the thread leaves as soon as there is a verdict
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {' '.join(str(error).splitlines())[:300]}"
        self._leave(f"rossby: {accusation([self.beat()], text)}; all ranks end", traces=False)
