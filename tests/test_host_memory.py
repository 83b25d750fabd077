"""Memory that a step frees is reused by the next one, and returned when a validation begins."""

import sys

import pytest

from tests.started_jobs import run_program

STEPS = """
import resource, sys, torch
from training.process_settings import retain_memory
if sys.argv[1] == "kept":
    retain_memory(torch.device("cpu"))
def step():
    activations = [torch.ones(10_000_000) for _ in range(4)]  # 40 MB each
    while activations:
        activations.pop()  # as backward does: the newest first
for _ in range(4):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def number_from(program: str, how: str, local_ranks: int = 1) -> int:
    """Output of the program in its own process."""
    done = run_program(sys.executable, "-c", program, how, LOCAL_WORLD_SIZE=str(local_ranks))
    return int(done.stdout or pytest.fail(done.stderr))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library has other settings")
def test_the_next_step_faults_no_pages_in() -> None:
    assert number_from(STEPS, "kept") < 100
    assert number_from(STEPS, "kept", local_ranks=10_000) > 3_900  # of 39,000: they have little memory each


LEFT = """
import sys, torch
from contextlib import nullcontext
from pathlib import Path
from training.process_settings import return_memory, retain_memory
def held() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
cpu = torch.device("cpu")
retain_memory(cpu)
before = held()
blocks = [torch.ones(10_000_000) for _ in range(8)]  # 40 MB each
del blocks[::2]  # gaps between blocks in use
with return_memory(cpu) if sys.argv[1] == "given back" else nullcontext():
    fields = [torch.ones(15_000_000) for _ in range(4)]  # 60 MB: none fits into the place of one of those
    del fields[:3]
    print(held() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library has no malloc_trim")
def test_a_validation_begins_without_what_steps_left() -> None:
    kept = number_from(LEFT, "kept")  # KiB, of which 330,000 are not used
    assert number_from(LEFT, "given back") < kept - 150_000
