"""A rank of train.py with a fault on purpose, for tests of the report of the fault.

python -m jobs.torchrun --nproc-per-node 2 tests/drilled_rank.py <misfortune> --job.config_file ...
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import train
from jobs.signals import end_at_signals

STEP = 7  # in which it happens; memory runs out in the first, which takes what later ones have already
MEMORY = 64 * 2**20  # bytes more than before the first step
FAULTY_RANK = 1  # the rank with the fault


def flip_a_bit(model: Any) -> None:
    """Flip a bit, as in memory without error correction."""
    weight = model.parameters["blocks.1.mlp.up.weight"].detach()
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    local.view(torch.int32)[0, 0] ^= 1


def run_out_of_memory(model: Any) -> None:
    """Limit the address space to little more than is in use."""
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def call_another_collective(model: Any) -> None:
    """Call a collective on one rank alone, like code with a branch that depends on the rank."""
    dist.all_reduce(torch.ones(5))


def end_in_last_plots(number: signal.Signals) -> None:
    """Send rank 0 a signal while it draws the last plots, for which the others wait in a barrier."""

    def validate(*_: Any, is_last: bool = False, **__: Any) -> None:
        if is_last and dist.get_rank() == 0:
            os.kill(os.getpid(), number)
            time.sleep(60)

    train.Validator.validate = validate


FAULTS: dict[str, Callable[[Any], None]] = {
    "flip_a_bit": flip_a_bit,
    "run_out_of_memory": run_out_of_memory,
    "call_another_collective": call_another_collective,
}


def main() -> None:
    end_at_signals(trains=True)
    fault = sys.argv.pop(1)
    if fault.startswith("SIG"):
        end_in_last_plots(signal.Signals[fault])
        return train.main()
    cause_fault = FAULTS[fault]
    plain = train.train_step

    def train_step(run: Any, step: int, batches: Any) -> Any:
        now = step == (1 if cause_fault is run_out_of_memory else STEP)
        if int(os.environ["RANK"]) == FAULTY_RANK and now:
            cause_fault(run.assembly.model)
        return plain(run, step, batches)

    train.train_step = train_step
    train.main()


if __name__ == "__main__":
    main()
