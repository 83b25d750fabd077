"""A rank that only agrees with the others, until one of them fails as requested.

python -m jobs.torchrun --nproc-per-node 2 tests/failing_rank.py <folder> <what rank 1 does in step 5>
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from config import Comm
from errors import EXIT_SAVED, end_process
from jobs.heartbeat import activity, span
from jobs.preemption import Agreement
from jobs.watchdog import Watchdog
from parallelisms.mesh import cpu_group, start_ranks

STEPS = 10


def fail(what: str) -> None:
    time.sleep(1.5)  # so that the others have heard of step 5
    if what == "stall":
        with span("data"):
            time.sleep(600)
    elif what == "raise":
        raise KeyError("no such variable")
    elif what == "permission":
        raise PermissionError(13, "Permission denied", "x.zarr")
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "leave":
        os._exit(0)
    elif what.isdecimal():
        end_process(int(what))


def run(watchdog: Watchdog, what: str) -> None:
    start_ranks(60, "gloo")
    agreement = Agreement("", cpu_group(), watchdog)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with agreement:
        for step in range(1, STEPS + 1):
            activity.start_phase("train", step)
            if step == 5 and attempt == 0 and (dist.get_rank() == 1 or what == "75"):
                fail(what)
            dist.all_reduce(torch.ones(1))
            if agreement.decide():
                end_process(EXIT_SAVED)
    if dist.get_rank() == 0:
        print(f"attempt {attempt} is done")
    watchdog.stop()
    dist.barrier()


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    with Watchdog(folder, Comm(timeout_seconds=30, train_timeout_seconds=3)) as watchdog:
        run(watchdog, what)
    end_process(0)  # as train.py ends a rank


if __name__ == "__main__":
    main()
