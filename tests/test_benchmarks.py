"""Benchmarks at their smallest size: each can be imported, and those that need no data print their table."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.results_file import FOLDER_VARIABLE

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")
SLOW = pytest.mark.slow
# Arguments of a small run, words of its last line, and its exit codes: 1 where a limit is asked for.
RUNS = [
    ("mission_figures", [], "a year of a run a day", (0,)),
    ("planner_published", [], "llama3-405b 256k", (0,)),
    ("saved_activations", ["--dim", "64", "--rounds", "1"], "0 of 12 counts off", (0,)),
    pytest.param("layout_parity", ["fsdp 2, zero-2"], "formulas in 1 of the 1", (0,), marks=SLOW),
    pytest.param("checkpoint_stall", ["--rounds", "1", "--dim", "64"], "one copy", (0, 1), marks=SLOW),
    pytest.param("convert_killed", ["--trials", "1"], "1 of 1 ended with equal values", (0,), marks=SLOW),
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


@pytest.mark.parametrize(("name", "arguments", "last", "codes"), RUNS)
def test_a_small_run_prints_its_table(tmp_path, name: str, arguments: list[str], last: str, codes) -> None:
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode in codes, done.stderr
    assert last in done.stdout.splitlines()[-1]


def test_the_steps_that_are_compared_can_be_taken(one_rank) -> None:
    """Those of step_time.py and trainer_overhead.py need a peer's code, or minutes."""
    from benchmarks.step_time import Rossby
    from config import Parallelism

    losses = [Rossby(64, "float32", "sdpa", False, Parallelism())() for _ in range(2)]
    assert losses[0] == losses[1] and torch.isfinite(torch.tensor(losses[0]))
