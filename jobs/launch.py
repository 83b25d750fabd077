"""Starts the ranks of this host, forwards signals to them, restarts them after a crash, passes on exit codes.

    python -m jobs.launch --nproc_per_node 4 [--nnodes 2 --rdzv_endpoint host:port] train.py ...

SIGTERM, SIGUSR1 and a first Ctrl-C go to the ranks, which save and leave in their own time; when a rank dies
the others are told where it was and leave within seconds; the exit code is theirs. 0: done. 2: bad input. 75:
saved, start it again (jobs/preemption.py). 1: failed.

Hosts meet in a store that the launcher of the endpoint's host keeps, and of which it and the ranks read plain
numbers and text. With one host it listens on the loopback alone.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

if "TORCH_CPP_LOG_LEVEL" not in os.environ:  # a broken connection is one line here, not C++ frames
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
# Torch asks the name server whom each connection of a store is with; a lost packet held it up for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[reportPrivateImportUsage]

from errors import BAD_INPUT, FAILED, ConfigError, RunFailed, one_line_errors
from jobs.interfaces import address_towards, interface_of
from jobs.preemption import EXIT_SAVED, STOP_SIGNALS
from jobs.watchdog import announce, open_store, read_beat, read_verdict
from parallelisms.degrees import check_processes

DONE = 0
LEAVE_SECONDS = 8.0  # that ranks have to notice a dead one, to write their stacks, and to leave
SAVED_SECONDS = 60.0  # between the first and the last rank that leaves after a save
REACH_SECONDS = 40.0  # that a host waits for somebody to listen at the endpoint
ANSWER = timedelta(seconds=15)  # that who listens there has to answer
MEET_SECONDS = 900.0  # that hosts which have found the endpoint wait for each other


def say(text: str) -> None:
    print(f"rossby: {text}", file=sys.stderr, flush=True)


class Stopped(Exception):
    """This process was told to end by a signal that it does not pass on, or before a rank ran."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


# -- the ranks of this host


class Ranks:
    """The processes of one attempt. `attempt` numbers it, `host` this host; ranks follow the hosts' order."""

    def __init__(self, args: argparse.Namespace, meeting: "Meeting", attempt: int, host: int) -> None:
        self.meeting, self.host, self.number = meeting, host, args.nproc_per_node
        self.told_to_stop, self.deadline = False, 0.0
        self.folder = TemporaryDirectory(prefix="rossby-")
        self.spoken = Path(self.folder.name) / "spoken"  # there, once a rank has said why it ends
        world = {
            "WORLD_SIZE": args.nnodes * self.number,
            "LOCAL_WORLD_SIZE": self.number,
            "GROUP_RANK": host,
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": meeting.port,
            "ROSSBY_ATTEMPT": attempt,  # whose keys in the store are its own
            "ROSSBY_SPOKEN": self.spoken,
        }
        self.environment = os.environ | {key: str(value) for key, value in world.items()}
        self.command = [sys.executable, "-u", args.script, *args.arguments]
        self.processes: list[subprocess.Popen] = []

    def start(self) -> None:
        """With the signals to stop held back, until each rank is ready to hear them: they would kill it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for local in range(self.number):
                own = {"RANK": str(self.host * self.number + local), "LOCAL_RANK": str(local)}
                self.processes.append(
                    subprocess.Popen(self.command, env=self.environment | own, start_new_session=True)
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def run(self) -> int:
        """Until all have left; once one has failed the others have some seconds. The exit code of all."""
        while None in (codes := [process.poll() for process in self.processes]):
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None and not self.deadline:
                self.deadline = time.monotonic() + self._first_left(failed, codes[failed] or 0)
            if self.deadline and time.monotonic() > self.deadline:
                break
            time.sleep(0.1)
        self.kill()
        codes = [process.wait() for process in self.processes]
        code = job_code(codes)
        self._tell_end(code, codes)
        self.folder.cleanup()
        return code

    def _first_left(self, local: int, code: int) -> float:
        """The first rank has left, with this code; seconds that the others have."""
        if code == EXIT_SAVED:
            self.signal(signal.SIGTERM)  # who has not begun to train leaves now; the others are leaving
            return SAVED_SECONDS
        with suppress(dist.DistError, OSError):  # the store is gone: the ranks notice that themselves
            store = self._watchdogs_store()
            words = last_words(store, self.host * self.number + local, code)
            announce(store, words, -1, BAD_INPUT if code == BAD_INPUT else FAILED)
        return LEAVE_SECONDS

    def _tell_end(self, code: int, codes: list[int]) -> None:
        """One line, where no rank of this host has said why all end."""
        if code in (DONE, EXIT_SAVED) or self.spoken.exists() or (code == BAD_INPUT == codes[0]):
            return
        with suppress(dist.DistError, OSError):  # as above
            verdict = read_verdict(self._watchdogs_store())
            if verdict and verdict["node"] != self.host:
                say(verdict["text"].splitlines()[0].removeprefix("rossby: "))

    def _watchdogs_store(self) -> Store:
        attempt = self.environment["ROSSBY_ATTEMPT"]
        return open_store(self.meeting.address, self.meeting.port, attempt)

    def kill(self) -> None:
        """SIGKILL to ranks that are left, stopped ones too, and to the loader processes of each."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def job_code(codes: list[int]) -> int:
    """What a job ends with whose ranks ended with these codes (negative: killed by that signal)."""
    if BAD_INPUT in codes:
        return BAD_INPUT
    if any(code not in (DONE, EXIT_SAVED) for code in codes):
        return FAILED
    return EXIT_SAVED if EXIT_SAVED in codes else DONE


