"""Start the ranks of this node by torch.distributed.run: torchrun's options, the project's exit codes.

python -m jobs.torchrun --nproc-per-node 4 [--nnodes 2 --node-rank 0 --rdzv-endpoint HOST:PORT] train.py ...
"""

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from errors import (
    BAD_INPUT,
    EXIT_SAVED,
    FAILED,
    INTERRUPTED,
    SAVED,
    RunFailed,
    end_when_interrupted,
    one_line_errors,
    print_message,
)

if __name__ == "__main__":
    end_when_interrupted()  # while torch takes its seconds

from torch.distributed import DistError, TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

BACKEND = "rossby"
JOIN_SECONDS = 900  # that the nodes of a job wait for each other


class Node(StaticTCPRendezvous):
    """Static rendezvous; its store listens at the endpoint alone, and no rank restarts after a signal."""

    stopping, attempt = False, -1

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
        return super().next_rendezvous()


def forward_signal(number: int, *_: object) -> None:
    """Send a signal to the ranks alone: torchelastic sends it to their loader processes too, which would end
    before the save. Before there are ranks, and at a second Ctrl-C, end at once.
    """
    ranks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    again = number == signal.SIGINT and Node.stopping
    for rank in ranks:
        os.kill(int(rank), signal.SIGKILL if again else number)
    if again or not ranks:
        os._exit(INTERRUPTED if number == signal.SIGINT else EXIT_SAVED)
    Node.stopping = True


def run_ranks(argv: list[str]) -> int:
    """Return the exit code of the ranks of this node. RunFailed: the nodes did not meet."""
    args = parse_args(["--rdzv-endpoint=127.0.0.1:0", "--signals-to-handle=SIGHUP,SIGQUIT", *argv])
    args.rdzv_backend, args.rdzv_conf = BACKEND, f"rank={args.node_rank}"
    try:
        run(args)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        codes = {failure.exitcode for failure in error.failures.values()}
        if Node.stopping and codes <= {-signal.SIGTERM, -signal.SIGUSR1}:
            return EXIT_SAVED  # the signal came while they started, with nothing to save
        if first.exitcode < 0:
            reason = f"rank {rank} (pid {first.pid}) was killed by {first.signal_name()}"
            # A line of details where a rank has reported already that this one is gone.
            reported = any(Path(args.log_dir).glob(f"*/attempt_{Node.attempt}/reported"))
            print(f"  {reason}", file=sys.stderr) if reported else print_message(reason)
        return BAD_INPUT if BAD_INPUT in codes else FAILED
    except (DistError, OSError) as error:
        reason = f"the nodes did not meet there: {str(error).splitlines()[0]}"
        raise RunFailed(f"RDZV_ENDPOINT = {args.rdzv_endpoint!r}: {reason}") from None
    return EXIT_SAVED if any(Path(args.log_dir).glob(f"*/attempt_{Node.attempt}/{SAVED}")) else 0


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward_signal)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what ranks report is enough
    rendezvous_handler_registry.register(BACKEND, Node)
    with one_line_errors(), TemporaryDirectory(prefix="rossby-", ignore_cleanup_errors=True) as folder:
        code = run_ranks([f"--log-dir={folder}", *sys.argv[1:]])
    sys.exit(code)


if __name__ == "__main__":
    main()
