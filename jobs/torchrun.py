"""Start the ranks of this node by torch.distributed.run: torchrun's options, the project's exit codes.

python -m jobs.torchrun --nproc-per-node 4 [--nnodes 2 --node-rank 0 --rdzv-endpoint HOST:PORT] train.py ...
"""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import errors
from errors import EXIT_SAVED, STOP_SIGNALS, RunFailed, print_message
from jobs.signals import describe_early_end, end_at_signals, handle_stop_signals, signal_socket

if __name__ == "__main__":
    end_at_signals(trains=True)  # during the import of torch, which takes seconds

from torch.distributed import DistError, TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

BACKEND = "rossby"
DEBIANS_HOST = "127.0.1.1"  # of the host itself in /etc/hosts, where its address is not fixed
JOIN_SECONDS = 900  # longest time that the nodes of a job wait for each other


class Node(StaticTCPRendezvous):
    """Static rendezvous; its store listens at the endpoint alone, and no rank restarts after a signal."""

    stopping, have_met, attempt = False, False, -1
    log_folder = Path("/nonexistent")  # of this launcher's ranks, set by main

    def __init__(self, given: RendezvousParameters) -> None:
        host, _, port = given.endpoint.rpartition(":")
        rank = int(given.config["rank"])
        super().__init__(host, int(port), rank, given.max_nodes, given.run_id, JOIN_SECONDS)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self.stopping:
            raise SystemExit(EXIT_SAVED)
        Node.attempt += 1
        if self.attempt:
            print_message(f"restart {self.attempt}: a rank has failed, all resume from the last checkpoint")
        elif self.rank == 0:
            listener = socket.create_server((self.master_addr, self.master_port), backlog=2048)
            self.master_port = listener.getsockname()[1]
            options = {"is_master": True, "timeout": self.timeout, "master_listen_fd": listener.detach()}
            self._store = TCPStore(self.master_addr, self.master_port, self.world_size, **options)
        met = super().next_rendezvous()
        Node.have_met = True
        return met


def attempts(marker: str = "") -> list[Path]:
    """Return the folder of this node's present ranks, or the marker file in it; empty if it is not there."""
    return [*Node.log_folder.glob(f"*/attempt_{Node.attempt}/{marker}")]


def forward_signals(numbers: socket.socket) -> None:
    """Send each signal to the ranks. Before there are ranks, and at a second Ctrl-C, end at once."""
    while True:
        (number,) = numbers.recv(1)
        if attempts(errors.ENDED):
            continue
        # To the ranks alone: torchelastic sends it to processes that write checkpoints too, which would end
        # before the save.
        again, Node.stopping = number == signal.SIGINT and Node.stopping, True
        for folder in attempts():
            (folder / errors.SIGNALLED).touch()
        listed = Path(f"/proc/self/task/{os.getpid()}/children")  # not of every Linux, nor of macOS
        command = ["pgrep", "-P", str(os.getpid())]
        if listed.exists():
            text = listed.read_text()
        else:  # pgrep ends with 1 where there are none yet
            text = subprocess.run(command, capture_output=True, text=True).stdout
        ranks = [int(rank) for rank in text.split()]
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if again:
            time.sleep(1.0)  # in which rank 0 writes status.json; a rank that is stopped does not end
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        if again or not ranks:
            text, code = describe_early_end(number)
            if not attempts(errors.REPORTED):
                print_message("interrupted again: ended without a save" if again else text)
            shutil.rmtree(Node.log_folder, ignore_errors=True)
            errors.exit_now(code)


def run_ranks(argv: list[str]) -> int:
    """Run the ranks of this node and return their exit code. Raises RunFailed if the nodes do not meet."""
    args = parse_args(["--rdzv-endpoint=127.0.0.1:0", "--signals-to-handle=SIGQUIT"] + argv)
    args.rdzv_backend, args.rdzv_conf = BACKEND, f"rank={args.node_rank}"
    # -- an address that other nodes reach
    host = args.rdzv_endpoint.rpartition(":")[0]
    is_name = not re.fullmatch(r"localhost|[\d.]+|.*:.*", host)
    if args.node_rank == 0 and args.nnodes != "1" and is_name:
        with suppress(OSError):
            if socket.gethostbyname(host) == DEBIANS_HOST:
                reason = f"on this node {host} is {DEBIANS_HOST}, which no other node reaches (/etc/hosts)"
                errors.refuse("RDZV_ENDPOINT", args.rdzv_endpoint, f"{reason}; name another address")
    # -- the ranks, until all have ended
    try:
        run(args)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        codes = {failure.exitcode for failure in error.failures.values()}
        if Node.stopping:  # the signal came during the start, when some ranks did not handle it yet
            codes |= {EXIT_SAVED for code in codes if -code in STOP_SIGNALS}
        if known := [code for code in (errors.BAD_INPUT, errors.INTERRUPTED, EXIT_SAVED) if code in codes]:
            return known[0]
        # Of a failure a line, unless a rank has reported it.
        how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"ended with {first.exitcode}"
        if not attempts(errors.REPORTED):
            print_message(f"rank {rank} (pid {first.pid}) {how}")
        elif first.exitcode < 0:  # a detail: a rank has already reported that this one has ended
            print(f"  rank {rank} (pid {first.pid}) {how}", file=sys.stderr)
        return errors.FAILED
    except (DistError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        where = f"RDZV_ENDPOINT = {args.rdzv_endpoint!r}: the nodes did not meet there"
        raise RunFailed(f"{'the launcher failed' if Node.have_met else where}: {reason}") from None
    return EXIT_SAVED if attempts(errors.SAVED) else 0


def main() -> None:
    Node.log_folder = Path(mkdtemp(prefix="rossby-"))
    numbers = signal_socket()
    handle_stop_signals(lambda *_: None)
    threading.Thread(target=forward_signals, args=(numbers,), daemon=True).start()
    # Inherited by the ranks, until they have set their handlers; here the thread gets signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what ranks report is enough
    rendezvous_handler_registry.register(BACKEND, Node)
    with errors.one_line_errors():
        try:
            code = run_ranks([f"--log-dir={Node.log_folder}"] + sys.argv[1:])
            handle_stop_signals(signal.SIG_IGN)  # the code is known
        finally:
            shutil.rmtree(Node.log_folder, ignore_errors=True)
    errors.exit_now(code)  # a further signal would end Python's shutdown with another code


if __name__ == "__main__":
    main()
