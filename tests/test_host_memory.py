"""Memory that a step frees is there for the next one."""

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = """
import resource, sys, torch
from jobs.host_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory(torch.device("cpu"))
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library has other settings")
def test_the_next_step_faults_no_pages_in() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", STEPS, how]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, check=True)
        return int(done.stdout)

    assert faults("kept") < 100 < 1_000 < faults("given back")  # 160 MB are 39,000 pages