def last_words(store: Store, rank: int, code: int) -> str:
    """One line of a rank that has left, with its last step where one is known."""
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if not store.check([f"beat/{rank}"]):
        return f"rossby: rank {rank} ({socket.gethostname()}) {how} before its first step"
    beat = read_beat(store, rank)
    step = f"last heard of in step {beat.step}" if beat.step else "before its first step"
    return f"rossby: {beat.name} {how}, {step}, {beat.phase}"


# -- the hosts


class Meeting:
    """Where the hosts of a job find each other: a store at the endpoint, which its host's launcher keeps."""

    def __init__(self, number: int, endpoint: str) -> None:
        """number: hosts. ConfigError: the endpoint is no host:port. RunFailed: nobody answers there."""
        self.number, self.serves = number, True
        host, _, port = endpoint.rpartition(":") if number > 1 else ("127.0.0.1", ":", "0")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"RDZV_ENDPOINT = {endpoint!r}: write host:port of the first node, a free port")
        listener = listen(host, int(port))
        self.address, self.port = host, listener.getsockname()[1] if listener else int(port)
        self.serves = listener is not None
        options = {"is_master": self.serves, "timeout": ANSWER, "wait_for_workers": False}
        if listener:
            options["master_listen_fd"] = listener.detach()  # bound to this address, and to no other
        else:
            reach(self.address, self.port)
        store = within(ANSWER, lambda: TCPStore(self.address, self.port, **options))
        if store is None:
            reason = "who listens there is no launcher of Rossby; take a free port"
            raise RunFailed(f"RDZV_ENDPOINT = {endpoint!r}: {reason}")
        self.store = store
        self.store.set_timeout(timedelta(seconds=MEET_SECONDS))

    def gather(self) -> tuple[int, int]:
        """Waits for all hosts: the number of this attempt, and of this host in it. The endpoint's is 0."""
        attempt = self.store.add("attempt", 0)
        host = 0 if self.serves else self.store.add(f"others/{attempt}", 1)
        if self.store.add(f"arrived/{attempt}", 1) == self.number:
            self.store.add("attempt", 1)
            self.store.set(f"complete/{attempt}", "")
        self.store.wait([f"complete/{attempt}"])
        return attempt, host

    def leave(self) -> None:
        """The job has ended. The store stays until the other hosts have read why, some seconds at most."""
        if self.number == 1:
            return
        # A call of a store whose host is out of reach never returns.
        thread = threading.Thread(target=self._leave, daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)

    def _leave(self) -> None:
        with suppress(dist.DistError):
            self.store.add("left", 1)
            while self.serves and self.store.add("left", 0) < self.number:
                time.sleep(0.1)


