"""Start the ranks of this node by torch.distributed.run: torchrun's options, the project's exit codes.

python -m jobs.torchrun --nproc-per-node 4 [--nnodes 2 --node-rank 0 --rdzv-endpoint HOST:PORT] train.py ...
"""

import logging
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from errors import (
    BAD_INPUT,
    ENDED,
    EXIT_SAVED,
    FAILED,
    INTERRUPTED,
    INTERRUPTED_AGAIN,
    SAVED,
    STOP_SIGNALS,
    RunFailed,
    end_at_signals,
    handle_stop_signals,
    one_line_errors,
    print_message,
    refuse,
    signal_before_first_step,
)

if __name__ == "__main__":
    end_at_signals()  # during the import of torch, which takes seconds

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

    stopping, have_met, attempt, log_folder = False, False, -1, Path()

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
            print_message(
                f"restart {self.attempt}: a rank has failed, all start again from the last checkpoint"
            )
        elif self.rank == 0:
            listener = socket.create_server((self.master_addr, self.master_port), backlog=2048)
            self.master_port = listener.getsockname()[1]
            options = {"is_master": True, "timeout": self.timeout, "master_listen_fd": listener.detach()}
            self._store = TCPStore(self.master_addr, self.master_port, self.world_size, **options)
        met = super().next_rendezvous()
        Node.have_met = True
        return met


def forward_signal(number: int, *_: object) -> None:
    """Send a signal to the ranks alone: torchelastic sends it to the processes that write checkpoints too,
    which would end before the save. Before there are ranks, and at a second Ctrl-C, end at once, unless the
    run has ended.
    """
    if any(Node.log_folder.glob(f"*/attempt_{Node.attempt}/{ENDED}")):
        return
    ranks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    again = number == signal.SIGINT and Node.stopping
    for rank in ranks:
        os.kill(int(rank), signal.SIGKILL if again else number)
    if again or not ranks:
        text, code = signal_before_first_step(number)
        print_message(INTERRUPTED_AGAIN if again else f"{signal.Signals(number).name}: {text}")
        os._exit(code)
    Node.stopping = True


def run_ranks(argv: list[str]) -> int:
    """Run the ranks of this node and return their exit code. Raises RunFailed if the nodes do not meet."""
    args = parse_args(["--rdzv-endpoint=127.0.0.1:0", "--signals-to-handle=SIGQUIT", *argv])
    args.rdzv_backend, args.rdzv_conf = BACKEND, f"rank={args.node_rank}"
    host = args.rdzv_endpoint.rpartition(":")[0]
    is_name = not re.fullmatch(r"localhost|[\d.]+|.*:.*", host)
    if args.node_rank == 0 and args.nnodes != "1" and is_name:
        with suppress(OSError):
            if socket.gethostbyname(host) == DEBIANS_HOST:
                reason = f"on this node {host} is {DEBIANS_HOST}, which no other node reaches (/etc/hosts)"
                refuse("RDZV_ENDPOINT", args.rdzv_endpoint, f"{reason}; name another address")
    try:
        run(args)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        codes = {failure.exitcode for failure in error.failures.values()}
        if Node.stopping:  # the signal came during the start, when some ranks did not handle it yet
            codes |= {EXIT_SAVED for code in codes if -code in STOP_SIGNALS}
        if known := [code for code in (BAD_INPUT, INTERRUPTED, EXIT_SAVED) if code in codes]:
            return known[0]
        if first.exitcode < 0:
            reason = f"rank {rank} (pid {first.pid}) was killed by {first.signal_name()}"
            # Only a detail if a rank has already reported that this one has ended.
            reported = any(Path(args.log_dir).glob(f"*/attempt_{Node.attempt}/reported"))
            print(f"  {reason}", file=sys.stderr) if reported else print_message(reason)
        return FAILED
    except (DistError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if Node.have_met:
            raise RunFailed(f"the launcher of the ranks failed ({reason})") from None
        place = f"RDZV_ENDPOINT = {args.rdzv_endpoint!r}"
        raise RunFailed(f"{place}: the nodes did not meet there: {reason}") from None
    return EXIT_SAVED if any(Path(args.log_dir).glob(f"*/attempt_{Node.attempt}/{SAVED}")) else 0


def main() -> None:
    handle_stop_signals(forward_signal)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what ranks report is enough
    rendezvous_handler_registry.register(BACKEND, Node)
    with one_line_errors(), TemporaryDirectory(prefix="rossby-", ignore_cleanup_errors=True) as folder:
        Node.log_folder = Path(folder)
        code = run_ranks([f"--log-dir={folder}", *sys.argv[1:]])
        handle_stop_signals(signal.SIG_IGN)  # the code is known
    sys.stderr.flush()
    os._exit(code)  # a further signal would end Python's shutdown with another code


if __name__ == "__main__":
    main()