def listen(host: str, port: int) -> socket.socket | None:
    """A socket at an address of this host that nobody listens at yet; None: it is another host's."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError:
        return None


def within(limit: timedelta, connect: Callable[[], TCPStore]) -> TCPStore | None:
    """The store, or None: a port of somebody else's takes a connection, and may never say a word."""
    found: list[TCPStore] = []

    def try_it() -> None:
        with suppress(RuntimeError):  # also dist.DistError
            found.append(connect())

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    return found[0] if found else None


def reach(host: str, port: int) -> None:
    """Until somebody answers at the endpoint, whose host may start a little later. ConfigError: nobody knows
    the host. RunFailed: nobody answers.
    """
    end = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=max(end - time.monotonic(), 1.0)).close()
            return
        except socket.gaierror as error:
            reason = f"the host is not known ({error.strerror}); write host:port of the first node"
            raise ConfigError(f"RDZV_ENDPOINT = '{host}:{port}': {reason}") from None
        except OSError as error:
            if time.monotonic() > end:
                reason = f"nobody answers for {REACH_SECONDS:.0f} s ({error.strerror or error})"
                fix = "start the node of that address too, or look at the network between"
                raise RunFailed(f"RDZV_ENDPOINT = '{host}:{port}': {reason}; {fix}") from None
            time.sleep(0.2)


# -- the command


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jobs.launch", description=__doc__)
    parser.add_argument("--nproc_per_node", type=int, default=1, help="ranks on this host")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts, each with the same command")
    parser.add_argument("--rdzv_endpoint", default="", help="host:port; that host's launcher serves there")
    parser.add_argument("--max_restarts", type=int, default=0, help="starts after a crash")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def prepare_environment(meeting: Meeting) -> None:
    """What ranks inherit."""
    several = meeting.number > 1
    address = address_towards(meeting.address, meeting.port) if several else meeting.address
    if address and (name := interface_of(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # else gloo takes what the host's name stands for
    os.environ["ROSSBY_LAUNCHER"] = "1"
    os.environ.setdefault("ROSSBY_STARTED", str(time.time()))  # training.max_wall_time counts from here
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the last collectives, written when a run hangs


def launch(args: argparse.Namespace, meeting: Meeting) -> int:
    """The job's exit code, once this host's ranks have ended."""
    ranks: Ranks | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        once = number == signal.SIGINT and ranks is not None and not ranks.told_to_stop
        if ranks is None or not (once or number in STOP_SIGNALS):
            raise Stopped(number)
        ranks.told_to_stop = True
        ranks.signal(signal.SIGTERM if once else number)  # a Ctrl-C reaches the launcher alone

    for number in (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, forward)
    restarts = 0
    try:
        while True:
            attempt, host = meeting.gather()
            ranks = Ranks(args, meeting, attempt, host)
            ranks.start()
            code = ranks.run()
            if code != FAILED or ranks.told_to_stop or restarts == args.max_restarts:
                return code
            restarts += 1
            say(f"restart {restarts} of {args.max_restarts}, from the last checkpoint")
    except Stopped as stop:
        say(f"{stop.number.name}: all ranks of this host end")
        return EXIT_SAVED if stop.number in STOP_SIGNALS else 128 + stop.number
    except dist.DistError as error:
        where = f"{meeting.address}:{meeting.port}"
        raise RunFailed(f"the hosts of this job did not find together at {where}: {error}") from error
    finally:
        if ranks:
            ranks.kill()
        meeting.leave()


def main() -> None:
    try:
        with one_line_errors():
            args = parse(sys.argv[1:])
            check_processes("--nproc_per_node", args.nproc_per_node)
            meeting = Meeting(args.nnodes, args.rdzv_endpoint)
            prepare_environment(meeting)
            code = launch(args, meeting)
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    os._exit(int(code or 0))  # a thread may still wait for a host that is gone


if __name__ == "__main__":
    main()
